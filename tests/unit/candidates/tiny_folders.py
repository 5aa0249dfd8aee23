"""What the tests of readers of diffusers' folders share: tiny checkpoints, and candidates beside their tools."""

from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from torch import Tensor, nn

from sd_quant.candidates import READERS
from sd_quant.candidates.candidate import Candidate
from sd_quant.candidates.network import with_candidate
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.inference.loading import load_part
from sd_quant.models import family_named
from sd_quant.models.checkpoint import denoiser_of, denoiser_part
from sd_quant.numbers import relative_error

from ...pipelines import TINY
from .diffusers_folders import network_inputs

TOKENS = 16  # of a T5


@dataclass(frozen=True)
class Tiny:
    """A checkpoint in full precision."""

    checkpoint: DiffusersCheckpoint

    @property
    def component(self) -> str:
        return denoiser_part(self.checkpoint).component

    @property
    def kind(self) -> type:
        return getattr(diffusers, self.checkpoint.family.NETWORKS[self.component])

    @property
    def folder(self) -> Path:
        """Of the denoiser."""
        return self.checkpoint.path / self.component

    def read(self, path: Path, reader: str) -> Candidate:
        assert [name for name, row in READERS.items() if row.recognizes(path)] == [reader]
        return READERS[reader].module.read(path, self.checkpoint)

    @torch.no_grad()
    def network(self, candidate: Candidate) -> nn.Module:
        """The denoiser with the candidate in it."""
        part = load_part(self.checkpoint, self.checkpoint.family.DENOISER).module
        return denoiser_of(self.checkpoint, with_candidate(part, self.checkpoint, candidate))

    @torch.no_grad()
    def output(self, denoiser: nn.Module, seed: int = 7) -> Tensor:
        return denoiser_part(self.checkpoint).wrap(denoiser)(**network_inputs(self.checkpoint, seed))

    @torch.no_grad()
    def error_of_layers(self, ours: nn.Module, theirs: nn.Module, candidate: Candidate) -> dict[str, float]:
        """The relative error of the output of whatever is quantized, of the input that it gets in ``ours``."""
        errors: dict[str, float] = {}

        def compare(name: str):
            given: list[Tensor] = []

            def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                given[:] = [inputs[0].clone()]  # as it is before the candidate's own hook changes it

            def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                errors[name] = relative_error(output, theirs.get_submodule(name)(given[0]))

            layer = ours.get_submodule(name)
            return layer.register_forward_pre_hook(before, prepend=True), layer.register_forward_hook(after)

        names = {*candidate.layers, *candidate.rounded}
        hooks = [hook for name in names for hook in compare(name)]
        self.output(ours)
        for hook in hooks:
            hook.remove()
        assert errors.keys() == names and errors
        return errors


def tiny(family: str, folder: Path) -> Tiny:
    TINY[family](folder)
    tokens = TOKENS if family_named(family).TOKENS else None
    return Tiny(open_pipeline(folder, family, tokens, "diffusers"))
