"""A preset for each layer, so that the denoiser fits in ``quantize.budget`` bytes, or the whole pipeline in ``fit``.

Each layer's error is measured alone, at its part's output. Each preset's error is measured in images, with all layers
in that preset (``chosen_by_images``); this scales layer errors of all presets to one unit. Then one knapsack problem
chooses all layers' presets (``quantization.budget``). Alternative not taken: measuring every layer in images, hundreds
of times the work. ``fit`` bounds weights, activations of a call and the process (``resources``): of all parts
together with the largest call, or, with ``quantize.resident=one``, of each part alone.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_quant.config import Infer
from sd_quant.config.recipe import bytes_in
from sd_quant.errors import ConfigError
from sd_quant.inference.parity import joined
from sd_quant.inference.schedules import FULL, WEIGHTS_ALONE
from sd_quant.models.parts import exported, network_in
from sd_quant.progress import each as each_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import HALF, KEPT, Choice, Limit, Solved, is_within, solve, stored_bytes, with_weights
from sd_quant.quantization.formats import divides
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.table import write_csv
from sd_quant.simulation.sensitivity import Switched
from sd_quant.stages.assign import assign, assign_nearest, layers_of, measure_sensitivity
from sd_quant.stages.chosen_by_images import ImageErrors, image_errors
from sd_quant.stages.load import Loaded, units_of
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.resources import working_bytes, workload_of
from sd_quant.stages.shared import Shared

LOG = logging.getLogger(__name__)
GB = 1e9
FP32 = 4  # bytes
LEFT = "left in high precision by the choice of presets"
Labels = dict[str, dict[str, str]]  # the chosen preset (or high precision), by part and layer
Made = dict[str, dict[str, LayerAssignment]]  # assignments by part


@dataclass(frozen=True)
class Offer:
    """The labels (presets or weight formats) among which each layer of a part may choose, and their sizes."""

    prefix: str  # of the part's labels and layers in tables of all parts; empty for the denoiser
    units: Sequence[tuple[str, ...]]  # layers that take one label together
    roles: Mapping[str, str]  # of each layer
    sizes: Mapping[str, Mapping[str, int]]  # bytes by layer and label; a label that a layer cannot have is absent
    recipes: Mapping[str, Recipe | None]  # by label; None: high precision
    whole: int  # bytes of all weights in high precision

    @property
    def costs(self) -> list[dict[str, int]]:
        """Bytes of each unit by label; layers that cannot have the label count in high precision."""
        return [
            {
                label: sum(self.sizes[name].get(label, self.sizes[name][KEPT]) for name in unit)
                for label in self.recipes
                if any(label in self.sizes[name] for name in unit)
            }
            for unit in self.units
        ]

    @property
    def labels(self) -> list[str]:
        """The labels with which at least one layer can be quantized."""
        able = {label for own in self.sizes.values() for label in own} - {KEPT}
        return [label for label in self.recipes if label in able]

    @property
    def fixed(self) -> int:
        """Bytes of parameters that are never quantized, such as norms and embeddings."""
        return self.whole - sum(each[KEPT] for each in self.sizes.values())

    @property
    def least(self) -> int:
        """The smallest number of bytes that all weights can take."""
        return self.fixed + sum(min(unit.values()) for unit in self.costs)

    def all_in(self, label: str) -> dict[str, str]:
        """Return ``label`` for every layer that can have it, and high precision for the rest."""
        return {name: label if label in own else KEPT for name, own in self.sizes.items()}

    def bytes_with(self, labels: Mapping[str, str]) -> int:
        """Return the bytes of all weights with these ``labels`` by layer."""
        return self.fixed + sum(self.sizes[name][label] for name, label in labels.items())

    def named(self, label: str) -> str:
        """Return the label's name in tables of all parts: with the part's prefix."""
        return label if label == KEPT else f"{self.prefix}{label}"


@dataclass(frozen=True)
class Group:
    """Parts that are in memory at the same time, and how many bytes their weights may take."""

    parts: Sequence[str]
    working: float  # bytes beside their weights
    limit: int  # bytes that their weights may take


@dataclass(frozen=True)
class Limited:
    """A job's size limit, and the parts and choices to which it applies."""

    offers: Mapping[str, Offer]  # by part, the denoiser first
    groups: Sequence[Group]
    limit: int  # bytes, as it was given
    resident: str | None = None  # with ``fit``: quantize.resident, "all" or "one"


