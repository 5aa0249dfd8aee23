"""Scores by the category of prompts, and whether quantization changes them in any.

Means have Student's t interval over prompts; images of one prompt count as their mean. A difference to full precision
is paired, prompt by prompt. Of ten categories without a difference one "differs" at 95 % four times in ten, so
p-values of a score are corrected over its categories by Holm's procedure (Scandinavian Journal of Statistics 6, 1979),
never worse than Bonferroni's. A category differs only after that; its interval is uncorrected, and may leave out zero
all the same. Several scores are not corrected for.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from sd_quant.metrics import score_named
from sd_quant.metrics.intervals import Interval, differences_of, holm, mean_interval, means_of_groups, t_beyond

LEVEL = 0.05  # of error, for all categories of a score together
Values = Sequence[float | None]


def by_category(
    prompts: Sequence[str], categories: Sequence[str] | None, scores: Mapping[str, tuple[Values, Values | None]]
) -> dict[str, dict[str, dict]]:
    """The record's ``by_category``: each score in each category, in alphabetic order; {} without categories.

    ``scores`` has values for each image by key, and full precision's where they are compared. Images without a value,
    pairs with one, and scores without any are left out.
    """
    if categories is None:
        return {}
    found: dict[str, dict[str, dict]] = {}
    for key, (values, reference) in scores.items():
        found[key] = {}
        for category in sorted(set(categories)):
            places = [place for place, of in enumerate(categories) if of == category]
            if own := of_prompts(prompts, places, values):
                mean = score_named(key).mean(own)  # within the score's range
                found[key][category] = {"prompts": len(own), "mean": mean.value, "interval": ends(mean)}
            if own and reference and (pairs := of_prompts(prompts, places, differences_of(values, reference))):
                mean = mean_interval(pairs)
                of_pairs = {"difference": mean.value, "difference_interval": ends(mean), "p": p_value(pairs)}
                found[key][category] |= of_pairs
        entries = found[key].values()
        for entry, p in zip(entries, holm([entry.get("p") for entry in entries]), strict=True):
            if p is not None:
                entry |= {"p": p, "differs": p <= LEVEL}
    return {key: entries for key, entries in found.items() if entries}


def of_prompts(prompts: Sequence[str], places: Sequence[int], values: Values) -> list[float]:
    """The mean value of each different prompt of the images at these ``places``, without None."""
    return means_of_groups([values[place] for place in places], [prompts[place] for place in places])


def ends(interval: Interval) -> list[float] | None:
    """The ends as a record has them; None of a single value."""
    return [interval.low, interval.high] if interval.known else None


def p_value(differences: Sequence[float]) -> float | None:
    """The two-sided p of Student's t test of paired ``differences``; None for a single one.

    Equal differences have no deviation: p is 1 if they are zero, and else the sign test's, because scores with few
    steps are often equal by chance.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, deviation = fmean(differences), stdev(differences)
    if deviation <= 1e-12 * max(map(abs, differences)):
        return 2.0 ** (1 - count) if mean else 1.0
    return float(t_beyond(abs(mean) / deviation * math.sqrt(count), count - 1))
