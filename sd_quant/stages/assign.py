"""The assignment of the denoiser's layers, and the most sensitive layers, which stay in high precision."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.models.checkpoint import Checkpoint, denoiser_of, denoiser_weights, empty_modules
from sd_quant.models.parts import network_in
from sd_quant.models.roles import roles_of
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive, derive_nearest
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.csv_files import write_csv
from sd_quant.report.sensitivity_plot import plot_sensitivity
from sd_quant.simulation.sensitivity import Sensitivity, curve_points, guided, sensitivity_of, sensitivity_rows
from sd_quant.stages.load import Loaded
from sd_quant.stages.open_parts import open_simulated


def assign(
    loaded: Loaded, statistics: Statistics, kept: Collection[str] = (), recipes: Mapping[str, Recipe] = {}
) -> dict[str, LayerAssignment]:
    """Derive how each layer is quantized, by the recipe or its own of ``recipes``; those ``kept`` stay in fp16."""
    weights, recipe = denoiser_weights(loaded.checkpoint), loaded.recipe
    recipes = {name: loaded.own(name, recipes.get(name, recipe)) for name in (*recipes, *loaded.weights_alone)}
    rounds = 2 if recipe.chooses_codes(recipe.enable.linear.weight) else 1

    def optional(kind: str) -> Callable[[str], Tensor | None]:
        return lambda name: weights[parameter] if (parameter := f"{name}.{kind}") in weights else None

    with progress(rounds * len(loaded.roles), "assign") as advance:
        return derive(
            loaded.roles,
            lambda name: weights[f"{name}.weight"],
            statistics.layers,
            recipe,
            loaded.shared_inputs,
            kept,
            loaded.head_widths,
            loaded.exclude,
            optional("bias"),
            recipes,
            optional("weight"),
            advance,
        )


def assign_parts(loaded: Loaded) -> dict[str, dict[str, LayerAssignment]]:
    """Derive how the layers of each other part are quantized, by part."""
    return {
        name: assign_nearest(loaded, name, dict.fromkeys(layers_of(loaded, name), recipe))
        for name, recipe in loaded.part_recipes.items()
    }


def layers_of(loaded: Loaded, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Role and shape of the weight of each layer of another part than the denoiser."""
    part = loaded.parts[name]
    module = part.wrap(empty_modules(loaded.checkpoint)[part.component])
    network = network_in(part, module)
    roles = roles_of(network, (*part.excluded, *getattr(module, "unread", ())))
    return {layer: (role, tuple(network.get_parameter(f"{layer}.weight").shape)) for layer, role in roles.items()}


def assign_nearest(loaded: Loaded, name: str, recipes: Mapping[str, Recipe]) -> dict[str, LayerAssignment]:
    """Quantize the weights of another part to the nearest codes, each layer by its own of the ``recipes``."""
    weights = loaded.checkpoint.components[loaded.parts[name].component]
    roles = {layer: role for layer, (role, _) in layers_of(loaded, name).items()}
    return derive_nearest(roles, lambda layer: weights[f"{layer}.weight"], recipes)


def most_sensitive(
    loaded: Loaded, statistics: Statistics, assignment: dict[str, LayerAssignment], directory: Path
) -> tuple[Sensitivity, list[str]]:
    """Measure the sensitivity of all layers; returns it and the names of the ``loaded.kept`` most sensitive ones.

    Writes ``sensitivity.csv`` and its plot to ``directory``.
    """
    sensitivity = measure_sensitivity(loaded.checkpoint, assignment, statistics, loaded.kept, loaded.guidance_scale)
    table = sensitivity_rows(sensitivity, assignment, loaded.kept)
    write_csv(table, directory / "sensitivity.csv")
    plot_sensitivity(table, sensitivity.curve, directory / "sensitivity.png")
    return sensitivity, list(sensitivity.network_error)[: loaded.kept]


def measure_sensitivity(
    checkpoint: Checkpoint,
    assignment: dict[str, LayerAssignment],
    statistics: Statistics,
    kept: int,
    guidance_scale: float,
) -> Sensitivity:
    """Measure the sensitivity of each quantized layer, on inputs of the denoiser from the calibration statistics."""
    part = open_simulated(checkpoint, assignment)
    simulated, (output,) = denoiser_of(checkpoint, part.module), part.outputs
    inputs = {name: sample.values for name, sample in statistics.calls.items()}
    calls = [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]
    layers = [layer.name for layer in assignment.values() if layer.format]
    with progress(1 + len(layers) + len(curve_points(kept, len(layers))), "sensitivity") as advance:
        return sensitivity_of(
            simulated,
            lambda: torch.cat([guided(part(**call)[output].cpu(), guidance_scale) for call in calls]),
            layers,
            kept,
            advance,
        )
