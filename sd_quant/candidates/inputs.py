"""What other people's layers make of their inputs before they multiply: the codes, as the numbers that they stand for.

Each is the formula of the library that computes so; its file names it. Scales are computed in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.quantization.formats import e2m1, nvfp4
from sd_quant.quantization.formats.blocks import spread

LARGEST_FP8 = 448.0  # of E4M3


@dataclass(frozen=True)
class Multiplied:
    """By a ``pre_quant_scale`` [in], and then what ``then`` does, if anything."""

    factor: Tensor
    convolution: bool
    then: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        factor = self.factor.to(x)
        x = x * (factor[:, None, None] if self.convolution else factor)
        return x if self.then is None else self.then(x)

    def __str__(self) -> str:
        return f"smoothed, {self.then or 'high precision'}"


@dataclass(frozen=True)
class ManyRows:
    """What ``then`` does, for inputs [..., in] of at least ``least`` rows; fewer stay as they are."""

    then: Callable[[Tensor], Tensor]
    least: int

    def __call__(self, x: Tensor) -> Tensor:
        return x if x.numel() < self.least * x.shape[-1] else self.then(x)

    def __str__(self) -> str:
        return f"{self.then}, of {self.least} or more"


@dataclass(frozen=True)
class StaticInteger:
    """Codes ``clamp(round(x / scale) + zero_point, low, high)`` with one scale for every input."""

    scale: float
    low: int = -128
    high: int = 127
    zero_point: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        codes = ((x.float() / self.scale).round() + self.zero_point).clamp(self.low, self.high)
        return ((codes - self.zero_point) * self.scale).to(x)

    def __str__(self) -> str:
        return f"int{(self.high - self.low).bit_length()}, one scale"


@dataclass(frozen=True)
class RowInteger:
    """Symmetric codes with a scale for each row of the input [..., in]: its largest magnitude is ``high``."""

    low: int = -128
    high: int = 127
    smallest: float = 1e-12  # of a scale

    def __call__(self, x: Tensor) -> Tensor:
        scale = (x.float().abs().amax(-1, keepdim=True) / self.high).clamp(min=self.smallest)
        return ((x.float() / scale).round().clamp(self.low, self.high) * scale).to(x)

    def __str__(self) -> str:
        return f"int{(self.high - self.low).bit_length()}, a scale a row"


@dataclass(frozen=True)
class RowUnsigned:
    """256 codes with a scale for each row of the input [..., in], from its smallest number to its largest."""

    def __call__(self, x: Tensor) -> Tensor:
        low, high = x.float().aminmax(dim=-1, keepdim=True)
        scale = (high - low) / 255
        low = low + 128 * scale
        codes = ((x.float() - low) / scale).round().nan_to_num().clamp(-128, 127)
        return (codes * scale + low).to(x)

    def __str__(self) -> str:
        return "uint8, a scale a row"


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    codes = (x.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x)


@dataclass(frozen=True)
class StaticFloat8:
    """E4M3 with one scale for every input."""

    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return to_fp8(x, torch.tensor(self.scale, device=x.device))

    def __str__(self) -> str:
        return "float8_e4m3fn, one scale"


@dataclass(frozen=True)
class RowFloat8:
    """E4M3 with a scale for each row of the input [..., in], or for all of it: the largest magnitude is 448."""

    whole: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.float().abs().amax() if self.whole else x.float().abs().amax(-1, keepdim=True)
        return to_fp8(x, (largest / LARGEST_FP8).clamp(min=1e-12))

    def __str__(self) -> str:
        return f"float8_e4m3fn, a scale {'each time' if self.whole else 'a row'}"


@dataclass(frozen=True)
class BlocksNvfp4:
    """E2M1 in blocks of 16 with scales in E4M3, all multiplied by one static scale, in fp32."""

    global_scale: float

    def __call__(self, x: Tensor) -> Tensor:
        scale = nvfp4.block_scales(x, torch.tensor(self.global_scale, device=x.device), e2m1.LARGEST)
        product = spread(scale * self.global_scale, x.shape[-1])
        return (e2m1.decode(e2m1.encode(x.float() / product)) * product).to(x)

    def __str__(self) -> str:
        return "nvfp4, a scale for 16 numbers"
