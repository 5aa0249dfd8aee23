"""Checks that the targets of ``hand_over`` (other tools' file formats) can store a recipe, before anything is computed.

Knobs suffice for these checks; which layers a target can store is decided later, by layer, in ``interchange.holding``.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.requirements import Requirement

from sd_quant.config.model import Model
from sd_quant.config.recipe import Quantize
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.interchange import FP16, PER_ROW, STATIC, TARGETS, UNETS, ForeignFormat
from sd_quant.knobs import check
from sd_quant.models import controlnet_names
from sd_quant.quantization.recipe import Recipe


def needs(weights: Collection[str], conv: str | None, recipe: Recipe) -> Mapping[str, Callable[[ForeignFormat], bool]]:
    """Return checks of a target by what they demand: a format of ``weights``, for convolutions ``conv``, and so on."""
    linear, inputs = recipe.enable.linear.weight, recipe.enable.linear.activation
    return {
        f"weights in {' or '.join(sorted(weights))}": lambda target: bool(set(weights) & target.formats.keys()),
        f"{linear} with inputs in {inputs or 'high precision'}": lambda target: target.takes_inputs(linear, inputs),
        f"a scale for {'each row' if recipe.per_channel else 'all'} of a weight in {linear}": lambda target: (
            target.takes_scales(linear, recipe.per_channel, recipe.per_token)
        ),
        "a low-rank branch, or quantize.rank=0": lambda target: target.low_rank or recipe.rank == 0,
        f"rotated weights in {linear}, or quantize.rotation=0": lambda target: (
            recipe.rotation == 0 or linear in target.rotated or conv in target.convolutions
        ),
        f"inputs of {linear} that are scaled per token, or quantize.per_token=false": lambda target: (
            not recipe.per_token or target.takes_per_token(linear) or conv in target.convolutions
        ),
    }


def check_targets(
    knob: str, targets: Collection[str], model: Model, recipe: Quantize, weights: Collection[str]
) -> None:
    """Raise ConfigError for a target that cannot store the result of a recipe; ``weights`` are its weight formats.

    Where layers may have several recipes, the target has to store one; layers with the others stay in high precision.
    LoRAs beside the weights and quantized ControlNets are refused, because the tools add both themselves.
    """
    family, conv = model.family, model.family in UNETS  # transformers have linears
    mixed = [own for label, own in recipe.offered().items() if label != recipe.format]

    def holds_one(target: ForeignFormat) -> bool:
        of_family = target.families is None or family in target.families
        facts = [needs({own.enable.linear.weight}, own.enable.conv.weight if conv else None, own) for own in mixed]
        return of_family and any(all(holds(target) for holds in each.values()) for each in facts)

    facts = {
        family: lambda target: target.families is None or family in target.families,
        **needs(weights, recipe.enable.conv.weight if conv else None, recipe),
    }
    for what, holds in facts.items():
        able = ", ".join(name for name, target in TARGETS.items() if holds(target))
        for name in targets:
            fits = holds_one(TARGETS[name]) or holds(TARGETS[name])
            check(fits, knob, name, f"a target that holds {what} ({able})")
    nets = controlnet_names(len(model.controlnets))
    graphs = [name for name in targets if nets and TARGETS[name].runtime is not None]
    expected = "targets without graphs with model.controlnets, because the pipelines that open these have none"
    check(not graphs, knob, graphs, expected)
    parts = [name for name in nets if targets and name in (recipe.parts or {})]
    check(not parts, "quantize.parts", parts, f"no ControlNet with {knob}: no target's folder has one")


def inputs_held(target: ForeignFormat, recipe: Recipe) -> str | None:
    """Return how a target's tool computes linears' inputs, see ``ForeignFormat``; None if it cannot hold a recipe."""
    linear = recipe.enable.linear.weight
    if linear not in target.formats or not all(holds(target) for holds in needs({linear}, None, recipe).values()):
        return None
    how = target.formats[linear]
    if how == PER_ROW or how == STATIC and recipe.per_token:
        return PER_ROW
    return FP16 if recipe.enable.linear.activation is None else how


def executed_by(recipe: Recipe) -> list[str]:
    """Return the targets, except graphs for a runtime, whose tool holds the recipe and quantizes inputs if it does."""
    wanted = (None, FP16) if recipe.enable.linear.activation is not None else (None,)
    return [
        name for name, target in TARGETS.items() if target.runtime is None and inputs_held(target, recipe) not in wanted
    ]


def check_consumers(targets: list[str]) -> None:
    """Raise ResourceError for a missing package of a target, ConfigError for a version that cannot open the result."""
    for target in map(TARGETS.__getitem__, targets):
        if target.package is not None and find_spec(target.package) is None:
            raise ResourceError(
                f"the package {target.package} is not installed, which writes what {target.name} opens; "
                f"pip install 'sd-quant[{target.package}]'"
            )
        for broken, symptom in target.broken.items():
            requirement = Requirement(broken)
            with suppress(PackageNotFoundError):
                if requirement.specifier.contains(found := version(requirement.name), prereleases=True):
                    raise ConfigError(
                        f"{requirement.name} {found} is installed, with which {target.consumer} cannot open the "
                        f"result: {symptom}; install {' and '.join(target.tried)}"
                    )
