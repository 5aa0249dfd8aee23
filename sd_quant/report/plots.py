"""The plots of a sweep: fidelity over time and size, error by step and by layer.

The unquantized engine is a point among the recipes, so a slower recipe is never on the Pareto front. Alternative not
taken: a line at the unquantized engine's cost, which would hide that it is also the closest to full precision.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
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
from sd_quant.report.drawing import ACCENT, COLOURS, FAINT, INK, LINES, OTHER, SOFT, new_figure, style
from sd_quant.report.readings import score_of
from sd_quant.report.recommendation import UNQUANTIZED, Recommendation, fidelity_db, front, unquantized_row
from sd_quant.report.record import CANDIDATE, DONE
from sd_quant.report.summary import Job, Row, Sweep
from sd_quant.report.table import knob_value
from sd_quant.text import fitted

PIXELS_PER_INCH = 300
MOST_NAMES = 16  # more lines or points than this are named only where they matter
WORST_LAYERS = 6
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
            "trajectory": trajectory(sweep.jobs, labels, advice.best),
            "layers": next((drawn for job in done if (drawn := layers(job, labels[job.name]))), None),
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


def read_layers(job: Job) -> list[tuple[str, str, float]]:
    """Read name, role and relative output error of each layer in ``layers.csv`` that has an error."""
    try:
        rows = csv.DictReader(read_regular(job.directory / "layers.csv").decode("utf-8").splitlines())
        layers = [(row["name"], row["role"], float(row["output_error"] or "nan")) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return []
    return [layer for layer in layers if math.isfinite(layer[2])]


def plot_sensitivity(rows: Sequence[Mapping], path: Path) -> None:
    """Draw the error by layer (``rows``) into an 800 x 600 PNG."""
    figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
    layers = figure.subplots()
    for role, colour in COLOURS.items():
        ranks, errors = ([row[key] for row in rows if row["role"] == role] for key in ("rank", "network_error"))
        layers.bar(ranks, errors, 1, color=colour, label=role)
    if kept := sum(row["kept"] for row in rows):
        layers.axvline(kept + 0.5, color="black", linestyle=":", label=f"{kept} kept in fp16")
    layers.set(yscale="log", xlabel="layers, most sensitive first", ylabel="relative error of the denoiser's output")
    layers.set(title="one layer quantized at a time")
    layers.legend()
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
