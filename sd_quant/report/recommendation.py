"""Recommend one recipe of a sweep: above a quality floor, by utility in dB ("worth") or by a target latency.

The floor comes first; below it no speed counts. The mean PSNR is at least 28 dB by the low end of its interval: 8 bits
and SVDQuant's 4 bits reach 30 and more on the shipped checkpoints, half of the steps only 25.5 and 25.8 (24 of the
report prompts). The worst image has 20 dB, an error of a tenth of the range, and no image is degenerate (broken). With
fewer than FEWEST_IMAGES images the mean itself counts: an interval over three is 2.5 standard deviations to a side.

The worth of a passing recipe is its PSNR, capped at 40 dB in each image, above which people see no difference (a mean
error of 2.5 of 255 levels), plus one dB for every 3 % of time saved: the lowest price of time at which all documented
recommendations still hold; at 3.5 % an INT8 recipe of the shipped SDXL that saves a sixth of the time no longer surely
makes up for its 2.6 dB. The unquantized engine is an option with 40 dB and no time saved. With a target latency, time
has no price: of the recipes that pass the floor and surely reach the target, the one of highest PSNR is chosen.

A difference in worth has an interval, over the prompts of both recipes and the rounds in which both were timed. Recipes
not significantly worse than the best are tied, and the tied recipe with the highest PSNR is recommended: its images are
certain, the gain of the others is not. Intervals of a sweep hold jointly (Bonferroni). Alternatives not taken: the
largest worth alone, which differs from day to day, and the knee of the Pareto front, which moves when an unrelated job
joins the sweep.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from sd_quant.metrics import SCORES
from sd_quant.metrics.intervals import Interval, mean_interval, sum_of
from sd_quant.report.readings import (
    are_identical,
    better_format_of,
    degenerate_images,
    interval_of,
    psnr_of_images,
    score_of,
)
from sd_quant.report.record import DONE, Fidelity
from sd_quant.report.rule import FEWEST_IMAGES, Rule, rule_of
from sd_quant.report.summary import Row, Sweep, interval_columns, scores_of
from sd_quant.report.table import between
from sd_quant.report.timing import Timed, log_speedup_over

MOST_TIES = 3  # that a sentence names
MOST_FAITHFUL = attrgetter("fidelity", "speedup")
RECIPE, UNQUANTIZED, UNDECIDED = "recipe", "unquantized", "undecided"  # what a recommendation ships


@dataclass(frozen=True, eq=False)
class Option:
    """An option to recommend: a measured recipe, or, if ``row`` and ``timed`` are None, the unquantized engine."""

    row: Row | None
    images: tuple[float, ...]  # PSNR of each in dB, no more than is enough
    timed: Timed | None
    speedup: float
    psnr: tuple[float, ...] = ()  # of each image that is not identical to full precision's, in dB
    degenerate: str = ""  # the images that are, in words
    better_format: str | None = None  # why another format is faster on its GPU
    name: str = ""  # of the recipe, in sentences

    @property
    def fidelity(self) -> float:
        return sum(self.images) / len(self.images)


@dataclass(frozen=True)
class Recommendation:
    """The recommendation of a sweep; ``job`` is None for the unquantized engine and for no recommendation."""

    job: str | None
    sentence: str  # begins with the headline where something is shipped
    tied: tuple[str, ...] = ()  # jobs that cannot be told apart from the recommended one
    ship: str = UNDECIDED  # or RECIPE or UNQUANTIZED
    headline: str = "No recommendation"
    best: str | None = None  # the job whose recipe is shipped, or is the best of those that are not
    # the rest is added by sd_quant.report.shipped, from what lies in the folder
    folder: str | None = None  # of that job, relative to the report's; None where nothing is shipped
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # onnx, plan, exports: by part or target
    figures: Mapping[str, float | None] = field(default_factory=dict)  # columns of summary.csv of the best job
    command: str | None = None  # that makes images with what is shipped


def recipe(chosen: Option, clauses: Sequence[str], tied: Sequence[str] = ()) -> Recommendation:
    """Recommend the recipe ``chosen``, for the reasons ``clauses``; ``tied``: jobs not significantly worse."""
    headline, job = f"Ship {chosen.name}", chosen.row["job"]
    return Recommendation(job, f"{headline}: {'; '.join(clauses)}.", (*tied,), RECIPE, headline, job)


def unquantized(why: str, measured: Sequence[Option], rule: Rule, tied: Sequence[str] = ()) -> Recommendation:
    """Recommend the unquantized engine over ``measured`` because of ``why``; ``tied``: jobs not significantly worse."""
    headline, best = "Ship the unquantized engine", max(measured, key=lambda option: worth(option, rule))
    return Recommendation(None, f"{headline}: {why}", (*tied,), UNQUANTIZED, headline, best.row["job"])


def options_of(sweep: Sweep, rule: Rule) -> list[Option]:
    """Return the finished recipes of a sweep that have both images and a latency."""
    found = []
    for job, row in zip(sweep.jobs, sweep.rows, strict=True):
        images = capped(job.record["fidelity"], rule.enough_db)
        if row["status"] == DONE and images and row["image_speedup"] and fidelity_db(row) is not None:
            timed = job.timed if job.timed is not None and job.timed.rest is not None else None
            psnr = tuple(filter(math.isfinite, capped(job.record["fidelity"], math.inf)))
            broken, better, name = degenerate_images(job.record), better_format_of(job.record), sweep.recipes[job.name]
            found.append(Option(row, images, timed, row["image_speedup"], psnr, broken, better, name))
    return found


def below_floor(option: Option, rule: Rule) -> str | None:
    """Describe how a recipe fails the rule's floor; None for a recipe that passes."""
    if option.better_format or option.degenerate or not option.psnr:
        return option.better_format or option.degenerate or None
    if rule.worst_db is not None and min(option.psnr) < rule.worst_db:
        return f"its worst image has {min(option.psnr):.1f} dB"
    mean = mean_interval(option.psnr, rule.confidence)
    if rule.floor_db is None or (mean.low if len(option.psnr) >= FEWEST_IMAGES else mean.value) >= rule.floor_db:
        return None
    surely = f" and perhaps only {mean.low:.1f} dB" if mean.value >= rule.floor_db else ""
    return f"its images have {mean.value:.1f} dB in the mean{surely}"


