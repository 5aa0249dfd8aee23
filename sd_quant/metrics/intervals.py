"""How far a figure may be off, so that what decides has an interval.

- A mean over prompts has Student's t interval.
- A ratio of two latencies has an interval of batch means (Schmeiser, Operations Research 30, 1982): neighbouring rounds
  form up to BATCHES batches, each gives the median of its rounds' log ratios, and these have a t interval. Medians
  because a machine's hiccups are long, batches because what disturbs one round often disturbs the next. An engine is
  also faster or slower by OPENING each time it is opened, by where its weights come to lie in memory (Mytkowicz et al.,
  Producing wrong data without doing anything obviously wrong, ASPLOS 2009); rounds of one opening know nothing of that,
  so it is added. ``benchmarks/verdict.py`` measures it: one file, opened again and timed in the same rounds, differs
  from itself by up to 1.6 %. To open engines again and again would say it too, at two seconds each. Other roads not
  taken are the bootstrap over single rounds and the order statistics of the median: both take rounds for independent,
  and their 95 % are 67 to 92 where the ratio itself wanders (``benchmarks/coverage.py``).
- A sum of two independent figures has the interval of Zou & Donner (Statistics in Medicine 27, 2008), which takes from
  each the side that counts.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

BATCHES = 20
OPENING = 0.006  # standard deviation of an engine's latency from one opening to the next, as a share of it
FEWEST_ROUNDS = 5  # of an interval of a ratio: with fewer, Student's factor is so large that it says nothing


class Interval(NamedTuple):
    """A figure with the ends of its interval; infinite ends say that nothing is known."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def within(self, share: float) -> bool:
        """Whether neither end is further from the value than this share of it."""
        return max(self.high - self.value, self.value - self.low) <= share * abs(self.value)


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of independent values; of a single one nothing is known but itself."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = t_quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Interval:
    """The typical ratio of a / b, both > 0 and of the same rounds in their order: above 1 where b is faster.

    The ends are 0 and infinity with fewer than FEWEST_ROUNDS. Raises ValueError unless both are as many.
    """
    logs, batches = [math.log(x / y) for x, y in zip(a, b, strict=True)], min(BATCHES, len(a))
    ends = [number * len(a) // batches for number in range(batches + 1)]
    mean = mean_interval([statistics.median(logs[start:end]) for start, end in pairwise(ends)], confidence)
    opening = statistics.NormalDist(0, math.sqrt(2) * OPENING).inv_cdf((1 + confidence) / 2)
    half = math.hypot(mean.high - mean.value, opening)
    if len(logs) < FEWEST_ROUNDS:
        return Interval(math.exp(mean.value), 0.0, math.inf)
    return Interval(*map(math.exp, (mean.value, mean.value - half, mean.value + half)))


def sum_of(a: Interval, b: Interval) -> Interval:
    """The sum of two figures that have been found independently."""
    value = a.value + b.value
    low, high = math.hypot(a.value - a.low, b.value - b.low), math.hypot(a.high - a.value, b.high - b.value)
    return Interval(value, value - low, value + high)


@cache
def t_quantile(degrees: int, confidence: float) -> float:
    """How many standard errors a two-sided interval reaches to each side.

    By mpmath, which every torch brings, and not by scipy, which a machine that only times a network may lack.
    """
    from mpmath import betainc, findroot  # here, because every command imports this module and few compute an interval

    def beyond(t: float) -> float:
        """The probability of more standard errors than ``t`` (Abramowitz & Stegun 26.7.1)."""
        return betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True)

    return float(findroot(lambda t: beyond(t) - (1 - confidence), (1, 2)))
