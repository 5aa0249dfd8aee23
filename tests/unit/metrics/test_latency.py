"""Rounds on a clock that stands still, and who else used the processors: counted, and from numbers made up."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, cycle, repeat
from types import SimpleNamespace

import pytest
import torch

from sd_quant.metrics import latency, machine_probe
from sd_quant.metrics.intervals import ratio_interval
from sd_quant.metrics.latency import Stopping, measure, measure_together
from sd_quant.metrics.neighbours import ProcessorTimes, busy, processor_times, slowed, used_by_others

pytestmark = pytest.mark.commit


def test_every_round_has_every_call_in_an_order_of_its_own_with_its_own_clock_and_warmup_is_not_counted():
    order = []

    def always_seven(call):
        call()
        return 7.0

    calls = {each: partial(order.append, each) for each in "ab"}
    found = measure_together(calls, 2, Stopping(3, 1, 0), {"b": always_seven})
    rounds = ["".join(order[start : start + 2]) for start in range(0, 10, 2)]
    assert rounds[:2] == ["aa", "bb"] and set(rounds[2:]) == {"ab", "ba"} and len(order) == 10
    for name, clock in (("a", "wall_clock"), ("b", "always_seven")):
        result = found.statistics(name)
        assert (result["n"], result["warmup"], result["clock"]) == (3, 2, clock)
    assert found.samples["b"] == [7.0] * 3 and latency.clock_of(torch.device("cuda")) == latency.cuda_events
    assert latency.clock_of(torch.device("cpu")) == latency.wall_clock


def test_a_gpu_is_timed_between_its_own_events(monkeypatch):
    """Nothing may be queued from before, and the second event is waited for before it is read."""
    told = []
    event = SimpleNamespace(
        record=lambda: told.append("record"), synchronize=lambda: told.append("wait for the event"),
        elapsed_time=lambda end: told.append("read") or 4.5,
    )  # fmt: skip
    monkeypatch.setattr(latency.torch.cuda, "Event", lambda enable_timing: event if enable_timing else None)
    monkeypatch.setattr(latency.torch.cuda, "synchronize", lambda: told.append("wait for all"))
    assert latency.cuda_events(lambda: told.append("call")) == 4.5
    assert told == ["wait for all", "record", "call", "record", "wait for the event", "read"]


class Clock:
    """It stands still until somebody spends seconds of it, and knows what they were spent on."""

    def __init__(self):
        self.now, self.told = 0.0, []

    def spend(self, name: str, takes: float | Iterator[float]) -> bool:
        self.told.append(name)
        self.now += takes if isinstance(takes, float) else next(takes)
        return True

    def calls(self, **durations: Sequence[float]) -> dict:
        return {name: partial(self.spend, name, cycle(values)) for name, values in durations.items()}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(latency, "perf_counter", lambda: clock.now)
    return clock


def test_rounds_end_when_the_interval_is_narrow_and_not_before(clock):
    [call] = clock.calls(a=[3.0, 1.0, 2.0, 5.0, 4.0]).values()
    found = measure(call, warmup=0, repeats=5)
    assert found["samples_ms"] == [3000, 1000, 2000, 5000, 4000]
    assert (found["min_ms"], found["p50_ms"], found["mean_ms"]) == (1000, 3000, 3000)
    assert 3000 < found["p90_ms"] < found["p99_ms"] <= 5000
    steady = measure_together(clock.calls(a=[2.0], b=[1.0]), 1, Stopping(10, 0.02, 1e9))
    assert (steady.stopped, len(steady.samples["a"])) == ("narrow", 10)
    noisy = measure_together(clock.calls(a=[2.0, 2.2, 1.9], b=[1.0, 1.3]), 0, Stopping(10, 0.02, 1e9))
    assert noisy.stopped == "narrow" and len(noisy.samples["b"]) in (20, 40, 80, 160, 320, 640)
    assert ratio_interval(noisy.samples["a"], noisy.samples["b"]).within(0.04)


def test_a_budget_ends_rounds_that_stay_wide_but_not_the_fewest(clock):
    """The first call is what the others are compared with: their ratio to each other may be sure."""
    wide = clock.calls(a=[1.0], b=[1.0, 9.0])
    rounds = measure_together(wide, 0, Stopping(4, 0.001, 100))
    assert rounds.stopped == "budget" and len(rounds.samples["a"]) == 18  # of 6 seconds on average
    assert len(measure_together(wide, 0, Stopping(4, 0.001, 0)).samples["a"]) == 4
    assert measure_together(wide, 0, Stopping(4, 0.001, 1e9, most=12)).stopped == "rounds"
    unsure = clock.calls(reference=[1.0, 3.0, 2.0], a=[1.0], b=[1.0])
    assert measure_together(unsure, 0, Stopping(10, 0.02, 100)).stopped == "budget"


def test_a_row_has_as_many_calls_as_an_image_or_half_a_second_has_room_for(clock):
    """The first call of a row takes longer than the others."""
    for first, then, milliseconds, made in (
        (0.02, 0.01, (20 + 19 * 10) / 20, 20), (0.15, 0.1, (150 + 2 * 100) / 3, 3), (30.0, 30.0, 30_000, 1),
        (0.0, 0.0, 0, 20),
    ):  # fmt: skip
        clock.told.clear()
        call = partial(clock.spend, "a", chain([first], repeat(then)))
        assert latency.in_a_row(latency.wall_clock, 20)(call) == pytest.approx(milliseconds)
        assert len(clock.told) == made
    assert latency.in_a_row(latency.cuda_events, 3).__name__ == "cuda_events"


def test_engines_are_opened_again_in_new_orders_while_there_is_time(clock):
    """An opening takes 8 s with its warm-up and has 8 rounds of 1 s: 60 s have room for three of them."""
    random.seed(3)  # orders are drawn anew in each process, and three draws may be equal
    calls, told = clock.calls(a=[0.5], b=[0.25], c=[0.25]), clock.told
    rounds = measure_together(calls, 2, Stopping(4, 1e-9, 60), reopen=lambda names: clock.spend("".join(names), 6.0))
    assert rounds.stopped == "budget" and rounds.openings == [3, 8, 8, 8] and clock.now == 2 + 51
    orders = [each for each in told if len(each) == 3]
    assert len(orders) == 3 and {"".join(sorted(each)) for each in orders} == {"abc"} and len(set(orders)) > 1
    first = told.index(orders[0])
    assert told[first + 1 : first + 7] == ["a", "a", "b", "b", "c", "c"]  # are warmed up, and not counted
    assert {len(samples) for samples in rounds.samples.values()} == {27}


def test_engines_that_stay_as_they_were_opened_have_one_opening(clock):
    for budget, reopen, made in ((0, pytest.fail, 4), (5, pytest.fail, 4), (60, lambda names: False, 8)):
        rounds = measure_together(clock.calls(a=[1.0], b=[1.0]), 0, Stopping(4, 1e-9, budget), reopen=reopen)
        assert rounds.openings == [] and len(rounds.samples["a"]) == made
    steady = clock.calls(a=[2.0], b=[1.0])  # they end when the interval is narrow, after eight at least
    rounds = measure_together(steady, 0, Stopping(1, 0.02, 1e9), reopen=lambda names: True)
    assert (rounds.stopped, len(rounds.openings)) == ("narrow", 8)


def test_the_machine_is_probed_before_between_and_after_the_rounds_and_outside_their_budget(clock):
    calls, told = clock.calls(a=[1.0, 1.0, 9.0], b=[1.0, 9.0]), clock.told

    def probe() -> dict:
        clock.spend("probe", 100.0)
        return {"number": float(len(told))}

    rounds = measure_together(calls, 1, Stopping(4, 1e-9, 60), probe=probe)
    where = [place for place, each in enumerate(told) if each == "probe"]
    assert where[0] == 0 and where[-1] == len(told) - 1 and len(where) == 3
    assert 4 < where[1] < len(told) - 4 and rounds.stopped == "budget"
    assert len(rounds.samples["a"]) == (len(told) - 3 - 2 * 2) / 2, "after each probe engines are warmed up"
    assert sum(map(sum, rounds.samples.values())) == pytest.approx(60e3, rel=0.2)
    assert [each["number"] for each in rounds.probes] == [place + 1 for place in where]
    assert measure_together(calls, 1, Stopping(4, 1e-9, 60)).probes == []


def test_a_probe_tells_what_the_processor_reaches_and_what_torch_lacks(monkeypatch):
    monkeypatch.setattr(machine_probe, "SECONDS", 0.01)
    monkeypatch.setattr(machine_probe, "COPIED", 2**20)
    found = machine_probe.probe(torch.device("cpu"))
    assert list(found) == ["cpu_copy_gb_per_second", "cpu_int8_tops", "cpu_fp32_tflops"] and min(found.values()) > 0
    monkeypatch.delattr(torch, "_int_mm")
    monkeypatch.setattr(machine_probe, "clock_of", lambda device: lambda call: 500.0)
    found = machine_probe.probe(torch.device("cpu"))
    assert found["cpu_int8_tops"] is None and found["cpu_copy_gb_per_second"] == pytest.approx(4 * 2**20 / 1e9)


def test_rounds_that_are_too_far_apart_have_no_median():
    steady, shaken, few = (
        latency.statistics_of(samples, 0, "wall_clock") for samples in ([10.0] * 5, [10.0, 50.0] * 5, [10.0, 50.0])
    )
    reason = "its rounds took 10 to 50 ms, which is no figure; time again when the machine is quiet"
    assert latency.judged(steady) == steady and latency.judged(few) == few
    assert latency.judged(shaken) == shaken | {"p50_ms": None, "reason": reason}
    assert latency.judged(steady, "it snowed") == steady | {"p50_ms": None, "reason": "it snowed"}
    assert latency.spread([10.0] * 99 + [1000.0]) == 0, "of the middle four fifths"
    assert latency.spread([float(value) for value in range(50, 151)]) == pytest.approx(0.8)


@pytest.mark.parametrize(("after", "others", "steal"), [
    (ProcessorTimes(18.0, 2.0, 9.0, 120.0), 3 / 20, 1 / 20),
    (ProcessorTimes(18.0, 2.0, 19.0, 120.0), 0, 1 / 20),  # a process and a processor are counted at different moments
    (None, None, None),
    (ProcessorTimes(10.0, 1.0, 5.0, 100.0), None, None),
])  # fmt: skip
def test_others_are_what_is_left_of_what_the_processors_did(after, others, steal):
    before = ProcessorTimes(10.0, 1.0, 5.0, 100.0)
    assert used_by_others(before, after) == pytest.approx({"others": others, "steal": steal})


@pytest.mark.slow
@pytest.mark.skipif(processor_times() is None, reason="this kernel does not say what its processors did")
def test_a_busy_process_is_somebody_elses_and_ones_own_work_is_not():
    """Both measured against another count of the same: the processor time of the child, and of this process."""
    before, own = processor_times(), time.process_time()
    while time.process_time() - own < 0.3:
        pass
    mine = processor_times()
    assert mine.own - before.own == pytest.approx(0.3, abs=0.1)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        seconds = 0.0
        while seconds < 0.5:
            time.sleep(0.05)
            with open(f"/proc/{child.pid}/stat", encoding="ascii") as file:
                user, system = file.read().rpartition(")")[2].split()[11:13]
            seconds = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        shares, after = used_by_others(mine, processor_times()), processor_times()
        child.kill()
    assert shares["others"] * (after.total - mine.total) >= 0.8 * seconds


def test_a_busy_machine_is_called_so():
    assert busy(0.01, 0.0, 0.1) is None is busy(None, None, None)
    assert busy(0.48, 0.2, 0.9) == (
        "other processes took 48% of the processors' time, a hypervisor took 20% of the processors' time, "
        "the unquantized engine's own latency varied by 90%"
    )


@pytest.mark.parametrize(("readings", "shown", "told"), [
    ([], None, None),
    ([{"copy": 8.0}, {"copy": 7.9}], None, None),
    ([{"copy": 8.0, "int8": None}], {"copy": 10.0}, "its copy was 20% below what it has shown"),
    ([{"copy": 9.5}], {"copy": 10.0, "int8": 3.0}, None),
    ([{"copy": 12.0}], {"copy": 10.0}, None),
    ([{"copy": 10.0, "int8": 2.0}, {"copy": 8.5, "int8": 1.5}], {"copy": 10.0}, "its int8 moved by 25% meanwhile"),
])  # fmt: skip
def test_a_machine_is_slowed_that_reaches_less_than_before_or_than_a_moment_ago(readings, shown, told):
    expected = None if told is None else f"something outside the run slowed this machine: {told}"
    assert slowed(readings, shown) == expected
