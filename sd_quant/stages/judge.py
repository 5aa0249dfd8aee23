"""Quantized checkpoints of anybody, and runs of ours, judged by one rule: the same prompts, seeds and full precision.

Each candidate gets a folder as a job of a sweep has it, so everything that shows a sweep shows candidates: its images
beside their full-precision twins, ``layers.csv`` with the error of each layer, and a record. All are opened before
anything is computed, so that a file which is not understood costs no time. One network is in memory at a time where it
does not hold two.

Where the library that a candidate is made for computes here, it makes the images again, which says whether the
candidate was understood, and it is timed in the same rounds as torch in full precision.
"""

import dataclasses
import json
import logging
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from sd_quant.cache import Cache, locked
from sd_quant.config import CacheFolder, Infer, Judge, JudgeJob, Model, QuantizeJob, Timing, is_run, run_job
from sd_quant.devices import threads
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool, Variant
from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ConfigError, SdQuantError, of_the_machine
from sd_quant.files import digest, write_json
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Generated
from sd_quant.interchange import format_of
from sd_quant.interchange.errors import LayerErrors, alone, layer_errors
from sd_quant.knobs import read
from sd_quant.metrics.fidelity import fidelity, psnr, summary
from sd_quant.metrics.images import score_pairs
from sd_quant.metrics.intervals import ratio_interval
from sd_quant.metrics.memory import StageTimer, peak_cuda_memory_bytes
from sd_quant.models.checkpoint import Checkpoint, denoiser_of, part_parameters, samples_per_image
from sd_quant.numbers import relative_error
from sd_quant.places import output_path, shown, url
from sd_quant.progress import progress
from sd_quant.report.candidates import HIGH_PRECISION
from sd_quant.report.csv_files import write_csv
from sd_quant.report.provenance import provenance
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import (
    DONE,
    SCHEMA_VERSION,
    Explained,
    Hurting,
    ImageScores,
    Judged,
    JudgedRuntime,
    Knobs,
    Record,
    Stage,
    at,
    explained,
    read_object,
    weights_sha256,
    write_record,
)
from sd_quant.report.summary import FAILURE, LOCK, PROVENANCE, SWEEP, read_sweep
from sd_quant.report.table import sweep_table
from sd_quant.simulation.sensitivity import guided
from sd_quant.source import source_digest
from sd_quant.stages.compare import Comparison, framework_images, save_pairs
from sd_quant.stages.generate import generate
from sd_quant.stages.job_folder import check_own, finished, remove_leftovers, remove_unfinished
from sd_quant.stages.latency import denoiser_rounds
from sd_quant.stages.open_parts import open_torch
from sd_quant.stages.resources import Needs, by_torch, part_needs, workload_of
from sd_quant.stages.session import Session, open_session, open_unchecked
from sd_quant.stages.subjects import JudgedWith, Subject, subject_of
from sd_quant.stages.variants import FRAMEWORK, QUANTIZED
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
HURTING = 10  # layers that a record names
THEIRS, LIBRARY = "theirs", "library"  # keys of a candidate's denoiser: as its reader says, and by its own library


@dataclass(frozen=True)
class Court:
    """What every candidate is judged by."""

    session: Session
    model: Model
    infer: Infer
    judge: Judge
    timing: Timing
    cache: Cache
    cache_folder: CacheFolder
    facts: dict  # as ``provenance`` has them, of the full-precision model
    together: bool  # whether memory holds two denoisers

    @property
    def checkpoint(self) -> Checkpoint:
        return self.session.checkpoint

    @property
    def prompts(self) -> list[str]:
        return self.infer.prompt_list()

    @property
    def denoiser(self) -> str:
        return self.session.denoiser


def judge(job: JudgeJob, directory: Path) -> None:
    """Judge the job's candidates in ``directory``, which becomes a sweep's folder; each is a job of it.

    Candidates that were judged there before by the same rule are not judged again.
    Raises what the readers raise, before anything is computed.
    """
    torch.set_num_threads(threads())
    check_own(directory, marks=(SWEEP,))
    with locked(directory / LOCK, f"waiting for another process, which works in {directory}"):
        if at(read_object(directory / SWEEP), "jobs"):
            raise ConfigError(f"{directory} holds a sweep of quantize; set hydra.run.dir to another folder")
        remove_unfinished(directory)
        court = court_of(job, directory)
        subjects = subjects_of(job.judge, court, directory)
        write_json(directory / SWEEP, plan_of(job))
        try:
            judge_all(subjects, court, directory)
        finally:  # those that are judged are shown, whatever became of the others
            page = rebuild(directory)
            print(sweep_table(read_sweep(directory)))
            print(f"report: {url(page)}", flush=True)


