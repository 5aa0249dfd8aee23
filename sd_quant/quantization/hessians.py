"""Hessians X^T X of layers' inputs for GPTQ, summed over the calibration pass, in diagonal blocks.

A whole Hessian of SDXL's widest convolution has 11520 x 11520 numbers; diagonal blocks of 256 inputs take 1 kB for each
input of a layer. Layers with one common input have one Hessian, summed at the first of these layers. The rows of X are
all tokens for a linear and padded patches for a convolution: every k-th position, at most ``MOST_POSITIONS`` per image
and call, with a start that changes in each step. Sums are fp32 in the order of calls: other batches, segments and
processes change them by about 1e-6 of the largest diagonal element, which GPTQ's damping covers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.models.parts import SharedInput
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.rotation import rotated

MOST_POSITIONS = 1024  # of a convolution's outputs in an image and call
ROWS_AT_ONCE = 2048  # rows that are copied and multiplied at a time
LARGEST = 65504.0  # inputs are clamped to fp16's largest number, as in the sample


@dataclass(frozen=True, slots=True)
class Hessians:
    """Block size and layers of the Hessians that calibration sums."""

    block: int  # inputs of a diagonal block, at most
    readers: tuple[tuple[str, ...], ...]  # groups of layers that read one tensor; a convolution is its own group


NO_HESSIANS = Hessians(0, ())


def hessians_of(roles: Mapping[str, str], inputs: Sequence[SharedInput], recipe: Recipe) -> Hessians:
    """Specify the Hessians that GPTQ needs for a recipe: for all layers that some ``quant_level`` would quantize.

    ``roles`` has the role of every layer by name, ``inputs`` are the tensors that several linears read.
    """
    if not recipe.hessian or recipe.rounding != "gptq":
        return NO_HESSIANS
    names = [
        name for name, role in roles.items() if role != "excluded" and FORMATS[recipe.formats_of(role).weight].searched
    ]
    together = [tuple(name for name in shared.readers if name in names) for shared in inputs]
    alone = [(name,) for name in names if not any(name in readers for readers in together)]
    return Hessians(recipe.hessian, (*filter(None, together), *alone))


def blocks_of(width: int, block: int) -> tuple[int, int, int]:
    """Return a Hessian's shape (blocks, n, n) for ``width`` inputs, n <= ``block``. Zeros fill up the last block."""
    size = min(block, width)
    return -(-width // size), size, size


def hessian_bytes(widths: Mapping[str, int], hessians: Hessians) -> int:
    """Return the bytes of these Hessians; ``widths`` has, by layer, the number of inputs of one output element."""
    shapes = [blocks_of(widths[readers[0]], hessians.block) for readers in hessians.readers]
    return sum(4 * blocks * rows * columns for blocks, rows, columns in shapes)


def add_rows(hessian: Tensor, layer: nn.Module, x: Tensor, step: int) -> None:
    """Add X^T X of a layer's input ``x`` [samples, ...] in one denoising step to its ``hessian`` [blocks, n, n]."""
    blocks, size, _ = hessian.shape
    for some in rows_of(layer, x, step).split(ROWS_AT_ONCE):
        rows = some.float().clamp(-LARGEST, LARGEST)
        parts = F.pad(rows, (0, blocks * size - rows.shape[1])).view(len(rows), blocks, size)
        hessian.baddbmm_(parts.permute(1, 2, 0), parts.transpose(0, 1))


def rows_of(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """Return the rows [n, width] of the matrix that ``layer`` multiplies: tokens, or patches for a convolution.

    Of the patches every k-th is returned, at most ``MOST_POSITIONS`` per image, with a start that depends on ``step``.
    """
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    padded = F.pad(x, layer._reversed_padding_repeated_twice)
    for axis, (kernel, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
    ):
        padded = padded.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    samples, channels, rows, columns, *kernel_size = padded.shape  # a view, of every patch
    every = -(-rows * columns // MOST_POSITIONS)
    if every == 1:
        return padded.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1)
    places = range(step % every, rows * columns, every)
    taken = padded[:, :, [place // columns for place in places], [place % columns for place in places]]
    return taken.transpose(1, 2).flatten(0, 1).flatten(1)


def diagonal_blocks(hessian: Tensor, width: int, factors: Tensor | None, rotation: int) -> list[Tensor]:
    """Return the blocks, fp32 [n, n], of the Hessian R^T diag(factors) H diag(factors) R of smoothed, rotated inputs.

    H is the ``hessian`` of ``width`` inputs, ``factors`` [width] the smoothing factors (None: no smoothing). R rotates
    groups of ``rotation`` inputs; ``rotation`` divides the size of every block.
    """
    blocks = []
    for index, block in enumerate(hessian):
        inputs = slice(index * len(block), min((index + 1) * len(block), width))
        block = block[: inputs.stop - inputs.start, : inputs.stop - inputs.start]
        if factors is not None:
            block = factors[inputs, None] * block * factors[inputs]
        blocks.append(rotated(rotated(block, rotation).T, rotation))  # R and the block are symmetric
    return blocks
