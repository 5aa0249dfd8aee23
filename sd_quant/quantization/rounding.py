"""The codes of a weight in blocks: scales that err least, and GPTQ, with which not each number but the output does.

**Scales.** The scale that just holds a block's largest number is the best one for that number. A smaller one clips it
and has finer steps for all others; NVFP4's steps between 3, 4 and 6 are so coarse that a block may do better when its
largest number becomes 4 (four over six, Cook et al. 2025). A format's ``tried_scales`` are the candidates, of which
every block takes the one with the smallest squared error.

**GPTQ** (Frantar et al. 2022). Numbers are rounded one input after the other, and what rounding has done to the output
is made up for by the inputs that are still to come. With the inverse of the Hessian H = X^T X of the layer's inputs,
and U its upper Cholesky factor, rounding w_j to q_j changes w_k by -(w_j - q_j) U_jk / U_jj for all k > j. Inputs make
up for each other within ``COLUMNS`` of them, which bounds time and memory: a Hessian of all of a convolution's inputs
would be 11520 x 11520 in SDXL.

X are the rows that calibration samples. They are fewer than the inputs, so H has no inverse and is damped: with
``DAMPING`` times the mean of its diagonal, far more than the 0.01 for a whole calibration set. The road not taken is a
Hessian of all rows, summed up in calibration: on the shipped checkpoint it gained another 0.5 dB at W4A16, and at full
size it takes 1.2 GB in blocks of 256 inputs.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import with_weight_range
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.rotation import rotated
from sd_quant.quantization.statistics import LayerStatistics

COLUMNS = 2048
DAMPING = 1.0
FEWEST_ROWS = 16

ScalesOf = Callable[[Tensor], tuple[Tensor, ...]]  # of some columns [out, n]: those per block, then a global one if any


def with_rounded_weight(
    layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """``layer``, whose weight's format has blocks, with the codes, the scales and the branch that the recipe chooses.

    ``weight`` [out, in...] is the checkpoint's. Raises SdQuantError when GPTQ has fewer than ``FEWEST_ROWS`` rows.
    """
    rows = statistics.rows.values.float()
    if recipe.rounding == "gptq" and len(rows) < FEWEST_ROWS:
        raise SdQuantError(
            f"calibration has {len(rows)} rows of the input of {layer.name}, and GPTQ needs {FEWEST_ROWS} at least; "
            "raise calib_size or set quantize.rounding=nearest"
        )
    if layer.pre_quant_scale is not None:
        rows = rows * layer.pre_quant_scale
    if layer.low_rank is not None and recipe.branch_rounds:
        layer = with_refined_branch(layer, weight, rows, recipe)
    fmt, residual = FORMATS[layer.format], rotated(rewritten(weight, layer).flatten(1), layer.rotation)

    def scales_of(columns: Tensor) -> tuple[Tensor, ...]:
        return chosen_scales(fmt, columns, layer.weight_amax, recipe)

    if recipe.rounding == "gptq":
        return replace(layer, rounded=gptq(residual, rotated(rows, layer.rotation), fmt, scales_of))
    scales = scales_of(residual)
    return replace(layer, rounded=(fmt.quantize(residual, *scales), *scales))


def with_refined_branch(layer: LayerAssignment, weight: Tensor, rows: Tensor, recipe: Recipe) -> LayerAssignment:
    """``layer`` with a branch of the same rank that was fitted ``recipe.branch_rounds`` times to what rounding leaves.

    The residual is rounded to nearest there: rounding it by GPTQ each time gained nothing and took four times as long.
    """
    fmt, factor = FORMATS[layer.format], torch.linalg.cholesky(damped_hessian(rows))
    whole = rewritten(weight, replace(layer, low_rank=None))
    for _ in range(recipe.branch_rounds):
        residual = rotated(rewritten(weight, layer), layer.rotation)
        scales = chosen_scales(fmt, residual, layer.weight_amax, recipe)
        rounded = rotated(fmt.dequantize(fmt.quantize(residual, *scales), *scales), layer.rotation)
        branch = low_rank(whole - rounded, len(layer.low_rank[1]), factor)
        layer = with_weight_range(replace(layer, low_rank=branch), weight)
    return layer


def chosen_scales(fmt: Format, columns: Tensor, amax: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """The format's own scales of some columns [out, n], or where the recipe searches those that err least."""
    return (
        least_error(fmt, columns, fmt.tried_scales(columns, amax)) if recipe.scale_search else fmt.scales(columns, amax)
    )


def least_error(fmt: Format, x: Tensor, tried: tuple[tuple[Tensor, ...], ...]) -> tuple[Tensor, ...]:
    """For every block of ``x`` the scale of those ``tried`` with the smallest squared error; the global one stays."""
    best = least = torch.empty(0)
    for scales in tried:
        errors = (fmt.dequantize(fmt.quantize(x, *scales), *scales) - x).square().unflatten(-1, (-1, fmt.block)).sum(-1)
        best = torch.where(errors < least, scales[0], best) if len(best) else scales[0]
        least = torch.minimum(errors, least) if len(least) else errors
    return (best, *tried[0][1:])


def gptq(weight: Tensor, rows: Tensor, fmt: Format, scales_of: ScalesOf) -> tuple[Tensor, ...]:
    """Codes [out, in] of ``weight`` fp32 [out, in] and their scales, for inputs like ``rows`` [n, in].

    Scales are chosen when their block's turn comes, for what is left to round there. ``fmt`` has blocks.
    """
    codes, scales = [], []
    for start in range(0, weight.shape[1], COLUMNS):
        left = weight[:, start : start + COLUMNS].T.clone()  # [in, out], so that what is rounded together lies together
        factor = inverse_factor(rows[:, start : start + COLUMNS])
        for first in range(0, len(left), fmt.block):
            block, later = slice(first, first + fmt.block), slice(first + fmt.block, None)
            chosen = scales_of(left[block].T)
            scales.append(chosen[0])
            rounded, errors = round_block(left[block], factor[block, block], fmt, chosen)
            codes.append(rounded)
            left[later] -= factor[block, later].T @ errors
    return (torch.cat(codes).T.contiguous(), torch.cat(scales, 1), *chosen[1:])


def round_block(block: Tensor, factor: Tensor, fmt: Format, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The codes of a block [n, out], which is used up, and the errors that later inputs have to make up for."""
    codes, errors = [], torch.empty_like(block)
    for index, numbers in enumerate(block):
        column = numbers[:, None]
        tried = fmt.quantize(column, *scales)
        codes.append(tried[:, 0])
        errors[index] = (column - fmt.dequantize(tried, *scales))[:, 0] / factor[index, index]
        block[index + 1 :] -= factor[index, index + 1 :, None] * errors[index]
    return torch.stack(codes), errors


def inverse_factor(rows: Tensor) -> Tensor:
    """The upper Cholesky factor [in, in] of the inverse of the damped Hessian of inputs ``rows`` [n, in].

    An input that is always zero has the damping alone, and makes up for nothing.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped_hessian(rows)))
    return torch.linalg.cholesky(inverse, upper=True)


def damped_hessian(rows: Tensor) -> Tensor:
    """The Hessian [in, in] of inputs ``rows`` [n, in], in units of its mean diagonal, and damping on the diagonal."""
    hessian = rows.T @ rows
    hessian /= hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    hessian.diagonal().add_(DAMPING)
    return hessian
