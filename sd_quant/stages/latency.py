"""Latency of torch, the unquantized and the quantized engine: of each part, and from prompt to image.

If memory holds both engines, their calls alternate in the same rounds, and they make images in turn; the record says
if the speed-up of images contradicts that of the rounds. Otherwise they are timed one after the other, and the time of
an image is the sum of its parts' times. Torch is timed in separate rounds: its threads spin for a while after each call
and take CPU time from the next engine, which makes the ratio of the engines two to three times as noisy. The compiled
baseline is timed in the engines' rounds nevertheless, because it is compared with them.
"""

import logging
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from sd_quant.config import Infer, Timing
from sd_quant.engines import COMPILED
from sd_quant.engines.base import Engine
from sd_quant.inference.schedules import COMPUTED, engine_of_letter
from sd_quant.inference.timed_calls import (
    WARMUP_IMAGES,
    ImageTimes,
    calls_beside,
    calls_in_image,
    image_of_parts,
    image_times,
    part_call,
    samples_per_call,
)
from sd_quant.metrics.intervals import ratio_interval
from sd_quant.metrics.latency import (
    Reopen,
    Rounds,
    Stopping,
    clock_of,
    in_a_row,
    judged,
    measure_together,
    spread,
    statistics_of,
    wall_clock,
)
from sd_quant.metrics.machine_probe import probe
from sd_quant.models.checkpoint import Checkpoint, contracts_of, part_parameters
from sd_quant.process import available_memory_bytes
from sd_quant.progress import progress
from sd_quant.report.record import IMAGE, TORCH, Conditions
from sd_quant.report.timing import in_image, mean_call
from sd_quant.stages.generate import recipe_sampling, sampling_of
from sd_quant.stages.shared import CallsOfAnImage
from sd_quant.stages.variants import COMPILED_FRAMEWORK, FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants

LOG = logging.getLogger(__name__)
COMPOSED = "the unquantized engine's image with the quantized denoiser's calls in it"
COMPOSED_COMPILED = "the unquantized engine's image with the compiled denoiser's calls in it"
FROM_PARTS = "from single calls, as memory does not hold everything at once"
USED = ("others", "steal")  # shares of the processors that other processes and other virtual machines used
BYTES_OPENED = 4  # bytes a parameter, at most, that reopening an engine takes beside the open engine
IMPLAUSIBLE = 4  # ratio of the times in an image and in rounds, either way, above which one was disturbed
SHORT = 1000  # milliseconds by which a few disturbed calls may differ
TOO_FEW = "too few rounds for an interval; raise infer.num_timed_runs or timing.budget_s"