@dataclass(frozen=True)
class Measured:
    """The measured errors of presets, which do not depend on the limit."""

    errors: Mapping[str, Mapping[str, Mapping[str, float]]]  # of outputs, by part, label and single layer
    uniform: dict[str, float]  # RMS error of images with all layers of a part in one label, by label
    squared_error_of: ImageErrors


@dataclass(frozen=True)
class Fitted:
    """The chosen assignments, with the sizes and errors of all candidate solutions of the knapsack problem."""

    assignments: Made  # of the parts of which a layer is quantized, the denoiser first
    limited: Limited
    solved: Solved

    def labels_with(self, candidate: str) -> Labels:
        """Return the label of each layer in a candidate solution, by part and layer."""
        return by_part(self.limited.offers, self.solved.candidates[candidate].labels)

    @property
    def labels(self) -> dict[str, str]:
        """The chosen label of each denoiser layer."""
        return next(iter(self.labels_with(self.solved.taken).values()))

    def bytes_with(self, candidate: str) -> dict[str, int]:
        """Return the bytes of the weights with a candidate solution, by part."""
        labels = self.labels_with(candidate)
        return {part: offer.bytes_with(labels[part]) for part, offer in self.limited.offers.items()}

    def entry(self) -> dict[str, Any]:
        """Return the record's entry: the limit, and the sizes and errors of all candidates."""
        limited = self.limited
        groups = [{"parts": [*each.parts], "beside_weights_bytes": round(each.working)} for each in limited.groups]
        return {
            "limit_bytes": limited.limit, "resident": limited.resident, "groups": groups,
            "unquantized_bytes": {part: offer.whole for part, offer in limited.offers.items()},
            "taken": self.solved.taken, "rates": dict(self.solved.rates),
            "candidates": {
                name: {
                    "weight_bytes": self.bytes_with(name),
                    "formats": {part: dict(Counter(own.values())) for part, own in self.labels_with(name).items()},
                    "expected_psnr": decibels(each.predicted),
                    "psnr": decibels(each.measured),
                }
                for name, each in self.solved.candidates.items()
            },
        }  # fmt: skip


def decibels(error: float) -> float | None:
    """Return the PSNR in dB for an RMS error of images (white = 1); None for an error of 0."""
    return -20 * math.log10(error) if error else None


def limit_of(loaded: Loaded) -> Limited | None:
    """Return the job's size limit, or None. Raises ConfigError if no choice fits, or if even full precision fits."""
    if loaded.recipe.fit is not None:
        offers = offers_of(loaded)
        return Limited(offers, groups_of(loaded, offers), bytes_in(loaded.recipe.fit), loaded.recipe.resident)
    budget, whole = loaded.recipe.budget, HALF * loaded.parameters[loaded.denoiser]
    if budget is None:
        return None
    offer = offer_of_denoiser(loaded, whole)
    limit = budget if isinstance(budget, int) else int(budget * FP32 * loaded.parameters[loaded.denoiser])
    if not offer.least <= limit < whole:
        share = offer.least / loaded.parameters[loaded.denoiser] / FP32
        raise ConfigError(
            f"quantize.budget is {budget}, expected from {offer.least} bytes (a share of {share:.4f}), the least with "
            f"{' or '.join(loaded.offered)}, to {whole - 1}, below which something has to be quantized"
        )
    return Limited({loaded.denoiser: offer}, [Group([loaded.denoiser], 0, limit)], limit)


