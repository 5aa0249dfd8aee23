"""A tiny pipeline, and what tests of both kinds of diffusers' folders compare of a candidate."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from sd_quant.candidates.candidate import Candidate
from sd_quant.candidates.network import with_candidate
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.inference.loading import load_part
from sd_quant.models.checkpoint import denoiser_of, denoiser_part
from sd_quant.models.parts import axes
from sd_quant.numbers import relative_error

from ...pipelines import TINY


def tiny_checkpoint(folder: Path, family: str = "sdxl") -> DiffusersCheckpoint:
    TINY[family](folder)
    return open_pipeline(folder, family, None, "diffusers")


def network_inputs(checkpoint: DiffusersCheckpoint, seed: int = 7) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = denoiser_part(checkpoint).contract.shapes(**axes(batch=2, width=64, height=128))
    return {
        name: torch.randn(shape, generator=random) if len(shape) > 1 else torch.full(shape, 0.5)
        for name, shape in shapes.items()
    }


@torch.no_grad()
def network_errors(checkpoint: DiffusersCheckpoint, candidate: Candidate, theirs: nn.Module) -> SimpleNamespace:
    """The relative errors of their network's output: ours, and as it is in full precision."""
    inputs = network_inputs(checkpoint)
    expected = denoiser_part(checkpoint).wrap(theirs)(**inputs)
    part = load_part(checkpoint, checkpoint.family.DENOISER).module
    plain = relative_error(part(**inputs), expected)
    ours = with_candidate(load_part(checkpoint, checkpoint.family.DENOISER).module, checkpoint, candidate)
    return SimpleNamespace(ours=relative_error(ours(**inputs), expected), plain=plain)


@torch.no_grad()
def layer_errors(checkpoint: DiffusersCheckpoint, candidate: Candidate, theirs: nn.Module) -> dict[str, float]:
    """The relative error of the output of each of our layers, of the inputs that it gets in our network."""
    part = with_candidate(load_part(checkpoint, checkpoint.family.DENOISER).module, checkpoint, candidate)
    network, given, errors = denoiser_of(checkpoint, part), {}, {}

    def compare(name: str):
        def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            given[name] = inputs[0]

        def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            errors[name] = relative_error(output, theirs.get_submodule(name)(given.pop(name)))

        return before, after

    for name in candidate.layers:
        before, after = compare(name)
        network.get_submodule(name).register_forward_pre_hook(before, prepend=True)
        network.get_submodule(name).register_forward_hook(after)
    part(**network_inputs(checkpoint))
    return errors
