"""The variants of the model that are compared: torch (the framework), unquantized engine, quantized engine.

With ``compiled_baseline`` there is a fourth: torch.compile, of which only the denoiser is timed. All variants share one
pool of engines. A key of the pool is a part's name (opened by torch), a path (opened by the runtime of that file),
``Native`` (torch is the engine under test) or ``Simulated`` (torch with ModelOpt's fake quantizers).
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sd_quant.config import PRECISE, Infer, artifact
from sd_quant.engines import RUNTIMES, why_not
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool, Variant
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.schedules import FULL, WEIGHTS_ALONE, engine_of_letter
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.parts import exported
from sd_quant.quantization.assignment import LayerAssignment, weights_alone
from sd_quant.stages import open_parts
from sd_quant.stages.export_onnx import assignment_digest
from sd_quant.stages.load import Loaded
from sd_quant.stages.resources import TORCH_BYTES, Needs, by_torch, memory_of_variants, workload_of
from sd_quant.stages.session import Session
from sd_quant.stages.shared import Shared

LOG = logging.getLogger(__name__)
FRAMEWORK, FULL_PRECISION, QUANTIZED = "framework", "full_precision", "quantized"
COMPILED_FRAMEWORK = "compiled_framework"
Assignments = Mapping[str, Mapping[str, LayerAssignment]]  # of the quantized parts, by part


@dataclass(frozen=True)
class Simulated:
    """The key in the engine pool of a part that torch simulates as quantized, with ModelOpt's fake quantizers."""

    part: str
    weights_alone: bool = False  # inputs stay in high precision, as in a schedule's steps ``h``


@dataclass(frozen=True)
class Native:
    """The key in the engine pool of a part for which torch is the engine under test, apart from the framework's."""

    part: str
    quantized: bool
    weights_alone: bool = False  # as in ``Simulated``
    compiled: bool = False  # by torch.compile, whatever ``infer.engine`` is


@dataclass(frozen=True)
class Variants:
    """The engines of all variants of a run, each opened at its first use."""

    loaded: Loaded
    assignments: Assignments
    shared: Shared
    # by variant, which is FRAMEWORK, FULL_PRECISION, QUANTIZED or COMPILED_FRAMEWORK, and part
    engines: Mapping[str, Mapping[str, Engine]]
    pool: Pool  # opens and closes the engines
    together: bool  # whether memory holds all engines at once
    simulated: str | None  # the reason why the quantized variant is simulated; None where the engine computes it

    @property
    def engine(self) -> str:
        """The runtime of the unquantized and the quantized variant."""
        return self.loaded.infer.engine

    @property
    def directory(self) -> Path:
        """The folder of the run's files."""
        return self.shared.directory

    @property
    def assignment(self) -> Mapping[str, LayerAssignment]:
        """The denoiser's assignment."""
        return self.assignments[self.loaded.denoiser]

    def digests(self) -> dict[str, str]:
        """Return a digest of the assignment of each quantized part, by part."""
        return {part: assignment_digest(each) for part, each in sorted(self.assignments.items())}

    def simulation(self, part: str) -> TorchEngine:
        """Return a quantized part simulated by torch with ModelOpt's fake quantizers."""
        return self.pool[Simulated(part)]  # type: ignore[return-value]

    def make_room(self) -> None:
        """Close all engines if memory does not hold all at once."""
        if not self.together:
            self.pool.close()


def variants_of(
    loaded: Loaded, assignments: Assignments, shared: Shared, simulated: str | None, compiled_baseline: bool = False
) -> Variants:
    """Return the variants of a run, with no engine open yet. ``simulated``: see ``why_simulated``.

    If memory does not hold all engines, one engine is open at a time.
    """
    infer, parameters, work = loaded.infer, loaded.parameters, workload_of(loaded.infer)
    copies = len(loaded.denoisers) + (WEIGHTS_ALONE in infer.precise_letters)
    all_of_them = Needs(*memory_of_variants(parameters, work, copies))
    keys = keys_of(loaded, assignments, shared.directory, simulated is not None)
    if compiled_baseline:
        weights = sum(parameters[part] for part in loaded.denoisers)
        all_of_them |= Needs({"compiled": TORCH_BYTES * weights}, {"compiled": work.bytes_on_gpu * weights})
        keys[COMPILED_FRAMEWORK] = {part: Native(part, quantized=False, compiled=True) for part in loaded.denoisers}
    together = loaded.together(work, all_of_them, "all variants of the model")

    pool = loaded.engines(partial(open_engine, loaded.checkpoint, infer, assignments), together)
    own, full = (keys[name][loaded.denoiser] for name in (QUANTIZED, FULL_PRECISION))
    keys[QUANTIZED] |= keys_of_letters(loaded.denoiser, own, full, infer.precise_letters)
    engines = {name: Variant(pool, parts) for name, parts in keys.items()}
    return Variants(loaded, assignments, shared, engines, pool, together, simulated)


