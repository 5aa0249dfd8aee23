"""Measure and compare the latencies of engines on machines that are shared with other jobs.

Two latencies measured one after the other differ by whatever else the machine was doing. So engines are compared in
*rounds*: a round calls each engine, in random order, and ratios are taken within a round (``intervals.py``).
Alternative not taken: the ratio of two means, which a single disturbance of the machine can decide.

An image calls its denoiser many times in a row. If engines alternate, each call finds the caches filled by another
engine and takes up to twice as long, above all for small engines and with many engines. So a round calls each engine as
many times in a row as an image does (``in_a_row``). Alternative not taken: a shorter row whose last call represents the
rest, because an INT8 UNet still gets faster at the tenth call.

The speed of an engine changes with its addresses in memory. So all engines are reopened repeatedly, in random order,
and each opening is followed by rounds for as long as the opening took.

Rounds end when the interval of every ratio to the reference is narrow, or a time budget is spent. Intervals are
computed only when the number of rounds has doubled: if they were checked after every round, a lucky round would end the
measurement, and 95 % intervals would cover 91 %.

A clock takes a call and returns its milliseconds; on a GPU, whose work is only queued when a call returns, by CUDA
events. The record names the clock.
"""

import functools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from sd_quant.metrics.intervals import FEWEST_ROUNDS, ratio_interval
from sd_quant.metrics.neighbours import Reading, processor_times, used_by_others

Call = Callable[[], object]
Clock = Callable[[Call], float]
Reopen = Callable[[Sequence[str]], bool]  # reopens the engines of these names in this order; whether it did with any
LONGEST_ROW = 500  # milliseconds; the caches hold only a small part of the data of calls that take longer
FEWEST_OPENINGS = 8  # before intervals are computed
LOOKED_AT = 0.995  # confidence of the intervals that have to be narrow; a higher one guards against luck
ROUNDS_OF_AN_OPENING = 3  # at least
MOST_SPREAD = 1.0  # of rounds with a meaningful median, see ``spread``
NARROW, BUDGET, CEILING = "narrow", "budget", "rounds"  # the reasons to stop: intervals, time, number of rounds


def wall_clock(call: Call) -> float:
    """Return the milliseconds of a call that returns when its work is done."""
    start = perf_counter()
    call()
    return 1000 * (perf_counter() - start)


def cuda_events(call: Call) -> float:
    """Return the milliseconds from the first to the last kernel that a call queues on the current CUDA stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def clock_of(device: torch.device) -> Clock:
    """Return the clock for engines on ``device``."""
    return cuda_events if device.type == "cuda" else wall_clock


def in_a_row(clock: Clock, calls: int) -> Clock:
    """Return a clock for the mean of ``calls`` calls in a row, or of as many as fit into LONGEST_ROW."""

    @functools.wraps(clock)
    def timed(call: Call) -> float:
        first = clock(call)
        more = min(calls, int(LONGEST_ROW / first) if first else calls) - 1
        return statistics.fmean([first, *(clock(call) for _ in range(more))])

    return timed


@dataclass(frozen=True)
class Stopping:
    """The conditions that end a measurement in rounds."""

    fewest: int  # rounds that are always made
    half_width: float  # of a narrow interval, as a share of the ratio
    budget_s: float  # seconds after which no further round starts
    most: int = 5000  # rounds


@dataclass(frozen=True)
class Rounds:
    """The measurements of all rounds of ``measure_together``."""

    samples: dict[str, list[float]]  # milliseconds of each round, by the call's name
    clocks: dict[str, str]  # the clock's name, by the call's name
    warmup: int  # calls after each opening, which do not count
    stopped: str  # NARROW, BUDGET or CEILING
    machine: dict[str, float | None]  # see ``neighbours.used_by_others``
    openings: list[int] = field(default_factory=list)  # rounds after each opening; empty if engines opened once
    probes: list[Reading] = field(default_factory=list)  # of the machine, before, between and after the rounds

    def statistics(self, name: str) -> dict[str, Any]:
        """Return the latency statistics of one call, see ``statistics_of``."""
        return statistics_of(self.samples[name], self.warmup, self.clocks[name])


def statistics_of(samples: list[float], warmup: int, clock: str) -> dict[str, Any]:
    """Return ``{mean_ms, p50_ms, p90_ms, p99_ms, min_ms, std_ms, n, warmup, clock, samples_ms}`` of samples in ms."""
    p50, p90, p99 = np.percentile(samples, [50, 90, 99]).tolist()
    return {
        "mean_ms": statistics.fmean(samples), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "min_ms": min(samples),
        "std_ms": statistics.pstdev(samples), "n": len(samples), "warmup": warmup, "clock": clock,
        "samples_ms": samples,
    }  # fmt: skip


def judged(timing: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    """Return ``timing``, its median None with a ``reason`` if that is given or if the samples spread too far."""
    samples = timing["samples_ms"]
    if reason is None:
        if len(samples) < FEWEST_ROUNDS or spread(samples) <= MOST_SPREAD:
            return timing
        low, high = np.percentile(samples, [10, 90]).tolist()
        reason = f"its rounds took {low:.3g} to {high:.3g} ms, which is no figure; time again when the machine is quiet"
    return timing | {"p50_ms": None, "reason": reason}


def measure(call: Call, warmup: int, repeats: int, clock: Clock = wall_clock) -> dict[str, Any]:
    """Time one call ``repeats`` times, after ``warmup`` calls, and return the latencies' ``statistics_of``."""
    return measure_together({"": call}, warmup, Stopping(repeats, 1, 0), {"": clock}).statistics("")


