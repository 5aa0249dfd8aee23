"""The UNet of ``network``, calibrated and traced once, and written by presets."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.export.tracing import trace
from sd_quant.models.sdxl import NemoUnetPart, unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS
from sd_quant.models.unet import layer_roles

from .network import POOLED, Exported, Network, at_highest_level, config, exported, inputs


@pytest.fixture(scope="session")
def network() -> Network:
    """Norms have uneven gains, so that smoothing matters. Calibrated with two calls."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**config()).eval().requires_grad_(False)
    for module in unet.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.weight.uniform_(0.1, 4.0)
            module.bias.uniform_(-1, 1)
    roles, part = layer_roles(unet), NemoUnetPart(unet, POOLED)
    layers = {name: unet.get_submodule(name) for name, role in roles.items() if role != "excluded"}
    now = {}
    with collect(part, layers, range(2), 1, lambda: (0, [now["call"]]), draw(layers, range(2), 1, seed=0)) as found:
        for now["call"] in range(2):
            part(**inputs(2, seed=now["call"]))
    contract = unet_part(unet.config, CONTEXT_TOKENS, "nemo").contract
    traced = trace(lambda: NemoUnetPart(UNet2DConditionModel(**config()), POOLED), contract)
    return Network(unet, contract, traced, roles, found.layers)


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
