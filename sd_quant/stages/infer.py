"""Images and latency from the engines of an earlier run, or from torch."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import cast

import torch

from sd_quant.config import Infer, InferJob, part_paths, precise_paths
from sd_quant.devices import threads
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.pool import Variant
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.timed_calls import calls_in_image, image_of_parts, image_times, part_call, samples_per_call
from sd_quant.inference.watched import WatchedVariant
from sd_quant.metrics.latency import Stopping, clock_of, judged, measure
from sd_quant.metrics.memory import peak_cuda_memory_bytes, peak_memory_bytes, used
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.places import output_path
from sd_quant.report.images import save_images
from sd_quant.report.provenance import provenance
from sd_quant.report.record import DONE, IMAGE, SCHEMA_VERSION, InferRecord, Latency, explained, write_record
from sd_quant.stages.generate import generate, image_names, recipe_sampling
from sd_quant.stages.latency import image_entry
from sd_quant.stages.open_parts import check_cuda_graph, open_file, open_torch_engine, say_choice
from sd_quant.stages.resources import workload_of
from sd_quant.stages.session import open_session


def infer(job: InferJob, directory: Path) -> None:
    """Make the job's images and time its engine; write images and record to ``infer.out_path`` or ``directory``."""
    out = output_path(job.infer.out_path) if job.infer.out_path else directory
    say_choice(job.infer)
    check_cuda_graph(job.infer)
    torch.set_num_threads(threads())
    prompts, files = job.infer.prompt_list(), engine_files(job)
    session = open_session(job.model, job.infer, directory=out, finite=not files)
    checkpoint, together = session.checkpoint, session.together(workload_of(job.infer))
    facts = provenance(job.model.inputs() | job.infer.inputs() | files, [])
    options = {"allow_untrusted_plan": True} if job.infer.allow_untrusted_plan else {}

    def open_part(part: str) -> Engine:
        """Open the part from its file, or by torch from the checkpoint if the engine has no files."""
        return open_file(files[part], job.infer, **options) if files else open_torch_engine(checkpoint, job.infer, part)

    pool = session.engines(open_part, together)
    engines = Variant(pool, {part: part for part in [*session.parts, *(files.keys() - session.parts.keys())]})
    if together:  # opens every engine, so that a broken file is refused before any work
        list(engines.values())
    watched, sampling = WatchedVariant(engines, {}), recipe_sampling(job.infer)
    generated = generate(pipeline_of(checkpoint, watched), prompts, sampling, job.infer.engine)
    save_images(generated.images, out / "images", image_names(prompts))
    batches = len(sampling.batches(range(len(prompts))))
    calls = {part: count // batches for part, count in watched.count.items()}
    latency = time_engine(checkpoint, engines, prompts, job.infer, together, calls)
    record = InferRecord(
        schema_version=SCHEMA_VERSION,
        status=DONE,
        latency={job.infer.engine: latency},
        chosen_because=job.infer.chosen_because,
        peak_memory_bytes=peak_memory_bytes(),
        peak_cuda_memory_bytes=explained(peak_cuda_memory_bytes(), "no NVIDIA GPU"),
        prompts=prompts,
        negative_prompts=job.infer.negative_prompts(job.infer.num_samples),
        provenance=facts,
    )
    write_record(record, out, InferRecord)
    for part, by_batch in latency.items():
        for batch, times in by_batch.items():
            shown = times.get("reason") if times["p50_ms"] is None else f"{times['p50_ms']:9.2f} ms"
            print(f"{part:14} batch {batch}: {shown}")
    print(f"peak: {used()}")
    print(f"images: {out / 'images'}")


def engine_files(job: InferJob) -> dict[str, Path]:
    """Return the files that the engine loads, by part; none for torch. Raises ArtifactError for a broken ONNX file."""
    kind = RUNTIMES[job.infer.engine].file
    files = {} if kind is None else part_paths(job, kind) | precise_paths(job)
    for path in files.values():
        if path.suffix.lower() == ".onnx":
            onnx_files(path)
    return files


def time_engine(
    checkpoint: Checkpoint,
    engines: Variant,
    prompts: list[str],
    infer: Infer,
    together: bool,
    calls: Mapping[str, int] = {},
) -> dict[str, dict[str, Latency]]:
    """Measure the latency of every part and of an image, each by batch size; ``together``: all parts are open at once.

    ``calls``: calls in one image, by denoiser, for pipelines with several denoisers.
    """
    sampling, contracts = recipe_sampling(infer), contracts_of(checkpoint)
    latency: dict[str, dict[str, Latency]] = {}
    medians: dict[str, float] = {}
    for part, contract in contracts.items():
        samples, clock = samples_per_call(checkpoint, part, sampling), clock_of(engines[part].device)
        call = part_call(engines[part], contract, samples, sampling)
        times = cast(Latency, judged(measure(call, infer.num_warmup_runs, infer.num_timed_runs, clock)))
        latency[part], medians[part] = {str(samples): times}, median(times["samples_ms"])
    image = added_up = image_of_parts(checkpoint, medians, calls_in_image(checkpoint, sampling, calls))
    if together:
        stopping = Stopping(min(3, infer.num_timed_runs), 1, 0)
        image = image_times(checkpoint, {"": engines}, prompts, {"": sampling}, stopping)[""]
    return latency | {IMAGE: {str(infer.batch_size): cast(Latency, image_entry(image, added_up))}}
