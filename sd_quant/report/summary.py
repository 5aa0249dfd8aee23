"""A sweep's folder, read: its jobs with what they left, and a table with a row for each.

Nothing is kept in memory while a sweep runs: whoever opens the folder, then or years later, finds ``sweep.json``, which
names the jobs, and in each job's folder its record, why it failed, or neither. A single run is a sweep of one job.
"""

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_quant.cache import try_lock
from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path, write_text
from sd_quant.report.layers import cell
from sd_quant.report.shapes import PLAN_SHAPE, RECORD_SHAPE, check_shape, why
from sd_quant.text import printable

SWEEP, RECORD, FAILURE, LOCK, LOG = "sweep.json", "metrics.json", "failure.json", ".lock", "quantize.log"
DONE, FAILED, UNFINISHED = "done", "failed", "unfinished"
STAGE = re.compile(r"- (\w+) \.\.\.$", re.MULTILINE)  # how a stage announces itself in the log

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """``varied``: the knobs in which the sweep's jobs differ, with this job's values. ``record`` where it is done."""

    name: str
    directory: Path
    varied: Mapping[str, Any]
    status: str
    reason: str | None = None
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Sweep:
    directory: Path
    command: list[str]
    varied: list[str]
    jobs: list[Job]
    published: Mapping[str, Any] | None = None  # figures to show beside ours, see sd_quant.report.published


