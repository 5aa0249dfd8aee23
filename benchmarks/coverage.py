"""How often the interval of a speed-up holds the true one, on machines that are drawn, so that it is known.

    python benchmarks/coverage.py

Three ways to an interval of nominally 95 % (``sd_quant.metrics.intervals`` has the first), on four kinds of machine,
for a fixed number of rounds and for rounds that end when the interval is narrow, looked at whenever their number has
doubled. Each figure comes from 2,000 draws, so its own standard error is half a percent.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from sd_quant.metrics.intervals import OPENING, Interval, mean_interval, ratio_interval
from sd_quant.metrics.latency import Stopping

RATIO, MOST = 1.25, 640


def machine(generator: np.random.Generator, rounds: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Latencies of ``rounds`` whose typical ratio is RATIO, on a machine of this kind."""
    drift = np.exp(0.1 * np.cumsum(generator.normal(size=rounds)) / math.sqrt(rounds))
    opened = np.exp(OPENING * generator.normal(size=2))  # where the weights of either have come to lie in memory
    a, b = (speed * drift * np.exp(0.04 * generator.normal(size=rounds)) for speed in opened)
    if kind == "hiccups":  # one call in twelve takes twice as long, on average
        a, b = (t * np.where(generator.random(rounds) < 0.08, 1 + generator.exponential(1, rounds), 1) for t in (a, b))
    if kind == "neighbour":  # comes and goes every ten rounds, and slows each call by up to a half
        there = np.cumsum(generator.random(rounds) < 0.1) % 2 == 1
        a, b = (t * np.where(there, 1 + generator.uniform(0, 1, rounds), 1) for t in (a, b))
    if kind == "wandering":  # the ratio itself changes slowly, by 4 %
        steps, wander = 0.03 * generator.normal(size=rounds), np.zeros(rounds)
        for index in range(1, rounds):
            wander[index] = 0.7 * wander[index - 1] + steps[index]
        a = a * np.exp(wander)
    return RATIO * a, b


def of_the_median(a: Sequence[float], b: Sequence[float]) -> Interval:
    """The order statistics of the rounds' ratios, which take rounds for independent (Conover 1999)."""
    ratios, rounds = np.sort(np.divide(a, b)), len(a)
    place = max(1, int(stats.binom.ppf(0.025, rounds, 0.5)))
    return Interval(float(np.median(ratios)), ratios[place - 1], ratios[rounds - place])


def bootstrapped(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Percentiles of the median ratio of rounds that are drawn again 400 times (Efron 1979)."""
    ratios = np.divide(a, b)
    draws = np.random.default_rng(0).integers(len(ratios), size=(400, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    return Interval(float(np.median(ratios)), *np.percentile(medians, [2.5, 97.5]).tolist())


METHODS: dict[str, Callable] = {"batch means": ratio_interval, "median": of_the_median, "bootstrap": bootstrapped}
ENDS = {
    "10 rounds": Stopping(10, 1e-9, 0, most=10),
    "40 rounds": Stopping(40, 1e-9, 0, most=40),
    "2 %, from 10": Stopping(10, 0.02, math.inf, most=MOST),
    "3 %, from 20": Stopping(20, 0.03, math.inf, most=MOST),
}


def interval(method: Callable, a: np.ndarray, b: np.ndarray, stopping: Stopping) -> tuple[Interval, int]:
    """The interval when rounds end, and how many there were."""
    rounds = stopping.fewest
    while True:
        found = method(a[:rounds], b[:rounds])
        if found.within(stopping.half_width) or rounds * 2 > stopping.most:
            return found, rounds
        rounds *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=2000, help="(%(default)s)")
    draws = parser.parse_args().draws
    print(f"| machine | rounds end | {' | '.join(f'{name}: holds, rounds, half width' for name in METHODS)} |")
    print("|---" * (2 + len(METHODS)) + "|")
    for kind in ("quiet", "hiccups", "neighbour", "wandering"):
        for end, stopping in ENDS.items():
            cells = []
            for method in METHODS.values():
                generator = np.random.default_rng(1)
                found = [interval(method, *machine(generator, stopping.most, kind), stopping) for _ in range(draws)]
                held = 100 * np.mean([each.holds(RATIO) for each, _ in found])
                half = 100 * np.mean([(each.high - each.low) / 2 / RATIO for each, _ in found])
                cells.append(f"{held:.1f} %, {np.mean([rounds for _, rounds in found]):.0f}, {half:.1f} %")
            print(f"| {kind} | {end} | {' | '.join(cells)} |", flush=True)
    generator = np.random.default_rng(2)
    held = [mean_interval(list(generator.normal(35, 2, 8))).holds(35) for _ in range(draws)]
    print(f"\nThe mean PSNR of 8 prompts: {100 * np.mean(held):.1f} %")


if __name__ == "__main__":
    main()
