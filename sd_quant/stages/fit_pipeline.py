"""A format for each layer of every part, so that the whole pipeline fits in ``quantize.fit`` bytes.

What has to fit are the weights, the activations of a call and the process (``inference.memory``): those of all parts
with the largest call, or, with ``quantize.resident=one``, those of each part alone. Sensitivities are measured in two
steps on a few calibration prompts: each layer alone at the output of its own part, and each part as a whole, in its
smallest format, in the images. Squared errors of layers are assumed to add up (``quantization.budget``), so the second
divided by the sum of the first is the part's rate, by which errors of text encoders, denoiser and autoencoder become
one unit, the mean squared error of an image, and all layers share one knapsack. The road not taken is to measure every
layer in images, which is hundreds of times the work.

The rates are those of one format, so the result is compared in images with the best choice of one format for each part,
and the better of the two is taken.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_quant.config.recipe import bytes_in
from sd_quant.engines.base import Engine
from sd_quant.errors import ConfigError
from sd_quant.inference.memory import working_bytes
from sd_quant.models.parts import exported, network_in
from sd_quant.progress import each as each_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import KEPT, Choice, choose, choose_uniform, stored_bytes, with_weights
from sd_quant.quantization.formats import divides
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.csv_files import write_csv
from sd_quant.simulation.sensitivity import Switched
from sd_quant.stages.assign import assign_nearest, layers_of
from sd_quant.stages.chosen_by_images import image_errors
from sd_quant.stages.fit_budget import assign_chosen, byte_costs, errors_of, recipes_of
from sd_quant.stages.load import Loaded, units_of
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.resources import workload_of
from sd_quant.stages.shared import Shared
from sd_quant.stages.variants import Assignments

LOG = logging.getLogger(__name__)
GB = 1e9
Errors = Mapping[str, Mapping[str, float]]  # relative errors of a part's output by label and layer
Labels = dict[str, dict[str, str]]  # what layers take, by part and layer


@dataclass(frozen=True)
class Offer:
    """The formats that the layers of a part may have."""

    part: str
    units: Sequence[tuple[str, ...]]  # layers that take one format together
    recipes: Mapping[str, Recipe | None]  # by label; None: high precision
    sizes: Sequence[Mapping[str, int]]  # bytes of each unit by label, without labels whose blocks do not divide it
    whole: int  # bytes of all weights in high precision

    @property
    def fixed(self) -> int:
        """Bytes of what is never quantized."""
        return self.whole - sum(unit[KEPT] for unit in self.sizes)

    @property
    def least(self) -> int:
        """The fewest bytes of all weights."""
        return self.fixed + sum(min(unit.values()) for unit in self.sizes)

    @property
    def smallest(self) -> str:
        """The label with the fewest bytes for all layers together."""
        return min(self.recipes, key=lambda label: self.bytes_with(self.all_in(label)))

    def all_in(self, label: str) -> dict[str, str]:
        """The same label for all layers that can have it; the others stay in high precision."""
        pairs = zip(self.units, self.sizes, strict=True)
        return {name: label if label in sizes else KEPT for unit, sizes in pairs for name in unit}

    def bytes_with(self, labels: Mapping[str, str]) -> int:
        """Bytes of all weights with these labels of layers."""
        return self.fixed + sum(size[labels[unit[0]]] for unit, size in zip(self.units, self.sizes, strict=True))


@dataclass(frozen=True)
class Priced:
    """An offer with its errors in images."""

    offer: Offer
    errors: Errors
    choices: Sequence[Mapping[str, Choice]]  # of each unit by label; errors are mean squares of images


@dataclass(frozen=True)
class Group:
    """Parts that are in memory together."""

    parts: Sequence[str]
    working: float  # bytes beside their weights
    limit: int  # bytes that their weights may take


@dataclass(frozen=True)
class FittedPipeline:
    """The chosen assignments, and the record's entry about the choice."""

    assignment: dict[str, LayerAssignment]
    parts: dict[str, dict[str, LayerAssignment]]  # of other parts than the denoiser
    labels: dict[str, str]  # of the denoiser's layers
    entry: dict[str, Any]


