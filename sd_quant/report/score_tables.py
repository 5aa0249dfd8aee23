"""Tables of scores in relation to full precision: the noise floor, requested scores, scores by prompt category.

The noise floor is full precision computed another way on the same prompts (``sd_quant.stages.noise_floor``). A recipe
closer to the reference than that way, prompt by prompt, is indistinguishable from full precision computed that way. No
single way is the right one: another batch size changes one level of one pixel, bf16 what people may find with a
magnifier, and both are called full precision. So each way is shown under its name.

For scores by a network (CLIP) or against photographs (FID) the paired difference from full precision is shown with its
interval, as prompts vary far more than a recipe changes one prompt's score. Tables by category show what a mean hides.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from sd_quant.errors import SdQuantError
from sd_quant.metrics import NAMED, NOT_ASKED, SCORES, Against, Score, score_named, scores_against
from sd_quant.metrics.intervals import Interval, paired_interval, recorded
from sd_quant.report.readings import named_parts, score_of
from sd_quant.report.record import VARIANTS, CategoryScore, Record, at
from sd_quant.report.summary import Job, Sweep
from sd_quant.report.table import DASH, Table, plus_minus, table_of_texts

PSNR = SCORES["psnr"]
QUANTIZED = VARIANTS[1]
FLOOR = "The noise floor: full precision computed another way"
FLOOR_CAPTION = (
    "PSNR of each recipe's images less that of full precision's own in another way, prompt by prompt, with the mean's "
    "interval at 95 %. Above the floor a difference is the arithmetic's."
)
WORDS = {  # for the ways of which a name says little
    "runtime": "the unquantized engine",
    "batch": "another batch",
    "threads": "another number of threads",
    "isa": "a lower class of processor",
}
ASKED = "Scores that were asked for, less full precision's"
ASKED_CAPTION = (
    "The mean difference from full precision's images over prompts, with its interval at 95 %; of FID the distance "
    "itself. An interval that holds 0 tells nothing apart."
)
BY_CATEGORY = (
    "Mean over the prompts of each category, with its interval at 95 %. In brackets the paired difference to full "
    "precision with its own interval; better and worse only where it differs after Holm's correction over the "
    "categories, at 5 % for all of them together."
)


# The noise floor


def words_of(way: str) -> str:
    """Describe a way to compute full precision, such as ``another batch``; a precision, such as bf16, by its name."""
    return WORDS.get(way, way)


def ways(record: Record) -> list[str]:
    """Return the ways to compute full precision whose PSNR is recorded, the lowest first, identical images last."""
    floors = record["noise_floor"]
    found = {way: floors[way]["psnr"]["mean"] for way in named_parts(floors) if floors[way]["psnr"]}
    return sorted(found, key=lambda way: (found[way] is None, found[way]))


def beyond(record: Record, way: str) -> Interval | None:
    """Estimate the recipe's PSNR less that of full precision computed by ``way``, paired by prompt (images' means).

    Identical images count as the highest finite PSNR. None if all the way's images are identical or values are missing.
    """
    own, floor = (score_of(each, PSNR).values for each in (record["fidelity"], record["noise_floor"][way]))
    if len(own) != len(floor) or not any(floor):
        return None
    best = max(value for value in (*own, *floor) if value is not None)
    groups = record["prompts"] if len(record["prompts"]) == len(own) else range(len(own))
    own, floor = ([best if value is None else value for value in values] for values in (own, floor))
    return paired_interval(own, floor, groups)


def floor_lines(jobs: Sequence[Job]) -> dict[str, float]:
    """Return each way's lowest mean PSNR among jobs, ascending; ways that give identical images are left out."""
    found = dict[str, float]()
    for job in jobs:
        for way in ways(job.record):
            if (mean := job.record["noise_floor"][way]["psnr"]["mean"]) is not None:
                found[way] = min(mean, found.get(way, mean))
    return dict(sorted(found.items(), key=lambda each: each[1]))


def floor_table(record: Record) -> Table:
    """Build a table, a row for each way to compute full precision: its scores, and the recipe's PSNR less its own."""
    scores, lines, notes = scores_against(Against.IMAGES), [], []
    for way in ways(record):
        floor = record["noise_floor"][way]
        mean, worst = floor["psnr"]["mean"], floor["psnr"]["min"]
        means = {score: floor[score.key]["mean"] for score in scores[1:]}
        others = (DASH if value is None else score.text(value) for score, value in means.items())
        psnr = ["identical" if mean is None else PSNR.text(mean), DASH if worst is None else PSNR.text(worst)]
        lines.append([words_of(way), *psnr, *others, told(beyond(record, way))])
    for way in named_parts(record["noise_floor"]):
        if reason := at(record["noise_floor"][way], "reason"):
            notes.append(f"no noise floor by {words_of(way)}: {reason}")
        if reason := record["noise_floor"][way]["psnr"]["reason"]:
            notes.append(f"noise floor by {words_of(way)}: {reason}")
    titles = ["full precision again, by", PSNR.title, "worst", *(score.title for score in scores[1:]), "the recipe"]
    return table_of_texts(titles, lines, notes=notes)


