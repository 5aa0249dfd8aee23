"""An open checkpoint (session) with a recipe: which layers the recipe quantizes, and how."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sd_quant.config import Infer, Model, Quantize
from sd_quant.config.assignment_file import FP16, labels_in
from sd_quant.config.images import LEVERS
from sd_quant.config.recipe import TEXT_ENCODERS, part_recipe, patterns_of
from sd_quant.errors import ConfigError
from sd_quant.knobs import check, near
from sd_quant.models.checkpoint import empty_denoiser, empty_part, in_place, roles_of_part
from sd_quant.models.parts import Heads, SharedInput, exported
from sd_quant.quantization.budget import inputs_left_alone
from sd_quant.quantization.recipe import Recipe, check_layers, check_selection, is_excluded, misfit, reason_kept
from sd_quant.quantization.smoothing import SMOOTHINGS
from sd_quant.simulation.sensitivity import layers_to_keep
from sd_quant.stages.resources import Needs
from sd_quant.stages.session import Session, begin, finish

NAMED = 3  # layers that an error message names


@dataclass(frozen=True)
class Offered:
    """One of the presets that a size limit or an ``assignment`` file mixes, and the layers that cannot have it."""

    recipe: Recipe
    exclude: Collection[str] = ()  # patterns of the layers that cannot have it
    weights_alone: Collection[str] = ()  # the linears of which it quantizes the weight alone

    def own(self, name: str, role: str, shape: tuple[int, ...]) -> Recipe | None:
        """Return the recipe of a layer with this preset, or None if the layer cannot have this preset."""
        recipe = inputs_left_alone(self.recipe) if name in self.weights_alone else self.recipe
        return None if is_excluded(name, self.exclude) or misfit(name, role, shape, recipe) else recipe


@dataclass(frozen=True)
class Loaded(Session):
    """A session, with the layers and settings that follow from the checkpoint's structure and the recipe."""

    roles: dict[str, str]  # role of each of the denoiser's layers
    shapes: dict[str, tuple[int, ...]]  # weight shape of each
    attentions: dict[str, Heads]  # by name: attentions that quant_level 4 can quantize
    recipe: Quantize
    exclude: Collection[str]  # patterns of the layers that the recipe leaves in high precision
    weights_alone: Collection[str]  # the linears of which the recipe quantizes the weight alone
    kept: int  # how many of the most sensitive layers stay in high precision
    model: Model
    infer: Infer  # settings of the images; calibration uses their guidance scale
    part_presets: Mapping[str, str]  # by quantized part other than the denoiser, except with ``fit``
    part_recipes: Mapping[str, Recipe]  # by part, for parts of part_presets that are no denoisers
    offered: Mapping[str, Offered]  # presets that layers may have, by name
    labels: Mapping[str, str] | None  # preset or fp16 by layer, from the ``assignment`` file; None without
    # further quantized denoisers of the pipeline, by part, each as the denoiser of its own ``Loaded``
    others: Mapping[str, "Loaded"] = field(default_factory=dict)

    @property
    def denoisers(self) -> list[str]:
        """The names of the quantized denoisers, that of this session first."""
        return [self.denoiser, *self.others]

    @property
    def guidance_scale(self) -> float:
        return self.infer.scale

    @property
    def shared_inputs(self) -> list[SharedInput]:
        """The groups of linears that read the same input. A linear added by the recipe is a group of its own."""
        linears = [name for name, role in self.roles.items() if role != "conv"]
        inputs = self.checkpoint.family.shared_inputs(linears)
        known = {name for shared in inputs for name in shared.readers}
        others = [name for name in linears if self.roles[name] != "excluded" and name not in known]
        return [*inputs, *(SharedInput((name,)) for name in others)]

    def own(self, name: str, recipe: Recipe) -> Recipe:
        """Return the ``recipe`` for layer ``name``: weights only, if ``weights_alone`` has the layer."""
        return inputs_left_alone(recipe) if name in self.weights_alone else recipe

    def recipe_with(self, name: str, label: str) -> Recipe | None:
        """Return layer ``name``'s recipe with preset ``label``; None if the preset is unknown or does not suit it."""
        offered = self.offered.get(label)
        return None if offered is None else offered.own(name, self.roles[name], self.shapes[name])


def load(model: Model, infer: Infer, quantize: Quantize, needs: Callable[[Loaded], Needs], directory: Path) -> Loaded:
    """Open and check the checkpoint and its recipe. ``needs``: memory and disk that the job takes in ``directory``."""
    loaded = with_recipe(begin(model, infer, {"model": model, "infer": infer}), model, infer, quantize)
    finish(loaded, lambda _: needs(loaded), directory, finite=True)
    return loaded


def with_recipe(session: Session, model: Model, infer: Infer, recipe: Quantize) -> Loaded:
    """Find the layers that the recipe quantizes. Raises ConfigError for knobs that do not fit the checkpoint."""
    session.check(model, infer, recipe)
    loaded, others = with_denoiser(session, model, infer, recipe), dict[str, Loaded]()
    for part in other_denoisers(session, model, recipe):
        check_together(session, infer, recipe)
        own = recipe.with_preset(recipe.parts[part]) if part in (recipe.parts or {}) else recipe  # type: ignore[index]
        others[part] = with_denoiser(Session(in_place(session.checkpoint, part)), model, infer, own)
    presets = {part: other.recipe.format for part, other in others.items()} | dict(loaded.part_presets)
    return replace(loaded, others=others, part_presets=presets)


