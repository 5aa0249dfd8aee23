"""Export a part of a checkpoint in two steps: its graph, which all quantization recipes share, then its weights."""

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import onnx_ir as ir

from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import trace
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment

AXES = "axes"  # metadata of a part's file: the formulas of dynamic axes, see ``models.parts.Axis``
SAMPLES_PER_IMAGE = "samples_a_picture"  # metadata of a denoiser's file: samples per image in one call with guidance


def trace_part(checkpoint: Checkpoint, part: str) -> ir.Model:
    """Trace the ONNX graph of a part, with its weights as named inputs. No weight is read."""
    description = checkpoint.parts()[part]
    return trace(lambda: description.wrap(checkpoint.build()[description.component]), description.contract)


def write_part(
    graph: ir.Model, checkpoint: Checkpoint, part: str, path: Path, assignment: Mapping[str, LayerAssignment]
) -> None:
    """Write the ``graph`` of ``trace_part`` with the checkpoint's weights, quantized according to ``assignment``.

    ``graph`` is changed in place. Only one weight is in memory at a time.
    """
    description = checkpoint.parts()[part]
    weights, prefix = checkpoint.components[description.component], description.prefix
    if part == checkpoint.family.DENOISER:
        graph.metadata_props[SAMPLES_PER_IMAGE] = "2" if checkpoint.family.GUIDES else "1"
    if axes := description.contract.axes:
        graph.metadata_props[AXES] = json.dumps({name: astuple(axis) for name, axis in axes})
    write_onnx(
        graph,
        path,
        inputs=len(description.contract.inputs),
        prefix=prefix,
        read=lambda name: weights[name.removeprefix(prefix)],
        assignment=assignment,
    )
