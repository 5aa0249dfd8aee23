"""A preset for each layer, so that the denoiser's weights take no more bytes than ``quantize.budget``.

Each layer alone is measured at the network's output, and all layers of a preset together in images, which gives all
presets one unit: a layer's squared error is multiplied by what its preset does to images (``chosen_by_images``).
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_quant.errors import ConfigError
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import HALF, KEPT, Candidate, Choice, Solved, solve, stored_bytes
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.csv_files import write_csv
from sd_quant.stages.assign import assign, measure_sensitivity
from sd_quant.stages.chosen_by_images import PROMPTS, image_errors
from sd_quant.stages.load import Loaded, units_of
from sd_quant.stages.shared import Shared
from sd_quant.stages.variants import Assignments

LOG = logging.getLogger(__name__)
FP32 = 4  # bytes of a number
SMALLEST_ERROR = 1e-5  # 100 dB, where there is none
LEFT = "left in high precision by the choice of presets"
Units = Sequence[tuple[str, ...]]  # layers that have one label together
Recipes = Mapping[str, Recipe | None]  # by label; None: high precision


@dataclass(frozen=True)
class Fitted:
    """The chosen assignment, with the costs and errors of all candidates."""

    assignment: dict[str, LayerAssignment]
    labels: dict[str, str]  # of each layer that may be quantized
    solved: Solved
    layers: Mapping[str, Mapping[str, int]]  # by candidate: how many layers have each label
    limit: int  # bytes of the layers that may be quantized
    fixed: int  # bytes of what is never quantized

    def entry(self) -> dict[str, Any]:
        """The record's entry."""
        taken = self.solved.taken
        found = {name: self.entry_of(name, each) for name, each in self.solved.candidates.items()}
        return {
            "limit_bytes": self.fixed + self.limit,
            **found[taken],
            "taken": taken,
            "rates": dict(self.solved.rates),
            "candidates": found,
        }

    def entry_of(self, name: str, candidate: Candidate) -> dict[str, Any]:
        return {
            "chosen_bytes": self.fixed + candidate.cost,
            "predicted_error": candidate.predicted,
            "measured_error": candidate.measured,
            "layers": dict(self.layers[name]),
        }

    def sentence(self) -> str:
        """What was chosen, against what, in words."""
        entry = self.entry()
        found = ", ".join(f"{count} in {label}" for label, count in entry["layers"].items())
        others = "; ".join(
            f"{name} {decibels(each['measured_error']):.2f} dB"
            for name, each in entry["candidates"].items()
            if name != entry["taken"]
        )
        return (
            f"{entry['chosen_bytes']} of {entry['limit_bytes']} bytes: {found} ({entry['taken']}); "
            f"images of {PROMPTS} calibration prompts have {decibels(entry['measured_error']):.2f} dB, "
            f"{decibels(entry['predicted_error']):.2f} dB by the sum of layers"
            f"{f'; of the others: {others}' if others else ''}"
        )


def decibels(error: float) -> float:
    """The PSNR of images with this root mean squared error, where white is 1."""
    return -20 * math.log10(max(error, SMALLEST_ERROR))


def recipes_of(loaded: Loaded) -> dict[str, Recipe | None]:
    """The recipes that a layer may have, by the preset's name; None: it stays in fp16."""
    return {**{label: offered.recipe for label, offered in loaded.offered.items()}, KEPT: None}


def bytes_of(loaded: Loaded, names: tuple[str, ...], label: str) -> int:
    """Bytes of these layers with a label; in fp16 where they cannot have it."""
    own = {name: loaded.recipe_with(name, label) for name in names}
    return sum(stored_bytes(loaded.shapes[name], loaded.roles[name], own[name]) for name in names)


def byte_costs(loaded: Loaded, units: Units, recipes: Recipes) -> list[dict[str, int]]:
    """Bytes of each unit by label, without labels that none of its layers can have."""
    return [{label: bytes_of(loaded, unit, label) for label in labels_for(loaded, unit, recipes)} for unit in units]


def labels_for(loaded: Loaded, unit: tuple[str, ...], labels: Recipes) -> list[str]:
    """The labels that a layer of the ``unit`` can have; its others then stay in fp16."""
    return [label for label in labels if label == KEPT or any(loaded.recipe_with(name, label) for name in unit)]


def fixed_bytes(loaded: Loaded) -> int:
    """Bytes of what is never quantized, norms and embeddings among them, in fp16."""
    return HALF * loaded.parameters[loaded.denoiser] - sum(bytes_of(loaded, unit, KEPT) for unit in units_of(loaded))


def bytes_to_share(loaded: Loaded) -> int | None:
    """Bytes of the budget for the layers that are quantized; None without a budget.

    The others, norms and embeddings among them, take theirs in fp16. Raises ConfigError when the budget is too small,
    or so large that nothing needs to be quantized.
    """
    budget, parameters = loaded.recipe.budget, loaded.parameters[loaded.denoiser]
    if budget is None:
        return None
    units, recipes, fixed = units_of(loaded), recipes_of(loaded), fixed_bytes(loaded)
    least = fixed + sum(min(costs.values()) for costs in byte_costs(loaded, units, recipes))
    limit = budget if isinstance(budget, int) else int(budget * FP32 * parameters)
    if not least <= limit < HALF * parameters:
        presets, share = " or ".join(name for name, recipe in recipes.items() if recipe), least / parameters / FP32
        raise ConfigError(
            f"quantize.budget is {budget}, expected from {least} bytes (a share of {share:.4f}), the least with "
            f"{presets}, to {HALF * parameters - 1}, below which something has to be quantized"
        )
    return limit - fixed


