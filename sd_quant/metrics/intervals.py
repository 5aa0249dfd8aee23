"""Confidence intervals for the measured values that are compared.

- The mean over prompts: Student's t interval.
- The ratio of two latencies: an interval of batch means (Schmeiser, Operations Research 30, 1982). Neighbouring rounds
  form a batch, because a disturbance often lasts for several; its value is the median of their log ratios, because a
  machine's hiccups are long; the values have a t interval.
- Openings: the speed of an engine changes each time it is opened, with the addresses of its weights (Mytkowicz et al.,
  Producing wrong data without doing anything obviously wrong, ASPLOS 2009). So engines are opened several times, and
  the rounds of one or a few neighbouring openings form a batch; more rounds in an opening make no interval narrower.
  The variance is estimated from all engines that were timed in the same rounds, by a two-way analysis of variance
  (Scheffe, The analysis of variance, 1959, chapter 4): the residuals of the logarithms after the engine's and the
  opening's means. With fewer than FEWEST_DEGREES degrees of freedom, rounds form BATCHES batches instead, and OPENING,
  measured on other machines, is added.
- Alternatives not taken for a ratio: the bootstrap over single rounds and the order statistics of the median. Both
  assume independent rounds, and their 95 % intervals cover 67 to 92 % where the ratio drifts (docs/results_speed.md).
- Occasions: within hours, a virtual machine's host changes the resources that it gives, and a ratio moves by more than
  the rounds of one hour show. The method of moments subtracts the squared errors of the single measurements from the
  variance between occasions (random effects: DerSimonian & Laird, Controlled Clinical Trials 7, 1986), for all engines
  together. The remaining variance counts twice, once for each of the two occasions that are compared.
- The sum of two independent values: the interval of Zou & Donner (Statistics in Medicine 27, 2008), which adds the
  distances to the lower ends, and those to the upper ends, in squares.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

BATCHES, BATCHES_OF_OPENINGS = 20, 10
OPENING = 0.01  # standard deviation of an engine's latency between openings, as a share of it
FEWEST_DEGREES = 8  # of freedom, to estimate that deviation
LARGEST = 40.0  # of a logarithm's interval, so that its exponential is a number
FEWEST_ROUNDS = 5  # for the interval of a ratio; with fewer, Student's factor makes it useless


class Interval(NamedTuple):
    """A value with the ends of its confidence interval, which are infinite where the interval is unknown."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def reach(self) -> float | None:
        """The distance from the value to the farther end; None for an unknown interval."""
        return max(self.high - self.value, self.value - self.low) if self.known else None

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """Both ends for a record, (None, None) for an unknown interval; the inverse of ``recorded``."""
        return (self.low, self.high) if self.known else (None, None)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def within(self, share: float) -> bool:
        """Return whether both ends differ from the value by at most this share of it."""
        return self.reach is not None and self.reach <= share * abs(self.value)


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def recorded(value: float, ends: Sequence[float | None] | Mapping | None) -> Interval:
    """Build an Interval from a record's ``ends``; it is unknown if these are None, or a mapping with a reason."""
    known = isinstance(ends, list | tuple) and len(ends) == 2 and None not in ends
    return Interval(value, *ends) if known else Interval(value, -math.inf, math.inf)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values with its t interval; the ends are infinite for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = t_quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired_interval(
    a: Sequence[float | None], b: Sequence[float | None], groups: Sequence[Hashable]
) -> Interval | None:
    """Return the mean of a - b with its interval, over pairs without None; a group (one prompt's images) counts once.

    Returns None without pairs. Raises ValueError unless all three have one length.
    """
    differences = means_of_groups(differences_of(a, b), groups)
    return mean_interval(differences) if differences else None


def differences_of(a: Sequence[float | None], b: Sequence[float | None]) -> list[float | None]:
    return [None if x is None or y is None else x - y for x, y in zip(a, b, strict=True)]


def means_of_groups(values: Iterable[float | None], groups: Iterable[Hashable]) -> list[float]:
    """Return, for each group, such as a prompt's images, the mean of its values that are not None."""
    found: dict[Hashable, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            found.setdefault(group, []).append(value)
    return list(map(statistics.fmean, found.values()))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for multiple tests by Holm's procedure, in the given order; None stays, uncounted."""
    adjusted: list[float | None] = [None] * len(values)
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    most = 0.0
    for rank, (value, place) in enumerate(known):
        adjusted[place] = most = max(most, min(1.0, value * (len(known) - rank)))
    return adjusted


def ratio_interval(
    a: Sequence[float],
    b: Sequence[float],
    openings: Sequence[int] = (),
    beside: Sequence[Sequence[float]] = (),
    confidence: float = 0.95,
    known: float | None = None,
) -> Interval:
    """Return the typical ratio a / b of latencies > 0 in the same rounds, in order; above 1 where b is faster.

    ``openings`` has the number of rounds in each opening, and is empty where engines were opened once. ``beside`` has
    the latencies of all engines in these rounds, if more than two. ``known`` is the deviation between openings (default
    OPENING) where these are too few to estimate it; with 0 the interval is for these openings alone. With fewer than
    FEWEST_ROUNDS rounds the ends are 0 and infinity.
    Raises ValueError unless all engines have as many rounds.
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
    """Merge neighbouring openings, with ``ends`` in rounds, into at most ``most`` batches; return their ends."""
    batches = min(most, len(ends) - 1)
    return [ends[number * (len(ends) - 1) // batches] for number in range(batches + 1)]


def medians(values: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [statistics.median(values[start:end]) for start, end in pairwise(ends)]


def deviation_of_openings(engines: Sequence[Sequence[float]], ends: Sequence[int]) -> tuple[float, int]:
    """Estimate the standard deviation of one engine's log latency between openings, and its degrees of freedom.

    ``ends`` are indices of rounds. Changes that all engines share are attributed to the machine, and removed.
    """
    logs = [[math.log(each) for each in rounds] for rounds in engines]
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
    """Return the sum of two independent values with its interval."""
    value = a.value + b.value
    low, high = math.hypot(a.value - a.low, b.value - b.low), math.hypot(a.high - a.value, b.high - b.value)
    return Interval(value, value - low, value + high)


def deviation_of_occasions(engines: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Estimate an engine's standard deviation between occasions (hours apart), without the error within one.

    ``engines`` has, for each engine, the value and its error variance on two or more occasions.
    """
    squares = degrees = 0.0
    for occasions in engines:
        figures, own = zip(*occasions, strict=True)
        degrees += len(figures) - 1
        squares += (len(figures) - 1) * (statistics.variance(figures) - statistics.fmean(own))
    return math.sqrt(max(0.0, squares / degrees))


def apart(deviation: float, degrees: int, confidence: float) -> Interval:
    """Return 0, the expected change of a logarithm between two occasions, with an interval from their ``deviation``."""
    half = min(LARGEST, t_quantile(degrees, confidence) * math.sqrt(2) * deviation)
    return Interval(0.0, -half, half)


@cache
def t_quantile(degrees: int, confidence: float) -> float:
    """Return the two-sided quantile of Student's t, by mpmath, because scipy may not be installed."""
    from mpmath import exp, findroot, log  # late: every command imports this module, and few compute an interval

    # by logarithms, in which the tail is nearly straight: a level that many recipes share is far out in it
    return float(exp(findroot(lambda u: log(t_beyond(exp(u), degrees) / (1 - confidence)), (0, 1))))


def t_beyond(t, degrees: int):
    """Return the two-sided tail probability P(|T| > t) of Student's t (Abramowitz & Stegun 26.7.1)."""
    from mpmath import betainc

    return betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True)
