"""The derivation of an assignment: a pure function of the statistics, the weights and the recipe.

Statistics know no recipe, so another quant_level, alpha or format costs no further calibration.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.models.parts import Heads, SharedInput, text_readers
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import assign_attention
from sd_quant.quantization.convolutions import assign_convolution
from sd_quant.quantization.error_model import with_output_error
from sd_quant.quantization.linears import assign_linears
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.recipe_check import is_excluded
from sd_quant.quantization.rounding import with_refined_branches, with_rounded_weight
from sd_quant.quantization.smoothing import SMOOTHINGS
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.text import counted


def derive(
    roles: Mapping[str, str],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
    inputs: Sequence[SharedInput],
    kept: Collection[str] = (),
    attentions: Mapping[str, Heads] = {},
    exclude: Collection[str] = (),
    bias_of: Callable[[str], Tensor | None] = lambda name: None,
    recipes: Mapping[str, Recipe] = {},
    gain_of: Callable[[str], Tensor | None] = lambda name: None,
    advance: Callable[[], object] = lambda: None,
    kept_because: str = "among the most sensitive layers",
) -> dict[str, LayerAssignment]:
    """The assignment of every layer in ``roles`` (role by name).

    ``weight_of`` reads a layer's weight by its name, ``bias_of`` its bias (None: it has none), ``gain_of`` the weight
    of the norm of an attention's queries or keys (None: there is no such norm); the weights of one shared input are in
    memory at a time. ``inputs`` are the family's shared inputs of linears, ``attentions`` the heads of its attentions
    by name. The layers ``kept`` and those that match a pattern of ``exclude`` stay in high precision.
    ``recipes`` overrides the recipe of some layers, alike for all quantized readers of a shared input unless none of
    their recipes folds. ``kept_because`` is the reason of those kept. ``advance`` is called once for every layer, and
    again when its codes have been chosen.
    Raises SdQuantError for a layer to be quantized that calibration never reached or where it saw only zeros,
    ConfigError when no layer is left to quantize.
    """
    assignment, readers = {}, {name for shared in inputs for name in shared.readers}
    for name, role in roles.items():
        reason = reason_kept(role, recipe.quant_level)
        if reason is None and is_excluded(name, exclude):
            reason = "excluded by the preset"
        if reason is None and name in kept:
            reason = kept_because
        if reason is None and name not in statistics:
            raise SdQuantError(
                f"layer {name} was never reached during calibration, so it has no range to quantize with"
            )
        layer = LayerAssignment(name, role, (), reason=reason)
        if name not in readers:  # whose weights are read later, once
            layer = replace(layer, weight_shape=tuple((weight := weight_of(name)).shape))
            if reason is None and role == "conv":
                layer = assign_convolution(layer, weight, bias_of(name), statistics[name], recipes.get(name, recipe))
            advance()
        assignment[name] = layer

    def own_recipe(readers: Sequence[str]) -> Recipe:
        quantized = [name for name in readers if assignment[name].reason is None]
        return recipes.get((quantized or readers)[0], recipe)

    for each in inputs:
        for shared in SMOOTHINGS[own_recipe(each.readers).smoothing]([each]):
            weights, own = {name: weight_of(name) for name in shared.readers}, own_recipe(shared.readers)
            for name, weight in weights.items():
                assignment[name] = replace(assignment[name], weight_shape=tuple(weight.shape))
            assignment |= assign_linears(shared, assignment, weights, weight_of, bias_of, statistics, own)
            for _ in shared.readers:
                advance()
    if recipe.quant_level and not any(layer.format for layer in assignment.values()):
        raise ConfigError(
            f"quant_level={recipe.quant_level:g} with {counted(len(kept), 'layer')} kept leaves no layer to quantize; "
            "raise quant_level or lower keep"
        )
    for names in by_branch(assignment):
        layers, own = [assignment[name] for name in names], recipes.get(names[0], recipe)
        if layers[0].format is None or not own.chooses_codes(layers[0].format):
            continue
        for layer in with_refined_branches(layers, [weight_of(name) for name in names], statistics[names[0]], own):
            name = layer.name
            layer = with_rounded_weight(layer, weight_of(name), statistics[name], own)
            assignment[name] = with_output_error(layer, weight_of(name), statistics[name])
            advance()
    if recipe.enable.attention is not None:
        text = text_readers(inputs)
        for name, heads in attentions.items():
            cross = f"{name}.to_k" in text
            assignment[name] = assign_attention(
                name, heads, assignment, weight_of, statistics, recipe, cross, bias_of, gain_of
            )
    return assignment


def derive_nearest(
    roles: Mapping[str, str], weight_of: Callable[[str], Tensor], recipes: Mapping[str, Recipe]
) -> dict[str, LayerAssignment]:
    """The assignment of layers whose weights alone are quantized, to the nearest codes: it takes no statistics.

    ``roles`` and ``weight_of`` as in ``derive``. A layer without one of the ``recipes`` stays in high precision.
    Raises SdQuantError when a scale cannot be stored.
    """
    assignment = {}
    for name, role in roles.items():
        reason = "excluded by its network" if role == "excluded" else "left in high precision by the budget"
        layer = LayerAssignment(name, role, tuple((weight := weight_of(name)).shape), reason=reason)
        if role != "excluded" and name in recipes:
            layer = replace(with_ranges(layer, weight, InputRange(0.0), recipes[name]), activation_amax=None)
        assignment[name] = layer
    return assignment


def by_branch(assignment: Mapping[str, LayerAssignment]) -> list[list[str]]:
    """The names of layers, those together whose branches have one ``down``: the very same tensor."""
    groups: dict[str | int, list[str]] = {}
    for name, layer in assignment.items():
        groups.setdefault(name if layer.low_rank is None else id(layer.low_rank[1]), []).append(name)
    return list(groups.values())
