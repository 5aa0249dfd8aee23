"""Estimates of the memory, GPU memory and disk that a job takes, checked against the machine before it starts.

A variant is the whole model in one runtime and precision. Factors were measured on full-size SDXL at 1024x1024
(``benchmarks/full_size.py``) and rounded up: they refuse impossible jobs, and predict no peak to the byte.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sd_quant.config import Infer, Model, Quantize, sizes_of
from sd_quant.engines import RUNTIMES, Runtime
from sd_quant.errors import ResourceError
from sd_quant.files import check_room
from sd_quant.metrics.memory import available_cuda_memory_bytes
from sd_quant.models import VAE_ENCODER
from sd_quant.process import available_memory_bytes

LOG = logging.getLogger(__name__)
PROCESS = 1.0e9  # bytes of the process with its libraries; on a GPU, of the contexts of CUDA and its libraries
TORCH_BYTES = 4  # bytes per parameter in fp32
QUANTIZED_BYTES = 2.5  # bytes per parameter that OpenVINO takes with INT8 weights, at its peak
PLAN_BYTES = 4.2  # bytes per parameter while TensorRT for RTX builds
DENOISER_PIXEL, VAE_PIXEL = 1000, 9000  # bytes of fp32 activations per pixel, of a sample and of an image
GB = 1e9

Bytes = Mapping[str, float]
Parameters = Mapping[str, int]  # the number of weights by part, the denoiser first


@dataclass(frozen=True)
class PipelineCall:
    """The runtime and the image sizes of one call of the pipeline."""

    runtime: Runtime
    pixels: int  # of all images in the call
    fp32: bool  # whether torch computes in fp32 on a GPU too
    decoded: int  # pixels that the autoencoder decodes at a time, fewer in tiles

    @property
    def bytes_on_gpu(self) -> int:
        """Bytes per weight or activation on a GPU."""
        return TORCH_BYTES if self.fp32 else TORCH_BYTES // 2


def activations(parameters: Parameters, call: PipelineCall) -> dict[str, int]:
    """Return the bytes of each part's fp32 activations, with the conditional and unconditional samples in one call."""
    autoencoder = {"vae": VAE_PIXEL * call.decoded, VAE_ENCODER: VAE_PIXEL * call.pixels}
    own = {next(iter(parameters)): 2 * DENOISER_PIXEL * call.pixels, **autoencoder}
    return {part: own.get(part, 0) for part in parameters}


def working_bytes(parameters: Parameters, call: PipelineCall) -> dict[str, float]:
    """Return the bytes that one call of each part needs in addition to all weights: its activations and the process."""
    share = 1.0 if call.runtime.device == "cpu" else call.bytes_on_gpu / TORCH_BYTES
    return {part: PROCESS + share * size for part, size in activations(parameters, call).items()}


def all_open(parameters: Parameters, bytes_each: float, call: PipelineCall) -> dict[str, float]:
    """Return the bytes of weights, at ``bytes_each`` a weight, activations and process with all parts open."""
    largest = max(activations(parameters, call).values())
    return {"weights": bytes_each * sum(parameters.values()), "activations": largest, "process": PROCESS}


def memory_of_variant(parameters: Parameters, call: PipelineCall) -> tuple[dict[str, float], dict[str, float]]:
    """Return, for one variant with all parts open, bytes by use: in memory, and on a GPU (empty for a CPU runtime)."""
    gpu = {} if call.runtime.device == "cpu" else all_open(parameters, call.bytes_on_gpu, call)
    return all_open(parameters, call.runtime.bytes_per_parameter, call), gpu


def memory_of_variants(
    parameters: Parameters, call: PipelineCall, copies: int = 1
) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes by use, in memory and on a GPU, with all variants and the fake-quantized simulation open at once.

    Variants share unquantized parts. ``copies`` is the number of quantized denoisers, each with its own weights.
    """
    largest, every = next(iter(parameters.values())), sum(parameters.values())
    memory, gpu = memory_of_variant(parameters, call)
    simulation = {"simulation": TORCH_BYTES * largest}
    memory |= {"framework": TORCH_BYTES * every, "quantized": copies * QUANTIZED_BYTES * largest} | simulation
    quantized = {"quantized": copies * call.bytes_on_gpu * largest} if gpu else {}
    return memory, gpu | quantized | {"framework": call.bytes_on_gpu * every} | simulation


def memory_of_part(parameters: Parameters, call: PipelineCall) -> tuple[float, float]:
    """Return the peak bytes of one variant with one part open at a time: in memory, and on a GPU."""
    sizes, bytes_each = activations(parameters, call), (call.runtime.bytes_per_parameter, call.bytes_on_gpu)
    memory, gpu = (PROCESS + max(each * parameters[part] + size for part, size in sizes.items()) for each in bytes_each)
    return memory, gpu


def memory_of_simulation(parameters: Parameters, call: PipelineCall) -> float:
    """Return the peak bytes of the denoiser in fp32 with ModelOpt's quantizers."""
    denoiser = next(iter(parameters))
    return PROCESS + TORCH_BYTES * parameters[denoiser] + activations(parameters, call)[denoiser]


def memory_of_calibration(parameters: Parameters, pixels: int) -> float:
    """Return the peak bytes of calibration, which holds all parts except the VAE in fp32 on one device."""
    all_but_vae = sum(count for part, count in parameters.items() if part != "vae")
    return PROCESS + TORCH_BYTES * all_but_vae + 2 * DENOISER_PIXEL * pixels


def fits(memory: Mapping[str, float], what: str, gpu: Mapping[str, float] | None = None) -> bool:
    """Return whether ``memory`` and ``gpu`` (bytes by use) are free in memory and on the GPU; log if not."""
    places = {"memory": (memory, available_memory_bytes())}
    if gpu is not None and (free := available_cuda_memory_bytes()) is not None:
        places["the GPU's memory"] = gpu, free
    enough = True
    for place, (sizes, free) in places.items():
        if (needed := sum(sizes.values())) > free:
            enough = False
            LOG.info(
                "%s would take %.1f GB of %s and %.1f GB are free, so one part is open at a time",
                what, needed / GB, place, free / GB,
            )  # fmt: skip
    return enough


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
