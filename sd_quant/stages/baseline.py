"""The full-precision model with which ``judge`` compares candidates, and the settings of that comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_quant.config import CacheFolder, Infer, Judge, JudgeJob, Metrics, Model, Timing
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool, Variant
from sd_quant.models.checkpoint import denoisers_of
from sd_quant.report.provenance import provenance
from sd_quant.stages.compare import framework_images
from sd_quant.stages.open_parts import open_torch
from sd_quant.stages.resources import Needs, by_torch, part_needs, workload_of
from sd_quant.stages.session import Session, open_session
from sd_quant.stages.shared import Shared, VariantOutputs, cache_of


@dataclass(frozen=True)
class Baseline:
    """The full-precision model with which candidates are compared, and the settings of that comparison."""

    session: Session
    directory: Path  # for files in progress
    model: Model
    infer: Infer
    judge: Judge
    timing: Timing
    cache: CacheFolder
    metrics: Metrics
    facts: dict  # of the full-precision model, from ``provenance``
    together: bool  # whether memory holds two denoisers

    @property
    def prompts(self) -> list[str]:
        return self.infer.prompt_list()

    @property
    def denoiser(self) -> str:
        return self.session.denoiser

    def engines(self, others: Mapping[str, Callable[[], Engine]] = {}) -> Pool:
        """Return a pool of the model's parts and ``others``, by name; it opens one at a time if memory is short."""

        def open_engine(key: str) -> Engine:
            return others[key]() if key in others else open_torch(self.session.checkpoint, self.infer, key)

        return self.session.engines(open_engine, self.together)

    def variant(self, pool: Pool, keys: Mapping[str, str] = {}) -> Variant:
        """Return the model with engines of the ``pool``; ``keys``: by part, pool keys of engines to use instead."""
        return Variant(pool, {part: part for part in self.session.parts} | dict(keys))

    def outputs(self) -> VariantOutputs:
        """Make the full-precision images, and inputs and outputs of parts, or take them from the cache."""
        pool = self.engines()
        try:
            shared = Shared(self.facts, self.directory, cache_of(self.cache))
            return framework_images(self.session.checkpoint, self.variant(pool), self.infer, shared)
        finally:
            pool.close()


def baseline_of(job: JudgeJob, directory: Path) -> Baseline:
    """Open and check the full-precision model; ``directory`` is the folder of the results."""
    work = by_torch(workload_of(job.infer))
    session = open_session(job.model, job.infer, lambda session: part_needs(session.parameters, work), directory)
    weights = {"the candidate": 4.0 * sum(session.parameters[part] for part in denoisers_of(session.checkpoint))}
    return Baseline(
        session, directory, job.model, job.infer, job.judge, job.timing, job.cache, job.metrics,
        provenance(job.model.inputs() | job.infer.inputs(), []),
        session.together(work, Needs(weights, weights), "the model and a candidate"),
    )  # fmt: skip
