"""Mixed precision: choose a preset for each layer within a budget, such as bytes, with the least error of the output.

The squared errors of the network's output, each measured with one layer quantized, are assumed to add up, as in
``simulation.sensitivity``. Then the choice of one preset per layer is a multiple-choice knapsack problem (Kellerer et
al. 2004, chapter 11), which HiGHS solves exactly for a few hundred layers in well under a second. Alternative not
taken: a price per byte (Lagrangian relaxation), which leaves up to a layer's bytes unused.

Errors do not quite add up, least of all where inputs are quantized. So the solution's error is measured, and that of
each preset's layers alone. A preset's rate, its measured squared error over the sum of its single layers', multiplies
its errors, and the problem is solved again. Both solutions, and each preset for all layers, are compared as measured.
Alternative not taken: an integer program over pairs of layers (Deng et al. 2023), with quadratically many passes.

Linears that read one tensor are smoothed together, so they take one preset together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from sd_quant.process import without_output
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, dividing
from sd_quant.quantization.recipe import Enable, Pair, Recipe

HALF = 2  # bytes of a number in fp16
KEPT = "unquantized"  # the label of layers in high precision


@dataclass(frozen=True, slots=True)
class Choice:
    """Cost and error of a unit (layers that get one preset together) with one of its possible presets."""

    cost: float  # bytes
    squared_error: float  # of the network's output, relative to its norm


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper bound on the total cost of some units (layers that get one preset together)."""

    most: float
    units: Sequence[int]  # indices


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible solution: a label (preset, or ``KEPT``) for each unit, with the total cost and the error."""

    labels: Sequence[str]  # of each unit
    cost: float
    predicted: float  # error of images, if squared errors of units add up, each times its label's rate
    measured: float


@dataclass(frozen=True, slots=True)
class Solved:
    """Candidate solutions within a budget, by name, and each label's correction factor of squared errors (rate)."""

    candidates: Mapping[str, Candidate]
    rates: Mapping[str, float]  # by label: squared error of its units together over the sum of single units'

    @property
    def taken(self) -> str:
        """The name of the candidate with the smallest measured error; the first of several with the same error."""
        return min(self.candidates, key=lambda name: self.candidates[name].measured)


def with_weights(recipe: Recipe, fmt: str) -> Recipe:
    """Return ``recipe`` with weights in the format ``fmt`` and inputs in high precision, without a low-rank branch."""
    pair = Pair(fmt, None)
    enable = Enable(pair, pair, recipe.enable.attention)
    return replace(recipe, enable=enable, rank=0, per_channel=FORMATS[fmt].static_scale, shift=False)


def inputs_left_alone(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with its format of linear weights for all weights, inputs in high precision, and no branch."""
    return replace(with_weights(recipe, recipe.enable.linear.weight), per_channel=recipe.per_channel)


def stored_bytes(shape: Sequence[int], role: str, recipe: Recipe | None, unquantized: int = HALF) -> int:
    """Return the bytes of a layer's weight [out, in...] with its scales and low-rank branch.

    Without a recipe, each number takes ``unquantized`` bytes.
    """
    if recipe is None:
        return unquantized * prod(shape)
    fmt = dividing(recipe.formats_of(role).weight, prod(shape[1:]))
    return weight_bytes(shape, fmt, recipe.per_channel, recipe.rank_of(role, tuple(shape)))


def weight_bytes(shape: Sequence[int], name: str, per_channel: bool, rank: int) -> int:
    """Return the bytes of a weight [out, in...] in the format ``name``, its scales and a low-rank branch in fp16."""
    fmt, numbers, outputs = FORMATS[name], prod(shape), shape[0]
    scales = numbers // fmt.block if fmt.block is not None else outputs if per_channel else 1
    branch = HALF * rank * (outputs + numbers // outputs)
    if fmt.block_bytes is not None:
        return scales * fmt.block_bytes + branch
    scale_dtype, *global_dtypes = fmt.scale_dtypes
    global_scale = sum(dtype.itemsize for dtype in global_dtypes)
    return -(-numbers * fmt.bits // 8) + scales * scale_dtype.itemsize + global_scale + branch


def assigned_bytes(parameters: int, assignment: Mapping[str, LayerAssignment], unquantized: int = HALF) -> int:
    """Return the bytes of a network of ``parameters`` numbers: ``unquantized`` bytes each, unless quantized."""
    return unquantized * parameters + sum(
        weight_bytes(layer.weight_shape, layer.format, layer.weight_axis == 0, layer.rank)
        - unquantized * prod(layer.weight_shape)
        for layer in assignment.values()
        if layer.format is not None
    )


def choose(units: Sequence[Mapping[str, Choice]], limits: Sequence[Limit]) -> list[str]:
    """Choose a label for each unit with the least sum of squared errors within ``limits``, which must be feasible."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [(index, name) for index, unit in enumerate(units) for name in unit]
    errors = np.array([units[index][name].squared_error for index, name in flat])
    sizes = np.array([units[index][name].cost for index, name in flat])
    owners = np.array([index for index, _ in flat])
    one_each = np.arange(len(units))[:, None] == owners
    within = [sizes / limit.most * np.isin(owners, limit.units) for limit in limits if limit.units]
    with without_output():  # HiGHS prints names of its own functions
        found = milp(
            errors / max(errors.max(), np.finfo(float).tiny),  # the solver's tolerances are absolute
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(np.array(within), -np.inf, 1)],
            options={"mip_rel_gap": 0},
        )
    return [name for (_, name), taken in zip(flat, found.x, strict=True) if taken > 0.5]