def offers_of(loaded: Loaded) -> dict[str, Offer]:
    """The offer of each part, the denoiser first; a part that is not exported has no layers to quantize."""
    recipe, stored, recipes = loaded.recipe, loaded.stored_bytes, recipes_of(loaded)
    units = units_of(loaded)
    sizes = byte_costs(loaded, units, recipes)
    offers = {loaded.denoiser: Offer(loaded.denoiser, units, recipes, sizes, stored[loaded.denoiser])}
    nearest = replace(recipe, smoothing="none", alpha=None, rounding="nearest", scale_search=False)
    formats = dict.fromkeys(each.recipe.enable.linear.weight for each in loaded.offered.values())
    alone: dict[str, Recipe | None] = {fmt: with_weights(nearest, fmt) for fmt in formats}
    alone[KEPT] = None
    for part in loaded.parts:
        if part != loaded.denoiser:
            itemsize = loaded.parts[part].contract.weights.itemsize
            layers = layers_of(loaded, part) if part in exported(loaded.parts) else {}
            layers = {name: row for name, row in layers.items() if row[0] != "excluded"}
            sizes = [
                {
                    label: stored_bytes(shape, role, each, itemsize)
                    for label, each in alone.items()
                    if each is None or divides(label, math.prod(shape[1:]))
                }
                for role, shape in layers.values()
            ]
            offers[part] = Offer(part, [(name,) for name in layers], alone, sizes, stored[part])
    return offers


def groups_of(loaded: Loaded, offers: Mapping[str, Offer]) -> list[Group]:
    """The parts that are in memory together. Raises ConfigError where they cannot fit, or fit as they are."""
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


def check_fit(loaded: Loaded) -> None:
    """Raises ConfigError for a ``quantize.fit`` that cannot be met."""
    if loaded.recipe.fit is not None:
        groups_of(loaded, offers_of(loaded))


def fit_pipeline(
    loaded: Loaded, statistics: Statistics, directory: Path, shared: Shared | None = None
) -> FittedPipeline:
    """The assignments of all parts with which images change least within ``quantize.fit`` bytes.

    Writes ``budget.csv`` to ``directory``: bytes and error of each layer with each format, and which it got.
    """
    offers = offers_of(loaded)
    groups = groups_of(loaded, offers)
    error_of, calls = image_errors(loaded)
    priced = price(loaded, statistics, offers, calls, error_of, shared)
    candidates = {"by layer": by_layer(groups, priced)}
    if (labels := by_part(groups, priced, loaded.denoiser)) is not None:
        candidates["by part"] = labels
    made = {name: assigned(loaded, statistics, offers, labels) for name, labels in candidates.items()}
    measured = {name: error_of(assignments, f"formats {name}") for name, assignments in made.items()}
    taken = min(measured, key=measured.__getitem__)
    rows = [row for part, each in priced.items() for row in rows_of(each, candidates[taken][part])]
    write_csv(rows, directory / "budget.csv")
    entry = {
        "limit_bytes": bytes_in(loaded.recipe.fit),
        "resident": loaded.recipe.resident,
        "groups": [{"parts": list(group.parts), "beside_weights_bytes": round(group.working)} for group in groups],
        "unquantized_bytes": {part: offer.whole for part, offer in offers.items()},
        "taken": taken,
        "candidates": {name: candidate_entry(priced, labels, measured[name]) for name, labels in candidates.items()},
    }
    for sentence in sentences(entry):
        LOG.info("%s", sentence)
    chosen = {part: dict(assignment) for part, assignment in made[taken].items()}
    return FittedPipeline(chosen.pop(loaded.denoiser), chosen, candidates[taken][loaded.denoiser], entry)


