"""Deriving an assignment: a pure function of the statistics, the weights and the recipe.

So another quant_level, alpha or format costs no calibration.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.models.parts import SharedInput
from sd_quant.quantization.assignment import FIXED_ALPHA, LayerAssignment, pieces, rewritten, rows_a_piece, some_rows
from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.low_rank import low_rank, rank_of
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.smoothing import SMOOTHINGS, pre_quant_scale
from sd_quant.quantization.statistics import LayerStatistics

ALPHAS = tuple(index / 10 for index in range(11))  # that alpha=auto tries
SEARCHED_OUTPUTS, SEARCHED_ROWS = 256, 64  # of a layer, that the search looks at
HEAD_WIDTHS = 16  # of which an attention's head is a multiple where its matrix products are quantized (ModelOpt)
HEADROOM = 2.0


def output_amax(weight: Tensor, layer: LayerAssignment) -> Tensor:
    """fp32 [out]: the range of each row of the rewritten weight."""
    return torch.cat([rewritten(piece, rows).abs().amax(dim=1) for piece, rows in pieces(weight, layer)])


def input_amax(weights: Sequence[Tensor]) -> Tensor:
    """fp32 [in]: the range of each column over all the weights, as the checkpoint has them."""
    columns = (piece.float().abs().amax(dim=0) for weight in weights for piece in weight.split(rows_a_piece(weight)))
    return reduce(torch.maximum, columns)


def fits_half(weight: Tensor, layer: LayerAssignment) -> bool:
    """Whether fp16 can hold the rewritten weight."""
    return all(torch.isfinite(rewritten(piece, rows).half()).all() for piece, rows in pieces(weight, layer))


def errors(layer: LayerAssignment, weight: Tensor, rows: Tensor, steps: int) -> tuple[float | None, float | None]:
    """Of one output, and accumulated over ``steps`` outputs, relative to the norm of the output.

    ``rows`` [n, in] are inputs, where a patch of a convolution is a row too; ``weight`` is the checkpoint's. None
    without rows or with an output of zeros.
    The first is ||quantized output - output|| / ||output||. The second is that of the sum of ``steps`` outputs, over
    sqrt(steps) times the norm of one: an input is rounded differently in every step, so errors that come from it add up
    like noise, a weight's error is the same in every step and adds up in full:  sqrt(of_input^2 + steps * of_weight^2).
    Found here, on pictures: an alpha that minimises the error of a single output moves too much into the weights.
    """
    inputs = rows.float()
    if layer.pre_quant_scale is not None:
        inputs = inputs * layer.pre_quant_scale
    near_inputs = inputs
    if layer.activation_format is not None:
        amax = torch.tensor(layer.activation_amax)
        near_inputs = fake_quantize(FORMATS[layer.activation_format], inputs, amax)
    squares = torch.zeros(4, dtype=torch.float64)  # of the output, its error, the input's part and the weight's
    for piece, some in pieces(weight, layer):
        smoothed = rewritten(piece, some)
        scales, form = some.weight_scales(smoothed), FORMATS[layer.format]
        weight_error = form.dequantize(form.quantize(smoothed, *scales), *scales).sub_(smoothed)
        output, of_input = inputs @ smoothed.T, (near_inputs - inputs) @ smoothed.T
        of_weight = inputs @ weight_error.T
        error = near_inputs @ weight_error.T + of_input
        if some.low_rank is not None:
            up, down = some.low_rank
            output = output + (inputs @ down.float().T) @ up.float().T
        squares += torch.stack([part.square().sum().double() for part in (output, error, of_input, of_weight)])
    output, error, of_input, of_weight = squares.tolist()
    if not output:
        return None, None
    return math.sqrt(error / output), math.sqrt((of_input + steps * of_weight) / output)


def with_output_range(layer: LayerAssignment, weight: Tensor) -> LayerAssignment:
    """The layer with the range of its rewritten weight."""
    amax = output_amax(weight, layer)
    return replace(layer, weight_amax=amax if layer.weight_axis == 0 else amax.amax(0, keepdim=True))


def with_ranges(layer: LayerAssignment, weight: Tensor, activation_amax: float, recipe: Recipe) -> LayerAssignment:
    """The layer quantized. Raises SdQuantError when a range is zero or a scale does not fit its type."""
    formats = recipe.formats_of(layer.role)
    if activation_amax == 0 and formats.activation is not None:
        raise SdQuantError(
            f"layer {layer.name} only ever saw zeros during calibration, so its input has no scale; "
            "calibrate with more prompts or a lower quant_level"
        )
    layer = replace(
        layer,
        format=formats.weight,
        activation_format=formats.activation,
        weight_axis=0 if recipe.per_channel and FORMATS[formats.weight].block is None else None,
        activation_amax=activation_amax,
        reason=None,
    )
    layer = with_output_range(layer, weight)
    try:
        layer.weight_scale, layer.activation_scale  # noqa: B018
        for piece, some in pieces(weight[:1], some_rows(layer, slice(1))):
            some.weight_scales(rewritten(piece, some))
    except OverflowError as error:
        raise SdQuantError(
            f"layer {layer.name} cannot be quantized: {error}; keep it out with a lower quant_level"
        ) from error
    return layer


def observed(values: Tensor, amax: float, role: str, recipe: Recipe) -> float:
    """The range of an input of a layer of this role by the recipe's observer; ``amax`` where no range is needed."""
    name = recipe.formats_of(role).activation
    if name is None:
        return amax
    return OBSERVERS[recipe.observer](values, amax, fmt=FORMATS[name], percent=recipe.observer_percentile)


