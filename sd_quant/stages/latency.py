"""How long the three versions of the model take, part by part and from prompt to image.

Where memory holds all versions they are timed in turn; else one after the other, and an image's time is put together
from its parts'. The record says which.
"""

from sd_quant.config import Infer
from sd_quant.inference.loading import pipeline_of
from sd_quant.metrics.latency import clock_of, measure_in_turn, ratio
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.progress import progress
from sd_quant.report.record import FRAMEWORK as TORCH
from sd_quant.report.record import IMAGE
from sd_quant.stages.compare import Engines
from sd_quant.stages.infer import batch_of, composed, one_image, part_call
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

    ``together``: whether all variants may be open at once. ``simulated``: why the quantized one is no engine, so that
    nothing of it is timed.
    """
    missing = NOT_QUANTIZED if simulated is None else {"p50_ms": None, "reason": f"simulated: {simulated}"}
    if simulated is not None:
        engines = {name: variant for name, variant in engines.items() if name != QUANTIZED}
    warmup, repeats, contracts = infer.num_warmup_runs, infer.num_timed_runs, contracts_of(checkpoint)
    denoiser = checkpoint.family.DENOISER
    turns = [list(engines)] if together else [[name] for name in engines]
    framework: dict = {}
    runtime: dict = {}
    medians: dict[str, dict[str, float]] = {name: {} for name in engines}
    with progress(len(contracts) + 1, "latency") as advance:
        for part in contracts:
            times: dict = {}
            for turn in turns:
                distinct = [name for name in turn if name != QUANTIZED or part == denoiser]
                parts = {name: engines[name][part] for name in distinct}
                samples = batch_of(checkpoint, part, infer)
                calls = {name: part_call(engine, contracts[part], samples, infer) for name, engine in parts.items()}
                clocks = {name: clock_of(engine.device) for name, engine in parts.items()}
                times |= measure_in_turn(calls, warmup, repeats, clocks) if calls else {}
            for name in engines:
                medians[name][part] = times.get(name, times[FULL_PRECISION])["p50_ms"]
            batch = str(batch_of(checkpoint, part, infer))
            lacking = missing if part == denoiser else NOT_QUANTIZED
            framework[part], runtime[part] = {batch: {FULL_PRECISION: times[FRAMEWORK]}}, {batch: both(times, lacking)}
            advance()
        if together:
            pipelines = {name: pipeline_of(checkpoint, variant) for name, variant in engines.items()}
            calls = {name: one_image(pipeline, prompts, infer) for name, pipeline in pipelines.items()}
            times = measure_in_turn(calls, 1, max(3, repeats // 2))
        else:
            times = {name: composed(parts, infer.steps, denoiser) for name, parts in medians.items()}
        batch = str(infer.batch_size)
        framework[IMAGE], runtime[IMAGE] = {batch: {FULL_PRECISION: times[FRAMEWORK]}}, {batch: both(times, missing)}
        advance()
    return {TORCH: framework, infer.engine: runtime}


def both(times: dict, missing: dict) -> dict:
    """``missing`` stands for the quantized side's figures where there are none."""
    full, quantized = times[FULL_PRECISION], times.get(QUANTIZED, missing)
    if quantized is missing:
        return {FULL_PRECISION: full, QUANTIZED: quantized}
    speedup = ratio(full, quantized) if "samples_ms" in full else full["p50_ms"] / quantized["p50_ms"]
    return {FULL_PRECISION: full, QUANTIZED: quantized, "speedup": speedup}
