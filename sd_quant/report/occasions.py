"""History of a machine's timing sessions ("occasions"): its speed, and how much speed-ups vary between sessions.

Rounds of one hour cannot tell how a speed-up varies from hour to hour, for example with a host's other virtual
machines. So each session stores its speed-ups, and readings of the machine's speed (``metrics.machine_probe``), in the
cache, in one file for each kind of machine. The interval of a speed-up is widened by the variance between earlier
occasions (``metrics.intervals``), pooled over all engines so that it applies to new engines too. With fewer than FEWEST
degrees of freedom it is not widened, and says so. Machines of equal description (a cluster's nodes) share a history.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Len
from typing_extensions import TypedDict

from sd_quant.cache import locked, regular
from sd_quant.errors import ResourceError
from sd_quant.files import digest, write_json
from sd_quant.metrics.intervals import deviation_of_occasions
from sd_quant.report.record import BetweenOccasions, Conditions, Finite, Positive, check_shape
from sd_quant.report.summary import machine_of
from sd_quant.report.timing import CALL, IMAGE, RECIPES, Timed

LOG = logging.getLogger(__name__)
MOST, MOST_ENGINES, MOST_BYTES = 200, 50, 2**24  # occasions of a machine, engines of each, and bytes of the file
APART = 600  # seconds, at least, between two occasions of one engine
FEWEST = 3  # degrees of freedom: Student's factor is 3.2 there, and 4.3 with one less
OF_THIS_HOUR = "of this hour: too few earlier timings of this machine say how far another hour's speed-up may be"
Ends = Annotated[list[Positive], Len(3, 3)]  # a speed-up and the ends of its interval


class Occasion(TypedDict):
    time: Finite  # seconds since 1970
    probes: list[dict[str, Finite | None]]
    speedups: Annotated[dict[str, dict[str, Ends]], Len(0, MOST_ENGINES)]  # by engine, and CALL or IMAGE


class History(TypedDict):
    occasions: Annotated[list[Occasion], Len(0, MOST)]  # the oldest first


def history_of(cache: Path | None, machine: Mapping[str, Any]) -> Path | None:
    """Return the history file of ``machine`` (``provenance.machine()``) in folder ``cache``; None without cache."""
    name = f"{digest(machine_of(machine), str(machine.get('threads')))[:32]}.json"
    return None if cache is None else cache / "occasions" / name


def read_history(file: Path | None) -> list[Occasion]:
    """Read the occasions in a history file; an empty list if it is missing, or damaged, which is logged."""
    try:
        if file is None or not file.exists():
            return []
        content = json.loads(regular(file, MOST_BYTES).read_text(encoding="utf-8"))
        check_shape(content, History, file.name)
        return [{name: each[name] for name in Occasion.__annotations__} for each in content["occasions"]]  # type: ignore
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        LOG.warning("the history of this machine, %s, is left aside (%r)", file, error)
        return []


def count_occasion(rounds: Conditions, engines: Mapping[str, Timed], file: Path | None) -> None:
    """Add a summary of earlier occasions to ``rounds``, then append this one (of ``engines``) to ``file``."""
    history, probes = read_history(file), rounds.get("probes") or []
    rounds["shown"], rounds["between"] = shown(history), between(history)
    if file is None:
        return
    speedups = {name: recorded_speedups(timed) for name, timed in [*engines.items()][:MOST_ENGINES]}
    occasion = Occasion(time=time.time(), probes=probes, speedups=speedups)
    try:
        with locked(file.with_suffix(".lock")):
            write_json(file, History(occasions=[*read_history(file), occasion][-MOST:]))
    except (OSError, ResourceError) as error:
        LOG.warning("the history of this machine, %s, cannot be written (%s)", file, error)


def recorded_speedups(timed: Timed) -> dict[str, list[float]]:
    """Return an engine's speed-up by quantization alone, [value, low, high], for CALL and IMAGE, where known."""
    alone = replace(timed, quantized_rest=None, share=1.0)
    found = {CALL: alone.denoiser_speedup(), IMAGE: alone.image_speedup()}
    return {name: list(interval) for name, interval in found.items() if interval is not None and interval.known}


def shown(history: Sequence[Occasion]) -> dict[str, float | None]:
    """Compute the 90th percentile of each measured figure of the machine's speed over all occasions."""
    values: dict[str, list[float]] = {}
    for figure, value in (item for each in history for reading in each["probes"] for item in reading.items()):
        if value is not None:
            values.setdefault(figure, []).append(value)
    return {figure: float(np.percentile(each, 90)) for figure, each in values.items()}


def between(history: Sequence[Occasion]) -> dict[str, Any]:
    """Estimate the standard deviation of log speed-ups between occasions, for CALL, IMAGE, RECIPES; or a ``reason``."""
    found: dict[str, Any] = {}
    for kind in (CALL, IMAGE, RECIPES):
        engines = figures_of(history, kind)
        occasions = len({when for each in engines for when in each})
        # all engines of an occasion share what happens in it, so they are not as many degrees
        degrees = min(sum(len(each) - 1 for each in engines), occasions - 1)
        if degrees >= FEWEST:
            deviation = deviation_of_occasions(list(each.values()) for each in engines)
            found[kind] = BetweenOccasions(deviation=deviation, degrees=degrees, occasions=occasions)
    return found or {"reason": OF_THIS_HOUR}


def figures_of(history: Sequence[Occasion], kind: str) -> list[dict[float, tuple[float, float]]]:
    """Return {time: (log speed-up, variance)} of each engine, for RECIPES each pair, on two or more occasions."""
    found: dict[Any, dict[float, tuple[float, float]]] = {}
    measured = CALL if kind == CALL else IMAGE
    for occasion in history:
        speedups = sorted(occasion["speedups"].items())
        own: dict[Any, Any] = {name: logarithm_of(*each[measured]) for name, each in speedups if measured in each}
        if kind == RECIPES:  # all ratios of engines in the same rounds have about one error
            two = combinations(own.items(), 2)
            own = {(a, b): (x[0] - y[0], (x[1] + y[1]) / 2) for (a, x), (b, y) in two}
        for name, figure in own.items():
            known = found.setdefault(name, {})
            if not known or occasion["time"] >= max(known) + APART:
                known[occasion["time"]] = figure
    return [each for each in found.values() if len(each) > 1]


def logarithm_of(value: float, low: float, high: float) -> tuple[float, float]:
    """Return a speed-up's logarithm, and its variance as if the 95 % interval were normal (1.96 deviations)."""
    return math.log(value), (math.log(high / low) / (2 * 1.96)) ** 2
