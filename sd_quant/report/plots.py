"""The plots of a sweep: fidelity over time and size, bytes by part, error by step, error and input range by layer.

The unquantized engine is a point among the recipes, so a slower recipe is never on the Pareto front. Alternative not
taken: a line at the unquantized engine's cost, which would hide that it is also the closest to full precision.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from sd_quant.files import atomic_path, read_regular
from sd_quant.metrics import SCORES
from sd_quant.quantization.percentile import QUARTILES
from sd_quant.report.drawing import ACCENT, BAND, COLOURS, FAINT, INK, LINES, OTHER, SOFT, new_figure, style
from sd_quant.report.readings import WORKING, held, number_at, score_of
from sd_quant.report.recommendation import UNQUANTIZED, Recommendation, fidelity_db, front, unquantized_row
from sd_quant.report.record import CANDIDATE, DONE, VARIANTS
from sd_quant.report.summary import Job, Row, Sweep
from sd_quant.report.table import knob_value
from sd_quant.text import fitted

PIXELS_PER_INCH = 300
MOST_NAMES = 16  # more lines or points than this are named only where they matter
MOST_BARS = 8  # recipes whose bytes by part are drawn
WORST_LAYERS = 6
STANDS_OUT = 1.4  # times the next layer's error
CHANGING_LAYERS = 3  # whose ranges by step are drawn
MOST_BOXES = 20
BOX = ("whislo", "q1", "med", "q3", "whishi")  # matplotlib's names for QUARTILES
LARGEST_DRAWN = 1e6  # of a magnitude, more than fp16 has
DB_BEYOND = 3.0  # of identical images, whose PSNR is infinite, and of the unquantized engine, beyond the recipes
TIME, SIZE = "image_relative_time", "denoiser_bytes"
COSTS = {TIME: "prompt to image, % of the unquantized engine's time", SIZE: "size of the denoiser, MiB"}
SCALE = {TIME: 100.0, SIZE: 2**-20}


def figures(sweep: Sweep, advice: Recommendation) -> dict[str, Figure]:
    """Draw all plots of a sweep that have data, by name."""
    done = sorted(sweep.done, key=lambda job: job.name != advice.best)
    labels, title = {UNQUANTIZED: UNQUANTIZED}, f"named by {fitted(' · '.join(sweep.varied), 80)}"
    for job in sweep.jobs:  # a candidate's own name, the values of the varied knobs, or else the recipe
        values = " · ".join(knob_value(job.varied.get(knob)) for knob in sweep.varied)
        labels[job.name] = fitted(job.varied.get(CANDIDATE) or values or job.recipe)
    table, whole = sweep.rows, unquantized_row(sweep)
    with style():
        drawn = {
            "pareto_latency": pareto(table, labels, TIME, advice, whole),
            "pareto_size": pareto(table, labels, SIZE, advice, whole),
            "parts": parts(done, labels),
            "trajectory": trajectory(sweep.jobs, labels, advice.best),
            "layers": next((drawn for job in done if (drawn := layers(job, labels[job.name]))), None),
            "ranges": next(filter(None, map(ranges, done)), None),
        }
        for name in ("pareto_latency", "pareto_size", "trajectory"):
            if sweep.varied and drawn[name]:
                drawn[name].axes[0].set_title(title, fontsize=9, color=SOFT)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def write_plots(drawn: Mapping[str, Figure], folder: Path) -> None:
    """Write ``<name>.png`` of each figure into the folder. Raises ResourceError when the disk is full."""
    for name, figure in drawn.items():
        with atomic_path(folder / f"{name}.png") as temporary, style():
            figure.savefig(temporary, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})


def pareto(
    table: Sequence[Row], labels: Mapping[str, str], cost: str, advice: Recommendation, whole: Row | None = None
) -> Figure | None:
    """Plot PSNR over ``cost``, a column of ``COSTS``, with the Pareto front; None with fewer than two recipes.

    ``whole``: the unquantized engine's row.
    """
    recipes = [row for row in table if row["status"] == DONE and row[cost] is not None and fidelity_db(row) is not None]
    if len(recipes) < 2:
        return None
    finite = [row for row in recipes if math.isfinite(fidelity_db(row))]
    highest = max((row["psnr_db_high"] or row["psnr_db"] for row in finite), default=0.0) + DB_BEYOND
    if whole is not None and fidelity_db(whole) is None:  # nobody measured: it is full precision
        whole = whole | {"ssim": 1.0}
    usable = [*recipes, *([] if whole is None or whole[cost] is None else [whole])]
    place = lambda row: (row[cost] * SCALE[cost], min(fidelity_db(row), highest))  # noqa: E731

    def name(row: Row) -> str:
        fidelity = fidelity_db(row)
        beyond = f", {fidelity:.1f} dB ↑" if highest < fidelity < math.inf else ""
        identical = ", identical" if math.isinf(fidelity) and row is not whole else ""
        best_of_all = ", best recipe" if row["job"] == advice.best != advice.job else ""
        return f"{labels[row['job']]}{beyond}{identical}{best_of_all}"

    best, shipped = front(usable, cost), advice.job or advice.ship
    psnr, figure = SCORES["psnr"], new_figure()
    axes = figure.subplots()
    axes.set(xlabel=f"{COSTS[cost]} (less is better)", ylabel=f"{psnr.title} to full precision, {psnr.unit}")
    axes.grid(linewidth=0.6)
    axes.margins(0.1, 0.14)
    axes.plot(*zip(*map(place, best), strict=True), color=SOFT, linewidth=1.2, zorder=2)
    for row in usable:
        draw_intervals(axes, row, cost, place(row))
        colour = ACCENT if row["job"] in (shipped, advice.best) else INK if row in best else SOFT
        sign, size = ("*", 14) if row["job"] == shipped else ("D", 6) if row is whole else ("o", 6)
        axes.plot(*place(row), sign, color=colour, markersize=size, zorder=3)
    if cost == SIZE:
        axes.set_xlim(left=0)
    marked = (shipped, advice.best, UNQUANTIZED)
    named = [row for row in usable if len(recipes) <= MOST_NAMES or row in best or row["job"] in marked]
    named.sort(key=lambda row: row["job"] not in marked)  # the first have the choice of places
    name_points(axes, [(place(row), name(row), row["job"] in (shipped, advice.best)) for row in named])
    return figure


def parts(jobs: Sequence[Job], labels: Mapping[str, str]) -> Figure | None:
    """Plot bars of file bytes and engine memory by part, unquantized and for the first MOST_BARS finished jobs.

    Jobs of equal labels are drawn once. None if fewer than two parts have sizes; no memory panel if not measured.
    """
    files, memory = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for job in jobs[:MOST_BARS]:
        whole, own = dict[str, float](), dict[str, float]()
        for part, files_of in job.record["sizes_bytes"].items():
            full, quantized = (number_at(files_of, f"onnx_{each}").value for each in VARIANTS)
            if full is not None:
                whole[part], own[part] = full, full if quantized is None else quantized
        for name, sizes, variant in zip((UNQUANTIZED, labels[job.name]), (whole, own), VARIANTS, strict=True):
            files.setdefault(name, sizes)
            memory.setdefault(name, held(job.record["memory"], variant))
    several = dict.fromkeys(part for bar in files.values() for part in bar)
    if len(several) < 2:
        return None
    panels = {"files of all parts, MiB": (files, [*several])}
    if any(memory.values()):
        panels["memory of all parts open at once, MiB"] = memory, [*several, WORKING]
    figure = new_figure(0.6 + len(panels) * (0.6 + 0.27 * len(files)))
    for axes, (title, panel) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        draw_bars(axes, *panel)
        axes.set(xlabel=title)
        axes.set_yticks(range(len(files)), [*files], fontsize=9)
        axes.invert_yaxis()
    handles, titles = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside upper left", ncols=3, fontsize=9, borderaxespad=0)
    return figure


def draw_bars(axes: Axes, bars: Mapping[str, Mapping[str, float]], pieces: Sequence[str]) -> None:
    """Draw a stacked bar in MiB for each entry of ``bars``, made of ``pieces`` (parts), labelled with its sum."""
    lefts, places = [0.0] * len(bars), range(len(bars))
    for piece, colour in zip(pieces, cycle(LINES), strict=False):
        colour, label = OTHER if piece == WORKING else colour, fitted(piece, len(WORKING))
        widths = [bar.get(piece, 0.0) / 2**20 for bar in bars.values()]
        last = axes.barh(places, widths, left=lefts, color=colour, height=0.7, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.bar_label(last, [f"{total:,.1f}" if total else "not measured" for total in lefts], padding=4, fontsize=9)
    axes.margins(x=0.14)


def draw_intervals(axes: Axes, row: Row, cost: str, point: tuple[float, float]) -> None:
    """Draw the 95 % intervals of a point's PSNR (over prompts) and time (over rounds), where known."""
    low, high = row["psnr_db_low"], row["psnr_db_high"]
    slow, fast = row["image_speedup_low"], row["image_speedup_high"]
    style: dict[str, Any] = {"color": SOFT, "linewidth": 1.2, "zorder": 2.5}
    if low is not None and row["psnr_db"] == point[1]:  # and not drawn below its PSNR
        axes.plot([point[0]] * 2, [low, high], **style)
    if cost == TIME and slow and fast:
        axes.plot([SCALE[TIME] / fast, SCALE[TIME] / slow], [point[1]] * 2, **style)