def wanted_speedup(option: Option, rule: Rule) -> float | None:
    """Return the speed-up that a recipe needs for the target; None without a target or an unquantized latency."""
    if rule.image_ms is None:
        return rule.speedup
    unquantized = option.row.get("image_full_precision_ms") if option.timed is None else option.timed.image_ms
    return unquantized / rule.image_ms if unquantized else None


def speedup_of(option: Option, confidence: float) -> Interval:
    """Return the speed-up of an image with its interval: 0 to infinity (unknown) without timed rounds."""
    return option.timed.image_speedup(confidence) if option.timed else Interval(option.speedup, 0.0, math.inf)


def reaches(option: Option, rule: Rule) -> bool | None:
    """Check whether a recipe's whole speed-up interval reaches the target; None if the target is inside or unknown."""
    wanted, speedup = wanted_speedup(option, rule), speedup_of(option, rule.confidence)
    if wanted is None:
        return None
    return True if speedup.low >= wanted else False if speedup.high < wanted else None


def capped(fidelity: Fidelity, enough: float) -> tuple[float, ...]:
    """Return each image's PSNR in dB, at most ``enough``; the mean alone if nothing else is recorded; () if unknown."""
    psnr, ssim = (score_of(fidelity, SCORES[name]).value.value for name in ("psnr", "ssim"))
    values = psnr_of_images(fidelity) or [math.inf if are_identical(psnr, ssim) else psnr]
    return () if None in values else tuple(min(value, enough) for value in values)


