"""Estimates of the memory, GPU memory and disk that a job takes, checked against the machine before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sd_quant.config import Infer, Model, Quantize, sizes_of
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ResourceError
from sd_quant.files import check_room
from sd_quant.inference.memory import (
    GB,
    PLAN_BYTES,
    PROCESS,
    QUANTIZED_BYTES,
    TORCH_BYTES,
    Parameters,
    PipelineCall,
    memory_of_calibration,
    memory_of_part,
    memory_of_simulation,
    memory_of_variant,
)
from sd_quant.metrics.memory import available_cuda_memory_bytes
from sd_quant.process import available_memory_bytes

Bytes = Mapping[str, float]


@dataclass(frozen=True)
class Needs:
    """The peak bytes that a job takes: memory and GPU memory by stage, disk by kind of file."""

    memory: Bytes = field(default_factory=dict)
    gpu: Bytes = field(default_factory=dict)
    disk: Bytes = field(default_factory=dict)

    def __or__(self, other: "Needs") -> "Needs":
        return Needs({**self.memory, **other.memory}, {**self.gpu, **other.gpu}, {**self.disk, **other.disk})


NOTHING = Needs()


def workload_of(infer: Infer) -> PipelineCall:
    """Return the runtime, pixels and precision of one call of the pipeline, from the image settings."""
    pixels = infer.batch_size * max(width * height for width, height in [(infer.width, infer.height), *sizes_of(infer)])
    tile = pixels if infer.vae_tile is None else infer.batch_size * infer.vae_tile**2
    return PipelineCall(RUNTIMES[infer.engine], pixels, infer.precision == "fp32", min(pixels, tile))


def images_need(parameters: Parameters, infer: Infer) -> Needs:
    """Estimate what images by the engine need, one part open at a time; no GPU memory for plans (may have 4 bits)."""
    work = workload_of(infer)
    needs = part_needs(parameters, work)
    return Needs(needs.memory) if work.runtime.file == "plan" else needs


def part_needs(parameters: Parameters, work: PipelineCall) -> Needs:
    memory, gpu = memory_of_part(parameters, work)
    return Needs({"images": memory}, {} if work.runtime.device == "cpu" else {"images": gpu})


def by_torch(work: PipelineCall) -> PipelineCall:
    """Return the same call, executed by torch."""
    return replace(work, runtime=RUNTIMES["torch"])


def simulation_needs(parameters: Parameters, infer: Infer) -> Needs:
    """Estimate what images by torch need, with one part open at a time and the denoiser simulated in fp32."""
    work = by_torch(workload_of(infer))
    return part_needs(parameters, work) | Needs(gpu={"the simulation": memory_of_simulation(parameters, work)})


def calibration_needs(parameters: Parameters, model: Model, quantize: Quantize) -> Needs:
    """Estimate what calibration needs with all parts except the VAE open; nothing if statistics are given by path."""
    if quantize.calibration is not None:
        return NOTHING
    pixels = quantize.batch_size * max(width * height for width, height in sizes_of(model))
    needed = memory_of_calibration(parameters, pixels)
    gpu = {} if quantize.accelerator == "cpu" else {"calibrate": needed}
    return Needs({"calibrate": needed}, gpu)


def plans_need(parameters: Parameters, stored: float) -> Needs:
    """Estimate what building plans one at a time needs; on disk, all take ``stored`` bytes, as their ONNX files do."""
    return Needs({"plans": PROCESS + PLAN_BYTES * max(parameters.values())}, disk={"plan": stored})


def run_needs(
    parameters: Parameters,
    stored: Mapping[str, int],
    model: Model,
    infer: Infer,
    quantize: Quantize,
    plans: bool,
    targets: int,
) -> Needs:
    """Estimate what ``quantize`` needs. ``stored``: bytes of unquantized weights by part, the denoiser first.

    Files are counted as if nothing were quantized. ``targets``: number of exports.
    """
    denoiser, every = next(iter(stored.values())), sum(stored.values())
    files = {
        "onnx": every,
        "the cache": every,
        "full_precision": denoiser,
        "hand_over": targets * every,
        "ModelOpt's checkpoint": 2 * denoiser,
        "temporary files": denoiser,
    }
    images = simulation_needs(parameters, infer) | images_need(parameters, infer)  # whichever engine makes them
    steps = calibration_needs(parameters, model, quantize)
    steps |= plans_need(parameters, every) if plans else NOTHING
    return images | steps | Needs(disk=files)


def check_machine(needs: Needs, directory: Path | None = None) -> None:
    """Raise ResourceError, with the figures, unless this machine's memory, GPU memory and disk are large enough.

    GPU memory is not checked on a machine without a GPU, nor the disk without a ``directory``.
    """
    available, free = available_memory_bytes(), available_cuda_memory_bytes()
    too_large = {stage: needed for stage, needed in needs.memory.items() if needed > available}
    if too_large:
        raise ResourceError(
            f"this job needs more memory than the {available / GB:.1f} GB that are free here ({figures(too_large)}); "
            "reuse statistics with calibration=<path>, leave plans out with export_trt=none, lower infer.batch_size, "
            "quantize.batch_size or infer.width and infer.height, or take a larger machine"
        )
    too_large = {stage: needed for stage, needed in needs.gpu.items() if free is not None and needed > free}
    if free is not None and too_large:
        raise ResourceError(
            f"this job needs more than the {free / GB:.1f} GB that are free on the GPU ({figures(too_large)}); "
            "calibrate with quantize.accelerator=cpu or calibration=<path>, lower infer.batch_size, "
            "quantize.batch_size or infer.width and infer.height, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    if directory is not None:
        check_room(directory, sum(needs.disk.values()), f" ({figures(needs.disk)})")


def most_at_once(parameters: Parameters, denoiser: str, infer: Infer, compiled: bool) -> int:
    """Return how many quantized denoisers fit beside the unquantized engine (and a compiled one, if ``compiled``)."""
    weights, (memory, gpu) = parameters[denoiser], memory_of_variant(parameters, workload_of(infer))
    beside = TORCH_BYTES * weights if compiled else 0
    rooms, free = [available_memory_bytes() - sum(memory.values()) - beside], available_cuda_memory_bytes()
    if free is not None and gpu:
        rooms.append(free - sum(gpu.values()) - beside)
    return max(0, int(min(rooms) / (QUANTIZED_BYTES * weights)))


def figures(sizes: Bytes) -> str:
    """Format the sizes in GB for a message."""
    return ", ".join(f"{name} {size / GB:.1f} GB" for name, size in sizes.items())
