"""A folder that optimum-intel and OpenVINO GenAI load, of SDXL, Stable Diffusion 1, 2 and 3, and Flux.

Each network is exported to ONNX as a run exports it, and OpenVINO's own reader converts that: quantized values and
their quantizers are kept, and OpenVINO multiplies integers on processors with VNNI. On other processors its sums of
INT8 products saturate; the consumer then passes ``ov_config={"LP_TRANSFORMS_MODE": "NO"}``, see ``engines.openvino``.

optimum-intel passes inputs and reads most outputs by name, and casts what it passes. GenAI reads text by the number of
the output, casts nothing, and passes a UNet's time as int64 [1]: a sampler whose times have fractions loses them, as in
optimum-intel's own files. GenAI 2026.4.1 shifts Flux.1's schedule by Flux.2's rule, which depends on the number of
steps: images of more than one step differ from diffusers'. GenAI's tokenizers are graphs too; openvino-tokenizers'
command converts them from the tokenizers here.

Alternative not taken: optimum-intel's own export, whose quantizer would choose its own ranges.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sd_quant.errors import ArtifactError
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.exported_parts import write_folder
from sd_quant.text import one_line

FACTS = ForeignFormat(
    "openvino",
    consumer="optimum-intel",
    tried=("optimum-intel==2.2.0", "openvino==2026.4.1"),
    loading="from optimum.intel import OVDiffusionPipeline\n\n"
    'settings = {{"INFERENCE_PRECISION_HINT": "f32"}}\n'
    "pipeline = OVDiffusionPipeline.from_pretrained({folder!r}, ov_config=settings)",
    runtime="openvino",
    also="OpenVINO GenAI opens it too, once its tokenizers are made of the ones here. In place of a T5 that is missing "
    "it passes 77 zeros, and 2026.4.1 draws Flux.1 with the schedule of Flux.2.\n\n"
    "    pip install openvino-genai==2026.4.1.0 'openvino-tokenizers[transformers]==2026.4.1.0'\n"
    '    for tokenizer in {folder}/tokenizer*; do convert_tokenizer "$tokenizer" --output "$tokenizer"; done\n\n'
    "```python\nimport openvino_genai\n\n"
    'pipeline = openvino_genai.Text2ImagePipeline({folder!r}, "CPU", INFERENCE_PRECISION_HINT="f32")\n```',
)
MODEL = "openvino_model.xml"  # beside its .bin


def convert(onnx: Path, place: Path) -> None:
    """Write the network of the file ``onnx`` in OpenVINO's format into the folder ``place``.

    Memory does not grow with the weights, except for pages of mapped files, which the kernel can drop. Raises
    ArtifactError when OpenVINO cannot read the network.
    """
    import openvino

    try:
        model = openvino.Core().read_model(onnx)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot read the exported {place.name}: {one_line(error)}") from error
    if place.name == "unet":
        take_whole_time(model)
    openvino.save_model(model, place / MODEL, compress_to_fp16=False)  # fp32 is there on purpose


def take_whole_time(model: Any) -> None:
    """Change the input ``timestep`` of a UNet, in place, from fp32 [] to int64 [1]."""
    from openvino import opset13

    index = [port.any_name for port in model.inputs].index("timestep")
    number, time = model.get_parameters()[index], opset13.parameter([1], np.int64, name="timestep")
    time.output(0).set_names({"timestep"})
    number.output(0).replace(opset13.squeeze(opset13.convert(time, "f32"), [0]).output(0))
    model.replace_parameter(index, time)
    model.validate_nodes_and_infer_types()


# Adds ``<network>/openvino_model.xml`` and ``.bin`` to a pipeline's folder
write = partial(write_folder, convert=convert)
