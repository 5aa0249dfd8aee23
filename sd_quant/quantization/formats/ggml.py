"""ggml's formats of weights in GGUF files: Q4_1, Q5_0, Q5_1, Q8_0, and the K-quants Q4_K, Q5_K and Q6_K.

    Q5_0, Q8_0        x = scale * q                   fp16 scale, one per 32 numbers
    Q4_1, Q5_1        x = scale * q + least           fp16 scale and least, one each per 32 numbers
    Q4_K, Q5_K        x = d * s * q - dmin * m        fp16 d and dmin per 256 numbers, s and m 0..63 per 32 numbers
    Q6_K              x = d * s * q                   fp16 d per 256 numbers, s -128..127 per 16 numbers

Codes q with a least number or a minimum m begin at zero. All arithmetic is fp32 in the order of ggml's own decoder
(``dequantize_row_*`` in ggml-quants.c), equal to the bit.

``scales`` maps the smallest and the largest number of a block to the first and the last code. ``tried_scales`` starts
near that scale, fits scale and least number to the codes by least squares, as ggml's ``make_qkx2_quants`` does, block
by block, and keeps the best; d and dmin are refitted when s and m are integers. The squared error for Gaussian numbers
is 1 to 20 % below other encoders' (``test_ggml``). Alternative not taken: ggml's weights in that fit, ``|x|`` plus its
root mean square, which approximate unknown layer inputs; here GPTQ uses the recorded inputs instead.

No DequantizeLinear of ONNX has two levels of scales, or a least number that is no multiple of the scale, so graphs hold
the decoded weight in fp16.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.quantization.formats.blocks import blocks, per_number

SHARES = (0.92, 0.96, 1.0, 1.04, 1.08)  # of the scale that spans a block, tried for a weight
FITS = 2  # rounds of fitting scale and least number to the codes, for each share
SUPER = 256  # numbers of a K-quant's block
LARGEST_HALF = 65504.0


def half(x: Tensor) -> Tensor:
    """Round ``x`` to fp16 and return it as fp32. Raises OverflowError for magnitudes above 65504 and for NaN."""
    if not (x.abs() <= LARGEST_HALF).all():
        raise OverflowError(f"a scale or least number of {x.abs().max().item():g} is none of fp16")
    return x.half().float()


def over(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale``, and zero where the scale is zero."""
    return torch.where(scale == 0, 0.0, x / scale)


@dataclass(frozen=True)
class Lines:
    """Affine quantization of blocks [..., size] with one line each, x = scale * q + least, and q in low .. high."""

    low: int
    high: int
    least: bool  # whether there is a least number; False: it is zero
    below_zero: bool = False  # whether least numbers are zero at most, as a minimum m is

    def spanned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and least number [..., 1] that span a block (without ``least``: its largest magnitude)."""
        if self.least:
            small, large = torch.aminmax(x, dim=-1, keepdim=True)
            small = small.clamp(max=0) if self.below_zero else small
            return (large - small) / self.high, small
        small, large = torch.aminmax(x, dim=-1, keepdim=True)
        peak = torch.maximum(-small, large)
        if -self.low != self.high:
            peak = torch.where(large > -small, -peak, peak)  # which gets the code ``low``, the farthest from zero
        return peak / -self.low, torch.zeros_like(peak)

    def codes(self, x: Tensor, scale: Tensor, least: Tensor) -> Tensor:
        return over(x - least, scale).round().clamp(self.low, self.high)

    def fitted(self, x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and least number with the smallest squared error for these codes (linear regression)."""
        through_zero = over((x * codes).sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True))
        if not self.least:
            return through_zero, torch.zeros_like(through_zero)
        around = codes - codes.mean(-1, keepdim=True)
        scale = over((x * around).sum(-1, keepdim=True), around.square().sum(-1, keepdim=True))
        least = (x - scale * codes).mean(-1, keepdim=True)
        if not self.below_zero:
            return scale, least
        return torch.where(least > 0, through_zero, scale), least.clamp(max=0)

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each block's best scale and least number: ``spanned``, or a fit started near that scale."""
        scale, least = spanned = self.spanned(x)
        fewest = self.error(x, scale, least)
        for share in SHARES:
            tried = share * spanned[0], spanned[1]
            for _ in range(FITS):
                tried = self.fitted(x, self.codes(x, *tried))
            error = self.error(x, *tried)
            better = error < fewest
            scale, least = torch.where(better, tried[0], scale), torch.where(better, tried[1], least)
            fewest = torch.minimum(error, fewest)
        return scale, least

    def error(self, x: Tensor, scale: Tensor, least: Tensor) -> Tensor:
        return (scale * self.codes(x, scale, least) + least - x).square().sum(-1, keepdim=True)


SIX_BITS = Lines(-63, 63, least=False)  # scales and minimums are never negative, so they use 0..63


