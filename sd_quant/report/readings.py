"""Figures of a record, each with the reason where there is none, for whatever shows them."""

import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any, NamedTuple

from sd_quant.engines import RUNTIMES
from sd_quant.engines.gpu import better_format
from sd_quant.metrics import SCORES, Against, Score
from sd_quant.metrics.intervals import Interval, recorded
from sd_quant.report.record import ABSENT, VARIANTS, at
from sd_quant.report.table import DASH, plus_minus

IDENTICAL_SSIM = 1 - 1e-6
WORKING = "opening or calling one"


class Number(NamedTuple):
    """A number of a record. ``reason`` explains a ``value`` of None, or the images that a mean leaves out."""

    value: float | None
    reason: str | None = None


def number_at(record: Any, *keys: str) -> Number:
    """The number at ``keys``, or the reason that stands beside the first key that is missing."""
    node = record
    for depth, key in enumerate(keys):
        if (inner := at(node, key)) is None:
            reason = at(node, "reason") if depth else None  # the run's own reason is not a number's
            return Number(None, reason or ABSENT)
        node = inner
    return Number(node.get("value"), node.get("reason")) if isinstance(node, Mapping) else Number(node)


def quotient(a: Number, b: Number) -> Number:
    """``a`` divided by ``b``, with the reason of the one that is missing."""
    if a.value is None or not b.value:
        return a if a.value is None else Number(None, b.reason)
    return Number(a.value / b.value)


class LatencyPair(NamedTuple):
    """Medians of one part, or of an image, at one batch size, in milliseconds, with the speed-up."""

    full_precision: Number
    quantized: Number
    speedup: Number  # the recorded one, or else the ratio of the medians
    reach: float | None  # the larger distance from the recorded speed-up to an end of its interval


def latency_of(record: Any, engine: str, part: str, batch: str | int) -> LatencyPair:
    """The latency of ``engine`` for a call of ``part``, or for an IMAGE, with ``batch`` samples in it."""
    place = ("latency", engine, part, str(batch))
    full_precision, quantized = (number_at(record, *place, variant, "p50_ms") for variant in VARIANTS)
    own = number_at(record, *place, "speedup")
    speedup = quotient(full_precision, quantized) if own.value is None else own
    ends = at(record, *place, "speedup_interval")
    reach = None if own.value is None else recorded(own.value, ends).reach
    return LatencyPair(full_precision, quantized, speedup, reach)


def degenerate_of(record: Any) -> dict[Any, str]:
    """The degenerate images of a record by their index, each in words."""
    entries = at(record, "degenerate") or []
    return {at(each, "index"): f"image {at(each, 'index')} is {at(each, 'reason')}" for each in entries}


def degenerate_images(record: Any, most: int = 3) -> str:
    """The first degenerate images of a record in words, and the number of others; empty where there are none."""
    words = [*degenerate_of(record).values()]
    return "; ".join(words[:most] + [f"{len(words) - most} more images are degenerate"] * (len(words) > most))


def better_format_of(record: Any) -> str | None:
    """Why another format than a run's is faster on the GPU that it ran on, and which; None where nothing is known."""
    runtime = RUNTIMES.get(str(at(record, "knobs", "infer", "engine")))
    capabilities, enabled = at(record, "environment", "machine", "compute_capabilities"), at(record, "knobs", "enable")
    if runtime is None or runtime.device == "cpu" or not capabilities or not at(record, "knobs", "quant_level"):
        return None
    return better_format(capabilities[0], [str(at(pair, "activation")) for pair in (enabled or {}).values()])


def slower(speedup: float | None) -> str | None:
    """``takes 1.25 times as long quantized as unquantized``, or None; the third decimal of a speed-up is noise."""
    slow = speedup is not None and round(speedup, 2) < 1
    return f"takes {1 / speedup:.2f} times as long quantized as unquantized" if slow else None


class PartBytes(NamedTuple):
    """Bytes of memory that a part's engine takes, opened alone."""

    opened: float  # that it holds
    peak: float  # while it was opened or called


def memory_of(record: Any, variant: str) -> dict[str, PartBytes | None]:
    """The memory of each part of a variant, None where unknown; an unquantized part takes the same in both."""
    found: dict[str, PartBytes | None] = {}
    for part in names(record, "memory"):
        both = at(record, "memory", part)
        entry = both.get(variant, both.get(VARIANTS[0]))
        figures = [at(entry, f"{name}_bytes") for name in ("opened", "opening_peak", "call_peak")]
        found[part] = None if None in figures else PartBytes(figures[0], max(figures))
    return found


def held(record: Any, variant: str) -> dict[str, float]:
    """Bytes of a pipeline with all parts open, by part, and the most that one at work takes beyond.

    Derived from the parts' own, without the process and its libraries; empty where a part's are unknown.
    """
    parts = memory_of(record, variant)
    if not parts or None in parts.values():
        return {}
    beyond = max(each.peak - each.opened for each in parts.values())
    return {part: each.opened for part, each in parts.items()} | {WORKING: beyond}


class Scored(NamedTuple):
    """A score: the mean over the images or the value of the last step, the worst image's value, and all values."""

    value: Number
    worst: Number
    values: list[float | None]


def score_of(record: Any, score: Score) -> Scored:
    """The fidelity of the quantized variant by ``score``."""
    entry = at(record, "fidelity", score.key)
    if score.against is Against.IMAGES:
        mean = number_at(record, "fidelity", score.key, "mean")
        worst = number_at(record, "fidelity", score.key, "min" if score.more_is_better else "max")
        left_out = mean if mean.value is None else Number(mean.value, at(entry, "reason"))
        return Scored(left_out, worst, at(entry, "values") or [])
    if isinstance(entry, list):
        last = entry[-1] if entry else None
        reason = at(record, "fidelity", score.reason_key) if last is None else None
        return Scored(Number(last, reason), Number(None), entry)
    return Scored(number_at(record, "fidelity", score.key), Number(None), [])


def are_identical(psnr: float | None, ssim: float | None) -> bool:
    """True for images that equal full precision's: their PSNR is infinite, which a record has as null."""
    return psnr is None and ssim is not None and ssim > IDENTICAL_SSIM


def psnr_of_images(record: Any) -> list[float | None]:
    """PSNR of each image in dB, infinite where it equals full precision's, None where it is not known."""
    psnr, ssim = (score_of(record, SCORES[name]).values for name in ("psnr", "ssim"))
    return [math.inf if are_identical(*each) else each[0] for each in zip(psnr, ssim or repeat(None), strict=False)]


def interval_of(record: Any, score: Score) -> Interval | None:
    """The mean of a score with its interval over the images; None where some have no value, or none has one."""
    values = score_of(record, score).values
    return None if None in values else score.mean(values)


def names(record: Any, *keys: str) -> list[str]:
    """The names of the dictionaries inside the one at ``keys``: engines, parts, batch sizes."""
    return [name for name, inner in (at(record, *keys) or {}).items() if isinstance(inner, Mapping)]


def psnr_text(entry: Any, key: str) -> str:
    """The mean PSNR of the scores at ``key`` with the further end of its interval at 95 %, or a dash."""
    mean = SCORES["psnr"].mean(at(entry, key, "psnr", "values") or [])
    return f"{plus_minus(mean, '{:.1f}')} dB" if mean else DASH
