"""How long a call takes, on machines that other jobs share.

Two latencies measured one after the other differ by whatever else the machine was doing. So what is to be compared is
measured in turn, A B A B ..., and compared round by round: the median of the rounds' ratios is the speed-up. The road
not taken is the ratio of two means: one hiccup of the machine decides it.

A clock takes a call and returns its milliseconds. A GPU's work is only queued when the call returns, so its own events
time it, and the record says which clock it was.
"""

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
import torch

from sd_quant.errors import ConfigError

Call = Callable[[], object]
Clock = Callable[[Call], float]


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


def measure(call: Call, warmup: int, repeats: int, clock: Clock = wall_clock) -> dict[str, object]:
    """Latency of ``call`` as ``{mean_ms, p50_ms, p90_ms, p99_ms, min_ms, std_ms, n, warmup, clock, samples_ms}``.

    Raises ConfigError unless warmup >= 0 and repeats >= 1.
    """
    return measure_in_turn({"": call}, warmup, repeats, {"": clock})[""]


def measure_in_turn(
    calls: Mapping[str, Call], warmup: int, repeats: int, clocks: Mapping[str, Clock] | None = None
) -> dict[str, dict[str, object]]:
    """``measure`` for each of ``calls``, one call of each per round, so that drift of the machine hits all alike.

    ``clocks``: by the calls' names; a call without one is timed by the wall clock.
    """
    if warmup < 0 or repeats < 1:
        raise ConfigError(
            f"latency was asked for with warmup={warmup} and repeats={repeats}, expected warmup >= 0 and repeats >= 1; "
            "change the two"
        )
    times = {name: (clocks or {}).get(name, wall_clock) for name in calls}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + repeats):
        for name, call in calls.items():
            samples[name].append(times[name](call))
    return {
        name: _statistics(values[warmup:], warmup) | {"clock": times[name].__name__, "samples_ms": values[warmup:]}
        for name, values in samples.items()
    }


def ratio(a: dict, b: dict) -> float:
    """Median over the rounds of a / b, for two results of one ``measure_in_turn``: above 1 where b is faster."""
    return statistics.median(x / y for x, y in zip(a["samples_ms"], b["samples_ms"], strict=True))


def _statistics(samples: list[float], warmup: int) -> dict[str, object]:
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
    }
