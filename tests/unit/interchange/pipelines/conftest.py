"""A tiny SDXL of one level, quantized, and its parts as consumers call them, each traced once for all targets."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.export.tracing import copy_of, trace
from sd_quant.interchange import exported_parts
from sd_quant.models.checkpoint import Checkpoint, build_module
from sd_quant.models.parts import Part, axes
from sd_quant.numbers import relative_error
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.modelopt import simulate

from ....zoo.families import CLIP_WIDTH, redraw, sdxl, unet
from ...tiny import Assignment, Tiny

SIZE_FEATURES = 32
Run = Callable[[Path, dict[str, Tensor]], dict[str, Tensor]]  # (folder of a network, inputs) -> outputs by name


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory) -> Path:
    """``sdxl`` of one level, which is soon traced."""
    folder = tmp_path_factory.mktemp("hand_over") / "sdxl"
    sdxl(folder)
    torch.manual_seed(0)
    small = unet(
        block_out_channels=[64],
        down_block_types=["CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D"],
        cross_attention_dim=2 * CLIP_WIDTH,
        attention_head_dim=[4],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=SIZE_FEATURES,
        projection_class_embeddings_input_dim=CLIP_WIDTH + 6 * SIZE_FEATURES,
    )
    redraw(small)
    small.save_pretrained(folder / "unet")
    return folder


@dataclass(frozen=True)
class HandedOver:
    """What every target is given, and what torch computes of it."""

    case: Tiny
    parts: dict[str, Part]

    @property
    def checkpoint(self) -> Checkpoint:
        return self.case.checkpoint

    def assignment(self, **options: object) -> Assignment:
        """``onnx`` holds whatever ``openvino`` does."""
        return self.case.assignment(Recipe(3.0, 0.8, collect_method="min-max", **options), "onnx")

    def module(self, component: str) -> nn.Module:
        part = self.parts[component]
        return part.wrap(build_module(self.checkpoint, part.component)).eval()

    def inputs(self, component: str, seed: int, batch: int = 2) -> dict[str, Tensor]:
        """Of a picture that is wider than high."""
        contract, random = self.parts[component].contract, torch.Generator().manual_seed(seed)
        found = {
            name: torch.randint(1000, shape, generator=random)
            if contract.dtypes[name] == torch.int64
            else torch.randn(shape, generator=random)
            for name, shape in contract.shapes(**axes(batch, 64, 48)).items()
        }
        return found | {"timestep": torch.tensor(500.0)} if component == "unet" else found

    @torch.no_grad()
    def error(self, component: str, folder: Path, run: Run) -> float:
        """The largest of an unquantized network's outputs, relative to torch's; names and dtypes have to agree."""
        inputs = self.inputs(component, seed=7)
        expected = self.module(component)(**inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        actual = run(folder / component, inputs)
        assert list(actual) == list(self.parts[component].contract.outputs)
        assert {output.dtype for output in actual.values()} == {torch.float32}
        return max(map(relative_error, expected, actual.values()))

    @torch.no_grad()
    def distances(self, assignment: Assignment, folder: Path, run: Run) -> tuple[float, float]:
        """How far the consumer's UNet, and the simulation, are from the unquantized one."""
        inputs, simulated = self.inputs("unet", seed=7), self.module("unet")
        expected = self.module("unet")(**inputs)
        simulate(simulated.unet, assignment)
        (output,) = run(folder / "unet", inputs).values()
        return relative_error(expected, output), relative_error(expected, simulated(**inputs))

    def write(self, target: ModuleType, folder: Path) -> Path:
        """``folder``, written by a ``target`` into what stands in for the frame."""
        shutil.copytree(self.checkpoint.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        target.write(self.checkpoint, self.assignment(), folder)
        return folder


@pytest.fixture(scope="session")
def handed_over(pipeline_folder) -> HandedOver:
    checkpoint = open_checkpoint(pipeline_folder, "sdxl", io="nemo", max_sequence_length=None)
    return HandedOver(Tiny(checkpoint), exported_parts.consumed_parts(checkpoint))


@pytest.fixture(scope="session", autouse=True)
def traced_once():
    """What differs between targets comes behind the trace, which takes most of the time."""
    known: dict[str, ir.Model] = {}

    def remembered(build, contract) -> ir.Model:
        if repr(contract) not in known:
            known[repr(contract)] = trace(build, contract)
        return copy_of(known[repr(contract)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported_parts, "trace", remembered)
        yield
