"""The coverage of a speed-up's interval, on simulated machines, where the true speed-up is known.

    python benchmarks/coverage.py

Four methods for an interval of nominally 95 % (``sd_quant.metrics.intervals`` has the first), on four kinds of machine.
Engines are reopened every three rounds, which changes their speed by 2 %. A measurement ends after a number of
openings, or when the interval is narrow at a doubling of that number. Each figure comes from 2,000 draws, so its
standard error is half a percent. Last, how often the true mean of skewed scores lies above the interval of a gate
(``sd_quant.report.gate``), which is where it passes wrongly.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from sd_quant.metrics.intervals import Interval, mean_interval, ratio_interval
from sd_quant.metrics.latency import LOOKED_AT, Stopping
from sd_quant.metrics.latency import ROUNDS_OF_AN_OPENING as ROUNDS
from sd_quant.report.gate import mean_of_skewed

RATIO, MOST, OPENED = 1.25, 128, 0.02  # the last: the standard deviation of an engine's latency between openings


def machine(generator: np.random.Generator, openings: int, kind: str, engines: int = 2) -> np.ndarray:
    """Latencies [engines, rounds] on a machine of this kind; the first takes RATIO times as long as each other."""
    rounds, seconds = openings * ROUNDS, 2 * openings * ROUNDS
    timed = np.arange(seconds) % (seconds // openings) < ROUNDS  # the rest of the time engines are opened
    drift = np.exp(0.1 * np.cumsum(generator.normal(size=rounds)) / math.sqrt(rounds))
    opened = np.repeat(np.exp(OPENED * generator.normal(size=(engines, openings))), ROUNDS, axis=1)
    times = opened * drift * np.exp(0.04 * generator.normal(size=(engines, rounds)))
    if kind == "hiccups":  # one call in twelve takes twice as long, on average
        there = generator.random((engines, rounds)) < 0.08
        times *= np.where(there, 1 + generator.exponential(1, (engines, rounds)), 1)
    if kind == "neighbour":  # comes and goes every ten seconds, and slows each call by up to a half
        there = np.cumsum(generator.random(seconds) < 0.1)[timed] % 2 == 1
        times *= np.where(there, 1 + generator.uniform(0, 1, (engines, rounds)), 1)
    if kind == "wandering":  # the ratio itself changes slowly, by 4 %
        steps, wander = 0.03 * generator.normal(size=seconds), np.zeros(seconds)
        for index in range(1, seconds):
            wander[index] = 0.7 * wander[index - 1] + steps[index]
        times[0] *= np.exp(wander[timed])
    times[0] *= RATIO
    return times


def by_openings(times: np.ndarray, confidence: float = 0.95) -> Interval:
    """The ratio of the first two engines, with the interval that runs and sweeps give it."""
    openings = [ROUNDS] * (times.shape[1] // ROUNDS)
    return ratio_interval(times[0].tolist(), times[1].tolist(), openings, times.tolist(), confidence)


def by_batches(times: np.ndarray, confidence: float = 0.95) -> Interval:
    """As if the engines had been opened once."""
    return ratio_interval(times[0].tolist(), times[1].tolist(), confidence=confidence)


def of_the_median(times: np.ndarray, confidence: float = 0.95) -> Interval:
    """The order statistics of the rounds' ratios, which take rounds for independent (Conover 1999)."""
    ratios, rounds = np.sort(times[0] / times[1]), times.shape[1]
    place = max(1, int(stats.binom.ppf((1 - confidence) / 2, rounds, 0.5)))
    return Interval(float(np.median(ratios)), ratios[place - 1], ratios[rounds - place])