def compare_latency(variants: Variants, infer: Infer, timing: Timing, calls: CallsOfAnImage | None = None) -> dict:
    """Measure the record's ``latency``: of parts and images, by torch, both engines and any compiled baseline.

    ``calls``: the denoiser's calls in a quantized image. Several denoisers are timed in the same rounds; each counts
    as often as an image calls it.
    """
    checkpoint, together = variants.loaded.checkpoint, variants.together
    contracts, sampling, simulated = contracts_of(checkpoint), sampling_of(infer), variants.simulated
    calls_of = calls_in_image(checkpoint, sampling, {} if calls is None else calls.by_denoiser)
    timed = variants.assignments.keys() - ({*calls_of} if simulated is not None else set())  # of the quantized variant
    groups = [[*calls_of], *([part] for part in contracts if part not in calls_of)]  # parts in the same rounds
    rounds, times = dict[str, list[Rounds]](), dict[str, dict[str, dict]]()  # by part, and variant
    with progress(len(contracts) + 1, "latency") as advance:
        for group in groups if together else [[part] for part in contracts]:
            stopping = Stopping(infer.num_timed_runs, timing.half_width, timing.budget_s if group[0] in calls_of else 0)
            made = rounds_of_group(variants, group, timed, infer, stopping, calls_of)
            for part in group:
                rounds[part] = made
                times[part] = {
                    name: judged(each.statistics(key)) for each in made for key in each.samples
                    for name, _, own in [key.partition("/")] if own == part
                }  # fmt: skip
                advance()
        medians = {
            name: {part: statistics.median(each[name]["samples_ms"]) for part, each in times.items() if name in each}
            for name in (FRAMEWORK, FULL_PRECISION, QUANTIZED)
        }
        added_up = {name: image_of_parts(checkpoint, medians[name], calls_of) for name in (FRAMEWORK, FULL_PRECISION)}
        images = whole_images(variants, infer, timing) if together else added_up
        advance()

    def entry_of(part: str) -> dict:
        """Return the engines' times of a part, and its speed-up by quantization."""
        own = times[part]
        if part not in timed:
            return {FULL_PRECISION: own[FULL_PRECISION], QUANTIZED: untimed if part in variants.assignments else none}
        both = {name: own[name] for name in (FULL_PRECISION, QUANTIZED)}
        before, after = (each["samples_ms"] for each in both.values())
        found = compared(before, after, rounds[part][0].openings)
        return both | found | {"rounds": conditions(rounds[part], f"{FULL_PRECISION}/{part}")}

    def mean_of(variant: str) -> list[float]:
        """Return, by round, the mean time of an image's denoiser calls in ms; unquantized if a variant is missing."""
        own = {part: times[part].get(variant, times[part][FULL_PRECISION]) for part in calls_of}
        return mean_call(calls_of, {part: each["samples_ms"] for part, each in own.items()})

    def rounds_of(name: str) -> dict:
        made = images[name].rounds
        return {} if made is None else {"rounds": conditions([made], name)}

    none = {"p50_ms": None, "reason": "not quantized"}
    untimed = none if simulated is None else {"p50_ms": None, "reason": f"simulated: {simulated}"}
    batch, samples = str(infer.batch_size), {part: str(samples_per_call(checkpoint, part, sampling)) for part in times}
    framework = {part: {samples[part]: {FULL_PRECISION: own[FRAMEWORK]}} for part, own in times.items()}
    runtime = {part: {samples[part]: entry_of(part)} for part in times}
    baseline, full = (image_entry(images[name], added_up[name]) for name in (FRAMEWORK, FULL_PRECISION))
    framework[IMAGE] = {batch: {FULL_PRECISION: baseline, **rounds_of(FRAMEWORK)}}
    runtime[IMAGE] = {batch: {FULL_PRECISION: full, QUANTIZED: untimed, **rounds_of(FULL_PRECISION)}}
    rest, reference = images[FULL_PRECISION].rest, mean_of(FULL_PRECISION)
    openings = rounds[checkpoint.family.DENOISER][0].openings

    def over_full_precision(samples: Sequence[float], rest_of: float) -> dict:
        return compared(in_image(reference, reference, rest), in_image(reference, samples, rest_of), openings)

    def composed(speedup: float, how: str) -> dict:
        """Divide the unquantized image's time, if known, by a speed-up; ``how``: description for the record."""
        if full["p50_ms"] is None:
            return {"p50_ms": None, "reason": full["reason"]}
        return {"p50_ms": full["p50_ms"] / speedup, "composed": how if together else FROM_PARTS}

    if simulated is None:
        saved = sum(  # milliseconds of an image saved by quantized parts other than denoisers
            calls_beside(checkpoint, part, calls_of) * (medians[FULL_PRECISION][part] - medians[QUANTIZED][part])
            for part in times if part in timed and part not in calls_of
        )  # fmt: skip
        less = saved / sum(count * medians[FULL_PRECISION][part] for part, count in calls_of.items())
        quantized_rest, share, shares = max(0.0, rest - less), 1.0, {}
        if calls is not None and infer.pulls_levers:
            share = calls.share(costs_of(variants, infer, calls), sampling.steps_taken)
            shares = {"calls_share": share}
        found = over_full_precision([share * each for each in mean_of(QUANTIZED)], quantized_rest)
        quantized = composed(found["speedup"], COMPOSED) | ({"rest": quantized_rest} if saved else {}) | shares
        if full["p50_ms"] is None:  # then the time beside the denoiser's calls is unknown too
            found = {"speedup": {"value": None, "reason": full["reason"]}}
        elif together:
            found["whole_images"] = of_whole_images(found, images[FULL_PRECISION].totals, images[QUANTIZED].totals)
        runtime[IMAGE][batch] |= {QUANTIZED: quantized, **found}
    compiled = {
        part: {samples[part]: {FULL_PRECISION: own[COMPILED_FRAMEWORK]}}
        for part, own in times.items()
        if COMPILED_FRAMEWORK in own
    }
    if not compiled:
        return {TORCH: framework, infer.engine: runtime}
    speedup = over_full_precision(mean_of(COMPILED_FRAMEWORK), rest)["speedup"]
    compiled[IMAGE] = {batch: {FULL_PRECISION: composed(speedup, COMPOSED_COMPILED)}}
    return {TORCH: framework, COMPILED: compiled, infer.engine: runtime}


