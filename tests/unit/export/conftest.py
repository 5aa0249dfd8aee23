"""The small UNet traced once, and written unquantized and with an assignment."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from diffusers import UNet2DConditionModel

from sd_quant.export.graph import copy_of, trace
from sd_quant.export.quantized import write_onnx
from sd_quant.models.parts import Contract, UnetPart, contracts
from sd_quant.models.sdxl import unet_config
from sd_quant.quantization.assignment import LayerAssignment

POOLED = 32
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def contract(build_unet) -> Contract:
    return contracts(build_unet().config)["unet_xl"]


@pytest.fixture(scope="session")
def traced(small_config, contract) -> ir.Model:
    return trace(lambda: UnetPart(UNet2DConditionModel(**unet_config(small_config)), POOLED), contract)


@pytest.fixture(scope="session")
def weights(calibrated) -> dict[str, torch.Tensor]:
    """By the name they have in the graph."""
    return calibrated.part().state_dict()


@pytest.fixture(scope="session")
def assignment(calibrated) -> Mapping[str, LayerAssignment]:
    """Level 2.5, so that some linears are quantized and others are not."""
    return calibrated.assignment(0.8, quant_level=2.5)


@pytest.fixture(scope="session")
def write(traced, contract, weights) -> Write:
    """Writes the traced graph to a path; ``read`` and ``assignment`` may be given."""

    def write(path: Path, **given) -> Path:
        arguments = {"read": weights.__getitem__, "assignment": {}} | given
        write_onnx(copy_of(traced), path, inputs=len(contract.inputs), prefix="unet.", **arguments)
        return path

    return write


@pytest.fixture(scope="session")
def full_precision(tmp_path_factory, write) -> Path:
    return write(tmp_path_factory.mktemp("full") / "unet_xl.onnx")


@pytest.fixture(scope="session")
def quantized(tmp_path_factory, write, assignment) -> Path:
    return write(tmp_path_factory.mktemp("quantized") / "unet_xl.onnx", assignment=assignment)
