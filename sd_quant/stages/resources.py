"""What a job needs of the machine, said before anything is started."""

from collections.abc import Mapping
from pathlib import Path

from sd_quant.config import Infer, QuantizeJob
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ResourceError
from sd_quant.files import check_room
from sd_quant.inference.memory import (
    GB,
    Parameters,
    Workload,
    gpu_memory_of_part,
    memory_of_calibration,
    memory_of_part,
    memory_of_plan,
    memory_of_simulation,
)
from sd_quant.metrics.memory import available_cuda_memory_bytes, available_memory_bytes


def workload_of(infer: Infer) -> Workload:
    pixels = infer.batch_size * infer.width * infer.height
    return Workload(RUNTIMES[infer.engine], pixels, fp32=infer.precision == "fp32")


def memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """Most bytes that each stage takes, with one part open at a time where that is enough."""
    needed = {"pictures": memory_of_part(parameters, workload_of(job.infer))}
    if job.quantize.calibration is None:
        needed["calibrate"] = memory_of_calibration(parameters, calibration_pixels(job))
    if job.trt.library != "none":
        needed["plans"] = memory_of_plan(parameters)
    return needed


def gpu_memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """Most bytes of a GPU's memory that each stage takes, with one part open at a time: calibration has all but the VAE
    in fp32, the simulation the denoiser in fp32."""
    work = workload_of(job.infer)
    needed = {"pictures": gpu_memory_of_part(parameters, work), "parity": memory_of_simulation(parameters, work)}
    if job.quantize.calibration is None and job.quantize.accelerator != "cpu":
        needed["calibrate"] = memory_of_calibration(parameters, calibration_pixels(job))
    return needed


def calibration_pixels(job: QuantizeJob) -> int:
    return job.quantize.batch_size * job.model.width * job.model.height


def disk_needed(stored: Mapping[str, int], job: QuantizeJob) -> dict[str, float]:
    """Most bytes that a run leaves, by kind; ``stored``: part to the bytes of its weights when they are exported.

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
