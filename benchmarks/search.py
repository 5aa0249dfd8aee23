"""Counts the jobs that a search takes until it has proposed the best of its grid, on grids of which all is known.

    python benchmarks/search.py                              # on drawn grids of three levers
    python benchmarks/search.py outputs/sweeps/<name>        # on a finished sweep of a whole grid

No job is done: the search is told what the sweep has recorded. The best is the most faithful job that passes the floor
and surely reaches the target, and whatever cannot be told from it, prompt by prompt. The search begins with each of
some seeds. Beside it stands the same grid in random order. Exits 1 if the median is above a fifth of the jobs.

Drawn grids have the sizes of errors and speed-ups of docs/results_*.md: five levels, of which three heed alpha, three
alphas and four shares of reused calls, 60 jobs of which 44 differ. Errors add up, with an interaction, and each job has
a scatter of 0.15 dB and 1 % of its own.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from sd_quant.metrics.intervals import mean_interval
from sd_quant.report.recommendation import options_of, rule_of
from sd_quant.report.summary import SWEEP, PlannedJob, read_sweep
from sd_quant.search import Outcome, outcomes_of, propose

LEVELS, ALPHAS, REUSE = (0.0, 1.0, 2.0, 2.5, 3.0), (0.5, 0.8, 1.0), (None, 0.2, 0.3, 0.4)
TIED_DB, TARGETS = 0.2, (0.3, 0.5, 0.7, 0.85)  # of drawn grids; shares of the jobs that are slower than a target
SHUFFLES = 1000
Known = Mapping[str, Outcome | None]


def drawn(seed: int) -> tuple[list[PlannedJob], Known, set[str]]:
    """A grid, what its jobs would show for a target, and the best of them."""
    draw = random.Random(seed)
    errors = [0.0, *spread(draw, 10 ** -draw.uniform(3.6, 4.2), 10 ** -draw.uniform(2.8, 3.3))]
    speedups = [1.0, *spread(draw, draw.uniform(1.1, 1.3), draw.uniform(1.5, 2.0))]
    best, worse, reused, power = (
        draw.choice(ALPHAS),
        draw.uniform(2, 8),
        10 ** -draw.uniform(2, 2.6),
        draw.uniform(1.5, 3),
    )
    rest = draw.uniform(0, 0.15)
    grid, first, shown = list[PlannedJob](), dict[tuple, str](), dict[str, tuple[float, float]]()
    for (level, alpha), reuse in product(product(LEVELS, ALPHAS), REUSE):
        name = f"{level:g},{alpha:g},{reuse}"
        job = PlannedJob(name=name, varied={"quant_level": level, "alpha": alpha, "infer.reuse": reuse})  # type: ignore[typeddict-item]
        if (twin := first.setdefault((level, alpha if level >= 2 else None, reuse), name)) != name:
            job["same_as"] = twin
        grid.append(job)
        if twin != name:
            continue
        quantized = errors[LEVELS.index(level)] * (1 + worse * (alpha - best) ** 2 if level >= 2 else 1)
        error = (quantized + reused * (reuse or 0) ** power) * (1.3 if quantized and reuse else 1)
        decibels = -10 * math.log10(error) + draw.gauss(0, 0.15) if error else 60.0
        time = (1 - rest) / speedups[LEVELS.index(level)] * (1 - (reuse or 0)) + rest
        shown[name] = min(decibels, 40.0), math.exp(draw.gauss(0, 0.01)) / time
    target = sorted(speedup for _, speedup in shown.values())[int(draw.choice(TARGETS) * len(shown))]
    known = {name: Outcome(decibels, math.log(target / speedup)) for name, (decibels, speedup) in shown.items()}
    reaching = {name: each.fidelity for name, each in known.items() if each.shortfall <= 0}
    return grid, known, {name for name, fidelity in reaching.items() if fidelity >= max(reaching.values()) - TIED_DB}


def spread(draw: random.Random, first: float, last: float) -> list[float]:
    """Four numbers from ``first`` to ``last``."""
    return [first + (last - first) * share for share in sorted((0.0, 1.0, draw.random(), draw.random()))]


def finished(folder: Path, speedup: float | None) -> tuple[list[PlannedJob], Known, set[str]]:
    """The grid of a finished sweep, what its jobs have shown for a target, and the best of them."""
    plan, sweep = json.loads((folder / SWEEP).read_text(encoding="utf-8")), read_sweep(folder)
    rule = rule_of(sweep.verdict)
    rule = rule if speedup is None else replace(rule, speedup=speedup, image_ms=None)
    if sweep.search or not rule.target:
        sys.exit(f"{folder} is {'a search' if sweep.search else 'without a target'}; give a whole grid and --speedups")
    known, options = outcomes_of(sweep, rule), {option.row["job"]: option for option in options_of(sweep, rule)}
    reaching = [name for name, each in known.items() if each and each.shortfall <= 0 and each.passes]
    if not reaching:
        sys.exit(
            f"no job of {folder} passes the floor and surely reaches {rule.target}; give a lower one with --speedups"
        )
    best = max(reaching, key=lambda name: known[name].fidelity)
    pairs = {name: zip(options[name].images, options[best].images, strict=True) for name in reaching}
    apart = {name: mean_interval([a - b for a, b in each], rule.confidence) for name, each in pairs.items()}
    return plan["jobs"], known, {name for name, interval in apart.items() if name == best or interval.holds(0)}


def jobs_until(grid: Sequence[PlannedJob], shown: Known, best: Collection[str], seed: int) -> int:
    """The jobs that a search does until it has done one of the ``best``."""
    known: dict[str, Outcome | None] = {}
    while not best & known.keys():
        known |= {name: shown[name] for name in propose(grid, known, 1, seed)}
    return len(known)


def in_random_order(jobs: int, best: int) -> Iterator[int]:
    draw = random.Random(0)
    for _ in range(SHUFFLES):
        yield 1 + min(draw.sample(range(jobs), best))


def row_of(label: str, jobs: float, best: float, found: Sequence[int], anyhow: Sequence[int]) -> str:
    cells = [
        f"{statistics.median(each):g} ({sorted(each)[math.ceil(0.9 * len(each)) - 1]})" for each in (found, anyhow)
    ]
    return f"| {label} | {jobs:g} | {best:g} | {jobs / 5:.1f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sweep", type=Path, nargs="?", help="the folder of a finished sweep")
    parser.add_argument("--speedups", type=float, nargs="+", default=[None], help="targets (that of the sweep)")
    parser.add_argument("--seeds", type=int, default=20, help="of a search in a sweep (%(default)s)")
    parser.add_argument("--grids", type=int, default=40, help="that are drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (%(default)s)")
    options = parser.parse_args()
    print("| grid | jobs that differ | best, tied | a fifth | search: median (nine of ten) | random order |")
    print("|---|---|---|---|---|---|")
    holds = True
    if options.sweep is None:
        found, anyhow, sizes = list[int](), list[int](), list[int]()
        for seed in range(options.seed, options.seed + options.grids):
            grid, known, best = drawn(seed)
            found.append(jobs_until(grid, known, best, seed))
            anyhow += in_random_order(len(known), len(best))
            sizes.append(len(best))
        print(row_of(f"{options.grids} drawn", len(known), statistics.median(sizes), found, anyhow))
        holds = statistics.median(found) <= len(known) / 5
    for speedup in options.speedups if options.sweep is not None else ():
        grid, known, best = finished(options.sweep, speedup)
        found = [jobs_until(grid, known, best, seed) for seed in range(options.seed, options.seed + options.seeds)]
        label = options.sweep.name if speedup is None else f"{options.sweep.name}, {speedup:g}x"
        print(row_of(label, len(known), len(best), found, list(in_random_order(len(known), len(best)))), flush=True)
        holds &= statistics.median(found) <= len(known) / 5
    print(f"\nthe search {'reaches' if holds else 'DOES NOT REACH'} the grid's best within a fifth of its jobs")
    if not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
