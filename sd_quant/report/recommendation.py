"""Which recipe to ship, from a sweep's rows: one rule, said in the report.

A recipe is worth its fidelity in dB, but no more than 40, above which a person does not see the difference (the mean
error is 2.5 of 255 levels), and one dB for every 2 % of time that it saves. The unquantized engine is a candidate: it
has 40 dB and saves nothing. So a recipe that is hardly faster and visibly worse is not recommended. The road not taken
is the knee of the Pareto front, which moves when an unrelated job joins the sweep.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sd_quant.report.record import DONE
from sd_quant.report.summary import Row

ENOUGH_DB = 40.0
TIME_OF_A_DB = 1.02
RULE = (
    f"worth of a recipe: its PSNR up to {ENOUGH_DB:.0f} dB, and 1 dB for every {TIME_OF_A_DB - 1:.0%} of an image's "
    "time that it saves over the unquantized engine"
)


@dataclass(frozen=True)
class Recommendation:
    """``job`` is None where the unquantized engine is the one to ship, or nothing can be said."""

    job: str | None
    sentence: str


def fidelity_db(row: Row) -> float | None:
    """PSNR; images that are all identical to full precision have an infinite one, which a record has as null."""
    if row["psnr_db"] is None and row["ssim"] is not None and row["ssim"] > 1 - 1e-6:
        return math.inf
    return row["psnr_db"]


def worth(row: Row) -> float | None:
    decibel, speedup = fidelity_db(row), row["image_speedup"]
    if decibel is None or not speedup:
        return None
    return min(decibel, ENOUGH_DB) + math.log(speedup) / math.log(TIME_OF_A_DB)


def recommend(rows: Sequence[Row], describe: Callable[[Row], str]) -> Recommendation:
    """The row of most worth, its figures, and what the fastest and the most faithful of the others would change."""
    measured = [row for row in rows if row["status"] == DONE and worth(row) is not None]
    if not measured:
        return Recommendation(None, "No job has both images and a latency, so there is nothing to recommend.")
    if (checkpoints := len({row["checkpoint"] for row in measured})) > 1:
        return Recommendation(
            None, f"The jobs are of {checkpoints} checkpoints: recipes are only comparable where they are of one."
        )
    best = max(measured, key=worth)
    faster = f"{speed(best['image_speedup'])} as fast as the unquantized engine from prompt to image"
    figures = f"{faster}, PSNR {decibels(best)}"
    if worth(best) <= ENOUGH_DB:
        return Recommendation(
            None,
            f"Ship the unquantized engine: the best recipe here, {describe(best)}, is {figures}, which is not worth "
            f"what it loses.{share(best)}",
        )
    others = [row for row in measured if row is not best]
    alternatives = []
    if others:
        fastest, closest = max(others, key=lambda row: row["image_speedup"]), max(others, key=fidelity_db)
        for row in [fastest] if fastest is closest else [fastest, closest]:
            alternatives.append(f"{describe(row)} {difference(row, best)}")
    return Recommendation(best["job"], f"{describe(best)}: {'; '.join([figures, *alternatives])}.")


def difference(row: Row, best: Row) -> str:
    gain = row["image_speedup"] / best["image_speedup"] - 1
    time = f"{'gains' if gain > 0 else 'loses'} {abs(gain):.0%} of speed" if abs(gain) >= 0.005 else "is as fast"
    a, b = fidelity_db(row), fidelity_db(best)
    if math.isinf(a) or math.isinf(b):
        return f"{time} and has {decibels(row)}"
    return f"{time} and {'gains' if a > b else 'loses'} {abs(a - b):.1f} dB"


def decibels(row: Row) -> str:
    value = fidelity_db(row)
    return "infinite" if math.isinf(value) else f"{value:.1f} dB"


def speed(ratio: float) -> str:
    return f"{ratio:.2f}x"


def share(row: Row) -> str:
    stored, full = row["denoiser_onnx_bytes"], row["denoiser_onnx_full_precision_bytes"]
    if not stored or not full:
        return ""
    return f" Its denoiser takes {stored / full:.0%} of the unquantized one's disk, if that is what matters."


def front(rows: Sequence[Row], cost: str) -> list[Row]:
    """The rows that no other beats in both PSNR and ``cost`` (a column, less is better), from the cheapest on."""
    usable = [row for row in rows if row["status"] == DONE and row[cost] is not None and fidelity_db(row) is not None]
    chosen: list[Row] = []
    for row in sorted(usable, key=lambda row: (row[cost], -fidelity_db(row))):
        if not chosen or fidelity_db(row) > fidelity_db(chosen[-1]):
            chosen.append(row)
    return chosen
