"""The plots of a sweep: fidelity against time and size, the latents by step, the layers' errors and their ranges.

Each is drawn once, in the colours of ``PALETTE``. A PNG keeps these colours; in the SVG of a page they become variables
of its style sheet, so a plot is dark where the page is dark. The road not taken is a plotting library in the browser: a
report has to open from a mail, years later, and load nothing.
"""

import csv
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from sd_quant.files import atomic_path, read_regular
from sd_quant.metrics import SCORES
from sd_quant.quantization.ranges_by_step import QUARTILES
from sd_quant.report.noise_floor import floor_lines, words_of
from sd_quant.report.readings import memory_of, memory_to_fit, names, number_at, score_of
from sd_quant.report.recommendation import fidelity_db, front, recommend
from sd_quant.report.record import CANDIDATE, DONE, VARIANTS
from sd_quant.report.sensitivity_plot import COLOURS
from sd_quant.report.summary import Job, Row, Sweep
from sd_quant.text import printable

LINES = [*COLOURS.values(), "#c44e52", "#64b5cd"]
PAPER, INK, SOFT, FAINT, BAND, ACCENT = "#ffffff", "#202124", "#5f6368", "#dfe1e5", "#f1f3f4", "#0f766e"
OTHER = "#b9bec5"  # a line among too many to tell apart
PALETTE = {  # colour -> the page's variable; all differ, as the colour is what becomes the variable
    PAPER: "paper", INK: "ink", SOFT: "soft", FAINT: "faint", BAND: "band", ACCENT: "accent",
    OTHER: "other",
    **{colour: f"line-{number}" for number, colour in enumerate(LINES, 1)},
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "axes.edgecolor": SOFT,
    "axes.facecolor": PAPER,
    "axes.labelcolor": SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": PAPER,
    "font.size": 10,
    "grid.color": FAINT,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sd-quant",  # ids that are the same every time
    "text.color": INK,
    "text.parse_math": False,  # a name may have dollar signs
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
HALF, WHOLE = (5.6, 3.8), (11.6, 3.9)  # of a page's width, in inches
PIXELS_PER_INCH = 150
LONGEST_NAME = 28
MOST_NAMES = 16  # more lines or points than this are named only where they matter
WORST_LAYERS = 6
CHANGING_LAYERS = 3  # whose ranges by step are drawn
MOST_BARS = 8  # recipes whose bytes by part are drawn
UNQUANTIZED_BAR, WORKING = "unquantized", "opening or calling one"
MOST_BOXES = 20
LARGEST_DRAWN = 1e6  # of a magnitude, more than fp16 has
MOST_FLOORS = 3  # of the ways to compute full precision, the lowest
DB_BEYOND = 3.0  # identical images have an infinite PSNR and are drawn this far above the rest
TIME, SIZE = "image_relative_time", "denoiser_bytes"
COSTS = {TIME: "prompt to image, % of the unquantized engine's time", SIZE: "size of the denoiser, MB"}
UNQUANTIZED = {TIME: lambda row: 1.0, SIZE: lambda row: row["denoiser_onnx_full_precision_bytes"]}
SCALE = {TIME: 100.0, SIZE: 1e-6}
UNIT = {TIME: "%", SIZE: "MB"}


@contextmanager
def style() -> Iterator[None]:
    """The style of the plots; needed for drawing and for saving, as both read matplotlib's settings."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box in the PNG; a browser has more fonts
        yield


def figures(sweep: Sweep) -> dict[str, Figure]:
    """The plots by name, of which those that show nothing are left out."""
    table = sweep.rows
    best = recommend(sweep, lambda row: row["job"]).job
    done = sorted((job for job in sweep.jobs if job.status == DONE), key=lambda job: job.name != best)
    floors = floor_lines(done)
    with style():
        drawn = {
            "pareto_latency": pareto(table, sweep.varied, TIME, best, floors),
            "pareto_size": pareto(table, sweep.varied, SIZE, best, floors),
            "parts": parts(done, sweep.varied),
            "trajectory": trajectory(sweep, best),
            "layers": next(filter(None, map(layers, done)), None),
            "ranges": next(filter(None, map(ranges, done)), None),
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def write_plots(sweep: Sweep) -> None:
    """Write ``<name>.png`` of all ``figures`` into the sweep's folder. Raises ResourceError when the disk is full."""
    for name, figure in figures(sweep).items():
        with atomic_path(sweep.directory / f"{name}.png") as temporary, style():
            figure.savefig(temporary, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})


