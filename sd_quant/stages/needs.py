"""What a job needs of the machine, said before anything is started.

The factors were measured on the full-size SDXL at 1024x1024 (``benchmarks/full_size.py``) and rounded up; a small model
needs little more than ``BASE``. Estimates are there to refuse what cannot work, not to predict a peak to the byte.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from sd_quant.config import Infer, QuantizeJob
from sd_quant.errors import ResourceError
from sd_quant.files import check_room
from sd_quant.metrics.memory import available_memory_bytes

LOG = logging.getLogger(__name__)
BASE = 1.0e9  # the process with its libraries
TORCH = 4  # bytes per parameter, fp32
ENGINE, ENGINE_INT8 = 6.5, 2.5  # OpenVINO's own, at its peak, without the file that it maps and the kernel can drop
PLAN = 4.2  # bytes per parameter while TensorRT for RTX builds
UNET_PIXEL, VAE_PIXEL = 1000, 9000  # bytes of activations per pixel, of a sample and of a picture
GB = 1e9

Parameters = Mapping[str, int]  # part to how many


def activations(part: str, infer: Infer) -> float:
    pixels = infer.batch_size * infer.width * infer.height
    return {"unet_xl": 2 * UNET_PIXEL, "vae": VAE_PIXEL}.get(part, 0) * pixels


def memory_of_side(parameters: Parameters, infer: Infer) -> dict[str, float]:
    """Bytes of one version of the model with all its parts open, and of the largest activations."""
    return {
        "weights": (TORCH if infer.engine.startswith("torch") else ENGINE) * sum(parameters.values()),
        "activations": max(activations(part, infer) for part in parameters),
        "process": BASE,
    }


def memory_of_sides(parameters: Parameters, infer: Infer) -> dict[str, float]:
    """The same of framework, unquantized and quantized engine, which share what is not quantized."""
    framework, quantized = TORCH * sum(parameters.values()), ENGINE_INT8 * parameters["unet_xl"]
    simulation = TORCH * parameters["unet_xl"]
    side = memory_of_side(parameters, infer)
    return side | {"framework": framework, "quantized": quantized, "simulation": simulation}


def fits(memory: Mapping[str, float], what: str) -> bool:
    """Whether all of it can be there at once."""
    available, needed = available_memory_bytes(), sum(memory.values())
    if needed > available:
        LOG.info(
            "%s would take %.1f GB of memory and %.1f GB are free, so one part is open at a time",
            what, needed / GB, available / GB,
        )  # fmt: skip
    return needed <= available


def memory_of_part(parameters: Parameters, infer: Infer) -> float:
    """Most bytes with one part open at a time."""
    a_parameter = TORCH if infer.engine.startswith("torch") else ENGINE
    return BASE + max(a_parameter * count + activations(part, infer) for part, count in parameters.items())


def memory_of_plan(parameters: Parameters) -> float:
    """Most bytes while a plan is built."""
    return BASE + PLAN * max(parameters.values())


def memory_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """Most bytes that each stage takes, with one part open at a time where that is enough."""
    needed = {"pictures": memory_of_part(parameters, job.infer)}
    if job.quantize.calibration is None:
        encoders = parameters["clip1"] + parameters["clip2"]
        pixels = job.quantize.batch_size * job.model.width * job.model.height
        needed["calibrate"] = BASE + TORCH * (parameters["unet_xl"] + encoders) + 2 * UNET_PIXEL * pixels
    if job.trt.library != "none":
        needed["plans"] = memory_of_plan(parameters)
    return needed


def disk_needed(parameters: Parameters, job: QuantizeJob) -> dict[str, float]:
    """Most bytes that a run leaves, by kind; the quantized UNet is counted as if nothing were quantized."""
    half = {part: (4 if part == "vae" else 2) * count for part, count in parameters.items()}
    return {
        "onnx": sum(half.values()),
        "full_precision": half["unet_xl"],
        "plan": sum(half.values()) if job.trt.library != "none" else 0,
        "quantized_unet.pt": 4 * parameters["unet_xl"],
        "temporary files": half["unet_xl"],
    }


def check_machine(memory: Mapping[str, float], disk: Mapping[str, float], directory: Path) -> None:
    """Raises ResourceError, with the figures, when the machine cannot hold a stage or the disk not the files."""
    available = available_memory_bytes()
    short = {stage: needed for stage, needed in memory.items() if needed > available}
    if short:
        raise ResourceError(
            f"this job needs more memory than the {available / GB:.1f} GB that are free here ({figures(short)}); reuse "
            "statistics with calibration=<path>, leave plans out with export_trt=none, make smaller pictures with "
            "infer.width and infer.height, or take a larger machine"
        )
    check_room(directory, sum(disk.values()), f" ({figures(disk)})")


def figures(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GB:.1f} GB" for name, size in sizes.items())
