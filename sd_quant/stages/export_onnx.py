"""ONNX files of every part, and for comparison the unquantized file of each quantized part."""

import dataclasses
import hashlib
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from torch import Tensor

from sd_quant.cache import Cache
from sd_quant.config import PRECISE, artifact
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.export.onnx_file import share_weights
from sd_quant.export.parts import trace_part, write_part
from sd_quant.files import atomic_path, sha256, temporary_folder
from sd_quant.inference.schedules import WEIGHTS_ALONE
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.parts import exported
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment, weights_alone
from sd_quant.report.provenance import versions
from sd_quant.source import source_digest

LOG = logging.getLogger(__name__)
Assignment = Mapping[str, LayerAssignment]
GRAPH = "graph.onnx"
# fields of ``LayerAssignment`` that only the report reads
REPORTED = {"role", "reason", "alpha", "output_error", "fixed_alpha_error"}


@dataclass(frozen=True)
class File:
    """An ONNX file that is to be written."""

    part: str
    directory: Path  # that gets onnx/<part>/<part>.onnx
    assignment: Assignment
    delivered: bool = True  # False: only this run compares with it
    suffix: str = ""  # of the file's name; PRECISE: it shares the weights of the file without suffix


def delivered_files(checkpoint: Checkpoint, assignments: Mapping[str, Assignment], directory: Path) -> list[File]:
    """List one file for every exported part; the parts in ``assignments`` are quantized."""
    return [File(part, directory, assignments.get(part, {})) for part in exported(checkpoint.parts())]


def files_of_a_run(
    checkpoint: Checkpoint, assignments: Mapping[str, Assignment], directory: Path, letters: Collection[str] = ()
) -> list[File]:
    """List ``delivered_files``, and before each quantized one an unquantized file of the same part, for comparison.

    The denoiser comes last. If WEIGHTS_ALONE is in the schedule's ``letters``, one more file has unquantized inputs.
    """
    files = []
    for file in reversed(delivered_files(checkpoint, assignments, directory)):
        twin = File(file.part, directory / "full_precision", {}, delivered=False)
        files += [twin, file] if file.part in assignments else [file]
        if WEIGHTS_ALONE in letters and file.part == checkpoint.family.DENOISER:
            files.append(replace(file, assignment=weights_alone(file.assignment), suffix=PRECISE))
    return files


def export_parts(checkpoint: Checkpoint, checkpoint_sha256: str, files: Sequence[File], cache: Cache) -> None:
    """Write the ONNX ``files``, or take them from the cache. Raises ResourceError when the disk is full.

    The weight files of delivered graphs are copied, because onnx refuses files with several hard links. Unquantized
    files for comparison stay links: only runtimes read them, and copies would take many GB in each job of a sweep.
    """
    with progress(len(files), "export") as advance:
        for file in files:
            path = export(checkpoint, checkpoint_sha256, file, cache)
            for weights in onnx_files(path)[1:] if file.delivered else ():
                if weights.stat().st_nlink > 1:
                    with atomic_path(weights) as copy:
                        shutil.copyfile(weights, copy)
            size = sum(each.stat().st_size for each in onnx_files(path))
            LOG.info("%s.onnx%s: %.1f MB", file.part, "" if file.delivered else ", unquantized", size / 1e6)
            advance()


def graph_origin(checkpoint: Checkpoint, checkpoint_sha256: str, part: str) -> dict:
    """Return the cache key of a part's graph without weights: everything on which that graph depends."""
    described = checkpoint.parts()[part]
    return {
        "checkpoint": checkpoint_sha256,
        "source": source_digest("checkpoints.kinds", "export.parts"),
        "versions": versions("torch", "onnx", "onnx-ir", "onnxscript", "diffusers", "transformers"),
        "contract": [repr(described.contract), described.identity],  # knobs may change a part's shapes
        "part": part,
    }


def export(checkpoint: Checkpoint, checkpoint_sha256: str, file: File, cache: Cache) -> Path:
    """Write one ONNX file, or copy it from the cache; return its path.

    The graph without weights is cached for all assignments. A file with a suffix shares the weights of the plain file.
    """
    origin = graph_origin(checkpoint, checkpoint_sha256, file.part)
    path = artifact(file.directory, "onnx", file.part, file.suffix)
    beside = artifact(file.directory, "onnx", file.part) if file.suffix else None

    def write(folder: Path) -> None:
        with temporary_folder(path.parent) as temporary:
            graph = Path(temporary)
            cache.provide("graph", origin, graph, lambda made: ir.save(trace_part(checkpoint, file.part), made / GRAPH))
            write_part(ir.load(graph / GRAPH), checkpoint, file.part, folder / path.name, file.assignment)
            if beside is not None:
                share_weights(folder / path.name, beside)

    key = origin | {"beside": beside and sha256(beside), "assignment": assignment_digest(file.assignment)}
    cache.provide("onnx", key, path.parent, write)
    return path


def assignment_digest(assignment: Assignment) -> str:
    """Return the SHA-256 of the assignment's fields, except ``REPORTED``, on which no exported file depends."""
    content = hashlib.sha256()
    for layer in assignment.values():
        for field in dataclasses.fields(layer):
            if field.name not in REPORTED:
                value = getattr(layer, field.name)
                content.update(f"{field.name}:".encode())
                for part in value if isinstance(value, tuple) else (value,):
                    is_tensor = isinstance(part, Tensor)
                    content.update(part.contiguous().numpy().tobytes() if is_tensor else repr(part).encode())
    return content.hexdigest()