def assign_convolution(
    layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """Not smoothed; the range of its input by the percentile calibrator, or by an observer of its sampled inputs."""
    if recipe.observer == "min_max":
        calibrator = PERCENTILE_CALIBRATORS[recipe.percentile_calibrator]
        amax = calibrator(statistics.amax, recipe.percentile, recipe.collect_method, recipe.batch_size)
    else:
        amax = observed(statistics.rows.values.float(), statistics.amax.max().item(), layer.role, recipe)
    layer = with_ranges(layer, weight, amax, recipe)
    return replace(layer, output_error=errors(layer, weight, statistics.rows.values, steps=1)[0])


def assign_readers(
    layers: Sequence[LayerAssignment],
    weights: Mapping[str, Tensor],
    weight_amax: Tensor,
    statistics: LayerStatistics,
    alpha: float | None,
    recipe: Recipe,
    most_outputs: int | None = None,
) -> list[LayerAssignment]:
    """Linears of one input with one smoothing vector. Readers that stay in high precision get the vector alone.

    ``weight_amax`` fp32 [in_features] is the largest of the quantized readers' weights. With ``most_outputs`` the
    layers are those of that many outputs each, evenly spaced, with a low-rank branch of a rank in proportion: one of
    the whole rank moved too much into the weights, which cost w4a4 0.7 dB on the shipped checkpoint.
    """
    channel_amax, rows = statistics.amax.amax(dim=0), statistics.rows.values
    scale = None if alpha is None else pre_quant_scale(channel_amax, weight_amax, alpha)
    smoothed = (rows.float(), channel_amax) if scale is None else (rows.float() * scale, channel_amax * scale)
    amax = observed(smoothed[0], smoothed[1].max().item(), layers[0].role, recipe)
    assigned = []
    for layer in layers:
        weight, layer = weights[layer.name], replace(layer, pre_quant_scale=scale, alpha=alpha)
        if layer.reason is None:
            rank, outputs = rank_of(recipe.rank, weight.shape), len(weight)
            if most_outputs is not None:
                weight = weight[:: -(-outputs // most_outputs)]
            if rank:
                branch = low_rank(rewritten(weight, layer), max(1, round(rank * len(weight) / outputs)))
                layer = replace(layer, low_rank=branch)
            layer = with_ranges(layer, weight, amax, recipe)
            of_one, accumulated = errors(layer, weight, rows, len(statistics.amax))
            layer = replace(layer, output_error=of_one, accumulated_error=accumulated)
        assigned.append(layer)
    return assigned


def search_alpha(
    layers: Sequence[LayerAssignment],
    weights: Mapping[str, Tensor],
    weight_amax: Tensor,
    statistics: LayerStatistics,
    recipe: Recipe,
) -> float:
    """The alpha of ``ALPHAS`` with the least sum of squared accumulated errors of the readers.

    It looks at ``SEARCHED_OUTPUTS`` output channels of each, evenly spaced, on the first ``SEARCHED_ROWS`` inputs, and
    takes the maximum as the range: all of them, or an observer, would cost more than everything else in a recipe. A
    low-rank branch is found for each alpha anew, in these outputs.
    """
    rows = replace(statistics.rows, values=statistics.rows.values[:SEARCHED_ROWS])
    statistics, recipe = replace(statistics, rows=rows), replace(recipe, observer="min_max")

    def cost(alpha: float) -> float:
        tried = assign_readers(layers, weights, weight_amax, statistics, alpha, recipe, SEARCHED_OUTPUTS)
        return sum((layer.accumulated_error or 0) ** 2 for layer in tried)

    return min(ALPHAS, key=lambda alpha: (cost(alpha), abs(alpha - FIXED_ALPHA)))  # nothing sampled: all cost nothing


def check_layers(
    roles: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
    attentions: Collection[str] = (),
    exclude: Collection[str] = (),
) -> None:
    """Raises ConfigError when the recipe does not fit the layers that it quantizes, before anything is calibrated."""
    level = recipe.quant_level
    if all(reason_kept(role, level) for role in roles.values()):
        raise ConfigError(
            f"quant_level is {level:g}, expected at least 2: all convolutions of this model stay in high precision"
        )
    if level >= 4 and not attentions:
        raise ConfigError(f"quant_level is {level:g}, expected at most 3: this model's attention is never quantized")
    for name, role in roles.items():
        if reason_kept(role, recipe.quant_level) or excluded(name, exclude):
            continue
        formats, shape = recipe.formats_of(role), shapes[name]
        rank = rank_of(recipe.rank, shape) if role != "conv" else 0
        if rank > min(shape):
            raise ConfigError(
                f"quantize.rank is {recipe.rank}, expected at most {min(shape)}, the shorter side of {name}; "
                "give a fraction below 1 instead, which is taken of every layer"
            )
        for form in filter(None, (formats.weight, formats.activation)):
            block, numbers = FORMATS[form].block, math.prod(shape[1:])
            if block is not None and numbers % block:
                raise ConfigError(
                    f"{form} has blocks of {block}, which do not divide the {numbers} inputs of {name}; exclude it "
                    "with quantize.exclude, or choose a preset whose blocks divide them"
                )


def excluded(name: str, exclude: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in exclude)


def derive(
    roles: Mapping[str, str],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
    inputs: Sequence[SharedInput],
    kept: Collection[str] = (),
    attentions: Mapping[str, int] = {},
    exclude: Collection[str] = (),
) -> dict[str, LayerAssignment]:
    """The assignment of every layer in ``roles`` (name to role), reading the weights of one input at a time.

    ``inputs`` are the family's shared inputs of linears, ``attentions`` its attentions with the width of a head.
    Whatever the level, the layers ``kept`` and those whose names match a pattern of ``exclude`` stay in high precision.
    Raises SdQuantError when a layer to quantize was never reached by calibration or saw only zeros, ConfigError when
    nothing is left to quantize.
    """
    assignment = {}
    for name, role in roles.items():
        reason = reason_kept(role, recipe.quant_level)
        if reason is None and excluded(name, exclude):
            reason = "excluded by the preset"
        if reason is None and name in kept:
            reason = "among the most sensitive layers"
        if reason is None and name not in statistics:
            raise SdQuantError(
                f"layer {name} was never reached during calibration, so it has no range to quantize with"
            )
        layer = LayerAssignment(name, role, tuple((weight := weight_of(name)).shape), reason=reason)
        if reason is None and role == "conv":
            layer = assign_convolution(layer, weight, statistics[name], recipe)
        assignment[name] = layer
    for shared in SMOOTHINGS[recipe.smoothing](inputs):
        assignment |= assign_input(shared, assignment, weight_of, statistics, recipe)
    if not any(layer.format for layer in assignment.values()):
        raise ConfigError(
            f"quant_level={recipe.quant_level:g} with {len(kept)} layers kept leaves no layer to quantize; "
            "raise quant_level or lower keep"
        )
    for name, head_width in attentions.items() if recipe.enable.attention is not None else ():
        row = LayerAssignment(name, "attention", (head_width,), reason=reason_kept("attention", recipe.quant_level))
        if row.reason is None and head_width % HEAD_WIDTHS:
            row = replace(row, reason=f"its heads are {head_width} wide, no multiple of {HEAD_WIDTHS}")
        if row.reason is None:
            amax = attention_amax(name, head_width, assignment, weight_of, statistics)
            row = replace(row, activation_format=recipe.enable.attention, attention_amax=amax)
        assignment[name] = row
    return assignment


def attention_amax(
    name: str,
    head_width: int,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
) -> tuple[float, float, float]:
    """Ranges of query, key and value as they are multiplied, from the inputs that calibration sampled.

    Query and key carry a fourth root of the head's width each (torch's scaled_dot_product_attention). The sample may
    have missed the largest by some, so the range is ``HEADROOM`` times what it holds: in a floating-point format a
    range that is twice too large costs nothing but the smallest of its 15 binades.
    """
    found = []
    for letter in "qkv":
        layer = assignment[f"{name}.to_{letter}"]
        output = statistics[layer.name].rows.values.float() @ weight_of(layer.name).float().T
        if layer.output_scale is not None:
            output = output * layer.output_scale
        found.append(HEADROOM * output.abs().max().item() * (1 if letter == "v" else head_width**-0.25))
    return found[0], found[1], found[2]


def assign_input(
    shared: SharedInput,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
) -> dict[str, LayerAssignment]:
    """What changes with one input: the rows of its readers and of its producer."""
    layers = [assignment[name] for name in shared.readers]
    quantized = [layer for layer in layers if layer.reason is None]
    if not quantized:
        return {}
    weights = {layer.name: weight_of(layer.name) for layer in layers}
    weight_amax = input_amax([weights[layer.name] for layer in quantized])
    known = (layers, weights, weight_amax, statistics[quantized[0].name])
    if recipe.alpha == "auto":
        chosen = assign_readers(*known, search_alpha(*known, recipe), recipe)
        fixed = assign_readers(*known, FIXED_ALPHA, recipe)
        chosen = [
            replace(layer, fixed_alpha_error=at.accumulated_error) for layer, at in zip(chosen, fixed, strict=True)
        ]
    else:
        chosen = assign_readers(*known, None if recipe.alpha is None else float(recipe.alpha), recipe)
    if shared.producer is None or recipe.alpha is None:
        return {layer.name: layer for layer in chosen if layer.format}
    taken_over = taking_over(shared, assignment.get(shared.producer), weight_of, chosen[0].pre_quant_scale)
    if taken_over is None or not all(fits_half(weights[layer.name], layer) for layer in chosen if not layer.format):
        return {layer.name: layer for layer in chosen if layer.format}
    return {layer.name: replace(layer, folded_into=shared.producer) for layer in chosen} | {taken_over.name: taken_over}


def taking_over(
    shared: SharedInput, producer: LayerAssignment | None, weight_of: Callable[[str], Tensor], scale: Tensor
) -> LayerAssignment | None:
    """The producer's row with ``scale`` on its first outputs, or None when fp16 cannot hold its parameters then."""
    weight = weight_of(shared.producer)
    output_scale = F.pad(scale, (0, len(weight) - len(scale)), value=1.0)
    if producer is None:
        producer = LayerAssignment(
            shared.producer, "norm", tuple(weight.shape), reason=f"takes over the smoothing of {shared.readers[0]}"
        )
    producer = replace(producer, output_scale=output_scale)
    if not fits_half(weight, producer):
        return None
    if producer.format:
        if producer.low_rank is not None:
            up, down = producer.low_rank
            producer = replace(producer, low_rank=((up * output_scale[:, None]).half(), down))
        producer = with_output_range(producer, weight)
    return producer
