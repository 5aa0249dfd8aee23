from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.metrics import latency
from sd_quant.metrics.latency import Stopping, measure, measure_in_turn, measure_together, ratio


def test_every_round_has_every_call_in_an_order_of_its_own_and_warmup_is_not_counted():
    order = []
    results = measure_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, warmup=2, repeats=3)
    rounds = ["".join(order[start : start + 2]) for start in range(0, 10, 2)]
    assert len(order) == 10 and set(rounds) == {"ab", "ba"}
    for result in results.values():
        assert (result["n"], result["warmup"], len(result["samples_ms"])) == (3, 2, 3)


def test_each_call_has_its_own_clock_and_the_record_names_it():
    def always_seven(call):
        call()
        return 7.0

    found = measure_in_turn({"a": lambda: None, "b": lambda: None}, 1, 2, clocks={"b": always_seven})
    assert found["b"]["samples_ms"] == [7.0, 7.0] and found["b"]["clock"] == "always_seven"
    assert found["a"]["clock"] == "wall_clock"
    assert (
        latency.clock_of(torch.device("cuda", 0)) is latency.cuda_events
        and latency.clock_of(torch.device("cpu")) is latency.wall_clock
    )


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
    assert latency.cuda_events(lambda: told.append("call")) == 4.5
    assert told == ["wait for all", "record", "call", "record", "wait for the event"]


def test_ratio_is_of_the_rounds_and_a_hiccup_does_not_decide_it():
    a = {"samples_ms": [10.0, 20.0] * 50}
    b = {"samples_ms": [5.0, 10.0] * 50}
    assert ratio(a, b).value == pytest.approx(2.0)
    a["samples_ms"][7] = 9000.0  # a ratio of means would be 8
    assert ratio(a, b).value == pytest.approx(2.0)
    with pytest.raises(ValueError):
        ratio(a, {"samples_ms": [1.0]})


@pytest.fixture
def seconds(monkeypatch):
    """A clock that stands still until somebody adds to it."""
    now = SimpleNamespace(now=0.0)
    monkeypatch.setattr(latency, "perf_counter", lambda: now.now)
    return now


def calls_taking(seconds, **durations):
    """Calls that take these seconds, one after the other in each list and then from its start."""

    def call(values):
        turn = cycle(values)
        return lambda: setattr(seconds, "now", seconds.now + next(turn))

    return {name: call(values) for name, values in durations.items()}


def test_statistics_are_those_of_the_samples(seconds):
    [call] = calls_taking(seconds, a=[3.0, 1.0, 2.0, 5.0, 4.0]).values()
    found = measure(call, warmup=0, repeats=5)
    assert found["samples_ms"] == [3000, 1000, 2000, 5000, 4000]
    assert (found["min_ms"], found["p50_ms"], found["mean_ms"]) == (1000, 3000, 3000)
    assert 3000 < found["p90_ms"] < found["p99_ms"] <= 5000


def test_rounds_end_when_the_interval_is_narrow_and_not_before(seconds):
    steady = measure_together(calls_taking(seconds, a=[2.0], b=[1.0]), 1, Stopping(10, 0.02, 1e9))
    assert (steady.stopped, len(steady.samples["a"])) == ("narrow", 10)
    noisy = measure_together(calls_taking(seconds, a=[2.0, 2.2, 1.9], b=[1.0, 1.3]), 0, Stopping(10, 0.02, 1e9))
    assert noisy.stopped == "narrow" and len(noisy.samples["b"]) in (20, 40, 80, 160, 320, 640)
    assert ratio(noisy.statistics("a"), noisy.statistics("b")).within(0.02)


def test_a_budget_ends_rounds_that_stay_wide_but_not_the_fewest(seconds):
    wide = calls_taking(seconds, a=[1.0], b=[1.0, 9.0])
    rounds = measure_together(wide, 0, Stopping(4, 0.001, 100))
    assert rounds.stopped == "budget" and len(rounds.samples["a"]) == 18  # of 6 seconds on average
    assert len(measure_together(wide, 0, Stopping(4, 0.001, 0)).samples["a"]) == 4
    assert measure_together(wide, 0, Stopping(4, 0.001, 1e9, most=12)).stopped == "rounds"


def test_the_first_call_is_what_the_others_are_compared_with(seconds):
    """Two calls whose ratio to each other is sure, and to the reference is not."""
    calls = calls_taking(seconds, reference=[1.0, 3.0, 2.0], a=[1.0], b=[1.0])
    assert measure_together(calls, 0, Stopping(10, 0.02, 100)).stopped == "budget"
    calls = calls_taking(seconds, a=[1.0], b=[1.0])
    assert measure_together(calls, 0, Stopping(10, 0.02, 100)).stopped == "narrow"


def test_spread_is_that_of_the_middle_four_fifths():
    assert latency.spread([10.0] * 100) == 0
    assert latency.spread([float(value) for value in range(50, 151)]) == pytest.approx(0.8)
    assert latency.spread([10.0] * 99 + [1000.0]) == 0


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 3), (0, 0)])
def test_nothing_to_measure_is_refused(warmup, repeats):
    with pytest.raises(ConfigError, match=f"warmup={warmup} and repeats={repeats}"):
        measure(lambda: None, warmup, repeats)
