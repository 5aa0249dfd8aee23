"""The assignment: one row per layer, saying how it is quantized or why it is not. Everything downstream reads it.

Deriving it is a pure function of the statistics, the weights and the recipe, so another quant_level or alpha costs no
calibration. The torch simulation, the ONNX export and the layer report decide nothing themselves.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.calibration.statistics import LayerStatistics
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.quantization.int8 import per_channel, rounded, scale_of
from sd_quant.quantization.levels import reason_kept
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS
from sd_quant.quantization.smoothing import SMOOTHINGS, SharedInput, pre_quant_scale

FIXED_ALPHA = 0.8  # what NeMo and ModelOpt recommend for SDXL; alpha=auto is compared with it
ALPHAS = tuple(index / 10 for index in range(11))  # that alpha=auto tries
SEARCHED_OUTPUTS, SEARCHED_ROWS = 256, 64  # of a layer, that the search looks at
PIECE = 2**18  # numbers of a weight that are worked on at a time


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a user chooses. Ranges are checked where the configuration is read; ``alpha`` is a number or "auto"."""

    quant_level: float
    alpha: float | str
    percentile: float = 1.0
    collect_method: str = "mean-max"
    percentile_calibrator: str = "corrected"
    observer: str = "max"
    smoothing: str = "folded"
    batch_size: int = 1  # of the calibration, which ModelOpt's own calibrator depends on


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """How one layer is computed. ``format`` None means high precision, and ``reason`` says why.

    ``weight_amax`` fp32 [out_channels] and ``activation_amax`` are ranges after smoothing. ``pre_quant_scale`` fp32
    [in_features] divides the weight; the input is multiplied by it, in the graph or, with ``folded_into``, in the
    module of that name. ``output_scale`` fp32 [out_channels] is what this module takes over from the linear behind it:
    it multiplies weight and bias. Norms have a row only when they have one.
    ``output_error`` is that of the layer's output on its sampled inputs, relative to the output's norm;
    ``accumulated_error`` the same over all denoising steps, and ``fixed_alpha_error`` what that would be with alpha
    ``FIXED_ALPHA``, where alpha was searched.
    """

    name: str
    role: str
    weight_shape: tuple[int, ...]
    format: str | None = None
    reason: str | None = None
    weight_axis: int | None = None
    weight_amax: Tensor | None = None
    activation_amax: float | None = None
    pre_quant_scale: Tensor | None = None
    folded_into: str | None = None
    output_scale: Tensor | None = None
    alpha: float | None = None
    output_error: float | None = None
    accumulated_error: float | None = None
    fixed_alpha_error: float | None = None

    @property
    def weight_scale(self) -> Tensor:
        """fp32 [out_channels], representable in fp16."""
        return scale_of(self.weight_amax)

    @property
    def activation_scale(self) -> float:
        return scale_of(torch.tensor(self.activation_amax)).item()

    @property
    def multiplies(self) -> bool:
        """The graph has a multiplication before this layer."""
        return self.pre_quant_scale is not None and self.folded_into is None

    @property
    def smoothing(self) -> str:
        """In words: where the input is multiplied by ``pre_quant_scale``."""
        if self.pre_quant_scale is None:
            return ""
        return f"folded into {self.folded_into}" if self.folded_into else "multiplication"

    def row(self) -> dict[str, object]:
        """The row of ``layers.csv``."""
        smoothing, quantized = self.pre_quant_scale, self.format is not None
        weight_scale = self.weight_scale if quantized else None
        return {
            "name": self.name,
            "role": self.role,
            "weight_shape": "x".join(map(str, self.weight_shape)),
            "format": self.format or "high precision",
            "reason": self.reason or "",
            "alpha": self.alpha,
            "smoothing": self.smoothing,
            "output_error": self.output_error,
            "accumulated_error": self.accumulated_error,
            f"accumulated_error_alpha_{FIXED_ALPHA}": self.fixed_alpha_error,
            "activation_scale": self.activation_scale if quantized else None,
            "weight_scale_min": None if weight_scale is None else weight_scale.min().item(),
            "weight_scale_max": None if weight_scale is None else weight_scale.max().item(),
            "pre_quant_scale_min": None if smoothing is None else smoothing.min().item(),
            "pre_quant_scale_max": None if smoothing is None else smoothing.max().item(),
        }


