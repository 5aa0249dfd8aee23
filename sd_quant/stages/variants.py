"""Which engine computes each part of the three versions that are compared.

A pool opens a part by its key: the framework's by its name, an engine's by the file that it is loaded from, what torch
computes itself by ``Native``, and the simulation by ``SIMULATED``.
"""

from dataclasses import dataclass
from pathlib import Path

from sd_quant.config import Infer, artifact
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool, Side
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.stages.compare import FRAMEWORK, FULL_PRECISION, QUANTIZED
from sd_quant.stages.export_onnx import Assignment
from sd_quant.stages.opening import open_file, open_simulated, open_torch, open_torch_engine

SIMULATED = "simulated"  # the key of the denoiser that torch computes as if it were quantized


@dataclass(frozen=True)
class Native:
    """The key of a part that torch computes as an engine of its own, beside the framework's."""

    part: str
    quantized: bool


def sides_of(checkpoint: Checkpoint, pool: Pool, engine: str, directory: Path, simulated: bool) -> dict[str, Side]:
    """The keys of every part of each version; only the denoiser differs between unquantized and quantized."""
    parts, denoiser = list(checkpoint.parts()), checkpoint.family.DENOISER
    framework = Side(pool, {part: part for part in parts})
    kind = RUNTIMES[engine].file
    if kind is None:
        full_precision = {part: Native(part, quantized=False) for part in parts}
        quantized = full_precision | {denoiser: Native(denoiser, quantized=True)}
        return {FRAMEWORK: framework, FULL_PRECISION: Side(pool, full_precision), QUANTIZED: Side(pool, quantized)}
    files = {part: artifact(directory, kind, part) for part in parts}
    unquantized = {denoiser: artifact(directory / "full_precision", kind, denoiser)}
    return {
        FRAMEWORK: framework,
        FULL_PRECISION: Side(pool, files | unquantized),
        QUANTIZED: Side(pool, files | ({denoiser: SIMULATED} if simulated else {})),
    }


def open_engine(checkpoint: Checkpoint, infer: Infer, assignment: Assignment, key: str | Path | Native) -> Engine:
    """``assignment`` is what a quantized part of torch's is made from."""
    if isinstance(key, Path):
        return open_file(key, infer)
    if isinstance(key, Native):
        return open_torch_engine(checkpoint, infer, key.part, assignment if key.quantized else None)
    return open_simulated(checkpoint, assignment) if key == SIMULATED else open_torch(checkpoint, infer, key)
