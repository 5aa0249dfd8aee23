"""A sweep's latencies by batch size in the layout of published tables, with the published figures beside ours.

There is a table for each number format and each published baseline, with latencies from prompt to image, shown twice:
with our figures alone, and with the published milliseconds or speed-ups beside them. Speed-ups are comparable;
milliseconds of another machine, engine or number of steps are not, so the caption lists the differences.
"""

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from sd_quant.errors import ConfigError
from sd_quant.files import read_regular, refusing
from sd_quant.files.archive import MAX_TEXT
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.report.readings import slower
from sd_quant.report.record import Record, at
from sd_quant.report.summary import SWEEP, Row, Sweep
from sd_quant.report.table import Table, figure, table_of_texts

BASELINES = {"framework": "framework", "compiled": "compiled framework", "unquantized": "unquantized engine"}
RATIOS = {baseline: f"over_{baseline}" for baseline in BASELINES}  # speed-ups that are published without milliseconds
FIGURES = (*BASELINES, "quantized", *RATIOS.values())  # that a batch may have
CONDITIONS = ("machine", "engine", "precision", "steps", "resolution")
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
MEDIANS = "From prompt to image, medians"
OWN = 4  # columns of a published table: batch, baseline, quantized engine, speed-up
OURS = {
    "framework": "image_torch_ms",
    "compiled": "image_compiled_ms",
    "unquantized": "image_full_precision_ms",
    "quantized": "image_ms",
}
INTERVALS = {"compiled": "image_over_compiled", "unquantized": "image_speedup"}  # columns of rounds in common


def read_published(path: Path, name: str) -> dict:
    """Read a YAML file like ``examples/published/nemo_docs.yaml``. Raises ConfigError for a file of another form."""
    try:
        return read_figures(load_yaml(read_regular(path, MAX_TEXT)))  # type: ignore[arg-type]
    except (*DAMAGED, OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"published names {name}, which is not like examples/published/nemo_docs.yaml ({error!r}); follow that"
        ) from error


def read_figures(content: Mapping) -> dict:
    """Check and convert published figures and their conditions. Raises an exception of DAMAGED for another form.

    Each batch size has speed-ups, or milliseconds of the quantized engine and a baseline: a number, or one by format.
    """
    batches = {}
    for batch, figures in content["batches"].items():
        compared = "quantized" in figures and any(name in figures for name in BASELINES)
        if not figures.keys() <= set(FIGURES) or not (compared or figures.keys() & set(RATIOS.values())):
            raise ValueError(f"batch {batch} has {', '.join(map(str, figures)) or 'nothing'}")
        batches[str(int(batch))] = {name: read_figure(figure) for name, figure in figures.items()}
    return {name: str(content[name]) for name in ("title", *CONDITIONS)} | {"batches": batches}


def read_figure(figure: Any) -> float | dict[str, float]:
    """Convert a latency or ratio, or a dictionary of them by format. Raises ValueError or TypeError unless positive."""
    if isinstance(figure, Mapping):
        return {str(name): read_figure(each) for name, each in figure.items()}  # type: ignore[misc]
    if not (math.isfinite(value := float(figure)) and value > 0):
        raise ValueError("a latency or a ratio that is none")
    return value


def published_tables(sweep: Sweep) -> list[Table]:
    """Return two tables for each format and baseline that has figures. Raises ArtifactError for damaged figures."""
    by_format: dict[str, list[tuple[Row, Record]]] = {}
    for job, row in zip(sweep.jobs, sweep.rows, strict=True):
        if row["image_ms"] is not None:
            by_format.setdefault(formats_of(job.record), []).append((row, job.record))
    if sweep.published is None or not by_format:
        return []
    with refusing(
        f"{sweep.directory / SWEEP} holds published figures that are none", *DAMAGED, advice="start the sweep again"
    ):
        theirs = read_figures(sweep.published)
    known = {name for figures in theirs["batches"].values() for name in figures}
    tables = []
    for (fmt, jobs), (baseline, title) in product(by_format.items(), BASELINES.items()):
        if not {baseline, RATIOS[baseline]} & known:
            continue
        lines = [line(row, record, baseline, figures_of(theirs, record)) for row, record in jobs]
        heading, own = f"{title.capitalize()} against {fmt} engine", [f"{title}, ms", f"{fmt} engine, ms", "speed-up"]
        columns = ["batch", *own, *(f"{theirs['title']}: {each}" for each in own)]
        caption = caption_of(theirs, jobs[0][1])
        tables.append(table_of_texts(columns[:OWN], [cells[:OWN] for cells in lines], heading, f"{MEDIANS}."))
        tables.append(table_of_texts(columns, lines, f"{heading}, beside {theirs['title']}", caption))
    return tables


def formats_of(record: Record) -> str:
    """Return the weight formats of a job as they are named in headings, such as INT8."""
    names = {at(record["knobs"], "enable", layer, "weight") for layer in ("conv", "linear")} - {None}
    return " and ".join(sorted(name.upper() for name in names)) or "quantized"


def figures_of(theirs: Mapping[str, Any], record: Record) -> dict[str, float]:
    """Return the published figures, of ``theirs``, for a job's batch size and number format."""
    figures, fmt = theirs["batches"].get(str(record["knobs"]["infer"]["batch_size"])) or {}, formats_of(record)
    own = {name: figure.get(fmt) if isinstance(figure, Mapping) else figure for name, figure in figures.items()}
    return {name: figure for name, figure in own.items() if figure is not None}


def line(row: Row, record: Record, baseline: str, theirs: Mapping[str, float]) -> list[str]:
    ours = {name: row[OURS[name]] for name in (baseline, "quantized")}
    own, published = (cells(medians, baseline) for medians in (ours, theirs))
    note = " (slower)" if ours[baseline] and slower(ours[baseline] / ours["quantized"]) else ""
    low, high = (row.get(f"{INTERVALS.get(baseline)}_{end}") for end in ("low", "high"))
    half = f" ± {(high - low) / 2:.3f}" if low is not None and high is not None else ""
    return [str(record["knobs"]["infer"]["batch_size"]), *own[:2], own[2] + half + note, *published]


def cells(medians: Mapping[str, Any], baseline: str) -> list[str]:
    base, quantized, ratio = (medians.get(name) for name in (baseline, "quantized", RATIOS[baseline]))
    speedup = figure(ratio, "{:g}x") if None in (base, quantized) else f"{base / quantized:.3f}x"
    return [figure(base, "{:,.2f}"), figure(quantized, "{:,.2f}"), speedup]


def caption_of(theirs: Mapping[str, Any], record: Record) -> str:
    """Return a caption that compares the conditions of the job ``record`` and of the published figures, ``theirs``."""
    infer, machine = record["knobs"]["infer"], record["environment"]["machine"]
    engine, baseline = infer["engine"], "fp16" if machine["gpus"] else "fp32"
    ours = {
        "machine": ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['usable_cores']} cores",
        "engine": f"{engine} {record['environment']['versions'][engine]}",
        "precision": f"{baseline} beside {formats_of(record)}",
        "steps": infer.get("steps"),
        "resolution": f"{infer.get('width')}x{infer.get('height')}",
    }
    differing = "; ".join(f"{name}: {ours[name]} here, {theirs[name]} there" for name in CONDITIONS)
    return (
        f"{MEDIANS}, at guidance_scale {infer.get('scale')} here; ± is the 95 % interval of a "
        f"speed-up over what was timed in the same rounds. {differing}."
    )