def svg(figure: Figure, name: str) -> str:
    """An ``<svg>`` element for a page that defines the variables ``--plot-<colour>`` of ``PALETTE``.

    Its ids start with ``name``, so that several fit on one page. It is safe HTML, whatever the labels say.
    """
    text = io.StringIO()
    with style():
        figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # the latter would apply to the whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        element.attrib = {key.rpartition("}")[2]: for_page(value, name) for key, value in element.attrib.items()}
        if "id" in element.attrib:
            element.attrib["id"] = f"{name}-{element.attrib['id']}"
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "style": "stroke-linejoin: round"}
    return ElementTree.tostring(root, encoding="unicode")


def for_page(value: str, name: str) -> str:
    """An attribute's value with the page's colours and font, and with the ids that ``svg`` gives to elements."""
    value = re.sub(r"#[0-9a-f]{6}\b", lambda match: colour_on_page(match[0]), value)
    value = re.sub(r"^#|(?<=url\()#", f"#{name}-", value)
    return re.sub(r"(font:[^;]*?px) [^;]*|font-family:[^;]*;?", r"\1", value)


def colour_on_page(colour: str) -> str:
    return f"var(--plot-{PALETTE[colour]})" if colour in PALETTE else colour


def short_name(row: Mapping, varied: Sequence[str]) -> str:
    """A row's name in a plot: the values of the varied knobs, or the job's name."""
    values = " · ".join(knob_value(row.get(knob)) for knob in varied)
    return fitted(row.get(CANDIDATE) or values or row["job"])


