"""The section ``quantize``: the knobs of NeMo's script and further knobs, and checks of their combinations."""

import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml

from sd_quant.config.assignment_file import FP16, labels_in
from sd_quant.errors import ConfigError
from sd_quant.knobs import COUNT, SEED, Called, Limit, Unused, between, check, check_unused, one_of, read
from sd_quant.models import FAMILIES
from sd_quant.places import GROUPS
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import ALPHA, FOR_ATTENTION, Enable, Pair, Recipe, formats_used


def presets() -> dict[str, Path]:
    """Return the preset files of ``quantize=`` by name, shipped ones and the user's own."""
    return {path.stem: path for groups in GROUPS for path in sorted((groups / "quantize").glob("*.yaml"))}


GIVEN = re.compile(r"\$\{given:\$\{\w+\},([\w-]+)\}")  # a preset's value that the command line may replace
ALPHA_OF = re.compile(r"\$\{alpha_of:.*[,:](auto|[\d.]+)\}+")  # its alpha, the last of the arguments
MOST_LAYERS = 1000  # above the most that a family's denoiser has, SDXL's 760
STATIC = one_of(lambda: [name for name, fmt in FORMATS.items() if fmt.static_scale])
BY_FAMILY = Limit(
    lambda patterns: patterns.keys() <= FAMILIES.keys(),
    lambda: f"patterns by the name of a family: {', '.join(sorted(FAMILIES))}",
)
Patterns = Annotated[dict[str, list[str]], BY_FAMILY]
UNITS = {"": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("kMGT", 1)}}
UNITS |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)}


def bytes_in(size: int | str) -> int | None:
    """Return the bytes of a size such as 12GB or 800MiB; None for any other text."""
    found = re.fullmatch(rf"(\d{{1,15}}(?:\.\d{{1,9}})?) ?({'|'.join(UNITS)})", str(size))
    return int(float(found[1]) * UNITS[found[2]]) or None if found else None


def content_of(preset: str) -> dict[str, Any]:
    """Return the knobs in the file of a preset, with references such as ``${smoothing}`` unresolved."""
    return yaml.safe_load(presets()[preset].read_text(encoding="utf-8"))


def own_recipe(preset: str) -> Recipe | None:
    """Return the recipe of a preset at quant_level=3 with default knobs; None for an invalid preset."""
    return recipe_in(presets()[preset].read_text(encoding="utf-8"))


@cache  # each of the thousand jobs of a sweep asks for all presets several times
def recipe_in(text: str) -> Recipe | None:
    knobs = yaml.safe_load(text)
    try:
        enable = read(Enable, knobs["enable"], "enable.")
    except (ConfigError, KeyError, TypeError):
        return None
    names = [field.name for field in dataclasses.fields(Recipe) if field.name in knobs]
    own: dict[str, Any] = {"per_channel": False, "smoothing": "none"} | {name: usual(knobs[name]) for name in names}
    recipe = Recipe(**{"alpha": None} | own | {"quant_level": 3.0, "enable": enable})
    return recipe if recipe.smoothing != "none" else dataclasses.replace(recipe, alpha=None)


def part_recipe(preset: str) -> Recipe | None:
    """Return a preset's recipe for a part other than the denoiser, attention unquantized; None for an invalid preset.

    A preset that smooths and quantizes inputs gets ``alpha=auto`` and ``smoothing=folded``; others do not smooth.
    """
    own = own_recipe(preset)
    if own is None:
        return None
    recipe = dataclasses.replace(own, alpha=None, enable=dataclasses.replace(own.enable, attention=None))
    if recipe.needs_inputs and recipe.smoothing != "none":
        return dataclasses.replace(recipe, smoothing="folded", alpha="auto")
    return dataclasses.replace(recipe, smoothing="none")


def patterns_of(preset: str, knob: str) -> dict[str, list[str]]:
    """Return the layer patterns of a preset's file, by model family; ``knob`` is ``exclude`` or ``weights_alone``."""
    return content_of(preset).get(knob) or {}


def usual(value: object) -> object:
    """Return the default in a preset's value of a knob, such as ``folded`` in ``${given:${smoothing},folded}``."""
    if not isinstance(value, str):
        return value
    if alpha := ALPHA_OF.fullmatch(value):
        return alpha[1] if alpha[1] == "auto" else float(alpha[1])
    return found[1] if (found := GIVEN.fullmatch(value)) else value


def part_presets() -> list[str]:
    """Return the presets that parts other than the denoiser may have: all readable ones."""
    return [name for name in presets() if part_recipe(name) is not None]


