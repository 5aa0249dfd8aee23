"""Three versions of the model side by side: the framework, the unquantized and the quantized engine.

Pictures of all from the same seeds, what each part computes from the same inputs, and how long it takes. Where memory
holds all versions they are timed in turn; else one after the other, and a picture's time is put together from its
parts'. The record says which.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_quant.cache import Cache
from sd_quant.config import Infer
from sd_quant.engines.base import Engine
from sd_quant.files import temporary_folder
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.parity import Outputs, WatchedSide
from sd_quant.inference.pipeline import Generated
from sd_quant.metrics.latency import clock_of, measure_in_turn, ratio
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.progress import progress
from sd_quant.stages.infer import batch_of, composed, generate, one_image, part_call, sampling_of

FRAMEWORK, FULL_PRECISION, QUANTIZED = "framework", "full_precision", "quantized"
NOT_QUANTIZED = {"p50_ms": None, "reason": "not quantized"}

Sides = Mapping[str, Mapping[str, Engine]]  # FRAMEWORK, FULL_PRECISION and QUANTIZED to the engine of each part


@dataclass(frozen=True)
class Comparison:
    """Of each side its pictures and its outputs for ``inputs``, those that the framework's parts had in a picture."""

    pictures: dict[str, Generated]
    inputs: dict[str, dict]
    outputs: dict[str, Outputs]


def compare_pictures(
    checkpoint: Checkpoint,
    sides: Sides,
    prompts: list[str],
    infer: Infer,
    origin: Mapping[str, object],
    directory: Path,
    cache: Cache,
) -> Comparison:
    """What is not quantized is the same for every recipe, so it comes from the cache where it is there.

    ``directory`` is the run's, where nothing stays of it. ``origin``: what the pictures depend on besides prompts,
    sampling and engine, which are added here.
    """
    made_from = {
        **origin,
        "contracts": repr(contracts_of(checkpoint)),  # one checkpoint can be read in several ways
        "prompts": prompts,
        "sampling": asdict(sampling_of(infer)),
        "engine": infer.engine,
        "precision": infer.precision,
    }
    with temporary_folder(directory) as temporary:
        path = Path(temporary) / "pictures.safetensors"
        cache.provide(
            "pictures", made_from, path.parent,
            lambda folder: save_file(pack(compare_unquantized(checkpoint, sides, prompts, infer)), folder / path.name),
        )  # fmt: skip
        comparison = unpack(load_file(path))
    side, denoiser = sides[QUANTIZED], checkpoint.family.DENOISER  # the other parts are the same engines in both
    comparison.pictures[QUANTIZED] = generate(pipeline_of(checkpoint, side), prompts, infer, "quantized")
    comparison.outputs[QUANTIZED] = {denoiser: side[denoiser](**comparison.inputs[denoiser])}
    return comparison


def compare_unquantized(checkpoint: Checkpoint, sides: Sides, prompts: list[str], infer: Infer) -> Comparison:
    framework = WatchedSide(sides[FRAMEWORK], {checkpoint.family.DENOISER: infer.steps // 2})
    pictures: dict[str, Generated] = {}
    outputs: dict[str, Outputs] = {}
    for name, side in {FRAMEWORK: framework, FULL_PRECISION: sides[FULL_PRECISION]}.items():
        pictures[name] = generate(pipeline_of(checkpoint, side), prompts, infer, name.replace("_", " "))
        outputs[name] = {part: sides[name][part](**framework.seen[part]) for part in reversed(checkpoint.parts())}
    return Comparison(pictures, framework.seen, outputs)


def pack(comparison: Comparison) -> dict[str, Tensor]:
    """As one level of tensors, whose names are paths."""
    found: dict[str, Tensor] = {}
    for side, generated in comparison.pictures.items():
        found[f"pictures/{side}/images"] = torch.from_numpy(generated.images)
        found[f"pictures/{side}/latents"] = generated.latents
    for part, inputs in comparison.inputs.items():
        found |= {f"inputs/{part}/{name}": tensor for name, tensor in inputs.items()}
    for side, parts in comparison.outputs.items():
        found |= {f"outputs/{side}/{part}/{name}": tensor for part in parts for name, tensor in parts[part].items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def unpack(tensors: Mapping[str, Tensor]) -> Comparison:
    tree: dict = {}
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        reduce(lambda node, folder: node.setdefault(folder, {}), folders, tree)[name] = tensor
    pictures = {side: Generated(found["images"].numpy(), found["latents"]) for side, found in tree["pictures"].items()}
    return Comparison(pictures, tree["inputs"], tree["outputs"])


def compare_latency(
    checkpoint: Checkpoint,
    sides: Sides,
    prompts: list[str],
    infer: Infer,
    together: bool,
    simulated: str | None = None,
) -> dict:
    """The record's ``latency``. ``together``: whether all sides may be open at once; ``simulated``: why the quantized
    one is no engine, so that nothing of it is timed."""
    missing = NOT_QUANTIZED if simulated is None else {"p50_ms": None, "reason": f"simulated: {simulated}"}
    if simulated is not None:
        sides = {name: side for name, side in sides.items() if name != QUANTIZED}
    warmup, repeats, contracts = infer.num_warmup_runs, infer.num_timed_runs, contracts_of(checkpoint)
    denoiser = checkpoint.family.DENOISER
    turns = [list(sides)] if together else [[name] for name in sides]
    framework: dict = {}
    engine: dict = {}
    medians: dict[str, dict[str, float]] = {name: {} for name in sides}
    with progress(len(contracts) + 1, "latency") as advance:
        for part in contracts:
            times: dict = {}
            for turn in turns:
                distinct = [name for name in turn if name != QUANTIZED or part == denoiser]
                engines = {name: sides[name][part] for name in distinct}
                samples = batch_of(checkpoint, part, infer)
                calls = {name: part_call(engine, contracts[part], samples, infer) for name, engine in engines.items()}
                clocks = {name: clock_of(engine.device) for name, engine in engines.items()}
                times |= measure_in_turn(calls, warmup, repeats, clocks) if calls else {}
            for name in sides:
                medians[name][part] = times.get(name, times[FULL_PRECISION])["p50_ms"]
            batch = str(batch_of(checkpoint, part, infer))
            lacking = missing if part == denoiser else NOT_QUANTIZED
            framework[part], engine[part] = {batch: {FULL_PRECISION: times[FRAMEWORK]}}, {batch: both(times, lacking)}
            advance()
        if together:
            calls = {name: one_image(pipeline_of(checkpoint, side), prompts, infer) for name, side in sides.items()}
            times = measure_in_turn(calls, 1, max(3, repeats // 2))
        else:
            times = {name: composed(parts, infer.steps, denoiser) for name, parts in medians.items()}
        batch = str(infer.batch_size)
        framework["image"], engine["image"] = {batch: {FULL_PRECISION: times[FRAMEWORK]}}, {batch: both(times, missing)}
        advance()
    return {"torch": framework, infer.engine: engine}


def both(times: dict, missing: dict) -> dict:
    """``missing`` stands for the quantized side's figures where there are none."""
    full, quantized = times[FULL_PRECISION], times.get(QUANTIZED, missing)
    if quantized is missing:
        return {FULL_PRECISION: full, QUANTIZED: quantized}
    speedup = ratio(full, quantized) if "samples_ms" in full else full["p50_ms"] / quantized["p50_ms"]
    return {FULL_PRECISION: full, QUANTIZED: quantized, "speedup": speedup}
