"""The GPU of this machine, without importing torch where there is none."""

import ctypes
from collections.abc import Iterable

from sd_quant.quantization.formats import FORMATS

DRIVER = "libcuda.so.1"  # NVIDIA's, which every machine with a usable GPU has
# Measured on SDXL's UNet at full size by torch, on an H200 (docs/gpu.md). Of plans nothing is known.
HOPPER = "SM90"
TAKE_FP8 = (
    "on Hopper INT8 has 0.80 times the speed of compiled 16 bits, and FP8, which alone has fast products there, 1.12 "
    "times; take quantize=fp8"
)


def current_gpu() -> str | None:
    """Return the compute capability of the GPU that torch uses, such as "SM89", or None without a GPU."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return None
    import torch  # takes a second

    return "SM{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def better_format(compute_capability: str | None, formats_of_inputs: Iterable[str]) -> str | None:
    """Return advice to use a faster format on this GPU than the given input formats, or None."""
    integers = any(FORMATS[name].onnx_type == "INT8" for name in formats_of_inputs if name in FORMATS)
    return TAKE_FP8 if compute_capability == HOPPER and integers else None
