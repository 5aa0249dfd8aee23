"""A session with a recipe: which layers the recipe quantizes, and how."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_quant.config import Infer, Model, Quantize
from sd_quant.config.recipe import TEXT_ENCODERS, part_recipe
from sd_quant.errors import ConfigError
from sd_quant.knobs import check
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser, empty_part, roles_of_part
from sd_quant.models.parts import Heads, SharedInput, exported, text_readers
from sd_quant.quantization.budget import inputs_left_alone, with_weights
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.recipe_check import check_layers, check_part, is_excluded
from sd_quant.simulation.sensitivity import layers_to_keep
from sd_quant.stages.resources import Needs
from sd_quant.stages.session import Session, begin, finish


@dataclass(frozen=True)
class Loaded(Session):
    """A session, and what follows from the checkpoint's structure and the recipe."""

    roles: dict[str, str]  # role of each of the denoiser's layers
    shapes: dict[str, tuple[int, ...]]  # of the weight of each
    attentions: dict[str, Heads]  # by name, of those that quant_level 4 can quantize
    recipe: Quantize
    exclude: Collection[str]  # patterns of the layers that the recipe leaves in high precision
    weights_alone: Collection[str]  # the linears of which the recipe quantizes the weight alone
    kept: int  # how many of the most sensitive layers stay in high precision
    model: Model
    infer: Infer  # the images that are made, whose guidance scale calibration takes too
    part_presets: Mapping[str, str]  # of other parts than the denoiser that are quantized by ``quantize.parts``
    part_recipes: Mapping[str, Recipe]  # of the same parts

    @property
    def guidance_scale(self) -> float:
        return self.infer.scale

    @property
    def shared_inputs(self) -> list[SharedInput]:
        """The inputs that linears share. A linear that only the recipe includes has one of its own."""
        linears = [name for name, role in self.roles.items() if role != "conv"]
        inputs = self.checkpoint.family.shared_inputs(linears)
        known = {name for shared in inputs for name in shared.readers}
        others = [name for name in linears if self.roles[name] != "excluded" and name not in known]
        return [*inputs, *(SharedInput((name,)) for name in others)]

    def own(self, name: str, recipe: Recipe) -> Recipe:
        """The ``recipe`` of the layer of this name: without its inputs where the weight alone is quantized."""
        return inputs_left_alone(recipe) if name in self.weights_alone else recipe


def read_the_text(checkpoint: Checkpoint, roles: Mapping[str, str]) -> list[str]:
    """The linears whose only input is the text. Raises ConfigError when there are none."""
    linears = [name for name, role in roles.items() if role != "conv"]
    names = sorted(text_readers(checkpoint.family.shared_inputs(linears)))
    if not names:
        raise ConfigError(
            "quantize.exclude_text is true, expected false, because no layer of this model reads the text alone"
        )
    return names


def load(model: Model, infer: Infer, quantize: Quantize, needs: Callable[[Loaded], Needs], directory: Path) -> Loaded:
    """Open the checkpoint and make all checks, as ``open_session``, those of the recipe before weights are read."""
    loaded = with_recipe(begin(model, infer, {"model": model, "infer": infer}), model, infer, quantize)
    finish(loaded, lambda _: needs(loaded), directory, finite=True)
    return loaded


def with_recipe(session: Session, model: Model, infer: Infer, recipe: Quantize) -> Loaded:
    """Check the knobs against the checkpoint's structure and find the layers that the recipe quantizes.

    Raises ConfigError for knobs or a recipe that do not fit.
    """
    session.check(model, infer, recipe)
    checkpoint, network, family = session.checkpoint, empty_denoiser(session.checkpoint), model.family
    roles, attentions = checkpoint.family.layer_roles(network), checkpoint.family.attentions(network)
    shapes = {name: tuple(network.get_parameter(f"{name}.weight").shape) for name in roles}
    linears = [name for name, shape in shapes.items() if len(shape) == 2]
    excluded = [name for name in linears if roles[name] == "excluded"]
    roles |= dict.fromkeys(matched("include", recipe.include.get(family, ()), excluded), "linear")
    exclude = list(recipe.exclude.get(family, ()))
    if recipe.exclude_text:
        exclude += read_the_text(checkpoint, roles)
    alone = frozenset(matched("weights_alone", recipe.weights_alone.get(family, ()), linears))
    alternatives = [with_weights(recipe, fmt) for fmt in recipe.choices] if recipe.chooses_bits else []
    for each in (recipe, *alternatives):
        check_layers(roles, shapes, each, attentions, exclude, dict.fromkeys(alone, inputs_left_alone(each)))
    selected = sum(reason_kept(role, recipe.quant_level) is None for role in roles.values())
    kept = layers_to_keep(recipe.keep, selected)
    presets = presets_of_parts(session, recipe.parts or {})
    others = recipes_of_parts(session, presets)
    loaded = Loaded(
        checkpoint, roles, shapes, attentions, recipe, exclude, alone, kept, model, infer, presets, others
    )  # fmt: skip
    check_readers(loaded)
    return loaded


def presets_of_parts(session: Session, given: Mapping[str, str]) -> dict[str, str]:
    """The presets of other parts than the denoiser, with text encoders by name. Raises ConfigError for a wrong part."""
    others = [part for part in exported(session.parts) if part != session.denoiser]
    named = {TEXT_ENCODERS: [part for part in others if session.parts[part].component != "vae"]}
    for part in given:
        expected = f"parts of this model that are exported beside its denoiser: {', '.join(others)}"
        check(part in others or bool(named.get(part)), "quantize.parts", part, expected)
    together = {part: given[name] for name, parts in named.items() if name in given for part in parts}
    return together | {part: preset for part, preset in given.items() if part in others}


def recipes_of_parts(session: Session, presets: Mapping[str, str]) -> dict[str, Recipe]:
    """The recipes of other parts by their presets. Raises ConfigError for one that does not fit a part's layers."""
    recipes = {}
    for part, preset in presets.items():
        if (found := part_recipe(preset)) is not None:
            network, roles = empty_part(session.checkpoint, part), roles_of_part(session.checkpoint, part)
            shapes = {name: tuple(network.get_parameter(f"{name}.weight").shape) for name in roles}
            check_part(part, preset, roles, shapes, found)
            recipes[part] = found
    return recipes


def matched(knob: str, patterns: Collection[str], names: Collection[str]) -> list[str]:
    """The ``names`` that match a pattern. Raises ConfigError for a pattern that matches none."""
    for pattern in patterns:
        if not any(is_excluded(name, [pattern]) for name in names):
            raise ConfigError(
                f"quantize.{knob} has {pattern!r}, which matches none of the {len(names)} linears that it could be of, "
                f"such as {', '.join(list(names)[:3]) or 'none'}; change the pattern"
            )
    return [name for name in names if is_excluded(name, patterns)]


def check_readers(loaded: Loaded) -> None:
    """Raises ConfigError when linears that share an input disagree on whether it is quantized."""
    for shared in loaded.shared_inputs:
        alone = [name for name in shared.readers if name in loaded.weights_alone]
        if alone and len(alone) < len(shared.readers):
            other = next(name for name in shared.readers if name not in loaded.weights_alone)
            raise ConfigError(
                f"quantize.weights_alone matches {alone[0]} and not {other}, which reads the same input; match both"
            )
