"""The folder for optimum-intel, read by OpenVINO itself. tests/hand_over has optimum-intel load one."""

import json
from pathlib import Path

import openvino
import pytest
import torch
from torch import Tensor

from sd_quant.engines.openvino import DEQUANTIZED, FP32, saturates
from sd_quant.errors import ArtifactError
from sd_quant.hand_over import openvino as target
from sd_quant.inference.parity import PART_TOLERANCE

pytestmark = pytest.mark.slow  # the tracing
COMPONENTS = ["text_encoder", "text_encoder_2", "unet", "vae_decoder"]


@pytest.fixture(scope="module")
def folder(handed_over, tmp_path_factory) -> Path:
    return handed_over.write(target, tmp_path_factory.mktemp("openvino") / "sdxl")


def read(folder: Path) -> openvino.Model:
    return openvino.Core().read_model(folder / "openvino_model.xml")


def run(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the consumer does: inputs by name, outputs in the file's order."""
    model = read(folder)
    settings = FP32 | {"INFERENCE_NUM_THREADS": 1} | (DEQUANTIZED if saturates() else {})
    outputs = openvino.compile_model(model, "CPU", settings)({name: x.numpy() for name, x in inputs.items()})
    return {port.any_name: torch.from_numpy(outputs[index]) for index, port in enumerate(model.outputs)}


def test_files(folder):
    places = sorted(path.parent.name for path in folder.rglob("openvino_model.xml"))
    assert places == COMPONENTS
    for place in places:
        assert {path.name for path in (folder / place).iterdir()} == {
            "config.json", "openvino_model.xml", "openvino_model.bin"
        }  # fmt: skip
    assert json.loads((folder / "vae_decoder/config.json").read_text())["scaling_factor"] == 0.13025
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == "OVStableDiffusionXLPipeline"
    assert not list(folder.glob(".*")) and not list(folder.rglob("*.onnx"))  # nothing of the way is left


def test_inputs_and_outputs(folder):
    found = {}
    for component in COMPONENTS:
        model = read(folder / component)
        found[component] = {
            port.any_name: (str(port.partial_shape), port.element_type.get_type_name()) for port in model.inputs
        }
        assert {port.element_type.get_type_name() for port in model.outputs} == {"f32"}
    assert found == {
        "unet": {
            "sample": ("[?,4,?,?]", "f32"),
            "timestep": ("[]", "f32"),
            "encoder_hidden_states": ("[?,77,128]", "f32"),
            "text_embeds": ("[?,64]", "f32"),
            "time_ids": ("[?,6]", "f32"),
        },
        "vae_decoder": {"latent_sample": ("[?,4,?,?]", "f32")},
        "text_encoder": {"input_ids": ("[?,77]", "i64")},
        "text_encoder_2": {"input_ids": ("[?,77]", "i64")},
    }


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "vae_decoder"])
def test_an_unquantized_network_computes_what_torch_does(handed_over, folder, component):
    """The tolerances are those of every part: fp16 weights in a text encoder, fp32 in the VAE."""
    dtype = handed_over.parts[component].contract.weights
    assert handed_over.error(component, folder, run) < PART_TOLERANCE[dtype]


def test_the_unet_is_as_far_from_full_precision_as_the_simulation(handed_over, folder):
    """Not the same: what rounds the other way in one layer changes all behind it, see tests/unit/export/test_qdq.py."""
    ours, simulated = handed_over.distances(folder, run)
    assert ours == pytest.approx(simulated, rel=0.2) and 1e-2 < ours < 0.3


def test_codes_and_quantizers_come_through(handed_over, folder):
    ops = read(folder / "unet").get_ops()
    constants = [op.output(0) for op in ops if op.get_type_name() == "Constant"]
    codes = [port for port in constants if port.element_type.get_type_name() == "i8" and len(port.shape) > 1]
    quantized = sum(layer.format is not None for layer in handed_over.assignment.values())
    assert len([port for port in codes if max(port.shape) > 1]) >= quantized > 10
    assert sum(op.get_type_name() == "FakeQuantize" for op in ops) > 5


def test_what_openvino_cannot_read_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"hello")
    with pytest.raises(ArtifactError, match="OpenVINO cannot read the exported unet: "):
        target.convert(tmp_path / "model.onnx", tmp_path / "unet")
