"""The choice of formats under a budget, against trying all of them."""

import itertools
import random

import pytest

from sd_quant.quantization.budget import Choice, choose, choose_uniform, stored_bytes, with_weights
from sd_quant.quantization.recipe import Enable, Pair, Recipe

INT4 = Recipe(3.0, None, enable=Enable(Pair("int4", None), Pair("int4", "int4"), None), rank=8, per_channel=False)


def drawn(seed: int) -> list[dict[str, Choice]]:
    """Seven units of three choices: more bytes, less error, as formats are, by factors up to a thousand."""
    given = random.Random(seed)
    units = []
    for _ in range(7):
        size, error = given.randint(50, 5000), 10 ** given.uniform(-9, -3)
        units.append({"int4": Choice(size, error), "int8": Choice(2 * size, error / given.randint(20, 200)),
                      "fp16": Choice(4 * size, 0.0)})  # fmt: skip
    return units


@pytest.mark.parametrize("seed, share", enumerate([0.25, 0.3, 0.5, 0.9, 0.25, 0.3, 0.5, 0.9]))
def test_no_other_choice_is_better(seed, share):
    units = drawn(seed)
    limit = int(share * sum(unit["fp16"].bytes for unit in units)) + 1
    combinations = itertools.product(*units)
    best = min(
        sum(unit[name].squared_error for unit, name in zip(units, names, strict=True))
        for names in combinations
        if sum(unit[name].bytes for unit, name in zip(units, names, strict=True)) <= limit
    )
    chosen = [unit[name] for unit, name in zip(units, choose(units, limit), strict=True)]
    assert sum(each.bytes for each in chosen) <= limit
    assert sum(each.squared_error for each in chosen) == pytest.approx(best, rel=1e-5, abs=1e-12)


def test_all_of_a_few_hundred_units_with_every_byte_of_the_least_budget():
    units = [unit for seed in range(60) for unit in drawn(seed)]
    for name in ("int4", "fp16"):
        assert choose(units, sum(unit[name].bytes for unit in units)) == [name] * len(units)
    assert choose([{"int8": Choice(10, 0.0), "fp16": Choice(20, 0.0)}], 10) == ["int8"]  # no unit has an error


def test_one_choice_for_each_of_a_few_parts():
    parts = drawn(3)[:3]
    least = sum(part["int4"].bytes for part in parts)
    assert choose_uniform(parts, least) == ["int4"] * 3 and choose_uniform(parts, least - 1) is None
    room = least + min(part["int8"].bytes - part["int4"].bytes for part in parts)
    assert choose_uniform(parts, room).count("int8") == 1


@pytest.mark.parametrize(
    "role, recipe, expected",
    [
        ("ffn", None, 2 * 64 * 128),
        ("ffn", INT4, 64 * 128 // 2 + 2 * 64 * 2 + 2 * 8 * (64 + 128)),  # codes, scales of 64 numbers, the branch
        ("conv", INT4, 64 * 128 // 2 + 2 * 64 * 2),
        ("ffn", with_weights(INT4, "int8"), 64 * 128 + 2 * 64),
        ("ffn", with_weights(INT4, "nvfp4"), 64 * 128 // 2 + 64 * 128 // 16 + 4),
        ("ffn", Recipe(3.0, None, per_channel=False), 64 * 128 + 2),
    ],
)
def test_bytes_of_a_layer_worked_by_hand(role, recipe, expected):
    shape = (64, 32, 2, 2) if role == "conv" else (64, 128)
    assert stored_bytes(shape, role, recipe) == expected
    assert stored_bytes(shape, role, recipe, 4) == (2 * expected if recipe is None else expected)


def test_another_format_of_weights_leaves_inputs_alone():
    other = with_weights(INT4, "int8")
    assert other.enable == Enable(Pair("int8", None), Pair("int8", None), None)
    assert other.per_channel and other.rank == 0 and other.quant_level == INT4.quant_level
