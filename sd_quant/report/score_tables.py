"""Table of requested scores in relation to full precision.

For scores by a network (CLIP) or against photographs (FID) the paired difference from full precision is shown with its
interval, as prompts vary far more than a recipe changes one prompt's score.
"""

from collections.abc import Iterable
from contextlib import suppress

from sd_quant.errors import SdQuantError
from sd_quant.metrics import NAMED, NOT_ASKED, SCORES, Score, score_named
from sd_quant.report.record import VARIANTS, Record, at
from sd_quant.report.summary import Sweep
from sd_quant.report.table import DASH, Table, table_of_texts

PSNR = SCORES["psnr"]
QUANTIZED = VARIANTS[1]
ASKED = "Scores that were asked for, less full precision's"
ASKED_CAPTION = (
    "The mean difference from full precision's images over prompts, with its interval at 95 %; of FID the distance "
    "itself. An interval that holds 0 tells nothing apart."
)

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
