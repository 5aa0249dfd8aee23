"""A folder that optimum-intel loads: ``OVStableDiffusionXLPipeline.from_pretrained(folder)``, or that of SD 1 and 2.

Each network is exported to ONNX as a run exports it, and OpenVINO's own reader makes its format of that: codes and
their quantizers come through, and OpenVINO multiplies the codes on processors with VNNI. On others its sums of
INT8 products saturate; the consumer then passes ``ov_config={"LP_TRANSFORMS_MODE": "NO"}``, see ``engines.openvino``.
The road not taken is optimum-intel's own export, whose quantizer would choose its own ranges.
"""

from collections.abc import Mapping
from pathlib import Path

from sd_quant.errors import ArtifactError
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.exported_parts import write_folder
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.text import one_line

FACTS = ForeignFormat(
    "openvino",
    consumer="optimum-intel",
    tried=("optimum-intel==2.2.0", "openvino==2026.4.1"),
    loading="from optimum.intel import OVDiffusionPipeline\n\n"
    'settings = {{"INFERENCE_PRECISION_HINT": "f32"}}\n'
    "pipeline = OVDiffusionPipeline.from_pretrained({folder!r}, ov_config=settings)",
    runtime="openvino",
)
MODEL = "openvino_model.xml"  # beside its .bin


def write(checkpoint: Checkpoint, assignment: Mapping[str, LayerAssignment], folder: Path) -> Path:
    """Add ``<network>/openvino_model.xml`` and ``.bin`` to the pipeline ``folder``, which has everything else.

    Inputs, outputs and their dtypes are those of ``exported_parts``. Memory does not grow with the weights, but for
    pages of mapped files, which the kernel can drop.
    Raises ArtifactError when OpenVINO cannot read an exported network.
    """
    return write_folder(checkpoint, assignment, folder, pipelines="OV", convert=convert)


def convert(onnx: Path, place: Path) -> None:
    """Write the network of the file ``onnx`` in OpenVINO's format into the folder ``place``."""
    import openvino

    try:
        model = openvino.Core().read_model(onnx)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot read the exported {place.name}: {one_line(error)}") from error
    openvino.save_model(model, place / MODEL, compress_to_fp16=False)  # fp32 is there on purpose
