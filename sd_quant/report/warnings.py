"""Warnings of a run and of a sweep, as sentences for the terminal and the page, such as ``SLOWER: ...``."""

import shlex
from collections.abc import Mapping, Sequence

from sd_quant.places import shown
from sd_quant.report.readings import better_format_of, degenerate_images, latency_of, named_parts, slower
from sd_quant.report.record import DONE, IMAGE, Conditions, Record, at
from sd_quant.report.summary import Sweep, workload
from sd_quant.report.timing import blocks_by_job, busy_because
from sd_quant.text import fitted

PROMPT_TO_IMAGE = "prompt to image"


def warnings_of_run(record: Record, engines: Sequence[str], baselines: Sequence[str]) -> list[str]:
    """Return all warnings of one run; ``engines`` and ``baselines`` are the names of its timed engines."""
    speedups: dict[str, float | None] = {}
    busy = []
    for engine in dict.fromkeys([*engines, *baselines]):
        for part in named_parts(record["latency"][engine]):
            what = PROMPT_TO_IMAGE if part == IMAGE else part
            for batch in named_parts(record["latency"][engine][part]):
                if engine in engines:
                    speedup = latency_of(record, engine, part, batch).speedup.value
                    speedups[f"{what} at batch {batch} on {engine}"] = speedup
                if reason := busy_because(record["latency"][engine][part][batch]["rounds"]):
                    busy.append(too_busy(f"{what} was timed on {engine}", reason))
    return warnings_of_record(record, ", ".join(engines), speedups) + busy


def warnings_of_record(record: Record, engine: str, speedups: Mapping[str, float | None], whose: str = "") -> list[str]:
    """Warn of broken images, slow quantized parts, faster formats, layers run in floating point. ``whose``: prefix."""
    words, fell_back = degenerate_images(record), record["executed"]["fell_back"]
    sentences = [f"DEGENERATE: {whose}{words}."] if words else []
    sentences += [f"SLOWER: {whose}{what} {takes}." for what, each in speedups.items() if (takes := slower(each))]
    if better := better_format_of(record):
        sentences.append(f"FORMAT: {whose}{better}.")
    if fell_back:
        sentences.append(
            f"FLOAT: {whose}{engine} computes {len(fell_back)} of {record['executed']['of']} quantized layers in "
            "floating point; metrics.json names them under executed."
        )
    return sentences


def too_busy(when: str, reason: str, how: str = ".") -> str:
    return f"BUSY: while {when}, {reason}; time again when the machine is quiet{how}"


def warnings_of(sweep: Sweep) -> list[str]:
    """Return all warnings of a sweep: on recipes, unfinished jobs, timing, and busy or differing machines."""
    from sd_quant.files.checks import listing  # which imports torch

    recipes, sentences = sweep.recipes, busy_while_timing(sweep) + unlike_most(sweep)
    for each in at(sweep.timing, "left_out") or []:
        sentences.append(f"TIMED ALONE: {recipes.get(each['job'], each['job'])}: {each['reason']}.")
    for jobs in (subject["jobs"] for block in at(sweep.timing, "blocks") or [] for subject in block["subjects"]):
        if len(jobs) > 1:
            sentences.append(
                f"ONE ENGINE: {listing([recipes.get(job, job) for job in jobs])}: their graphs differ in constants "
                "alone, so their denoisers have one latency."
            )
    for job, row in zip(sweep.jobs, sweep.rows, strict=True):
        recipe = recipes[job.name]
        speedups = {PROMPT_TO_IMAGE: row["image_speedup"], "the denoiser": row["denoiser_speedup"]}
        sentences += warnings_of_record(job.record, row["run_by"], speedups, f"{recipe}: ")
        if row["run_by"] == "simulation":
            sentences.append(f"SIMULATED: no engine here executes {recipe}; torch made its images.")
    return sentences + [
        f"{row['status'].upper()}: {row['job']}: {row['reason']}" for row in sweep.rows if row["status"] != DONE
    ]


def busy_while_timing(sweep: Sweep) -> list[str]:
    """Warn of other processes that used the machine while engines were timed."""
    timed, found = blocks_by_job(sweep.timing), dict[str, str]()
    for name, conditions in conditions_of(sweep).items():
        if reason := busy_because(conditions):
            found[reason] = "the engines were timed together" if name in timed else f"{sweep.recipes[name]} was timed"
    again = shlex.join(["python", "-m", "sd_quant.stages.time_sweep", shown(sweep.directory)])
    how = f": {again}" if timed else "."  # no full stop behind a command
    return [too_busy(when, reason, how) for reason, when in found.items()]


def conditions_of(sweep: Sweep) -> dict[str, Conditions]:
    """Return the recorded conditions of each job's denoiser timing, by job name; empty for a job without timing."""
    timed, found = blocks_by_job(sweep.timing), dict[str, Conditions]()
    for job in sweep.jobs:
        engine, part, samples, _ = workload(job.record)
        alone = job.record["latency"][engine][part][str(samples)]["rounds"]
        found[job.name] = (timed[job.name]["rounds"] if job.name in timed else {}) or alone
    return found


def unlike_most(sweep: Sweep) -> list[str]:
    """Warn of jobs that ran with other package versions, or on another processor or GPU, than most of the sweep."""
    ran_with: dict[str, dict[str, list[str]]] = {}  # the jobs by fact and value
    for job in [job for job in sweep.own if job.record]:
        machine = job.record["environment"]["machine"]
        processor = " ".join(filter(None, [machine["cpu"], *machine["cpu_int8"]]))
        known = {"processor": processor, "GPUs": ", ".join(machine["gpus"]) or "none"}
        for fact, value in (job.record["environment"]["versions"] | known).items():
            ran_with.setdefault(fact, {}).setdefault(str(value), []).append(sweep.recipes[job.name])
    sentences = []
    for fact, jobs in ran_with.items():
        usual = max(jobs, key=lambda value: len(jobs[value]))
        for value, others in jobs.items():
            if value != usual:
                unlike = f"{fitted(', '.join(others), 200)} ran with {fact} {value}, most jobs with {usual}"
                sentences.append(f"UNLIKE: {unlike}; compare with care.")
    return sentences
