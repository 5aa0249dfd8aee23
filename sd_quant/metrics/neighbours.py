"""Measure how much other processes and virtual machines used this machine during a measurement.

The kernel counts the busy time of each processor (proc(5), ``/proc/stat``) and that of this process and its children.
The difference is other processes' work; ``steal`` is time that the hypervisor gave to other virtual machines, whose use
of bandwidth ``machine_probe`` shows. Alternative not taken: the load average, which counts this process, over minutes.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Reading = dict[str, float | None]  # what the machine reaches, by figures such as ``cpu_int8_tops``
MOST_FALL = 0.1  # above which ``slowed`` calls a machine slowed
WORDS = {"copy_gb_per_second": "memory bandwidth", "int8_tops": "rate of INT8 products",
         "fp32_tflops": "rate of fp32 products"}  # fmt: skip
MOST_OTHERS, MOST_STEAL, BUSY_SPREAD = 0.05, 0.02, 0.5  # above which ``busy`` calls a machine busy


class ProcessorTimes(NamedTuple):
    """Seconds since the machine started, over the processors that this process may use."""

    busy: float  # with anything, this process and stolen time included
    stolen: float
    own: float  # of this process and its finished children
    total: float


def processor_times() -> ProcessorTimes | None:
    """Return the processor times so far; None where the kernel does not report them."""
    tick = os.sysconf("SC_CLK_TCK")
    busy = stolen = total = 0.0
    try:
        usable = os.sched_getaffinity(0)
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except (OSError, AttributeError):
        return None
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in usable:
            user, nice, system, idle, waiting, irq, softirq, steal = (int(field) / tick for field in fields[:8])
            busy += user + nice + system + irq + softirq + steal
            stolen += steal
            total += user + nice + system + irq + softirq + steal + idle + waiting
    times = os.times()
    return ProcessorTimes(busy, stolen, times.user + times.system + times.children_user + times.children_system, total)


def used_by_others(before: ProcessorTimes | None, after: ProcessorTimes | None) -> dict[str, float | None]:
    """Return ``{others, steal}``, shares of the processors' time from 0 to 1; None where the kernel reports nothing."""
    if before is None or after is None or after.total <= before.total:
        return {"others": None, "steal": None}
    busy, stolen, own, total = (end - start for start, end in zip(before, after, strict=True))
    return {"others": max(0.0, busy - stolen - own) / total, "steal": stolen / total}


def busy(others: float | None, steal: float | None, spread: float | None) -> str | None:
    """Return why the machine was busy, in words, or None; ``spread`` is that of the reference engine's latency."""
    told = (
        (others, MOST_OTHERS, "other processes took {:.0%} of the processors' time"),
        (steal, MOST_STEAL, "a hypervisor took {:.0%} of the processors' time"),
        (spread, BUSY_SPREAD, "the unquantized engine's own latency varied by {:.0%}"),
    )
    return ", ".join(words.format(share) for share, most, words in told if (share or 0) > most) or None


def slowed(readings: Sequence[Mapping[str, Any]], shown: Mapping[str, Any] | None) -> str | None:
    """Return, in words, by how much the machine slowed down, or None if by no more than MOST_FALL.

    This is the largest fall of a probe's result: within ``readings``, or below the best ``shown`` in earlier runs.
    """
    falls = [(0.0, "")]
    for figure in dict.fromkeys(name for reading in readings for name in reading):
        if reached := [reading[figure] for reading in readings if reading.get(figure)]:
            best, words = (shown or {}).get(figure) or 0, WORDS.get(figure.partition("_")[2], figure)
            falls.append((1 - min(reached) / max(reached), f"{words} moved by {{:.0%}} meanwhile"))
            falls.append((1 - min(reached) / max(best, min(reached)), f"{words} was {{:.0%}} below what it has shown"))
    fall, text = max(falls)
    return f"something outside the run slowed this machine: its {text.format(fall)}" if fall > MOST_FALL else None