def plan_of(job: JudgeJob) -> dict:
    """``sweep.json`` of a folder with candidates alone."""
    return {
        "schema_version": 1,
        "command": ["sd-quant", "judge", *sys.argv[1:]],
        "varied": [],
        "jobs": [],
        "candidates": job.judge.planned(),
        "judge": dataclasses.asdict(job.judge),
    }


def check_candidates(job: QuantizeJob) -> None:
    """Raises what a reader raises for the first candidate that it cannot open; runs are not looked at."""
    checkpoint = open_unchecked(job.model).checkpoint
    for path in job.judge.named().values():
        if not is_run(path):
            format_of(path).module.read(path, checkpoint)


def judge_sweep(directory: Path) -> None:
    """Judge the candidates of a sweep in its folder, by the model and the images of its first finished job.

    Nothing happens where there are none, or no job is done.
    """
    stated = at(read_object(directory / SWEEP), "judge")
    done = [job for job in read_sweep(directory).own if job.status == DONE]
    if not done or not at(stated, "candidates"):
        return
    judge = read(Judge, stated, "judge.")  # the sweep's own, because jobs that were done before know of no later ones
    court = replace(court_of(run_job(str(done[0].directory)), directory), judge=judge)
    judge_all(subjects_of(judge, court, directory), court, directory)


def court_of(job: JudgeJob | QuantizeJob, directory: Path) -> Court:
    """The full-precision model, checked, and all that candidates are compared by."""
    work = by_torch(workload_of(job.infer))
    session = open_session(job.model, job.infer, lambda session: part_needs(session.parameters, work), directory)
    weights = {"the candidate": 4.0 * session.parameters[session.denoiser]}
    return Court(
        session, job.model, job.infer, job.judge, job.timing,
        Cache(output_path(job.cache.dir) if job.cache.dir else None, job.cache.limit_gb * 1e9), job.cache,
        provenance(job.model.inputs() | job.infer.inputs(), []),
        session.together(work, Needs(weights, weights), "the model and a candidate"),
    )  # fmt: skip


def subjects_of(judge: Judge, court: Court, directory: Path) -> list[Subject]:
    """Every candidate, opened. Raises what the first that cannot be opened raises.

    Raises ConfigError for one that lies in its own folder of results, or that around this.
    """
    sha256 = weights_sha256(court.facts)
    runs = JudgedWith(court.model, court.infer, court.cache_folder, directory, judge.trust_runs)
    for name, path in judge.named().items():
        folder, given = (directory / name).resolve(), path.resolve()
        if folder == given or folder in given.parents or given in folder.parents:
            raise ConfigError(
                f"the candidate {path} and the folder of its results, {folder}, lie in each other; set hydra.run.dir "
                "to another folder"
            )
    return [subject_of(name, path, court.session, sha256, runs) for name, path in judge.named().items()]


def judge_all(subjects: Sequence[Subject], court: Court, directory: Path) -> None:
    """Judge each in its own folder. One that fails leaves why, and the others go on; raises what the first raised."""
    marks = {each.name: mark_of(each, court) for each in subjects}
    left = [each for each in subjects if finished(directory / each.name, marks[each.name]) is None]
    if done := len(subjects) - len(left):
        LOG.info("%d of %d candidates were judged before", done, len(subjects))
    if not left:
        return
    reference, failure = reference_of(court, directory), None
    for number, subject in enumerate(left, start=1):
        LOG.info("candidate %d of %d: %s, %s", number, len(left), subject.name, subject.maker)
        folder = directory / subject.name
        folder.mkdir(exist_ok=True)
        check_own(folder)
        with locked(folder / LOCK, f"waiting for another process, which works in {folder}"):
            remove_leftovers(folder)
            try:
                judge_one(subject, court, reference, marks[subject.name], folder)
            except Exception as error:
                fault = of_the_machine(error)
                refused = error if fault is None else fault
                if not isinstance(refused, SdQuantError):
                    raise
                LOG.error("%s: %s", subject.name, refused)
                reason = {"status": "failed", "reason": str(refused), "exit_code": refused.exit_code}
                write_json(folder / FAILURE, reason)
                failure = failure or refused
    if failure is not None:
        raise failure


