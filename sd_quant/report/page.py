"""``report.html``: the report of a sweep for people who choose a recipe, in one file that loads nothing else.

The title is the recommendation, with the folder, files and a command below; then come warnings, the table, plots and
images that support it. Prompts, names and reasons are untrusted text: the template escapes all but ``Markup``, the
script's data is JSON, and a content security policy allows the page's one script and no request. Alternative not taken:
a notebook or a dashboard; either needs a server or a library where it is opened.
"""

import base64
import hashlib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from matplotlib.figure import Figure

from sd_quant.files import write_text
from sd_quant.report.candidates import rule as rule_of_candidates
from sd_quant.report.drawing import svg
from sd_quant.report.gallery import gallery
from sd_quant.report.recommendation import UNDECIDED, UNQUANTIZED, Recommendation, fidelity_db, unquantized_row
from sd_quant.report.recommendation import figures as figures_of
from sd_quant.report.record import Record, at, read_object
from sd_quant.report.rule import rule_of
from sd_quant.report.summary import PROVENANCE, REPORT, Row, Sweep, known_columns, machine_of
from sd_quant.report.table import Column, Table, knob_value
from sd_quant.report.timing import occasions_of
from sd_quant.report.warnings import conditions_of, warnings_of
from sd_quant.text import printable

FOLDER = Path(__file__).with_suffix("")  # the template, its style and its script
CAPTIONS = {
    "pareto_latency": "Fidelity and time, with intervals at 95 %: of the time over the rounds in which each engine was "
    "timed beside the unquantized one, of PSNR over prompts. The line joins what nothing beats in both, ★ is what to "
    "ship. Recipes are compared prompt by prompt, so two whose intervals of PSNR overlap may differ.",
    "pareto_size": "Fidelity and the size of the denoiser: of its ONNX file, or of what a candidate stores for it.",
    "trajectory": "How close the latents stay to full precision, step by step. Where a line falls, the images part.",
    "layers": "The error of each quantized layer's output on real inputs, in the order in which they are called.",
}


def write_report(
    sweep: Sweep,
    advice: Recommendation,
    drawn: Mapping[str, Figure],
    tables: Sequence[Table] = (),
    votes: Path | None = None,
) -> Path:
    """Write ``report.html`` into the sweep's folder; return its path. Raises ResourceError when the disk is full.

    ``drawn``: plots by name. ``tables``: shown before the images. ``votes``: the page of blind votes, to link to.
    """
    table = [*filter(None, [unquantized_row(sweep)]), *sweep.rows]
    rule = str(rule_of(sweep.verdict)) if sweep.own else rule_of_candidates(sweep)
    badges = dict.fromkeys(advice.tied, "tied") | {advice.best: "best recipe", advice.job or advice.ship: "recommended"}
    images, notes = gallery(sweep, badges, advice.best)
    page = rendered(
        FOLDER / "page.html",
        kind=f"{model_name(sweep)} · {kind_of_folder(sweep)}",
        facts=facts(sweep),
        headline=advice.headline if sweep.own else "Which candidate is worth its bits",
        figures=figures_in_words(advice, sweep),
        advice=advice,
        badges=badges,
        names=sweep.recipes | {UNQUANTIZED: UNQUANTIZED},
        rule=rule[0].upper() + rule[1:],
        warnings=(warnings := warnings_of(sweep)),
        kinds=", ".join(f"{count} {kind}" for kind, count in Counter(each.split(":")[0] for each in warnings).items()),
        rows=table,
        columns=known_columns(table),
        plots=[(name, CAPTIONS[name], Markup(svg(figure, name))) for name, figure in drawn.items()],
        tables=tables,
        image_notes=notes,
        votes=votes.name if votes else None,
        images=images,
        data=htmlsafe_json_dumps(images, allow_nan=False),
    )
    path = sweep.directory / REPORT
    write_text(path, page)
    return path


def rendered(template: Path, **content: object) -> str:
    """Render an HTML template, with the ``.css`` and ``.js`` files of its name inside; no other script may run."""
    script = Markup(source(template.with_suffix(".js")))
    page = ENVIRONMENT.from_string(source(template)).render(
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(source(template.with_suffix(".css"))),
        script=script,
        **content,
    )
    return page.lstrip() + "\n"


