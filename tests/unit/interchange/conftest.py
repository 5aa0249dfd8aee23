"""What is compared of a network that a consumer loads, and rows of the small UNet."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sd_quant.models.unet import attentions, shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.simulation.modelopt import between_roundings

from ..tiny import Assignment, Tiny, tiny  # noqa: F401 a fixture


@torch.no_grad()
def layer_errors(case: Tiny, simulated: nn.Module, theirs: nn.Module, assignment: Assignment) -> dict[str, float]:
    """The relative error of the output of each quantized layer, of the inputs that it gets in the simulation.

    They are moved between the numbers where rounding changes, because 1 / scale is rounded by some.
    """
    errors: dict[str, float] = {}

    def compare(name: str):
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], _) -> None:
            if name not in errors:  # this compares by calling the layer again
                errors[name] = 0.0
                x = between_roundings(layer, inputs[0])
                errors[name] = relative_error(layer(x), theirs.get_submodule(name)(x))

        return hook

    layers = [name for name, layer in assignment.items() if layer.format]
    hooks = [simulated.get_submodule(name).register_forward_hook(compare(name)) for name in layers]
    case.output(simulated, seed=0)
    for hook in hooks:
        hook.remove()
    assert errors.keys() == set(layers) and layers
    return errors


def recipe_of(name: str, activation: str | None = "same", **options: object) -> Recipe:
    """``name`` for weights, and for inputs unless told otherwise; where it is in blocks, convolutions are INT8."""
    pair = Pair(name, name if activation == "same" else activation)
    conv = pair if FORMATS[name].static_scale else Pair("int8", None)
    knobs = {"alpha": 0.8, "smoothing": "folded", "per_channel": name == "int8"} | options
    return Recipe(3.0, collect_method="min-max", enable=Enable(conv, pair, None), **knobs)


@pytest.fixture(scope="session")
def assign(calibrated) -> Callable[..., dict[str, LayerAssignment]]:
    """Rows of the small UNet with one format for weights and inputs; further arguments are the recipe's."""
    unet = calibrated.part().unet

    def make(weight: str, activation: str | None, **options: object) -> dict[str, LayerAssignment]:
        pair = Pair(weight, activation)
        knobs = {"quant_level": 3.0, "alpha": 0.8, "smoothing": "folded", "collect_method": "min-max"} | options
        recipe = Recipe(enable=Enable(pair if activation != "nvfp4" else Pair(weight, None), pair, None), **knobs)
        return derive(
            calibrated.roles, lambda name: unet.get_submodule(name).weight, calibrated.statistics.layers, recipe,
            shared_inputs(calibrated.roles), attentions=attentions(unet),
        )  # fmt: skip

    return make
