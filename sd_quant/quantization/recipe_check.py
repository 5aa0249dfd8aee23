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
    level = recipe.quant_level
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
    for name in selected:
        if is_excluded(name, exclude):
            continue
        own, shape = recipes.get(name, recipe), shapes[name]
        formats, rank = own.formats_of(roles[name]), rank_of(own.rank, shape) if roles[name] != "conv" else 0
        if rank > min(shape):
            raise ConfigError(
                f"quantize.rank is {recipe.rank}, expected at most {min(shape)}, the shorter side of {name}; "
                "give a fraction below 1 instead, which is taken of every layer"
            )
        if own.rotation_of(roles[name], 0) and not own.rotation_of(roles[name], shape[1]):
            raise ConfigError(
                f"quantize.rotation is {own.rotation}, and no power of 4 divides the {shape[1]} inputs of {name}; "
                "exclude it with quantize.exclude, or set quantize.rotation=0"
            )
        for fmt in filter(None, (formats.weight, formats.activation)):
            numbers = math.prod(shape[1:])
            block = FORMATS[dividing(fmt, numbers)].block
            if block is not None and numbers % block:
                raise ConfigError(
                    f"{fmt} has blocks of {block}, which do not divide the {numbers} inputs of {name}; exclude it "
                    "with quantize.exclude, or choose a preset whose blocks divide them"
                )


def is_excluded(name: str, exclude: Collection[str]) -> bool:
    """Whether a layer's name matches one of the ``fnmatch`` patterns."""
    return any(fnmatchcase(name, pattern) for pattern in exclude)
