"""Trackers: log a finished run to experiment-tracking tools such as MLflow.

To add one, write ``sd_quant/trackers/<name>.py`` with a function ``log(run: Run, store: Path) -> None`` and add one
line to ``TRACKERS``: its name and the function as ``module:function``. A tracker is imported when a run is logged, so
its package is needed only by those who choose it.

A tracker is called once, with the finished record, and cannot fail the run: its errors become one warning. Alternative
not taken: to log during the run, as Lightning's loggers do; a locked database would then stop hours of work, and the
finished record has all values anyway.
"""

import json
import logging
import math
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_quant.metrics import Against, scores_against
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)

TRACKERS = {"mlflow": "sd_quant.trackers.mlflow:log", "tensorboard": "sd_quant.trackers.tensorboard:log"}
RESULTS = ("fidelity", "latency", "sizes_bytes", "peak_memory_bytes", "stages")  # of the record
NO_RESULTS = {"n", "warmup", "worst_index", "images", "features"}  # numbers that describe a measurement, not its result
IMAGE = Path("images/grid.png")
LONGEST_TEXT = 250  # letters: prompts and paths may be anybody's


@dataclass(frozen=True)
class Run:
    """Knobs, metrics and image of a finished run, as passed to trackers."""

    name: str
    knobs: dict[str, bool | int | float | str]  # by dotted name, as on the command line
    metrics: dict[str, float]  # by their path in the record
    series: dict[str, list[float | None]]  # a value for each denoising step, None where there is none
    image: Path | None  # the sheet on which full precision and quantized stand above each other


def track(names: Sequence[str], record: Mapping, directory: Path, store: Path) -> None:
    """Log the run in ``directory`` with each tracker of ``names`` into folder ``store``; failures become warnings."""
    for name in names:
        try:
            log = pkgutil.resolve_name(TRACKERS[name])
            log(read_run(record, directory), store)
        except Exception as error:  # whatever a tracker does wrong, the run is done and its record written
            said, kind = one_line(error), type(error).__name__
            missing = f"it cannot be imported here ({said}); install it with: pip install 'sd-quant[{name}]'"
            reason = missing if isinstance(error, ImportError) else f"{kind}: {said}"
            LOG.warning("the tracker %s was not told of this run: %s", name, reason)


def read_run(record: Mapping, directory: Path) -> Run:
    """Build the ``Run`` of ``directory``, named ``<parent>/<folder>`` because every sweep calls its jobs 0, 1, 2."""
    fidelity, image = record.get("fidelity") or {}, directory / IMAGE
    steps = [score.key for score in scores_against(Against.LATENTS)]
    return Run(
        name="/".join(directory.absolute().parts[-2:]),
        knobs=dict(_knobs(record.get("knobs") or {})),
        metrics={name: value for key in RESULTS for name, value in _numbers(record.get(key), key)},
        series={f"fidelity/{key}": fidelity[key] for key in steps if fidelity.get(key)},
        image=image if image.is_file() else None,
    )


def _knobs(knobs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield knobs by dotted name, as on the command line; values other than numbers become a short line of text."""
    for key, value in knobs.items():
        if isinstance(value, Mapping):
            yield from _knobs(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{key}", value
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", one_line(text, LONGEST_TEXT)


def _numbers(node: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield all finite numbers below ``node`` with their paths; skip lists, nulls and the names of NO_RESULTS."""
    if isinstance(node, Mapping):
        inner = {name: node["value"]} if "value" in node else {f"{name}/{key}": value for key, value in node.items()}
        for path, value in inner.items():
            if path.rpartition("/")[2] not in NO_RESULTS:
                yield from _numbers(value, path)
    elif isinstance(node, int | float) and not isinstance(node, bool) and math.isfinite(node):
        yield name, float(node)
