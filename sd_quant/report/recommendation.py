"""Which recipe to ship, from a sweep's jobs: one rule, said in the report.

A recipe is worth its PSNR, up to 40 dB in each image, above which a person does not see the difference (the mean error
is 2.5 of 255 levels), and one dB for every 2 % of time that it saves. The unquantized engine is an option too: it has
40 dB and saves nothing. So a recipe that is hardly faster and visibly worse is not recommended.

Images and rounds are samples, so a difference in worth has an interval, over the prompts that both recipes have drawn
and the rounds in which both were timed. Recipes that cannot be told apart from the best are tied, and the most faithful
of them is recommended: its images are certain, the others' gain is not. All comparisons of a sweep hold together
(Bonferroni). Roads not taken: the largest worth alone, which is another recipe's the next day, and the knee of the
Pareto front, which moves when an unrelated job joins the sweep.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sd_quant.metrics import SCORES
from sd_quant.metrics.intervals import Interval, mean_interval, sum_of
from sd_quant.report.readings import score_of
from sd_quant.report.record import DONE
from sd_quant.report.summary import Row, Sweep
from sd_quant.report.table import between
from sd_quant.report.timing import Timed, log_speedup_over

IDENTICAL_SSIM = 1 - 1e-6


@dataclass(frozen=True)
class Rule:
    """The worth of a recipe in dB; the knobs ``verdict`` of ``quantize.py``."""

    enough_db: float = 40.0
    time_of_a_db: float = 0.02
    confidence: float = 0.95

    def __str__(self) -> str:
        return (
            f"worth of a recipe: its PSNR up to {self.enough_db:g} dB, and 1 dB for every "
            f"{100 * self.time_of_a_db:g} % of an image's time that it saves over the unquantized engine; of those "
            f"that cannot be told apart from the best with a confidence of {self.confidence:.0%}, the most faithful is "
            "recommended"
        )


def rule_of(knobs: Any) -> Rule:
    """The rule of a sweep's knobs; the usual constants stand in for missing and for impossible ones."""
    stated = {name: getattr(knobs, "get", lambda _: None)(name) for name in Rule.__dataclass_fields__}
    usable = {name: value for name, value in stated.items() if type(value) in (int, float) and value > 0}
    rule = Rule(**usable)
    return rule if rule.time_of_a_db < 1 and 0.5 <= rule.confidence < 1 else Rule()


@dataclass(frozen=True, eq=False)
class Option:
    """A measured recipe, or the unquantized engine, which has neither row nor rounds."""

    row: Row | None
    images: tuple[float, ...]  # PSNR of each in dB, no more than is enough
    timed: Timed | None
    speedup: float

    @property
    def fidelity(self) -> float:
        return sum(self.images) / len(self.images)


@dataclass(frozen=True)
class Recommendation:
    """``job`` is None where the unquantized engine is the one to ship, or nothing can be said."""

    job: str | None
    sentence: str
    tied: tuple[str, ...] = ()  # jobs that cannot be told apart from the recommended one


def options_of(sweep: Sweep, rule: Rule) -> list[Option]:
    """The recipes of a sweep that have both images and a latency."""
    found = []
    for job, row in zip(sweep.jobs, sweep.rows, strict=True):
        images = capped(job.record, rule.enough_db)
        if row["status"] == DONE and images and row["image_speedup"]:
            timed = job.timed if job.timed is not None and job.timed.rest is not None else None
            found.append(Option(row, images, timed, row["image_speedup"]))
    return found


def capped(record: Any, enough: float) -> tuple[float, ...]:
    """PSNR of each image in dB, ``enough`` for identical ones; one mean where the record has no more; or none."""
    psnr, ssim = (score_of(record, SCORES[name]) for name in ("psnr", "ssim"))
    images = list(zip(psnr.values, ssim.values or [None] * len(psnr.values), strict=False))
    values = [enough if are_identical(*each) else each[0] for each in images or [(psnr.value.value, ssim.value.value)]]
    return () if None in values else tuple(min(value, enough) for value in values)


def are_identical(psnr: float | None, ssim: float | None) -> bool:
    """True for images that equal full precision's: their PSNR is infinite, which a record has as null."""
    return psnr is None and ssim is not None and ssim > IDENTICAL_SSIM


def difference(a: Option, b: Option, rule: Rule, confidence: float) -> Interval:
    """The worth of ``a`` beyond that of ``b``, in dB."""
    if not b.row:
        fidelity = mean_interval([value - rule.enough_db for value in a.images], confidence)
    elif len(a.images) == len(b.images):
        fidelity = mean_interval([x - y for x, y in zip(a.images, b.images, strict=True)], confidence)
    else:
        value, low, high = mean_interval(b.images, confidence)
        fidelity = sum_of(mean_interval(a.images, confidence), Interval(-value, -high, -low))
    if a.timed is None or (b.row and b.timed is None):
        time = Interval(math.log(a.speedup / b.speedup), -math.inf, math.inf)
    else:
        time = log_speedup_over(a.timed, b.timed, confidence)
    return sum_of(fidelity, Interval(*(end / math.log1p(rule.time_of_a_db) for end in time)))