def offer_of_denoiser(loaded: Loaded, whole: int) -> Offer:
    """Return the labels of denoiser layers: the job's preset, ``quantize.choices``, fp16; ``whole``: bytes in fp16."""
    units, recipes = units_of(loaded), {label: offered.recipe for label, offered in loaded.offered.items()}
    roles = {name: loaded.roles[name] for unit in units for name in unit}
    sizes = {}
    for name, role in roles.items():
        own = {label: recipe for label in recipes if (recipe := loaded.recipe_with(name, label))} | {KEPT: None}
        sizes[name] = {label: stored_bytes(loaded.shapes[name], role, recipe) for label, recipe in own.items()}
    return Offer("", units, roles, sizes, {**recipes, KEPT: None}, whole)


def with_precise_steps(offer: Offer, infer: Infer) -> Offer:
    """Add the copies of weights that precise steps need to the ``offer``'s sizes: runtimes share no weights."""
    letters = infer.precise_letters
    copies = 1 + (WEIGHTS_ALONE in letters)
    sizes = {name: {label: copies * size for label, size in own.items()} for name, own in offer.sizes.items()}
    return replace(offer, sizes=sizes, whole=(copies + (FULL in letters)) * offer.whole)


def offers_of(loaded: Loaded) -> dict[str, Offer]:
    """Return the labels that layers may have, by part, the denoiser first. Parts without export have no such layers."""
    stored = loaded.stored_bytes
    offers = {loaded.denoiser: with_precise_steps(offer_of_denoiser(loaded, stored[loaded.denoiser]), loaded.infer)}
    nearest = replace(loaded.recipe, smoothing="none", alpha=None, rounding="nearest", scale_search=False)
    formats = dict.fromkeys(each.recipe.enable.linear.weight for each in loaded.offered.values())
    recipes: dict[str, Recipe | None] = {**{fmt: with_weights(nearest, fmt) for fmt in formats}, KEPT: None}
    for part in [part for part in loaded.parts if part != loaded.denoiser]:
        itemsize = loaded.parts[part].contract.weights.itemsize
        layers = layers_of(loaded, part) if part in exported(loaded.parts) else {}
        layers = {name: row for name, row in layers.items() if row[0] != "excluded"}
        sizes = {
            name: {
                label: stored_bytes(shape, role, each, itemsize)
                for label, each in recipes.items()
                if each is None or divides(label, math.prod(shape[1:]))
            }
            for name, (role, shape) in layers.items()
        }
        roles = {name: role for name, (role, _) in layers.items()}
        offers[part] = Offer(f"{part}:", [(name,) for name in layers], roles, sizes, recipes, stored[part])
    return offers


def groups_of(loaded: Loaded, offers: Mapping[str, Offer]) -> list[Group]:
    """Group parts that are in memory together. Raises ConfigError if no choice fits, or if even full precision fits."""
    wanted, working = bytes_in(loaded.recipe.fit), working_bytes(loaded.parameters, workload_of(loaded.infer))
    together = [list(offers)] if loaded.recipe.resident == "all" else [[part] for part in offers]
    beside = [max(working[part] for part in parts) for parts in together]
    least, whole = (
        [
            more + sum(getattr(offers[part], size) for part in parts)
            for parts, more in zip(together, beside, strict=True)
        ]
        for size in ("least", "whole")
    )
    if not max(least) <= wanted < max(whole):
        index = least.index(max(least))
        formats = " or ".join(loaded.offered)
        raise ConfigError(
            f"fit is {loaded.recipe.fit}, expected from {math.ceil(least[index])} bytes, which "
            f"{', '.join(together[index])} take at least: {(least[index] - beside[index]) / GB:.2f} GB of weights in "
            f"{formats}, {beside[index] / GB:.2f} GB for a call and the process; to {math.ceil(max(whole)) - 1}, below "
            "which something has to be quantized. quantize.choices adds presets of fewer bits, smaller images take "
            "less for a call, and quantize.resident=one counts one part at a time"
        )
    return [Group(parts, more, int(wanted - more)) for parts, more in zip(together, beside, strict=True)]


def by_part(offers: Mapping[str, Offer], labels: Sequence[str]) -> Labels:
    """Convert ``labels`` (one a unit, of all parts) to labels by part and layer; KEPT where a layer cannot have it."""
    left, found = iter(labels), Labels()
    for part, offer in offers.items():
        own = {unit: next(left).removeprefix(offer.prefix) for unit in offer.units}
        pairs = [(name, label) for unit, label in own.items() for name in unit]
        found[part] = {name: label if label in offer.sizes[name] else KEPT for name, label in pairs}
    return found