def measure_together(
    calls: Mapping[str, Call],
    warmup: int,
    stopping: Stopping,
    clocks: Mapping[str, Clock] | None = None,
    reopen: Reopen | None = None,
    probe: Callable[[], Reading] | None = None,
) -> Rounds:
    """Measure all ``calls`` in rounds; ratios are taken to the first call, the reference.

    ``clocks`` gives the clock by the call's name, by default the wall clock. ``reopen`` is called repeatedly, followed
    by ``warmup`` calls of each engine, until it reopens nothing or no time is left for another opening and its rounds.
    ``probe`` is called before and after the rounds, and after half of the budget; its time is not counted.
    """
    times = {name: (clocks or {}).get(name, wall_clock) for name in calls}
    samples, generator = {name: list[float]() for name in calls}, random.Random(0)  # the same orders in every process

    def warm_up() -> None:
        for call in calls.values():
            for _ in range(warmup):
                call()

    probes = [] if probe is None else [probe()]
    warm_up()
    before, start = processor_times(), perf_counter()
    openings, opening_s, stopped = [0], 0.0, None
    while stopped is None:
        began = perf_counter()
        while True:
            for name in generator.sample(list(calls), len(calls)):
                samples[name].append(times[name](calls[name]))
            openings[-1] += 1
            rounds_s = perf_counter() - began
            if reopen is None or openings[-1] >= ROUNDS_OF_AN_OPENING and rounds_s >= opening_s:
                break
        seconds = perf_counter() - start
        stopped = enough(list(samples.values()), stopping, seconds, openings)
        if probe is not None and stopped is None and len(probes) == 1 and 2 * seconds >= stopping.budget_s:
            paused = perf_counter()
            probes.append(probe())
            warm_up()  # as torch's threads spin for a while behind its calls
            start += perf_counter() - paused
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
    probes += [] if probe is None else [probe()]
    clocks_used = {name: clock.__name__ for name, clock in times.items()}
    return Rounds(samples, clocks_used, warmup, stopped, machine, openings if len(openings) > 1 else [], probes)


def enough(
    samples: Sequence[Sequence[float]], stopping: Stopping, seconds: float, openings: Sequence[int]
) -> str | None:
    """Return why to stop after ``seconds`` (intervals narrow, budget spent, too many rounds), or None to go on."""
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


def spread(samples: Sequence[float]) -> float:
    """Return the distance between the 10th and the 90th percentile, divided by the median."""
    low, middle, high = np.percentile(samples, [10, 50, 90]).tolist()
    return (high - low) / middle