def name_points(axes: Axes, named: Sequence[tuple[tuple[float, float], str, bool]]) -> None:
    """Label points, given as (point, name, is_bold), where each label overlaps least; a line leads to a far label."""
    axes.figure.draw_without_rendering()  # only then is it known where a point lies
    on_screen, pixel = axes.transData.transform, axes.figure.dpi / 72
    taken: list[Any] = []
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata())
        taken += [square(point, 9) for point in corners] if line.get_marker() != "None" else []
        for start, end in pairwise(corners):
            taken += [square(start + (end - start) * part, 2) for part in np.linspace(0, 1, 30)]
    taken += [text.get_window_extent().extents for text in axes.texts]
    for point, name, is_bold in named:
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
    """Compute the sum of the areas that ``box`` shares with each of ``others``; boxes are ``x0, y0, x1, y1``."""
    corners = np.reshape(others, (-1, 4))
    sides = np.minimum(box[2:], corners[:, 2:]) - np.maximum(box[:2], corners[:, :2])
    return float(sides.clip(0).prod(axis=1).sum())


def trajectory(jobs: Sequence[Job], labels: Mapping[str, str], best: str | None) -> Figure | None:
    """Plot the latents' SQNR (signal to quantization noise, dB) after each denoising step, a line for each recipe.

    Lines are named at their ends; with more lines than colours, only the best recipe's, the highest and the lowest.
    """
    found = {job.name: score_of(job.record["fidelity"], SCORES["latent_sqnr_db"]).values for job in jobs}
    ratios = {name: each for name, values in found.items() if np.isfinite(each := np.array(values, float)).any()}
    if not ratios:
        return None
    figure = new_figure()
    axes = figure.subplots()
    axes.set(xlabel="denoising step", ylabel=SCORES["latent_sqnr_db"].heading)
    axes.grid(linewidth=0.6)
    axes.margins(0.02, 0.08)
    many, ends, steps = len(ratios) > len(LINES), {}, max(map(len, ratios.values()))
    for (name, values), colour in zip(ratios.items(), cycle(LINES), strict=False):
        chosen = name == best
        axes.plot(
            range(1, len(values) + 1), values, color=ACCENT if chosen else OTHER if many else colour, marker="o",
            linewidth=3 if chosen else 1.5, markersize=5 if chosen else 3, zorder=3 if chosen else 2,
        )  # fmt: skip
        last = np.flatnonzero(np.isfinite(values))[-1]
        ends[name] = last + 1, values[last]
    axes.set_xlim(right=1.3 * steps)  # room for the names
    axes.set_xticks([tick for tick in MaxNLocator(integer=True).tick_values(1, steps) if 1 <= tick <= steps])
    ordered = sorted(ends, key=lambda name: ends[name][1])
    named = [name for name in ordered if not many or name in (best, ordered[0], ordered[-1])]
    name_points(axes, [(ends[name], labels[name], name == best) for name in named])
    return figure