def knob_value(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def fitted(text: str, longest: int = LONGEST_NAME) -> str:
    """``text`` in one line, shortened in its middle where it is too long."""
    line = printable(text)
    half = longest // 2
    return line if len(line) <= longest else f"{line[: half - 1]}…{line[-half:]}"


def pareto(
    table: Sequence[Row], varied: Sequence[str], cost: str, recommended: str | None, floors: Mapping[str, float] = {}
) -> Figure | None:
    """A plot of PSNR over ``cost``, a column of ``COSTS``, with the front; None with fewer than two recipes.

    ``floors`` are dB of the noise floor by way, lowest first.
    """
    usable = [row for row in table if row["status"] == DONE and row[cost] is not None and fidelity_db(row) is not None]
    if len(usable) < 2:
        return None
    highest = max((fidelity_db(row) for row in usable if math.isfinite(fidelity_db(row))), default=0.0) + DB_BEYOND
    place = lambda row: (row[cost] * SCALE[cost], min(fidelity_db(row), highest))  # noqa: E731
    best = front(usable, cost)
    psnr, figure = SCORES["psnr"], Figure(figsize=HALF, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=f"{COSTS[cost]} (less is better)", ylabel=f"{psnr.title} to full precision, {psnr.unit}")
    axes.grid(linewidth=0.6)
    axes.margins(0.1, 0.14)
    axes.plot(*zip(*map(place, best), strict=True), color=SOFT, linewidth=1.2, zorder=2)
    for row in usable:
        chosen = row["job"] == recommended
        if cost == TIME:
            draw_interval(axes, row, place(row)[1])
        colour = ACCENT if chosen else INK if row in best else SOFT
        axes.plot(*place(row), "*" if chosen else "o", color=colour, markersize=14 if chosen else 6, zorder=3)
    unquantized = [value * SCALE[cost] for row in usable if (value := UNQUANTIZED[cost](row)) is not None]
    if unquantized:
        mark_unquantized(axes, unquantized, UNIT[cost])
    low, high = axes.get_ylim()
    if high - low < 1:  # a decibel: less is no difference, and its ticks would be digits behind an offset
        axes.set_ylim((low + high - 1) / 2, (low + high + 1) / 2)
    draw_floors(axes, floors)
    named = [row for row in usable if len(usable) <= MOST_NAMES or row in best or row["job"] == recommended]
    named.sort(key=lambda row: row["job"] != recommended)  # the first has the choice of places
    name_points(
        axes,
        [place(row) for row in named],
        [short_name(row, varied) + (", identical" if math.isinf(fidelity_db(row)) else "") for row in named],
        [row["job"] == recommended for row in named],
        [place(row) for row in usable],
        [place(row) for row in best],
    )
    subject = " · ".join(varied)
    axes.set_title(f"named by {fitted(subject, 80)}" if subject else "", fontsize=9, color=SOFT)
    return figure


def parts(jobs: Sequence[Job], varied: Sequence[str]) -> Figure | None:
    """Bars of the bytes of the parts' files and of the memory of their engines, unquantized and by recipe.

    ``jobs`` are those that are done, of which the first ``MOST_BARS`` are drawn; equal bars are drawn once. None
    without sizes of several parts; without memory where that of no job was measured.
    """
    files, memory = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for job in jobs[:MOST_BARS]:
        label = short_name({**job.varied, "job": job.name}, varied)
        sizes = {part: sizes_of(job, part) for part in names(job.record, "sizes_bytes")}
        known = {part: each for part, each in sizes.items() if each is not None}
        for bar, variant in enumerate(VARIANTS):
            name = label if bar else UNQUANTIZED_BAR
            files.setdefault(name, {part: each[bar] for part, each in known.items()})
            memory.setdefault(name, held(job.record, variant))
    several = dict.fromkeys(part for bar in files.values() for part in bar)
    if len(several) < 2:
        return None
    panels = {"files of all parts, MB": files, "memory of all parts open at once, MB": memory}
    shown = [title for title, bars in panels.items() if any(bars.values())]
    figure = Figure(figsize=(WHOLE[0], 0.9 + 0.33 * len(files)), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
        draw_bars(axes, panels[title], [*several, *({WORKING: None} if panels[title] is memory else {})])
        axes.set(xlabel=title)
    first, last = figure.axes[0], figure.axes[-1]
    first.set_yticks(range(len(files)), [fitted(name, LONGEST_NAME) for name in files], fontsize=9)
    first.invert_yaxis()
    handles, labels = last.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=9, borderaxespad=0)
    return figure


def held(record: Any, variant: str) -> dict[str, float]:
    """Bytes that each part's engine holds, and what the hungriest takes beyond while it works; empty if not known."""
    if (fit := memory_to_fit(record, variant)) is None:
        return {}
    known = {part: memory_of(record, part, variant) for part in names(record, "memory")}
    opened = {part: each.opened for part, each in known.items() if each is not None}
    return opened | {WORKING: fit.together - sum(opened.values())}


def draw_bars(axes: Axes, bars: Mapping[str, Mapping[str, float]], pieces: Sequence[str]) -> None:
    """Draw a bar of megabytes for each entry, of ``pieces`` in the same order and colours, with its sum behind it."""
    lefts = [0.0] * len(bars)
    for piece, colour in zip(pieces, cycle(LINES), strict=False):
        widths = [bar.get(piece, 0.0) / 1e6 for bar in bars.values()]
        colour = OTHER if piece == WORKING else colour
        axes.barh(range(len(bars)), widths, left=lefts, color=colour, height=0.7, label=fitted(piece, LONGEST_NAME))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, total in enumerate(lefts):
        text = f"{total:,.1f}" if total else "not measured"
        axes.annotate(text, (total, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.margins(x=0.12)


def sizes_of(job: Job, part: str) -> tuple[float, float] | None:
    """Bytes of a part's file unquantized and as it is delivered; None where the record does not say."""
    full, own = (
        number_at(job.record, "sizes_bytes", part, f"onnx_{kind}").value for kind in ("full_precision", "quantized")
    )
    return None if full is None else (full, own if own is not None else full)


def draw_interval(axes: Axes, row: Row, height: float) -> None:
    """The interval of a point's time at 95 %, where it has one.

    PSNR has none here: prompts differ by decibels, and recipes are compared on each prompt, not by their means.
    """
    slow, fast = row["image_speedup_low"], row["image_speedup_high"]
    if slow and fast:
        axes.plot([SCALE[TIME] / fast, SCALE[TIME] / slow], [height] * 2, color=SOFT, linewidth=1.6, zorder=2.5)


def mark_unquantized(axes: Axes, values: Sequence[float], unit: str) -> None:
    """Draw a line at the median of what the jobs measured for the unquantized engine, on a band of all values."""
    middle = float(np.median(values))
    axes.axvspan(min(values), max(values), color=BAND, linewidth=0, zorder=0)
    axes.axvline(middle, color=SOFT, linestyle="--", linewidth=1, zorder=1)
    axes.annotate(
        f"unquantized, {middle:.3g} {unit}", (middle, 0.02), xycoords=("data", "axes fraction"), xytext=(-4, 0),
        textcoords="offset points", rotation=90, ha="right", va="bottom", color=SOFT, fontsize=9, in_layout=False,
    )  # fmt: skip


def draw_floors(axes: Axes, floors: Mapping[str, float]) -> None:
    """Draw lines at the lowest ``floors`` as far as half the axis further up; the others are named at its top."""
    low, high = axes.get_ylim()
    texts = {f"{words_of(way)}, {value:.1f} dB": value for way, value in [*floors.items()][:MOST_FLOORS]}
    drawn = {text: value for text, value in texts.items() if value <= high + (high - low) / 2}
    place: dict[str, Any] = {"color": SOFT, "fontsize": 8, "in_layout": False}
    if drawn:
        top = max(high, *drawn.values())
        axes.set_ylim(low, top + 0.06 * (top - low))
        axes.figure.draw_without_rendering()  # only then is it known where a point lies
    points = [square(point, 9) for line in axes.lines for point in axes.transData.transform(line.get_xydata())]
    for number, (text, value) in enumerate(drawn.items()):
        axes.axhline(value, color=SOFT, linestyle=(0, (4, 3)), linewidth=0.8, zorder=1)
        label = axes.annotate(
            text if number else f"noise floor by {text}: above it a difference is the arithmetic's", (0.01, value),
            xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points", va="bottom", **place,
        )  # fmt: skip
        above = np.array(label.get_window_extent().extents)
        below = above - np.array([0, 1, 0, 1]) * (above[3] - above[1] + 4 * axes.figure.dpi / 72)
        if overlap(below, points) < overlap(above, points):
            label.set(va="top", y=-2)
    if further := [text for text in texts if text not in drawn]:
        title = "further up" if drawn else "noise floor ↑"
        axes.annotate(f"{title}: {'; '.join(further)}", (0.01, 0.99), xycoords="axes fraction", va="top", **place)


def name_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    bold: Sequence[bool],
    marks: Sequence[tuple[float, float]],
    line: Sequence[tuple[float, float]],
) -> None:
    """Write each name beside its point, where it covers least of the other names, ``marks`` and ``line``.

    A name that covers less further away stands there, with a thread to its point.
    """
    axes.figure.draw_without_rendering()  # only then is it known where a point lies
    on_screen, pixel = axes.transData.transform, axes.figure.dpi / 72
    taken = [square(point, 9) for point in on_screen(marks)]
    for start, end in pairwise(on_screen(line)):
        taken += [square(start + (end - start) * part, 1) for part in np.linspace(0, 1, 30)]
    taken += [text.get_window_extent().extents for text in axes.texts]
    for point, name, is_bold in zip(points, names, bold, strict=True):
        label = axes.annotate(
            name, point, xytext=(0, 0), textcoords="offset points", fontsize=9, in_layout=False, zorder=4,
            color=ACCENT if is_bold else INK, weight="bold" if is_bold else "normal",
            arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip
        size = Text.get_window_extent(label).size  # an annotation's own includes the thread
        center, near = on_screen(point), 11 if is_bold else 7  # its mark is larger too

        def box(place: tuple[int, int, int], size=size, center=center) -> np.ndarray:
            right, up, away = place
            corner = center + np.array([right, up]) * away * pixel + size * (np.array([right, up]) - 1) / 2
            return np.concatenate([corner, corner + size])

        def covered(place: tuple[int, int, int], box=box) -> float:
            here = box(place)
            outside = np.prod(here[2:] - here[:2]) - overlap(here, [axes.bbox.extents])
            return 10 * outside + overlap(here, taken) + 2 * place[2]

        sides = [(1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1)]
        right, up, away = best = min(((*side, away) for away in (near, 20, 34, 48) for side in sides), key=covered)
        label.set(ha=("right", "center", "left")[right + 1], va=("top", "center", "bottom")[up + 1])
        label.set_position((right * away, up * away))
        label.arrow_patch.set_visible(away > near)
        taken.append(box(best))


def square(center: np.ndarray, half: float) -> np.ndarray:
    return np.concatenate([center - half, center + half])


def overlap(box: np.ndarray, others: Sequence) -> float:
    """The area that ``box`` shares with the others; all are ``x0, y0, x1, y1``."""
    corners = np.reshape(others, (-1, 4))
    sides = np.minimum(box[2:], corners[:, 2:]) - np.maximum(box[:2], corners[:, :2])
    return float(sides.clip(0).prod(axis=1).sum())


def trajectory(sweep: Sweep, recommended: str | None) -> Figure | None:
    """A plot of the latents' SQNR after each denoising step, a line for each recipe, named at its end."""
    lines = {}
    for job in sweep.jobs:
        values = score_of(job.record, SCORES["latent_sqnr_db"]).values
        if any(value is not None for value in values):
            lines[job.name] = np.array([np.nan if value is None else value for value in values], float)
    if not lines:
        return None
    names = {job.name: short_name({"job": job.name, **job.varied}, sweep.varied) for job in sweep.jobs}
    figure = Figure(figsize=WHOLE, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="denoising step", ylabel=SCORES["latent_sqnr_db"].heading)
    axes.grid(linewidth=0.6)
    axes.margins(0.01, 0.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ends = []
    many = len(lines) > MOST_NAMES
    extremes = sorted(lines, key=lambda name: last_value(lines[name]))
    for number, (name, steps) in enumerate(lines.items()):
        chosen = name == recommended
        turn, which = divmod(number, len(LINES))
        colour = ACCENT if chosen else OTHER if many else LINES[which]
        axes.plot(
            range(1, len(steps) + 1), steps, color=colour, linewidth=3 if chosen else 1.5, zorder=3 if chosen else 2,
            linestyle="-" if chosen or many else ("-", "--", ":")[turn % 3], marker="o", markersize=5 if chosen else 3,
        )  # fmt: skip
        if chosen or not many or name in (extremes[0], extremes[-1]):
            ends.append((np.flatnonzero(np.isfinite(steps))[-1] + 1, last_value(steps), names[name], colour, chosen))
    name_ends(axes, ends)
    subject = " · ".join(sweep.varied)
    axes.set_title(f"named by {fitted(subject, 80)}" if subject else "", fontsize=9, color=SOFT)
    return figure


def last_value(steps: np.ndarray) -> float:
    return steps[np.isfinite(steps)][-1]


def name_ends(axes: Axes, ends: Sequence[tuple[int, float, str, str, bool]]) -> None:
    """Write the names of lines right of their ends, in the order of their ends and a line of text apart."""
    axes.figure.draw_without_rendering()
    height = axes.bbox.height
    apart = 13 * axes.figure.dpi / 72 / height
    right = max((step for step, *_ in ends), default=1)
    # in shares of the height; from the lowest up, each at its end or just above the one below, then all back inside
    ordered = sorted(ends, key=lambda end: end[1])
    wanted = [(axes.transData.transform((step, value))[1] - axes.bbox.y0) / height for step, value, *_ in ordered]
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + apart) if places else place)
    excess = max(0.0, places[-1] - 1) if places else 0.0
    for (step, value, name, colour, is_bold), place in zip(ordered, places, strict=True):
        axes.annotate(
            name, (step, value), xycoords="data", xytext=(1.03, place - excess), textcoords="axes fraction",
            va="center", color=ACCENT if is_bold else INK, weight="bold" if is_bold else "normal", fontsize=9,
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8,
                                               "shrinkA": 2, "shrinkB": 4 if step == right else 2},
        )  # fmt: skip


def layers(job: Job) -> Figure | None:
    """A plot of the error of each quantized layer, in the order in which the network calls them; the worst are named.

    None where the job left no ``layers.csv`` that can be read.
    """
    quantized = sorted(read_layers(job), key=lambda layer: network_order(layer[0]))
    if not quantized:
        return None
    figure = Figure(figsize=WHOLE, layout="constrained")
    axes, key = figure.subplots(1, 2, width_ratios=(3, 1))
    key.axis("off")
    key.text(0, 1, fitted(job.name, 44), fontsize=9, va="top")
    axes.set(ylabel="error of the layer's output, %")
    axes.grid(axis="y", linewidth=0.6)
    places = range(len(quantized))
    for role in dict.fromkeys(role for _, role, _ in quantized):
        chosen = [place for place in places if quantized[place][1] == role]
        errors = [100 * quantized[place][2] for place in chosen]
        colour = COLOURS.get(role, SOFT)
        axes.vlines(chosen, 0, errors, color=colour, linewidth=1.6)
        axes.plot(chosen, errors, "o", color=colour, markersize=3.5, label=fitted(role))
    axes.set_ylim(0, 1.12 * 100 * max(error for *_, error in quantized) or 1)
    axes.set_xlim(-1, len(quantized))
    parts = [part_of(name) for name, *_ in quantized]
    starts = [place for place in places if place == 0 or parts[place] != parts[place - 1]]
    for start in starts[1:]:
        axes.axvline(start - 0.5, color=FAINT, linewidth=0.8, zorder=0)
    centers = [(start + end - 1) / 2 for start, end in pairwise([*starts, len(quantized)])]
    axes.set_xticks(centers, [fitted(parts[start], 14).replace(" ", "\n") for start in starts], fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.12), ncols=4, fontsize=9, handletextpad=0.2, borderaxespad=0)
    worst = sorted(places, key=lambda place: -quantized[place][2])[:WORST_LAYERS]
    for rank, place in enumerate(worst, 1):
        name, _, error = quantized[place]
        axes.annotate(
            str(rank), (place, 100 * error), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9,
            weight="bold",
        )  # fmt: skip
        top = 0.9 - 0.155 * (rank - 1)
        key.text(0, top, f"{rank}: {100 * error:.2g} %", fontsize=9, weight="bold", va="top")
        key.text(0, top - 0.065, fitted(abbreviated(name), 44), fontsize=8, color=SOFT, va="top")
    return figure


