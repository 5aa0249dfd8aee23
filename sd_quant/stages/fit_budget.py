"""A format for each layer, so that the denoiser's weights take no more bytes than ``quantize.budget``."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_quant.errors import ConfigError
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import HALF, Choice, choose, stored_bytes, with_weights
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.recipe_check import is_excluded
from sd_quant.quantization.smoothing import SMOOTHINGS
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.csv_files import write_csv
from sd_quant.stages.assign import assign, measure_sensitivity
from sd_quant.stages.load import Loaded

LOG = logging.getLogger(__name__)
FP32, KEPT = 4, "unquantized"  # bytes of a number, and the label of a layer in high precision


@dataclass(frozen=True)
class Fitted:
    """The chosen assignment, with its expected bytes and error."""

    assignment: dict[str, LayerAssignment]
    limit_bytes: int  # of all weights of the denoiser
    chosen_bytes: int
    predicted_error: float  # of the network's output, relative to its norm
    layers: dict[str, int]  # how many have each format

    def entry(self) -> dict:
        """The record's entry."""
        return {name: getattr(self, name) for name in ("limit_bytes", "chosen_bytes", "predicted_error", "layers")}


def recipes_of(loaded: Loaded) -> dict[str, Recipe | None]:
    """The recipes that a layer may have, by the format's name; None: it stays in fp16."""
    recipe = loaded.recipe
    others = {fmt: with_weights(recipe, fmt) for fmt in recipe.choices if fmt != recipe.format}
    return {recipe.format: recipe, **others, KEPT: None}


def units_of(loaded: Loaded) -> list[tuple[str, ...]]:
    """The quantized layers in groups that share a format: those that are smoothed together, each other one alone."""
    quantized = {
        name
        for name, role in loaded.roles.items()
        if reason_kept(role, loaded.recipe.quant_level) is None and not is_excluded(name, loaded.exclude)
    }
    convolutions = [(name,) for name, role in loaded.roles.items() if role == "conv"]
    together = [shared.readers for shared in SMOOTHINGS[loaded.recipe.smoothing](loaded.shared_inputs)]
    units = [tuple(name for name in unit if name in quantized) for unit in (*convolutions, *together)]
    return [unit for unit in units if unit]


def bytes_of(loaded: Loaded, names: tuple[str, ...], recipe: Recipe | None) -> int:
    """Bytes of these layers by a recipe."""
    own = {name: recipe and loaded.own(name, recipe) for name in names}
    return sum(stored_bytes(loaded.shapes[name], loaded.roles[name], own[name]) for name in names)


def bytes_to_share(loaded: Loaded) -> int | None:
    """Bytes of the budget for the layers that are quantized; None without a budget.

    The others, norms and embeddings among them, take theirs in fp16. Raises ConfigError when the budget is too small,
    or so large that nothing needs to be quantized.
    """
    budget, parameters = loaded.recipe.budget, loaded.parameters[loaded.denoiser]
    if budget is None:
        return None
    units, recipes = units_of(loaded), recipes_of(loaded)
    fixed = HALF * parameters - sum(bytes_of(loaded, unit, None) for unit in units)
    least = fixed + sum(min(bytes_of(loaded, unit, recipe) for recipe in recipes.values()) for unit in units)
    limit = budget if isinstance(budget, int) else int(budget * FP32 * parameters)
    if not least <= limit < HALF * parameters:
        formats, share = " or ".join(name for name, recipe in recipes.items() if recipe), least / parameters / FP32
        raise ConfigError(
            f"quantize.budget is {budget}, expected from {least} bytes (a share of {share:.4f}), the least with "
            f"{formats}, to {HALF * parameters - 1}, below which something has to be quantized"
        )
    return limit - fixed


def errors_of(loaded: Loaded, statistics: Statistics) -> dict[str, dict[str, float]]:
    """Relative errors of the denoiser's output by the label of a recipe and by the one layer that it quantizes."""
    errors = {}
    for label, recipe in recipes_of(loaded).items():
        if recipe is not None:
            assignment = assign(loaded, statistics, recipes=dict.fromkeys(loaded.roles, recipe))
            sensitivity = measure_sensitivity(loaded.checkpoint, assignment, statistics, 0, loaded.guidance_scale)
            errors[label] = sensitivity.network_error
    return errors


def assign_chosen(loaded: Loaded, statistics: Statistics, chosen: Mapping[str, str]) -> dict[str, LayerAssignment]:
    """Derive the assignment of the denoiser with the ``chosen`` label of each layer."""
    recipes = recipes_of(loaded)
    kept = [name for name, label in chosen.items() if label == KEPT]
    own = {name: recipe for name, label in chosen.items() if (recipe := recipes[label])}
    return assign(loaded, statistics, kept, own)


def fit_budget(loaded: Loaded, statistics: Statistics, limit: int, directory: Path) -> Fitted:
    """The assignment with which the network's output changes least within ``limit`` bytes for the quantized layers.

    Writes ``budget.csv`` to ``directory``: bytes and error of each layer with each format, and which it got.
    """
    units, recipes, errors = units_of(loaded), recipes_of(loaded), errors_of(loaded, statistics)

    def choice(unit: tuple[str, ...], label: str) -> Choice:
        squared = sum(errors[label][name] ** 2 for name in unit) if label in errors else 0.0
        return Choice(bytes_of(loaded, unit, recipes[label]), squared)

    offered = [{label: choice(unit, label) for label in recipes} for unit in units]
    taken = choose(offered, limit)
    chosen = {name: label for unit, label in zip(units, taken, strict=True) for name in unit}
    picked = [unit[label] for unit, label in zip(offered, taken, strict=True)]
    write_csv([row(loaded, name, chosen[name], errors) for name in chosen], directory / "budget.csv")
    fixed = HALF * loaded.parameters[loaded.denoiser] - sum(unit[KEPT].bytes for unit in offered)
    fitted = Fitted(
        assign_chosen(loaded, statistics, chosen),
        fixed + limit,
        fixed + sum(each.bytes for each in picked),
        sum(each.squared_error for each in picked) ** 0.5,
        {label: list(chosen.values()).count(label) for label in recipes},
    )  # fmt: skip
    found = ", ".join(f"{count} in {label}" for label, count in fitted.layers.items())
    LOG.info("%d of %d bytes: %s", fitted.chosen_bytes, fitted.limit_bytes, found)
    return fitted


def row(loaded: Loaded, name: str, chosen: str, errors: dict[str, dict[str, float]]) -> dict[str, object]:
    """The row of ``budget.csv``."""
    sizes = {f"bytes_{label}": bytes_of(loaded, (name,), recipe) for label, recipe in recipes_of(loaded).items()}
    costs = {f"network_error_{label}": by_layer[name] for label, by_layer in errors.items()}
    return {"name": name, "role": loaded.roles[name], "chosen": chosen} | sizes | costs