def layers(job: Job, label: str) -> Figure | None:
    """Plot the error of each quantized layer in the network's order, the worst named; None without ``layers.csv``."""
    quantized = sorted(read_layers(job), key=lambda layer: network_order(layer[0]))
    if not quantized:
        return None
    figure = new_figure(5.0)
    axes, key = figure.subplots(2, 1, height_ratios=(3, 1))
    axes.set_title(label, fontsize=9, color=SOFT, pad=20)
    key.axis("off")
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
    wide = [ends for ends in pairwise([*starts, len(quantized)]) if ends[1] - ends[0] > 0.06 * len(quantized)]
    centers = [(start + end - 1) / 2 for start, end in wide]  # narrower parts have no room for their names
    axes.set_xticks(centers, [fitted(parts[start], 14).replace(" ", "\n") for start, _ in wide], fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9, handletextpad=0.2, borderaxespad=0)
    worst = sorted(places, key=lambda place: -quantized[place][2])[:WORST_LAYERS]
    for rank, place in enumerate(worst, 1):
        name, _, error = quantized[place]
        axes.annotate(
            str(rank), (place, 100 * error), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9,
            weight="bold",
        )  # fmt: skip
        left, top = divmod(rank - 1, WORST_LAYERS // 2)
        key.text(0.5 * left, 1 - top / 3, f"{rank}: {100 * error:.2g} %", fontsize=9, weight="bold", va="top")
        key.text(0.5 * left, 0.85 - top / 3, fitted(abbreviated(name), 40), fontsize=8, color=SOFT, va="top")
    return figure


def much_the_worst(job: Job) -> tuple[str, float, float] | None:
    """Return the layer with an outlying error, its error and the next layer's in percent; None without an outlier."""
    ordered = sorted(((error, name) for name, _, error in read_layers(job)), reverse=True)
    if len(ordered) < 2 or ordered[0][0] < STANDS_OUT * ordered[1][0]:
        return None
    return ordered[0][1], 100 * ordered[0][0], 100 * ordered[1][0]


def ranges(job: Job) -> Figure | None:
    """Plot boxes of input magnitudes by step for the layers that change most over steps; None without ``ranges.csv``.

    Drawn as in NVIDIA's article on quantizing diffusion models.
    """
    boxes = read_ranges(job)
    if not boxes:
        return None
    most = sorted(boxes, key=lambda name: -change(boxes[name]))[:CHANGING_LAYERS]
    figure = new_figure(0.4 + 2.1 * len(most))
    for axes, name in zip(figure.subplots(len(most), squeeze=False)[:, 0], most, strict=True):
        steps, largest = boxes[name], max(box["largest"] for box in boxes[name])
        shown = steps[:: math.ceil(len(steps) / MOST_BOXES)]
        line = {"color": SOFT, "linewidth": 0.9}
        axes.bxp(
            [{theirs: box[ours] for theirs, ours in zip(BOX, QUARTILES, strict=True)} for box in shown],
            positions=[box["step"] for box in shown], widths=0.6 * len(steps) / len(shown), showfliers=False,
            manage_ticks=False, boxprops=line, whiskerprops=line, capprops=line,
            medianprops={"color": ACCENT, "linewidth": 1.6},
        )  # fmt: skip
        said = f"changes {change(steps):.2g}-fold"
        if kept := steps[0]["kept"]:
            axes.axhline(kept, color=LINES[0], linewidth=1.2, linestyle="--")
            said += f", {min(100, 100 * kept / largest):.0f} % kept"
        axes.set_title(f"{fitted(abbreviated(name), 40)} {said}", fontsize=9)
        axes.set(ylabel="magnitude of the input")
        axes.axvspan(0.3, len(steps) / 2 + 0.5, color=BAND, zorder=0)
        for place, noise in ((0.25, "high noise"), (0.75, "low noise")):
            axes.text(place, 0.98, noise, transform=axes.transAxes, ha="center", va="top", fontsize=8, color=SOFT)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0.3, len(steps) + 0.7)
        axes.set_ylim(0, 1.12 * largest)
    figure.axes[-1].set_xlabel("denoising step")
    return figure


