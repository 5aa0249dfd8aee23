"""How each layer is quantized (its ``LayerAssignment``), and which sensitive layers stay in high precision."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.models.checkpoint import Checkpoint, denoiser_of, denoiser_weights, empty_part, roles_of_part
from sd_quant.models.text_encoders import inputs_of_part
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive, derive_nearest
from sd_quant.quantization.recipe import Recipe, excluded
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.table import write_csv
from sd_quant.simulation.sensitivity import Switched, guided, sensitivity_rows
from sd_quant.stages.load import Loaded
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.shared import Shared

UNREAD = "never reached in calibration"  # a network may hold layers that its part never calls


def assign(
    loaded: Loaded,
    statistics: Statistics,
    kept: Collection[str] = (),
    recipes: Mapping[str, Recipe] = {},
    kept_because: str = "among the most sensitive layers",
) -> dict[str, LayerAssignment]:
    """Derive how each denoiser layer is quantized; ``recipes``: by layer, in place of the job's; ``kept`` stay fp16."""
    weights, recipe = denoiser_weights(loaded.checkpoint), loaded.recipe
    recipes = {name: loaded.own(name, recipe) for name in loaded.weights_alone} | recipes
    exceptions = recipes | dict.fromkeys(kept, kept_because) | excluded(loaded.roles, loaded.exclude)
    return derive(
        loaded.roles, lambda name: weights[f"{name}.weight"], statistics.layers, recipe, loaded.shared_inputs,
        exceptions, loaded.attentions, biases(weights),
    )  # fmt: skip


def biases(weights: Mapping[str, Tensor]) -> Callable[[str], Tensor | None]:
    """Return a function from a layer's name to its bias, or to None for a layer without bias."""
    return lambda name: weights[bias] if (bias := f"{name}.bias") in weights else None


def assign_parts(loaded: Loaded, statistics: Mapping[str, Statistics]) -> dict[str, dict[str, LayerAssignment]]:
    """Derive the assignments of all quantized parts except the first denoiser, by part; further denoisers come first.

    ``statistics``: by part. Raises ConfigError without those of a denoiser, or of a part whose recipe needs inputs.
    """
    if missing := loaded.others.keys() - statistics.keys():
        raise ConfigError(f"there are no statistics of {', '.join(missing)}; calibrate with the same quantize.parts")
    others = {part: assign(other, statistics[part]) for part, other in loaded.others.items()}
    made = {
        part: assign_calibrated(loaded, part, recipe, statistics.get(part))
        if recipe.needs_inputs
        else assign_nearest(loaded, part, dict.fromkeys(roles_of_part(loaded.checkpoint, part), recipe))
        for part, recipe in loaded.part_recipes.items()
    }
    return others | made


def assign_calibrated(
    loaded: Loaded, part: str, recipe: Recipe, statistics: Statistics | None
) -> dict[str, LayerAssignment]:
    """Derive a non-denoiser part's assignment from its calibration. Raises ConfigError if ``statistics`` is None."""
    if statistics is None:
        raise ConfigError(
            f"quantize.parts gives {part} a preset that is derived from its layers' inputs, and there are no "
            f"statistics of {part}; calibrate with the same quantize.parts, or choose a preset of weights alone "
            "such as int8_weight_only"
        )
    own, roles = weights_of_part(loaded, part), roles_of_part(loaded.checkpoint, part)
    inputs = inputs_of_part(empty_part(loaded.checkpoint, part), roles)
    alone = [shared for shared in inputs if shared.producer is None]  # no layer before it can absorb a smoothing factor
    recipes = dict.fromkeys((name for shared in alone for name in shared.readers), replace(recipe, alpha=None))
    # layers that calibration never reached, as in an autoencoder
    unread = {name for name, role in roles.items() if role != "excluded" and name not in statistics.layers}
    made = derive(
        roles | dict.fromkeys(unread, "excluded"), lambda name: own[f"{name}.weight"], statistics.layers, recipe,
        inputs, recipes, bias_of=biases(own),
    )  # fmt: skip
    return made | {name: replace(made[name], reason=UNREAD) for name in unread}


def weights_of_part(loaded: Loaded, part: str) -> Mapping[str, Tensor]:
    """Return the weights of a part's network by their diffusers names; each is read when it is looked up."""
    return loaded.checkpoint.components[loaded.parts[part].component]


def layers_of(loaded: Loaded, part: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``(role, weight shape)`` of each layer of a ``part`` other than the denoiser, by layer name."""
    network = empty_part(loaded.checkpoint, part)
    roles = roles_of_part(loaded.checkpoint, part)
    return {layer: (role, tuple(network.get_parameter(f"{layer}.weight").shape)) for layer, role in roles.items()}


def assign_nearest(loaded: Loaded, part: str, recipes: Mapping[str, Recipe]) -> dict[str, LayerAssignment]:
    """Quantize the weights of a part other than the denoiser by rounding to nearest; ``recipes``: by layer name."""
    weights = weights_of_part(loaded, part)
    return derive_nearest(roles_of_part(loaded.checkpoint, part), lambda name: weights[f"{name}.weight"], recipes)


def most_sensitive(
    loaded: Loaded,
    statistics: Statistics,
    assignment: dict[str, LayerAssignment],
    directory: Path,
    shared: Shared | None = None,
    end: str = "",
) -> list[str]:
    """Measure the sensitivity of all layers; return the names of the ``loaded.kept`` most sensitive layers.

    Write ``sensitivity<end>.csv`` and its plot to ``directory``. ``shared``: the cache that other jobs use too.
    """
    errors = measure_sensitivity(loaded.checkpoint, assignment, statistics, loaded.guidance_scale, shared)
    from sd_quant.report.plots import plot_sensitivity  # which imports matplotlib

    table = sensitivity_rows(errors, assignment, loaded.kept)
    write_csv(table, directory / f"sensitivity{end}.csv")
    plot_sensitivity(table, directory / f"sensitivity{end}.png")
    return list(errors)[: loaded.kept]


def measure_sensitivity(
    checkpoint: Checkpoint,
    assignment: dict[str, LayerAssignment],
    statistics: Statistics,
    guidance_scale: float,
    shared: Shared | None = None,
) -> dict[str, float]:
    """Measure each layer's sensitivity: the error of the denoiser's output when this layer alone is quantized.

    Inputs: ``statistics.calls``. ``shared``: cache of all jobs. Returns the errors by layer, the largest first.
    """
    layers = [layer.name for layer in assignment.values() if layer.format]
    calls = {name: sample.values for name, sample in statistics.calls.items()}

    @cache
    def switched() -> Switched:
        part = open_simulated(checkpoint, assignment)
        (output,) = part.outputs
        each_call = [dict(zip(calls, values, strict=True)) for values in zip(*calls.values(), strict=True)]
        return Switched(
            denoiser_of(checkpoint, part.module),
            lambda: torch.cat([guided(part(**call)[output].cpu(), guidance_scale) for call in each_call]),
            layers,
        )

    with progress(len(layers), "sensitivity") as advance:

        def error(name: str) -> float:
            found = switched().error([name])
            advance()
            return found

        if shared is None:
            errors = {name: error(name) for name in layers}
        else:
            errors = shared.sensitivities(assignment, calls, guidance_scale, layers, error)
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