def reference_of(court: Court, directory: Path) -> Comparison:
    """What the model in full precision makes of the prompts."""
    pool = engines_of(court)
    try:
        framework = variant_of(court, pool, court.denoiser)
        return framework_images(
            court.checkpoint, framework, court.prompts, court.infer, court.facts, directory, court.cache
        )
    finally:
        pool.close()


def engines_of(court: Court, others: Mapping[str, Callable[[], Engine]] = MappingProxyType({})) -> Pool:
    """The model's parts by name, and ``others`` by theirs; one at a time where memory does not hold two denoisers."""

    def open_engine(key: str) -> Engine:
        return others[key]() if key in others else open_torch(court.checkpoint, court.infer, key)

    return court.session.engines(open_engine, court.together)


def variant_of(court: Court, pool: Pool, denoiser: str) -> Variant:
    """The model with the denoiser that ``pool`` has under this key."""
    return Variant(pool, {part: part for part in court.checkpoint.parts()} | {court.denoiser: denoiser})


def mark_of(subject: Subject, court: Court) -> str:
    """A digest of all that decides a candidate's record but the machine."""
    judge = dataclasses.asdict(court.judge) | {"candidates": [str(subject.path)]}
    knobs = {"model": dataclasses.asdict(court.model), "infer": dataclasses.asdict(court.infer), "judge": judge}
    inputs = {name: each["sha256"] for name, each in court.facts["inputs"].items()}
    made = subject.file["sha256"], subject.runtime is not None  # whose library may be installed later
    return digest(
        json.dumps([knobs, court.prompts, inputs, made, court.facts["versions"], source_digest()], sort_keys=True)
    )


def judge_one(subject: Subject, court: Court, reference: Comparison, mark: str, folder: Path) -> None:
    """Everything that is found out about one candidate, into its ``folder``; the record, with its ``mark``, last."""
    step, others = StageTimer(), {THEIRS: subject.open}
    if subject.runtime is not None:
        others[LIBRARY] = subject.runtime.open
    pool = engines_of(court, others)
    try:
        with step("images"):
            theirs = pipeline_of(court.checkpoint, variant_of(court, pool, THEIRS))
            generated = generate(theirs, court.prompts, court.infer, subject.name)
            comparison = Comparison(reference.images | {QUANTIZED: generated}, {}, {}, {})
            save_pairs(comparison, court.prompts, subject.name, folder)
        with step("layers"):
            outputs = network_outputs(pool[THEIRS], reference, court)
            rows, network_error = layer_rows(subject, court, reference, pool, outputs)
            write_csv(rows, folder / "layers.csv")
        with step("runtime"):
            runtime = judged_runtime(subject, court, generated, pool)
    finally:
        pool.close()
    facts = court.facts | {"inputs": court.facts["inputs"] | {"candidate": subject.file}}
    judged = judged_entry(subject, court, rows, network_error, runtime)
    write_json(folder / PROVENANCE, facts)
    write_record(record_of(court, comparison, judged, facts, step, mark), folder)


def network_outputs(engine: Engine, reference: Comparison, court: Court) -> Tensor:
    """What guidance makes of the denoiser's outputs for the calls that the framework's pipeline has made."""
    outputs = []
    for inputs in reference.calls.values():
        (output, *_) = engine(**inputs).values()
        outputs.append(guided(output.float().cpu(), court.infer.scale).flatten())
    return torch.cat(outputs)


def layer_rows(
    subject: Subject, court: Court, reference: Comparison, pool: Pool, outputs: Tensor
) -> tuple[list[dict[str, Any]], float | None]:
    """The rows of ``layers.csv``, and the relative error of the network's output; the candidate's were ``outputs``."""
    full = cast(TorchEngine, pool[court.denoiser])
    network = denoiser_of(court.checkpoint, full.module)

    def run() -> Tensor:
        return network_outputs(full, reference, court)

    expected = run()
    with progress(len(reference.calls) * len(subject.layers), f"layers of {subject.name}") as advance:
        errors = layer_errors(network, subject.layers, run, advance)
    ranked = sorted(errors, key=lambda name: -(errors[name].output or 0))[: court.judge.layers]
    with progress(len(ranked), f"layers of {subject.name}, each alone") as advance:
        in_network = alone(network, subject.layers, ranked, run, advance)
    rows = []
    for row in subject.rows:
        own = errors.get(row["name"], LayerErrors(None, row.get("output_error")))
        found = {"weight_error": own.weight, "output_error": own.output, "network_error": in_network.get(row["name"])}
        rows.append(row | found)
    return rows, relative_error(expected, outputs)


