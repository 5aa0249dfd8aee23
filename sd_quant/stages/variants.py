"""The three versions of the model that are compared: framework, unquantized engine, quantized engine.

A pool opens a part by its key: the framework's by its name, an engine's by the file that it is loaded from, what torch
computes itself by ``Native``, and the simulation by ``SIMULATED``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sd_quant.config import Infer, artifact
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool, Variant
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.memory import fits, gpu_memory_of_variants, memory_of_variants
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages.load import Loaded
from sd_quant.stages.opening import open_file, open_simulated, open_torch, open_torch_engine
from sd_quant.stages.resources import workload_of

FRAMEWORK, FULL_PRECISION, QUANTIZED = "framework", "full_precision", "quantized"
SIMULATED = "simulated"  # the key of the denoiser that torch computes as if it were quantized


@dataclass(frozen=True)
class Native:
    """The key of a part that torch computes as an engine of its own, beside the framework's."""

    part: str
    quantized: bool


@dataclass(frozen=True)
class Variants:
    engines: Mapping[str, Mapping[str, Engine]]  # FRAMEWORK, FULL_PRECISION and QUANTIZED, each part to its engine
    pool: Pool  # where they are opened
    together: bool  # memory holds all of them at once
    simulated: str | None  # why the quantized one is no engine but the simulation, None where it is one

    @property
    def simulation(self) -> TorchEngine:
        return self.pool[SIMULATED]  # type: ignore[return-value]


def variants_of(
    loaded: Loaded, infer: Infer, assignment: Mapping[str, LayerAssignment], directory: Path, simulated: str | None
) -> Variants:
    """Nothing is open yet. Where memory does not hold everything, one part is open at a time."""
    work = workload_of(infer)
    memory, gpu = memory_of_variants(loaded.parameters, work), gpu_memory_of_variants(loaded.parameters, work)
    together = fits(memory, "all versions of the model", gpu)
    pool = Pool(partial(open_engine, loaded.checkpoint, infer, assignment), most=None if together else 1)
    keys = keys_of(loaded, infer.engine, directory, simulated is not None)
    return Variants({name: Variant(pool, parts) for name, parts in keys.items()}, pool, together, simulated)


def keys_of(loaded: Loaded, engine: str, directory: Path, simulated: bool) -> dict[str, dict[str, object]]:
    """The key of every part of each version; only the denoiser differs between unquantized and quantized."""
    parts, denoiser, kind = list(loaded.parts), loaded.denoiser, RUNTIMES[engine].file
    framework: dict[str, object] = {part: part for part in parts}
    full_precision: dict[str, object]
    quantized: object
    if kind is None:
        full_precision = {part: Native(part, quantized=False) for part in parts}
        quantized = Native(denoiser, quantized=True)
    else:
        files: dict[str, object] = {part: artifact(directory, kind, part) for part in parts}
        full_precision = files | {denoiser: artifact(directory / "full_precision", kind, denoiser)}
        quantized = SIMULATED if simulated else files[denoiser]
    return {FRAMEWORK: framework, FULL_PRECISION: full_precision, QUANTIZED: full_precision | {denoiser: quantized}}


def open_engine(
    checkpoint: Checkpoint, infer: Infer, assignment: Mapping[str, LayerAssignment], key: str | Path | Native
) -> Engine:
    """The engine of a key; ``assignment`` is what a quantized part of torch's is made from."""
    if isinstance(key, Path):
        return open_file(key, infer)
    if isinstance(key, Native):
        return open_torch_engine(checkpoint, infer, key.part, assignment if key.quantized else None)
    return open_simulated(checkpoint, assignment) if key == SIMULATED else open_torch(checkpoint, infer, key)
