"""Read a sweep's folder, and write a table with a row for each job: ``summary.csv`` and ``.md``.

``sweep.json`` names the jobs, and each job's folder holds the job's record, the reason of its failure, or neither. A
single run is read as a sweep of one job.
"""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from sd_quant.cache import try_lock
from sd_quant.errors import ArtifactError
from sd_quant.files import open_regular, read_regular, refusing, write_text
from sd_quant.metrics import SCORES, fidelity_scores
from sd_quant.metrics.intervals import Interval
from sd_quant.report.readings import Number, interval_of, latency_of, number_at, quotient, score_of
from sd_quant.report.record import (
    CANDIDATE,
    DONE,
    IMAGE,
    RECORD,
    TORCH,
    Fidelity,
    Machine,
    Record,
    at,
    check_shape,
    parsed,
    read_object,
    read_record,
    weights_sha256,
    why,
)
from sd_quant.report.table import Column, Table, as_markdown, as_text, columns_of, knob_value, markdown_text, write_csv
from sd_quant.report.timing import TIMING, Timed, blocks_by_job, read_timing, rounds_of, timed_together

SWEEP, FAILURE, LOCK, LOG = "sweep.json", "failure.json", ".lock", "quantize.log"
PROVENANCE, REPORT, RECOMMENDATION = "provenance.json", "report.html", "recommendation.json"
FAILED, UNFINISHED = "failed", "unfinished"  # beside DONE
WAS_CANCELLED = "was cancelled by Ctrl-C or SIGTERM"  # the end of the log of such a job
STAGE = re.compile(r"- (\w+) \.\.\.$", re.MULTILINE)  # how a stage announces itself in the log

IN_A_TERMINAL = ("psnr_db", "lpips", "denoiser_speedup", "image_ms", "denoiser_bits")  # columns, if there are figures

Row = dict[str, Any]


class PlannedJob(TypedDict):
    name: str  # of its folder
    varied: dict[str, Any]  # the knobs in which the sweep's jobs differ, with this job's values
    same_as: str  # the job before it that gives the same assignment and is done in its place


class SweepPlan(TypedDict):
    """Content of ``sweep.json``, as far as it is read."""

    command: list[Any]
    varied: list[str]
    jobs: list[PlannedJob]
    candidates: list[PlannedJob]  # third-party checkpoints, in a folder of ``judge.py``
    judge: dict[str, Any]  # the knobs of the same name
    published: dict[str, Any]  # figures to show beside ours, see ``sd_quant.report.published``
    verdict: dict[str, Any]  # the knobs of the same name, see ``sd_quant.report.rule``


@dataclass(frozen=True)
class Job:
    name: str
    directory: Path
    varied: Mapping[str, Any]  # the knobs in which the sweep's jobs differ, with this job's values
    status: str
    reason: str | None = None  # why it is not done
    record: Record = field(default_factory=partial(parsed, None))  # empty unless it is done
    twins: tuple[str, ...] = ()  # jobs of other names that are this one, because their assignment is the same
    timed: Timed | None = None  # its latencies, measured together with the other jobs' or else on its own

    @property
    def judged(self) -> bool:
        """Whether this is a third-party checkpoint, and not a job of ``quantize``."""
        return CANDIDATE in self.varied

    @property
    def recipe(self) -> str:
        """Number format and quantization level, ``int8, level 3``; the job's name where its record has no format."""
        form, level = (at(self.record["knobs"], knob) for knob in ("format", "quant_level"))
        return f"{form}, level {knob_value(level)}" if form and level is not None else self.name