def whole_images(variants: Variants, infer: Infer, timing: Timing) -> dict[str, ImageTimes]:
    """Time images by both engines in turn, then by torch, with half the rounds and a quarter of the time budget."""
    stopping = Stopping(max(3, infer.num_timed_runs // 2), timing.half_width, timing.budget_s / 4)
    samplings = dict.fromkeys(variants.engines, sampling_of(infer)) | {QUANTIZED: recipe_sampling(infer)}
    found = dict[str, ImageTimes]()
    for turn in ([FULL_PRECISION, *([QUANTIZED] if variants.simulated is None else [])], [FRAMEWORK]):
        engines = {name: variants.engines[name] for name in turn}
        found |= image_times(variants.loaded.checkpoint, engines, infer.prompt_list(), samplings, stopping)
    return found


def costs_of(variants: Variants, infer: Infer, calls: CallsOfAnImage) -> dict[str, float]:
    """Return times of denoiser calls relative to a quantized one: by letter of precise steps."""
    checkpoint, variant, sampling = variants.loaded.checkpoint, variants.engines[QUANTIZED], sampling_of(infer)
    part = checkpoint.family.DENOISER
    contract, samples = contracts_of(checkpoint)[part], samples_per_call(checkpoint, part, sampling)
    timed = [COMPUTED, *calls.precise]
    found = dict[str, list[float]]()
    for turn in [timed] if variants.together else [[name] for name in timed]:
        engines = {name: variant[engine_of_letter(part, name)] for name in turn}
        found |= measure_together(
            {name: part_call(engine, contract, samples, sampling) for name, engine in engines.items()},
            infer.num_warmup_runs,
            Stopping(infer.num_timed_runs, 1, 0),
            {name: in_a_row(clock_of(engine.device), sampling.steps_taken) for name, engine in engines.items()},
        ).samples
    return {name: statistics.median(found[name]) / statistics.median(found[COMPUTED]) for name in timed}


def rounds_of_group(
    variants: Variants, group: Sequence[str], timed: Collection[str], infer: Infer, stopping: Stopping,
    calls: Mapping[str, int],
) -> list[Rounds]:  # fmt: skip
    """Time a ``group`` of parts in both engines (quantized: only the ``timed`` parts), then in torch, separately."""
    engines = variants.engines
    by_variant = {FULL_PRECISION: group, QUANTIZED: timed, COMPILED_FRAMEWORK: engines.get(COMPILED_FRAMEWORK, ())}
    turns = [[(name, part) for name, parts in by_variant.items() for part in group if part in parts]]
    turns += [[(FRAMEWORK, part) for part in group]]
    turns = turns if variants.together else [[each] for turn in turns for each in turn]
    return [
        part_rounds(
            variants.loaded.checkpoint, {f"{name}/{part}": engines[name][part] for name, part in turn}, infer,
            stopping, calls,
        )
        for turn in turns  # memory may hold only one turn's engines
    ]  # fmt: skip


def part_rounds(
    checkpoint: Checkpoint, engines: Mapping[str, Engine], infer: Infer, stopping: Stopping, calls: Mapping[str, int]
) -> Rounds:
    """Time rounds in which each of the ``engines`` (keys: ``<variant>/<part>``, the reference first) is called.

    ``calls``: in an image, by part. With a time budget, the machine's own rates are measured too, except for torch.
    """
    sampling, contracts = sampling_of(infer), contracts_of(checkpoint)
    parts = {name: name.rpartition("/")[2] for name in engines}
    first, device = next(iter(engines.items()))[0], next(iter(engines.values())).device
    probed = stopping.budget_s and not first.startswith(f"{FRAMEWORK}/")
    # a part timed alone is called in a row anyway
    in_turn = len(engines) > len(set(parts.values()))
    rows = {name: calls.get(part, 1) if in_turn else 1 for name, part in parts.items()}
    return measure_together(
        {
            name: part_call(engine, contracts[part], samples_per_call(checkpoint, part, sampling), sampling)
            for (name, part), engine in zip(parts.items(), engines.values(), strict=True)
        },
        infer.num_warmup_runs,
        stopping,
        {name: in_a_row(clock_of(engine.device), rows[name]) for name, engine in engines.items()},
        reopener(checkpoint, parts, engines) if max(rows.values()) > 1 else None,
        partial(probe, device) if probed else None,
    )


def reopener(checkpoint: Checkpoint, parts: Mapping[str, str], engines: Mapping[str, Engine]) -> Reopen:
    """Return a function that reopens ``engines`` in a given order, and returns False if memory is short or none can."""

    @cache
    def room() -> int:
        parameters = part_parameters(checkpoint)
        return BYTES_OPENED * sum(parameters[part] for part in parts.values())

    def reopen(names: Sequence[str]) -> bool:
        if available_memory_bytes() < room():
            LOG.info("memory has no room to open %d engines again, so they are timed as they were opened", len(names))
            return False
        return any([engines[name].reopen() for name in names])

    return reopen


def denoiser_rounds(checkpoint: Checkpoint, engines: Mapping[str, Engine], infer: Infer, timing: Timing) -> Rounds:
    """Time rounds of the denoiser's call until the time ratios to the first engine are as sure as ``timing`` asks."""
    stopping, part = Stopping(infer.num_timed_runs, timing.half_width, timing.budget_s), checkpoint.family.DENOISER
    named, calls = {f"{name}/{part}": engine for name, engine in engines.items()}, sampling_of(infer).steps_taken
    rounds = part_rounds(checkpoint, named, infer, stopping, {part: calls})
    return replace(rounds, samples=dict(zip(engines, rounds.samples.values(), strict=True)))


def conditions(rounds: Sequence[Rounds], reference: str) -> Conditions:
    """Return the timing conditions: whether engines shared rounds, why the rounds ended, CPU use of other processes."""
    shares = {name: [each.machine[name] for each in rounds if each.machine[name] is not None] for name in USED}
    return Conditions(
        together=len(rounds[0].samples) > 1,
        stopped=rounds[0].stopped,
        others=max(shares["others"], default=None),
        steal=max(shares["steal"], default=None),
        reference_spread=spread(rounds[0].samples[reference]),
        openings=rounds[0].openings,
        probes=[reading for each in rounds for reading in each.probes],  # type: ignore[misc]
    )


def of_whole_images(found: Mapping, full: Sequence[float], quantized: Sequence[float]) -> dict:
    """Return the speed-up of whole images, from ms, and whether its interval overlaps that of ``found``, from calls."""
    whole = compared(full, quantized)
    ends = [each["speedup_interval"] for each in (found, whole)]
    agree = any(isinstance(each, dict) for each in ends) or max(low for low, _ in ends) <= min(high for _, high in ends)
    if not agree:
        LOG.warning(
            "whole images are %.2fx as fast, by the calls of the denoiser they should be %.2fx: something disturbs one "
            "of the two", whole["speedup"], found["speedup"],
        )  # fmt: skip
    return whole | {"agree": agree}


def compared(full: Sequence[float], quantized: Sequence[float], openings: Sequence[int] = ()) -> dict:
    """Return the record's speed-up and its interval, from milliseconds of paired rounds."""
    found = ratio_interval(full, quantized, openings)
    ends = [found.low, found.high] if math.isfinite(found.high) else {"value": None, "reason": TOO_FEW}
    return {"speedup": found.value, "speedup_interval": ends}


def image_entry(image: ImageTimes, added_up: ImageTimes) -> dict:
    """Return the record's image latency; no figure if its denoiser time contradicts single calls (``added_up``)."""
    if image.rounds is None:
        return {"p50_ms": image.totals[0], "rest": image.rest, "composed": FROM_PARTS}
    found = statistics_of(image.totals, WARMUP_IMAGES, wall_clock.__name__) | {"rest": image.rest}
    in_images, in_rounds = (statistics.median(each.totals) / (1 + each.rest) for each in (image, added_up))
    plausible = abs(in_images - in_rounds) < SHORT or 1 / IMPLAUSIBLE <= in_images / in_rounds <= IMPLAUSIBLE
    reason = (
        f"the denoiser took {in_images:,.0f} ms in it, and {in_rounds:,.0f} ms by calls of its own; time again when "
        "the machine is quiet"
    )
    return judged(found, None if plausible else reason)
