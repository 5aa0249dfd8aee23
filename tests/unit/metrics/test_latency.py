import time

import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.metrics import latency
from sd_quant.metrics.latency import clock_of, cuda_events, measure, measure_in_turn, ratio, wall_clock


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


def test_each_call_has_its_own_clock_and_the_record_names_it():
    def always_seven(call):
        call()
        return 7.0

    order = []
    found = measure_in_turn(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 1, 2, clocks={"b": always_seven}
    )
    assert order == ["a", "b"] * 3
    assert found["b"]["samples_ms"] == [7.0, 7.0] and found["b"]["clock"] == "always_seven"
    assert found["a"]["clock"] == "wall_clock" and found["a"]["p50_ms"] < 7
    assert clock_of(torch.device("cuda", 0)) is cuda_events and clock_of(torch.device("cpu")) is wall_clock


def test_a_gpu_is_timed_between_its_own_events(monkeypatch):
    """Nothing may be queued from before, and the second event is waited for before it is read."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("record")

        def synchronize(self):
            told.append("wait for the event")

        def elapsed_time(self, end):
            assert told[-1] == "wait for the event"
            return 4.5

    monkeypatch.setattr(latency.torch.cuda, "Event", Event)
    monkeypatch.setattr(latency.torch.cuda, "synchronize", lambda: told.append("wait for all"))
    assert cuda_events(lambda: told.append("call")) == 4.5
    assert told == ["wait for all", "record", "call", "record", "wait for the event"]


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
