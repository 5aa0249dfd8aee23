"""Pictures and latency from engines."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from sd_quant.config import REPOSITORY, Infer, InferJob, anchored, part_paths
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine, cast_inputs, onnx_files
from sd_quant.engines.pool import Pool, Variant
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.memory import fits, gpu_memory_of_variant, memory_of_part, memory_of_variant
from sd_quant.inference.pipeline import Generated, Pipeline, Sampling
from sd_quant.metrics.latency import clock_of, measure
from sd_quant.metrics.memory import peak_cuda_memory_bytes, peak_memory_bytes, used
from sd_quant.models.checkpoint import Checkpoint, contracts_of, part_parameters, samples_per_image
from sd_quant.models.parts import Contract, axes
from sd_quant.progress import progress
from sd_quant.report.images import save_images
from sd_quant.report.provenance import provenance
from sd_quant.report.record import DONE, IMAGE, SCHEMA_VERSION, InferRecord, explained, write_record
from sd_quant.stages.load import open_model
from sd_quant.stages.opening import check_cuda_graph, open_file, open_torch_engine
from sd_quant.stages.resources import check_machine, workload_of

LOG = logging.getLogger(__name__)


def infer(job: InferJob, directory: Path) -> None:
    out = anchored(job.infer.out_path) if job.infer.out_path else directory
    paths = {"checkpoint": anchored(job.model.path)}
    checkpoint = open_model(job.model)
    parts = list(checkpoint.parts())
    check_cuda_graph(job.infer)
    kind = RUNTIMES[job.infer.engine].file
    if kind is None:
        pool = Pool(partial(open_torch_engine, checkpoint, job.infer))
    else:
        files = part_paths(job, kind)
        options = {"allow_untrusted_plan": True} if job.infer.allow_untrusted_plan else {}
        pool = Pool(lambda part: open_file(files[part], job.infer, **options))
        paths |= files
        for path in files.values():
            if path.suffix == ".onnx":
                onnx_files(path)
    parameters, work = part_parameters(checkpoint), workload_of(job.infer)
    check_machine({"the largest part": memory_of_part(parameters, work)}, {}, out)
    facts = provenance(paths, [])
    memory, gpu = memory_of_variant(parameters, work), gpu_memory_of_variant(parameters, work)
    together = fits(memory, "all parts of the model", gpu)
    pool.most = None if together else 1
    engines = Variant(pool, {part: part for part in parts})
    if together:  # a broken file is found before the others have worked
        list(engines.values())
    pipeline, contracts = pipeline_of(checkpoint, engines), contracts_of(checkpoint)
    prompts = job.infer.prompt_list()
    generated = generate(pipeline, prompts, job.infer, job.infer.engine)
    save_images(generated.images, out / "images", image_names(prompts))
    samples = {part: batch_of(checkpoint, part, job.infer) for part in parts}
    latency: dict = {
        part: {str(samples[part]): part_latency(engines[part], contracts[part], samples[part], job.infer)}
        for part in parts
    }
    if together:
        image = measure(one_image(pipeline, prompts, job.infer), 1, min(3, job.infer.num_timed_runs))
    else:
        medians = {part: latency[part][str(samples[part])]["p50_ms"] for part in parts}
        image = composed(medians, job.infer.steps, checkpoint.family.DENOISER)
    latency[IMAGE] = {str(job.infer.batch_size): image}
    record = InferRecord(
        schema_version=SCHEMA_VERSION,
        status=DONE,
        latency={job.infer.engine: latency},
        peak_memory_bytes=peak_memory_bytes(),
        peak_cuda_memory_bytes=explained(peak_cuda_memory_bytes(), "no NVIDIA GPU"),
        prompts=prompts,
        provenance=facts,
    )
    write_record(record, out)
    for part, by_batch in latency.items():
        for batch, times in by_batch.items():
            print(f"{part:14} batch {batch}: {times['p50_ms']:9.2f} ms")
    print(f"peak: {used()}")
    print(f"images: {out / 'images'}")


def composed(medians: Mapping[str, float], steps: int, denoiser: str) -> dict:
    """The time of a picture from those of its parts: the denoiser as often as there are steps."""
    milliseconds = sum(median * (steps if part == denoiser else 1) for part, median in medians.items())
    return {"p50_ms": milliseconds, "composed": "from single calls, as memory does not hold everything at once"}


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
    for name, shape in contract.shapes(**axes(batch, infer.width, infer.height)).items():
        dtype = contract.dtypes[name]
        drawn = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape)
        inputs[name] = drawn.to(dtype)
    return inputs


def batch_of(checkpoint: Checkpoint, part: str, infer: Infer) -> int:
    """Samples in one call."""
    denoises = part == checkpoint.family.DENOISER
    return infer.batch_size * (samples_per_image(checkpoint, infer.scale) if denoises else 1)


def part_call(engine: Engine, contract: Contract, batch: int, infer: Infer) -> Callable[[], object]:
    """With inputs that are where the engine computes, in its own dtypes: nothing is copied in a timed call."""
    inputs = cast_inputs(engine.inputs, example_inputs(contract, batch, infer), engine.device)
    return lambda: engine(**inputs)


def part_latency(engine: Engine, contract: Contract, batch: int, infer: Infer) -> dict[str, object]:
    """By the clock of the engine's own device."""
    call = part_call(engine, contract, batch, infer)
    return measure(call, infer.num_warmup_runs, infer.num_timed_runs, clock_of(engine.device))


def one_image(pipeline: Pipeline, prompts: list[str], infer: Infer):
    batch = (prompts * infer.batch_size)[: infer.batch_size]
    return lambda: pipeline(batch, sampling_of(infer))


def shown(path: Path) -> str:
    """A path as a person wants to read it."""
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