def why_simulated(loaded: Loaded, formats: Mapping[str, Collection[str]]) -> str | None:
    """Return why the denoisers must be simulated (engine lacks one of ``formats``, or no exported file), else None."""
    engine = loaded.infer.engine
    refused = {part: loaded.parts[part].refused for part in loaded.denoisers}
    lacking = [f"the {part} is not exported, because {because}" for part, because in refused.items() if because]
    reason = why_not(engine, formats) or ("; ".join(lacking) if RUNTIMES[engine].file is not None else None) or None
    if reason:
        LOG.info("%s: images come from the simulation in torch, and nothing is timed", reason)
    return reason


def torch_variant(session: Session, infer: Infer, assignments: Assignments) -> Variant:
    """Return the model in torch, parts in ``assignments`` simulated; one part is open at a time if memory is short."""
    keys: dict[str, object] = {part: Simulated(part) if part in assignments else part for part in session.parts}
    keys |= keys_of_letters(session.denoiser, keys[session.denoiser], session.denoiser, infer.precise_letters)
    together = session.together(by_torch(workload_of(infer)))
    return Variant(session.engines(partial(open_engine, session.checkpoint, infer, assignments), together), keys)


def keys_of(
    loaded: Loaded, assigned: Collection[str], directory: Path, simulated: bool
) -> dict[str, dict[str, object]]:
    """Return keys in the engine pool by variant and part; quantized and unquantized differ in ``assigned`` parts."""
    parts, kind = list(loaded.parts), RUNTIMES[loaded.infer.engine].file
    framework: dict[str, object] = {part: part for part in parts}
    full_precision: dict[str, object]
    quantized: dict[str, object]
    if kind is None:
        full_precision = {part: Native(part, quantized=False) for part in parts}
        quantized = {part: Native(part, quantized=True) for part in assigned}
    else:
        files: dict[str, object] = {part: artifact(directory, kind, part) for part in exported(loaded.parts)}
        twins = {part: artifact(directory / "full_precision", kind, part) for part in assigned if part in files}
        full_precision, quantized = framework | files | twins, {part: files[part] for part in twins}
    if simulated:
        quantized |= {part: Simulated(part) for part in loaded.denoisers}
    return {FRAMEWORK: framework, FULL_PRECISION: full_precision, QUANTIZED: full_precision | quantized}


def keys_of_letters(denoiser: str, own: Any, full_precision: object, letters: Collection[str]) -> dict[str, object]:
    """Return the engine pool's keys of the denoiser in precise steps (``letters``); ``own``: its key when quantized."""
    precise = own
    if isinstance(own, Path):
        precise = own.with_stem(f"{own.stem}{PRECISE}")
    elif isinstance(own, Simulated | Native):
        precise = replace(own, weights_alone=True)
    by_letter = {WEIGHTS_ALONE: precise, FULL: full_precision}
    return {engine_of_letter(denoiser, letter): by_letter[letter] for letter in sorted(letters)}


def open_engine(
    checkpoint: Checkpoint, infer: Infer, assignments: Assignments, key: str | Path | Native | Simulated
) -> Engine:
    """Open the engine of a pool ``key``; torch engines quantize a part by its entry in ``assignments``."""
    if isinstance(key, Path):
        return open_parts.open_file(key, infer)
    if isinstance(key, str):
        return open_parts.open_torch(checkpoint, infer, key)
    if isinstance(key, Native) and key.compiled:
        return open_parts.open_compiled(checkpoint, infer, key.part)
    assignment = assignments.get(key.part, {})
    if key.weights_alone:
        assignment = weights_alone(assignment)
    if isinstance(key, Native):
        return open_parts.open_torch_engine(checkpoint, infer, key.part, assignment if key.quantized else None)
    return open_parts.open_simulated(checkpoint, assignment, key.part)
