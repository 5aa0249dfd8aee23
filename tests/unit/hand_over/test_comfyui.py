"""Tensors of quantized linears, read by ComfyUI's own kernels and layouts, and the keys of its file."""

import json

import pytest
import torch
from torch import nn

from sd_quant.candidates import comfyui as candidate
from sd_quant.candidates.comfyui_inputs import Rotated
from sd_quant.checkpoints.nemo_keys import locations
from sd_quant.checkpoints.sgm import nemo_key, sgm_key
from sd_quant.checkpoints.tensors import lazy
from sd_quant.hand_over import TARGETS, comfyui
from sd_quant.hand_over.adapt import adapted, simulate_target
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Recipe

TARGET = TARGETS["comfyui"]
pytestmark = pytest.mark.consumer
kitchen = pytest.importorskip("comfy_kitchen")
from comfy_kitchen.tensor import QuantizedTensor  # noqa: E402
from comfy_kitchen.tensor.fp8 import TensorCoreFP8Layout  # noqa: E402
from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout  # noqa: E402


def linears(rows):
    return [layer for layer in rows.values() if layer.format is not None]


def tensors_of(unet, layer) -> dict[str, torch.Tensor]:
    weight = unet.get_submodule(layer.name).weight
    return {name: tensor.read() for name, tensor in comfyui.tensors_of(lazy(weight), layer)}


def computed(layer, found, x, bias) -> torch.Tensor:
    """What ComfyUI makes of a linear's tensors: its ``ops.py``, with comfy-kitchen's kernels."""
    if layer.format == "int8":
        mark = json.loads(bytes(found["comfy_quant"].tolist()))
        rotation = {name: each for name, each in mark.items() if name != "format"}
        return kitchen.int8_linear(x, found["weight"], found["weight_scale"], bias, torch.float32, **rotation)
    kind = {"fp8": TensorCoreFP8Layout, "nvfp4": TensorCoreNVFP4Layout}[layer.format]
    flat = x.flatten(0, -2)
    if "pre_quant_scale" in found:
        flat = flat * found["pre_quant_scale"].float()
    y = QuantizedTensor.from_float(flat, kind.__name__, scale=found["input_scale"]).dequantize()
    if layer.format == "fp8":
        weight = found["weight"].float() * found["weight_scale"]
    else:
        rows, columns = layer.weight_shape
        weight = kitchen.dequantize_nvfp4(
            found["weight"], found["weight_scale_2"], found["weight_scale"], torch.float32
        )[:rows, :columns]
    return nn.functional.linear(y.float()[:, : weight.shape[1]], weight, bias).unflatten(0, x.shape[:-1])


@pytest.mark.parametrize(
    "weight, options",
    [
        ("fp8", {"per_channel": False}),
        ("int8", {"per_channel": True}),
        ("int8", {"per_channel": True, "per_token": True}),
        ("int8", {"per_channel": True, "per_token": True, "rotation": 16}),
        ("int8", {"per_channel": False, "per_token": True, "rotation": 4}),
        ("nvfp4", {"smoothing": "none", "alpha": None}),
    ],
)
@torch.no_grad()
def test_each_linear_computes_what_the_simulation_does(assign, calibrated, weight, options):
    """To 1e-5, fp32's own error."""
    rows = adapted(assign(weight, weight, **options), TARGET)
    unet, part = calibrated.part().unet, calibrated.part()
    simulate_target(part.unet, rows, TARGET)
    seen = {}
    for layer in linears(rows):
        module, inputs, outputs = part.unet.get_submodule(layer.name), [], []
        module.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0]), prepend=True)
        module.register_forward_hook(lambda _, given, output, outputs=outputs: outputs.append(output))
        seen[layer.name] = inputs, outputs
    part(**calibrated.calls[0])
    assert len(seen) == len(linears(rows)) >= 20
    for layer in linears(rows):
        [x], [expected] = seen[layer.name]
        found = tensors_of(unet, layer)
        assert json.loads(bytes(found["comfy_quant"].tolist()))["format"] == comfyui.NAMES[weight]
        bias = part.unet.get_submodule(layer.name).bias
        assert relative_error(expected, computed(layer, found, x, bias)) < 1e-5, layer.name


def test_the_codes_and_scales_of_nvfp4_are_ours(assign, calibrated):
    """ComfyUI unpacks them to the numbers that they stand for, up to the fp16 in which ours multiplies two scales."""
    rows = adapted(assign("nvfp4", "nvfp4", smoothing="none", alpha=None), TARGET)
    unet = calibrated.part().unet
    for layer in linears(rows):
        found, (height, width) = tensors_of(unet, layer), layer.weight_shape
        unpacked = kitchen.dequantize_nvfp4(
            found["weight"], found["weight_scale_2"], found["weight_scale"], torch.float32
        )[:height, :width]
        codes, scales = layer.codes_and_scales(rewritten(unet.get_submodule(layer.name).weight, layer))
        torch.testing.assert_close(unpacked, FORMATS["nvfp4"].dequantize(codes, *scales), rtol=1e-3, atol=0)


def test_a_mark_says_how_many_inputs_are_rotated(assign, calibrated):
    rows = adapted(assign("int8", "int8", per_channel=True, per_token=True, rotation=16), TARGET)
    unet = calibrated.part().unet
    for layer in linears(rows):
        mark = json.loads(bytes(tensors_of(unet, layer)["comfy_quant"].tolist()))
        assert mark == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}


def test_it_is_read_back_as_what_the_codes_stand_for(tiny, tmp_path):
    """As a candidate of ``judge.py``: the same weights, rotated back, and inputs that are rotated."""
    case = tiny("sdxl")
    recipe = Recipe(3.0, None, smoothing="none", collect_method="min-max", per_token=True, rotation=16)
    rows = case.assignment(recipe, TARGET.name)
    comfyui.write(case.checkpoint, rows, tmp_path)
    found = candidate.read(tmp_path / comfyui.FILE, case.checkpoint).layers
    assert found.keys() == {layer.name for layer in linears(rows)}
    for layer in linears(rows):
        weight = case.checkpoint.components["unet"][f"{layer.name}.weight"]
        torch.testing.assert_close(found[layer.name].weight.read(), layer.rounded_weight(rewritten(weight, layer)))
        assert found[layer.name].inputs == Rotated(16)


def test_convolutions_and_what_names_the_model_stay_in_high_precision(assign):
    rows = adapted(assign("nvfp4", "nvfp4", smoothing="none", alpha=None), TARGET)
    assert not any(layer.name.endswith(("attn2.to_k", "attn2.to_v")) for layer in linears(rows))
    rows = adapted(assign("int8", "int8", per_channel=True), TARGET)
    kept = {row.reason for row in rows.values() if row.role == "conv"}
    assert kept == {"comfyui holds no convolutions in int8"}


def test_every_key_goes_back_to_nemos(calibrated):
    names = [name for name, _ in calibrated.part().unet.named_parameters()]
    keys = [place.key for place in locations("unet", names).values()]
    assert [nemo_key(sgm_key(key)) for key in keys] == keys
    assert len({sgm_key(key) for key in keys}) == len(keys)
    assert "model.diffusion_model.out.2.weight" in {sgm_key(key) for key in keys}
