"""The section ``quantize``: NeMo's knobs, and what they have to do with one another."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml

from sd_quant.config.sections import SEED
from sd_quant.knobs import Called, Limit, at_least, check, one_of
from sd_quant.models import FAMILIES
from sd_quant.places import GROUPS
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.recipe import ALPHA, BY_ROLE, Enable, Recipe


def presets() -> dict[str, Path]:
    """The files of ``quantize=`` by their names; the user's own stand beside ours."""
    return {path.stem: path for groups in GROUPS for path in sorted((groups / "quantize").glob("*.yaml"))}


MOST_LAYERS = 1000  # that may be quantized: SDXL's denoiser has the most of all families, 760
BY_FAMILY = Limit(
    lambda patterns: patterns.keys() <= FAMILIES.keys(),
    lambda: f"patterns by the name of a family: {', '.join(sorted(FAMILIES))}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(Recipe):
    """NeMo's ``quantize`` section, with its names and defaults: the recipe, and what it is derived from."""

    exp_name: Annotated[str, "a label, which stands in the record"]
    format: Annotated[str, one_of(presets), "what tables call the recipe: the name of its preset"]
    exclude: Annotated[
        dict[str, list[str]], BY_FAMILY, "patterns of layers that stay in high precision, by model family"
    ]
    include: Annotated[
        dict[str, list[str]],
        BY_FAMILY,
        "patterns of linears that are quantized as others are, although the family excludes them, by model family",
    ]
    weights_alone: Annotated[
        dict[str, list[str]],
        BY_FAMILY,
        "patterns of linears whose inputs stay in high precision, without a low-rank branch, by model family",
    ]
    exclude_text: Annotated[bool, "layers that read the text alone, cross-attention's key and value, stay in fp16"]
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
        "what the denoiser's weights may take: which layers get more bits is chosen so that the images change least; "
        "null: all have the preset's format",
    ]
    choices: Annotated[
        list[str],
        one_of(FORMATS, each=True),
        "with a budget: formats that weights of a layer may have instead, its inputs in fp16; fp16 is always one",
    ]
    n_steps: Annotated[int, at_least(1), "denoising steps of a calibration image"]
    calib_size: Annotated[int, at_least(1), "prompts to calibrate on"]
    calibration: Annotated[
        str | None, "a file or folder of statistics that were collected elsewhere; null: they are collected here"
    ]
    seed: Annotated[int, SEED, "random seed of the calibration images, and of the draw from a table of captions"]
    snapshots: Annotated[
        list[int],
        Limit(lambda sizes: all(size > 0 for size in sizes), "numbers of prompts"),
        "after how many prompts statistics are kept, for other calib_sizes to start from",
    ]
    accelerator: Annotated[str, one_of(["auto", "cpu", "cuda"]), "where calibration runs"]
    devices: Annotated[int, at_least(1), "processes, or GPUs, that share the prompts"]


def check_recipe(quantize: Quantize) -> None:
    """Raises ConfigError when the knobs of a recipe do not fit together, or one is given that it ignores."""
    steps, share = quantize.n_steps, quantize.percentile
    check_format(quantize.format, quantize.enable)
    check_enabled(quantize)
    check_shift(quantize)
    check_rounding(quantize)
    check_inputs_as_they_come(quantize)
    check_weight_observer(quantize)
    expected = f"0, because quantize.budget={quantize.budget} chooses what stays in fp16"
    check(quantize.budget is None or quantize.keep == 0, "keep", quantize.keep, expected)
    expected = f"at least {1 / steps:g}, one of the {steps} steps, because it selects no step"
    check(int(steps * share) > 0, "percentile", share, expected)
    if quantize.smoothing == "none":
        check(quantize.alpha is None, "alpha", quantize.alpha, f"null, because {quantize.format} smooths nothing")
    else:
        check(quantize.alpha is not None, "alpha", None, str(ALPHA))
    expected = "99.99, because only quantize.observer=percentile heeds it"
    heeded = "percentile" in (quantize.observer, quantize.weight_observer) or quantize.observer_percentile == 99.99
    check(heeded, "quantize.observer_percentile", quantize.observer_percentile, expected)


def check_weight_observer(quantize: Quantize) -> None:
    """Raises ConfigError when an observer is to choose ranges of weights that have another kind of them."""
    observer, weights = quantize.weight_observer, [quantize.enable.conv.weight, quantize.enable.linear.weight]
    if observer == "min_max":
        return
    judging = [name for name, row in OBSERVERS.items() if all(row.judges(FORMATS[fmt]) for fmt in weights)]
    fits = observer in judging and not (quantize.per_channel or quantize.budget) and quantize.smoothing == "none"
    fits &= all(FORMATS[fmt].static_scale for fmt in weights)
    expected = (
        "min_max, because the others choose the one range of a weight that is not smoothed, as of "
        "quantize=int8_weight_only quantize.per_channel=false, and without a budget"
    )
    check(fits, "quantize.weight_observer", observer, expected)


