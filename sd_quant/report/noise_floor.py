"""The noise floor in plots and tables: which recipes are nearer to full precision than it is to itself.

The floor is full precision computed another way, on the same prompts (``sd_quant.stages.noise_floor``). A recipe and a
way are compared prompt by prompt: whoever's images are nearer to the reference. A recipe that is nearer
than the way cannot be told from full precision that was computed this way, whatever its PSNR is.

There is a floor for each way, and none is the right one: another batch changes one level of one pixel, bf16 changes
what a person may find with a magnifier, and both are called full precision. So each is shown under its name.
"""

from collections.abc import Sequence
from typing import Any

from sd_quant.metrics import SCORES, Against, scores_against
from sd_quant.metrics.intervals import Interval, paired_interval
from sd_quant.report.readings import names, number_at, score_of
from sd_quant.report.record import at
from sd_quant.report.summary import Job, Sweep
from sd_quant.report.table import DASH, Table, table_of_texts

PSNR = SCORES["psnr"]
HEADING = "The noise floor: full precision computed another way"
WORDS = {  # for the ways of which a name says little
    "runtime": "the unquantized engine",
    "batch": "another batch",
    "threads": "another number of threads",
    "isa": "a lower class of processor",
}


def words_of(way: str) -> str:
    """``another batch``; a precision is its own name."""
    return WORDS.get(way, way)


def ways(record: Any) -> list[str]:
    """The ways of which the record has images, lowest PSNR first, those with identical images last."""
    found = [way for way in names(record, "noise_floor") if at(record, "noise_floor", way, PSNR.key)]
    means = {way: number_at(record, "noise_floor", way, PSNR.key, "mean").value for way in found}
    return sorted(found, key=lambda way: (means[way] is None, means[way]))


def beyond(record: Any, way: str) -> Interval | None:
    """PSNR of the recipe's images less that of the way's, over prompts; images of one prompt count as their mean.

    Identical images, whose PSNR is infinite, count as the best that is not. None where all of the way's are, and where
    not both are known.
    """
    floor = at(record, "noise_floor", way, PSNR.key, "values") or []
    own = score_of(record, PSNR).values
    if len(own) != len(floor) or not any(floor):
        return None
    best = max(value for value in (*own, *floor) if value is not None)
    prompts = at(record, "prompts") or []
    groups = prompts if len(prompts) == len(own) else range(len(own))
    own, floor = ([best if value is None else value for value in values] for values in (own, floor))
    return paired_interval(own, floor, groups)


def floor_lines(jobs: Sequence[Job]) -> dict[str, float]:
    """The mean PSNR of each way, lowest first; of several jobs' floors the lowest. Without identical images."""
    found = dict[str, float]()
    for job in jobs:
        for way in ways(job.record):
            if (mean := number_at(job.record, "noise_floor", way, PSNR.key, "mean").value) is not None:
                found[way] = min(mean, found.get(way, mean))
    return dict(sorted(found.items(), key=lambda each: each[1]))


def floor_table(record: Any) -> Table:
    """A line for each way: its scores, and where the recipe's images lie; reasons as notes. Without ways no lines."""
    scores, lines, notes = scores_against(Against.IMAGES), [], []
    for way in ways(record):
        entry = at(record, "noise_floor", way)
        means = [at(entry, score.key, "mean") for score in scores]
        texts = [DASH if value is None else score.text(value) for score, value in zip(scores, means, strict=True)]
        if means[0] is None:
            texts[0] = "identical"
        worst = at(entry, PSNR.key, "min")
        difference = beyond(record, way)
        lines.append([
            words_of(way), texts[0], DASH if worst is None else PSNR.text(worst), *texts[1:], told(difference)
        ])  # fmt: skip
    for way in names(record, "noise_floor"):
        if reason := at(record, "noise_floor", way, "reason"):
            notes.append(f"no noise floor by {words_of(way)}: {reason}")
        if reason := at(record, "noise_floor", way, PSNR.key, "reason"):
            notes.append(f"noise floor by {words_of(way)}: {reason}")
    titles = ["full precision again, by", PSNR.title, "worst", *(score.title for score in scores[1:]), "the recipe"]
    return table_of_texts(titles, lines, notes=notes)


def told(difference: Interval | None) -> str:
    """``20.1 ± 0.9 dB below it``, and ``from it`` where the interval holds 0."""
    if difference is None:
        return DASH
    place = "above" if difference.low > 0 else "below" if difference.high < 0 else "from"
    reach = "" if difference.reach is None else f" ± {difference.reach:.1f}"
    return f"{abs(difference.value):.1f}{reach} dB {place} it"


def floor_tables(sweep: Sweep) -> list[Table]:
    """A table of the sweep's recipes against each way, if it has a floor."""
    jobs = [job for job in sweep.jobs if ways(job.record)]
    if not jobs:
        return []
    columns = list(dict.fromkeys(way for job in jobs for way in ways(job.record)))
    means = floor_lines(jobs)
    titles = ["recipe", *(f"{words_of(way)}, {means[way]:.1f} dB" if way in means else f"{words_of(way)}, identical"
                          for way in columns)]  # fmt: skip
    lines = [[sweep.recipes[job.name], *(told(beyond(job.record, way)) for way in columns)] for job in jobs]
    return [table_of_texts(titles, lines, HEADING, EXPLANATION)]


EXPLANATION = (
    "PSNR of each recipe's images less that of full precision's own in another way, prompt by prompt, with the mean's "
    "interval at 95 %. Above the floor a difference is the arithmetic's."
)