@dataclass(frozen=True)
class Sweep:
    directory: Path
    command: list[str]
    varied: list[str]
    jobs: list[Job]  # each assignment once, or the candidates of ``judge.py``
    published: Mapping[str, Any] | None = None  # figures to show beside ours, see sd_quant.report.published
    verdict: Mapping[str, Any] | None = None  # by which a recipe is recommended, see sd_quant.report.recommendation
    judge: Mapping[str, Any] | None = None  # by which candidates are told apart, see sd_quant.report.candidates
    timing: Mapping[str, Any] | None = None  # of engines that were timed together, see sd_quant.report.timing
    names: tuple[str, ...] = ()  # of all jobs by Hydra's number, twins among them

    @property
    def own(self) -> list[Job]:
        """Jobs of ``quantize``, without third-party checkpoints."""
        return [job for job in self.jobs if not job.judged]

    @property
    def done(self) -> list[Job]:
        return [job for job in self.jobs if job.status == DONE]

    @cached_property
    def recipes(self) -> dict[str, str]:
        """Recipe by job name: the varied knobs as on the command line; a third-party checkpoint's own name."""
        found = {}
        for job in self.jobs:
            varied = " ".join(f"{knob}={knob_value(job.varied.get(knob))}" for knob in self.varied)
            found[job.name] = job.varied.get(CANDIDATE) or varied or job.recipe
        return found

    @cached_property
    def rows(self) -> list[Row]:
        """Table rows, one for each job, all with the same columns, None where there is no value."""
        together = blocks_by_job(self.timing)
        found = [row_of(job, at(self.timing, "machine") if job.name in together else None) for job in self.jobs]
        columns = dict.fromkeys([*columns_of(found), *self.varied])
        return [columns | row for row in found]


def read_sweep(directory: Path) -> Sweep:
    """Read a sweep, or a run as a sweep of one job. Raises ArtifactError for a damaged folder, or without either."""
    plan = directory / SWEEP
    if not plan.exists():
        return run_as_sweep(directory)
    with refusing(f"{directory / TIMING} holds no rounds", advice="remove it and start the sweep again"):
        timing = read_timing(directory)
        together = timed_together(timing)
    with refusing(f"{plan} is not the plan of a sweep", advice="start the sweep again"):
        content = json.loads(read_regular(plan))
        check_shape(content, SweepPlan, "it")
        planned, jobs = content["jobs"], []
        names = tuple(job["name"] for job in planned)
        for each in [*planned, *(content.get("candidates") or [])]:
            if each.get("same_as") in names:
                continue
            job = read_job(each["name"], folder_in(directory, each["name"]), {**each["varied"]})
            twins = tuple(other["name"] for other in planned if other.get("same_as") == job.name)
            jobs.append(replace(job, twins=twins, timed=together.get(job.name) or job.timed))
        command, varied = [str(argument) for argument in content["command"]], list(content["varied"])
        published, verdict, judge = (content.get(name) for name in ("published", "verdict", "judge"))
        return Sweep(directory, command, varied, jobs, published, verdict, judge, timing, names)


def read_plan(directory: Path) -> dict[str, Any]:
    """Read ``sweep.json`` unchecked: only for a file that this command wrote, or the command that started the job."""
    return json.loads((directory / SWEEP).read_text(encoding="utf-8"))


def run_as_sweep(directory: Path) -> Sweep:
    """Read a run's folder as a sweep of one job. Raises ArtifactError for a folder without a run."""
    if not any((directory / name).exists() for name in (RECORD, FAILURE)):
        raise ArtifactError(f"{directory} holds neither {SWEEP} nor {RECORD}; give the folder of a sweep or of a run")
    job = read_job(directory.absolute().name, directory, {})
    ours = "overrides" in job.record and not job.record["judged"]
    command = ["sd-quant", "quantize", *map(str, job.record["overrides"])] if ours else []
    return Sweep(directory, command, [], [job], None, at(job.record["knobs"], "verdict"), names=(job.name,))


def workload(record: Record) -> tuple[str, str, int, int]:
    """Return a job's engine, its denoiser part, the samples in one call of it, and the batch size in images."""
    infer, denoiser = record["knobs"]["infer"], record["denoiser"]
    batch: Any = infer["batch_size"] or 0
    return infer["engine"], denoiser["part"] or "unet_xl", batch * (denoiser["samples_per_image"] or 2), batch


