"""Latencies of a sweep: measured for all jobs together, or by each job separately.

``timing.json`` in a sweep's folder holds blocks: groups of engines that were timed in the same rounds, the unquantized
engine among them; a round calls each engine once. Engines of one block are compared round by round, engines of
different blocks by their speed-ups over the unquantized engine, and engines of different machines not at all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import mul
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from sd_quant.engines import COMPILED
from sd_quant.metrics.intervals import Interval, apart, ratio_interval, sum_of
from sd_quant.metrics.neighbours import busy, slowed
from sd_quant.report.record import IMAGE, LARGEST, VARIANTS, Conditions, Finite, at, check_shape, parsed, read_object

TIMING = "timing.json"
CALL, RECIPES = "call", "recipes"  # beside IMAGE, what is compared between occasions, see ``occasions``


class TimedEngine(TypedDict):
    """One timed engine, on behalf of all jobs whose graphs differ only in constants or whose plans are equal."""

    sha256: str  # of a graph without its constants, or of a plan
    jobs: list[str]
    samples_ms: list[Finite]  # one call of the denoiser in each round
    saved: dict[str, Finite]  # by job: what its other quantized parts take less than unquantized, in ``rest``'s unit
    shares: dict[str, Finite]  # by job whose images take other calls: their time as a share of a whole image's


class Block(TypedDict):
    """Engines that were timed in the same rounds."""

    engine: str  # the runtime
    rest: Finite  # an image's time beside its calls of the unquantized denoiser, as a share of theirs
    image_ms: Finite  # of the unquantized engine, median
    reference_ms: list[Finite]  # one call of the unquantized denoiser in each round
    compiled_ms: list[Finite] | None  # the same by the compiled framework, where a job asks for that baseline
    subjects: list[TimedEngine]
    rounds: Conditions
    seconds: Finite


class LeftOut(TypedDict):
    job: str
    reason: str


class TimingRecord(TypedDict):
    """Content of ``timing.json``."""

    schema_version: int
    origin: str  # digest of what was timed, where and for how long
    machine: str
    blocks: list[Block]
    left_out: list[LeftOut]  # jobs that have their own figures alone


@dataclass(frozen=True)
class Timed:
    """A job's timed rounds: latencies of one denoiser call in each round, in milliseconds."""

    block: str  # the same for all engines of the same rounds
    full_precision: list[float]
    quantized: list[float]
    rest: float | None  # as in ``Block``; None where an image has no latency
    image_ms: float | None  # of the unquantized engine
    openings: Sequence[int] = ()  # rounds of each opening, see ``ratio_interval``
    beside: Sequence[Sequence[float]] = ()  # of all engines of these rounds, if there were more
    compiled: list[float] | None = None  # of the compiled framework, where it was timed
    quantized_rest: float | None = None  # ``rest`` with other parts quantized; None where none is
    share: float = 1.0  # time of a quantized image's calls as a share of those of as many as the reference's
    between: Mapping[str, Any] = field(default_factory=dict)  # as in ``Conditions``

    @property
    def images(self) -> tuple[list[float], list[float]]:
        """Milliseconds by round, unquantized and quantized: a denoiser call plus its share of an image's other time."""
        full, own = self.full_precision, self.rest if self.quantized_rest is None else self.quantized_rest
        return in_image(full, full, self.rest), in_image(full, [self.share * each for each in self.quantized], own)

    def denoiser_speedup(self, confidence: float = 0.95) -> Interval:
        own = ratio_interval(self.full_precision, self.quantized, self.openings, self.beside, confidence)
        return self.on_any_occasion(own, CALL, confidence)

    def image_speedup(self, confidence: float = 0.95) -> Interval | None:
        return None if self.rest is None else self.of_images(*self.images, IMAGE, confidence)

    def of_images(self, a: Sequence[float], b: Sequence[float], kind: str, confidence: float = 0.95) -> Interval:
        """Compute the ratio of image times ``a`` / ``b``, of the same rounds; ``kind``: as in ``on_any_occasion``."""
        beside = [in_image(self.full_precision, each, self.rest) for each in self.beside]
        return self.on_any_occasion(ratio_interval(a, b, self.openings, beside, confidence), kind, confidence)

    def on_any_occasion(self, own: Interval, kind: str, confidence: float) -> Interval:
        """Widen a ratio's interval by the known variance of its ``kind`` (CALL, IMAGE, RECIPES) between sessions."""
        if not own.known or not (found := self.between.get(kind)):
            return own
        return Interval(*map(math.exp, sum_of(logarithm(own), apart(found["deviation"], found["degrees"], confidence))))

    def image_over_compiled(self) -> Interval | None:
        """Return the speed-up of an image over unquantized torch.compile; None where either was not timed."""
        if self.compiled is None or self.rest is None:
            return None
        return self.of_images(in_image(self.full_precision, self.compiled, self.rest), self.images[1], IMAGE)


