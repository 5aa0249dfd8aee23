"""Quantization of linears that read one tensor (such as query, key and value): SmoothQuant, ranges, low-rank branches.

The linears share one smoothing vector, so that the module that produces the tensor (a norm or a linear) can absorb it.
The recipe gives SmoothQuant's alpha, or alpha is searched among ``ALPHAS`` for the linears' smallest output errors.

A static range must also fit prompts outside of the calibration set. So the search cross-validates: the range of one
half (fold) of the prompts clips the other half, and this error is added. Without it, the network's error on a trained
checkpoint was 3.5 % on calibration prompts and 4.9 % on other prompts, by clipping in the second linears of
feed-forwards. Alternatives not taken: wider ranges, which cost more than they gain where prompts are alike, and ranges
that contain all of the other fold, which few rows reach.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sd_quant.models.parts import SharedInput
from sd_quant.quantization.assignment import FIXED_ALPHA, LayerAssignment, rewritten
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges, with_weight_range
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.row_chunks import fits_half, input_amax, with_output_error
from sd_quant.quantization.smoothing import QUIET, awake, pre_quant_scale, range_keeping_scale
from sd_quant.quantization.statistics import LayerStatistics

ALPHAS = tuple(index / 10 for index in range(11))  # tried by alpha=auto
SEARCHED_OUTPUTS, SEARCHED_ROWS = 256, 64  # outputs and sampled inputs of a layer that the search evaluates
UNSEEN, UNSEEN_OF_ONE_ROW = 3e-4, 1e-2  # assumed share of rows at a channel's maximum; chosen on the bench


def assign_linears(
    shared: SharedInput,
    assignment: Mapping[str, LayerAssignment],
    weights: Mapping[str, Tensor],
    weight_of: Callable[[str], Tensor],
    bias_of: Callable[[str], Tensor | None],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
) -> dict[str, LayerAssignment]:
    """Return new assignments, by name, of the quantized linears that read one tensor (``shared``).

    If the tensor's producer absorbs the smoothing, also of the producer and of linears in high precision (which have a
    ``reason`` in ``assignment``). ``weights`` are the linears'; ``weight_of`` and ``bias_of`` read the producer's.
    """
    readers = readers_of(shared, assignment, weights, statistics)
    if readers is None:
        return {}
    if recipe.alpha == "auto":
        alpha, quiet = readers.best_smoothing(recipe)
        pairs = zip(readers.assigned(alpha, recipe, quiet), readers.assigned(FIXED_ALPHA, recipe), strict=True)
        assigned = [replace(layer, fixed_alpha_error=at_fixed.output_error) for layer, at_fixed in pairs]
    else:
        assigned = readers.assigned(None if recipe.alpha is None else float(recipe.alpha), recipe)
    unfolded = {layer.name: layer for layer in assigned if layer.format}
    if shared.producer is None or recipe.alpha is None:
        return unfolded
    producer = absorb_scale(shared, assignment.get(shared.producer), weight_of, bias_of, assigned[0].pre_quant_scale)
    if producer is None or not all(fits_half(weights[layer.name], layer) for layer in assigned if not layer.format):
        return unfolded
    return {layer.name: replace(layer, folded_into=shared.producer) for layer in assigned} | {producer.name: producer}


@dataclass(frozen=True)
class Readers:
    """The linears that read one tensor, before smoothing and ranges are chosen, and the tensor's statistics."""

    layers: Sequence[LayerAssignment]
    weights: Mapping[str, Tensor]  # by layer
    weight_amax: Tensor  # fp32 [in_features], the range of each column over the weights of the quantized layers
    statistics: LayerStatistics  # of the tensor
    vector: Callable[[Tensor, Tensor, float], Tensor]  # ``pre_quant_scale`` or ``range_keeping_scale``
    unseen: float = UNSEEN

    @property
    def quantized(self) -> list[LayerAssignment]:
        return [layer for layer in self.layers if layer.reason is None]

    def scale(self, channel_amax: Tensor, alpha: float, quiet: float) -> Tensor:
        """Compute the smoothing vector, fp32 [in_features], for these ranges of channels; ``quiet`` as in ``awake``."""
        return self.vector(awake(channel_amax, quiet), self.weight_amax, alpha)

    def assigned(self, alpha: float | None, recipe: Recipe, quiet: float = 0.0) -> list[LayerAssignment]:
        """Return the layers' assignments for ``alpha`` and ``quiet``; those in high precision only get smoothing."""
        channel_amax, sample = self.statistics.amax.amax(dim=0), self.statistics.rows.values.float()
        scale = None if alpha is None else self.scale(channel_amax, alpha, quiet)
        if scale is not None:
            channel_amax, sample = channel_amax * scale, sample * scale
        chosen = InputRange(observed_range(sample, channel_amax.max().item(), self.layers[0].role, recipe))
        layers = [replace(layer, pre_quant_scale=scale, alpha=alpha) for layer in self.layers]
        assigned = []
        for layer in layers:
            if layer.reason is None:
                weight = self.weights[layer.name]
                if recipe.rank:
                    layer = replace(layer, low_rank=self.branch(layer, recipe))
                layer = with_output_error(with_ranges(layer, weight, chosen, recipe), weight, self.statistics)
            assigned.append(layer)
        return assigned

    def branch(self, layer: LayerAssignment, recipe: Recipe) -> tuple[Tensor, Tensor]:
        """Compute the low-rank branch (up, down) of a quantized layer.

        When the search of alpha evaluates only a part of a layer's outputs, the rank is reduced in proportion. With the
        whole rank the search chose too large an alpha: w4a4 lost 0.7 dB on the shipped checkpoint.
        """
        weight, outputs = rewritten(self.weights[layer.name], layer), layer.weight_shape[0]
        rank = recipe.rank_of(layer.role, (outputs, self.weight_amax.numel()))
        return low_rank(weight, max(1, round(rank * len(weight) / outputs)))

    def best_smoothing(self, recipe: Recipe) -> tuple[float, float]:
        """Return the alpha of ``ALPHAS`` and the quantile ``quiet`` with the smallest ``expected_error``."""
        error, static = self.expected_error(recipe), recipe.static_range(self.quantized[0].role)
        # without a sample the error is always 0, and FIXED_ALPHA is taken
        tried = itertools.product(ALPHAS, QUIET if static else QUIET[:1])
        return min(tried, key=lambda each: (error(*each), abs(each[0] - FIXED_ALPHA)))

    def expected_error(self, recipe: Recipe) -> Callable[[float, float], float]:
        """Return a function of alpha and ``quiet``: the sum of the layers' squared relative output errors.

        Rounding errors are measured without clipping on ``SEARCHED_OUTPUTS`` evenly spaced outputs of each layer and
        ``SEARCHED_ROWS`` sampled inputs. A static range adds ``unseen`` times the error of ``clipped_squares``.
        Whole layers, or an observer for each alpha, would take longer than all other steps of the derivation.
        """
        rows = replace(self.statistics.rows, values=self.statistics.rows.values[:SEARCHED_ROWS])
        step = {name: -(-len(weight) // SEARCHED_OUTPUTS) for name, weight in self.weights.items()}
        weights = {name: weight[:: step[name]].float() for name, weight in self.weights.items()}
        searched = replace(self, weights=weights, statistics=replace(self.statistics, rows=rows))
        unclipped, static = replace(recipe, observer="min_max"), recipe.static_range(self.quantized[0].role)
        gain = torch.zeros_like(self.weight_amax)  # from a square in a channel to that of the layers' outputs
        for weight in (weights[layer.name] for layer in self.quantized):
            squares = (rows.values.float() @ weight.T).square().sum(1)
            gain += weight.square().sum(0) / squares.mean() if squares.any() else 0.0

        def error(alpha: float, quiet: float) -> float:
            found = sum((layer.output_error or 0) ** 2 for layer in searched.assigned(alpha, unclipped, quiet))
            if static and found:
                found += self.unseen * (self.clipped_squares(alpha, quiet) * gain).sum().item()
            return found

        return error

    def clipped_squares(self, alpha: float, quiet: float) -> Tensor:
        """Compute, per channel, by how much a fold (half of the prompts) exceeds the other fold's range, squared.

        Returns the mean of both directions, fp32 [in_features], in units of the input; 0 if a fold has no prompts.
        """
        folds, squares = self.statistics.folds, torch.zeros_like(self.weight_amax)
        if folds is None or not folds.amax(1).all():
            return squares
        for seen, unseen in (folds, folds.flip(0)):
            scale = self.scale(seen, alpha, quiet)
            squares += (unseen - (seen * scale).max() / scale).clamp(min=0).square() / 2
        return squares


def readers_of(
    shared: SharedInput,
    assignment: Mapping[str, LayerAssignment],
    weights: Mapping[str, Tensor],
    statistics: Mapping[str, LayerStatistics],
) -> Readers | None:
    """Collect the linears that read the tensor ``shared``; None if all of these stay in high precision."""
    layers = [assignment[name] for name in shared.readers]
    quantized = [layer.name for layer in layers if layer.reason is None]
    vector = pre_quant_scale if shared.modulation is None else range_keeping_scale
    if not quantized:
        return None
    amax, unseen = input_amax([weights[each] for each in quantized]), UNSEEN_OF_ONE_ROW if shared.one_row else UNSEEN
    return Readers(layers, weights, amax, statistics[quantized[0]], vector, unseen)


def absorb_scale(
    shared: SharedInput,
    producer: LayerAssignment | None,
    weight_of: Callable[[str], Tensor],
    bias_of: Callable[[str], Tensor | None],
    scale: Tensor,
) -> LayerAssignment | None:
    """Return the producer's assignment, in which ``scale`` multiplies the outputs that form the shared tensor.

    ``producer`` is its assignment so far, None for a norm. Returns None for a modulation without a bias, and when fp16
    cannot represent the rewritten weight or bias.
    """
    weight = weight_of(shared.producer)
    parameters = [weight]
    if producer is None:
        producer = LayerAssignment(
            shared.producer, "norm", tuple(weight.shape), reason=f"takes over the smoothing of {shared.readers[0]}"
        )
    factor = torch.ones(len(weight))
    for rows in shared.rows(len(scale)):
        factor[rows] = scale
    producer = replace(producer, output_scale=factor * (1 if producer.output_scale is None else producer.output_scale))
    if shared.modulation is not None:
        bias = bias_of(shared.producer)
        if bias is None:
            return None
        parameters.append(bias)
        output_shift = factor * (0 if producer.output_shift is None else producer.output_shift)
        _, of_scale = shared.rows(len(scale))
        output_shift[of_scale] += scale - 1  # p (1 + scale) is 1 + (p scale + p - 1)
        producer = replace(producer, output_shift=output_shift)
    if not all(fits_half(parameter, producer) for parameter in parameters):
        return None
    if producer.format:
        if producer.low_rank is not None:
            up, down = producer.low_rank
            producer = replace(producer, low_rank=((up * factor[:, None]).half(), down))
        producer = with_weight_range(producer, weight)
    return producer
