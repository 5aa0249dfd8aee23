"""Who else used the processors: counted beside a process that really does, and from numbers made up."""

import os
import subprocess
import sys
import time

import pytest

from sd_quant.metrics.neighbours import ProcessorTimes, busy, processor_times, slowed, used_by_others

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("before", "after", "others", "steal"),
    [
        (ProcessorTimes(10.0, 1.0, 5.0, 100.0), ProcessorTimes(18.0, 2.0, 9.0, 120.0), 3 / 20, 1 / 20),
        # the kernel counts a process and a processor at different moments
        (ProcessorTimes(10.0, 1.0, 5.0, 100.0), ProcessorTimes(18.0, 2.0, 19.0, 120.0), 0, 1 / 20),
        (None, None, None, None),
        (ProcessorTimes(1, 0, 0, 5), ProcessorTimes(1, 0, 0, 5), None, None),
    ],
)
def test_others_are_what_is_left_of_what_the_processors_did(before, after, others, steal):
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


@pytest.mark.parametrize(
    ("others", "steal", "spread", "told"),
    [
        (0.01, 0.0, 0.1, None),
        (None, None, None, None),
        (0.48, 0.0, 0.1, "other processes took 48% of the processors' time"),
        (0.0, 0.2, 0.1, "a hypervisor took 20% of the processors' time"),
        (0.0, 0.0, 0.9, "the unquantized engine's own latency varied by 90%"),
    ],
)
def test_a_busy_machine_is_called_so(others, steal, spread, told):
    assert busy(others, steal, spread) == told


@pytest.mark.parametrize(
    ("readings", "shown", "told"),
    [
        ([], None, None),
        ([{"copy": 8.0}, {"copy": 7.9}], None, None),
        ([{"copy": 8.0, "int8": None}], {"copy": 10.0}, "its copy was 20% below what it has shown"),
        ([{"copy": 9.5}], {"copy": 10.0, "int8": 3.0}, None),
        ([{"copy": 12.0}], {"copy": 10.0}, None),
        ([{"copy": 10.0, "int8": 2.0}, {"copy": 8.5, "int8": 1.5}], {"copy": 10.0}, "its int8 moved by 25% meanwhile"),
    ],
)
def test_a_machine_is_slowed_that_reaches_less_than_before_or_than_a_moment_ago(readings, shown, told):
    expected = None if told is None else f"something outside the run slowed this machine: {told}"
    assert slowed(readings, shown) == expected
