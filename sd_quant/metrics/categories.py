"""Scores by prompt category, and a test whether quantization changes a score in some category.

Means have Student's t interval over prompts; images of one prompt count as their mean. Differences to full precision
are paired by prompt. With ten categories and no real difference, some category "differs" at 95 % in 40 % of runs, so
p-values of a score are corrected over its categories by Holm's procedure (Scandinavian Journal of Statistics 6, 1979),
never worse than Bonferroni's. ``differs`` uses the corrected p-value; the interval is uncorrected, and may exclude zero
where ``differs`` is false. There is no correction for testing several scores.
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
    """Build the record's ``by_category``: each score in each category, in alphabetical order; {} without categories.

    ``scores`` has, by key, the values of each image, and those of full precision if they are compared, otherwise None.
    Images without a value, pairs with only one value, and scores without values are left out.
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
    """Return, for each distinct prompt, the mean of its values that are not None, over the images at ``places``."""
    return means_of_groups([values[place] for place in places], [prompts[place] for place in places])


def ends(interval: Interval) -> list[float] | None:
    """Return the interval's ends for the record; None for the interval of a single value."""
    return [interval.low, interval.high] if interval.known else None


def p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Student's paired t test on ``differences``; None for a single difference.

    Where all differences are equal, p is 1 if they are zero and otherwise the sign test's, because scores with few
    possible values are often equal by chance.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, deviation = fmean(differences), stdev(differences)
    if deviation <= 1e-12 * max(map(abs, differences)):
        return 2.0 ** (1 - count) if mean else 1.0
    return float(t_beyond(abs(mean) / deviation * math.sqrt(count), count - 1))