def closer(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Interval:
    """Estimate the mean PSNR of ``a`` less that of ``b``, in dB; paired by image if both have equally many."""
    if len(a) == len(b):
        return mean_interval([x - y for x, y in zip(a, b, strict=True)], confidence)
    value, low, high = mean_interval(b, confidence)
    return sum_of(mean_interval(a, confidence), Interval(-value, -high, -low))


def difference(a: Option, b: Option, rule: Rule, confidence: float) -> Interval:
    """Estimate the worth of ``a`` less the worth of ``b`` in dB: PSNR plus credit for time saved."""
    fidelity = closer(a.images, b.images if b.row else b.images * len(a.images), confidence)
    if a.timed is None or (b.row and b.timed is None):
        time = Interval(math.log(a.speedup / b.speedup), -math.inf, math.inf)
    else:
        time = log_speedup_over(a.timed, b.timed, confidence)
    return sum_of(fidelity, Interval(*(end / math.log1p(rule.time_of_a_db) for end in time)))


def worth(option: Option, rule: Rule) -> float:
    """Compute a recipe's PSNR plus its credit in dB for time saved, relative to the unquantized engine."""
    return difference(option, Option(None, (rule.enough_db,), None, 1.0), rule, rule.confidence).value


def tied_with_the_best(measured: Sequence[Option], rule: Rule) -> list[Option]:
    """Return the option of most worth, which may be the unquantized engine, and all not significantly worse."""
    unquantized, best = Option(None, (rule.enough_db,), None, 1.0), max(measured, key=lambda each: worth(each, rule))
    best = best if worth(best, rule) > 0 else unquantized
    confidence = 1 - (1 - rule.confidence) / len(measured)

    def is_tied(option: Option) -> bool:
        a, b = (option, best) if option.row else (best, option)
        return option is best or difference(a, b, rule, confidence).holds(0)

    return [option for option in (unquantized, *measured) if is_tied(option)]


def recommend(sweep: Sweep) -> Recommendation:
    """Recommend a recipe or the unquantized engine; neither without figures or for several checkpoints or machines."""
    rule = rule_of(sweep.verdict)
    measured = options_of(sweep, rule)
    columns = ("checkpoint", "timed_on")
    checkpoints, machines = ([*dict.fromkeys(each.row[column] for each in measured)] for column in columns)
    if not measured:
        why = "No job has both images and a latency, so there is nothing to recommend."
    elif len(checkpoints) > 1:
        why = f"The jobs are of {len(checkpoints)} checkpoints: recipes are only comparable where they are of one."
    elif len(machines) > 1:
        on = {machine: [each for each in measured if each.row["timed_on"] == machine] for machine in machines}
        told = " ".join(f"On {machine}: {verdict(each, rule).sentence}" for machine, each in on.items())
        why = f"The jobs were timed on {len(machines)} machines and are compared within each. {told}"
    else:
        return verdict(measured, rule)
    return Recommendation(None, why)


def verdict(measured: Sequence[Option], rule: Rule) -> Recommendation:
    """Recommend among recipes of one checkpoint that were timed on one machine."""
    failing = {option: why for option in measured if (why := below_floor(option, rule))}
    passing = [option for option in measured if option not in failing]
    if rule.target and all((wanted_speedup(option, rule) or math.inf) <= 1 for option in measured):
        found = unquantized(f"it reaches {rule.target} itself.", measured, rule)
    elif not passing:
        found = unquantized("no recipe here passes the floor.", measured, rule)
    else:
        found = (of_target if rule.target else of_worth)(passing, rule)
    if not failing:
        return found
    fastest, others = max(failing, key=lambda option: option.speedup), len(failing) - 1
    more = f"; {others} more {'fails' if others == 1 else 'fail'} it" if others else ""
    speed = f"is {fastest.speedup:.2f}x as fast as the unquantized engine and fails the floor"
    return replace(found, sentence=f"{found.sentence} {fastest.name} {speed}: {failing[fastest]}{more}.")


def of_target(passing: Sequence[Option], rule: Rule) -> Recommendation:
    """Recommend the recipe of highest PSNR that surely reaches the target, or say how near the fastest comes."""
    reaching = [option for option in passing if reaches(option, rule)]
    if not reaching:
        fastest = max(passing, key=lambda option: option.speedup)
        more = "not surely; more rounds, a larger timing.budget_s, may tell"
        in_the_mean = fastest.speedup >= (wanted_speedup(fastest, rule) or math.inf)
        known = {False: "does not reach it", None: f"reaches it in the mean, {more}" if in_the_mean else f"may, {more}"}
        return Recommendation(
            None,
            f"No recipe that passes the floor surely reaches {rule.target}. The fastest, {fastest.name}, is "
            f"{figures(fastest.row)}{time_of(fastest, rule)}: it {known[reaches(fastest, rule)]}.",
            best=fastest.row["job"],
        )
    chosen, number = max(reaching, key=MOST_FAITHFUL), len(reaching)
    among = "only recipe that surely reaches" if number == 1 else f"most faithful of {number} recipes that surely reach"
    clauses = [figures(chosen.row) + time_of(chosen, rule), f"the {among} {rule.target}"]
    return recipe(chosen, clauses + beside(chosen, passing))


def time_of(option: Option, rule: Rule) -> str:
    """Format the milliseconds of an image with their interval; empty unless the target is in milliseconds."""
    wanted = wanted_speedup(option, rule)
    if rule.image_ms is None or wanted is None:
        return ""
    value, low, high = (wanted * rule.image_ms / each if each else None for each in speedup_of(option, rule.confidence))
    return f", {value:,.0f} ms{between(high or None, low, '{:,.0f}')} for an image"


def of_worth(measured: Sequence[Option], rule: Rule) -> Recommendation:
    """Recommend the option of highest PSNR among those tied with the option of most worth."""
    tied = tied_with_the_best(measured, rule)
    chosen = max(tied, key=MOST_FAITHFUL)
    others = [each for each in tied if each.row and each is not chosen]
    rivals, jobs = [each.name for each in others], [each.row["job"] for each in others]
    if not chosen.row:
        best = max(measured, key=lambda option: worth(option, rule))
        judged, hint = ("cannot be told to be", " More prompts may tell.") if rivals else ("is not", "")
        why = f"the best recipe here, {best.name}, is {figures(best.row)}, which {judged} worth what it loses."
        return unquantized(why + hint, measured, rule, jobs)
    told = rivals if len(rivals) <= MOST_TIES else [*rivals[: MOST_TIES - 1], f"{len(rivals) - MOST_TIES + 1} more"]
    among = f", and is the most faithful of the {len(rivals) + 1}"
    clauses = [figures(chosen.row), *([f"it cannot be told apart from {joined(told)}{among}"] if rivals else [])]
    return recipe(chosen, clauses + beside(chosen, measured), jobs)


def beside(chosen: Option, everyone: Sequence[Option]) -> list[str]:
    """Return clauses that compare ``chosen`` with the fastest and with the most faithful of the other recipes."""
    others = [each for each in everyone if each is not chosen]
    by = (lambda each: each.speedup), (lambda each: fidelity_db(each.row))
    two = dict.fromkeys(max(others, key=key) for key in by) if others else ()
    return [f"{each.name} {changes(each.row, chosen.row)}" for each in two]


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
    """Return a row's PSNR in dB, infinite where all images are identical to full precision's."""
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


def front(rows: Sequence[Row], cost: str) -> list[Row]:
    """Return the Pareto front of rows: highest PSNR, lowest value in the column ``cost``; cheapest first."""
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda row: (row[cost], -fidelity_db(row))):
        if not chosen or fidelity_db(row) > fidelity_db(chosen[-1]):
            chosen.append(row)
    return chosen


