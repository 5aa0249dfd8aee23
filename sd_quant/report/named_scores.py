"""Tables of the scores by networks and photographs that the user names: CLIP score, PickScore, FID and others.

What decides is the difference from full precision on the same prompts, with its interval: prompts differ by far more
than a recipe moves the score of one. Tables of scores by the category of prompts show what a mean over all of them
hides.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sd_quant.errors import SdQuantError
from sd_quant.metrics import NAMED, NOT_ASKED, SCORES, Score, score_named
from sd_quant.metrics.intervals import recorded
from sd_quant.report.record import VARIANTS, at
from sd_quant.report.summary import Sweep
from sd_quant.report.table import DASH, Table, plus_minus, table_of_texts

FULL_PRECISION, QUANTIZED = VARIANTS
HEADING = "Scores that were asked for, less full precision's"
CAPTION = (
    "The mean difference from full precision's images over prompts, with its interval at 95 %; of FID the distance "
    "itself. An interval that holds 0 tells nothing apart."
)
BY_CATEGORY = (
    "Mean over the prompts of each category, with its interval at 95 %. In brackets the paired difference to full "
    "precision with its own interval; better and worse only where it differs after Holm's correction over the "
    "categories, at 5 % for all of them together."
)


def asked(record: Any) -> list[Score]:
    """The scores whose files the run's knobs name."""
    entries = at(record, "text_scores", QUANTIZED) or {}
    return shown(key for key in NAMED if key in entries and at(entries, key, "reason") != NOT_ASKED)


def shown(keys: Iterable[str]) -> list[Score]:
    """The scores of these keys, without those of an add-on that is not installed here or not for this package."""
    scores = []
    for key in keys:
        with suppress(SdQuantError):
            scores.append(score_named(key))
    return scores


def difference_text(score: Score, record: Any) -> str:
    """``-0.02 [-0.05, 0.01]``; of a single prompt without an interval; empty where there is no difference."""
    difference = at(record, "text_scores", QUANTIZED, score.key, "difference")
    if difference is None:
        return ""
    mean, low, high = (difference.get(name) for name in ("mean", "low", "high"))
    ends = "" if low is None or high is None else f" [{score.format.format(low)}, {score.format.format(high)}]"
    return f"{score.format.format(mean)}{ends}"


def score_tables(sweep: Sweep) -> list[Table]:
    """A line for each recipe, if any was scored."""
    scored = [(job, asked(job.record)) for job in sweep.jobs]
    scores = shown(key for key in NAMED if any(key == score.key for _, found in scored for score in found))
    if not scores:
        return []

    def cell(score: Score, record: Any) -> str:
        value = at(record, "text_scores", QUANTIZED, score.key, "value")
        return difference_text(score, record) or (DASH if value is None else score.text(value))

    lines = [[sweep.recipes[job.name], *(cell(score, job.record) for score in scores)]
             for job, found in scored if found]  # fmt: skip
    return [table_of_texts(["recipe", *(score.title for score in scores)], lines, HEADING, CAPTION)]


def category_tables(sweep: Sweep) -> list[Table]:
    """A table for each score that has categories, a column a recipe."""
    tables = []
    keys = dict.fromkeys((*SCORES, *NAMED))
    for score in shown(key for key in keys if any(at(job.record, "by_category", key) for job in sweep.jobs)):
        found = {job.name: at(job.record, "by_category", score.key) for job in sweep.jobs}
        found = {name: entries for name, entries in found.items() if entries}
        lines = []
        for category in sorted({category for entries in found.values() for category in entries}):
            own = [entries.get(category) for entries in found.values()]
            most = max(entry["prompts"] for entry in own if entry)
            lines.append([category, str(most), *(category_cell(score, entry) for entry in own)])
        if lines:
            titles = ["category", "prompts", *(sweep.recipes[name] for name in found)]
            tables.append(table_of_texts(titles, lines, f"{score.heading}, by category", BY_CATEGORY))
    return tables


def category_cell(score: Score, entry: Any) -> str:
    """``33.41 ± 1.20``, and where full precision has the score too ``0.71 ± 0.10 (-0.05 ± 0.02, worse)``."""
    if not entry:
        return DASH
    text = plus_minus(recorded(entry["mean"], entry.get("interval")), score.format)
    if (difference := entry.get("difference")) is None:
        return text
    told = ""
    if entry.get("differs"):
        told = ", better" if (difference > 0) == score.more_is_better else ", worse"
    differs_by = plus_minus(recorded(difference, entry.get("difference_interval")), score.format)
    return f"{text} ({differs_by}{told})"
