"""The choice of formats under a budget, against trying all of them."""

import itertools
import random
from collections.abc import Sequence

import pytest

from sd_quant.quantization.budget import KEPT, Choice, Limit, all_in, choose, solve, stored_bytes, with_weights
from sd_quant.quantization.recipe import Enable, Pair, Recipe

pytestmark = pytest.mark.commit

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


def total(units: list[dict[str, Choice]], names: Sequence[str], field: str = "cost") -> float:
    return sum(getattr(unit[name], field) for unit, name in zip(units, names, strict=True))


def within(units: list[dict[str, Choice]], limit: float) -> list[Limit]:
    return [Limit(limit, range(len(units)))]


def solved(units, limit, measure, apart, uniform):
    return solve(units, within(units, limit), measure, apart, uniform,
                 lambda units: {f"all in {label}": all_in(units, label) for label in uniform})  # fmt: skip


@pytest.mark.parametrize("seed, share", enumerate([0.25, 0.3, 0.5, 0.9, 0.25, 0.3, 0.5, 0.9]))
def test_no_other_choice_is_better(seed, share):
    units, error = drawn(seed), "squared_error"
    limit = int(share * total(units, ["fp16"] * len(units))) + 1
    best = min(total(units, names, error) for names in itertools.product(*units) if total(units, names) <= limit)
    chosen = choose(units, within(units, limit))
    assert total(units, chosen) <= limit
    assert total(units, chosen, error) == pytest.approx(best, rel=1e-5, abs=1e-12)


def test_units_of_several_limits_have_each_their_own():
    unit = {"int8": Choice(10, 0.0), "fp16": Choice(20, 0.0)}
    assert choose([unit], within([unit], 10)) == ["int8"]  # no unit has an error
    unit = {"int8": Choice(10, 1.0), "fp16": Choice(20, 0.0)}
    assert choose([unit] * 3, [Limit(20, [0]), Limit(30, [1, 2]), Limit(0, [])]).count("fp16") == 2
    assert choose([unit] * 3, [Limit(19, [0]), Limit(40, [1, 2])]) == ["int8", "fp16", "fp16"]


def made_up(seed: int, rates: dict[str, float]):
    """Units of labels "a", of half the cost, "b" and ``KEPT``; two functions that measure; and errors of all in one.

    Squared errors of a label's units together are its rate times their sum.
    """
    given = random.Random(seed)
    units = []
    for _ in range(6):
        size, error = given.randint(50, 500), given.uniform(0.1, 1)
        units.append({"a": Choice(size, error), "b": Choice(2 * size, error / given.uniform(1.1, 3)),
                      KEPT: Choice(4 * size, 0.0)})  # fmt: skip

    def apart(labels):
        pairs = list(zip(units, labels, strict=True))
        squares = {
            name: rate * sum(unit[name].squared_error for unit, own in pairs if own == name)
            for name, rate in rates.items() if name in labels
        }  # fmt: skip
        return {name: square**0.5 for name, square in squares.items()}

    def measure(labels):
        return sum(error**2 for error in apart(labels).values()) ** 0.5

    return units, measure, apart, {name: measure([name] * len(units)) for name in rates}


@pytest.mark.parametrize("seed", range(6))
def test_errors_that_do_not_add_up_are_corrected_by_what_each_label_does_together(seed):
    """Then no other choice is better, measured whole, as trying all of them shows. All in one preset says nothing."""
    rates = {"a": 3.0, "b": 0.5}
    units, measure, apart, uniform = made_up(seed, rates)
    limit = int(0.6 * sum(unit[KEPT].cost for unit in units))
    found = solved(units, limit, measure, apart, uniform | {"b": 1.2 * uniform["b"]})
    first = found.candidates["by layer"]
    assert found.rates == pytest.approx(rates)
    assumed = {"a": 3.0, "b": 0.5 * 1.2**2, KEPT: 0.0}  # by what all in one preset says
    parts = sum(assumed[name] * unit[name].squared_error for unit, name in zip(units, first.labels, strict=True))
    assert first.predicted == pytest.approx(parts**0.5)
    fitting = [labels for labels in itertools.product(*units) if total(units, labels) <= limit]
    best, taken = min(measure(labels) for labels in fitting), found.candidates[found.taken]
    assert taken.measured == pytest.approx(best) == pytest.approx(measure(taken.labels))
    assert taken.cost == total(units, taken.labels) <= limit


def test_a_correction_gains_something():
    gains = []
    for seed in range(6):
        units, measure, apart, uniform = made_up(seed, {"a": 3.0, "b": 0.5})
        limit = int(0.6 * sum(unit[KEPT].cost for unit in units))
        found = solved(units, limit, measure, apart, uniform | {"b": 3 * uniform["b"]})  # so that the first avoids it
        gains.append(found.candidates["by layer"].measured - found.candidates[found.taken].measured)
    assert min(gains) >= 0 and max(gains) > 0.01


def test_one_label_for_all_is_taken_where_labels_err_together_and_it_fits():
    units = [{"a": Choice(1, 1.0), "b": Choice(1, 1.1)}, {"a": Choice(1, 1.1), "b": Choice(2, 1.0)}]
    whole = {("a", "a"): 2.1**0.5, ("b", "b"): 2.1**0.5}

    def measure(labels):
        return whole.get(tuple(labels), 9.0)

    def apart(labels):
        return dict.fromkeys(labels, 1.0)

    found = solved(units, 3, measure, apart, {"a": 2.1**0.5, "b": 2.1**0.5})
    assert found.candidates["by layer"].labels == ["a", "b"] and found.taken == "all in a"
    assert "all in b" in found.candidates, "it costs 3"
    assert "all in b" not in solved(units, 2, measure, apart, {"a": 1.0, "b": 1.0}).candidates
    units, measure, apart, uniform = made_up(1, {"a": 1.0, "b": 1.0})
    del units[2]["a"]  # which stays as it is in that candidate
    found = solved(units, sum(unit[KEPT].cost for unit in units), measure, apart, uniform | {"a": 0.1})
    assert found.candidates["all in a"].labels == ["a", "a", KEPT, "a", "a", "a"]


@pytest.mark.parametrize("role, recipe, expected", [
    ("ffn", None, 2 * 64 * 128),
    ("ffn", INT4, 64 * 128 // 2 + 2 * 64 * 2 + 2 * 8 * (64 + 128)),  # codes, scales of 64 numbers, the branch
    ("conv", INT4, 64 * 128 // 2 + 2 * 64 * 2),
    ("ffn", with_weights(INT4, "int8"), 64 * 128 + 2 * 64),
    ("ffn", with_weights(INT4, "nvfp4"), 64 * 128 // 2 + 64 * 128 // 16 + 4),
    ("ffn", Recipe(3.0, None, per_channel=False), 64 * 128 + 2),
])  # fmt: skip
def test_bytes_of_a_layer_worked_by_hand(role, recipe, expected):
    shape = (64, 32, 2, 2) if role == "conv" else (64, 128)
    assert stored_bytes(shape, role, recipe) == expected
    assert stored_bytes(shape, role, recipe, 4) == (2 * expected if recipe is None else expected)
    other = with_weights(INT4, "int8")
    assert other.enable == Enable(Pair("int8", None), Pair("int8", None), None)
    assert other.per_channel and other.rank == 0 and other.quant_level == INT4.quant_level
