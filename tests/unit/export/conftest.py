"""The UNet of ``network``, calibrated and traced once, and written by presets."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from diffusers import UNet2DConditionModel

from sd_quant.export.tracing import trace
from sd_quant.models.sdxl import NemoUnetPart, unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, unet_config
from tests import small_nemo

from .network import CONFIG, POOLED, Exported, Network, at_highest_level, exported, inputs


@pytest.fixture(scope="session")
def network(calibrate) -> Network:
    """Calibrated with two calls."""
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
