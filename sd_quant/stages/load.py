"""From the checkpoint's path to everything that later steps need to know of the model."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.own_size import own_size
from sd_quant.config import Model, Quantize, QuantizeJob, RecipeJob, sizes_of
from sd_quant.errors import ConfigError
from sd_quant.files.checks import check_finite
from sd_quant.files.tensors import Weights
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser, part_parameters
from sd_quant.models.parts import Part, SharedInput, text_readers
from sd_quant.places import input_path
from sd_quant.quantization.budget import inputs_left_alone, with_weights
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.recipe_check import check_layers, is_excluded
from sd_quant.simulation.sensitivity import budget
from sd_quant.stages.generate import check_channels, check_guidance, check_mask, check_sizes, check_steps
from sd_quant.stages.resources import check_machine, disk_needed, gpu_memory_needed, memory_needed, stored_bytes

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A checked checkpoint, and what follows from its structure and the recipe. No weight is in memory."""

    checkpoint: Checkpoint
    parts: dict[str, Part]  # the denoiser first
    parameters: dict[str, int]  # number of weights by part
    roles: dict[str, str]  # role of each of the denoiser's layers
    shapes: dict[str, tuple[int, ...]]  # of the weight of each
    head_widths: dict[str, int]  # width of a head by attention, of those that quant_level 4 can quantize
    recipe: Quantize
    exclude: Collection[str]  # patterns of the layers that the recipe leaves in high precision
    weights_alone: Collection[str]  # the linears of which the recipe quantizes the weight alone
    kept: int  # how many of the most sensitive layers stay in high precision
    guidance_scale: float  # of the images, those of calibration too

    @property
    def shared_inputs(self) -> list[SharedInput]:
        """The tensors that its linears read. One that the family excludes and the recipe includes has its own."""
        linears = [name for name, role in self.roles.items() if role != "conv"]
        inputs = self.checkpoint.family.shared_inputs(linears)
        known = {name for shared in inputs for name in shared.readers}
        others = [name for name in linears if self.roles[name] != "excluded" and name not in known]
        return [*inputs, *(SharedInput((name,)) for name in others)]

    def own(self, name: str, recipe: Recipe) -> Recipe:
        """What ``recipe`` becomes for the layer of this name."""
        return inputs_left_alone(recipe) if name in self.weights_alone else recipe

    @property
    def denoiser(self) -> str:
        """The name of the part that is quantized."""
        return self.checkpoint.family.DENOISER

    @property
    def component(self) -> str:
        """diffusers' name of the same network."""
        return denoiser_part(self.checkpoint).component


def open_model(model: Model) -> Checkpoint:
    """The checkpoint that the knobs name. Raises what its reader raises."""
    return open_checkpoint(
        input_path(model.path), model.family, io=model.io, max_sequence_length=model.max_sequence_length,
        parts=model.parts, loras=model.adapters(), encodes=model.encoder,
    )  # fmt: skip


def read_the_text(checkpoint: Checkpoint, roles: Mapping[str, str]) -> list[str]:
    """The linears that read the text and nothing else. Raises ConfigError when there are none."""
    linears = [name for name, role in roles.items() if role != "conv"]
    names = sorted(text_readers(checkpoint.family.shared_inputs(linears)))
    if not names:
        raise ConfigError(
            "quantize.exclude_text is true, expected false, because no layer of this model reads the text alone"
        )
    return names


def load(job: QuantizeJob, directory: Path) -> Loaded:
    """Open the checkpoint and check it, the recipe and the machine.

    Raises what the checkpoint's reader and ``layers_of`` raise, ArtifactError for weights that are not finite, and
    ResourceError when memory or disk are too small.
    """
    checkpoint = open_model(job.model)
    warn_of_size(job)
    loaded = layers_of(checkpoint, job)
    stored = stored_bytes(loaded.parts, loaded.parameters)
    check_machine(
        memory_needed(loaded.parameters, job), disk_needed(stored, job), directory,
        gpu_memory_needed(loaded.parameters, job),
    )  # fmt: skip
    check_weights(checkpoint)
    return loaded


