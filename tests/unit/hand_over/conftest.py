"""Tiny checkpoints with assignments that a target holds, and what is compared of a network that a consumer loads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.hand_over import TARGETS, writer
from sd_quant.hand_over.adapt import adapted, simulate_target
from sd_quant.inference.loading import load_part
from sd_quant.models import family_named
from sd_quant.models.checkpoint import denoiser_of, denoiser_part
from sd_quant.models.parts import axes
from sd_quant.models.unet import attentions, shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.simulation.modelopt import between_roundings

from ...pipelines import TINY

TOKENS = 16  # of a T5
Assignment = Mapping[str, LayerAssignment]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint, and its layers' statistics over two calls with random inputs."""

    checkpoint: DiffusersCheckpoint

    def part(self) -> nn.Module:
        return load_part(self.checkpoint, self.checkpoint.family.DENOISER).module

    def wrapped(self, denoiser: nn.Module) -> nn.Module:
        return denoiser_part(self.checkpoint).wrap(denoiser)

    def inputs(self, seed: int) -> dict[str, Tensor]:
        """A time has one axis, and is neither the first nor the last."""
        random = torch.Generator().manual_seed(seed)
        shapes = denoiser_part(self.checkpoint).contract.shapes(**axes(batch=2, width=64, height=128))
        return {
            name: torch.randn(shape, generator=random) if len(shape) > 1 else torch.full(shape, 0.5)
            for name, shape in shapes.items()
        }

    @cached_property
    def roles(self) -> dict[str, str]:
        return self.checkpoint.family.layer_roles(denoiser_of(self.checkpoint, self.part()))

    @cached_property
    def statistics(self) -> Statistics:
        part, now = self.part(), {}
        denoiser = denoiser_of(self.checkpoint, part)
        layers = {name: denoiser.get_submodule(name) for name, role in self.roles.items() if role != "excluded"}
        batched = {
            name for name, shape in denoiser_part(self.checkpoint).contract.inputs.items() if shape[0] == "batch"
        }
        wanted = draw(layers, range(2), 1, seed=0)
        with collect(part, layers, range(2), 1, lambda: (0, [now["prompt"]]), wanted, batched) as statistics:
            for now["prompt"] in range(2):
                part(**self.inputs(now["prompt"]))
        return statistics

    def assignment(self, recipe: Recipe, target: str) -> dict[str, LayerAssignment]:
        """What the ``target`` holds of what the recipe derives."""
        denoiser = denoiser_of(self.checkpoint, self.part())
        derived = derive(
            self.roles,
            lambda name: denoiser.get_submodule(name).weight,
            self.statistics.layers,
            recipe,
            self.checkpoint.family.shared_inputs(self.roles),
            bias_of=lambda name: denoiser.get_submodule(name).bias,
        )
        return adapted(derived, TARGETS[target])

    def simulated(self, assignment: Assignment, target: str) -> nn.Module:
        """The part as the ``target``'s consumer computes it."""
        part = self.part()
        simulate_target(denoiser_of(self.checkpoint, part), assignment, TARGETS[target])
        return part

    def written(self, assignment: Assignment, target: str, folder: Path) -> Path:
        """``folder``, a pipeline's, with the denoiser that the ``target`` writes."""
        DiffusionPipeline.from_pretrained(self.checkpoint.path).save_pretrained(folder)
        (folder / self.component / "diffusion_pytorch_model.safetensors").unlink()
        writer(TARGETS[target])(self.checkpoint, assignment, folder)
        return folder

    @property
    def component(self) -> str:
        return denoiser_part(self.checkpoint).component

    def loaded(self, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The denoiser as diffusers loads the pipeline's."""
        kind = getattr(__import__("diffusers"), self.checkpoint.family.NETWORKS[self.component])
        return kind.from_pretrained(folder, subfolder=self.component, torch_dtype=dtype).eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Tiny]:
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def opened(family: str) -> Tiny:
        TINY[family](folder / family)
        tokens = TOKENS if family_named(family).TOKENS else None
        return Tiny(open_pipeline(folder / family, family, tokens, "diffusers"))

    return opened


@torch.no_grad()
def layer_errors(case: Tiny, simulated: nn.Module, theirs: nn.Module, assignment: Assignment) -> dict[str, float]:
    """The relative error of the output of each quantized layer, of the inputs that it gets in the simulation.

    They are moved between the numbers where rounding changes, because 1 / scale is rounded by some.
    """
    errors: dict[str, float] = {}
    denoiser = denoiser_of(case.checkpoint, simulated)

    def compare(name: str):
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], _) -> None:
            if name not in errors:  # this compares by calling the layer again
                errors[name] = 0.0
                x = between_roundings(layer, inputs[0])
                errors[name] = relative_error(layer(x), theirs.get_submodule(name)(x))

        return hook

    layers = [name for name, layer in assignment.items() if layer.format]
    hooks = [denoiser.get_submodule(name).register_forward_hook(compare(name)) for name in layers]
    simulated(**case.inputs(0))
    for hook in hooks:
        hook.remove()
    assert errors.keys() == set(layers) and layers
    return errors


@torch.no_grad()
def network_error(case: Tiny, simulated: nn.Module, theirs: nn.Module) -> float:
    """The relative error of the whole network's output, of inputs that calibration has not seen."""
    inputs = case.inputs(7)
    return relative_error(simulated(**inputs), case.wrapped(theirs)(**inputs))


@pytest.fixture(scope="session")
def assign(calibrated) -> Callable[..., dict[str, LayerAssignment]]:
    """Rows of the small UNet with one format for weights and inputs; further arguments are the recipe's."""
    unet = calibrated.part().unet

    def make(weight: str, activation: str | None, **options: object) -> dict[str, LayerAssignment]:
        pair = Pair(weight, activation)
        knobs = {"quant_level": 3.0, "alpha": 0.8, "smoothing": "folded", "collect_method": "min-max"} | options
        recipe = Recipe(enable=Enable(pair if activation != "nvfp4" else Pair(weight, None), pair, None), **knobs)
        return derive(
            calibrated.roles, lambda name: unet.get_submodule(name).weight, calibrated.statistics.layers, recipe,
            shared_inputs(calibrated.roles), attentions=attentions(unet),
        )  # fmt: skip

    return make