def other_denoisers(session: Session, model: Model, recipe: Quantize) -> list[str]:
    """Return the denoisers quantized beside the first one; none if ``model.denoiser`` is set."""
    every = session.checkpoint.family.DENOISERS if model.denoiser is None else ()
    return [part for part in every if part != session.denoiser and (recipe.parts or {}).get(part) != FP16]


def check_together(session: Session, infer: Infer, recipe: Quantize) -> None:
    """Raise ConfigError for knobs that apply to one denoiser only, in a job that quantizes several."""
    every = session.checkpoint.family.DENOISERS
    knobs = {f"quantize.{name}": getattr(recipe, name) for name in ("budget", "fit", "assignment", "calibration")}
    for knob, value in (knobs | {f"infer.{name}": getattr(infer, name) for name in LEVERS}).items():
        expected = (
            f"null, because {' and '.join(every)} are both quantized and this is about one of them; "
            f"model.denoiser={every[0]} quantizes that one alone"
        )
        check(value is None, knob, value, expected)


def with_denoiser(session: Session, model: Model, infer: Infer, recipe: Quantize) -> Loaded:
    """Find the layers of one denoiser that the recipe quantizes. Raises ConfigError for knobs that do not fit it."""
    checkpoint, network, family = session.checkpoint, empty_denoiser(session.checkpoint), model.family
    roles, attentions = checkpoint.family.layer_roles(network), checkpoint.family.attentions(network)
    shapes = {name: tuple(network.get_parameter(f"{name}.weight").shape) for name in roles}
    linears = [name for name, shape in shapes.items() if len(shape) == 2]
    excluded = [name for name in roles if roles[name] == "excluded"]
    included = matched("include", recipe.include.get(family, ()), excluded)
    roles |= {name: "linear" if name in linears else "conv" for name in included}
    exclude = list(recipe.exclude.get(family, ()))
    if recipe.mixes:  # a layer that this preset excludes may have another preset
        exclude = [
            pattern for pattern in exclude if pattern not in patterns_of(recipe.format, "exclude").get(family, ())
        ]
    alone = frozenset(matched("weights_alone", recipe.weights_alone.get(family, ()), linears))
    offered = offered_in(recipe, family, linears, alone)
    if recipe.mixes:
        check_offered(offered, check_selection(roles, recipe, attentions, exclude), roles, shapes)
    else:
        check_layers(roles, shapes, recipe, attentions, exclude, dict.fromkeys(alone, inputs_left_alone(recipe)))
    selected = sum(reason_kept(role, recipe.quant_level) is None for role in roles.values())
    kept = layers_to_keep(recipe.keep, selected)
    presets = presets_of_parts(session, recipe.parts or {}, model.denoiser)
    recipes = recipes_of_parts(session, presets)
    loaded = Loaded(
        checkpoint, roles, shapes, attentions, recipe, exclude, alone, kept, model, infer, presets, recipes, offered,
        None if recipe.assignment is None else labels_in(recipe.assignment),
    )  # fmt: skip
    for each in offered.values():
        check_readers(loaded, each.weights_alone)
    check_labels(loaded)
    return loaded


def offered_in(recipe: Quantize, family: str, linears: Collection[str], alone: Collection[str]) -> dict[str, Offered]:
    """Return the presets that layers may have, by name; the job's own quantizes only weights in linears ``alone``."""
    excluded, patterns = recipe.patterns("exclude", family), recipe.patterns("weights_alone", family)
    return {
        label: Offered(
            each,
            () if recipe.assignment is not None else excluded[label],
            alone if label == recipe.format else [name for name in linears if is_excluded(name, patterns[label])],
        )
        for label, each in recipe.offered().items()
    }


