"""A part of a checkpoint as ONNX: its graph, which is the same for every recipe, and then its weights."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from sd_quant.checkpoints.nemo import Checkpoint
from sd_quant.export.graph import trace
from sd_quant.export.quantized import write_onnx
from sd_quant.models.loading import contracts_of
from sd_quant.models.parts import COMPONENTS, wrap
from sd_quant.models.sdxl import build_modules
from sd_quant.quantization.assignment import LayerAssignment


def trace_part(checkpoint: Checkpoint, part: str) -> ir.Model:
    """The graph of ``part`` (NeMo's name) without its weights. No weight is read."""
    return trace(
        lambda: wrap(build_modules(checkpoint.model_config, checkpoint.clip1, checkpoint.clip2))[part],
        contracts_of(checkpoint)[part],
    )


def write_part(
    graph: ir.Model, checkpoint: Checkpoint, part: str, path: Path, assignment: Mapping[str, LayerAssignment]
) -> None:
    """``trace_part``'s graph, which is used up, with the checkpoint's weights, one in memory at a time."""
    component, prefix = COMPONENTS[part]
    source = checkpoint.components[component]
    write_onnx(
        graph,
        path,
        inputs=len(contracts_of(checkpoint)[part].inputs),
        prefix=prefix,
        read=lambda name: source[name.removeprefix(prefix)],
        assignment=assignment,
    )
