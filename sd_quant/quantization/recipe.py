"""The quantization recipe: which layers are quantized, to which formats, and how ranges and scales are chosen.

No torch is imported here, because the command line checks a recipe against a model's layers before torch is loaded.
The recipe's checks here need only the layers' names, roles and shapes.

``quant_level`` selects layers by role, as in the diffusion recipes of ModelOpt and NeMo. Each level adds to the one
before: 0 nothing; 1 convolutions; 2 feed-forward; 2.5 query, key and value; 3 every other linear; 4 the two matrix
products of attention. A layer that the family excludes has the role ``excluded``, which is in no level.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Annotated

from sd_quant.errors import ConfigError
from sd_quant.knobs import COUNT, FROM_0, Called, Limit, one_of
from sd_quant.quantization.formats import FORMATS, dividing
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.percentile import COLLECT_METHODS, PERCENTILE_CALIBRATORS
from sd_quant.quantization.smoothing import SMOOTHINGS

ROLES = ("conv", "ffn", "qkv", "linear")
QUANT_LEVELS: dict[float, tuple[str, ...]] = {
    0.0: (),
    1.0: ROLES[:1],
    2.0: ROLES[:2],
    2.5: ROLES[:3],
    3.0: ROLES[:4],
    4.0: (*ROLES, "attention"),
}

ALPHA = Limit(
    lambda alpha: alpha == "auto" or (isinstance(alpha, float) and 0 <= alpha <= 1), "a number from 0 to 1, or auto"
)
RANK = Limit(
    lambda rank: 0 <= rank <= 2**20 if isinstance(rank, int) else 0 < rank < 1,
    "0, a number of singular directions, or a fraction below 1 of a layer's shorter side",
)
ROUNDINGS = ("nearest", "gptq")
ROTATIONS = (0, 4, 16, 64, 256)  # sizes of regular Hadamard matrices: powers of 4
BY_ROLE = "by_role"  # the observer that suits a layer's role
OF_INPUTS = one_of(lambda: [name for name, fmt in FORMATS.items() if fmt.onnx_type and fmt.block_rows == 1])
FOR_ATTENTION = one_of(lambda: [name for name, fmt in FORMATS.items() if fmt.attention])


@dataclass(frozen=True, slots=True)
class Pair:
    """The formats of a layer's weight and of its input."""

    weight: Annotated[str, one_of(FORMATS), "format of a layer's weight"]
    activation: Annotated[str | None, OF_INPUTS, "format of its input; null: it stays in high precision"]


