"""The small UNet traced once, and written unquantized and with an assignment of either smoothing."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from diffusers import UNet2DConditionModel

from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import copy_of, trace
from sd_quant.models.parts import Contract
from sd_quant.models.sdxl import NemoUnetPart, unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, unet_config
from sd_quant.quantization.assignment import LayerAssignment

POOLED = 32
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
KEPT = (
    f"{BLOCK}.attn1.to_k",  # reads an input that is folded
    f"{BLOCK}.attn2.to_k",  # reads one that is not
    f"{BLOCK}.ff.net.0.proj",  # takes over the smoothing of the linear behind it
    "mid_block.resnets.0.conv1",
)
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def contract(build_unet) -> Contract:
    return unet_part(build_unet().config, CONTEXT_TOKENS, "nemo").contract


@pytest.fixture(scope="session")
def traced(small_config, contract) -> ir.Model:
    return trace(lambda: NemoUnetPart(UNet2DConditionModel(**unet_config(small_config)), POOLED), contract)


@pytest.fixture(scope="session")
def weights(calibrated) -> dict[str, torch.Tensor]:
    """By the name they have in the graph."""
    return calibrated.part().state_dict()


@pytest.fixture(scope="session")
def assignments(calibrated) -> dict[str, Mapping[str, LayerAssignment]]:
    """By smoothing; in each some linears are quantized and others are not."""
    return {
        "folded": calibrated.assignment(0.8, quant_level=3.0, kept=KEPT),
        "modelopt": calibrated.assignment(0.8, quant_level=2.5, smoothing="modelopt"),
    }


@pytest.fixture(scope="session", params=["folded", "modelopt"])
def smoothing(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def assignment(assignments, smoothing) -> Mapping[str, LayerAssignment]:
    return assignments[smoothing]


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
def written(tmp_path_factory, write, assignments) -> dict[str, Path]:
    """By smoothing."""
    folder = tmp_path_factory.mktemp("quantized")
    return {name: write(folder / name / "unet_xl.onnx", assignment=found) for name, found in assignments.items()}


@pytest.fixture(scope="session")
def quantized(written, smoothing) -> Path:
    return written[smoothing]
