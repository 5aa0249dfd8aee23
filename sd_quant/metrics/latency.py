"""How long a call takes, on machines that other jobs share.

Two latencies measured one after the other differ by whatever else the machine was doing. So what is to be compared is
measured together: each round has everything once, in random order, and the rounds' ratios are compared
(``intervals.py``). The road not taken is the ratio of two means: one hiccup of the machine decides it.

An image calls its denoiser many times in a row, and a call finds in the caches what the one before it has left. Calls
that take turns find there what other engines have left: they take up to twice as long, the longer the more engines take
turns, and of two engines the smaller one loses more. So in a round each engine is called as often in a row as an image
calls it (``in_a_row``), and the first calls, which are slower, count as much as they do in an image. The road not taken
is a shorter row whose last calls stand for those that are left out: an INT8 UNet is still getting faster at the tenth.

Where an engine's memory comes to lie makes it faster or slower each time it is opened, so all are opened again and
again, in random order, and rounds of one opening are made for as long as it took to open them.

Rounds go on until the interval of every ratio to the reference is narrow or a budget of time is spent. Whether they are
narrow is looked at when their number has doubled and not in between: who looks after each round stops when luck has
made them narrow, and of 95 % covers 91 (``benchmarks/coverage.py``).

A clock takes a call and returns its milliseconds. A GPU's work is only queued when the call returns, so its own events
time it, and the record says which clock it was.
"""

import functools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from sd_quant.errors import ConfigError
from sd_quant.metrics.intervals import FEWEST_ROUNDS, Interval, ratio_interval
from sd_quant.metrics.neighbours import processor_times, used_by_others

Call = Callable[[], object]
Clock = Callable[[Call], float]
Reopen = Callable[[Sequence[str]], bool]  # opens again what has these names, in their order; whether it did with any
LONGEST_ROW = 500  # milliseconds; what longer calls find in the caches is little beside what they read
FEWEST_OPENINGS = 8  # before their intervals are looked at
LOOKED_AT = 0.995  # the confidence of intervals that have to be narrow, against those that are so by luck
ROUNDS_OF_AN_OPENING = 3  # at least, and for as long as it took
MOST_SPREAD = 1.0  # of rounds, above which their median says nothing, see ``spread``
NARROW, BUDGET, CEILING = "narrow", "budget", "rounds"  # why rounds ended: the intervals, the time, or there are enough


def wall_clock(call: Call) -> float:
    """Milliseconds of a call that returns when its work is done."""
    start = perf_counter()
    call()
    return 1000 * (perf_counter() - start)


def cuda_events(call: Call) -> float:
    """Milliseconds of what a call queues on the current CUDA stream, from the first kernel to the last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def clock_of(device: torch.device) -> Clock:
    """The clock that times an engine on ``device``."""
    return cuda_events if device.type == "cuda" else wall_clock


def in_a_row(clock: Clock, calls: int) -> Clock:
    """The mean of ``calls`` calls in a row, or of as many as there is room for in LONGEST_ROW."""

    @functools.wraps(clock)
    def timed(call: Call) -> float:
        first = clock(call)
        more = min(calls, int(LONGEST_ROW / first) if first else calls) - 1
        return statistics.fmean([first, *(clock(call) for _ in range(more))])

    return timed


@dataclass(frozen=True)
class Stopping:
    """When there have been enough rounds."""

    fewest: int  # rounds, which are always made
    half_width: float  # of each ratio's interval, as a share of the ratio, at which they are narrow
    budget_s: float  # after which no further round starts
    most: int = 5000


@dataclass(frozen=True)
class Rounds:
    """What rounds have measured."""

    samples: dict[str, list[float]]  # milliseconds by the calls' names, one for each round
    clocks: dict[str, str]  # the clocks' names
    warmup: int  # calls after each opening, which do not count
    stopped: str  # NARROW, BUDGET or CEILING
    machine: dict[str, float | None]  # see ``neighbours.used_by_others``
    openings: list[int] = field(default_factory=list)  # how many rounds each opening has; empty where there was one

    def statistics(self, name: str) -> dict[str, Any]:
        """One call's latency, see ``statistics_of``."""
        return statistics_of(self.samples[name], self.warmup, self.clocks[name])


def statistics_of(samples: list[float], warmup: int, clock: str) -> dict[str, Any]:
    """``{mean_ms, p50_ms, p90_ms, p99_ms, min_ms, std_ms, n, warmup, clock, samples_ms}`` of milliseconds."""
    p50, p90, p99 = np.percentile(samples, [50, 90, 99]).tolist()
    return {
        "mean_ms": statistics.fmean(samples),
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "min_ms": min(samples),
        "std_ms": statistics.pstdev(samples),
        "n": len(samples),
        "warmup": warmup,
        "clock": clock,
        "samples_ms": samples,
    }