def price(
    loaded: Loaded,
    statistics: Statistics,
    offers: Mapping[str, Offer],
    calls: Mapping[str, Sequence[Mapping[str, Tensor]]],
    error_of: Callable[[Assignments, str], float],
    shared: Shared | None = None,
) -> dict[str, Priced]:
    """The offers with their errors in images: measured by layer on ``calls``, and by ``error_of`` a whole part."""
    priced = {}
    for part, offer in offers.items():
        errors, rate = errors_of_part(loaded, statistics, offer, calls.get(part, ()), shared), 0.0
        if total := sum(error**2 for error in errors.get(offer.smallest, {}).values()):
            alone = assigned(loaded, statistics, offers, {part: offer.all_in(offer.smallest)})
            rate = error_of(alone, f"{part} in {offer.smallest}") / total
        priced[part] = Priced(offer, errors, choices_of(offer, errors, rate, part == loaded.denoiser))
    return priced


def assigned(loaded: Loaded, statistics: Statistics, offers: Mapping[str, Offer], labels: Labels) -> Assignments:
    """The assignments of the parts of which a layer is quantized."""
    return {
        part: assign_labels(loaded, statistics, offers[part], own)
        for part, own in labels.items()
        if set(own.values()) - {KEPT}
    }


def errors_of_part(
    loaded: Loaded,
    statistics: Statistics,
    offer: Offer,
    calls: Sequence[Mapping[str, Tensor]],
    shared: Shared | None,
) -> Errors:
    """Relative errors of a part's outputs by each layer alone; the denoiser's are of calls that calibration kept."""
    if offer.part == loaded.denoiser:
        return errors_of(loaded, statistics, shared)
    errors: dict[str, Mapping[str, float]] = {}
    for label in [label for label, recipe in offer.recipes.items() if recipe is not None and offer.units]:
        engine = open_simulated(
            loaded.checkpoint, assign_labels(loaded, statistics, offer, offer.all_in(label)), offer.part
        )
        network = network_in(loaded.parts[offer.part], engine.module)
        layers = [name for name, own in offer.all_in(label).items() if own == label]
        switched = Switched(network, lambda own=engine: outputs_of(own, calls), layers)
        errors[label] = {name: switched.error([name]) for name in each_of(layers, f"sensitivity, {offer.part}")}
    return errors