def figures_in_words(advice: Recommendation, sweep: Sweep) -> str:
    """Return the title's second line: the figures of the recommended or best recipe, or why there is no recipe."""
    best = next((row for row in sweep.rows if row["job"] == advice.best), None)
    if best is None or advice.ship == UNDECIDED:
        return advice.sentence
    return figures_of(best) if advice.job else f"The best recipe, {sweep.recipes[advice.best]}, is {figures_of(best)}"


def kind_of_folder(sweep: Sweep) -> str:
    own, jobs = len(sweep.names), len(sweep.jobs)
    if not sweep.own:
        return f"{jobs} candidates" if jobs > 1 else "one candidate" if jobs else ""
    different = f", {jobs} of them different" if jobs < own else ""
    return f"sweep of {own} jobs{different}" if own > 1 else "one job"


def source(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


def distinct(values: Iterable[Any]) -> str:
    """Join the distinct values in order, without None and empty texts."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def model_name(sweep: Sweep) -> str:
    paths = (job.record["knobs"]["model"]["path"] or "" for job in sweep.jobs)
    return distinct(Path(str(path)).stem for path in paths) or sweep.directory.absolute().name


def facts(sweep: Sweep) -> list[tuple[str, str]]:
    """Return facts on the sweep (checkpoint, engine, machine, date, ...) by name; where jobs differ, all values."""
    done = [job.record for job in sweep.done]
    engines = ((record["knobs"]["infer"]["engine"], record["environment"]["versions"]) for record in done)
    calibrated = ((at(record["knobs"], knob) for knob in ("calib_size", "n_steps")) for record in done)
    return [
        ("checkpoint", distinct(map(weights_of, done))),
        ("engine", distinct(f"{engine} {known[engine] or ''}".rstrip() for engine, known in engines if engine)),
        ("machine", distinct(machine_of(record["environment"]["machine"]) for record in done)),
        ("intervals of speed-ups", distinct(map(occasions_of, conditions_of(sweep).values()))),
        ("date", started(sweep)),
        ("images", distinct(filter(None, map(images_of, done)))),
        ("calibration", distinct(f"{prompts} prompts, {steps} steps" for prompts, steps in calibrated if prompts)),
        ("command", shlex.join(sweep.command)),
    ]


def images_of(record: Record) -> str | None:
    """Format number, size and steps of a job's images, and the input images if they do not start from noise."""
    infer: Mapping[str, Any] = record["knobs"]["infer"]
    if not infer or not {"width", "height", "steps"} <= set(infer):
        return None
    sizes = infer.get("sizes") or [f"{infer['width']}x{infer['height']}"]
    size = ", ".join(str(each).replace("x", " × ") for each in sizes)
    files = [f"{kind} {Path(str(infer[kind])).name}" for kind in ("image", "mask") if infer.get(kind)]
    files += [f"control {Path(str(each)).name}" for each in infer.get("control") or ()]
    start = f", from {' and '.join(files)}" if files else ""
    return f"{len(record['prompts'])}, {size}, {infer['steps']} steps{start}"


def weights_of(record: Record) -> str:
    """Join the file names of the checkpoint, a replaced autoencoder, fused LoRAs and ControlNets by `` + ``."""
    model = record["knobs"]["model"]
    lists = [each for name in ("loras", "controlnets") if isinstance(each := at(model, name), list)]
    files = (at(model, "path"), at(model, "vae"), *(file for each in lists for file in each))
    return " + ".join(Path(str(each)).name for each in files if each)


def started(sweep: Sweep) -> str:
    """Format the start of the earliest job, by the jobs' provenance; empty if unknown."""
    times = []
    for job in sweep.jobs:
        with suppress(OSError, ValueError, TypeError):
            text = at(read_object(job.directory / PROVENANCE), "started") or at(job.record, "provenance", "started")
            times += [datetime.fromisoformat(text)] if text else []
    if not times:
        return ""
    first = min(times, key=datetime.timestamp)
    return f"{first.day} {first:%B %Y, %H:%M %Z}"


def value_and_text(row: Row, column: Column) -> tuple[object, str]:
    """Return the value by which a table cell is sorted, and the cell's text."""
    if column.key == "psnr_db" and row["psnr_db"] is None and fidelity_db(row) is not None:
        return "Infinity", "identical"
    return row[column.key], column.text(row)


ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else printable(value),
)  # fmt: skip
ENVIRONMENT.globals |= {"knob_value": knob_value, "value_and_text": value_and_text}
