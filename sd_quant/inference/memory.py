"""Estimates of the memory that engines need, with all parts of the model open at once or one part at a time.

A variant is the whole model in one runtime and precision. The factors were measured on full-size SDXL at 1024x1024
(``benchmarks/full_size.py``) and rounded up. They refuse impossible jobs, and do not predict a peak to the byte.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from sd_quant.engines import Runtime
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