def errors_of(
    loaded: Loaded,
    statistics: Statistics,
    shared: Shared | None,
    seen: Callable[[str, dict[str, LayerAssignment]], object] = lambda *_: None,
) -> dict[str, dict[str, float]]:
    """Relative errors of the denoiser's output by the label of a recipe and by the one layer that it quantizes.

    ``shared`` as for ``measure_sensitivity``. ``seen`` gets each label with the assignment of all layers that can have
    it.
    """
    errors, names = {}, [name for unit in units_of(loaded) for name in unit]
    for label in loaded.offered:
        assignment = assign_chosen(loaded, statistics, dict.fromkeys(names, label))
        measured = measure_sensitivity(loaded.checkpoint, assignment, statistics, 0, loaded.guidance_scale, shared)
        errors[label] = measured.network_error
        seen(label, assignment)
    return errors


def quantized_alone(assignment: Mapping[str, LayerAssignment], names: Collection[str]) -> dict[str, LayerAssignment]:
    """The ``assignment`` with the layers ``names`` quantized and no others, which stay smoothed."""
    return {
        name: layer if name in names else replace(layer, format=None, activation_format=None)
        for name, layer in assignment.items()
    }


def assign_chosen(loaded: Loaded, statistics: Statistics, chosen: Mapping[str, str]) -> dict[str, LayerAssignment]:
    """Derive the assignment of the denoiser with the ``chosen`` label of each layer, in fp16 where it has none.

    A layer that cannot have its label stays in fp16 too.
    """
    own = {name: recipe for name, label in chosen.items() if (recipe := loaded.recipe_with(name, label))}
    return assign(loaded, statistics, [name for name in loaded.roles if name not in own], own, LEFT)


@dataclass(frozen=True)
class Measured:
    """What presets do to layers and images, whatever the limit is."""

    errors: dict[str, dict[str, float]]  # of the network's output, by label and by the one layer that is quantized
    uniform: dict[str, float]  # of images, by the label of all layers
    squared_error_of: Callable[[Assignments, str], float]  # see ``image_errors``


def measure_presets(loaded: Loaded, statistics: Statistics, shared: Shared | None = None) -> Measured:
    """Measure each layer with each preset at the network's output, and each preset for all layers in images."""
    (squared_error_of, _), uniform = image_errors(loaded), dict[str, float]()

    def seen(label: str, assignment: dict[str, LayerAssignment]) -> None:
        uniform[label] = squared_error_of({loaded.denoiser: assignment}, f"all in {label}") ** 0.5

    return Measured(errors_of(loaded, statistics, shared, seen), uniform, squared_error_of)


def fit_budget(loaded: Loaded, statistics: Statistics, measured: Measured, limit: int, directory: Path) -> Fitted:
    """The assignment with which images change least within the ``limit`` in bytes for the quantized layers.

    Writes ``budget.csv`` to ``directory``: bytes and error of each layer with each label, and which it got.
    """
    units, recipes = units_of(loaded), recipes_of(loaded)
    costs, errors = byte_costs(loaded, units, recipes), measured.errors

    def error_of(assignment: dict[str, LayerAssignment], what: str) -> float:
        return measured.squared_error_of({loaded.denoiser: assignment}, what) ** 0.5

    if left := set(loaded.recipe.choices) - loaded.offered.keys():
        LOG.info("%s is not offered: it only leaves inputs alone, for as many bytes", " and ".join(sorted(left)))
    made: dict[tuple[str, ...], dict[str, LayerAssignment]] = {}  # the last, because one may be large

    def choice(names: tuple[str, ...], label: str, cost: float) -> Choice:
        squared = sum(errors[label].get(name, 0.0) ** 2 for name in names) if label in errors else 0.0
        return Choice(cost, squared)

    def named(labels: Sequence[str]) -> dict[str, str]:
        pairs = [(name, label) for names, label in zip(units, labels, strict=True) for name in names]
        return {name: label if loaded.recipe_with(name, label) else KEPT for name, label in pairs}

    def measure(labels: Sequence[str]) -> float:
        made.clear()
        made[tuple(labels)] = assignment = assign_chosen(loaded, statistics, named(labels))
        return error_of(assignment, "the choice as a whole")

    def apart(labels: Sequence[str]) -> dict[str, float]:
        by_layer = named(labels)
        groups = {label: {name for name, own in by_layer.items() if own == label} for label in errors}
        return {
            label: error_of(quantized_alone(made[tuple(labels)], names), f"{len(names)} in {label}")
            for label, names in groups.items()
            if names
        }

    offered = [
        {label: choice(names, label, cost) for label, cost in own.items()}
        for names, own in zip(units, costs, strict=True)
    ]
    solved = solve(offered, limit, measure, apart, measured.uniform)
    labels = solved.candidates[solved.taken].labels
    chosen = named(labels)
    write_csv([row(loaded, name, chosen[name], errors) for name in chosen], directory / "budget.csv")
    fitted = Fitted(
        made.get(tuple(labels)) or assign_chosen(loaded, statistics, chosen),
        chosen,
        solved,
        {
            name: {label: list(named(each.labels).values()).count(label) for label in recipes}
            for name, each in solved.candidates.items()
        },
        limit,
        fixed_bytes(loaded),
    )
    LOG.info("%s", fitted.sentence())
    return fitted


def row(loaded: Loaded, name: str, chosen: str, errors: Mapping[str, Mapping[str, float]]) -> dict[str, object]:
    """The row of ``budget.csv``."""
    sizes = {
        f"bytes_{label}": bytes_of(loaded, (name,), label) if label == KEPT or loaded.recipe_with(name, label) else None
        for label in recipes_of(loaded)
    }
    changes = {f"network_error_{label}": by_layer.get(name) for label, by_layer in errors.items()}
    return {"name": name, "role": loaded.roles[name], "chosen": chosen} | sizes | changes
