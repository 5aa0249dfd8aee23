"""A part of a checkpoint as ONNX: its graph, which is the same for every recipe, and then its weights."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import trace
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment

SAMPLES_PER_IMAGE = "samples_a_picture"  # in a denoiser's file: of one call, with guidance


def trace_part(checkpoint: Checkpoint, part: str) -> ir.Model:
    """The graph of ``part`` without its weights. No weight is read."""
    described = checkpoint.parts()[part]
    return trace(lambda: described.wrap(checkpoint.build()[described.component]), described.contract)


def write_part(
    graph: ir.Model, checkpoint: Checkpoint, part: str, path: Path, assignment: Mapping[str, LayerAssignment]
) -> None:
    """``trace_part``'s graph, which is used up, with the checkpoint's weights, one in memory at a time."""
    described = checkpoint.parts()[part]
    source, prefix = checkpoint.components[described.component], described.prefix
    if part == checkpoint.family.DENOISER:
        graph.metadata_props[SAMPLES_PER_IMAGE] = "2" if checkpoint.family.GUIDES else "1"
    write_onnx(
        graph,
        path,
        inputs=len(described.contract.inputs),
        prefix=prefix,
        read=lambda name: source[name.removeprefix(prefix)],
        assignment=assignment,
    )