def told(difference: Interval | None) -> str:
    """Format a PSNR difference as ``20.1 ± 0.9 dB below it``, with ``from it`` where the interval holds 0."""
    if difference is None:
        return DASH
    place = "above" if difference.low > 0 else "below" if difference.high < 0 else "from"
    reach = "" if difference.reach is None else f" ± {difference.reach:.1f}"
    return f"{abs(difference.value):.1f}{reach} dB {place} it"


def floor_tables(sweep: Sweep) -> list[Table]:
    """Return a table of the recipes' PSNR less each noise floor, in a list; an empty list without noise floors."""
    jobs = [job for job in sweep.jobs if ways(job.record)]
    columns, means = list(dict.fromkeys(way for job in jobs for way in ways(job.record))), floor_lines(jobs)
    floors = [f"{means[way]:.1f} dB" if way in means else "identical" for way in columns]
    titles = ["recipe", *(f"{words_of(way)}, {floor}" for way, floor in zip(columns, floors, strict=True))]
    lines = [[sweep.recipes[job.name], *(told(beyond(job.record, way)) for way in columns)] for job in jobs]
    return [table_of_texts(titles, lines, FLOOR, FLOOR_CAPTION)] if jobs else []


# Scores by networks and photographs


def asked(record: Record) -> list[Score]:
    """Return the requested scores of a record: the NAMED scores that the run's knobs asked for."""
    entries = at(record["text_scores"], QUANTIZED) or {}
    return shown(key for key in NAMED if key in entries and at(entries, key, "reason") != NOT_ASKED)


def shown(keys: Iterable[str]) -> list[Score]:
    """Return the scores of these keys, except those of an add-on that is not installed or incompatible."""
    scores = []
    for key in keys:
        with suppress(SdQuantError):
            scores.append(score_named(key))
    return scores


def difference_text(score: Score, record: Record) -> str:
    """Format a score less full precision's as ``-0.02 [-0.05, 0.01]``; empty if unknown, one prompt has no interval."""
    if (difference := at(record["text_scores"], QUANTIZED, score.key, "difference")) is None:
        return ""
    mean, low, high = (difference.get(name) for name in ("mean", "low", "high"))
    ends = "" if low is None or high is None else f" [{score.format.format(low)}, {score.format.format(high)}]"
    return f"{score.format.format(mean)}{ends}"


def score_tables(sweep: Sweep) -> list[Table]:
    """Return a table of requested scores, a row for each recipe, in a list; an empty list without scores."""
    scored = [(job, found) for job in sweep.jobs if (found := asked(job.record))]
    scores = shown(key for key in NAMED if any(key == score.key for _, found in scored for score in found))

    def cell(score: Score, record: Record) -> str:
        value = at(record["text_scores"], QUANTIZED, score.key, "value")
        return difference_text(score, record) or (DASH if value is None else score.text(value))

    lines = [[sweep.recipes[job.name], *(cell(score, job.record) for score in scores)] for job, _ in scored]
    titles = ["recipe", *(score.title for score in scores)]
    return [table_of_texts(titles, lines, ASKED, ASKED_CAPTION)] if scores else []


def category_tables(sweep: Sweep) -> list[Table]:
    """Return a table for each score recorded by prompt category, with a column for each recipe."""
    tables = []
    keys = dict.fromkeys((*SCORES, *NAMED))
    for score in shown(key for key in keys if any(job.record["by_category"][key] for job in sweep.jobs)):
        found = {job.name: entry for job in sweep.jobs if (entry := job.record["by_category"][score.key])}
        lines = []
        for category in sorted({category for entry in found.values() for category in entry}):
            own = [entry.get(category) for entry in found.values()]
            most = max(entry["prompts"] for entry in own if entry)
            lines.append([category, str(most), *(category_cell(score, entry) for entry in own)])
        if lines:
            titles = ["category", "prompts", *(sweep.recipes[name] for name in found)]
            tables.append(table_of_texts(titles, lines, f"{score.heading}, by category", BY_CATEGORY))
    return tables


def category_cell(score: Score, entry: CategoryScore | None) -> str:
    """Format a category's mean, ``0.71 ± 0.10``; if full precision has the score, ``(-0.05 ± 0.02, worse)`` follows."""
    if not entry:
        return DASH
    text = plus_minus(recorded(entry["mean"], entry["interval"]), score.format)
    if (difference := entry["difference"]) is None:
        return text
    verdict = ", better" if (difference > 0) == score.more_is_better else ", worse"
    differs_by = plus_minus(recorded(difference, entry["difference_interval"]), score.format)
    return f"{text} ({differs_by}{verdict if entry['differs'] else ''})"
