"""Simulated quantization (rounding) of layer inputs, by the formulas of other tools' layers.

The formats' modules name the libraries. Scales are computed in fp32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.quantization.formats import e2m1, nvfp4
from sd_quant.quantization.formats.integers import INT4
from sd_quant.quantization.rotation import rotation_matrix

LARGEST_FP8 = 448.0  # of E4M3


class Inputs(Protocol):
    """Rounding of a layer's input [..., in] or [batch, in, height, width], as the tool that runs the layer rounds."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def __str__(self) -> str:
        """Return a description for a table: ``int8, one scale``."""
        ...


@dataclass(frozen=True)
class Multiplied:
    """Inputs multiplied by a ``pre_quant_scale`` [in], then rounded by ``then``, if given."""

    factor: Tensor
    convolution: bool
    then: Inputs | None = None

    def __call__(self, x: Tensor) -> Tensor:
        factor = self.factor.to(x)
        x = x * (factor[:, None, None] if self.convolution else factor)
        return x if self.then is None else self.then(x)

    def __str__(self) -> str:
        return f"smoothed, {self.then or 'high precision'}"


def multipliers_of(inputs: Inputs | None) -> Iterator[Tensor]:
    """Yield the factors [in] that multiply inputs before rounding."""
    while isinstance(inputs, Multiplied):
        yield inputs.factor.float()
        inputs = inputs.then


def smoothed(inputs: Inputs | None, x: Tensor) -> Tensor:
    """Multiply ``x`` by the smoothing factors in ``inputs``, without rounding."""
    return x if not isinstance(inputs, Multiplied) else smoothed(inputs.then, replace(inputs, then=None)(x))


@dataclass(frozen=True)
class Columns:
    """Inputs [..., in] split into ``widths`` columns, each part with its own rounding."""

    parts: tuple[Inputs, ...]
    widths: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        pieces = x.split(self.widths, -1)
        return torch.cat([part(piece) for part, piece in zip(self.parts, pieces, strict=True)], -1)

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(map(str, self.parts)))


@dataclass(frozen=True)
class ManyRows:
    """Rounding of inputs [..., in] only if they have at least ``least`` rows."""

    then: Inputs
    least: int

    def __call__(self, x: Tensor) -> Tensor:
        return x if x.numel() < self.least * x.shape[-1] else self.then(x)

    def __str__(self) -> str:
        return f"{self.then}, of {self.least} or more"


@dataclass(frozen=True)
class Rotated:
    """Inputs [..., in] rotated in groups by a symmetric orthogonal matrix, rounded, and rotated back."""

    then: Inputs
    group: int
    matrix: Callable[[int], Tensor] = rotation_matrix

    def __call__(self, x: Tensor) -> Tensor:
        matrix = self.matrix(self.group).to(x.device)
        return in_groups(self.then(in_groups(x.float(), matrix)), matrix).to(x)

    def __str__(self) -> str:
        return f"{self.then}, rotated by {self.group}"


