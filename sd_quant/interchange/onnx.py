"""A folder that optimum-onnx loads: ``ORTDiffusionPipeline.from_pretrained(folder)``, of SDXL, SD 1, 2 and 3, and Flux.

Each network is exported to ONNX as a run exports it. ONNX Runtime's CPU provider runs most of the quantizers in
floating point, so there the folder is for correctness; its GPU providers decide for themselves. Alternative not taken:
optimum's own export and ONNX Runtime's quantizer, which would choose its own ranges.
"""

from functools import partial
from pathlib import Path

from sd_quant.engines.onnx_input import onnx_files
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.exported_parts import write_folder

FACTS = ForeignFormat(
    "onnx",
    consumer="optimum-onnx",
    tried=("optimum-onnx==0.1.0", "onnxruntime==1.31.1"),
    loading="from optimum.onnxruntime import ORTDiffusionPipeline\n\n"
    "pipeline = ORTDiffusionPipeline.from_pretrained({folder!r})",
    runtime="onnxruntime",
)


def move(onnx: Path, place: Path) -> None:
    """Move an ONNX file, and its weights if they are beside it, into the folder ``place``."""
    for file in reversed(onnx_files(onnx)):  # the graph last
        file.replace(place / file.name)


# Adds ``<network>/model.onnx``, and ``model.onnx.data`` of a large one, to a pipeline's folder
write = partial(write_folder, convert=move)