def read_sweep(directory: Path) -> Sweep:
    """Of a sweep's folder or a run's. Raises ArtifactError when it is neither, or its ``sweep.json`` is damaged."""
    plan = directory / SWEEP
    if not plan.exists():
        if not any((directory / name).exists() for name in (RECORD, FAILURE)):
            raise ArtifactError(
                f"{directory} holds neither {SWEEP} nor {RECORD}; give the folder of a sweep or of a run"
            )
        job = read_job(directory.absolute().name, directory, {})
        overrides = (job.record or {}).get("overrides") or []
        return Sweep(directory, [str(override) for override in overrides], [], [job])
    try:
        content = json.loads(plan.read_text(encoding="utf-8"))
        check_shape(content, PLAN_SHAPE, "it")
        jobs = [read_job(job["name"], folder_in(directory, job["name"]), {**job["varied"]}) for job in content["jobs"]]
        command = [str(argument) for argument in content["command"]]
        return Sweep(directory, command, list(content["varied"]), jobs, content.get("published"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{plan} is not the plan of a sweep ({why(error)}); start the sweep again") from error


def folder_in(directory: Path, name: str) -> Path:
    """Of a job. Raises ValueError when the name leads elsewhere."""
    if not name or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a folder")
    return directory / name


def read_job(name: str, directory: Path, varied: Mapping[str, Any]) -> Job:
    try:
        record = read_object(directory / RECORD)
        if record is not None:
            check_shape(record, RECORD_SHAPE, RECORD)
            return Job(name, directory, varied, DONE, None, record)
        failure = read_object(directory / FAILURE)
    except (OSError, ValueError, RecursionError) as error:
        return Job(name, directory, varied, UNFINISHED, f"its record cannot be read: {why(error)}")
    if failure is None:
        return Job(name, directory, varied, UNFINISHED, f"it left no record: {what_became_of(directory)}")
    return Job(name, directory, varied, FAILED, str(failure.get("reason")))


def what_became_of(directory: Path) -> str:
    """Of a job that neither ended nor failed. A lock ends with its process, so it tells the running from the dead."""
    try:
        with (directory / LOCK).open("rb") as lock:
            running = not try_lock(lock)
    except OSError:
        return "it has not run"
    stages = STAGE.findall(last_text(directory / LOG))
    where = f" in the stage {stages[-1]}" if stages else ""
    if running:
        return f"it is running{where}"
    return f"it ended{where} without a word, as what is killed does: by a signal, or for want of memory"


def last_text(path: Path, most: int = 65536) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def read_object(path: Path) -> dict | None:
    """A JSON file, or None where there is none. Raises ValueError when it is not an object."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no object")
    return content


def rows(sweep: Sweep) -> list[Row]:
    """One for each job; every row has all columns, None where there is no value."""
    return [row_of(job) for job in sweep.jobs]


def row_of(job: Job) -> Row:
    record = job.record or {}
    infer = at(record, "knobs", "infer") or {}
    engine, batch = infer.get("engine"), infer.get("batch_size") or 0
    denoiser = at(record, "denoiser", "part") or "unet_xl"
    samples = batch * (at(record, "denoiser", "samples_a_picture") or 2)
    call = at(record, "latency", engine, denoiser, str(samples)) or {}
    image = at(record, "latency", engine, "image", str(batch)) or {}
    framework = at(record, "latency", "torch", "image", str(batch), "full_precision", "p50_ms")
    files, latents = at(record, "sizes_bytes", denoiser) or {}, at(record, "fidelity", "latent_sqnr_db")
    stages = at(record, "stages") or {}
    known = {"job": job.name, "status": job.status, "reason": job.reason}
    return {
        **known,
        **job.varied,
        **known,  # no knob of a stranger's plan takes their place
        "psnr_db": at(record, "fidelity", "psnr", "mean"),
        "psnr_worst_db": at(record, "fidelity", "psnr", "min"),
        "ssim": at(record, "fidelity", "ssim", "mean"),
        "lpips": at(record, "fidelity", "lpips", "mean"),
        "latent_sqnr_db": latents[-1] if latents else None,
        "frechet_efficientnet": at(record, "fidelity", "frechet_efficientnet", "value"),
        "denoiser_ms": at(call, "quantized", "p50_ms"),
        "denoiser_full_precision_ms": at(call, "full_precision", "p50_ms"),
        "denoiser_speedup": number(call.get("speedup")),
        "image_ms": at(image, "quantized", "p50_ms"),
        "image_full_precision_ms": at(image, "full_precision", "p50_ms"),
        "image_torch_ms": framework,
        "image_speedup": number(image.get("speedup")),
        "image_relative_time": 1 / speedup if (speedup := number(image.get("speedup"))) else None,
        "denoiser_onnx_bytes": number(files.get("onnx_quantized")),
        "denoiser_onnx_full_precision_bytes": number(files.get("onnx_full_precision")),
        "denoiser_onnx_share": share(number(files.get("onnx_quantized")), number(files.get("weights_fp32"))),
        "denoiser_plan_bytes": number(files.get("plan")),
        "denoiser_plan_targets": " ".join(at(record, "plans", denoiser, "targets") or ()) or None,
        "run_by": "simulation" if record.get("simulated") else engine,
        "checkpoint": str(at(record, "inputs", "checkpoint", "sha256") or "")[:12] or None,
        "quantized_layers": at(record, "layers", "quantized"),
        "seconds": sum(at(stage, "seconds") or 0 for stage in stages.values()) if stages else None,
        "peak_memory_bytes": number(record.get("peak_memory_bytes")),
    }


def at(record: Any, *keys: Any) -> Any:
    """What lies at ``keys``, or None."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part and whole else None


def number(value: Any) -> float | int | None:
    """A record's number: itself, or null with a reason beside it."""
    return value.get("value") if isinstance(value, Mapping) else value


def write_summary(sweep: Sweep) -> None:
    """``summary.csv``, ``summary.parquet`` and ``summary.md`` in the sweep's folder."""
    table = rows(sweep)
    columns = list(dict.fromkeys(column for row in table for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows({column: cell(value) for column, value in row.items()} for row in table)
    write_text(sweep.directory / "summary.csv", text.getvalue())
    write_text(sweep.directory / "summary.md", markdown(table, sweep.varied))
    write_parquet(table, columns, sweep.directory / "summary.parquet")


def write_parquet(table: list[Row], columns: list[str], path: Path) -> None:
    """Knobs of mixed kinds (``alpha`` 0.8 and auto), lists and the like become text: a column has one type."""
    import pyarrow
    from pyarrow import parquet

    def column(name: str) -> list:
        values = [row.get(name) for row in table]
        kinds = {type(value) for value in values if value is not None}
        if kinds in (set(), {int}, {float}, {bool}, {int, float}):
            return values
        # halves of surrogates, as in a failure's quotation of a file, have no UTF-8
        return [v if v is None else str(v).encode("utf-8", "backslashreplace").decode() for v in values]

    with atomic_path(path) as temporary:
        parquet.write_table(pyarrow.table({name: column(name) for name in columns}), temporary)


# What a person wants first; the CSV has everything.
SHOWN = {
    "psnr_db": ("PSNR, dB", "{:.2f}"),
    "psnr_worst_db": ("worst", "{:.2f}"),
    "ssim": ("SSIM", "{:.4f}"),
    "lpips": ("LPIPS", "{:.4f}"),
    "latent_sqnr_db": ("latent SQNR, dB", "{:.1f}"),
    "denoiser_ms": ("denoiser, ms", "{:,.1f}"),
    "denoiser_speedup": ("over unquantized", "{:.2f}x"),
    "image_ms": ("picture, ms", "{:,.0f}"),
    "image_speedup": ("over unquantized", "{:.2f}x"),
    "denoiser_onnx_bytes": ("denoiser ONNX, MB", "{:,.1f}"),
    "denoiser_onnx_share": ("of fp32", "{:.3f}"),
    "denoiser_plan_targets": ("plan for", "{}"),
    "run_by": ("run by", "{}"),
    "seconds": ("job, s", "{:.1f}"),
}
SCALE = {"denoiser_onnx_bytes": 1e-6}


def markdown(table: list[Row], varied: list[str]) -> str:
    """The table for people; below it, why jobs have no figures."""
    header = ["job" if not varied else " · ".join(varied), "status", *(title for title, _ in SHOWN.values())]
    lines = [header, ["---"] * len(header)]
    for row in table:
        name = " · ".join(str(row.get(knob)) for knob in varied) or row["job"]
        lines.append([name, row["status"], *(shown(row, column) for column in SHOWN)])
    reasons = [markdown_text(f"{row['job']}: {row['status']}, {row['reason']}") for row in table if row["reason"]]
    body = "".join(f"| {' | '.join(map(markdown_text, cells))} |\n" for cells in lines)
    return body + ("\n" + "".join(f"- {reason}\n" for reason in reasons) if reasons else "")


def shown(row: Row, column: str) -> str:
    value = row.get(column)
    return "–" if value is None else SHOWN[column][1].format(value * SCALE[column] if column in SCALE else value)


def markdown_text(text: object) -> str:
    """Text that Markdown shows as it is, in one line: names and reasons may quote a stranger's file."""
    return "".join(f"\\{letter}" if letter in "\\|<>[]*`_#!&" else letter for letter in printable(text))
