"""The folders for optimum's pipelines, run by ONNX Runtime and OpenVINO. tests/programs has optimum load them."""

import json
from collections.abc import Mapping
from pathlib import Path

import onnx
import openvino
import pytest
import torch
from torch import Tensor

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.config.recipe import part_recipe
from sd_quant.engines.onnxruntime import load
from sd_quant.engines.openvino import DEQUANTIZED, FP32, core, saturates
from sd_quant.errors import ArtifactError
from sd_quant.export import onnx_file
from sd_quant.inference.parity import PART_TOLERANCE
from sd_quant.interchange import exported_parts
from sd_quant.interchange import onnx as onnx_target
from sd_quant.interchange import openvino as openvino_target
from sd_quant.models.checkpoint import build_module
from sd_quant.models.parts import NamedPart
from sd_quant.models.text_encoders import padded
from sd_quant.numbers import relative_error
from sd_quant.places import HOME
from sd_quant.quantization.derivation import derive_nearest

from ....zoo.families import sd15

pytestmark = pytest.mark.nightly  # the tracing
COMPONENTS = ["text_encoder", "text_encoder_2", "unet", "vae_decoder", "vae_encoder"]
TARGETS = {"onnx": onnx_target, "openvino": openvino_target}


@pytest.fixture(scope="module")
def folders(handed_over, tmp_path_factory) -> Mapping[str, Path]:
    """What each target has written."""
    folder = tmp_path_factory.mktemp("pipelines")
    return {name: handed_over.write(target, folder / name) for name, target in TARGETS.items()}


def run_onnx(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return load(folder / "model.onnx", threads=1)(**inputs)


def read(folder: Path) -> openvino.Model:
    return core().read_model(folder / "openvino_model.xml")


def run_openvino(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the consumer does: inputs by name, outputs in the file's order."""
    model = read(folder)
    settings = FP32 | {"INFERENCE_NUM_THREADS": 1} | (DEQUANTIZED if saturates() else {})
    outputs = core().compile_model(model, "CPU", settings)({name: x.numpy() for name, x in inputs.items()})
    return {port.any_name: torch.from_numpy(outputs[index]) for index, port in enumerate(model.outputs)}


RUN = {"onnx": run_onnx, "openvino": run_openvino}
CONVERT = {"onnx": onnx_target.move, "openvino": openvino_target.convert}


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "vae_decoder", "vae_encoder"])
def test_an_unquantized_network_computes_what_torch_does(handed_over, folders, target, component):
    """The tolerances are those of every part: fp16 weights in a text encoder, fp32 in the VAE."""
    dtype = handed_over.parts[component].contract.weights
    assert handed_over.error(component, folders[target], RUN[target]) < PART_TOLERANCE[dtype]


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_the_unet_is_as_far_from_full_precision_as_the_simulation(handed_over, folders, target):
    """Not the same: what rounds the other way in one layer changes all behind it, see tests/unit/export/test_qdq.py."""
    ours, simulated = handed_over.distances(handed_over.assignment(), folders[target], RUN[target])
    assert ours == pytest.approx(simulated, rel=0.2) and 1e-2 < ours < 0.3


@pytest.mark.nightly
def test_inputs_that_are_scaled_per_token_and_rotated_are_in_the_graph(handed_over, tmp_path):
    """Every quantized layer is held, and the UNet is as far from full precision as the simulation."""
    rows = handed_over.assignment(per_token=True, rotation=16)
    assert {row.rotation for row in rows.values() if row.per_token} == {16}
    for target, convert in CONVERT.items():
        path, folder = tmp_path / target / "made/model.onnx", tmp_path / target
        for place in (path.parent, folder / "unet"):
            place.mkdir(parents=True)
        exported_parts.write_consumed(handed_over.checkpoint, handed_over.parts["unet"], path, rows)
        convert(path, folder / "unet")
        ours, simulated = handed_over.distances(rows, folder, RUN[target])
        assert ours == pytest.approx(simulated, rel=0.2) and 1e-3 < ours < 0.3


def test_the_state_that_pipelines_read_is_the_last_but_one(handed_over):
    inputs = handed_over.inputs("text_encoder_2", seed=1)
    names = handed_over.parts["text_encoder_2"].contract.outputs
    outputs = dict(zip(names, handed_over.module("text_encoder_2")(**inputs), strict=True))
    expected = build_module(handed_over.checkpoint, "text_encoder_2")(inputs["input_ids"], output_hidden_states=True)
    states = [value for name, value in outputs.items() if name.startswith("hidden_states")]
    assert torch.equal(states[-2], expected.hidden_states[-2])
    assert names[0] == "text_embeds" and torch.equal(outputs["text_embeds"], expected.text_embeds)
    layers = build_module(handed_over.checkpoint, "text_encoder_2").config.num_hidden_layers
    assert outputs[names[layers + 1]] is states[-2]  # GenAI's number


def test_nemo_text_is_padded_inside(handed_over):
    """Consumers know of CLIP's 77 tokens, and NeMo's checkpoints were trained on 80."""
    checkpoint = open_checkpoint(HOME / "checkpoints/sdxl_mini.nemo", "sdxl", io=None, max_sequence_length=None)
    part = exported_parts.consumed_parts(checkpoint)["unet"]
    assert part.contract.inputs["encoder_hidden_states"][1] == 77 and part.wrap(torch.nn.Identity()).tokens == 80
    network, inputs = build_module(handed_over.checkpoint, "unet"), handed_over.inputs("unet", seed=1)
    text = padded(inputs["encoder_hidden_states"], 80)
    assert text.shape[1] == 80 and torch.equal(text[:, :77], inputs["encoder_hidden_states"])
    expected = NamedPart("unet", inputs, network)(**inputs | {"encoder_hidden_states": text})
    assert torch.equal(exported_parts.ConsumedUnet(network, 80)(**inputs), expected)
    assert not torch.equal(exported_parts.ConsumedUnet(network, 77)(**inputs), expected)