def in_groups(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply groups of the last axis of ``x`` [..., n] by ``matrix`` [group, group]."""
    return (x.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


@dataclass(frozen=True)
class RowInteger:
    """Symmetric integers with a scale per row of the input [..., in]: its largest magnitude / ``high``."""

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
    """Asymmetric uint8: scale and zero point per row of the input [..., in], from its minimum and maximum."""

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
    """torchao's integers, with a scale per row of the input [..., in], a scale of the whole input, or a static scale.

    A symmetric range is the largest magnitude on both sides of zero; an asymmetric one is from the minimum to the
    maximum and includes zero.
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


@dataclass(frozen=True)
class BlockInteger:
    """nunchaku's INT4 of the input [..., in] in blocks of 64: a block's scale is its largest magnitude / 7.

    An ``offset`` [in], added before and subtracted after, makes all inputs positive: codes are 0..15, the scale / 15.
    """

    offset: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        offset = 0.0 if self.offset is None else self.offset.to(x.device)
        low, high = (-7, 7) if self.offset is None else (0, 15)
        blocks = in_blocks(x.float() + offset, INT4.size)
        scale = blocks.abs().amax(-1, keepdim=True) / high
        codes = torch.where(scale > 0, blocks / scale, 0.0).round().clamp(low, high)
        return ((codes * scale).flatten(-2)[..., : x.shape[-1]] - offset).to(x)

    def __str__(self) -> str:
        return f"{'int4' if self.offset is None else 'uint4'}, a scale for {INT4.size} numbers"


@dataclass(frozen=True)
class StaticFloat8:
    """E4M3, or another 8-bit float ``dtype``, with one static scale."""

    scale: float
    dtype: torch.dtype = torch.float8_e4m3fn
    reciprocal: bool = False  # whether inputs are multiplied by 1 / scale, which rounds otherwise than a division

    def __call__(self, x: Tensor) -> Tensor:
        scale, largest = torch.tensor(self.scale, device=x.device), torch.finfo(self.dtype).max
        codes = (x.float() * (1.0 / scale) if self.reciprocal else x.float() / scale).clamp(-largest, largest)
        return (codes.to(self.dtype).float() * scale).to(x)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {'a plain cast' if self.scale == 1 else 'one scale'}"


@dataclass(frozen=True)
class RowFloat8:
    """E4M3 with a scale per row of the input [..., in], or of the whole input: its largest magnitude / 448."""

    whole: bool = False
    least: float = 0.0  # lower bound of the largest magnitude

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.float().abs().amax() if self.whole else x.float().abs().amax(-1, keepdim=True)
        scale = (largest.clamp(min=self.least) / LARGEST_FP8).clamp(min=1e-12)
        codes = (x.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return (codes.float() * scale).to(x)

    def __str__(self) -> str:
        return f"float8_e4m3fn, a scale {'each time' if self.whole else 'a row'}"


@dataclass(frozen=True)
class BlockFloat8:
    """E4M3 with a scale per ``block`` inputs of a row [..., in]: SGLang's ``per_token_group_quant``.

    Inputs are multiplied by 448 / amax, codes by amax / 448, both in fp32; amax is at least 1e-10.
    """

    block: int

    def __call__(self, x: Tensor) -> Tensor:
        blocks = in_blocks(x, self.block)
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10)
        codes = (blocks * (LARGEST_FP8 / largest)).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return (codes.float() * (largest * (1 / LARGEST_FP8))).flatten(-2)[..., : x.shape[-1]].to(x)

    def __str__(self) -> str:
        return f"float8_e4m3fn, a scale for {self.block} numbers"


@dataclass(frozen=True)
class Nvfp4:
    """E2M1 in blocks of 16 with scales in E4M3, which one fp32 scale of the whole input multiplies."""

    common: float | None  # the scale of all; None: from the largest number each time
    smallest: float = nvfp4.SMALLEST_E4M3  # of a block's scale in E4M3
    reciprocal: bool = False  # whether inputs are multiplied by (1 / common) / scale, as torchao does
    also: str = ""  # on the common scale, for ``str``

    def __call__(self, x: Tensor) -> Tensor:
        blocks = in_blocks(x, nvfp4.BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        common = (
            largest.amax() / (LARGEST_FP8 * e2m1.LARGEST)
            if self.common is None
            else x.new_tensor(self.common, dtype=torch.float32)
        )
        wanted = torch.where(largest > 0, largest / e2m1.LARGEST / common, 0.0)  # of zeros alone, ``common`` is 0 too
        scale = wanted.clamp(self.smallest, LARGEST_FP8).to(torch.float8_e4m3fn).float()
        product = scale * common
        scaled = blocks * ((1 / common) / scale) if self.reciprocal else blocks / product
        scaled = torch.where(product > 0, scaled, 0.0).clamp(-e2m1.LARGEST, e2m1.LARGEST)
        return (e2m1.decode(e2m1.encode(scaled)) * product).flatten(-2)[..., : x.shape[-1]].to(x)

    def __str__(self) -> str:
        return f"nvfp4, a scale for 16 numbers{self.also}"


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Split ``x`` [..., n], in fp32 and padded with zeros, into blocks [..., blocks, block]."""
    return F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
