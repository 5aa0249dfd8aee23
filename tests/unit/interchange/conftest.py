"""Recipes, and rows of the small UNet."""

from collections.abc import Callable

import pytest

from sd_quant.models.unet import attentions, shared_inputs
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from ..tiny import tiny  # noqa: F401 a fixture


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
