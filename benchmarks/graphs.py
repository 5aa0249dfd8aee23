"""Exports graphs of several assignments from one trace."""

from collections.abc import Mapping
from pathlib import Path

from common import Subject

from sd_quant.config import artifact
from sd_quant.export.parts import trace_part, write_part
from sd_quant.export.tracing import copy_of
from sd_quant.quantization.assignment import LayerAssignment

UNQUANTIZED = "unquantized"


def export(subject: Subject, assignments: Mapping[str, Mapping[str, LayerAssignment]], folder: Path) -> dict[str, Path]:
    """Trace the denoiser once and write a file for each assignment, by the assignment's name."""
    checkpoint, part = subject.model.checkpoint, subject.denoiser
    graph = trace_part(checkpoint, part)
    paths = {name: artifact(folder / name, "onnx", part) for name in assignments}
    for name, assignment in assignments.items():
        write_part(copy_of(graph), checkpoint, part, paths[name], assignment)
    return paths
