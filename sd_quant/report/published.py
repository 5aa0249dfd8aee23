"""A sweep's latencies by batch size in the shape of somebody's published tables, with their figures beside ours.

Two tables, as in NeMo's documentation: the framework against the quantized engine, and the unquantized engine against
it, from prompt to image. Each stands in the page's own layout, of our figures alone, and with the page's figures beside
them, milliseconds or speed-ups alone. Another machine, engine or number of steps makes the milliseconds incomparable,
so the caption says what differs; what may be compared is the speed-up.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sd_quant.checkpoints.plain_yaml import load_yaml
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.report.record import at, why
from sd_quant.report.summary import SWEEP, Row, Sweep, markdown_text, rows

BASELINES = {"framework": "framework", "unquantized": "unquantized engine"}
RATIOS = {baseline: f"over_{baseline}" for baseline in BASELINES}  # published without milliseconds: over_framework
CONDITIONS = ("machine", "engine", "precision", "steps", "resolution")
MEDIANS = "From prompt to image, medians"
OWN = 4  # columns of a published table: batch, baseline, quantized engine, speed-up
OURS = {"framework": "image_torch_ms", "unquantized": "image_full_precision_ms", "quantized": "image_ms"}


@dataclass(frozen=True)
class Table:
    heading: str
    header: list[str]
    lines: list[list[str]]
    caption: str


def read_published(text: str, name: str) -> dict:
    """The figures of a file like ``examples/published/nemo_docs.yaml``. Raises ConfigError when it is not one."""
    try:
        return read_figures(load_yaml(text.encode()))  # type: ignore[arg-type]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"published names {name}, which is not like examples/published/nemo_docs.yaml ({error!r}); follow that"
        ) from error


def read_figures(content: Mapping) -> dict:
    """The figures and the conditions under which they were measured. Raises KeyError, TypeError and the like."""
    batches = {}
    for batch, figures in content["batches"].items():
        names = [name for name in RATIOS.values() if name in figures] or OURS  # a batch has ratios or milliseconds
        batches[str(int(batch))] = {name: float(figures[name]) for name in names}
    if not all(math.isfinite(value) and value > 0 for figures in batches.values() for value in figures.values()):
        raise ValueError("a latency or a ratio that is none")
    return {name: str(content[name]) for name in ("title", *CONDITIONS)} | {"batches": batches}


def published_tables(sweep: Sweep) -> list[Table]:
    """A table for each baseline; none where the sweep has no published figures, or no job has a latency.

    Raises ArtifactError when the sweep's plan holds damaged ones.
    """
    if sweep.published is None:
        return []
    measured = [
        (row, job.record) for row, job in zip(rows(sweep), sweep.jobs, strict=True) if row["image_ms"] is not None
    ]
    if not measured:
        return []
    try:
        theirs = read_figures(sweep.published)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{sweep.directory / SWEEP} holds published figures that are none ({why(error)}); start the sweep again"
        ) from error
    fmt, caption = formats_of([record for _, record in measured]), caption_of(theirs, measured[0][1])
    tables = []
    for baseline, title in BASELINES.items():
        lines = [
            line(row, batch_of(record), baseline, at(theirs, "batches", str(batch_of(record))))
            for row, record in measured
        ]
        heading, columns = f"{title.capitalize()} against {fmt} engine", header(title, fmt, theirs["title"])
        tables.append(Table(heading, columns[:OWN], [cells[:OWN] for cells in lines], f"{MEDIANS}."))
        tables.append(Table(f"{heading}, beside {theirs['title']}", columns, lines, caption))
    return tables


def formats_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The formats of these jobs' weights as a heading names them, such as INT8."""
    kinds = [at(record, "knobs", "enable") or {} for record in records]
    names = {at(kind, layer, "weight") for kind in kinds for layer in ("conv", "linear")} - {None}
    return " and ".join(sorted(name.upper() for name in names)) or "quantized"


def header(title: str, fmt: str, source: str) -> list[str]:
    columns = [f"{title}, ms", f"{fmt} engine, ms", "speed-up"]
    return ["batch", *columns, *(f"{source}: {column}" for column in columns)]


def batch_of(record: Mapping[str, Any]) -> int:
    return at(record, "knobs", "infer", "batch_size")


def line(row: Row, batch: int, baseline: str, theirs: Mapping[str, float] | None) -> list[str]:
    ours = {name: row[OURS[name]] for name in (baseline, "quantized")}
    figures = [cells(medians, baseline) if medians else ["–"] * 3 for medians in (ours, theirs)]
    note = " (slower)" if ours[baseline] and round(ours[baseline] / ours["quantized"], 2) < 1 else ""
    low, high = (row[f"image_speedup_{end}"] for end in ("low", "high"))
    half = f" ± {(high - low) / 2:.3f}" if baseline == "unquantized" and low is not None else ""
    return [str(batch), *figures[0][:2], figures[0][2] + half + note, *figures[1]]


def cells(medians: Mapping[str, Any], baseline: str) -> list[str]:
    if "quantized" not in medians:
        ratio = medians.get(RATIOS[baseline])
        return ["–", "–", "–" if ratio is None else f"{ratio:g}x"]
    base, quantized = medians[baseline], medians["quantized"]
    if base is None:
        return ["–", f"{quantized:,.2f}", "–"]
    return [f"{base:,.2f}", f"{quantized:,.2f}", f"{base / quantized:.3f}x"]


def caption_of(theirs: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """A sentence on what differs between ours and theirs."""
    infer, machine = at(record, "knobs", "infer") or {}, at(record, "environment", "machine") or {}
    engine, baseline = infer.get("engine"), "fp16" if machine.get("gpus") else "fp32"
    ours = {
        "machine": ", ".join(machine.get("gpus") or []) or f"{machine.get('cpu')}, {machine.get('usable_cores')} cores",
        "engine": f"{engine} {at(record, 'environment', 'versions', engine)}",
        "precision": f"{baseline} beside {formats_of([record])}",
        "steps": infer.get("steps"),
        "resolution": f"{infer.get('width')}x{infer.get('height')}",
    }
    differing = "; ".join(f"{name}: {ours[name]} here, {theirs[name]} there" for name in CONDITIONS)
    return (
        f"{MEDIANS}, at guidance_scale {infer.get('scale')} here; ± is the 95 % interval of a "
        f"speed-up over the unquantized engine. {differing}."
    )


def as_markdown(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.lines]
    body = "".join(f"| {' | '.join(map(markdown_text, cells))} |\n" for cells in lines)
    return f"### {markdown_text(table.heading)}\n\n{body}\n{markdown_text(table.caption)}\n"


def as_html(table: Table) -> str:
    def cells(texts: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    body = "".join(cells(texts, "td") for texts in table.lines)
    return (
        f'<div class="scroll"><table><thead>{cells(table.header, "th")}</thead><tbody>{body}</tbody></table></div>'
        f"<p>{html.escape(table.caption)}</p>"
    )