@dataclass(frozen=True)
class Blocks(ABC):
    """Common arithmetic of all ggml formats; subclasses expand stored scales to scale and least number (``lines``)."""

    line: Lines
    size: int = 32  # numbers of one line

    @abstractmethod
    def lines(self, x: Tensor, *scales: Tensor) -> tuple[Tensor, Tensor]:
        """Expand the stored ``scales`` to a scale and a least number for each element of ``x``."""

    def quantize(self, x: Tensor, *scales: Tensor) -> Tensor:
        return self.line.codes(x.float(), *self.lines(x, *scales)).to(torch.int8)

    def dequantize(self, codes: Tensor, *scales: Tensor) -> Tensor:
        scale, least = self.lines(codes, *scales)
        return codes * scale + least


@dataclass(frozen=True)
class OneLine(Blocks):
    """A ggml format with one fp16 scale, and for Q4_1 and Q5_1 one fp16 least number, for every 32 numbers."""

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """Return the scale [..., n / 32] of each block, and its least number if the format has it; ignores ``amax``."""
        return self.stored(*self.line.spanned(blocks(x, self.size)))

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        return self.scales(x, amax), self.stored(*self.line.best(blocks(x, self.size)))

    def stored(self, *line: Tensor) -> tuple[Tensor, ...]:
        return tuple(half(each.squeeze(-1)) for each in line[: 1 + self.line.least])

    def lines(self, x: Tensor, *scales: Tensor) -> tuple[Tensor, Tensor]:
        scale, *least = scales
        each = per_number(scale, x.shape[-1])
        return each, per_number(least[0], x.shape[-1]) if least else torch.zeros_like(each)


@dataclass(frozen=True)
class KQuant(Blocks):
    """A K-quant: scales (and minimums) of sub-blocks are integers, times an fp16 scale per block of 256 numbers."""

    integers: Lines = SIX_BITS  # integers that stand for sub-blocks' scales and minimums

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """Return (d, s), or with minimums (d, dmin, s, m): d [..., n / 256], s [..., n / size]; ignores ``amax``."""
        return self.stored(*self.line.spanned(self.sub_blocks(x)))

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        searched = self.stored(*self.line.best(self.sub_blocks(x)))
        return self.scales(x, amax), searched, self.refitted(x, *searched)

    def sub_blocks(self, x: Tensor) -> Tensor:
        """Split ``x`` [..., n] into sub-blocks [..., n / 256, 256 / size, size]."""
        return blocks(x, SUPER).unflatten(-1, (-1, self.size))

    def stored(self, scale: Tensor, least: Tensor) -> tuple[Tensor, ...]:
        """Convert sub-blocks' scales and least numbers [..., n / 256, 256 / size, 1] to the tensors of ``scales``."""
        wanted = [each.squeeze(-1) for each in (scale, -least)[: 1 + self.line.least]]
        steps = [half(self.integers.spanned(each)[0]) for each in wanted]
        integers = [
            self.integers.codes(each, step, torch.zeros_like(step)) for each, step in zip(wanted, steps, strict=True)
        ]
        return *(step.squeeze(-1) for step in steps), *(each.flatten(-2) for each in integers)

    def refitted(self, x: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        """Refit d (and dmin) by least squares for fixed integers s (and m) and codes; return all scales."""
        codes, numbers = self.quantize(x, *scales).float(), x.shape[-1]
        count = len(scales) // 2
        slopes = blocks(codes * per_number(scales[count], numbers), SUPER)
        numbers_of = blocks(x, SUPER)
        if count == 1:
            fitted = [over((numbers_of * slopes).sum(-1), slopes.square().sum(-1))]
        else:
            minimums = -blocks(per_number(scales[3], numbers), SUPER)
            ss, sm, mm = (slopes * slopes).sum(-1), (slopes * minimums).sum(-1), (minimums * minimums).sum(-1)
            xs, xm, determinant = (numbers_of * slopes).sum(-1), (numbers_of * minimums).sum(-1), ss * mm - sm * sm
            fitted = [over(xs * mm - xm * sm, determinant), over(xm * ss - xs * sm, determinant)]
        return *map(half, fitted), *scales[count:]

    def lines(self, x: Tensor, *scales: Tensor) -> tuple[Tensor, Tensor]:
        each = [per_number(scale, x.shape[-1]) for scale in scales]
        if len(each) == 2:
            return each[0] * each[1], torch.zeros_like(each[0])
        return each[0] * each[2], -(each[1] * each[3])


Q4_1 = OneLine(Lines(0, 15, least=True))
Q5_0 = OneLine(Lines(-16, 15, least=False))
Q5_1 = OneLine(Lines(0, 31, least=True))
Q8_0 = OneLine(Lines(-127, 127, least=False))
Q4_K = KQuant(Lines(0, 15, least=True, below_zero=True))
Q5_K = KQuant(Lines(0, 31, least=True, below_zero=True))
Q6_K = KQuant(Lines(-32, 31, least=False), 16, Lines(-128, 127, least=False))