def change(steps: Sequence[Mapping[str, float]]) -> float:
    """Compute the ratio between the largest and the smallest maximal magnitude over the denoising ``steps``."""
    largest = [box["largest"] for box in steps]
    return max(largest) / max(min(largest), 1e-6)


def read_table(path: Path, read: Callable[[Mapping[str, str]], Any]) -> list[Any]:
    """Parse each row of a job's CSV file with ``read``; an empty list where a row, or the file, is damaged."""
    try:
        return list(map(read, csv.DictReader(read_regular(path).decode("utf-8").splitlines())))
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return []


def read_ranges(job: Job) -> dict[str, list[dict[str, float]]]:
    """Read ``ranges.csv``: by layer, a dictionary for each step; an empty cell is 0. Empty if damaged or missing."""
    boxes: dict[str, list[dict[str, float]]] = {}
    columns = ("step", *QUARTILES, "kept")
    rows = read_table(job.directory / "ranges.csv", lambda row: (row["name"], {c: float(row[c] or 0) for c in columns}))
    for name, box in rows:
        if not all(math.isfinite(number) and 0 <= number < LARGEST_DRAWN for number in box.values()):
            return {}
        boxes.setdefault(name, []).append(box)
    return boxes


def read_layers(job: Job) -> list[tuple[str, str, float]]:
    """Read name, role and relative output error of each layer in ``layers.csv`` that has an error."""
    columns = lambda row: (row["name"], row["role"], float(row["output_error"] or "nan"))  # noqa: E731
    return [layer for layer in read_table(job.directory / "layers.csv", columns) if math.isfinite(layer[2])]


