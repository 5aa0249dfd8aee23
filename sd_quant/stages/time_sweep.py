"""The engines of a sweep, timed together: in one process, in the same rounds as the unquantized engine.

Within minutes a machine's speed changes by more than recipes differ. So after the jobs, all comparable engines are
opened together and timed in random interleaved rounds, in blocks if memory does not hold all. ONNX graphs that differ
only in constants count as one engine; plans, whose kernels were chosen by timing, only if their files are equal.

    python -m sd_quant.stages.time_sweep <folder of a sweep>

repeats the timing; jobs of another machine are not timed. No images are made, because those of a large model take
minutes: an image's time outside the denoiser's calls is taken from the first job, as a share of these calls, and the
time saved by other quantized parts from each job's own record. Alternative not taken: timing while the jobs run; other
jobs may run at the same time, and the first job could not be compared with the last.
"""

import argparse
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from sd_quant.config import QuantizeJob, Timing, artifact, run_job
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ArtifactError, SdQuantError, exit_with_its_code
from sd_quant.files import digest, write_json
from sd_quant.knobs import read
from sd_quant.progress import working
from sd_quant.report.occasions import count_occasion, history_of
from sd_quant.report.provenance import machine
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import DONE, IMAGE, at, read_object, weights_sha256
from sd_quant.report.shipped import last_words
from sd_quant.report.summary import SWEEP, Job, machine_of, read_sweep
from sd_quant.report.timing import TIMING, Block, LeftOut, TimedEngine, TimingRecord, read_timing, timed_together
from sd_quant.stages.latency import conditions, denoiser_rounds
from sd_quant.stages.occasions import hash_of, workload_of_engines
from sd_quant.stages.open_parts import open_compiled, open_file
from sd_quant.stages.resources import most_at_once
from sd_quant.stages.session import open_unchecked
from sd_quant.stages.shared import cache_of

LOG = logging.getLogger(__name__)
REFERENCE, COMPILED = "unquantized", "compiled"
MOST_BUDGETS = 5  # a block's time budget grows with its engines up to this number
NO_ROOM = "memory does not hold its engine beside the unquantized one"
SAME_MACHINE = ("cpu", "logical_cores", "memory_bytes", "gpus")  # not usable cores: a launcher may restrict them
UNREADABLE = (SdQuantError, OSError, ValueError, TypeError, KeyError)


@dataclass(frozen=True)
class EngineGroup:
    """Comparable engines: of one checkpoint, in one runtime, for the same call shapes."""

    job: QuantizeJob  # the first job with such an engine
    reference: Path  # the unquantized denoiser's file
    rest: float  # time of that job's image outside its denoiser calls, as a share of those
    image_ms: float  # time of that job's unquantized image
    files: dict[str, Path] = field(default_factory=dict)  # an engine file by its ``hash_of``
    engines: dict[str, TimedEngine] = field(default_factory=dict)  # by the same hash, without rounds yet


def time_sweep(directory: Path, again: bool = False) -> None:
    """Time the engines of a sweep's finished jobs together; write ``timing.json``, with jobs left out and why.

    Equal engines and settings are timed again only with ``again``. Raises ArtifactError without a sweep, SdQuantError
    for an engine that does not open, ResourceError for a full disk; an older ``timing.json`` is then kept.
    """
    if not (directory / SWEEP).exists():
        raise ArtifactError(f"{directory} holds no {SWEEP}; give the folder of a sweep")
    here, sweep = machine(), read_sweep(directory)
    timing = read(Timing, at(read_object(directory / SWEEP), "timing") or {}, "timing.")
    workloads, left_out = dict[str, EngineGroup](), list[LeftOut]()
    for job in sweep.jobs:
        if job.status != DONE or job.judged or job.record["simulated"]:
            continue
        try:
            if reason := why_left_out(job, here) or add(workloads, run_job(str(job.directory)), job):
                left_out.append({"job": job.name, "reason": reason})
        except UNREADABLE as error:
            left_out.append({"job": job.name, "reason": f"its files cannot be read: {error}"})
    at_once = dict[str, int]()
    for key, work in workloads.items():
        session = open_unchecked(work.job.model)
        at_once[key] = most_at_once(session.parameters, session.denoiser, work.job.infer, work.job.compiled_baseline)
    for key in [key for key, count in at_once.items() if count == 0]:
        names = [name for engine in workloads.pop(key).engines.values() for name in engine["jobs"]]
        left_out += [LeftOut(job=name, reason=NO_ROOM) for name in names]
    told = [f"{key} {list(work.engines.values())}" for key, work in workloads.items()]
    origin = digest(machine_of(here), str(timing), str(left_out), *told)
    if not (workloads or left_out) or (not again and at(read_timing(directory), "origin") == origin):
        return
    blocks = []
    for key, work in workloads.items():
        history = history_of(cache_of(work.job.cache).directory, here)
        for block in blocks_of(work, at_once[key], timing):
            timed = timed_together({"blocks": [block]})
            engines = {digest(key, each["sha256"]): timed[each["jobs"][0]] for each in block["subjects"]}
            count_occasion(block["rounds"], engines, history)
            blocks.append(block)
    record = TimingRecord(schema_version=1, origin=origin, machine=machine_of(here), blocks=blocks, left_out=left_out)
    write_json(directory / TIMING, record)