def assign_chosen(loaded: Loaded, statistics: Statistics, chosen: Mapping[str, str]) -> dict[str, LayerAssignment]:
    """Derive the denoiser's assignment from the ``chosen`` label of each layer.

    A layer without a label, or with a label that it cannot have, stays in fp16.
    """
    own = {name: recipe for name, label in chosen.items() if (recipe := loaded.recipe_with(name, label))}
    return assign(loaded, statistics, [name for name in loaded.roles if name not in own], own, LEFT)


def assigned(loaded: Loaded, statistics: Statistics, offers: Mapping[str, Offer], labels: Labels) -> Made:
    """Derive assignments from ``labels``, for the parts in which at least one layer is quantized."""
    made = Made()
    for part, own in labels.items():
        if not set(own.values()) - {KEPT}:
            continue
        if part == loaded.denoiser:
            made[part] = assign_chosen(loaded, statistics, own)
        else:
            recipes = {name: recipe for name, label in own.items() if (recipe := offers[part].recipes[label])}
            made[part] = assign_nearest(loaded, part, recipes)
    return made


def quantized_alone(assignment: Mapping[str, LayerAssignment], names: Collection[str]) -> dict[str, LayerAssignment]:
    """Return the ``assignment`` with only the layers ``names`` quantized; other layers stay smoothed."""
    return {
        name: layer if name in names else replace(layer, format=None, activation_format=None)
        for name, layer in assignment.items()
    }


def measure_presets(
    loaded: Loaded, statistics: Statistics, offers: Mapping[str, Offer], shared: Shared | None = None
) -> Measured:
    """Measure each preset's errors: of a part's output with one layer quantized, and of images with all layers."""
    squared_error_of, calls = image_errors(loaded)
    errors: dict[str, dict[str, Mapping[str, float]]] = {part: {} for part in offers}
    uniform, scale = {}, loaded.guidance_scale
    for part, label in ((part, label) for part, offer in offers.items() for label in offer.labels):
        made, named = (
            assigned(loaded, statistics, offers, {part: offers[part].all_in(label)}),
            offers[part].named(label),
        )
        if part == loaded.denoiser:
            errors[part][label] = measure_sensitivity(loaded.checkpoint, made[part], statistics, scale, shared)
        else:
            errors[part][label] = errors_alone(loaded, part, made[part], calls.get(part, ()))
        uniform[named] = squared_error_of(made, f"all in {named}") ** 0.5
    return Measured(errors, uniform, squared_error_of)