def ranges(job: Job) -> Figure | None:
    """Boxes of the magnitudes that the inputs of some layers have at each step: of those that change most.

    Drawn as NVIDIA's article on quantizing diffusion models does. None without a ``ranges.csv`` that can be read.
    """
    boxes = read_ranges(job)
    if not boxes:
        return None
    figure = Figure(figsize=WHOLE, layout="constrained")
    most = sorted(boxes, key=lambda name: -change(boxes[name]))[:CHANGING_LAYERS]
    for axes, name in zip(figure.subplots(1, len(most), squeeze=False)[0], most, strict=True):
        steps, largest = boxes[name], max(box["largest"] for box in boxes[name])
        shown = steps[:: math.ceil(len(steps) / MOST_BOXES)]
        line = {"color": SOFT, "linewidth": 0.9}
        axes.bxp(
            [
                {"med": box["median"], "q1": box["first_quartile"], "q3": box["third_quartile"], "whislo": box["least"],
                 "whishi": box["largest"]}
                for box in shown
            ],
            positions=[box["step"] for box in shown], widths=0.6 * len(steps) / len(shown), showfliers=False,
            manage_ticks=False, boxprops=line, whiskerprops=line, capprops=line,
            medianprops={"color": ACCENT, "linewidth": 1.6},
        )  # fmt: skip
        said = f"changes {change(steps):.2g}-fold"
        if kept := steps[0]["kept"]:
            axes.axhline(kept, color=LINES[0], linewidth=1.2, linestyle="--")
            said += f", {min(1.0, kept / largest):.0%} kept"
        axes.set_title(f"{fitted(abbreviated(name), 40)}\n{said}", fontsize=9)
        axes.set(xlabel="denoising step")
        axes.axvspan(0.3, len(steps) / 2 + 0.5, color=BAND, zorder=0)
        for place, noise in ((0.25, "high noise"), (0.75, "low noise")):
            axes.text(place, 0.98, noise, transform=axes.transAxes, ha="center", va="top", fontsize=8, color=SOFT)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0.3, len(steps) + 0.7)
        axes.set_ylim(0, 1.12 * largest)
    return figure