def outputs_of(engine: Engine, calls: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """All outputs of all calls as one vector."""
    return torch.cat([output.float().cpu().flatten() for call in calls for output in engine(**call).values()])


def assign_labels(
    loaded: Loaded, statistics: Statistics, offer: Offer, labels: Mapping[str, str]
) -> dict[str, LayerAssignment]:
    """The assignment of a part whose layers have these labels."""
    if offer.part == loaded.denoiser:
        return assign_chosen(loaded, statistics, labels)
    recipes = {name: recipe for name, label in labels.items() if (recipe := offer.recipes[label]) is not None}
    return assign_nearest(loaded, offer.part, recipes)


def choices_of(offer: Offer, errors: Errors, rate: float, some: bool) -> list[dict[str, Choice]]:
    """Bytes and errors of each unit by label; a squared error at the part's output is worth ``rate`` in images.

    With ``some``, the least sensitive unit cannot stay in high precision: a run is about a quantized denoiser.
    """
    choices = [
        {
            label: Choice(
                size, rate * sum(errors[label].get(name, 0.0) ** 2 for name in unit) if label != KEPT else 0.0
            )
            for label, size in sizes.items()
        }
        for unit, sizes in zip(offer.units, offer.sizes, strict=True)
    ]
    if some:
        able = [choice for choice in choices if offer.smallest in choice]
        del min(able, key=lambda choice: choice[offer.smallest].squared_error)[KEPT]
    return choices


def by_layer(groups: Sequence[Group], priced: Mapping[str, Priced]) -> Labels:
    """The labels with the least error, each unit its own."""
    labels: Labels = {}
    for group in groups:
        own = [priced[part] for part in group.parts]
        limit, units = (
            group.limit - sum(each.offer.fixed for each in own),
            [unit for each in own for unit in each.choices],
        )
        taken = iter(choose(units, limit) if units else ())
        for each in own:
            pairs = [(unit, next(taken)) for unit in each.offer.units]
            labels[each.offer.part] = {name: label for unit, label in pairs for name in unit}
    return labels


def by_part(groups: Sequence[Group], priced: Mapping[str, Priced], denoiser: str) -> Labels | None:
    """The labels with the least error, one for each part, the ``denoiser`` quantized; None where none fits."""
    labels: Labels = {}
    for group in groups:
        offers = [priced[part].offer for part in group.parts]
        totals = [
            {
                label: Choice(
                    offer.bytes_with(offer.all_in(label)), total_error(priced[offer.part], offer.all_in(label))
                )
                for label in offer.recipes
                if label != KEPT or offer.part != denoiser
            }
            for offer in offers
        ]
        taken = choose_uniform(totals, group.limit)
        if taken is None:
            return None
        labels |= {offer.part: offer.all_in(label) for offer, label in zip(offers, taken, strict=True)}
    return labels


def total_error(priced: Priced, labels: Mapping[str, str]) -> float:
    """The expected squared error of images with these labels of a part's layers."""
    pairs = zip(priced.offer.units, priced.choices, strict=True)
    return sum(choice[labels[unit[0]]].squared_error for unit, choice in pairs)


def psnr(squared: float) -> float | None:
    """The PSNR in dB of a mean squared error of images; None where they are equal."""
    return -10 * math.log10(squared) if squared else None


def candidate_entry(priced: Mapping[str, Priced], labels: Labels, squared: float) -> dict[str, Any]:
    """The record's entry for a choice whose images have this mean ``squared`` error."""
    return {
        "weight_bytes": {part: each.offer.bytes_with(labels[part]) for part, each in priced.items()},
        "formats": {part: dict(Counter(labels[part].values())) for part in priced},
        "expected_psnr": psnr(sum(total_error(each, labels[part]) for part, each in priced.items())),
        "psnr": psnr(squared),
    }


def sentences(entry: Mapping[str, Any]) -> list[str]:
    """What was chosen, against what, and what takes most of the memory, in words."""
    found = []
    for name, each in entry["candidates"].items():
        sizes, beside = each["weight_bytes"], {}
        for group in entry["groups"]:
            beside[", ".join(group["parts"])] = group["beside_weights_bytes"] + sum(sizes[p] for p in group["parts"])
        largest = max(sizes, key=sizes.__getitem__)
        formats = "; ".join(
            f"{part} {' + '.join(f'{count} {label}' for label, count in labels.items())}"
            for part, labels in each["formats"].items()
            if labels
        )
        found.append(
            f"formats {name}{', taken' if name == entry['taken'] else ''}: {max(beside.values()) / GB:.3f} of "
            f"{entry['limit_bytes'] / GB:.3f} GB, expected {each['expected_psnr'] or math.inf:.1f} dB, "
            f"{each['psnr'] or math.inf:.1f} dB in calibration images; the largest part is {largest} with "
            f"{sizes[largest] / GB:.3f} GB; {formats}"
        )
    return found


def rows_of(priced: Priced, labels: Mapping[str, str]) -> list[dict[str, object]]:
    """A part's rows of ``budget.csv``."""
    offer = priced.offer
    return [
        {"name": f"{offer.part}:{'+'.join(unit)}", "chosen": labels[unit[0]]}
        | {f"bytes_{label}": size for label, size in sizes.items()}
        | {f"image_error_{label}": choice[label].squared_error for label in sizes if label in choice}
        for unit, sizes, choice in zip(offer.units, offer.sizes, priced.choices, strict=True)
    ]