def check_offered(
    offered: Mapping[str, Offered],
    names: Collection[str],
    roles: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ConfigError for a preset that none of the layers ``names`` can have."""
    for label, each in offered.items():
        if names and not any(each.own(name, roles[name], shapes[name]) for name in names):
            reasons = (misfit(name, roles[name], shapes[name], each.recipe) for name in names)
            because = next((reason[0] for reason in reasons if reason), "its file excludes all of them")
            raise ConfigError(
                f"{label} is a choice, and none of the {len(names)} layers that quant_level selects can have it "
                f"({because}); leave it out"
            )


def presets_of_parts(session: Session, given: Mapping[str, str], alone: str | None = None) -> dict[str, str]:
    """Return presets by non-denoiser part. Raises ConfigError for an unknown part. ``alone``: the only denoiser."""
    denoisers = {session.denoiser, *session.checkpoint.family.DENOISERS}
    others = [part for part in exported(session.parts) if part not in denoisers]
    named = {TEXT_ENCODERS: [part for part in others if session.parts[part].component.startswith("text_encoder")]}
    beside = [part for part in session.checkpoint.family.DENOISERS[1:] if alone is None]
    for part in given:
        of = "its denoiser" if alone is None else f"{alone}, which model.denoiser quantizes alone"
        expected = f"parts of this model that are exported beside {of}: {', '.join([*beside, *others])}"
        check(part in [*beside, *others] or bool(named.get(part)), "quantize.parts", part, expected)
    together = {part: given[name] for name, parts in named.items() if name in given for part in parts}
    together |= {part: preset for part, preset in given.items() if part in others}
    return {part: preset for part, preset in together.items() if preset != FP16}


def recipes_of_parts(session: Session, presets: Mapping[str, str]) -> dict[str, Recipe]:
    """Return recipes by part for ``presets``. Raises ConfigError for a preset that does not fit a part's layers."""
    recipes = {}
    for part, preset in presets.items():
        if (found := part_recipe(preset)) is not None:
            if session.parts[part].in_steps and found.needs_inputs:
                raise ConfigError(
                    f"quantize.parts.{part} is {preset}, expected a preset of weights alone such as int8_weight_only, "
                    "because statistics are collected of parts that are called once for an image"
                )
            network, roles = empty_part(session.checkpoint, part), roles_of_part(session.checkpoint, part)
            for name, role in roles.items():
                shape = tuple(network.get_parameter(f"{name}.weight").shape)
                if role != "excluded" and (reason := misfit(name, role, shape, found)):
                    raise ConfigError(
                        f"quantize.parts gives {part} the preset {preset}, which does not fit: {reason[0]}; choose "
                        "another preset for this part"
                    )
            recipes[part] = found
    return recipes


def matched(knob: str, patterns: Collection[str], names: Collection[str]) -> list[str]:
    """Return the ``names`` that match a pattern of ``knob``. Raises ConfigError for a pattern that matches no name."""
    for pattern in patterns:
        if not any(is_excluded(name, [pattern]) for name in names):
            raise ConfigError(
                f"quantize.{knob} has {pattern!r}, which matches none of the {len(names)} layers that it could be of, "
                f"such as {', '.join(list(names)[:3]) or 'none'}; change the pattern"
            )
    return [name for name in names if is_excluded(name, patterns)]


def check_readers(loaded: Loaded, weights_alone: Collection[str]) -> None:
    """Raise ConfigError if only some of the linears that read the same input are in ``weights_alone``."""
    for shared in loaded.shared_inputs:
        alone = [name for name in shared.readers if name in weights_alone]
        if alone and len(alone) < len(shared.readers):
            other = next(name for name in shared.readers if name not in weights_alone)
            raise ConfigError(
                f"quantize.weights_alone matches {alone[0]} and not {other}, which reads the same input; match both"
            )


def units_of(loaded: Loaded) -> list[tuple[str, ...]]:
    """Group quantized layers that must share a preset: layers smoothed together; each other layer alone."""
    folds = any(offered.recipe.smoothing == "folded" for offered in loaded.offered.values())
    quantized = {
        name
        for name, role in loaded.roles.items()
        if reason_kept(role, loaded.recipe.quant_level) is None and not is_excluded(name, loaded.exclude)
    }
    convolutions = [(name,) for name, role in loaded.roles.items() if role == "conv"]
    together = [shared.readers for shared in SMOOTHINGS["folded" if folds else "none"](loaded.shared_inputs)]
    units = [tuple(name for name in unit if name in quantized) for unit in (*convolutions, *together)]
    return [unit for unit in units if unit]


def check_labels(loaded: Loaded) -> None:
    """Raise ConfigError for a layer of ``assignment`` that is unknown or cannot have its label."""
    for name, label in (loaded.labels or {}).items():
        if reason := why_not_labelled(loaded, name, label):
            raise ConfigError(f"assignment {reason}")
    labels = {name: label for name, label in (loaded.labels or {}).items() if label != FP16}
    for unit in units_of(loaded):
        given, all_of_them = {labels[name]: name for name in unit if name in labels}, ", ".join(unit)
        if len(given) > 1:
            told = " and ".join(f"{name} {label}" for label, name in given.items())
            raise ConfigError(
                f"assignment gives {told}, which read one input, so that one preset smooths it; give {all_of_them} "
                "one preset, or fp16"
            )


def why_not_labelled(loaded: Loaded, name: str, label: str) -> str | None:
    """Return why ``assignment`` cannot give layer ``name`` this label; None if it can."""
    if name not in loaded.roles:
        return f"names {name}, which is no layer of this denoiser; {near(name, loaded.roles)}"
    role, recipe = loaded.roles[name], None if label == FP16 else loaded.offered[label].recipe
    if recipe is None:
        return None
    reason = reason_kept(role, loaded.recipe.quant_level)
    if reason is None and is_excluded(name, loaded.exclude):
        reason = "quantize.exclude matches it"
    if reason is not None:
        return f"gives {name} {label}, expected fp16 or no line, because it is kept: {reason}"
    found = misfit(name, role, loaded.shapes[name], recipe)
    return f"gives {name} {label}, expected fp16 or another preset, because {found[0]}" if found else None