def warn_of_size(job: QuantizeJob) -> None:
    """Log when images have less than half or more than twice the pixels of those that the checkpoint was made for."""
    size = own_size(input_path(job.model.path))
    for section, knobs in (("model", job.model), ("infer", job.infer)):
        stated = f"{section}.sizes" if knobs.sizes else f"{section}.width and {section}.height"
        for width, height in sizes_of(knobs) if size is not None else ():
            if not 0.5 <= height * width / (size[0] * size[1]) <= 2:
                LOG.warning(
                    "%s ask for %d x %d, and this checkpoint was made for %d x %d: images of another size are often "
                    "broken, and so is what is calibrated on them", stated, width, height, size[1], size[0],
                )  # fmt: skip


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises ArtifactError when a weight is not finite. Reads all of them, one at a time."""
    for weights in checkpoint.components.values():
        check_finite(cast(Weights, weights))


def layers_of(checkpoint: Checkpoint, job: RecipeJob) -> Loaded:
    """What follows from the checkpoint's structure and the job.

    Raises ConfigError for a recipe that does not fit the layers, noise that does not fit the VAE, guidance that nothing
    reads, more steps than the sampler can make, or images that are larger than the denoiser takes.
    """
    check_channels(checkpoint, job.infer)
    if job.quantize.calibration is None:
        check_mask(checkpoint, "model.calibration_", job.model.calibration_mask)
    check_guidance(checkpoint, job.infer)
    check_steps(checkpoint, {"quantize.n_steps": job.quantize.n_steps, "infer.steps": job.infer.steps})
    check_sizes(checkpoint, {"model": job.model, "infer": job.infer})
    parts, parameters = checkpoint.parts(), part_parameters(checkpoint)
    network, recipe = empty_denoiser(checkpoint), job.quantize
    roles, head_widths = checkpoint.family.layer_roles(network), checkpoint.family.attentions(network)
    shapes = {name: tuple(network.get_parameter(f"{name}.weight").shape) for name in roles}
    linears = [name for name, shape in shapes.items() if len(shape) == 2]
    excluded = [name for name in linears if roles[name] == "excluded"]
    roles |= dict.fromkeys(matched("include", recipe.include.get(job.model.family, ()), excluded), "linear")
    exclude = list(recipe.exclude.get(job.model.family, ()))
    if recipe.exclude_text:
        exclude += read_the_text(checkpoint, roles)
    alone = frozenset(matched("weights_alone", recipe.weights_alone.get(job.model.family, ()), linears))
    alternatives = [with_weights(recipe, fmt) for fmt in recipe.choices] if recipe.budget else []
    for each in (recipe, *alternatives):
        check_layers(roles, shapes, each, head_widths, exclude, dict.fromkeys(alone, inputs_left_alone(each)))
    selected = sum(reason_kept(role, recipe.quant_level) is None for role in roles.values())
    kept = budget(job.quantize.keep, selected)
    loaded = Loaded(
        checkpoint, parts, parameters, roles, shapes, head_widths, recipe, exclude, alone, kept, job.infer.scale
    )
    check_readers(loaded)
    return loaded


def matched(knob: str, patterns: Collection[str], names: Collection[str]) -> list[str]:
    """Those of ``names`` that match a pattern. Raises ConfigError when a pattern matches none."""
    for pattern in patterns:
        if not any(is_excluded(name, [pattern]) for name in names):
            raise ConfigError(
                f"quantize.{knob} has {pattern!r}, which matches none of the {len(names)} linears that it could be of, "
                f"such as {', '.join(list(names)[:3]) or 'none'}; change the pattern"
            )
    return [name for name in names if is_excluded(name, patterns)]


def check_readers(loaded: Loaded) -> None:
    """Raises ConfigError when some readers of one input have it in high precision and others have not."""
    for shared in loaded.shared_inputs:
        alone = [name for name in shared.readers if name in loaded.weights_alone]
        if alone and len(alone) < len(shared.readers):
            other = next(name for name in shared.readers if name not in loaded.weights_alone)
            raise ConfigError(
                f"quantize.weights_alone matches {alone[0]} and not {other}, which reads the same input; match both"
            )