def judged(timing: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    """``timing``, whose median is null with a ``reason`` where there is one, or where its rounds support none."""
    reason = reason or too_far_apart(timing["samples_ms"])
    return timing if reason is None else timing | {"p50_ms": None, "reason": reason}


def too_far_apart(samples: Sequence[float]) -> str | None:
    """Why the median of these milliseconds says nothing, or None; of too few rounds to tell it is None."""
    if len(samples) < FEWEST_ROUNDS or spread(samples) <= MOST_SPREAD:
        return None
    low, high = np.percentile(samples, [10, 90]).tolist()
    return f"its rounds took {low:.3g} to {high:.3g} ms, which is no figure; time again when the machine is quiet"


def measure(call: Call, warmup: int, repeats: int, clock: Clock = wall_clock) -> dict[str, Any]:
    """Latency of one call, see ``statistics_of``. Raises ConfigError unless warmup >= 0 and repeats >= 1."""
    return measure_together({"": call}, warmup, Stopping(repeats, 1, 0), {"": clock}).statistics("")


def measure_in_turn(
    calls: Mapping[str, Call], warmup: int, repeats: int, clocks: Mapping[str, Clock] | None = None
) -> dict[str, dict[str, Any]]:
    """``measure`` for each of ``calls`` in the same rounds, so that drift of the machine hits all alike."""
    rounds = measure_together(calls, warmup, Stopping(repeats, 1, 0), clocks)
    return {name: rounds.statistics(name) for name in calls}


def measure_together(
    calls: Mapping[str, Call],
    warmup: int,
    stopping: Stopping,
    clocks: Mapping[str, Clock] | None = None,
    reopen: Reopen | None = None,
) -> Rounds:
    """Rounds of all ``calls``, the first of which is the reference that the others' ratios are taken to.

    ``clocks``: by the calls' names; a call without one is timed by the wall clock. ``reopen`` is called, and
    ``warmup`` calls of each follow, while the budget has room for another opening and its rounds, until it opens
    nothing.
    Raises ConfigError unless warmup >= 0 and at least one round is asked for.
    """
    if warmup < 0 or stopping.fewest < 1:
        raise ConfigError(
            f"latency was asked for with warmup={warmup} and repeats={stopping.fewest}, expected warmup >= 0 and "
            "repeats >= 1; change the two"
        )
    times = {name: (clocks or {}).get(name, wall_clock) for name in calls}
    turns, samples = orders(list(calls)), {name: list[float]() for name in calls}

    def warm_up() -> None:
        for call in calls.values():
            for _ in range(warmup):
                call()

    warm_up()
    before, start = processor_times(), perf_counter()
    openings, opening_s, stopped = [0], 0.0, None
    while stopped is None:
        began = perf_counter()
        while True:
            for name in next(turns):
                samples[name].append(times[name](calls[name]))
            openings[-1] += 1
            rounds_s = perf_counter() - began
            if reopen is None or openings[-1] >= ROUNDS_OF_AN_OPENING and rounds_s >= opening_s:
                break
        seconds = perf_counter() - start
        stopped = enough(list(samples.values()), stopping, seconds, openings)
        if reopen is None or stopped is not None:
            continue
        if seconds + opening_s + rounds_s > stopping.budget_s:  # has no room for another opening
            reopen = None
            if len(openings) > 1 and sum(openings) >= stopping.fewest:
                stopped = BUDGET
            continue
        began = perf_counter()
        if reopen(random.sample(list(calls), len(calls))):
            warm_up()
            openings.append(0)
            opening_s = perf_counter() - began
        else:
            reopen = None
    machine = used_by_others(before, processor_times())
    clocks_used = {name: clock.__name__ for name, clock in times.items()}
    return Rounds(samples, clocks_used, warmup, stopped, machine, openings if len(openings) > 1 else [])


def orders(names: list[str]) -> Iterator[list[str]]:
    """The names in a new random order each time, the same orders in every process."""
    generator = random.Random(0)
    while True:
        yield generator.sample(names, len(names))


def enough(
    samples: Sequence[Sequence[float]], stopping: Stopping, seconds: float, openings: Sequence[int]
) -> str | None:
    """Why no further round is made after ``seconds`` of them, or None."""
    reference, *others = samples
    if len(reference) < stopping.fewest:
        return None
    fewest, made = (FEWEST_OPENINGS, len(openings)) if len(openings) > 1 else (stopping.fewest, len(reference))
    doublings, rest = divmod(made, fewest)
    if rest == 0 and doublings and doublings & (doublings - 1) == 0:
        intervals = (ratio_interval(reference, other, openings, samples, LOOKED_AT, known=0) for other in others)
        if all(interval.within(stopping.half_width) for interval in intervals):
            return NARROW
    if seconds >= stopping.budget_s:
        return BUDGET
    return CEILING if len(reference) >= stopping.most else None


def ratio(a: Mapping[str, Any], b: Mapping[str, Any], confidence: float = 0.95) -> Interval:
    """a / b over the rounds, for two results of one ``measure_in_turn``: above 1 where b is faster."""
    return ratio_interval(a["samples_ms"], b["samples_ms"], confidence=confidence)


def spread(samples: Sequence[float]) -> float:
    """The distance of the tenth and the ninetieth percentile, as a share of the median."""
    low, middle, high = np.percentile(samples, [10, 50, 90]).tolist()
    return (high - low) / middle
