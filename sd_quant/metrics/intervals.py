"""How far a figure may be off, so that what decides has an interval.

- A mean over prompts has Student's t interval.
- A ratio of two latencies has an interval of batch means (Schmeiser, Operations Research 30, 1982): neighbouring rounds
  form a batch, each gives the median of its rounds' log ratios, and these have a t interval. Medians because a
  machine's hiccups are long, batches because what disturbs one round often disturbs the next.
- An engine is faster or slower each time it is opened, by where its weights come to lie in memory (Mytkowicz et al.,
  Producing wrong data without doing anything obviously wrong, ASPLOS 2009). So engines are opened several times, and
  the rounds of one opening, or of a few neighbouring ones, are a batch: no number of rounds in an opening makes an
  interval narrower than openings differ. How much they differ is estimated from all engines that were timed beside each
  other, by a two-way analysis of variance (Scheffe, The analysis of variance, 1959, chapter 4): what is left of the
  logarithms when the engine's mean and the opening's are taken out. Few openings say little of that: below
  FEWEST_DEGREES the rounds form BATCHES batches, and what is known of other machines, OPENING, is added.
- Roads not taken for a ratio are the bootstrap over single rounds and the order statistics of the median: both take
  rounds for independent, and their 95 % are 67 to 92 where the ratio itself wanders (``benchmarks/coverage.py``).
- A sum of two independent figures has the interval of Zou & Donner (Statistics in Medicine 27, 2008), which takes from
  each the side that counts.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

BATCHES, BATCHES_OF_OPENINGS = 20, 10
OPENING = 0.01  # standard deviation of an engine's latency from one opening to the next, as a share of it
FEWEST_DEGREES = 8  # of freedom, with which openings say how much they differ
FEWEST_ROUNDS = 5  # of an interval of a ratio: with fewer, Student's factor is so large that it says nothing


class Interval(NamedTuple):
    """A figure with the ends of its interval; infinite ends say that nothing is known."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

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


def ratio_interval(
    a: Sequence[float],
    b: Sequence[float],
    openings: Sequence[int] = (),
    beside: Sequence[Sequence[float]] = (),
    confidence: float = 0.95,
    known: float | None = None,
) -> Interval:
    """The typical ratio of a / b, both > 0 and of the same rounds in their order: above 1 where b is faster.

    ``openings`` says how many rounds each opening of the engines has, and is empty where they were opened once.
    ``beside`` has the latencies of all engines that were in these rounds, a and b among them, if there were more.
    ``known``: by what openings differ where these are too few to say it, else OPENING; 0 for these very openings.
    The ends are 0 and infinity with fewer than FEWEST_ROUNDS. Raises ValueError unless all are as many.
    """
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    engines = beside or (a, b)
    if (len(engines) - 1) * (len(openings) - 1) >= FEWEST_DEGREES:
        ends = in_batches([0, *accumulate(openings)])
        value = statistics.fmean(medians(logs, ends))
        deviation, degrees = deviation_of_openings(engines, ends)
        half = t_quantile(degrees, confidence) * deviation * math.sqrt(2 / (len(ends) - 1))
    else:
        ends = in_batches(range(len(a) + 1), BATCHES)
        value, _, high = mean_interval(medians(logs, ends), confidence)
        deviation = (OPENING if known is None else known) * math.sqrt(2 / max(1, len(openings)))
        half = math.hypot(high - value, deviation * statistics.NormalDist().inv_cdf((1 + confidence) / 2))
    if len(logs) < FEWEST_ROUNDS:
        return Interval(math.exp(value), 0.0, math.inf)
    return Interval(*map(math.exp, (value, value - half, value + half)))


def in_batches(ends: Sequence[int], most: int = BATCHES_OF_OPENINGS) -> list[int]:
    """``ends`` of neighbours, of which so many are joined that at most ``most`` are left."""
    batches = min(most, len(ends) - 1)
    return [ends[number * (len(ends) - 1) // batches] for number in range(batches + 1)]


def medians(values: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [statistics.median(values[start:end]) for start, end in pairwise(ends)]


def deviation_of_openings(engines: Sequence[Sequence[float]], ends: Sequence[int]) -> tuple[float, int]:
    """The standard deviation of one engine's log latency from one opening to the next, and its degrees of freedom.

    What all engines have in common in a round or in an opening does not count: the machine was slower for all.
    Raises ValueError unless all have as many rounds as ``ends`` say.
    """
    logs = [[math.log(each) for each in rounds] for rounds in engines]
    if any(len(rounds) != ends[-1] for rounds in logs):
        raise ValueError(f"latencies of {list(map(len, logs))} rounds, of which the openings have {ends[-1]}")
    common = [statistics.fmean(each) for each in zip(*logs, strict=True)]  # of a round
    found = [medians([log - mean for log, mean in zip(rounds, common, strict=True)], ends) for rounds in logs]
    of_openings = [statistics.fmean(each) for each in zip(*found, strict=True)]
    of_all = statistics.fmean(of_openings)
    left = [
        value - opening - statistics.fmean(own) + of_all
        for own in found
        for value, opening in zip(own, of_openings, strict=True)
    ]
    degrees = (len(found) - 1) * (len(of_openings) - 1)
    return math.sqrt(sum(each**2 for each in left) / degrees), degrees


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