def test_stable_diffusion_1(tmp_path):
    sd15(tmp_path / "sd15")
    checkpoint = open_checkpoint(tmp_path / "sd15", "sd15", io=None, max_sequence_length=None)
    parts = exported_parts.consumed_parts(checkpoint)
    assert list(parts) == ["unet", "vae_decoder", "vae_encoder", "text_encoder"]
    assert list(parts["unet"].contract.inputs) == ["sample", "timestep", "encoder_hidden_states"]
    assert parts["text_encoder"].contract.outputs[:2] == ("last_hidden_state", "pooler_output")
    unet = parts["unet"].wrap(build_module(checkpoint, "unet"))
    inputs = {"sample": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 77, 64)}
    assert unet(**inputs, timestep=torch.tensor(500.0)).shape == (1, 4, 8, 8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "target, files", [("onnx", {"model.onnx"}), ("openvino", {"openvino_model.xml", "openvino_model.bin"})]
)
def test_files(folders, target, files):
    """No more than these, so nothing of the way is left. The pipeline's name is diffusers', as GenAI wants it."""
    folder = folders[target]
    found = {path.parent.name for name in files for path in folder.rglob(name)}
    assert sorted(found) == COMPONENTS and not list(folder.glob(".*"))
    assert all({path.name for path in (folder / place).iterdir()} == {"config.json", *files} for place in COMPONENTS)
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == "StableDiffusionXLPipeline"
    for half in ("vae_decoder", "vae_encoder"):
        assert json.loads((folder / half / "config.json").read_text())["scaling_factor"] == 0.13025
    for graph in folder.rglob("*.onnx"):
        onnx.checker.check_model(graph, full_check=True)


def test_large_weights_lie_beside_the_graph(handed_over, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 0)
    (tmp_path / "made").mkdir()
    (tmp_path / "vae_decoder").mkdir()
    part, file = handed_over.parts["vae_decoder"], tmp_path / "made/model.onnx"
    exported_parts.write_consumed(handed_over.checkpoint, part, file, {})
    (output,) = onnx.load(file, load_external_data=False).graph.output  # by which optimum-onnx allocates it on a GPU
    sizes = [axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim]
    assert sizes == ["batch", 3, "height * 8", "width * 8"]
    onnx_target.move(file, tmp_path / "vae_decoder")
    assert not list((tmp_path / "made").iterdir())
    assert {path.name for path in (tmp_path / "vae_decoder").iterdir()} == {"model.onnx", "model.onnx.data"}
    assert handed_over.error("vae_decoder", tmp_path, run_onnx) < 1e-3


def test_codes_and_quantizers_come_through(handed_over, folders):
    ops = read(folders["openvino"] / "unet").get_ops()
    constants = [op.output(0) for op in ops if op.get_type_name() == "Constant"]
    codes = [port for port in constants if port.element_type.get_type_name() == "i8" and len(port.shape) > 1]
    quantized = sum(layer.format is not None for layer in handed_over.assignment().values())
    (time,) = (port for port in read(folders["openvino"] / "unet").inputs if port.any_name == "timestep")
    assert (time.element_type.get_type_name(), list(time.shape)) == ("i64", [1])  # GenAI's
    assert len([port for port in codes if max(port.shape) > 1]) >= quantized > 10
    assert sum(op.get_type_name() == "FakeQuantize" for op in ops) > 5


def test_what_openvino_cannot_read_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"hello")
    with pytest.raises(ArtifactError, match="OpenVINO cannot read the exported unet: "):
        openvino_target.convert(tmp_path / "model.onnx", tmp_path / "unet")


def test_what_a_file_has_beside_weights_is_fp16s_numbers_too(tiny):
    """SD3's table of positions, which no layer quantizes."""
    exact, found = tiny("sd3").denoiser(), tiny("sd3").denoiser()
    exported_parts.simulate_graph(found, {})
    exact, found = (each.get_buffer("pos_embed.pos_embed") for each in (exact, found))
    assert torch.equal(found, exact.half().float()) and not torch.equal(found, exact)


@pytest.mark.nightly
@torch.no_grad()
def test_another_network_is_quantized_in_its_graph(handed_over, tmp_path):
    """An autoencoder's rows are those of both halves, of which each graph has its own. It dequantizes in fp16."""
    weights = handed_over.checkpoint.components["vae"]
    names = [name.removesuffix(".weight") for name in weights if name.endswith((".to_q.weight", ".conv1.weight"))]
    roles = dict.fromkeys(names, "conv")
    recipes = dict.fromkeys(roles, part_recipe("int8_weight_only"))
    rows = derive_nearest(roles, lambda name: weights[f"{name}.weight"], recipes)
    part, path, inputs = handed_over.parts["vae_decoder"], tmp_path / "model.onnx", handed_over.inputs("vae_decoder", 7)
    exported_parts.write_consumed(handed_over.checkpoint, part, path, rows)
    simulated, full = handed_over.module("vae_decoder"), handed_over.module("vae_decoder")(**inputs)
    own = {name: row for name, row in rows.items() if name.startswith("decoder.")}
    exported_parts.simulate_graph(simulated, own, part.contract.weights)
    assert 0 < len(own) < len(rows)
    (found,) = run_onnx(tmp_path, inputs).values()
    assert relative_error(simulated(**inputs), found) < 5e-4 < 1e-3 < relative_error(full, found)