def timed_alone(job: str, record: Record) -> Timed | None:
    """Read the timed rounds that a job measured by itself; None where its record has no rounds."""
    return rounds_of(f"job {job}", record["latency"], *workload(record), record["denoiser"]["calls"])


def folder_in(directory: Path, name: str) -> Path:
    """Return the folder of the job ``name`` in ``directory``. Raises ValueError unless ``name`` is a plain name."""
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a folder")
    return directory / name


def read_job(name: str, directory: Path, varied: Mapping[str, Any]) -> Job:
    try:
        record = known_record(directory, *state_of(directory / RECORD))
        if record is not None:
            return Job(name, directory, varied, DONE, None, record, timed=timed_alone(name, record))
        failure = read_object(directory / FAILURE)
    except (OSError, ValueError) as error:
        return Job(name, directory, varied, UNFINISHED, f"its record cannot be read: {why(error)}")
    if failure is None:
        return Job(name, directory, varied, UNFINISHED, f"it left no record: {what_became_of(directory)}")
    return Job(name, directory, varied, FAILED, str(failure.get("reason")))


def state_of(path: Path) -> tuple[int, ...]:
    """Return numbers that change with the file (inode, size, time), as a cache key; () for a missing file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1024)  # every job of a sweep looks at all others when it begins
def known_record(directory: Path, *state: int) -> Record | None:
    return read_record(directory)


def what_became_of(directory: Path) -> str:
    """Describe what happened to a job without record or failure, by its log and its lock, which a running job holds."""
    if (running := is_running(directory)) is None:
        return "it has not run"
    log = last_text(directory / LOG)
    stages = STAGE.findall(log)
    where = f" in the stage {stages[-1]}" if stages else ""
    if log.rstrip().endswith(WAS_CANCELLED):  # before its lock is free, where it waits for its plans
        return f"it {WAS_CANCELLED}{where}; the same command goes on"
    if running:
        return f"it is running{where}"
    return f"it ended{where} without an error message, so it was killed, by a signal or for lack of memory"


def is_running(directory: Path) -> bool | None:
    """Check whether a process, on any machine, is working on the job in a folder; None if the job never started."""
    try:
        with open_regular(directory / LOCK) as lock:
            return not try_lock(lock)
    except OSError:
        return None


def last_text(path: Path, most: int = 65536) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def row_of(job: Job, timed_on: str | None = None) -> Row:
    """Build the table row of a job. ``timed_on``: the machine, if the job was timed together with other jobs."""
    record, (engine, denoiser, _, _) = job.record, workload(job.record)
    files = ("onnx_quantized", "onnx_full_precision", "weights_fp32", "plan")
    sizes = {file: bytes_of_denoisers(record, denoiser, file) for file in files}
    share = quotient(sizes["onnx_quantized"], sizes["weights_fp32"]).value
    bits = record["judged"]["bits"]
    known = {"job": job.name, "status": job.status, "reason": job.reason}
    return {
        **known,
        **job.varied,
        **known,  # no knob of a hostile plan takes their place
        "same_as": " ".join(job.twins) or None,
        **scores_of(record["fidelity"]),
        **interval_columns("psnr_db", interval_of(record["fidelity"], SCORES["psnr"])),
        **latencies_of(job, measured_together=timed_on is not None),
        "timed_on": timed_on or machine_of(record["environment"]["machine"]) or None,
        "denoiser_onnx_bytes": sizes["onnx_quantized"].value,
        "denoiser_onnx_full_precision_bytes": sizes["onnx_full_precision"].value,
        "denoiser_onnx_share": share,
        "denoiser_bytes": record["judged"]["stored_bytes"] or sizes["onnx_quantized"].value,
        "denoiser_bits": 32 * share if bits is None and share is not None else bits,
        "denoiser_plan_bytes": sizes["plan"].value,
        "denoiser_plan_targets": " ".join(record["plans"][denoiser]["targets"]) or None,
        "run_by": "simulation" if record["simulated"] else engine,
        "checkpoint": str(weights_sha256(record) or "")[:12] or None,
        "calls": record["levers"]["calls"],
        "twin_psnr_db": record["levers"]["twin"]["psnr"]["mean"],
        "quantized_layers": record["layers"]["quantized"],
        "float_layers": len(record["executed"]["fell_back"]),
        "seconds": record["seconds"],
        "peak_memory_bytes": number_at(record["peak_memory_bytes"]).value,
    }


def bytes_of_denoisers(record: Record, denoiser: str, file: str) -> Number:
    """Sum bytes of a kind of ``file`` over all denoisers (unquantized: ONNX); ``denoiser``'s own if any is unknown."""
    own, kinds = number_at(record["sizes_bytes"], denoiser, file), (file, "onnx_full_precision")
    others = [part for part in record["denoiser"]["calls"] if part != denoiser]
    known = [[number_at(record["sizes_bytes"], part, kind).value for kind in kinds] for part in others]
    each = [own.value, *(found if found is not None or file == "plan" else full for found, full in known)]
    return own if not others or None in each else Number(sum(each))