def bootstrapped(times: np.ndarray, confidence: float = 0.95) -> Interval:
    """Percentiles of the median ratio of rounds that are drawn again 400 times (Efron 1979)."""
    ratios = times[0] / times[1]
    draws = np.random.default_rng(0).integers(len(ratios), size=(400, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    return Interval(
        float(np.median(ratios)), *np.percentile(medians, [50 * (1 - confidence), 50 * (1 + confidence)]).tolist()
    )


METHODS: dict[str, Callable[..., Interval]] = {
    "openings": by_openings, "one opening": by_batches, "median": of_the_median, "bootstrap": bootstrapped,
}  # fmt: skip
ENDS = {  # engines, and when there are enough openings of them
    "4 openings": (2, Stopping(4, 1e-9, 0, most=4)),
    "10 openings": (2, Stopping(10, 1e-9, 0, most=10)),
    "4 openings of 5 engines": (5, Stopping(4, 1e-9, 0, most=4)),
    "3 %, from 8 openings": (2, Stopping(8, 0.03, math.inf, most=MOST)),
    "3 %, from 8 openings of 5 engines": (5, Stopping(8, 0.03, math.inf, most=MOST)),
}

SCORES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {  # of prompts, and the true mean
    "normal": (lambda generator, count: generator.normal(size=count), 0.0),
    "lognormal, sigma 0.5": (lambda generator, count: np.exp(0.5 * generator.normal(size=count)), math.exp(0.125)),
    "lognormal, sigma 1": (lambda generator, count: np.exp(generator.normal(size=count)), math.exp(0.5)),
    "one prompt in ten 15 times as bad": (
        lambda generator, count: (
            np.where(generator.random(count) < 0.1, 0.3, 0.02) * np.exp(0.4 * generator.normal(size=count))
        ),
        0.048 * math.exp(0.08),
    ),
}


def hall(values: list[float]) -> Interval:
    return mean_of_skewed(values, 0.95)


def above(method: Callable[[list[float]], Interval], kind: str, count: int, draws: int) -> float:
    """The share of draws of ``count`` prompts whose interval ends below the true mean."""
    draw, mean = SCORES[kind]
    generator = np.random.default_rng(3)
    return float(np.mean([method(draw(generator, count).tolist()).high < mean for _ in range(draws)]))


def interval(method: Callable[..., Interval], times: np.ndarray, stopping: Stopping) -> tuple[Interval, int]:
    """The interval when openings end, and how many there were."""
    openings = stopping.fewest
    while True:
        seen = times[:, : openings * ROUNDS]
        if method(seen, LOOKED_AT).within(stopping.half_width) or openings * 2 > stopping.most:
            return method(seen), openings
        openings *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=2000, help="(%(default)s)")
    draws = parser.parse_args().draws
    print(f"| machine | openings end | {' | '.join(f'{name}: holds, openings, half width' for name in METHODS)} |")
    print("|---" * (2 + len(METHODS)) + "|")
    for kind in ("quiet", "hiccups", "neighbour", "wandering"):
        for end, (engines, stopping) in ENDS.items():
            cells = []
            for method in METHODS.values():
                generator = np.random.default_rng(1)
                drawn = (machine(generator, stopping.most, kind, engines) for _ in range(draws))
                found = [interval(method, times, stopping) for times in drawn]
                held = 100 * np.mean([each.holds(RATIO) for each, _ in found])
                half = 100 * np.mean([(each.high - each.low) / 2 / RATIO for each, _ in found])
                cells.append(f"{held:.1f} %, {np.mean([openings for _, openings in found]):.0f}, {half:.1f} %")
            print(f"| {kind} | {end} | {' | '.join(cells)} |", flush=True)
    generator = np.random.default_rng(2)
    held = [mean_interval(list(generator.normal(35, 2, 8))).holds(35) for _ in range(draws)]
    print(f"\nThe mean PSNR of 8 prompts: {100 * np.mean(held):.1f} %\n")
    counts = (4, 16, 64, 256)
    print(f"| true mean above Student's interval, Hall's | {' | '.join(f'{count} prompts' for count in counts)} |")
    print("|---" * (1 + len(counts)) + "|")
    for kind in SCORES:
        both = [[above(method, kind, count, draws) for method in (mean_interval, hall)] for count in counts]
        print(f"| {kind} | {' | '.join(f'{student:.1%}, {skewed:.1%}' for student, skewed in both)} |", flush=True)


if __name__ == "__main__":
    main()
