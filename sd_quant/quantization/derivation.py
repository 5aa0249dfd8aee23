"""Derive layer assignments from calibration statistics, weights and a recipe, as a pure function.

Statistics do not depend on ranges or formats, so another quant_level, alpha or format needs no further calibration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.models.parts import Heads, SharedInput, text_readers
from sd_quant.progress import each as working_on
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import assign_attention
from sd_quant.quantization.convolutions import assign_convolution
from sd_quant.quantization.linears import assign_linears
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.rounding import with_refined_branch, with_rounded_weight
from sd_quant.quantization.row_chunks import with_output_error
from sd_quant.quantization.smoothing import SMOOTHINGS
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.text import counted


def derive(
    roles: Mapping[str, str],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
    inputs: Sequence[SharedInput],
    exceptions: Mapping[str, Recipe | str] = {},
    attentions: Mapping[str, Heads] = {},
    bias_of: Callable[[str], Tensor | None] = lambda name: None,
) -> dict[str, LayerAssignment]:
    """Derive the assignment of every layer in ``roles`` (role by name).

    ``weight_of`` reads the weight of a layer or norm by name, ``bias_of`` its bias or None; only the weights of linears
    with one common input are in memory at a time. ``inputs`` are the tensors that linears share, ``attentions`` the
    heads of attentions by name. ``exceptions`` has, by layer, another recipe, or the reason why the layer stays in high
    precision. Quantized linears with one common input need one recipe, unless smoothing is not folded.
    Raises SdQuantError for a layer to quantize that calibration never reached or whose inputs were all zero,
    ConfigError when no layer is left to quantize.
    """
    own, assignment = dict(exceptions), dict[str, LayerAssignment]()
    readers = {name for shared in inputs for name in shared.readers}

    def recipe_of(name: str) -> Recipe:
        return given if isinstance(given := own.get(name), Recipe) else recipe

    def common_recipe(names: Sequence[str]) -> Recipe:
        return recipe_of(next((name for name in names if assignment[name].reason is None), names[0]))

    with progress(len(roles), "assign") as advance:
        for name, role in roles.items():
            given = own.get(name)
            reason = reason_kept(role, recipe.quant_level) or (given if isinstance(given, str) else None)
            if reason is None and name not in statistics:
                raise SdQuantError(
                    f"layer {name} was never reached during calibration, so it has no range to quantize with"
                )
            layer = LayerAssignment(name, role, (), reason=reason)
            if name not in readers:  # whose weights are read later, once
                layer = replace(layer, weight_shape=tuple((weight := weight_of(name)).shape))
                if reason is None and role == "conv":
                    layer = assign_convolution(layer, weight, bias_of(name), statistics[name], recipe_of(name))
                advance()
            assignment[name] = layer
        for each in inputs:
            for shared in SMOOTHINGS[common_recipe(each.readers).smoothing]([each]):
                weights = {name: weight_of(name) for name in shared.readers}
                for name, weight in weights.items():
                    assignment[name] = replace(assignment[name], weight_shape=tuple(weight.shape))
                common = common_recipe(shared.readers)
                assignment |= assign_linears(shared, assignment, weights, weight_of, bias_of, statistics, common)
                for _ in shared.readers:
                    advance()
    if recipe.quant_level and not any(layer.format for layer in assignment.values()):
        kept = sum(isinstance(given, str) for given in own.values())
        raise ConfigError(
            f"quant_level={recipe.quant_level:g} with {counted(kept, 'layer')} kept leaves no layer to quantize; "
            "raise quant_level or lower keep"
        )
    searched = [
        layer for layer in assignment.values()
        if layer.format and recipe_of(layer.name).chooses_codes(layer.format)
    ]  # fmt: skip
    for layer in working_on(searched, "choose codes"):
        chosen, seen, weight = recipe_of(layer.name), statistics[layer.name], weight_of(layer.name)
        layer = with_rounded_weight(with_refined_branch(layer, weight, seen, chosen), weight, seen, chosen)
        assignment[layer.name] = with_output_error(layer, weight, seen)
    if recipe.enable.attention is not None:
        text = text_readers(inputs)
        for name, heads in attentions.items():
            cross = f"{name}.to_k" in text
            assignment[name] = assign_attention(name, heads, assignment, weight_of, statistics, recipe, cross, bias_of)
    return assignment


def derive_nearest(
    roles: Mapping[str, str], weight_of: Callable[[str], Tensor], recipes: Mapping[str, Recipe]
) -> dict[str, LayerAssignment]:
    """Derive the assignment of layers with weight-only, round-to-nearest quantization, which needs no calibration.

    ``roles`` has the role of each layer by name, ``weight_of`` reads a weight, and ``recipes`` has the recipe by layer;
    a layer without a recipe stays in high precision. Raises SdQuantError when a scale cannot be stored.
    """
    assignment = {}
    for name, role in roles.items():
        reason = "excluded by its network" if role == "excluded" else "left in high precision by the budget"
        layer = LayerAssignment(name, role, tuple((weight := weight_of(name)).shape), reason=reason)
        if role != "excluded" and name in recipes:
            layer = replace(with_ranges(layer, weight, InputRange(0.0), recipes[name]), activation_amax=None)
        assignment[name] = layer
    return assignment