def latencies_of(job: Job, measured_together: bool) -> dict[str, float | None]:
    """Return the latency columns: if ``measured_together``, from the rounds shared with other jobs, else the record."""
    timed, (engine, denoiser, samples, batch) = job.timed, workload(job.record)
    call, image = latency_of(job.record, engine, denoiser, samples), latency_of(job.record, engine, IMAGE, batch)
    own, full = call.quantized.value, call.full_precision.value
    image_own, image_full = image.quantized.value, image.full_precision.value
    speedups = [call.speedup.value, image.speedup.value]
    intervals: list[Interval | None] = [None, None, None]
    if timed is not None:
        intervals = [timed.denoiser_speedup(), timed.image_speedup(), timed.image_over_compiled()]
        several = job.record["denoiser"]["calls"]  # whose rounds are those of the mean of their calls
        if measured_together or several and timed.image_ms:
            speedups = [interval.value for interval in intervals[:2] if interval]
            own, full = (statistics.median(each) for each in (timed.quantized, timed.full_precision))
            image_own, image_full = timed.image_ms / speedups[1], timed.image_ms
    compiled = intervals[2] and intervals[2].value  # the quantized engine's speed-up over its calls
    return {
        "denoiser_ms": own,
        "denoiser_full_precision_ms": full,
        "denoiser_speedup": speedups[0],
        **interval_columns("denoiser_speedup", intervals[0]),
        "image_ms": image_own,
        "image_full_precision_ms": image_full,
        "image_compiled_ms": compiled and image_own and image_own * compiled,
        "image_over_compiled": compiled,
        **interval_columns("image_over_compiled", intervals[2]),
        "image_torch_ms": latency_of(job.record, TORCH, IMAGE, batch).full_precision.value,
        "image_speedup": speedups[1],
        **interval_columns("image_speedup", intervals[1]),
        "image_relative_time": quotient(Number(1), Number(speedups[1])).value,
    }


def interval_columns(column: str, interval: Interval | None) -> dict[str, float | None]:
    """Return ``<column>_low`` and ``<column>_high`` of a 95 % interval; both None unless both ends are finite."""
    low, high = (None, None) if interval is None else interval.ends
    return {f"{column}_low": low, f"{column}_high": high}


def machine_of(found: Mapping[str, Any]) -> str:
    machine: Machine = parsed(found, Machine)
    cores, memory = machine["usable_cores"], machine["memory_bytes"]
    sizes = f"{cores} cores" if cores else "", *machine["cpu_int8"], f"{memory / 2**30:.0f} GiB" if memory else ""
    return ", ".join(filter(None, [*machine["gpus"], machine["cpu"], *sizes]))