def check_format(name: str, enable: Enable) -> None:
    """Raises ConfigError unless ``name``, which tables call the recipe by, is the preset that enables this."""
    preset = yaml.safe_load(presets()[name].read_text(encoding="utf-8"))
    expected = "the name of the preset that enables what is enabled; choose it with quantize=<preset>, or write one"
    check(dataclasses.asdict(enable) == preset["enable"], "quantize.format", name, expected)


def check_enabled(quantize: Quantize) -> None:
    """Raises ConfigError when formats are enabled that do not go together, or with knobs that they ignore."""
    enable, label, observer = quantize.enable, quantize.format, quantize.observer
    static = [name for name, fmt in FORMATS.items() if fmt.static_scale]
    if enable.conv.activation is not None:  # blocks lie along a linear's input
        one_of(static).check("quantize.enable.conv.activation", enable.conv.activation)
    able = " and ".join(f"quantize={name}" for name, fmt in sorted(FORMATS.items()) if fmt.attention)  # their presets
    expected = f"at most 3, because {label} has no format for attention's matrix products; {able} have"
    check(quantize.quant_level < 4 or enable.attention is not None, "quant_level", quantize.quant_level, expected)
    expected = f"false, because {label} has scales per block"
    fits = not quantize.per_channel or enable.conv.weight in static or enable.linear.weight in static
    check(fits, "quantize.per_channel", quantize.per_channel, expected)
    if enable.conv.activation is None:
        because = f"because {label} leaves the inputs of convolutions alone"
        check(quantize.percentile == 1, "percentile", quantize.percentile, f"1, {because}")
        check(quantize.collect_method == "mean-max", "collect_method", quantize.collect_method, f"mean-max, {because}")
    linear = None if quantize.per_token else enable.linear.activation  # which has a range of 1 then
    formats = [FORMATS[name] for name in (enable.conv.activation, linear) if name is not None]
    inputs = [fmt for fmt in formats if fmt.needs_amax]
    expected = f"min_max, because no input that {label} quantizes has a range"
    check(bool(inputs) or observer == "min_max", "quantize.observer", observer, expected)
    judging = [name for name, row in OBSERVERS.items() if all(map(row.judges, inputs))]
    expected = f"{' or '.join(judging)}, because {label} has no equal levels for it to judge by"
    check(observer in (*judging, BY_ROLE), "quantize.observer", observer, expected)


def check_shift(quantize: Quantize) -> None:
    """Raises ConfigError when inputs of convolutions are to be shifted and that gains nothing."""
    activation = quantize.enable.conv.activation
    if activation is None:
        expected = f"false, because {quantize.format} leaves the inputs of convolutions alone"
    elif not FORMATS[activation].equal_levels:
        expected = f"false, because {activation} is more precise near zero than far from it, so a shift gains nothing"
    elif not quantize.per_channel:
        expected = "false without quantize.per_channel, because fp16 would round away a part of the bias that it needs"
    else:
        return
    check(not quantize.shift, "quantize.shift", quantize.shift, expected)


def check_inputs_as_they_come(quantize: Quantize) -> None:
    """Raises ConfigError when inputs of linears are to be scaled per token or rotated that cannot, or gain nothing."""
    name, label = quantize.enable.linear.activation, quantize.format
    static = name is not None and FORMATS[name].static_scale
    because = "has scales per block" if name is not None else "leaves the inputs of linears alone"
    check(
        static or not quantize.per_token, "quantize.per_token", quantize.per_token, f"false, because {label} {because}"
    )
    if name is None:
        expected = f"0, because {label} leaves the inputs of linears alone"
    else:
        expected = "0 without quantize.per_token, because how large a rotated input gets was not calibrated"
    fits = name is not None and (not static or quantize.per_token)
    check(fits or quantize.rotation == 0, "quantize.rotation", quantize.rotation, expected)


def check_rounding(quantize: Quantize) -> None:
    """Raises ConfigError when codes are to be chosen that have no blocks, or a branch fitted that is not there."""
    enable, rounds = quantize.enable, quantize.branch_rounds
    expected = "0 with quantize.rank=0, because there is no low-rank branch to fit"
    check(quantize.rank != 0 or rounds == 0, "quantize.branch_rounds", rounds, expected)
    if any(FORMATS[pair.weight].block is not None for pair in (enable.conv, enable.linear)):
        return
    because = f"because {quantize.format} has 8 bits for a weight, where choosing them gains nothing"
    check(quantize.rounding == "nearest", "quantize.rounding", quantize.rounding, f"nearest, {because}")
    check(not quantize.scale_search, "quantize.scale_search", quantize.scale_search, f"false, {because}")
    check(rounds == 0, "quantize.branch_rounds", rounds, f"0, {because}")