@dataclass(frozen=True, slots=True)
class Enable:
    """The formats of a recipe, by kind of layer."""

    conv: Pair
    linear: Pair
    attention: Annotated[str | None, FOR_ATTENTION, "format of attention's matrix products; null: they have none"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """All choices of a quantization. Values are validated where a configuration is read, not here."""

    quant_level: Annotated[
        float,
        Called("quant_level"),
        one_of(QUANT_LEVELS),
        "what is quantized: 0 nothing, 1 convolutions, 2 + feed-forward, 2.5 + query, key and value, 3 + every other "
        "linear, 4 + attention's matrix products",
    ]
    alpha: Annotated[
        float | str | None,
        Called("alpha"),
        ALPHA,
        "SmoothQuant: 0 leaves outliers in the activations, 1 moves them into the weights; auto searches it per layer; "
        "null where nothing is smoothed",
    ]
    percentile: Annotated[
        float,
        Called("percentile"),
        Limit(lambda share: 0 < share <= 1, "a number above 0 and up to 1"),
        "share of the denoising steps, from the first on, whose ranges count for convolutions",
    ] = 1.0
    collect_method: Annotated[
        str, Called("collect_method"), one_of(COLLECT_METHODS), "how the ranges of prompts and steps become one"
    ] = "mean-max"
    percentile_calibrator: Annotated[
        str,
        one_of(PERCENTILE_CALIBRATORS),
        "modelopt: literally what NVIDIA's class computes; with collect_method=min-mean that is what NeMo computes",
    ] = "corrected"
    observer: Annotated[
        str,
        one_of(lambda: [*OBSERVERS, BY_ROLE]),
        "how the range of an input is chosen: min_max clips nothing, mse judges a sample of real inputs; "
        "by_role: mse for convolutions, min_max for linears",
    ] = "min_max"
    shift: Annotated[
        bool, "inputs of convolutions may be quantized minus a constant, so that those of one sign use all codes"
    ] = False
    smoothing: Annotated[
        str,
        Called("smoothing"),
        one_of(SMOOTHINGS),
        "where SmoothQuant's factors go: folded: into the layer in front, at no cost; modelopt: into a multiplication "
        "before every layer; none: nothing is smoothed",
    ] = "folded"
    batch_size: Annotated[
        int, COUNT, "prompts of a calibration call; ModelOpt's own percentile calibrator depends on it"
    ] = 1
    enable: Enable = field(default_factory=lambda: Enable(Pair("int8", "int8"), Pair("int8", "int8"), None))
    per_channel: Annotated[
        bool, "weights have a scale per output channel, where their format takes a range, instead of one"
    ] = True
    per_token: Annotated[
        bool, "inputs of linears are scaled token by token while the network runs, not by what calibration has seen"
    ] = False
    rotation: Annotated[
        int,
        one_of(ROTATIONS),
        "inputs of linears that a Hadamard matrix rotates together before they are rounded, at most: each layer takes "
        "the largest power of 4 that divides its inputs; 0: none",
    ] = 0
    rank: Annotated[
        int | float,
        RANK,
        "SVDQuant: singular directions of a linear's weight that stay in fp16 beside the quantized rest",
    ] = 0
    branch_rounds: Annotated[
        int, FROM_0, "how many times a low-rank branch is fitted again, to what rounding has left of the outputs"
    ] = 0
    rounding: Annotated[
        str,
        one_of(ROUNDINGS),
        "codes of weights of four bits or in blocks: nearest: the nearest to each number; gptq: those with which the "
        "output errs least",
    ] = "nearest"
    scale_search: Annotated[bool, "scales of weights of four bits or in blocks are the best of several"] = False

    def chooses_codes(self, fmt: str) -> bool:
        """Return whether weights in the format ``fmt`` get searched codes or scales instead of round-to-nearest."""
        searched = self.rounding != "nearest" or self.scale_search or self.branch_rounds > 0
        return FORMATS[fmt].searched and searched

    @property
    def needs_inputs(self) -> bool:
        """Whether the recipe needs calibration, that is, statistics of the layers' inputs."""
        pairs = self.enable.conv, self.enable.linear
        return self.rank != 0 or any(pair.activation or self.chooses_codes(pair.weight) for pair in pairs)

    def scaled_per_token(self, role: str) -> bool:
        """Return whether inputs of layers of this role are scaled per token at run time."""
        return self.per_token and role != "conv" and self.enable.linear.activation is not None

    def static_range(self, role: str) -> bool:
        """Return whether inputs of layers of this role have a static range from calibration, which clips them."""
        name = self.formats_of(role).activation
        return name is not None and FORMATS[name].static_scale and not self.scaled_per_token(role)

    def rotation_of(self, role: str, inputs: int) -> int:
        """Return the rotation's group size for a layer of this role and number of ``inputs``; 0: no rotation."""
        if role == "conv" or self.enable.linear.activation is None:
            return 0
        return max((group for group in ROTATIONS[1:] if group <= self.rotation and inputs % group == 0), default=0)

    def rank_of(self, role: str, shape: tuple[int, ...]) -> int:
        """Return the rank of the low-rank branch of a weight of this role and shape; 0: no branch."""
        if role == "conv" or not self.rank:
            return 0
        return self.rank if isinstance(self.rank, int) else max(1, round(self.rank * min(shape)))

    def formats_of(self, role: str) -> Pair:
        """Return the formats of weight and input for a layer of this role."""
        return self.enable.conv if role == "conv" else self.enable.linear

    def observer_of(self, role: str) -> str:
        """Return the name of the observer for the input of a layer of this role."""
        by_role = "mse" if role == "conv" else "min_max"
        return by_role if self.observer == BY_ROLE else self.observer


def formats_used(enable: Enable, quant_level: float) -> dict[str, set[str]]:
    """Return the names of the formats that ``quant_level`` uses, for "weights", "inputs" and "attention"."""
    pairs = [enable.conv, enable.linear][: math.ceil(quant_level)]
    return {
        "weights": {pair.weight for pair in pairs},
        "inputs": {pair.activation for pair in pairs if pair.activation is not None},
        "attention": {enable.attention} if quant_level >= 4 and enable.attention is not None else set(),
    }


def reason_kept(role: str, quant_level: float) -> str | None:
    """Return why a layer of this role stays in high precision, or None when it is quantized."""
    if role == "excluded":
        return "excluded by the model family"
    if role not in QUANT_LEVELS[quant_level]:
        return f"role {role} is not in quant_level {quant_level:g}"
    return None


def unheeded_knobs(recipe: Recipe) -> dict[str, None]:
    """Return the settings that have no effect at this recipe's quant_level, each mapped to None.

    Level 0 quantizes nothing, level 1 no linears. Recipes with equal results then compare as equal.
    """
    if recipe.quant_level == 0:
        return dict.fromkeys(each.name for each in fields(Recipe) if each.name != "quant_level")
    if recipe.quant_level > 1:
        return {}
    return dict.fromkeys(("alpha", "smoothing", "rank", "branch_rounds", "per_token", "rotation"))


def check_layers(
    roles: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
    attentions: Collection[str] = (),
    exclude: Collection[str] = (),
    recipes: Mapping[str, Recipe] = {},
) -> None:
    """Raise ConfigError unless the recipe (its rank, rotation and blocks) fits the layers that it quantizes.

    By layer name, ``roles`` has the roles, ``shapes`` the shapes of weights, and ``recipes`` recipes that replace
    ``recipe``. ``attentions`` are the names of attentions that can be quantized, ``exclude`` patterns of names.
    """
    for name in check_selection(roles, recipe, attentions, exclude):
        if found := misfit(name, roles[name], shapes[name], recipes.get(name, recipe)):
            raise ConfigError("; ".join(found))


def check_selection(
    roles: Mapping[str, str], recipe: Recipe, attentions: Collection[str] = (), exclude: Collection[str] = ()
) -> list[str]:
    """Return the layers that quant_level selects and ``exclude`` does not match. Raises ConfigError if none is left."""
    level = recipe.quant_level
    if level == 0:
        return []
    selected = [name for name, role in roles.items() if reason_kept(role, level) is None]
    if not selected:
        raise ConfigError(
            f"quant_level is {level:g}, expected at least 2: all convolutions of this model stay in high precision"
        )
    left = [name for name in selected if not is_excluded(name, exclude)]
    if not left:
        raise ConfigError(
            f"quantize.exclude matches all {len(selected)} layers that quant_level={level:g} selects, expected fewer: "
            "nothing would be quantized"
        )
    if level >= 4 and not attentions:
        raise ConfigError(f"quant_level is {level:g}, expected at most 3: this model's attention is never quantized")
    return left


def misfit(name: str, role: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[str, str] | None:
    """Return why a recipe does not fit a layer of this role and weight shape, and a remedy; None if it fits."""
    formats, numbers = recipe.formats_of(role), math.prod(shape[1:])
    if recipe.rank_of(role, shape) > min(shape):
        return (
            f"quantize.rank is {recipe.rank}, expected at most {min(shape)}, the shorter side of {name}",
            "give a fraction below 1 instead, which is taken of every layer",
        )
    if recipe.rotation_of(role, 0) and not recipe.rotation_of(role, shape[1]):
        return (
            f"quantize.rotation is {recipe.rotation}, and no power of 4 divides the {shape[1]} inputs of {name}",
            "exclude it with quantize.exclude, or set quantize.rotation=0",
        )
    for fmt in filter(None, (formats.weight, formats.activation)):
        block = FORMATS[dividing(fmt, numbers)].block
        if block is not None and numbers % block:
            return (
                f"{fmt} has blocks of {block}, which do not divide the {numbers} inputs of {name}",
                "exclude it with quantize.exclude, or choose a preset whose blocks divide them",
            )
    return None


def is_excluded(name: str, exclude: Collection[str]) -> bool:
    """Return whether a layer's name matches one of the ``fnmatch`` patterns in ``exclude``."""
    return any(fnmatchcase(name, pattern) for pattern in exclude)


def excluded(names: Iterable[str], exclude: Collection[str]) -> dict[str, str]:
    """Map each layer name that matches a pattern in ``exclude`` to the reason why it stays in high precision."""
    return {name: "excluded by the preset" for name in names if is_excluded(name, exclude)}