def all_in(units: Sequence[Mapping[str, Choice]], label: str) -> list[str]:
    """Return, for each unit, ``label`` if it is one of the unit's choices, else ``KEPT``."""
    return [label if label in unit else KEPT for unit in units]


def solve(
    units: Sequence[Mapping[str, Choice]],
    limits: Sequence[Limit],
    measure: Callable[[Sequence[str]], float],
    apart: Callable[[Sequence[str]], Mapping[str, float]],
    uniform: Mapping[str, float],
    plain: Callable[[Sequence[Mapping[str, Choice]]], Mapping[str, Sequence[str]]],
) -> Solved:
    """Choose a label for each unit within the ``limits`` on cost: solve, measure, correct the errors and solve again.

    ``measure`` returns the network's error with these labels of all units; ``apart`` the errors by label, each with
    only that label's units quantized. ``uniform`` has the measured error of each label for all units that may have it.
    ``plain`` returns further candidates by name; those within the limits are compared. Every unit may be ``KEPT``.
    """
    measured = {tuple(all_in(units, label)): error for label, error in uniform.items()}

    def candidate(priced: Sequence[Mapping[str, Choice]], labels: Sequence[str]) -> Candidate:
        picked = [unit[label] for unit, label in zip(priced, labels, strict=True)]
        if (key := tuple(labels)) not in measured:
            measured[key] = measure(labels)
        predicted = sum(each.squared_error for each in picked) ** 0.5
        return Candidate(labels, sum(each.cost for each in picked), predicted, measured[key])

    rates = {label: rate_of(units, all_in(units, label), label, error) for label, error in uniform.items()}
    priced = [corrected(unit, rates) for unit in units]
    first = choose(priced, limits)
    candidates = {"by layer": candidate(priced, first)}
    others = {
        name: candidate(priced, labels) for name, labels in plain(priced).items() if is_within(priced, labels, limits)
    }
    rates |= {label: rate_of(units, first, label, error) for label, error in apart(first).items() if error}
    priced = [corrected(unit, rates) for unit in units]
    second = choose(priced, limits)
    if second != first:
        candidates["corrected"] = candidate(priced, second)
    return Solved(candidates | others, rates)


def is_within(units: Sequence[Mapping[str, Choice]], labels: Sequence[str], limits: Sequence[Limit]) -> bool:
    """Return whether the total cost of the units with these labels (one per unit) is within every limit."""
    return all(sum(units[index][labels[index]].cost for index in limit.units) <= limit.most for limit in limits)


def rate_of(units: Sequence[Mapping[str, Choice]], labels: Sequence[str], label: str, error: float) -> float:
    """Return ``error``^2, of all units with ``label``, over the sum of their single squared errors; 1 for sum 0."""
    alone = sum(unit[label].squared_error for unit, own in zip(units, labels, strict=True) if own == label)
    return error**2 / alone if alone else 1.0


def corrected(unit: Mapping[str, Choice], rates: Mapping[str, float]) -> dict[str, Choice]:
    """Return a unit's choices by label, with each squared error multiplied by the rate of its label."""
    return {
        label: replace(choice, squared_error=choice.squared_error * rates.get(label, 1.0))
        for label, choice in unit.items()
    }
