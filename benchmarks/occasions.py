"""Counts how often the interval of one timing of a sweep holds the figure of another, hours apart.

    python benchmarks/occasions.py --sweep outputs/sweeps/<name> --times 12 --pause 120
    python benchmarks/occasions.py

The first command times the engines of a sweep again and again, with a pause of so many minutes behind each, and then
does what the second does: it reads what all timings of each machine have left in the cache. For every two timings of
one engine, ten minutes apart or more, the interval of the one either holds the figure of the other or does not. *own*
is the interval of the rounds alone; *widened* is what a report would have said, from the occasions before that timing
alone, so it is counted for those that had enough of them, and *own* beside it for the same.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import Counter
from itertools import permutations
from pathlib import Path

from sd_quant.metrics.intervals import Interval, apart, sum_of
from sd_quant.places import input_path
from sd_quant.report.occasions import APART, CALL, IMAGE, Occasion, between, read_history
from sd_quant.report.timing import logarithm


def counted(history: list[Occasion]) -> Counter:
    """Pairs of timings by kind and interval, and how many hold."""
    found = Counter()
    knowledge = [between(history[:number]) for number in range(len(history))]
    for (number, one), (_, other) in permutations(enumerate(history), 2):
        if abs(one["time"] - other["time"]) < APART:
            continue
        for engine in one["speedups"].keys() & other["speedups"].keys():
            for kind in one["speedups"][engine].keys() & other["speedups"][engine].keys():
                own, figure = logarithm(Interval(*one["speedups"][engine][kind])), other["speedups"][engine][kind][0]
                known = knowledge[number].get(kind)
                intervals = {"own": own}
                if known:
                    wide = sum_of(own, apart(known["deviation"], known["degrees"], 0.95))
                    intervals |= {"own, where widened": own, "widened": wide}
                for name, interval in intervals.items():
                    found[kind, name, "pairs"] += 1
                    found[kind, name, "held"] += interval.holds(math.log(figure))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sweep", type=input_path, help="folder of a sweep to time again")
    parser.add_argument("--times", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--pause", type=float, default=120, help="minutes behind each timing (%(default)s)")
    parser.add_argument("--cache", type=input_path, default="outputs/cache", help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="a file for the counts")
    options = parser.parse_args()
    for number in range(options.times if options.sweep else 0):
        time.sleep(60 * options.pause if number else 0)
        subprocess.run([sys.executable, "-m", "sd_quant.stages.time_sweep", str(options.sweep)], check=True)
    lines = []
    for file in sorted((options.cache / "occasions").glob("*.json")):
        history = read_history(file)
        found = counted(history)
        lines.append(f"{file.stem}: {len(history)} timings, {json.dumps(between(history))}")
        for kind, name in dict.fromkeys((kind, name) for kind, name, _ in sorted(found) if kind in (CALL, IMAGE)):
            held, pairs = found[kind, name, "held"], found[kind, name, "pairs"]
            lines.append(f"  {kind}, {name}: {held} of {pairs} pairs, {held / pairs:.0%}")
    print("\n".join(lines) or f"{options.cache} has no timings")
    if options.out:
        options.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