def change(steps: Sequence[Mapping[str, float]]) -> float:
    """The ratio of the largest to the smallest of the steps' largest magnitudes."""
    largest = [box["largest"] for box in steps]
    return max(largest) / max(min(largest), 1e-6)


def table_of(path: Path) -> csv.DictReader:
    """The rows of a CSV file of a job. Raises OSError and UnicodeDecodeError where there is none."""
    return csv.DictReader(read_regular(path).decode("utf-8").splitlines())


def read_ranges(job: Job) -> dict[str, list[dict[str, float]]]:
    """The rows of ``ranges.csv`` by layer, in the order of their steps, ``kept`` as 0 where there is none."""
    boxes: dict[str, list[dict[str, float]]] = {}
    try:
        for row in table_of(job.directory / "ranges.csv"):
            box = {key: float(row[key] or 0) for key in ("step", *QUARTILES, "kept")}
            if not all(math.isfinite(number) and 0 <= number < LARGEST_DRAWN for number in box.values()):
                return {}
            boxes.setdefault(row["name"], []).append(box)
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return {}
    return boxes


def read_layers(job: Job) -> list[tuple[str, str, float]]:
    """Name, role and relative error of each layer that has an error."""
    errors = []
    try:
        for row in table_of(job.directory / "layers.csv"):
            if row.get("output_error"):
                error = float(row["output_error"])
                if math.isfinite(error):
                    errors.append((row["name"], row["role"], error))
    except (OSError, ValueError, KeyError, csv.Error):
        return []
    return errors


