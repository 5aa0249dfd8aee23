"""How long a call takes, on machines that other jobs share.

Two latencies measured one after the other differ by whatever else the machine was doing. So what is to be compared is
measured in turn, A B A B ..., and compared round by round: the median of the rounds' ratios is the speed-up. The road
not taken is the ratio of two means: one hiccup of the machine decides it.
"""

import statistics
from collections.abc import Callable
from time import perf_counter

import numpy as np

from sd_quant.errors import ConfigError


def nothing() -> None:
    """The ``synchronize`` of a runtime whose calls return when the work is done."""


def measure(
    call: Callable[[], object], warmup: int, repeats: int, synchronize: Callable[[], None] = nothing
) -> dict[str, object]:
    """Latency of ``call`` as ``{mean_ms, p50_ms, p90_ms, p99_ms, min_ms, std_ms, n, warmup, samples_ms}``.

    ``synchronize`` waits for work that ``call`` only queued (``torch.cuda.synchronize``).
    Raises ConfigError unless warmup >= 0 and repeats >= 1.
    """
    return measure_in_turn({"": call}, warmup, repeats, synchronize)[""]


def measure_in_turn(
    calls: dict[str, Callable[[], object]], warmup: int, repeats: int, synchronize: Callable[[], None] = nothing
) -> dict[str, dict[str, object]]:
    """``measure`` for each of ``calls``, one call of each per round, so that drift of the machine hits all alike."""
    if warmup < 0 or repeats < 1:
        raise ConfigError(
            f"latency was asked for with warmup={warmup} and repeats={repeats}, expected warmup >= 0 and repeats >= 1; "
            "change the two"
        )
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + repeats):
        for name, call in calls.items():
            synchronize()
            start = perf_counter()
            call()
            synchronize()
            samples[name].append(1000 * (perf_counter() - start))
    return {name: _statistics(values[warmup:], warmup) for name, values in samples.items()}


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
        "samples_ms": samples,
    }
