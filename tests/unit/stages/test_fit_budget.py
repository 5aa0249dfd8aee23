"""What a budget leaves for layers, which of them choose together, and what is written about the choice."""

import csv
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from sd_quant.errors import ConfigError
from sd_quant.models.parts import SharedInput
from sd_quant.quantization.budget import inputs_left_alone, stored_bytes, with_weights
from sd_quant.quantization.low_rank import rank_of
from sd_quant.stages import fit_budget as stage
from tests.presets import recipe_of

SHAPES = {"conv": (64, 64, 3, 3), "first": (64, 4, 3, 3)} | dict.fromkeys(("q", "k", "out", "proj"), (64, 64))
ROLES = {"conv": "conv", "q": "qkv", "k": "qkv", "out": "ffn", "first": "excluded", "proj": "ffn"}
INPUTS = [SharedInput(("q", "k"), "norm"), SharedInput(("out",)), SharedInput(("proj",))]
QUANTIZED = ("conv", "q", "k", "out")
NORMS = 5000
PARAMETERS = NORMS + sum(stored_bytes(shape, "ffn", None) // 2 for shape in SHAPES.values())


RECIPE = cache(recipe_of)


def loaded(alone: tuple[str, ...] = (), budget: float | None = None) -> SimpleNamespace:
    """``proj`` is excluded by the preset, ``first`` by its role; of ``alone`` the weights alone are quantized."""
    recipe = replace(RECIPE("svdquant_w4a16", "quant_level=3", "alpha=0.5"), budget=budget)
    return SimpleNamespace(
        recipe=recipe, roles=ROLES, shapes=SHAPES, shared_inputs=INPUTS, exclude=["proj"], denoiser="unet",
        parameters={"unet": PARAMETERS, "vae": 7}, checkpoint=None, guidance_scale=5.0,
        own=lambda name, recipe: inputs_left_alone(recipe) if name in alone else recipe,
    )  # fmt: skip


def least(given: SimpleNamespace) -> int:
    """Everything that is not quantized in fp16, and the rest in INT4 with its branch."""
    whole = sum(stored_bytes(SHAPES[name], ROLES[name], None) for name in QUANTIZED)
    return 2 * PARAMETERS - whole + sum(stored_bytes(SHAPES[name], ROLES[name], given.recipe) for name in QUANTIZED)


def test_a_layer_whose_weight_alone_is_quantized_has_no_branch():
    branch = 2 * rank_of(loaded().recipe.rank, SHAPES["out"]) * sum(SHAPES["out"])
    sizes = [stage.bytes_of(given, ("out",), given.recipe) for given in (loaded(), loaded(alone=("out",)))]
    assert branch > 0 and sizes[0] - sizes[1] == branch


def test_readers_of_one_input_choose_together_and_what_is_excluded_does_not():
    assert stage.units_of(loaded()) == [("conv",), ("q", "k"), ("out",)]


def test_what_a_budget_leaves_for_layers():
    assert stage.bytes_to_share(loaded()) is None
    given = loaded(budget=least(loaded()))
    assert stage.bytes_to_share(given) == sum(
        stored_bytes(SHAPES[name], ROLES[name], given.recipe) for name in QUANTIZED
    )
    half = loaded(budget=0.4)
    assert stage.bytes_to_share(half) - stage.bytes_to_share(given) == int(0.4 * 4 * PARAMETERS) - least(given)


@pytest.mark.parametrize("budget", [1, 0.01, 2 * PARAMETERS])
def test_a_budget_that_cannot_be_met_or_asks_for_nothing_is_refused_with_the_nearest_that_can(budget):
    given = loaded(budget=budget)
    with pytest.raises(ConfigError) as caught:
        stage.bytes_to_share(given)
    share = least(given) / PARAMETERS / 4
    assert str(caught.value) == (
        f"quantize.budget is {budget}, expected from {least(given)} bytes (a share of {share:.4f}), the least with "
        f"svdquant_w4a16 or int8, to {2 * PARAMETERS - 1}, below which something has to be quantized"
    )
    with pytest.raises(ConfigError):
        stage.bytes_to_share(loaded(budget=least(given) - 1))


def test_the_layers_that_err_most_get_more_bits(monkeypatch, tmp_path):
    """With room for two linears in INT8: those that read one input take it together, or not at all."""
    errors = {
        "svdquant_w4a16": {"conv": 1e-3, "q": 0.3, "k": 1e-3, "out": 0.2},
        "int8": {"conv": 1e-4, "q": 0.02, "k": 1e-4, "out": 0.01},
    }
    derived = []

    def assign(_, statistics, kept=(), recipes=None):
        derived.append((kept, recipes))
        return recipes

    def measure(_, recipes, *rest):
        label = "int8" if recipes["q"].enable.linear.weight == "int8" else "svdquant_w4a16"
        return SimpleNamespace(network_error=errors[label])

    monkeypatch.setattr(stage, "assign", assign)
    monkeypatch.setattr(stage, "measure_sensitivity", measure)
    recipe = loaded().recipe
    int4, int8 = (stored_bytes(SHAPES["q"], "qkv", each) for each in (recipe, with_weights(recipe, "int8")))
    given = loaded(budget=least(loaded()) + 2 * (int8 - int4) + 100)
    limit = stage.bytes_to_share(given)
    fitted = stage.fit_budget(given, None, limit, tmp_path)
    assert fitted.layers == {"svdquant_w4a16": 2, "int8": 2, "unquantized": 0}
    kept, recipes = derived[-1]
    assert kept == [] and {name for name, recipe in recipes.items() if recipe.rank == 0} == {"q", "k"}
    assert fitted.predicted_error == pytest.approx((1e-6 + 0.02**2 + 1e-8 + 0.2**2) ** 0.5)
    assert fitted.limit_bytes == given.recipe.budget == fitted.chosen_bytes + 100
    with (tmp_path / "budget.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert {name: row["chosen"] for name, row in rows.items()} == {
        "conv": "svdquant_w4a16", "q": "int8", "k": "int8", "out": "svdquant_w4a16",
    }  # fmt: skip
    assert rows["q"]["network_error_int8"] == "0.02" and int(rows["q"]["bytes_unquantized"]) == 2 * 64 * 64
