"""What ComfyUI's linears make of their inputs, which are quantized when they come: comfy-kitchen's formulas, in fp32.

Each is a function of ``comfy_kitchen/backends/eager/quantization.py``, which says what its kernels compute. The road
not taken is to call that package: it would be needed for four short formulas, and picks a kernel by the machine.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.interchange.inputs import LARGEST_FP8, RowInteger
from sd_quant.quantization.formats import e2m1
from sd_quant.quantization.rotation import rotated

INT8 = RowInteger(smallest=1e-30)  # quantize_int8_rowwise
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
E8M0_BIAS, LARGEST_E8M0 = 127, 254
MANTISSA = 23  # bits of fp32's


@dataclass(frozen=True)
class Float8:
    """``quantize_per_tensor_fp8`` with one scale for every input."""

    dtype: torch.dtype
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        scale, largest = torch.tensor(self.scale, device=x.device), torch.finfo(self.dtype).max
        codes = (x.float() * (1.0 / scale)).clamp(-largest, largest).to(self.dtype)
        return (codes.float() * scale).to(x)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {'a plain cast' if self.scale == 1 else 'one scale'}"


@dataclass(frozen=True)
class Rotated:
    """``quantize_and_rotate_rowwise``: INT8 of groups of ``group`` inputs, each rotated, and then rotated back."""

    group: int

    def __call__(self, x: Tensor) -> Tensor:
        return rotated(INT8(rotated(x.float(), self.group)), self.group).to(x)

    def __str__(self) -> str:
        return f"{INT8}, rotated by {self.group}"


@dataclass(frozen=True)
class Nvfp4:
    """``quantize_nvfp4``: E2M1 in blocks of 16 with scales in E4M3, and one scale of all, static or each time anew."""

    scale: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        blocks = in_blocks(x, NVFP4_BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        whole = (
            largest.amax() / (LARGEST_FP8 * e2m1.LARGEST) if self.scale is None else x.new_tensor(self.scale).float()
        )
        wanted = torch.where(largest > 0, largest / e2m1.LARGEST / whole, 0.0)  # of zeros alone, ``whole`` is 0 too
        scales = wanted.clamp(max=LARGEST_FP8).to(torch.float8_e4m3fn).float() * whole
        scaled = torch.where(scales > 0, blocks / scales, 0.0).clamp(-e2m1.LARGEST, e2m1.LARGEST)
        return (e2m1.decode(e2m1.encode(scaled)) * scales).flatten(-2)[..., : x.shape[-1]].to(x)

    def __str__(self) -> str:
        return f"nvfp4, a scale for 16 numbers{' and one each time' if self.scale is None else ''}"


@dataclass(frozen=True)
class Mxfp8:
    """``quantize_mxfp8``: E4M3 in blocks of 32 with scales that are powers of two."""

    def __call__(self, x: Tensor) -> Tensor:
        blocks = in_blocks(x, MXFP8_BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        wanted = (largest / LARGEST_FP8).clamp(min=2.0**-E8M0_BIAS)
        exponents = (wanted.log2().ceil().to(torch.int32) + E8M0_BIAS).clamp(0, LARGEST_E8M0)
        scales = powers_of_two(exponents)
        codes = torch.where(scales > 0, blocks / scales, 0.0).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return (codes.float() * scales).flatten(-2)[..., : x.shape[-1]].to(x)

    def __str__(self) -> str:
        return "mxfp8, a scale for 32 numbers"


def powers_of_two(exponents: Tensor) -> Tensor:
    """The numbers of E8M0's codes, fp32; 0 for code 0, as comfy-kitchen has it."""
    return (exponents.to(torch.int32) << MANTISSA).view(torch.float32)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """``x`` [..., n] in fp32, padded with zeros to whole blocks [..., blocks, block]."""
    return F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
