"""Tables of scores by the category of prompts: what a mean over all prompts hides."""

from typing import Any

from sd_quant.metrics import SCORES, Score
from sd_quant.metrics.intervals import recorded
from sd_quant.report.record import at
from sd_quant.report.summary import Sweep
from sd_quant.report.table import DASH, Table, plus_minus, table_of_texts

CAPTION = (
    "Mean over the prompts of each category, with its interval at 95 %. In brackets the paired difference to full "
    "precision with its own interval; better and worse only where it differs after Holm's correction over the "
    "categories, at 5 % for all of them together."
)


def category_tables(sweep: Sweep) -> list[Table]:
    """A table for each score that has categories, a column a recipe."""
    tables = []
    for score in SCORES.values():
        found = {job.name: at(job.record, "by_category", score.key) for job in sweep.jobs}
        found = {name: entries for name, entries in found.items() if entries}
        counts = dict[str, int]()
        for entries in found.values():
            for category, entry in entries.items():
                counts[category] = max(counts.get(category, 0), entry["prompts"])
        if found:
            lines = [
                [category, str(counts[category]), *(cell(score, entries.get(category)) for entries in found.values())]
                for category in sorted(counts)
            ]
            titles = ["category", "prompts", *(sweep.recipes[name] for name in found)]
            tables.append(table_of_texts(titles, lines, f"{score.heading}, by category", CAPTION))
    return tables


def cell(score: Score, entry: Any) -> str:
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