def scores_of(fidelity: Fidelity) -> dict[str, float | None]:
    """Return the columns of all fidelity scores, in the order of ``fidelity_scores``."""
    columns: dict[str, float | None] = {}
    for score in fidelity_scores():
        value, worst, _ = score_of(fidelity, score)
        columns |= zip(score.columns, (value.value, worst.value), strict=False)
    return columns


def write_summary(sweep: Sweep, recommended: Mapping[Any, str] = {}, sentence: str = "") -> None:
    """Write ``summary.csv``, with a column ``recommended``, and ``.md`` with ``sentence`` on top."""
    table = [{"job": row["job"], "recommended": recommended.get(row["job"]), **row} for row in sweep.rows]
    write_csv(table, sweep.directory / "summary.csv")
    top = f"**{markdown_text(sentence)}**\n\n" if sentence else ""
    write_text(sweep.directory / "summary.md", top + markdown(sweep))


def shown_columns() -> list[Column]:
    """Return the columns that are shown to people; the CSV file has more."""
    scores = [
        Column(title, key, score.format, more_is_better=score.more_is_better, is_text=False)
        for score in fidelity_scores()
        for key, title in zip(score.columns, (score.heading, f"worst {score.heading}"), strict=False)
    ]
    return [
        *scores,
        Column("denoiser, ms", "denoiser_ms", "{:,.1f}", is_text=False),
        Column("denoiser speedup", "denoiser_speedup", "{:.2f}x", more_is_better=True, is_text=False),
        Column("image, ms", "image_ms", "{:,.0f}", is_text=False),
        Column("image speedup", "image_speedup", "{:.2f}x", more_is_better=True, is_text=False),
        Column("denoiser, MiB", "denoiser_bytes", "{:,.1f}", scale=2**-20, is_text=False),
        Column("bits a weight", "denoiser_bits", "{:.2f}", is_text=False),
        Column("plan for", "denoiser_plan_targets"),
        Column("run by", "run_by"),
        Column("job, s", "seconds", "{:.1f}", is_text=False),
    ]


def known_columns(table: Sequence[Row]) -> list[Column]:
    """Return those of ``shown_columns`` in which at least one row has a value."""
    return [column for column in shown_columns() if any(row[column.key] is not None for row in table)]


def sweep_table(sweep: Sweep) -> str:
    """Format the table that a sweep prints at its end: a line for each job with the columns of ``IN_A_TERMINAL``."""
    shown = [column for column in known_columns(sweep.rows) if column.key in IN_A_TERMINAL]
    recipes = [row["job"] if row["status"] == DONE else f"{row['job']} ({row['status']})" for row in sweep.rows]
    return "\n".join([*as_text(by_recipe(sweep, "recipe", recipes, shown)), ""])


def markdown(sweep: Sweep) -> str:
    """Return the content of ``summary.md``: a table row for each recipe, named by its varied knobs."""
    recipes = [" · ".join(str(row[knob]) for knob in sweep.varied) or row["job"] for row in sweep.rows]
    columns = [Column("status", "status"), *shown_columns()]
    return as_markdown(by_recipe(sweep, " · ".join(sweep.varied) or "job", recipes, columns))


def by_recipe(sweep: Sweep, title: str, recipes: Sequence[str], columns: Sequence[Column]) -> Table:
    """Build a table of jobs, first a column ``title`` of ``recipes``; notes on failures and duplicates."""
    notes = [f"{row['job']}: {row['reason']}" for row in sweep.rows if row["reason"]]
    twins = [(row["same_as"], row["job"]) for row in sweep.rows if row["same_as"]]
    notes += [f"{twin}: the same assignment as {job}, not done again" for twin, job in twins]
    lines = [row | {"recipe": name} for row, name in zip(sweep.rows, recipes, strict=True)]
    return Table([Column(title, "recipe"), *columns], lines, notes=notes)
