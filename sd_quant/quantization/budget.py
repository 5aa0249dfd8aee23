"""Bits under a budget: the formats of layers with which the network errs least within a given number of bytes.

The squared errors of the network's output, each measured with one layer quantized, are assumed to add up, as in
``simulation.sensitivity``. Then every layer takes one of several formats in a multiple-choice knapsack problem
(Kellerer et al. 2004, chapter 11), which HiGHS solves exactly for a few hundred layers in well under a second. The road
not taken is a price per byte (Lagrangian relaxation): nearly as good, but it leaves up to a layer's bytes unused.

Linears that read one tensor are smoothed together, so they take one format together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from sd_quant.process import without_output
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, dividing
from sd_quant.quantization.low_rank import rank_of
from sd_quant.quantization.recipe import Enable, Pair, Recipe

HALF = 2  # bytes of a number in fp16


@dataclass(frozen=True, slots=True)
class Choice:
    """Size and error of a unit of layers in one of its candidate formats."""

    bytes: int
    squared_error: float  # of the network's output, relative to its norm


def with_weights(recipe: Recipe, fmt: str) -> Recipe:
    """``recipe`` with weights of this format and inputs in high precision, without a low-rank branch."""
    pair = Pair(fmt, None)
    enable = Enable(pair, pair, recipe.enable.attention)
    return replace(recipe, enable=enable, rank=0, per_channel=FORMATS[fmt].static_scale, shift=False)


def inputs_left_alone(recipe: Recipe) -> Recipe:
    """``recipe`` with the weights of its linears only: inputs in high precision, no low-rank branch."""
    return replace(with_weights(recipe, recipe.enable.linear.weight), per_channel=recipe.per_channel)


def stored_bytes(shape: Sequence[int], role: str, recipe: Recipe | None, unquantized: int = HALF) -> int:
    """Bytes of a layer's weight [out, in...], its scales and its low-rank branch.

    Without a recipe each number takes ``unquantized`` bytes.
    """
    if recipe is None:
        return unquantized * prod(shape)
    rank = 0 if role == "conv" else rank_of(recipe.rank, tuple(shape))
    fmt = dividing(recipe.formats_of(role).weight, prod(shape[1:]))
    return weight_bytes(shape, fmt, recipe.per_channel, rank)


def weight_bytes(shape: Sequence[int], name: str, per_channel: bool, rank: int) -> int:
    """Bytes of a weight [out, in...] in the format ``name``, of its scales and of a low-rank branch in fp16."""
    fmt, numbers, outputs = FORMATS[name], prod(shape), shape[0]
    scales = numbers // fmt.block if fmt.block is not None else outputs if per_channel else 1
    branch = HALF * rank * (outputs + numbers // outputs)
    if fmt.block_bytes is not None:
        return scales * fmt.block_bytes + branch
    scale_dtype, *global_dtypes = fmt.scale_dtypes
    global_scale = sum(dtype.itemsize for dtype in global_dtypes)
    return -(-numbers * fmt.bits // 8) + scales * scale_dtype.itemsize + global_scale + branch


def assigned_bytes(parameters: int, assignment: Mapping[str, LayerAssignment], unquantized: int = HALF) -> int:
    """Bytes of a network with this number of ``parameters``: layers as assigned, any other number ``unquantized``."""
    return unquantized * parameters + sum(
        weight_bytes(layer.weight_shape, layer.format, layer.weight_axis == 0, layer.rank)
        - unquantized * prod(layer.weight_shape)
        for layer in assignment.values()
        if layer.format is not None
    )


def choose_uniform(parts: Sequence[Mapping[str, Choice]], limit: int) -> list[str] | None:
    """The name of each part's one choice, with the least sum of squared errors within ``limit`` bytes; None: none fits.

    All combinations are tried, of a few choices for a few parts.
    """
    fitting = []
    for names in product(*parts):
        taken = [part[name] for part, name in zip(parts, names, strict=True)]
        if sum(choice.bytes for choice in taken) <= limit:
            fitting.append((sum(choice.squared_error for choice in taken), list(names)))
    return min(fitting)[1] if fitting else None


def choose(units: Sequence[Mapping[str, Choice]], limit: int) -> list[str]:
    """The name of each unit's choice, with the least sum of squared errors within ``limit`` bytes.

    The smallest choices have to fit.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [(index, name) for index, unit in enumerate(units) for name in unit]
    errors = np.array([units[index][name].squared_error for index, name in flat])
    sizes = np.array([units[index][name].bytes for index, name in flat])
    one_each = np.arange(len(units))[:, None] == [index for index, _ in flat]
    with without_output():  # HiGHS prints names of its own functions
        found = milp(
            errors / max(errors.max(), np.finfo(float).tiny),  # the solver's tolerances are absolute
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes / limit, -np.inf, 1)],
            options={"mip_rel_gap": 0},
        )
    return [name for (_, name), taken in zip(flat, found.x, strict=True) if taken > 0.5]