def judged_runtime(subject: Subject, court: Court, simulated: Generated, pool: Pool) -> JudgedRuntime:
    """What the library that the candidate is made for computes here, beside our reading of it, and how fast."""
    if subject.runtime is None:
        return JudgedRuntime(reason=subject.no_runtime)
    if not court.judge.runtimes:
        return JudgedRuntime(reason="judge.runtimes is false")
    if not court.together:
        return JudgedRuntime(reason="memory does not hold it beside the full-precision model")
    found = JudgedRuntime(name=subject.runtime.name)
    try:
        pipeline = pipeline_of(court.checkpoint, variant_of(court, pool, LIBRARY))
        images = generate(pipeline, court.prompts, court.infer, f"{subject.name} by {subject.runtime.name}").images
        found["agreement"] = cast(ImageScores, summary(score_pairs(psnr, simulated.images, images)))
        engines = {FRAMEWORK: pool[court.denoiser], QUANTIZED: pool[LIBRARY]}
        if len({engine.device.type for engine in engines.values()}) > 1:  # whose times nobody compares
            return found
        rounds = denoiser_rounds(court.checkpoint, engines, court.infer, court.timing)
    except Exception as error:  # other people's code, which may fail in any way; our reading stands without it
        LOG.warning("%s: %s failed: %r", subject.name, subject.runtime.name, error)
        return JudgedRuntime(name=subject.runtime.name, reason=f"it failed with {one_line(repr(error), 200)}")
    samples = rounds.samples
    interval = ratio_interval(samples[FRAMEWORK], samples[QUANTIZED], rounds.openings)
    return found | JudgedRuntime(
        ms=statistics.median(samples[QUANTIZED]),
        torch_ms=statistics.median(samples[FRAMEWORK]),
        speedup=interval.value,
        speedup_interval=[interval.low, interval.high] if math.isfinite(interval.high) else None,
    )


def judged_entry(
    subject: Subject,
    court: Court,
    rows: Sequence[Mapping[str, Any]],
    network_error: float | None,
    runtime: JudgedRuntime,
) -> Judged:
    hurting = [row for row in rows if row["output_error"] is not None]
    hurting.sort(key=lambda row: (-(row["network_error"] or 0), -row["output_error"]))
    return Judged(
        name=subject.name,
        path=shown(subject.path),
        reader=subject.reader,
        maker=subject.maker,
        bits=8 * subject.stored_bytes / part_parameters(court.checkpoint)[court.denoiser],
        stored_bytes=subject.stored_bytes,
        formats=dict(Counter(row["format"] for row in rows)),
        inputs=dict(Counter(row["inputs"] for row in rows)),
        network_error=network_error,
        hurting=[cast(Hurting, {name: row[name] for name in get_type_hints(Hurting)}) for row in hurting[:HURTING]],
        runtime=runtime,
    )


def record_of(court: Court, comparison: Comparison, judged: Judged, facts: dict, step: StageTimer, mark: str) -> Record:
    """The candidate's record. What a run's has and this lacks is not known of a candidate."""
    framework, quantized = (comparison.images[variant] for variant in (FRAMEWORK, QUANTIZED))
    groups = ("model", "infer", "judge", "timing")
    high = judged["formats"].get(HIGH_PRECISION, 0)
    return Record(
        schema_version=SCHEMA_VERSION,
        status=DONE,
        fingerprint=mark,
        overrides=[],
        knobs=cast(Knobs, {group: dataclasses.asdict(getattr(court, group)) for group in groups}),
        denoiser={
            "part": court.denoiser, "samples_per_image": samples_per_image(court.checkpoint, court.infer.scale)
        },
        prompts=court.prompts,
        simulated=False,
        simulated_because=None,
        sizes_bytes={},
        plans={},
        latency={},
        fidelity=fidelity(framework.images, quantized.images, framework.latents, quantized.latents, sets=True),
        layers={"quantized": sum(judged["formats"].values()) - high, "high_precision": high},
        judged=judged,
        peak_memory_bytes=cast("float | Explained", step.peak),
        peak_cuda_memory_bytes=explained(peak_cuda_memory_bytes(), "no NVIDIA GPU"),
        seconds=step.seconds,
        stages=cast(dict[str, Stage], step.stages),
        environment={"versions": facts["versions"], "machine": facts["machine"]},
        inputs=facts["inputs"],
    )  # fmt: skip
