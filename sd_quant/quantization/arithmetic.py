"""What a layer computes by a recipe, as far as the time of its product depends on it.

It is known before calibration: whether an input is shifted, which calibration decides for each convolution, counts as
true where the recipe allows it.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sd_quant.models.layer_calls import LayerCall
from sd_quant.models.parts import SharedInput
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import weight_bytes
from sd_quant.quantization.formats import FORMATS, dividing
from sd_quant.quantization.low_rank import rank_of
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.smoothing import SMOOTHINGS

ZERO_POINT = -20  # of a stand-in whose input is shifted
LARGEST_INPUT = 4.0  # of a stand-in; times do not depend on it


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The formats of a quantized layer, and the operations beside its product."""

    weight: str
    activation: str | None  # None: the input stays in high precision
    per_channel: bool  # whether a static scale of the weight is one for each output
    per_token: bool = False
    rotation: int = 0
    rank: int = 0
    multiplies: bool = False  # whether the layer multiplies its input by smoothing factors
    shift: bool = False

    def __str__(self) -> str:
        """As a table of times has it, such as ``int8 int8 per_channel rank=32``."""
        flags = [name for name in ("per_channel", "per_token", "multiplies", "shift") if getattr(self, name)]
        numbers = [f"{name}={value}" for name in ("rotation", "rank") if (value := getattr(self, name))]
        return " ".join([self.weight, self.activation or "-", *flags, *numbers])

    @property
    def formats(self) -> set[str]:
        """The formats that it needs."""
        return {self.weight} | ({self.activation} if self.activation else set())


def arithmetic_of(recipe: Recipe | None, role: str, shape: tuple[int, ...], absorbed: bool) -> Arithmetic | None:
    """What a layer of this role with a weight of this ``shape`` [out, in...] computes; None: it is not quantized.

    ``absorbed``: whether an earlier layer takes over its smoothing factors.
    """
    if recipe is None:
        return None
    pair, conv = recipe.formats_of(role), role == "conv"
    weight = dividing(pair.weight, prod(shape[1:]))
    shifts = conv and recipe.shift and recipe.per_channel and pair.activation is not None
    return Arithmetic(
        weight,
        pair.activation,
        recipe.per_channel and FORMATS[weight].static_scale,
        recipe.scaled_per_token(role),
        recipe.rotation_of(role, shape[1]),
        0 if conv else rank_of(recipe.rank, shape),
        not conv and recipe.alpha is not None and not absorbed,
        shifts and FORMATS[pair.activation].equal_levels,
    )


def absorbed_by_others(recipe: Recipe, inputs: list[SharedInput]) -> set[str]:
    """The linears whose smoothing factors an earlier layer takes over, of those that read these ``inputs``."""
    smoothed = SMOOTHINGS[recipe.smoothing](inputs)
    return {name for shared in smoothed if shared.producer is not None for name in shared.readers}


def bytes_read(arithmetic: Arithmetic | None, shape: tuple[int, ...]) -> int:
    """Bytes of a weight of this ``shape`` [out, in...] with its scales, without a low-rank branch."""
    if arithmetic is None:
        return 2 * prod(shape)
    return weight_bytes(shape, arithmetic.weight, arithmetic.per_channel, 0)


def stand_in(name: str, call: LayerCall, arithmetic: Arithmetic, weight: Tensor) -> LayerAssignment:
    """A row that computes this ``arithmetic`` with a random fp32 ``weight``, for times; its outputs are of no use."""
    outputs, inputs = call.outputs, call.weight_shape[1]
    amax = weight.abs().flatten(1).amax(1) if arithmetic.per_channel else weight.abs().amax().reshape(1)
    rank = arithmetic.rank
    return LayerAssignment(
        name,
        "conv" if call.geometry else "linear",
        call.weight_shape,
        format=arithmetic.weight,
        activation_format=arithmetic.activation,
        weight_axis=0 if arithmetic.per_channel else None,
        weight_amax=amax,
        activation_amax=None if arithmetic.activation is None else 1.0 if arithmetic.per_token else LARGEST_INPUT,
        per_token=arithmetic.per_token,
        rotation=arithmetic.rotation,
        activation_zero_point=ZERO_POINT if arithmetic.shift else 0,
        bias=torch.ones(outputs) if arithmetic.shift else None,
        pre_quant_scale=torch.linspace(0.5, 1.5, inputs) if arithmetic.multiplies else None,
        low_rank=(torch.ones(outputs, rank).half(), torch.ones(rank, inputs).half()) if rank else None,
    )