PLACE = re.compile(r"(down|mid|up)_block(?:s\.(\d+))?\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)")
STAGES = {"down": 1, "mid": 2, "up": 3}


def network_order(name: str) -> tuple[int, int, int, int]:
    """A key that sorts the layers of a diffusers UNet as it calls them, which is not as it declares them."""
    match = PLACE.match(name)
    if match is None:
        return (0 if name.startswith("conv_in") else 4 if name.startswith("conv_") else 0, 0, 0, 0)
    stage, block, kind, index = match.groups()
    resamples = kind.endswith("samplers")
    return STAGES[stage], int(block or 0), 10**6 if resamples else int(index), int(kind != "resnets")


def part_of(name: str) -> str:
    """The stage and block of a layer; an empty text for layers before the first and after the last block."""
    match = PLACE.match(name)
    first = name.partition(".")[0]
    if match is None:
        return "" if first.startswith("conv_") or first.endswith(("embed", "embedding")) else first
    return " ".join(filter(None, match.group(1, 2)))


def abbreviated(name: str) -> str:
    """A layer's name without what repeats in all of them."""
    for long, short in (("_blocks", ""), ("_block", ""), ("attentions", "attention"), ("transformer", "block"),
                        ("resnets", "resnet")):  # fmt: skip
        name = name.replace(long, short)
    return name
