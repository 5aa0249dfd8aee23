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


@dataclass(frozen=True)
class Affine:
    """torchao's integers: a scale for each row of the input [..., in] or for all of it, or a static one.

    A symmetric scale makes the largest magnitude half of all codes; another ranges from the smallest number to the
    largest, zero always among them.
    """

    low: int = -128
    high: int = 127
    whole: bool = False
    symmetric: bool = True
    smallest: float = 0.0  # of a scale
    scale: float | None = None  # static, with a zero point
    zero_point: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        scale, zero_point = self.scale_of(x.float())
        codes = ((x.float() * (1 / scale)).round() + zero_point).clamp(self.low, self.high)
        return ((codes - zero_point) * scale).to(x)

    def scale_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.scale is not None:
            return x.new_tensor(self.scale), x.new_tensor(self.zero_point)
        low, high = torch.aminmax(x) if self.whole else torch.aminmax(x, dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.symmetric:
            scale = torch.maximum(-low, high) / ((self.high - self.low) / 2)
            return scale.clamp(min=self.smallest), torch.zeros_like(scale)
        scale = ((high - low) / (self.high - self.low)).clamp(min=self.smallest)
        return scale, (self.low - (low / scale).round()).clamp(self.low, self.high)

    def __str__(self) -> str:
        often = "one scale" if self.scale is not None else f"a scale {'each time' if self.whole else 'a row'}"
        return f"int{(self.high - self.low).bit_length()}, {often}{'' if self.symmetric else ' and zero point'}"


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


@dataclass(frozen=True)
class NvidiaBlocks:
    """torchao's NVFP4: as ``BlocksNvfp4``, but that no block's scale is below E4M3's smallest normal number.

    ``common`` is the one scale for all: a static number, "each time" for that of the input, or None for 1.
    """

    common: float | str | None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.common, str):
            common = x.float().abs().amax() / (LARGEST_FP8 * e2m1.LARGEST)
        else:
            common = x.new_tensor(1.0 if self.common is None else self.common, dtype=torch.float32)
        blocks = x.float().unflatten(-1, (-1, nvfp4.BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True) / e2m1.LARGEST / common
        scale = scale.clamp(2.0**-6, LARGEST_FP8).to(torch.float8_e4m3fn).float()
        codes = (blocks * ((1 / common) / scale)).clamp(-e2m1.LARGEST, e2m1.LARGEST)
        return (e2m1.decode(e2m1.encode(codes)) * (common * scale)).flatten(-2).to(x)

    def __str__(self) -> str:
        often = {"each time": ", and one each time", None: ""}.get(self.common, ", and one")  # type: ignore[arg-type]
        return f"nvfp4, a scale for 16 numbers{often}"
