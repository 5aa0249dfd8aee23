"""The memory and disk that a job takes, compared with the machine before anything is started."""

from collections.abc import Mapping
from pathlib import Path

from sd_quant.config import Infer, QuantizeJob, sizes_of
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
from sd_quant.metrics.memory import available_cuda_memory_bytes
from sd_quant.models.parts import Part
from sd_quant.process import available_memory_bytes


def workload_of(infer: Infer) -> Workload:
    """What one call of the pipeline computes, by the knobs."""
    pixels = infer.batch_size * max(width * height for width, height in [(infer.width, infer.height), *sizes_of(infer)])
    return Workload(RUNTIMES[infer.engine], pixels, fp32=infer.precision == "fp32")


def memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """The most bytes that each stage takes, with one part open at a time where that is possible."""
    needed = {"images": memory_of_part(parameters, workload_of(job.infer))}
    if job.quantize.calibration is None:
        needed["calibrate"] = memory_of_calibration(parameters, calibration_pixels(job))
    if job.trt.library != "none":
        needed["plans"] = memory_of_plan(parameters)
    return needed


def gpu_memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """The most bytes of a GPU that each stage takes, with one part open at a time where that is possible."""
    work = workload_of(job.infer)
    needed = {"images": gpu_memory_of_part(parameters, work), "parity": memory_of_simulation(parameters, work)}
    if job.quantize.calibration is None and job.quantize.accelerator != "cpu":
        needed["calibrate"] = memory_of_calibration(parameters, calibration_pixels(job))
    return needed


def calibration_pixels(job: QuantizeJob) -> int:
    """The most pixels of all images in one call of calibration."""
    return job.quantize.batch_size * max(width * height for width, height in sizes_of(job.model))


def stored_bytes(parts: Mapping[str, Part], parameters: Parameters) -> dict[str, int]:
    """Bytes of each part's unquantized weights, as they are exported."""
    return {part: parts[part].contract.weights.itemsize * count for part, count in parameters.items()}


def disk_needed(stored: Mapping[str, int], job: QuantizeJob) -> dict[str, float]:
    """The most bytes that a run writes, by kind of file; ``stored`` has the bytes of each part's unquantized weights.

    The denoiser, which is the first part, is counted as if nothing were quantized.
    """
    denoiser = next(iter(stored.values()))
    return {
        "onnx": sum(stored.values()),
        "the cache": sum(stored.values()),
        "full_precision": denoiser,
        "plan": sum(stored.values()) if job.trt.library != "none" else 0,
        "hand_over": len(job.hand_over) * sum(stored.values()),
        "ModelOpt's checkpoint": 2 * denoiser,
        "temporary files": denoiser,
    }


def check_machine(
    memory: Mapping[str, float], disk: Mapping[str, float], directory: Path, gpu: Mapping[str, float] | None = None
) -> None:
    """Raises ResourceError, with the figures, unless memory, GPU and disk of this machine are large enough.

    ``memory`` and ``gpu`` have bytes by stage, ``disk`` by kind of file; a machine without a GPU lacks none.
    """
    available = available_memory_bytes()
    too_large = {stage: needed for stage, needed in memory.items() if needed > available}
    if too_large:
        raise ResourceError(
            f"this job needs more memory than the {available / GB:.1f} GB that are free here ({figures(too_large)}); "
            "reuse statistics with calibration=<path>, leave plans out with export_trt=none, lower infer.batch_size, "
            "quantize.batch_size or infer.width and infer.height, or take a larger machine"
        )
    free = available_cuda_memory_bytes()
    too_large = {stage: needed for stage, needed in (gpu or {}).items() if free is not None and needed > free}
    if too_large:
        raise ResourceError(
            f"this job needs more than the {free / GB:.1f} GB that are free on the GPU ({figures(too_large)}); "
            "calibrate with quantize.accelerator=cpu or calibration=<path>, lower infer.batch_size, "
            "quantize.batch_size or infer.width and infer.height, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    check_room(directory, sum(disk.values()), f" ({figures(disk)})")


def figures(sizes: Mapping[str, float]) -> str:
    """The sizes as a message shows them."""
    return ", ".join(f"{name} {size / GB:.1f} GB" for name, size in sizes.items())