def plot_sensitivity(rows: Sequence[Mapping], curve: Sequence[Mapping], path: Path) -> None:
    """Draw the error by layer (``rows``) and by number of layers kept in fp16 (``curve``) into a 1600 x 600 PNG."""
    figure = Figure(figsize=(16, 6), dpi=100, layout="constrained")
    layers, budget = figure.subplots(1, 2)
    for role, colour in COLOURS.items():
        ranks, errors = ([row[key] for row in rows if row["role"] == role] for key in ("rank", "network_error"))
        layers.bar(ranks, errors, 1, color=colour, label=role)
    if kept := sum(row["kept"] for row in rows):
        layers.axvline(kept + 0.5, color="black", linestyle=":", label=f"{kept} kept in fp16")
    error = "relative error of the denoiser's output"
    layers.set(yscale="log", xlabel="layers, most sensitive first", ylabel=error, title="one layer quantized at a time")
    counts, measured, predicted = ([point[key] for point in curve] for key in ("kept", "relative_error", "predicted"))
    budget.plot(counts, measured, "o-", label="measured")
    budget.plot(counts, predicted, "--", label="root of the sum of squares")
    budget.set(xscale="symlog", ylim=(0, None), ylabel=error, title="all others quantized")
    budget.set(xlabel="most sensitive layers kept in fp16")
    for axes in (layers, budget):
        axes.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


PLACE = re.compile(r"(down|mid|up)_block(?:s\.(\d+))?\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)")
STAGES = {"down": 1, "mid": 2, "up": 3}


def network_order(name: str) -> tuple[int, int, int, int]:
    """Return a sort key for layers of a diffusers UNet in the order of calls, which differs from their declaration."""
    match = PLACE.match(name)
    if match is None:
        return (0 if name.startswith("conv_in") else 4 if name.startswith("conv_") else 0, 0, 0, 0)
    stage, block, kind, index = match.groups()
    resamples = kind.endswith("samplers")
    return STAGES[stage], int(block or 0), 10**6 if resamples else int(index), int(kind != "resnets")


def part_of(name: str) -> str:
    """Return the stage and block of a layer, such as ``down 1``; empty before the first and after the last block."""
    match = PLACE.match(name)
    first = name.partition(".")[0]
    if match is None:
        return "" if first.startswith("conv_") or first.endswith(("embed", "embedding")) else first
    return " ".join(filter(None, match.group(1, 2)))


def abbreviated(name: str) -> str:
    """Shorten the words of a layer's name that recur in all names, such as ``_blocks``."""
    name = re.sub("_blocks?", "", name)
    return name.replace("attentions", "attention").replace("transformer", "block").replace("resnets", "resnet")
