"""What a job needs of the machine, said before anything is started.

The factors were measured on the full-size SDXL at 1024x1024 (``benchmarks/full_size.py``) and rounded up; a small model
needs little more than ``BASE``. Estimates are there to refuse what cannot work, not to predict a peak to the byte.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from sd_quant.config import Infer, QuantizeJob
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ResourceError
from sd_quant.files import check_room
from sd_quant.metrics.memory import available_cuda_memory_bytes, available_memory_bytes

LOG = logging.getLogger(__name__)
BASE = 1.0e9  # the process with its libraries; on a GPU, CUDA's context and theirs
TORCH = 4  # bytes per parameter, fp32
ENGINE_INT8 = 2.5  # bytes per parameter of OpenVINO's own with INT8 weights, at its peak
PLAN = 4.2  # bytes per parameter while TensorRT for RTX builds
DENOISER_PIXEL, VAE_PIXEL = 1000, 9000  # bytes of fp32 activations per pixel, of a sample and of a picture
GB = 1e9

Parameters = Mapping[str, int]  # part to how many, the denoiser first


def activations(parameters: Parameters, infer: Infer) -> dict[str, int]:
    pixels, denoiser = infer.batch_size * infer.width * infer.height, next(iter(parameters))
    return dict.fromkeys(parameters, 0) | {denoiser: 2 * DENOISER_PIXEL * pixels, "vae": VAE_PIXEL * pixels}


def memory_of_side(parameters: Parameters, infer: Infer) -> dict[str, float]:
    """Bytes of one version of the model with all its parts open, and of the largest activations."""
    return {
        "weights": RUNTIMES[infer.engine].bytes_per_parameter * sum(parameters.values()),
        "activations": max(activations(parameters, infer).values()),
        "process": BASE,
    }


def memory_of_sides(parameters: Parameters, infer: Infer) -> dict[str, float]:
    """The same of framework, unquantized and quantized engine, which share what is not quantized."""
    largest = next(iter(parameters.values()))
    framework, quantized = TORCH * sum(parameters.values()), ENGINE_INT8 * largest
    simulation = TORCH * largest
    side = memory_of_side(parameters, infer)
    return side | {"framework": framework, "quantized": quantized, "simulation": simulation}


def gpu_memory_of_side(parameters: Parameters, infer: Infer) -> dict[str, float]:
    """Bytes that a GPU holds of one version; nothing of an engine for the processor."""
    if RUNTIMES[infer.engine].device == "cpu":
        return {}
    weights, largest = bytes_on_gpu(infer) * sum(parameters.values()), max(activations(parameters, infer).values())
    return {"weights": weights, "activations": largest, "process": BASE}


def gpu_memory_of_sides(parameters: Parameters, infer: Infer) -> dict[str, float]:
    """The same of framework, unquantized and quantized engine and of the simulation."""
    a_parameter, largest = bytes_on_gpu(infer), next(iter(parameters.values()))
    quantized = {} if RUNTIMES[infer.engine].device == "cpu" else {"quantized": a_parameter * largest}
    torch = {"framework": a_parameter * sum(parameters.values()), "simulation": TORCH * largest}
    return gpu_memory_of_side(parameters, infer) | quantized | torch


def bytes_on_gpu(infer: Infer) -> int:
    return TORCH if infer.precision == "fp32" else TORCH // 2


def fits(memory: Mapping[str, float], what: str, gpu: Mapping[str, float] | None = None) -> bool:
    """Whether all of it can be there at once, ``gpu`` in the memory of the GPU where there is one."""
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


def memory_of_part(parameters: Parameters, infer: Infer) -> float:
    """Most bytes with one part open at a time."""
    a_parameter = RUNTIMES[infer.engine].bytes_per_parameter
    return BASE + max(a_parameter * parameters[part] + size for part, size in activations(parameters, infer).items())


def memory_of_plan(parameters: Parameters) -> float:
    """Most bytes while a plan is built."""
    return BASE + PLAN * max(parameters.values())


def memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """Most bytes that each stage takes, with one part open at a time where that is enough."""
    needed = {"pictures": memory_of_part(parameters, job.infer)}
    if job.quantize.calibration is None:
        needed["calibrate"] = memory_of_calibration(parameters, job)
    if job.trt.library != "none":
        needed["plans"] = memory_of_plan(parameters)
    return needed


def gpu_memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """Most bytes of a GPU's memory that each stage takes, with one part open at a time: calibration has all but the VAE
    in fp32, the simulation the denoiser in fp32."""
    denoiser, sizes = next(iter(parameters)), activations(parameters, job.infer)
    a_parameter = bytes_on_gpu(job.infer)
    largest = max(a_parameter * parameters[part] + sizes[part] for part in parameters)
    needed = {"pictures": BASE + largest, "parity": BASE + TORCH * parameters[denoiser] + sizes[denoiser]}
    if job.quantize.calibration is None and job.quantize.accelerator != "cpu":
        needed["calibrate"] = memory_of_calibration(parameters, job)
    return needed


def memory_of_calibration(parameters: Parameters, job: QuantizeJob) -> float:
    """Most bytes, where it is computed."""
    all_but_vae = sum(count for part, count in parameters.items() if part != "vae")
    pixels = job.quantize.batch_size * job.model.width * job.model.height
    return BASE + TORCH * all_but_vae + 2 * DENOISER_PIXEL * pixels


def disk_needed(stored: Mapping[str, int], job: QuantizeJob) -> dict[str, float]:
    """Most bytes that a run leaves, by kind, of the bytes that each part's weights are when they are exported.

    The denoiser, which is the first, is counted as if nothing were quantized.
    """
    denoiser = next(iter(stored.values()))
    return {
        "onnx": sum(stored.values()),
        "full_precision": denoiser,
        "plan": sum(stored.values()) if job.trt.library != "none" else 0,
        "ModelOpt's checkpoint": 2 * denoiser,
        "temporary files": denoiser,
    }


def check_machine(
    memory: Mapping[str, float], disk: Mapping[str, float], directory: Path, gpu: Mapping[str, float] | None = None
) -> None:
    """Raises ResourceError, with the figures, when the machine or its GPU, where there is one, cannot hold a stage, or
    the disk not the files."""
    available = available_memory_bytes()
    short = {stage: needed for stage, needed in memory.items() if needed > available}
    if short:
        raise ResourceError(
            f"this job needs more memory than the {available / GB:.1f} GB that are free here ({figures(short)}); reuse "
            "statistics with calibration=<path>, leave plans out with export_trt=none, make smaller pictures with "
            "infer.width and infer.height, or take a larger machine"
        )
    free = available_cuda_memory_bytes()
    lacking = {stage: needed for stage, needed in (gpu or {}).items() if free is not None and needed > free}
    if lacking:
        raise ResourceError(
            f"this job needs more than the {free / GB:.1f} GB that are free on the GPU ({figures(lacking)}); calibrate "
            "with quantize.accelerator=cpu or calibration=<path>, make smaller pictures with infer.width and "
            "infer.height, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    check_room(directory, sum(disk.values()), f" ({figures(disk)})")


def figures(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GB:.1f} GB" for name, size in sizes.items())