def mean_call(calls: Mapping[str, float], samples: Mapping[str, Sequence[float]]) -> list[float]:
    """Average a call's milliseconds over several denoisers in each round, weighted by their ``calls`` in an image."""
    shares = [calls[part] / sum(calls.values()) for part in samples]
    return [sum(map(mul, shares, each)) for each in zip(*samples.values(), strict=True)]


def in_image(reference: Sequence[float], samples: Sequence[float], rest: float) -> list[float]:
    """Add to each call its part of an image's time outside the denoiser, ``rest`` times the round's ``reference``."""
    return [rest * unquantized + sample for unquantized, sample in zip(reference, samples, strict=True)]


def log_speedup_over(a: Timed, b: Timed | None, confidence: float) -> Interval:
    """Return the log speed-up of an image by ``a`` over ``b``, or over the unquantized engine if ``b`` is None."""
    if b is not None and a.block == b.block:
        return logarithm(a.of_images(b.images[1], a.images[1], RECIPES, confidence))
    own = logarithm(a.image_speedup(confidence))
    if b is None:
        return own
    value, low, high = logarithm(replace(b, between={}).image_speedup(confidence))  # two occasions, which a's counts
    return sum_of(own, Interval(-value, -high, -low))


def logarithm(ratio: Interval) -> Interval:
    return Interval(*(math.log(end) if end else -math.inf for end in ratio))


def read_timing(directory: Path) -> Mapping[str, Any] | None:
    """Read a sweep's ``timing.json``, None if missing. Raises ValueError if damaged, OSError if unreadable."""
    timing = read_object(directory / TIMING)
    if timing is not None:
        check_shape(timing, TimingRecord, TIMING)
    return timing


def timed_together(timing: Mapping[str, Any] | None) -> dict[str, Timed]:
    """Return the timed rounds of each job that was timed together with other jobs, by job name.

    Raises ValueError where numbers of rounds differ and where a latency is missing or not above zero.
    """
    found: dict[str, Timed] = {}
    for number, block in enumerate(at(timing, "blocks") or []):
        reference, compiled = block["reference_ms"], block.get("compiled_ms")
        engines = [reference, compiled, *(subject["samples_ms"] for subject in block["subjects"])]
        common = {"compiled": compiled, "beside": [each for each in engines if each is not None]}
        common |= of_conditions(block.get("rounds"))
        for subject in block["subjects"]:
            known = Timed(
                f"block {number}", reference, subject["samples_ms"], block["rest"], block["image_ms"], **common
            )
            if known.rest is None or known.image_ms is None:
                raise ValueError("an image without a latency")
            check_rounds(known)
            for job in subject["jobs"]:
                rest = max(0.0, known.rest - (at(subject, "saved", job) or 0.0))
                found[job] = replace(known, quantized_rest=rest, share=at(subject, "shares", job) or 1.0)
    return found


