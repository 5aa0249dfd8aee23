"""Tiny checkpoints, what a target holds of them, candidates in them, and what is compared with others' networks."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.inference.loading import load_part
from sd_quant.interchange import READERS, TARGETS
from sd_quant.interchange.denoiser import QuantizedDenoiser, with_denoiser
from sd_quant.interchange.holding import adapted
from sd_quant.models.checkpoint import denoiser_of, denoiser_part
from sd_quant.models.family import family_named
from sd_quant.models.parts import axes
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Recipe, excluded
from sd_quant.quantization.statistics import Statistics

from ..zoo.families import TINY, WIDE

TOKENS = 16  # of a T5
Assignment = Mapping[str, LayerAssignment]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint in full precision, and its layers' statistics over two calls with random inputs."""

    checkpoint: DiffusersCheckpoint
    SIZE = {"width": 64, "height": 128}  # in pixels

    @property
    def component(self) -> str:
        return denoiser_part(self.checkpoint).component

    @property
    def kind(self) -> type:
        """The denoiser's class."""
        return getattr(diffusers, self.checkpoint.family.NETWORKS[self.component])

    @property
    def folder(self) -> Path:
        """Of the denoiser."""
        return self.checkpoint.path / self.component

    def part(self) -> nn.Module:
        return load_part(self.checkpoint, self.checkpoint.family.DENOISER).module

    def denoiser(self) -> nn.Module:
        return denoiser_of(self.checkpoint, self.part())

    def inputs(self, seed: int = 7) -> dict[str, Tensor]:
        """A time has one axis, and is neither the first nor the last."""
        random = torch.Generator().manual_seed(seed)
        shapes = denoiser_part(self.checkpoint).contract.shapes(**axes(batch=2, **self.SIZE))
        return {
            name: torch.randn(shape, generator=random) if len(shape) > 1 else torch.full(shape, 0.5)
            for name, shape in shapes.items()
        }

    @torch.no_grad()
    def output(self, denoiser: nn.Module, seed: int = 7) -> Tensor:
        return denoiser_part(self.checkpoint).wrap(denoiser)(**self.inputs(seed))

    def error(self, denoiser: nn.Module, other: nn.Module) -> float:
        """The relative error of one denoiser's output to the other's, of inputs that calibration has not seen."""
        return relative_error(self.output(denoiser), self.output(other))

    # Candidates

    def read(self, path: Path, reader: str) -> QuantizedDenoiser:
        assert [name for name, row in READERS.items() if row.recognizes(path)] == [reader]
        return READERS[reader].module.read(path, self.checkpoint)

    @torch.no_grad()
    def network(self, candidate: QuantizedDenoiser) -> nn.Module:
        """The denoiser with the candidate in it."""
        return denoiser_of(self.checkpoint, with_denoiser(self.part(), self.checkpoint, candidate))

    @torch.no_grad()
    def error_of_layers(self, ours: nn.Module, theirs: nn.Module, candidate: QuantizedDenoiser) -> dict[str, float]:
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

    # Assignments

    @cached_property
    def roles(self) -> dict[str, str]:
        return self.checkpoint.family.layer_roles(self.denoiser())

    @cached_property
    def statistics(self) -> Statistics:
        part, now = self.part(), {}
        denoiser = denoiser_of(self.checkpoint, part)
        layers = {name: denoiser.get_submodule(name) for name, role in self.roles.items() if role != "excluded"}
        inputs = denoiser_part(self.checkpoint).contract.inputs
        batched = {name for name, shape in inputs.items() if shape[0] == "batch"}
        wanted = draw(layers, range(2), 1, seed=0)
        with collect(part, layers, range(2), 1, lambda: (0, [now["prompt"]]), wanted, batched) as statistics:
            for now["prompt"] in range(2):
                part(**self.inputs(now["prompt"]))
        return statistics

    def derived(self, recipe: Recipe, exclude: Collection[str] = ()) -> dict[str, LayerAssignment]:
        denoiser = self.denoiser()
        return derive(
            self.roles, lambda name: denoiser.get_submodule(name).weight, self.statistics.layers, recipe,
            self.checkpoint.family.shared_inputs(self.roles), bias_of=lambda name: denoiser.get_submodule(name).bias,
            exceptions=excluded(self.roles, exclude),
        )  # fmt: skip

    def assignment(self, recipe: Recipe, target: str, exclude: Collection[str] = ()) -> dict[str, LayerAssignment]:
        """What the ``target`` holds of what the recipe derives, without layers that match a pattern of ``exclude``."""
        return adapted(self.derived(recipe, exclude), TARGETS[target])

    def written(self, assignment: Assignment, target: str, folder: Path, **more: object) -> Path:
        """What the ``target`` writes into ``folder``, a pipeline's with nothing else that is needed."""
        (folder / self.component).mkdir(parents=True)
        config = (self.folder / "config.json").read_text()
        (folder / self.component / "config.json").write_text(config)
        return TARGETS[target].module.write(self.checkpoint, assignment, folder, **more)

    def loaded(self, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The denoiser as diffusers loads the pipeline's."""
        return self.kind.from_pretrained(folder / self.component, torch_dtype=dtype).eval()


def changed(
    source: Path,
    folder: Path,
    change: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    config: Callable[[dict], object] = lambda quantization: None,
    **metadata: str,
) -> Path:
    """A copy of ``source`` with tensors, ``quantization_config`` and metadata as these make them.

    That is ``folder`` for a network's folder, and a file in it for a file.
    """
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
        described = json.loads((folder / "config.json").read_text())
        config(described.get("quantization_config", {}))
        (folder / "config.json").write_text(json.dumps(described))
        (file,) = folder.glob("*.safetensors")
    else:
        file = Path(shutil.copy(source, folder))
    with safe_open(file, "pt") as opened:
        metadata = (opened.metadata() or {}) | metadata
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata or None)
    return folder if source.is_dir() else file


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Tiny]:
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def opened(name: str) -> Tiny:
        (TINY | WIDE)[name](folder / name)
        family = name.partition("_")[0]
        tokens = TOKENS if family_named(family).TOKENS else None
        return Tiny(open_pipeline(folder / name, family, tokens, "diffusers"))

    return opened