def why_left_out(job: Job, here: dict) -> str | None:
    """Return why the job's engine cannot be timed in this process, or None; ``here``: this machine's facts."""
    there = job.record["environment"]["machine"]
    if any(there.get(fact) != here[fact] for fact in SAME_MACHINE):
        return f"it ran on another machine ({machine_of(there)}), and latencies are compared within one"
    if job.record["denoiser"]["calls"]:
        return "its images call several denoisers, so it has the figures of its own run"
    engine = job.record["knobs"]["infer"]["engine"]
    if engine not in RUNTIMES or RUNTIMES[engine].file is None:
        return f"{engine} leaves no file of an engine, so it has the figures of its own run"
    return None


def add(workloads: dict[str, EngineGroup], knobs: QuantizeJob, job: Job) -> str | None:
    """Add a job's engine to its group in ``workloads``; return None, or the reason why it cannot be compared."""
    infer, kind = knobs.infer, str(RUNTIMES[knobs.infer.engine].file)
    denoiser = str(job.record["denoiser"]["part"])
    engine = artifact(job.directory, kind, denoiser)
    reference = artifact(job.directory / "full_precision", kind, denoiser)
    key = workload_of_engines(knobs, weights_sha256(job.record), reference)
    both = job.record["latency"][infer.engine][IMAGE][str(infer.batch_size)]
    image, quantized = both["full_precision"], both["quantized"]
    if image["p50_ms"] is None:
        return f"what an image takes beside its denoiser is not known: {image['reason']}"
    work = workloads.setdefault(key, EngineGroup(knobs, reference, image["rest"], image["p50_ms"]))
    this = hash_of(engine)
    work.files.setdefault(this, engine)
    known = work.engines.setdefault(this, TimedEngine(sha256=this, jobs=[], samples_ms=[], saved={}, shares={}))
    known["jobs"].append(job.name)
    if quantized["rest"] is not None:
        known["saved"][job.name] = image["rest"] - quantized["rest"]
    if quantized["calls_share"] is not None:
        known["shares"][job.name] = quantized["calls_share"]
    return None


def blocks_of(work: EngineGroup, size: int, timing: Timing) -> Iterator[Block]:
    """Time all engines of a group, in blocks of ``size`` engines together with the unquantized engine."""
    infer, checkpoint = work.job.infer, open_unchecked(work.job.model).checkpoint
    reference, hashes = open_file(work.reference, infer), list(work.engines)
    baselines = {REFERENCE: reference}
    if work.job.compiled_baseline:
        baselines[COMPILED] = open_compiled(checkpoint, infer, checkpoint.family.DENOISER)
    for start in range(0, len(hashes), size):
        block = hashes[start : start + size]
        budget_s = timing.budget_s * min(len(block), MOST_BUDGETS)
        LOG.info("timing %d engines beside the unquantized one, for about %g s", len(block), budget_s)
        began = perf_counter()
        engines = baselines | {each: open_file(work.files[each], infer) for each in block}
        with working(f"timing {len(block)} engines"):
            rounds = denoiser_rounds(checkpoint, engines, infer, replace(timing, budget_s=budget_s))
        for each in block:
            engines[each].close()
        yield Block(
            engine=infer.engine,
            rest=work.rest,
            image_ms=work.image_ms,
            reference_ms=rounds.samples[REFERENCE],
            compiled_ms=rounds.samples.get(COMPILED),
            subjects=[{**work.engines[each], "samples_ms": rounds.samples[each]} for each in block],
            rounds=conditions([rounds], REFERENCE),
            seconds=perf_counter() - began,
        )
    for engine in baselines.values():
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sd_quant.stages.time_sweep", description="Time the engines of a sweep together."
    )
    parser.add_argument("directory", type=Path, help="the folder of a sweep")
    directory = parser.parse_args().directory
    time_sweep(directory, again=True)
    rebuild(directory)
    print(last_words(directory))


if __name__ == "__main__":
    exit_with_its_code(main)