def rewritten(parameter: Tensor, layer: LayerAssignment) -> Tensor:
    """A weight [out, ...] or bias [out] of the layer with smoothing in it, fp32, not yet rounded."""
    parameter = parameter.float()
    if layer.pre_quant_scale is not None and parameter.ndim > 1:
        parameter = parameter / layer.pre_quant_scale
    if layer.output_scale is not None:
        parameter = parameter * per_channel(layer.output_scale, parameter)
    return parameter


def rows_a_piece(weight: Tensor) -> int:
    return max(1, PIECE // weight[0].numel())


def pieces(weight: Tensor, layer: LayerAssignment) -> Iterator[tuple[Tensor, LayerAssignment]]:
    """Some rows of the weight at a time, flat, with the layer as it is for them.

    What happens to a weight happens row by row, and a piece stays in the processor's cache: on the full-size UNet this
    is three times as fast as whole weights, and takes a third of the memory.
    """
    rows = rows_a_piece(weight)
    scales = [None] * len(weight) if layer.output_scale is None else layer.output_scale.split(rows)
    for piece, scale in zip(weight.split(rows), scales, strict=False):
        yield piece.flatten(1) if piece.ndim > 1 else piece, replace(layer, output_scale=scale)


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
    layer = replace(layer, output_scale=None)  # it scales outputs and changes no relative error
    inputs = rows.float()
    if layer.pre_quant_scale is not None:
        inputs = inputs * layer.pre_quant_scale
    near_inputs = rounded(inputs, layer.activation_scale) * layer.activation_scale
    squares = torch.zeros(4, dtype=torch.float64)  # of the output, its error, the input's part and the weight's
    for piece, _ in pieces(weight, layer):
        smoothed = rewritten(piece, layer)
        scale = per_channel(scale_of(smoothed.abs().amax(dim=1)), smoothed)
        weight_error = rounded(smoothed, scale).mul_(scale).sub_(smoothed)
        output, of_input = inputs @ smoothed.T, (near_inputs - inputs) @ smoothed.T
        of_weight = inputs @ weight_error.T
        error = near_inputs @ weight_error.T + of_input
        squares += torch.stack([part.square().sum().double() for part in (output, error, of_input, of_weight)])
    output, error, of_input, of_weight = squares.tolist()
    if not output:
        return None, None
    return math.sqrt(error / output), math.sqrt((of_input + steps * of_weight) / output)


def with_ranges(layer: LayerAssignment, weight: Tensor, activation_amax: float) -> LayerAssignment:
    """The layer as INT8. Raises SdQuantError when a range is zero or its scale does not fit fp16."""
    if activation_amax == 0:
        raise SdQuantError(
            f"layer {layer.name} only ever saw zeros during calibration, so its input has no scale; "
            "calibrate with more prompts or a lower quant_level"
        )
    weight_amax = output_amax(weight, layer)
    layer = replace(
        layer, format="int8", weight_axis=0, weight_amax=weight_amax, activation_amax=activation_amax, reason=None
    )
    try:
        layer.weight_scale, layer.activation_scale  # noqa: B018
    except OverflowError as error:
        raise SdQuantError(
            f"layer {layer.name} cannot be quantized: {error}; keep it out with a lower quant_level"
        ) from error
    return layer


def assign_convolution(
    layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """Not smoothed; the range of its input by the percentile calibrator, or by an observer of its sampled inputs."""
    if recipe.observer == "max":
        calibrator = PERCENTILE_CALIBRATORS[recipe.percentile_calibrator]
        amax = calibrator(statistics.amax, recipe.percentile, recipe.collect_method, recipe.batch_size)
    else:
        amax = OBSERVERS[recipe.observer](statistics.rows.values.float(), statistics.amax.max().item())
    layer = with_ranges(layer, weight, amax)
    return replace(layer, output_error=errors(layer, weight, statistics.rows.values, steps=1)[0])


def assign_readers(
    layers: Sequence[LayerAssignment],
    weights: Mapping[str, Tensor],
    weight_amax: Tensor,
    statistics: LayerStatistics,
    alpha: float,
    observer: str,
) -> list[LayerAssignment]:
    """Linears of one input with one smoothing vector. Readers that stay in high precision get the vector alone.

    ``weight_amax`` fp32 [in_features] is the largest of the quantized readers' weights.
    """
    channel_amax, rows = statistics.amax.amax(dim=0), statistics.rows.values
    scale = pre_quant_scale(channel_amax, weight_amax, alpha)
    amax = OBSERVERS[observer](rows.float() * scale, (channel_amax * scale).max().item())
    assigned = []
    for layer in layers:
        layer = replace(layer, pre_quant_scale=scale, alpha=alpha)
        if layer.reason is None:
            layer = with_ranges(layer, weights[layer.name], amax)
            of_one, accumulated = errors(layer, weights[layer.name], rows, len(statistics.amax))
            layer = replace(layer, output_error=of_one, accumulated_error=accumulated)
        assigned.append(layer)
    return assigned


def search_alpha(
    layers: Sequence[LayerAssignment], weights: Mapping[str, Tensor], weight_amax: Tensor, statistics: LayerStatistics
) -> float:
    """The alpha of ``ALPHAS`` with the least sum of squared accumulated errors of the readers.

    It looks at ``SEARCHED_OUTPUTS`` output channels of each, evenly spaced, on the first ``SEARCHED_ROWS`` inputs, and
    takes the maximum as the range: all of them, or an observer, would cost more than everything else in a recipe.
    """
    outputs = {name: weight[:: -(-len(weight) // SEARCHED_OUTPUTS)] for name, weight in weights.items()}
    rows = replace(statistics.rows, values=statistics.rows.values[:SEARCHED_ROWS])
    statistics = replace(statistics, rows=rows)

    def cost(alpha: float) -> float:
        tried = assign_readers(layers, outputs, weight_amax, statistics, alpha, "max")
        return sum((layer.accumulated_error or 0) ** 2 for layer in tried)

    return min(ALPHAS, key=lambda alpha: (cost(alpha), abs(alpha - FIXED_ALPHA)))  # nothing sampled: all cost nothing


def derive(
    roles: Mapping[str, str],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
    inputs: Sequence[SharedInput],
    kept: Collection[str] = (),
) -> dict[str, LayerAssignment]:
    """The assignment of every layer in ``roles`` (name to role), reading the weights of one input at a time.

    ``inputs`` are the family's shared inputs of linears, ``kept`` layers that stay in high precision whatever the
    level. Raises SdQuantError when a layer to quantize was never reached by calibration or saw only zeros, ConfigError
    when nothing is left to quantize.
    """
    assignment = {}
    for name, role in roles.items():
        reason = reason_kept(role, recipe.quant_level) or ("among the most sensitive layers" if name in kept else None)
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
    return assignment


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
        chosen = assign_readers(*known, search_alpha(*known), recipe.observer)
        fixed = assign_readers(*known, FIXED_ALPHA, recipe.observer)
        chosen = [
            replace(layer, fixed_alpha_error=at.accumulated_error) for layer, at in zip(chosen, fixed, strict=True)
        ]
    else:
        chosen = assign_readers(*known, float(recipe.alpha), recipe.observer)
    if shared.producer is None:
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
        producer = replace(producer, weight_amax=producer.weight_amax * output_scale)
    return producer
