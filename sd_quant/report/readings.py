"""Read figures from a run's record (``metrics.json``), each with the recorded reason if it is missing."""

import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from sd_quant.engines import RUNTIMES
from sd_quant.engines.gpu import better_format
from sd_quant.metrics import SCORES, Against, Score
from sd_quant.metrics.intervals import Interval, recorded
from sd_quant.report.record import ABSENT, VARIANTS, Fidelity, ImageScores, Record, at
from sd_quant.report.table import DASH, plus_minus

IDENTICAL_SSIM = 1 - 1e-6
P = TypeVar("P")


class Number(NamedTuple):
    """A number of a record. ``reason`` explains a ``value`` of None, or why a mean leaves out some images."""

    value: float | None
    reason: str | None = None


def number_at(node: Any, *keys: str) -> Number:
    """Read the number at nested ``keys``; a missing one has the ``reason`` recorded in its place, else ABSENT."""
    for key in keys:
        if (inner := at(node, key)) is None:
            return Number(None, at(node, "reason") or ABSENT)
        node = inner
    return Number(node.get("value"), node.get("reason")) if isinstance(node, Mapping) else Number(node)


def quotient(a: Number, b: Number) -> Number:
    """Divide ``a`` by ``b``; a missing operand gives a missing result with the operand's reason."""
    if a.value is None or not b.value:
        return a if a.value is None else Number(None, b.reason)
    return Number(a.value / b.value)


class LatencyPair(NamedTuple):
    """Median latencies in ms of a part of the pipeline, or of a whole image, at one batch size, and the speed-up."""

    full_precision: Number
    quantized: Number
    speedup: Number  # the recorded one, or else the ratio of the medians
    reach: float | None  # the larger distance from the recorded speed-up to an end of its interval


def latency_of(record: Record, engine: str, part: str, batch: str | int) -> LatencyPair:
    """Read the latencies of ``engine`` for a call of ``part`` with ``batch`` samples, or for ``batch`` whole images."""
    place = (record["latency"], engine, part, str(batch))
    full_precision, quantized = (number_at(*place, variant, "p50_ms") for variant in VARIANTS)
    own = number_at(*place, "speedup")
    speedup = quotient(full_precision, quantized) if own.value is None else own
    ends = record["latency"][engine][part][str(batch)]["speedup_interval"]
    reach = None if own.value is None else recorded(own.value, ends).reach
    return LatencyPair(full_precision, quantized, speedup, reach)


def degenerate_of(record: Record) -> dict[Any, str]:
    """Return the degenerate (broken) images of a record as phrases by image index."""
    return {each["index"]: f"image {each['index']} is {each['reason']}" for each in record["degenerate"]}


def degenerate_images(record: Record, most: int = 3) -> str:
    """Describe the first ``most`` degenerate images of a record and count the rest; empty if no image is degenerate."""
    words = [*degenerate_of(record).values()]
    return "; ".join(words[:most] + [f"{len(words) - most} more images are degenerate"] * (len(words) > most))


def better_format_of(record: Record) -> str | None:
    """Name a number format that is faster than the run's on the run's GPU, and why; None if no better one is known."""
    runtime, knobs = RUNTIMES.get(str(record["knobs"]["infer"]["engine"])), record["knobs"]
    capabilities, enabled = record["environment"]["machine"]["compute_capabilities"], at(knobs, "enable")
    if runtime is None or runtime.device == "cpu" or not capabilities or not at(knobs, "quant_level"):
        return None
    return better_format(capabilities[0], [str(at(pair, "activation")) for pair in (enabled or {}).values()])


def slower(speedup: float | None) -> str | None:
    """Return ``takes 1.25 times as long quantized as unquantized`` if the speed-up rounds below 1.00, else None."""
    slow = speedup is not None and round(speedup, 2) < 1
    return f"takes {1 / speedup:.2f} times as long quantized as unquantized" if slow else None


class Scored(NamedTuple):
    """One score: its mean over images (of latents, the value at the last step), the worst image's, and all values."""

    value: Number
    worst: Number
    values: list[float | None]


def score_of(fidelity: Fidelity, score: Score) -> Scored:
    """Read the fidelity to full precision by ``score``."""
    entry = at(fidelity, score.key)
    if score.against is Against.IMAGES:
        mean = number_at(fidelity, score.key, "mean")
        worst = number_at(fidelity, score.key, "min" if score.more_is_better else "max")
        left_out = mean if mean.value is None else Number(mean.value, at(entry, "reason"))
        return Scored(left_out, worst, at(entry, "values") or [])
    if isinstance(entry, list):
        last = entry[-1] if entry else None
        reason = at(fidelity, score.reason_key) if last is None else None
        return Scored(Number(last, reason), Number(None), entry)
    return Scored(number_at(fidelity, score.key), Number(None), [])


def are_identical(psnr: float | None, ssim: float | None) -> bool:
    """Check whether an image equals full precision's: PSNR None, as an infinite one is recorded, and SSIM 1."""
    return psnr is None and ssim is not None and ssim > IDENTICAL_SSIM


def psnr_of_images(fidelity: Fidelity) -> list[float | None]:
    """Return the PSNR of each image in dB; infinite for an image equal to full precision's, None if unknown."""
    psnr, ssim = (score_of(fidelity, SCORES[name]).values for name in ("psnr", "ssim"))
    return [math.inf if are_identical(*each) else each[0] for each in zip(psnr, ssim or repeat(None), strict=False)]


def interval_of(fidelity: Fidelity, score: Score) -> Interval | None:
    """Compute a score's mean with its interval over the images; None if any image has no value or no image exists."""
    values = score_of(fidelity, score).values
    return None if None in values else score.mean(values)


def named_parts(part: Mapping[str, P]) -> dict[str, P]:
    """Return the named parts inside ``part`` of a record, such as engines or batch sizes, without a ``reason``."""
    return {name: inner for name, inner in part.items() if isinstance(inner, Mapping)}


def psnr_text(scores: Mapping[str, ImageScores]) -> str:
    """Format the mean PSNR as ``34.8 ± 1.2 dB`` (95 %), or a dash if unknown."""
    mean = SCORES["psnr"].mean(scores["psnr"]["values"])
    return f"{plus_minus(mean, '{:.1f}')} dB" if mean else DASH
