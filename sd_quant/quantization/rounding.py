"""Quantization of weights of four bits or in blocks, better than round-to-nearest: a search of scales, and GPTQ.

**Scales.** A scale that clips a block's largest number has finer steps for its other numbers; NVFP4's steps between 3,
4 and 6 are so coarse that some blocks err less when their largest number becomes 4 (four over six, Cook et al. 2025).
Every block, or every row of a format without blocks, gets the best of the format's ``tried_scales``.

**GPTQ** (Frantar et al. 2022) compensates the rounding of one input in the inputs that follow. With the inverse of the
Hessian H = X^T X of the layer's inputs, and U its upper Cholesky factor, rounding w_j to q_j changes w_k by
-(w_j - q_j) U_jk / U_jj for all k > j, within ``COLUMNS`` inputs, which bounds time and memory. X are the sampled rows,
fewer than the inputs, so H is damped far more than with a whole calibration set. Alternative not taken: H summed over
all rows, in diagonal blocks. With 256 inputs a block that gained 0.5 dB at W4A16 and next to nothing with NVFP4, for
twice the calibration time.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.formats.blocks import per_number
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import with_weight_range
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.rotation import rotated
from sd_quant.quantization.statistics import LayerStatistics

COLUMNS = 2048
STEP = 64  # inputs that are rounded before later ones are compensated, where the format has no blocks
DAMPING = 1.0  # of the mean diagonal
FEWEST_ROWS = 16

ScalesOf = Callable[[Tensor], tuple[Tensor, ...]]  # columns [out, n] -> scales of blocks, and a global one [] if any


def with_rounded_weight(
    layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """Quantize a layer's weight by GPTQ or to nearest, as the recipe says, and return ``layer`` with codes and scales.

    ``weight`` [out, in...] is the checkpoint's. Raises SdQuantError when GPTQ has fewer than ``FEWEST_ROWS`` rows.
    """
    fmt, residual = FORMATS[layer.format], rotated(rewritten(weight, layer).flatten(1), layer.rotation)

    def scales_of(columns: Tensor) -> tuple[Tensor, ...]:
        return chosen_scales(fmt, columns, layer.weight_amax, recipe)

    if recipe.rounding == "gptq":
        return replace(layer, rounded=gptq(residual, hessians_of_layer(layer, statistics), fmt, scales_of))
    scales = scales_of(residual)
    return replace(layer, rounded=(fmt.quantize(residual, *scales), *scales))


def with_refined_branch(
    layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """Refit a low-rank branch to the layer's rounding error, ``branch_rounds`` times.

    The residual is rounded to nearest here: GPTQ in every round gained nothing and took four times as long.
    """
    if layer.low_rank is None or not recipe.branch_rounds:
        return layer
    fmt, rank = FORMATS[layer.format], len(layer.low_rank[1])
    factor = torch.linalg.cholesky(damped_hessian(smoothed_rows(layer, statistics)))
    for _ in range(recipe.branch_rounds):
        residual = rotated(rewritten(weight, layer), layer.rotation)
        scales = chosen_scales(fmt, residual, layer.weight_amax, recipe)
        rounded = rotated(fmt.dequantize(fmt.quantize(residual, *scales), *scales), layer.rotation)
        left = rewritten(weight, replace(layer, low_rank=None)) - rounded
        layer = with_weight_range(replace(layer, low_rank=low_rank(left, rank, factor)), weight)
    return layer


def smoothed_rows(layer: LayerAssignment, statistics: LayerStatistics) -> Tensor:
    """Return the sampled inputs after smoothing, fp32 [n, in]."""
    rows = statistics.rows.values.float()
    if layer.pre_quant_scale is None:
        return rows
    return rows * layer.pre_quant_scale


def chosen_scales(fmt: Format, columns: Tensor, amax: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """Return the scales of some ``columns`` [out, n] of a weight with ranges ``amax``, searched if the recipe says so.

    A search minimizes the squared error of each block; without blocks, of each row, or of the tensor for ``amax`` [1].
    """
    if fmt.static_scale:
        amax = amax[:, None] if len(amax) > 1 else amax[0]
    if not recipe.scale_search:
        return fmt.scales(columns, amax)

    def errors_of(scales: tuple[Tensor, ...]) -> Tensor:
        squares = (fmt.dequantize(fmt.quantize(columns, *scales), *scales) - columns).square()
        return squares.sum_to_size(amax.shape) if fmt.block is None else squares.unflatten(-1, (-1, fmt.block)).sum(-1)

    best, *others = fmt.tried_scales(columns, amax)
    least = errors_of(best)
    for scales in others:
        errors = errors_of(scales)
        better, least = errors < least, torch.minimum(errors, least)
        best = tuple(  # what blocks have in common is the same in all; a block may have several scales
            torch.where(per_number(better, new.shape[-1]) if better.ndim else better, new, old)
            if new.shape[-1:] >= better.shape[-1:]
            else old
            for new, old in zip(scales, best, strict=True)
        )
    return best


def hessians_of_layer(layer: LayerAssignment, statistics: LayerStatistics) -> list[Tensor]:
    """Return the damped Hessians, fp32 [n, n] per diagonal block, of a layer's smoothed and rotated inputs.

    Raises SdQuantError for fewer than ``FEWEST_ROWS`` sampled rows.
    """
    count = len(statistics.rows.values)
    if count < FEWEST_ROWS:
        raise SdQuantError(
            f"calibration has {count} rows of the input of {layer.name}, and GPTQ needs {FEWEST_ROWS} at least; "
            "raise calib_size or set quantize.rounding=nearest"
        )
    rows = rotated(smoothed_rows(layer, statistics), layer.rotation)
    return [damped_hessian(part) for part in rows.split(COLUMNS, dim=1)]


def gptq(weight: Tensor, hessians: Iterable[Tensor], fmt: Format, scales_of: ScalesOf) -> tuple[Tensor, ...]:
    """Quantize ``weight``, fp32 [out, in], by GPTQ: return codes [out, in] and scales.

    ``hessians`` are damped diagonal blocks [n, n], within which inputs compensate. ``scales_of`` gets the columns of a
    block of the format after compensation of earlier inputs; for scales per row or tensor, the whole weight before any.
    """
    codes, scales, step = [], list[tuple[Tensor, ...]](), fmt.block or STEP
    known, start = scales_of(weight) if fmt.static_scale or fmt.row_scale else (), 0
    for hessian in hessians:
        left = weight[:, start : start + len(hessian)].T.clone()  # [in, out]: what is rounded together lies together
        factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
        for first in range(0, len(left), step):
            block, later = slice(first, first + step), slice(first + step, None)
            chosen = tuple(of_input(each, start + first, weight.shape[1]) for each in known) or scales_of(left[block].T)
            scales.append(chosen)
            rounded, errors = round_block(left[block], factor[block, block], fmt, chosen)
            codes.append(rounded)
            left[later] -= factor[block, later].T @ errors
        start += len(hessian)
    of_all = (torch.cat(each, 1) if each[0].ndim else each[0] for each in zip(*scales, strict=True))
    return (torch.cat(codes).T.contiguous(), *(known or of_all))


def round_block(block: Tensor, factor: Tensor, fmt: Format, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Quantize ``block`` [n, out] by GPTQ with Cholesky ``factor`` [n, n]; overwrite it; return codes and errors."""
    codes, errors = [], torch.empty_like(block)
    for index, numbers in enumerate(block):
        column, own = numbers[:, None], [of_input(each, index, len(block)) for each in scales]
        tried = fmt.quantize(column, *own)
        codes.append(tried[:, 0])
        errors[index] = (column - fmt.dequantize(tried, *own))[:, 0] / factor[index, index]
        block[index + 1 :] -= factor[index, index + 1 :, None] * errors[index]
    return torch.stack(codes), errors


def of_input(scale: Tensor, index: int, inputs: int) -> Tensor:
    """Select column ``index`` of ``inputs`` from block scales [out, blocks]: [out, 1]; a scalar is unchanged."""
    return scale[:, index * scale.shape[1] // inputs, None] if scale.ndim else scale


def damped_hessian(rows: Tensor) -> Tensor:
    """Return the Hessian [in, in] of ``rows`` [n, in] over its mean diagonal, plus ``DAMPING`` on the diagonal."""
    hessian = rows.T @ rows
    hessian = hessian / hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    hessian.diagonal().add_(DAMPING)
    return hessian
