"""The folder for optimum-onnx, run by ONNX Runtime itself; and what the targets share."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.engines.onnxruntime import load
from sd_quant.export import onnx_file
from sd_quant.hand_over import exported_parts
from sd_quant.hand_over import onnx as target
from sd_quant.inference.parity import PART_TOLERANCE
from sd_quant.models.checkpoint import build_module
from sd_quant.models.sdxl import UnetPart, padded
from sd_quant.places import HOME

from ....pipelines import sd15

pytestmark = pytest.mark.slow  # the tracing


@pytest.fixture(scope="module")
def folder(handed_over, tmp_path_factory) -> Path:
    return handed_over.write(target, tmp_path_factory.mktemp("onnx") / "sdxl")


def run(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return load(folder / "model.onnx", threads=1)(**inputs)


def test_files(folder):
    places = sorted(path.parent.name for path in folder.rglob("model.onnx"))
    assert places == ["text_encoder", "text_encoder_2", "unet", "vae_decoder"]
    assert all({path.name for path in (folder / place).iterdir()} == {"config.json", "model.onnx"} for place in places)
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == "ORTStableDiffusionXLPipeline"
    for place in places:
        onnx.checker.check_model(folder / place / "model.onnx", full_check=True)


def test_inputs(folder):
    inputs = load(folder / "unet/model.onnx", threads=1).session.get_inputs()
    assert {port.name: (port.shape, port.type) for port in inputs} == {
        "sample": (["batch", 4, "height", "width"], "tensor(float)"),
        "timestep": ([], "tensor(float)"),
        "encoder_hidden_states": (["batch", 77, 128], "tensor(float)"),
        "text_embeds": (["batch", 64], "tensor(float)"),
        "time_ids": (["batch", 6], "tensor(float)"),
    }


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "vae_decoder"])
def test_an_unquantized_network_computes_what_torch_does(handed_over, folder, component):
    """The tolerances are those of every part: fp16 weights in a text encoder, fp32 in the VAE."""
    dtype = handed_over.parts[component].contract.weights
    assert handed_over.error(component, folder, run) < PART_TOLERANCE[dtype]


def test_the_unet_is_as_far_from_full_precision_as_the_simulation(handed_over, folder):
    ours, simulated = handed_over.distances(folder, run)
    assert ours == pytest.approx(simulated, rel=0.2) and 1e-2 < ours < 0.3


def test_large_weights_lie_beside_the_graph(handed_over, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 0)
    (tmp_path / "made").mkdir()
    (tmp_path / "vae_decoder").mkdir()
    part, file = handed_over.parts["vae_decoder"], tmp_path / "made/model.onnx"
    exported_parts.write_consumed(handed_over.checkpoint, part, file, {})
    target.move(file, tmp_path / "vae_decoder")
    assert not list((tmp_path / "made").iterdir())
    assert {path.name for path in (tmp_path / "vae_decoder").iterdir()} == {"model.onnx", "model.onnx.data"}
    assert handed_over.error("vae_decoder", tmp_path, run) < 1e-3


# ------------------------------------------------------------------------------------------------ what is shared


def test_the_state_that_pipelines_read_is_the_last_but_one(handed_over):
    inputs = handed_over.inputs("text_encoder_2", seed=1)
    outputs = dict(
        zip(
            handed_over.parts["text_encoder_2"].contract.outputs,
            handed_over.module("text_encoder_2")(**inputs),
            strict=True,
        )
    )
    expected = build_module(handed_over.checkpoint, "text_encoder_2")(inputs["input_ids"], output_hidden_states=True)
    states = [value for name, value in outputs.items() if name.startswith("hidden_states")]
    assert torch.equal(states[-2], expected.hidden_states[-2])
    assert list(outputs)[0] == "text_embeds" and torch.equal(outputs["text_embeds"], expected.text_embeds)


def test_nemo_text_is_padded_inside(handed_over):
    """Consumers know of CLIP's 77 tokens, and NeMo's checkpoints were trained on 80."""
    checkpoint = open_checkpoint(HOME / "checkpoints/sdxl_mini.nemo", "sdxl", io=None, max_sequence_length=None)
    part = exported_parts.consumed_parts(checkpoint)["unet"]
    assert part.contract.inputs["encoder_hidden_states"][1] == 77 and part.wrap(torch.nn.Identity()).tokens == 80
    network, inputs = build_module(handed_over.checkpoint, "unet"), handed_over.inputs("unet", seed=1)
    text = padded(inputs["encoder_hidden_states"], 80)
    assert text.shape[1] == 80 and torch.equal(text[:, :77], inputs["encoder_hidden_states"])
    expected = UnetPart(network)(**inputs | {"encoder_hidden_states": text})
    assert torch.equal(exported_parts.ConsumedUnet(network, 80)(**inputs), expected)
    assert not torch.equal(exported_parts.ConsumedUnet(network, 77)(**inputs), expected)


def test_stable_diffusion_1(tmp_path):
    sd15(tmp_path / "sd15")
    checkpoint = open_checkpoint(tmp_path / "sd15", "sd15", io=None, max_sequence_length=None)
    parts = exported_parts.consumed_parts(checkpoint)
    assert list(parts) == ["unet", "vae_decoder", "text_encoder"]
    assert list(parts["unet"].contract.inputs) == ["sample", "timestep", "encoder_hidden_states"]
    assert parts["text_encoder"].contract.outputs[:2] == ("last_hidden_state", "pooler_output")
    unet = parts["unet"].wrap(build_module(checkpoint, "unet"))
    inputs = {"sample": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 77, 64)}
    assert unet(**inputs, timestep=torch.tensor(500.0)).shape == (1, 4, 8, 8)