def unquantized_row(sweep: Sweep) -> Row | None:
    """Build the unquantized engine's row: medians over jobs, and its images' scores against full precision.

    None without a finished job, and where jobs are of several checkpoints or machines, which have no engine in common.
    """
    done = [(job, row) for job, row in zip(sweep.jobs, sweep.rows, strict=True) if row["status"] == DONE]
    jobs, table = [job for job, _ in done if not job.judged], [row for job, row in done if not job.judged]
    if len({(row["checkpoint"], row["timed_on"]) for row in table}) != 1:
        return None
    images = next(filter(None, (job.record["fidelity_unquantized_engine"] for job in jobs)), {})
    denoiser_ms, image_ms, size = (
        median(row[column] for row in table)
        for column in ("denoiser_full_precision_ms", "image_full_precision_ms", "denoiser_onnx_full_precision_bytes")
    )
    bytes_of_a_bit = median(row["denoiser_bits"] and row["denoiser_bytes"] / row["denoiser_bits"] for row in table)
    return dict.fromkeys(table[0]) | {
        "job": UNQUANTIZED,
        "status": DONE,
        **scores_of(images),
        **interval_columns("psnr_db", interval_of(images, SCORES["psnr"])),
        "denoiser_ms": denoiser_ms,
        "image_ms": image_ms,
        "denoiser_speedup": denoiser_ms and 1.0,
        **dict.fromkeys(("image_speedup", "image_relative_time"), image_ms and 1.0),
        "run_by": next((row["run_by"] for row in table if row["run_by"] != "simulation"), None),
        "denoiser_bytes": size,
        "denoiser_bits": size / bytes_of_a_bit if size and bytes_of_a_bit else None,
    }


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
