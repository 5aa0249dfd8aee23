"""Two plots: how much each layer costs when it alone is quantized, and what keeping the worst of them buys."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sd_quant.files import atomic_path

COLOURS = {"conv": "#4c72b0", "ffn": "#dd8452", "qkv": "#55a868", "linear": "#8172b3"}


def plot_sensitivity(rows: Sequence[Mapping], curve: Sequence[Mapping], path: Path) -> None:
    """Draw what a measurement of sensitivity gives as a PNG of 1600 x 600 pixels.

    ``rows``: the layers, as in ``sensitivity.csv``; ``curve``: the error by number of layers kept.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 6), dpi=100, layout="constrained")
    layers, budget = figure.subplots(1, 2)
    for role, colour in COLOURS.items():
        chosen = [row for row in rows if row["role"] == role]
        layers.bar(
            [row["rank"] for row in chosen], [row["network_error"] for row in chosen], 1, color=colour, label=role
        )
    kept = sum(row["kept"] for row in rows)
    if kept:
        layers.axvline(kept + 0.5, color="black", linestyle=":", label=f"{kept} kept in fp16")
    layers.set(yscale="log", xlabel="layers, most sensitive first", ylabel="relative error of the denoiser's output",
               title="one layer quantized at a time")  # fmt: skip
    layers.legend()
    counts = [point["kept"] for point in curve]
    budget.plot(counts, [point["relative_error"] for point in curve], "o-", label="measured")
    budget.plot(counts, [point["predicted"] for point in curve], "--", label="root of the sum of squares")
    budget.set(xscale="symlog", ylim=(0, None), xlabel="most sensitive layers kept in fp16",
               ylabel="relative error of the denoiser's output", title="all others quantized")  # fmt: skip
    budget.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
