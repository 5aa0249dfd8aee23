import time

import pytest

from sd_quant.errors import ConfigError
from sd_quant.metrics.latency import measure, measure_in_turn, ratio


def test_calls_alternate_and_warmup_is_not_counted():
    order = []
    results = measure_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, warmup=2, repeats=3)
    assert order == ["a", "b"] * 5
    for result in results.values():
        assert (result["n"], result["warmup"], len(result["samples_ms"])) == (3, 2, 3)


def test_statistics_are_ordered_and_cover_the_call():
    result = measure(lambda: time.sleep(0.002), warmup=0, repeats=5)
    assert 2 <= result["min_ms"] <= result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"]
    assert result["min_ms"] <= result["mean_ms"] <= max(result["samples_ms"])


def test_queued_work_is_waited_for_before_and_after_each_call():
    queue = []
    result = measure(
        lambda: queue.append(0.003), warmup=1, repeats=2, synchronize=lambda: queue and time.sleep(queue.pop())
    )
    assert queue == []
    assert result["min_ms"] >= 3


def test_ratio_is_the_median_of_rounds():
    a = {"samples_ms": [10.0, 20.0, 90.0]}  # the hiccup of the last round decides a ratio of means
    b = {"samples_ms": [5.0, 10.0, 10.0]}
    assert ratio(a, b) == 2.0
    with pytest.raises(ValueError):
        ratio(a, {"samples_ms": [1.0]})


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 3), (0, 0)])
def test_nothing_to_measure_is_refused(warmup, repeats):
    with pytest.raises(ConfigError, match=f"warmup={warmup} and repeats={repeats}"):
        measure(lambda: None, warmup, repeats)
