"""A UNet with every kind of layer, calibrated and traced once, and the files that are written of it by presets."""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import onnx_ir as ir
import pytest
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from sd_quant.engines import why_not
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import copy_of, trace
from sd_quant.models.parts import Contract, Heads
from sd_quant.models.roles import attention_heads as attentions
from sd_quant.models.sdxl import NemoUnetPart, unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, unet_config
from sd_quant.models.unet import shared_inputs
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Recipe, formats_used
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.modelopt import simulate
from tests import small_nemo
from tests.presets import recipe_of

POOLED = 16
CONFIG = small_nemo.config(POOLED, model_channels=64, channel_mult=[1, 1], context_dim=64)  # that each preset fits
inputs = partial(small_nemo.inputs, CONFIG)
PREFIX = "unet."


@dataclass(frozen=True)
class Network:
    unet: nn.Module
    contract: Contract
    traced: ir.Model
    roles: dict[str, str]
    statistics: dict[str, LayerStatistics]

    def part(self) -> NemoUnetPart:
        return NemoUnetPart(copy.deepcopy(self.unet), POOLED)

    def weight(self, name: str) -> Tensor:
        return self.unet.get_parameter(f"{name}.weight")

    def derive(
        self, recipe: Recipe, kept: Collection[str] = (), heads: Mapping[str, Heads] | None = None
    ) -> dict[str, LayerAssignment]:
        return derive(
            self.roles, self.weight, self.statistics, recipe, shared_inputs(self.roles), dict.fromkeys(kept, "kept"),
            attentions=attentions(self.unet) if heads is None else heads,
            bias_of=lambda name: self.unet.get_submodule(name).bias,
        )  # fmt: skip

    def write(self, path: Path, assignment: Mapping[str, LayerAssignment], read: Callable | None = None) -> Path:
        read, inputs = read or self.part().state_dict().__getitem__, len(self.contract.inputs)
        write_onnx(copy_of(self.traced), path, inputs=inputs, assignment=assignment, read=read, prefix=PREFIX)
        return path


def at_highest_level(preset: str, **options: object) -> Recipe:
    """Nothing is searched for: what a file holds does not depend on how good it is."""
    recipe = recipe_of(preset, "quant_level=3")
    level, alpha = 4.0 if recipe.enable.attention else 3.0, 0.5 if recipe.alpha == "auto" else recipe.alpha
    return replace(recipe, **{"quant_level": level, "alpha": alpha, "branch_rounds": 1} | options)


@dataclass
class Exported:
    recipe: Recipe
    network: Network
    assignment: dict[str, LayerAssignment]
    path: Path

    @cached_property
    def simulated(self) -> NemoUnetPart:
        part = self.network.part()
        simulate(part.unet, self.assignment)
        return part

    @cached_property
    def layers(self) -> dict[str, LayerAssignment]:
        """The layers whose weight is quantized."""
        return {name: layer for name, layer in self.assignment.items() if layer.format}

    @property
    def attentions(self) -> dict[str, LayerAssignment]:
        """The quantized attentions."""
        return {name: row for name, row in self.assignment.items() if row.role == "attention" and row.activation_format}

    def engines(self) -> list[str]:
        """The runtimes that know the formats, ONNX's own reference where none does: it takes seconds."""
        used = formats_used(self.recipe.enable, self.recipe.quant_level)
        return [name for name in ("onnxruntime", "openvino") if not why_not(name, used)] or ["reference"]


def exported(network: Network, recipe: Recipe, path: Path, **given) -> Exported:
    """The file of a recipe; ``given`` as of ``Network.derive``."""
    assignment = network.derive(recipe, **given)
    return Exported(recipe, network, assignment, network.write(path, assignment))


@pytest.fixture(scope="session")
def network(calibrate) -> Network:
    unet = small_nemo.unet(CONFIG)
    found = calibrate(NemoUnetPart(unet, POOLED), [inputs(2, seed=call) for call in range(2)])
    contract = unet_part(unet.config, CONTEXT_TOKENS, "nemo").contract
    traced = trace(lambda: NemoUnetPart(UNet2DConditionModel(**unet_config(CONFIG)), POOLED), contract)
    return Network(unet, contract, traced, found.roles, found.statistics.layers)


@pytest.fixture(scope="session")
def export(network, tmp_path_factory) -> Callable[..., Exported]:
    """The file of a preset at its highest level, or of its recipe with other options."""

    @cache
    def export(preset: str, **options: object) -> Exported:
        recipe = at_highest_level(preset, **options)
        return exported(network, recipe, tmp_path_factory.mktemp(preset) / "unet_xl.onnx")

    return export


@pytest.fixture(scope="session")
def full_precision(network, tmp_path_factory) -> Path:
    return network.write(tmp_path_factory.mktemp("full") / "unet_xl.onnx", {})