def tied_with_the_best(measured: Sequence[Option], rule: Rule) -> tuple[Option, list[Option]]:
    """The option of most worth, and all that cannot be told apart from it, itself among them."""
    unquantized = Option(None, (rule.enough_db,), None, 1.0)
    worth = {option: difference(option, unquantized, rule, rule.confidence).value for option in measured}
    everyone = [unquantized, *measured]
    best = max(everyone, key=lambda option: worth.get(option, 0.0))
    confidence = 1 - (1 - rule.confidence) / len(measured)

    def is_tied(option: Option) -> bool:
        a, b = (option, best) if option.row else (best, option)
        return option is best or difference(a, b, rule, confidence).holds(0)

    return best, [option for option in everyone if is_tied(option)]


def recommend(sweep: Sweep, describe: Callable[[Row], str]) -> Recommendation:
    """The recipe to ship with its figures, and what the fastest and the most faithful other would gain and lose."""
    rule = rule_of(sweep.verdict)
    measured = options_of(sweep, rule)
    if not measured:
        return Recommendation(None, "No job has both images and a latency, so there is nothing to recommend.")
    if (checkpoints := len({each.row["checkpoint"] for each in measured})) > 1:
        return Recommendation(
            None, f"The jobs are of {checkpoints} checkpoints: recipes are only comparable where they are of one."
        )
    machines = list(dict.fromkeys(each.row["timed_on"] for each in measured))
    if len(machines) > 1:
        on = {machine: [each for each in measured if each.row["timed_on"] == machine] for machine in machines}
        told = [f"On {machine}: {verdict(on[machine], rule, describe).sentence}" for machine in machines]
        return Recommendation(
            None, f"The jobs were timed on {len(machines)} machines and are compared within each. {' '.join(told)}"
        )
    return verdict(measured, rule, describe)


def verdict(measured: Sequence[Option], rule: Rule, describe: Callable[[Row], str]) -> Recommendation:
    """The recommendation among recipes of one checkpoint that were timed on one machine."""
    best, tied = tied_with_the_best(measured, rule)
    chosen = max(tied, key=lambda option: (option.fidelity, option.speedup))
    rivals = [describe(each.row) for each in tied if each.row and each is not chosen]
    names = tuple(each.row["job"] for each in tied if each.row and each is not chosen)
    if not chosen.row:
        row = max(measured, key=lambda each: difference(each, chosen, rule, rule.confidence).value).row
        judged, hint = ("cannot be told to be", " More prompts may tell.") if rivals else ("is not", "")
        return Recommendation(
            None,
            f"Ship the unquantized engine: the best recipe here, {describe(row)}, is {figures(row)}, which {judged} "
            f"worth what it loses.{hint}{share(row)}",
            names,
        )
    clauses = [figures(chosen.row)]
    if rivals:
        clauses.append(
            f"it cannot be told apart from {joined(rivals)}, and is the most faithful of the {len(rivals) + 1}"
        )
    others = [each.row for each in measured if each is not chosen]
    if others:
        fastest, closest = max(others, key=lambda row: row["image_speedup"]), max(others, key=fidelity_db)
        for row in [fastest] if fastest is closest else [fastest, closest]:
            clauses.append(f"{describe(row)} {changes(row, chosen.row)}")
    return Recommendation(chosen.row["job"], f"{describe(chosen.row)}: {'; '.join(clauses)}.", names)


def joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def figures(row: Row) -> str:
    speedup, psnr = (
        between(row[f"{column}_low"], row[f"{column}_high"], form)
        for column, form in (("image_speedup", "{:.2f}"), ("psnr_db", "{:.1f}"))
    )
    faster = f"{row['image_speedup']:.2f}x{speedup} as fast as the unquantized engine from prompt to image"
    return f"{faster}, PSNR {decibels(row)}{psnr}"


def fidelity_db(row: Row) -> float | None:
    """PSNR, infinite where all images are identical to full precision's."""
    return math.inf if are_identical(row["psnr_db"], row["ssim"]) else row["psnr_db"]


def changes(row: Row, best: Row) -> str:
    gain = row["image_speedup"] / best["image_speedup"] - 1
    time = f"{'gains' if gain > 0 else 'loses'} {abs(gain):.0%} of speed" if abs(gain) >= 0.005 else "is as fast"
    a, b = fidelity_db(row), fidelity_db(best)
    if math.isinf(a) or math.isinf(b):
        return f"{time} and has {decibels(row)}"
    return f"{time} and {'gains' if a > b else 'loses'} {abs(a - b):.1f} dB"


def decibels(row: Row) -> str:
    value = fidelity_db(row)
    return "infinite" if math.isinf(value) else f"{value:.1f} dB"


def share(row: Row) -> str:
    stored, full = row["denoiser_onnx_bytes"], row["denoiser_onnx_full_precision_bytes"]
    if not stored or not full:
        return ""
    return f" Its denoiser takes {stored / full:.0%} of the unquantized one's disk, if that is what matters."


def front(rows: Sequence[Row], cost: str) -> list[Row]:
    """The rows that no other beats in both PSNR and the column ``cost``, of which less is better; cheapest first."""
    usable = [row for row in rows if row["status"] == DONE and row[cost] is not None and fidelity_db(row) is not None]
    chosen: list[Row] = []
    for row in sorted(usable, key=lambda row: (row[cost], -fidelity_db(row))):
        if not chosen or fidelity_db(row) > fidelity_db(chosen[-1]):
            chosen.append(row)
    return chosen