def errors_alone(
    loaded: Loaded, part: str, assignment: dict[str, LayerAssignment], calls: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """Measure a non-denoiser part's relative output error with each layer quantized alone, on the inputs ``calls``."""
    engine = open_simulated(loaded.checkpoint, assignment, part)
    layers = [name for name, layer in assignment.items() if layer.format is not None]

    def run() -> Tensor:
        return torch.cat([joined(engine(**call)) for call in calls])

    switched = Switched(network_in(loaded.parts[part], engine.module), run, layers)
    return {name: switched.error([name]) for name in each_of(layers, f"sensitivity, {part}")}


def choices_of(offers: Mapping[str, Offer], measured: Measured) -> list[dict[str, Choice]]:
    """Return, for each unit (layers with one common label) of all parts, bytes and squared error by label."""
    return [
        {
            offer.named(label): Choice(size, sum(errors.get(label, {}).get(name, 0.0) ** 2 for name in unit))
            for label, size in costs.items()
        }
        for offer, errors in zip(offers.values(), measured.errors.values(), strict=True)
        for unit, costs in zip(offer.units, offer.costs, strict=True)
    ]


def plain_choices(
    offers: Mapping[str, Offer], limits: Sequence[Limit], units: Sequence[Mapping[str, Choice]]
) -> dict[str, list[str]]:
    """Return solutions with one label for a whole part, by name; with several parts, only the best that fits."""
    first, *others = ([offer.named(label) for label in offer.labels] for offer in offers.values())
    mixed = {}
    for labels in product(first, *([*each, KEPT] for each in others)):
        wanted = [label for offer, label in zip(offers.values(), labels, strict=True) for _ in offer.units]
        pairs = zip(units, wanted, strict=True)
        mixed[labels] = [next(each for each in (label, KEPT, *unit) if each in unit) for unit, label in pairs]
    if not others:
        return {f"all in {label}": labels for (label,), labels in mixed.items()}

    def error(labels: Sequence[str]) -> float:
        return sum(unit[label].squared_error for unit, label in zip(units, labels, strict=True))

    fitting = [labels for labels in mixed.values() if is_within(units, labels, limits)]
    return {"by part": min(fitting, key=error)} if fitting else {}


def fit(loaded: Loaded, statistics: Statistics, limited: Limited, measured: Measured, directory: Path) -> Fitted:
    """Choose the assignments with the smallest image error within the limit.

    Writes ``budget.csv`` to ``directory``: bytes and error of each layer with each label, and the chosen label.
    """
    offers, made = limited.offers, dict[tuple[str, ...], Made]()  # only the latest, because one may be large
    if left := set(loaded.recipe.choices) - loaded.offered.keys():
        LOG.info("%s is not offered: it only leaves inputs alone, for as many bytes", " and ".join(sorted(left)))

    def assignments_of(labels: Sequence[str]) -> Made:
        if (key := tuple(labels)) not in made:
            made.clear()
            made[key] = assigned(loaded, statistics, offers, by_part(offers, labels))
        return made[key]

    def measure(labels: Sequence[str]) -> float:
        return measured.squared_error_of(assignments_of(labels), "the choice as a whole") ** 0.5

    def apart(labels: Sequence[str]) -> dict[str, float]:
        errors = {}
        for part, own in by_part(offers, labels).items():
            for label in measured.errors[part]:
                if names := {name for name, each in own.items() if each == label}:
                    what = f"{len(names)} in {offers[part].named(label)}"
                    alone = {part: quantized_alone(assignments_of(labels)[part], names)}
                    errors[offers[part].named(label)] = measured.squared_error_of(alone, what) ** 0.5
        return errors

    units, limits = choices_of(offers, measured), limits_of(limited)
    if len(offers) > 1:  # a run has to quantize some denoiser layer: the least sensitive unit must
        own = units[: len(offers[loaded.denoiser].units)]
        most = max(map(len, own))
        able = [unit for unit in own if len(unit) == most]
        del min(able, key=lambda unit: max(choice.squared_error for choice in unit.values()))[KEPT]
    plain = partial(plain_choices, offers, limits)
    solved = solve(units, limits, measure, apart, measured.uniform, plain)
    chosen = solved.candidates[solved.taken].labels
    labels = by_part(offers, chosen)
    rows = [row for part, offer in offers.items() for row in rows_of(offer, labels[part], measured.errors[part])]
    write_csv(rows, directory / "budget.csv")
    return Fitted(assignments_of(chosen), limited, solved)


def limits_of(limited: Limited) -> list[Limit]:
    """Return, for each group, the bytes that its units may take; units are indexed across all parts."""
    owners = [part for part, offer in limited.offers.items() for _ in offer.units]
    return [
        Limit(
            group.limit - sum(limited.offers[part].fixed for part in group.parts),
            [place for place, part in enumerate(owners) if part in group.parts],
        )
        for group in limited.groups
    ]


def rows_of(
    offer: Offer, chosen: Mapping[str, str], errors: Mapping[str, Mapping[str, float]]
) -> list[dict[str, object]]:
    """Return a part's rows of ``budget.csv``; ``chosen``: label by layer; ``errors``: by label and single layer."""
    return [
        {"name": f"{offer.prefix}{name}", "role": offer.roles[name], "chosen": label}
        | {f"bytes_{each}": offer.sizes[name].get(each) for each in offer.recipes}
        | {f"network_error_{each}": by_layer.get(name) for each, by_layer in errors.items()}
        for name, label in chosen.items()
    ]