def check_preset(knob: str, name: str, other: str = "") -> None:
    """Raise ConfigError for ``knob`` unless ``name`` is a readable preset; ``other``: more values, for the message."""
    known = part_presets()
    having = [each for each in known if (own := own_recipe(each)) and name in formats_used(own.enable, 3.0)["weights"]]
    hint = f"; {name} is a format, of {' and '.join(having)}" if having else ""
    if name in FORMATS and not having:
        hint = f"; {name} is a format that no preset has: write one, as docs/formats.md says"
    check(name in known, knob, name, f"{other}one of {', '.join(known)}{hint}")


class OfPresets(Limit):
    """A limit of a knob: each item of its value names a preset that can be read, see ``check_preset``."""

    def check(self, knob: str, value: object) -> None:
        for name in value if isinstance(value, list) else [value]:
            check_preset(knob, str(name))


PRESETS = OfPresets(lambda names: True, lambda: f"one of {', '.join(part_presets())}")
TEXT_ENCODERS = "text_encoders"  # in ``quantize.parts``: every text encoder that has no preset of its own
OF_PARTS = Limit(
    lambda parts: set(parts.values()) <= {FP16, *part_presets()},
    lambda: f"a preset for each part, of {', '.join(part_presets())}, or {FP16}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(Recipe):
    """The recipe and its calibration; knobs that NeMo's script has keep their names and defaults."""

    exp_name: Annotated[str, "a label, which stands in the record"]
    format: Annotated[str, one_of(presets), "what tables call the recipe: the name of its preset"]
    attention: Annotated[
        str | None,
        Called("attention"),
        FOR_ATTENTION,
        "format of attention's matrix products at quant_level=4; null: the preset's",
    ]
    exclude: Annotated[Patterns, "patterns of layers that stay in high precision, by model family"]
    include: Annotated[Patterns, "patterns of layers that are quantized although the family excludes them, by family"]
    weights_alone: Annotated[Patterns, "patterns of linears whose weights alone are quantized, without low-rank branch"]
    parts: Annotated[
        dict[str, str] | None,
        OF_PARTS,
        "other parts that are quantized, a preset for each; text_encoders: for all of those; fp16: not this one",
    ]
    keep: Annotated[
        int | float,
        Called("keep"),
        Limit(
            lambda keep: 0 <= keep < (MOST_LAYERS if isinstance(keep, int) else 1),
            f"a number of layers below {MOST_LAYERS} or a fraction below 1: keeping all would quantize nothing",
        ),
        "the most sensitive layers, which stay in fp16",
    ]
    budget: Annotated[
        int | float | None,
        Limit(
            lambda budget: budget >= 1 if isinstance(budget, int) else 0 < budget < 1,
            "bytes, or a share below 1 of what the denoiser's weights take in fp32",
        ),
        "limit of the denoiser's weights; layers get more bits where that changes images most; null: all as the preset",
    ]
    fit: Annotated[
        int | str | None,
        Called("fit"),
        Limit(lambda size: bytes_in(size) is not None, "bytes, such as 12GB or 800MiB"),
        "memory that the whole pipeline has to fit in: all parts get bits where images change most; null: no limit",
    ]
    resident: Annotated[
        str,
        one_of(["all", "one"]),
        "with fit: parts that are in memory at once; one: the others are offloaded, so that each has to fit alone",
    ]
    choices: Annotated[
        list[str],
        PRESETS,
        "with a budget or fit: other presets that a layer may have, weights and inputs, beside high precision",
    ]
    assignment: Annotated[
        str | None,
        Called("assignment"),
        "file with the preset of each layer, as a run leaves it; null: the preset, or a limit, decides",
    ]
    n_steps: Annotated[int, COUNT, "denoising steps of a calibration image"]
    calib_size: Annotated[int, between(1, 10**6), Called("calib_size"), "prompts to calibrate on"]
    calibration: Annotated[str | None, Called("calibration"), "statistics from elsewhere; null: collected here"]
    seed: Annotated[int, SEED, "random seed of the calibration images, and of the draw from a table of captions"]
    snapshots: Annotated[
        list[int],
        Limit(lambda sizes: len(sizes) <= 1000 and all(0 < size <= 10**6 for size in sizes), "numbers of prompts"),
        "numbers of prompts after which statistics are kept, for jobs with other calib_sizes",
    ]
    accelerator: Annotated[str, one_of(["auto", "cpu", "cuda"]), "where calibration runs"]
    devices: Annotated[int, between(1, 64), "processes, or GPUs, that share the prompts"]

    @property
    def quantized_parts(self) -> dict[str, str]:
        """The preset of each part in ``parts``, without parts that stay in fp16."""
        return {part: preset for part, preset in (self.parts or {}).items() if preset != FP16}

    def with_preset(self, preset: str) -> "Quantize":
        """Return the section with another preset and its layer patterns, for another denoiser of the pipeline."""
        own, patterns = self.beside(preset), dict[str, Any]()
        for knob in ("exclude", "weights_alone"):
            former, new = patterns_of(self.format, knob), patterns_of(preset, knob)
            given = {each: [name for name in names if name not in former.get(each, ())]
                     for each, names in getattr(self, knob).items()}  # fmt: skip
            patterns[knob] = {each: [*given.get(each, ()), *new.get(each, ())] for each in {**given, **new}}
        fields: dict[str, Any] = {field.name: getattr(own, field.name) for field in dataclasses.fields(Recipe)}
        return dataclasses.replace(self, **fields, **patterns, format=preset)

    @property
    def chooses_bits(self) -> bool:
        """Whether a limit of bytes decides which format each layer gets."""
        return self.budget is not None or self.fit is not None

    @property
    def mixes(self) -> bool:
        """Whether layers may have different presets, by a limit of bytes or the file ``assignment``."""
        return self.chooses_bits or self.assignment is not None

    def offered(self) -> dict[str, Recipe]:
        """Return the recipes that a layer may have, by preset: this section's, or several by a limit or ``assignment``.

        ``quant_level``, ``batch_size`` and attention are always this section's. Under a limit, a preset that
        differs in unquantized inputs alone is left out: with as many bytes and less error, every layer would get it.
        Raises ConfigError for a file that cannot be read, or that quantizes nothing.
        """
        labels = [self.format]
        if self.chooses_bits:
            labels += [label for label in self.choices if not self.same_weights_alone(label)]
        if self.assignment is not None:
            first: dict[str, str] = {}  # the first layer of each preset
            for name, label in labels_in(self.assignment).items():
                first.setdefault(label, name)
            first.pop(FP16, None)
            check(bool(first), "assignment", self.assignment, "a file that gives a layer a preset")
            for label, name in first.items():
                check_preset(f"assignment of {name}", label, "fp16 or ")
            labels = list(first)
        return {label: self if label == self.format else self.beside(label) for label in labels}

    def same_weights_alone(self, preset: str) -> bool:
        """Whether another preset quantizes weights as this section does and leaves inputs in high precision."""
        own, other = self, self.beside(preset)
        alone = Enable(Pair(own.enable.conv.weight, None), Pair(own.enable.linear.weight, None), None)
        return (other.enable, other.rank, other.per_channel) == (alone, own.rank, own.per_channel)

    def patterns(self, knob: str, family: str) -> dict[str, list[str]]:
        """Return the layer patterns of each preset in ``offered``; ``knob`` is ``exclude`` or ``weights_alone``."""
        own = getattr(self, knob)
        return {
            label: list((own if label == self.format else patterns_of(label, knob)).get(family, ()))
            for label in self.offered()
        }

    def beside(self, preset: str) -> Recipe:
        """Return another preset's recipe without attention, with this section's ``quant_level`` and ``batch_size``."""
        own = own_recipe(preset)
        assert own is not None  # it was checked
        enable = dataclasses.replace(own.enable, attention=None)
        return dataclasses.replace(own, quant_level=self.quant_level, batch_size=self.batch_size, enable=enable)


def with_own_name(quantize: Quantize) -> Quantize:
    """Return the section; a recipe of NeMo's, whose ``format`` names a number format, is called ``nemo``."""
    nemos = quantize.percentile_calibrator == "modelopt" and quantize.enable.attention is None
    named = nemos and quantize.format == quantize.enable.linear.weight
    return dataclasses.replace(quantize, format="nemo") if named else quantize


def with_attention(quantize: Quantize) -> Quantize:
    """Return the section with the knob ``attention``, if given, as attention's format in place of the preset's."""
    if quantize.attention is None:
        return quantize
    return dataclasses.replace(quantize, enable=dataclasses.replace(quantize.enable, attention=quantize.attention))


def check_recipe(quantize: Quantize) -> None:
    """Raise ConfigError if knobs of a recipe contradict each other, or one of them has no effect."""
    enable, label, steps = quantize.enable, quantize.format, quantize.n_steps
    if enable.conv.activation is not None:  # blocks lie along a linear's input
        STATIC.check("quantize.enable.conv.activation", enable.conv.activation)
    preset = content_of(label)["enable"]
    expected = "the name of the preset that enables what is enabled; choose it with quantize=<preset>, or write one"
    enabled = dataclasses.asdict(enable)
    if quantize.attention is not None:  # whatever its preset's is
        enabled["attention"] = preset["attention"]
    check(enabled == preset, "quantize.format", label, expected)
    able = " or ".join(f"attention={name}" for name, fmt in sorted(FORMATS.items()) if fmt.attention)
    expected = f"at most 3, because {label} has no format for attention's matrix products; give it one by {able}"
    found = quantize.attention or enable.attention
    check(quantize.quant_level < 4 or found is not None, "quant_level", quantize.quant_level, expected)
    check_unused(quantize, "quantize.", *unused_knobs(quantize))
    expected = f"at least {1 / steps:g}, one of the {steps} steps, because it selects no step"
    check(int(steps * quantize.percentile) > 0, "percentile", quantize.percentile, expected)
    check(quantize.alpha is not None or quantize.smoothing == "none", "alpha", None, str(ALPHA))
    quantize.offered()
    check_observer(quantize)


def unused_knobs(quantize: Quantize) -> list[Unused]:
    """Return rules for knobs without effect: a condition, the knobs with their neutral values, and the reason."""
    conv, linear, label = quantize.enable.conv, quantize.enable.linear, quantize.format
    read_by_conv, read_by_linear = FORMATS.get(conv.activation or ""), FORMATS.get(linear.activation or "")
    weights = FORMATS[conv.weight], FORMATS[linear.weight]
    searched, static = any(fmt.searched for fmt in weights), read_by_linear and read_by_linear.static_scale
    by_limit: dict[str, object] = {"keep": 0, "budget": None}
    return [
        (quantize.quant_level < 4, {"attention": None},
         f"quant_level={quantize.quant_level:g} leaves attention's products alone, 4 does not"),
        (quantize.assignment is not None, by_limit | {"fit": None},
         f"assignment={quantize.assignment} decides for each layer"),
        (quantize.budget is not None, {"keep": 0}, f"quantize.budget={quantize.budget} chooses what stays in fp16"),
        (quantize.fit is None, {"resident": "all"}, "there is no fit, whose memory it is about"),
        (quantize.fit is not None, by_limit | {"parts": None},
         f"fit={quantize.fit} chooses the formats of all layers of all parts"),
        (quantize.smoothing == "none", {"alpha": None}, f"{label} smooths nothing"),
        (not any(fmt.static_scale for fmt in weights), {"per_channel": False}, f"{label} has scales per block"),
        (read_by_conv is None, {"percentile": 1, "collect_method": "mean-max", "shift": False},
         f"{label} leaves the inputs of convolutions alone"),
        (read_by_conv and not read_by_conv.equal_levels, {"shift": False},
         f"{conv.activation} is more precise near zero than far from it, so a shift gains nothing"),
        (not quantize.per_channel, {"shift": False},
         "without quantize.per_channel fp16 would round away a part of the bias that it needs"),
        (read_by_linear is None, {"per_token": False, "rotation": 0}, f"{label} leaves the inputs of linears alone"),
        (not static, {"per_token": False}, f"{label} has scales per block"),
        (static and not quantize.per_token, {"rotation": 0},
         "the ranges of rotated inputs were not calibrated; quantize.per_token=true needs none"),
        (quantize.rank == 0, {"branch_rounds": 0}, "with quantize.rank=0 there is no low-rank branch to fit"),
        (not searched, {"rounding": "nearest", "scale_search": False, "branch_rounds": 0},
         f"{label} has 8 bits for a weight, where choosing them gains nothing"),
        (all(fmt.bits == 8 for fmt in weights), {"scale_search": False},
         f"{label} has 8 bits for a weight, where another scale gains nothing"),
    ]  # fmt: skip


def check_observer(quantize: Quantize) -> None:
    """Raise ConfigError for an observer (it chooses a clipping range) without a range or with unequal levels."""
    enable, label = quantize.enable, quantize.format
    linear = None if quantize.per_token else enable.linear.activation  # an input scaled per token has a range of 1
    formats = {role: FORMATS[name] for role, name in (("conv", enable.conv.activation), ("linear", linear)) if name}
    inputs = {role: fmt for role, fmt in formats.items() if fmt.needs_amax}
    expected = f"min_max, because no input that {label} quantizes has a range"
    check(bool(inputs) or quantize.observer == "min_max", "quantize.observer", quantize.observer, expected)
    equal = all(fmt.equal_levels or quantize.observer_of(role) == "min_max" for role, fmt in inputs.items())
    expected = f"min_max, because the levels of inputs of {label} are not equally far apart"
    check(equal, "quantize.observer", quantize.observer, expected)
