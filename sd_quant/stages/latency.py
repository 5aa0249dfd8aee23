"""How long the three variants of the model take, part by part and from prompt to image.

Where memory holds all variants they are timed in turn. Where it does not they are timed one after the other, and the
time of an image is added up from those of its parts; the record says so.
"""

from sd_quant.config import Infer
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.timed_calls import composed_latency, image_call, part_call, samples_per_call
from sd_quant.metrics.latency import clock_of, measure_in_turn, ratio
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.progress import progress
from sd_quant.report.record import FRAMEWORK as TORCH
from sd_quant.report.record import IMAGE
from sd_quant.stages.compare import Engines
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED

NOT_QUANTIZED = {"p50_ms": None, "reason": "not quantized"}


def compare_latency(
    checkpoint: Checkpoint,
    engines: Engines,
    prompts: list[str],
    infer: Infer,
    together: bool,
    simulated: str | None = None,
) -> dict:
    """The record's ``latency``.

    ``together`` says whether all variants may be open at once, ``simulated`` why the quantized variant is no engine and
    so is not timed; None where it is one.
    """
    untimed = NOT_QUANTIZED if simulated is None else {"p50_ms": None, "reason": f"simulated: {simulated}"}
    if simulated is not None:
        engines = {name: variant for name, variant in engines.items() if name != QUANTIZED}
    warmup, repeats, contracts = infer.num_warmup_runs, infer.num_timed_runs, contracts_of(checkpoint)
    sampling, denoiser = sampling_of(infer), checkpoint.family.DENOISER
    turns = [list(engines)] if together else [[name] for name in engines]
    framework: dict = {}
    runtime: dict = {}
    medians: dict[str, dict[str, float]] = {name: {} for name in engines}
    with progress(len(contracts) + 1, "latency") as advance:
        for part, contract in contracts.items():
            times: dict = {}
            samples = samples_per_call(checkpoint, part, sampling)
            for turn in turns:
                distinct = [name for name in turn if name != QUANTIZED or part == denoiser]
                parts = {name: engines[name][part] for name in distinct}
                calls = {name: part_call(engine, contract, samples, sampling) for name, engine in parts.items()}
                clocks = {name: clock_of(engine.device) for name, engine in parts.items()}
                times |= measure_in_turn(calls, warmup, repeats, clocks) if calls else {}
            for name in engines:
                medians[name][part] = times.get(name, times[FULL_PRECISION])["p50_ms"]
            framework[part] = {str(samples): {FULL_PRECISION: times[FRAMEWORK]}}
            runtime[part] = {str(samples): with_speedup(times, untimed if part == denoiser else NOT_QUANTIZED)}
            advance()
        if together:
            pipelines = {name: pipeline_of(checkpoint, variant) for name, variant in engines.items()}
            calls = {name: image_call(pipeline, prompts, sampling) for name, pipeline in pipelines.items()}
            times = measure_in_turn(calls, 1, max(3, repeats // 2))
        else:
            times = {name: composed_latency(parts, infer.steps, denoiser) for name, parts in medians.items()}
        batch = str(infer.batch_size)
        framework[IMAGE] = {batch: {FULL_PRECISION: times[FRAMEWORK]}}
        runtime[IMAGE] = {batch: with_speedup(times, untimed)}
        advance()
    return {TORCH: framework, infer.engine: runtime}


def with_speedup(times: dict, untimed: dict) -> dict:
    """The times of both engines and the speed-up; ``untimed`` is the quantized one's entry where it has no time."""
    full, quantized = times[FULL_PRECISION], times.get(QUANTIZED, untimed)
    if quantized is untimed:
        return {FULL_PRECISION: full, QUANTIZED: quantized}
    speedup = ratio(full, quantized) if "samples_ms" in full else full["p50_ms"] / quantized["p50_ms"]
    return {FULL_PRECISION: full, QUANTIZED: quantized, "speedup": speedup}