def blocks_by_job(timing: Mapping[str, Any] | None) -> dict[str, Block]:
    """Return the block of ``timing.json`` in which each job was timed, by job name."""
    blocks: list[Block] = parsed(at(timing, "blocks"), list[Block])
    return {job: block for block in blocks for subject in block["subjects"] for job in subject["jobs"]}


def rounds_of(
    block: str, latency: Any, engine: str, part: str, samples: int, batch: int, calls: Mapping[str, float] | None = None
) -> Timed | None:
    """Read the rounds of the denoiser ``part`` in a record's ``latency``; None unless both variants have valid ones.

    ``samples``: number in a call, for ``batch`` images. Several denoisers' calls are averaged, weighted by ``calls``.
    """
    image, calls = at(latency, engine, IMAGE, str(batch)), calls or {part: 1}

    def mean_of(by: str, variant: str) -> list[float]:
        own = {each: [at(latency, by, each, str(samples), name, "samples_ms") or [] for name in (variant, VARIANTS[0])]
               for each in calls}  # fmt: skip
        known = {each: found or full for each, (found, full) in own.items()}
        return mean_call(calls, known) if own[part][0] and len(set(map(len, known.values()))) == 1 else []

    full, quantized = (mean_of(engine, variant) for variant in VARIANTS)
    rest, image_ms = (at(image, VARIANTS[0], name) for name in ("rest", "p50_ms"))
    if not full or not quantized:
        return None
    if rest is None or image_ms is None:
        rest = image_ms = None
    known = Timed(
        block, full, quantized, rest, image_ms, quantized_rest=at(image, VARIANTS[1], "rest"),
        compiled=mean_of(COMPILED, VARIANTS[0]) or None if engine != COMPILED else None,
        share=at(image, VARIANTS[1], "calls_share") or 1.0,
        **of_conditions(at(latency, engine, part, str(samples), "rounds")),
    )  # fmt: skip
    try:
        check_rounds(known)
    except ValueError:
        return None
    return known


def of_conditions(conditions: Any) -> dict[str, Any]:
    """Return ``openings`` and ``between``, arguments of ``Timed``, from the recorded conditions of its rounds."""
    known: Conditions = parsed(conditions, Conditions)  # of a record, of ``timing.json``, or not written yet
    whole = {kind: each for kind, each in known["between"].items() if {"deviation", "degrees"} <= set(each or ())}
    return {"openings": known["openings"] or (), "between": whole}


def check_rounds(timed: Timed) -> None:
    rounds = [timed.full_precision, timed.quantized, *timed.beside, timed.compiled or timed.quantized]
    numbers = [timed.share, 1.0 if timed.image_ms is None else timed.image_ms, *chain(*rounds)]
    if len(set(map(len, rounds))) > 1 or not timed.quantized:
        raise ValueError("numbers of rounds that differ")
    if timed.openings and (min(timed.openings) < 1 or sum(timed.openings) != len(timed.quantized)):
        raise ValueError("openings with other rounds")
    if not all(1 / LARGEST < each < LARGEST for each in numbers) or min(timed.rest or 0, timed.quantized_rest or 0) < 0:
        raise ValueError("a latency that is not above zero")


def busy_because(conditions: Conditions) -> str | None:
    """Describe other processes' use of the machine during rounds, as part of a sentence; None if it was quiet."""
    by_others = busy(conditions["others"], conditions["steal"], conditions["reference_spread"])
    by_probe = slowed(conditions["probes"], conditions["shown"])
    return ", ".join(filter(None, [by_others, by_probe])) or None


def occasions_of(conditions: Conditions) -> str | None:
    """Say whether the intervals of these rounds' speed-ups also cover other hours; None if not recorded."""
    if not (known := conditions["between"][CALL]):
        return at(conditions["between"], "reason")
    return (
        f"of any hour: they count that an engine's speed-up had a standard deviation of "
        f"{known['deviation'] or 0:.1%} between {known['occasions']} earlier timings of this machine"
    )
