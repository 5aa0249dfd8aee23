"""The memory model: bytes that variants of the model take, with all their parts open at once or one at a time.

The factors were measured on the full-size SDXL at 1024x1024 (``benchmarks/full_size.py``) and rounded up; a small model
needs little more than ``PROCESS``. The estimates refuse what cannot work; they do not predict a peak to the byte.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from sd_quant.engines import Runtime
from sd_quant.metrics.memory import available_cuda_memory_bytes
from sd_quant.models import VAE_ENCODER
from sd_quant.process import available_memory_bytes

LOG = logging.getLogger(__name__)
PROCESS = 1.0e9  # the process with its libraries; on a GPU, the contexts of CUDA and of its libraries
TORCH = 4  # bytes per parameter in fp32
QUANTIZED = 2.5  # bytes per parameter that OpenVINO takes with INT8 weights, at its peak
PLAN = 4.2  # bytes per parameter while TensorRT for RTX builds
DENOISER_PIXEL, VAE_PIXEL = 1000, 9000  # bytes of fp32 activations per pixel, of a sample and of an image
GB = 1e9

Parameters = Mapping[str, int]  # the number of weights by part, the denoiser first


@dataclass(frozen=True)
class Workload:
    """What one call of the pipeline computes, and what computes it."""

    runtime: Runtime
    pixels: int  # of all images in the call
    fp32: bool  # whether torch computes in fp32 even on a GPU, where numbers otherwise take two bytes


def activations(parameters: Parameters, pixels: int) -> dict[str, int]:
    """Bytes of each part's activations, with both samples of guidance in a call."""
    denoiser = next(iter(parameters))
    autoencoder = {part: VAE_PIXEL * pixels for part in ("vae", VAE_ENCODER) if part in parameters}
    return dict.fromkeys(parameters, 0) | {denoiser: 2 * DENOISER_PIXEL * pixels} | autoencoder


def memory_of_variant(parameters: Parameters, work: Workload) -> dict[str, float]:
    """Bytes that one variant of the model takes, by what takes them, with all its parts open."""
    return {
        "weights": work.runtime.bytes_per_parameter * sum(parameters.values()),
        "activations": max(activations(parameters, work.pixels).values()),
        "process": PROCESS,
    }


def memory_of_variants(parameters: Parameters, work: Workload) -> dict[str, float]:
    """Bytes that all variants and the simulation take, by what takes them; both engines share what is not quantized."""
    largest = next(iter(parameters.values()))
    framework, quantized = TORCH * sum(parameters.values()), QUANTIZED * largest
    others = {"framework": framework, "quantized": quantized, "simulation": TORCH * largest}
    return memory_of_variant(parameters, work) | others


def gpu_memory_of_variant(parameters: Parameters, work: Workload) -> dict[str, float]:
    """Bytes of a GPU that one variant takes, by what takes them; none for an engine that computes on the CPU."""
    if work.runtime.device == "cpu":
        return {}
    weights = bytes_on_gpu(work) * sum(parameters.values())
    return {"weights": weights, "activations": max(activations(parameters, work.pixels).values()), "process": PROCESS}


def gpu_memory_of_variants(parameters: Parameters, work: Workload) -> dict[str, float]:
    """Bytes of a GPU that all variants and the simulation take, by what takes them."""
    bytes_each, largest = bytes_on_gpu(work), next(iter(parameters.values()))
    quantized = {} if work.runtime.device == "cpu" else {"quantized": bytes_each * largest}
    torch = {"framework": bytes_each * sum(parameters.values()), "simulation": TORCH * largest}
    return gpu_memory_of_variant(parameters, work) | quantized | torch


def bytes_on_gpu(work: Workload) -> int:
    """Bytes of a number on a GPU."""
    return TORCH if work.fp32 else TORCH // 2


def memory_of_part(parameters: Parameters, work: Workload) -> float:
    """The most bytes that one variant takes with one part open at a time."""
    each = work.runtime.bytes_per_parameter
    return PROCESS + max(each * parameters[part] + size for part, size in activations(parameters, work.pixels).items())


def gpu_memory_of_part(parameters: Parameters, work: Workload) -> float:
    """The most bytes of a GPU that one variant takes with one part open at a time."""
    each = bytes_on_gpu(work)
    return PROCESS + max(each * parameters[part] + size for part, size in activations(parameters, work.pixels).items())


def memory_of_simulation(parameters: Parameters, work: Workload) -> float:
    """The most bytes that the denoiser takes in fp32 with ModelOpt's quantizers."""
    denoiser = next(iter(parameters))
    return PROCESS + TORCH * parameters[denoiser] + activations(parameters, work.pixels)[denoiser]


def memory_of_plan(parameters: Parameters) -> float:
    """The most bytes that building a plan takes."""
    return PROCESS + PLAN * max(parameters.values())


def memory_of_calibration(parameters: Parameters, pixels: int) -> float:
    """The most bytes that calibration takes where it computes: all parts but the VAE in fp32."""
    all_but_vae = sum(count for part, count in parameters.items() if part != "vae")
    return PROCESS + TORCH * all_but_vae + 2 * DENOISER_PIXEL * pixels


def fits(memory: Mapping[str, float], what: str, gpu: Mapping[str, float] | None = None) -> bool:
    """Whether ``memory`` is free, and ``gpu`` on the GPU where there is one; else log why parts are opened in turn."""
    places = {"memory": (memory, available_memory_bytes())}
    if gpu is not None and (free := available_cuda_memory_bytes()) is not None:
        places["the GPU's memory"] = gpu, free
    short = {
        place: (sum(sizes.values()), free) for place, (sizes, free) in places.items() if sum(sizes.values()) > free
    }
    for place, (needed, free) in short.items():
        LOG.info(
            "%s would take %.1f GB of %s and %.1f GB are free, so one part is open at a time",
            what, needed / GB, place, free / GB,
        )  # fmt: skip
    return not short
