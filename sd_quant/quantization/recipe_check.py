"""A check that a recipe fits a model's layers, by their names and shapes, before anything is calibrated."""

import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from sd_quant.errors import ConfigError
from sd_quant.quantization.formats import FORMATS, dividing
from sd_quant.quantization.low_rank import rank_of
from sd_quant.quantization.recipe import Recipe, reason_kept


def check_layers(
    roles: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
    attentions: Collection[str] = (),
    exclude: Collection[str] = (),
    recipes: Mapping[str, Recipe] = {},
) -> None:
    """Raises ConfigError when the recipe does not fit the layers that it quantizes.

    ``roles`` has the role of every layer, ``shapes`` the shape of its weight, both by name. ``attentions`` are the
    names of attentions that can be quantized. ``exclude`` and ``recipes`` as in ``derivation.derive``.
    """
    for name in check_selection(roles, recipe, attentions, exclude):
        if found := misfit(name, roles[name], shapes[name], recipes.get(name, recipe)):
            raise ConfigError("; ".join(found))


def check_selection(
    roles: Mapping[str, str], recipe: Recipe, attentions: Collection[str] = (), exclude: Collection[str] = ()
) -> list[str]:
    """The layers that the recipe's level selects and ``exclude`` leaves. Raises ConfigError when there are none.

    Arguments as in ``check_layers``.
    """
    level = recipe.quant_level
    if level == 0:
        return []
    selected = [name for name, role in roles.items() if reason_kept(role, level) is None]
    if not selected:
        raise ConfigError(
            f"quant_level is {level:g}, expected at least 2: all convolutions of this model stay in high precision"
        )
    if all(is_excluded(name, exclude) for name in selected):
        raise ConfigError(
            f"quantize.exclude matches all {len(selected)} layers that quant_level={level:g} selects, expected fewer: "
            "nothing would be quantized"
        )
    if level >= 4 and not attentions:
        raise ConfigError(f"quant_level is {level:g}, expected at most 3: this model's attention is never quantized")
    return [name for name in selected if not is_excluded(name, exclude)]


def misfit(name: str, role: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[str, str] | None:
    """Why a recipe does not fit a layer of this role and shape of weight, and what can be done; None: it fits."""
    formats, rank = recipe.formats_of(role), rank_of(recipe.rank, shape) if role != "conv" else 0
    if rank > min(shape):
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
        numbers = math.prod(shape[1:])
        block = FORMATS[dividing(fmt, numbers)].block
        if block is not None and numbers % block:
            return (
                f"{fmt} has blocks of {block}, which do not divide the {numbers} inputs of {name}",
                "exclude it with quantize.exclude, or choose a preset whose blocks divide them",
            )
    return None


def is_excluded(name: str, exclude: Collection[str]) -> bool:
    """Whether a layer's name matches one of the ``fnmatch`` patterns."""
    return any(fnmatchcase(name, pattern) for pattern in exclude)
