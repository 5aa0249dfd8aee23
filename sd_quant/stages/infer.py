"""Pictures and latency from engines."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from sd_quant.checkpoints.nemo import Checkpoint, open_nemo
from sd_quant.config import REPOSITORY, Infer, InferJob, anchored, part_paths
from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.files import write_json
from sd_quant.inference.pipeline import Generated, Pipeline, Sampling
from sd_quant.metrics.latency import measure, measure_in_turn, ratio
from sd_quant.models.loading import contracts_of, load_model, pipeline_of
from sd_quant.models.parts import Contract
from sd_quant.progress import progress
from sd_quant.report.pictures import save_images
from sd_quant.report.provenance import provenance

LOG = logging.getLogger(__name__)


def infer(job: InferJob, directory: Path) -> None:
    out = anchored(job.infer.out_path) if job.infer.out_path else directory
    paths = {"checkpoint": anchored(job.model.path)}
    checkpoint = open_nemo(paths["checkpoint"])
    if job.infer.engine == "torch":
        engines = load_model(checkpoint).torch_engines()
    else:
        paths |= part_paths(job, "plan" if job.infer.engine.startswith("tensorrt") else "onnx")
        options = {"allow_untrusted_plan": True} if job.infer.allow_untrusted_plan else {}
        engines = {
            name: load_engine(job.infer.engine, path, **options) for name, path in paths.items() if name != "checkpoint"
        }
    record = provenance(paths, [])
    pipeline = pipeline_of(checkpoint, engines)
    prompts = job.infer.prompt_list()
    generated = generate(pipeline, prompts, job.infer, job.infer.engine)
    save_images(generated.images, out / "images", image_names(prompts))
    latency = {
        part: {str(batch): measure(call, job.infer.num_warmup_runs, job.infer.num_timed_runs)}
        for part, (batch, call) in part_calls(engines, contracts_of(checkpoint), job.infer).items()
    }
    image = measure(one_image(pipeline, prompts, job.infer), 1, min(3, job.infer.num_timed_runs))
    latency["image"] = {str(job.infer.batch_size): image}
    write_json(out / "metrics.json", {"schema_version": 1, "status": "done", "latency": {job.infer.engine: latency},
                                      "prompts": prompts, "provenance": record})  # fmt: skip
    for part, by_batch in latency.items():
        for batch, times in by_batch.items():
            print(f"{part:8} batch {batch}: {times['p50_ms']:9.2f} ms")
    print(f"pictures: {out / 'images'}")


def image_names(prompts: list[str]) -> list[str]:
    return [f"{index:04}" for index in range(len(prompts))]


def sampling_of(infer: Infer) -> Sampling:
    return Sampling(infer.steps, infer.scale, infer.height, infer.width, infer.batch_size, infer.seed)


def generate(pipeline: Pipeline, prompts: list[str], infer: Infer, description: str) -> Generated:
    batches = -(-len(prompts) // infer.batch_size)
    with progress(batches * infer.steps, f"pictures, {description}") as advance:
        return pipeline(prompts, sampling_of(infer), on_step=lambda step: advance())


def example_inputs(contract: Contract, batch: int, infer: Infer) -> dict[str, torch.Tensor]:
    """Random inputs of the size that the pipeline uses; latency does not depend on their values."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, shape in contract.shapes(batch=batch, height=infer.height // 8, width=infer.width // 8).items():
        dtype = contract.dtypes[name]
        drawn = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape)
        inputs[name] = drawn.to(dtype)
    return inputs


def part_calls(engines: Mapping[str, Engine], contracts: Mapping[str, Contract], infer: Infer) -> dict:
    """Part to (batch size, call): one call each, the UNet on the doubled batch of guidance."""
    calls = {}
    for part, engine in engines.items():
        batch = infer.batch_size * (2 if part == "unet_xl" else 1)
        inputs = example_inputs(contracts[part], batch, infer)
        calls[part] = (batch, lambda engine=engine, inputs=inputs: engine(**inputs))
    return calls


def one_image(pipeline: Pipeline, prompts: list[str], infer: Infer):
    batch = (prompts * infer.batch_size)[: infer.batch_size]
    return lambda: pipeline(batch, sampling_of(infer))


def compare_latency(
    checkpoint: Checkpoint,
    framework: Mapping[str, Engine],
    full_precision: Mapping[str, Engine],
    quantized: Mapping[str, Engine],
    prompts: list[str],
    infer: Infer,
) -> dict:
    """The record's ``latency``: framework, unquantized engine and quantized engine, measured in turn in one run."""
    contracts, warmup, repeats = contracts_of(checkpoint), infer.num_warmup_runs, infer.num_timed_runs
    sides = {"framework": framework, "full_precision": full_precision, "quantized": quantized}
    calls = {side: part_calls(engines, contracts, infer) for side, engines in sides.items()}
    torch_latency: dict = {}
    engine_latency: dict = {}
    pictures = {side: one_image(pipeline_of(checkpoint, engines), prompts, infer) for side, engines in sides.items()}
    with progress(len(contracts) + 1, "latency") as advance:
        for part in contracts:
            batch = str(calls["framework"][part][0])
            distinct = [side for side in sides if side != "quantized" or quantized[part] is not full_precision[part]]
            times = measure_in_turn({side: calls[side][part][1] for side in distinct}, warmup, repeats)
            torch_latency[part] = {batch: {"full_precision": times["framework"]}}
            engine_latency[part] = {batch: both(times)}
            advance()
        times = measure_in_turn(pictures, 1, max(3, repeats // 3))
        torch_latency["image"] = {str(infer.batch_size): {"full_precision": times["framework"]}}
        engine_latency["image"] = {str(infer.batch_size): both(times)}
        advance()
    return {"torch": torch_latency, infer.engine: engine_latency}


def both(times: dict) -> dict:
    if "quantized" not in times:
        return {"full_precision": times["full_precision"], "quantized": {"p50_ms": None, "reason": "not quantized"}}
    speedup = ratio(times["full_precision"], times["quantized"])
    return {"full_precision": times["full_precision"], "quantized": times["quantized"], "speedup": speedup}


def shown(path: Path) -> str:
    """A path as a person wants to read it."""
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
