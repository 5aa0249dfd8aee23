"""Tensors that torchao itself has quantized and saved: weights are its own bit for bit, and layers compute the same."""

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from diffusers import TorchAoConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from .conftest import PER_ROW_FP8

pytestmark = pytest.mark.consumer
ao = pytest.importorskip("torchao.quantization")
READER = "diffusers_torchao"


def by_config(config) -> Callable[[Tensor], Tensor]:
    def quantize(weight: Tensor) -> Tensor:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.weight.data = weight
        ao.quantize_(layer, config)
        return layer.weight.data

    return quantize


def quantizers() -> dict[str, Callable[[Tensor], Tensor]]:
    """By torchao's configs what it quantizes on a processor, else by the tensors themselves: on GPUs, calibrated."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig, nvfp4_tensor
    from torchao.quantization.quantize_ import workflows

    blocks, rows, whole = ao.PerGroup(32), ao.PerRow(), ao.PerTensor()
    symmetric, asymmetric = ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC
    mm, scale = Float8MMConfig(), torch.full((1, 1, 1), 0.031)

    def int8(weight_by, inputs_by, half: bool = False, mapping=symmetric, pre_scaled: bool = False, **more):
        kwargs = workflows.QuantizeTensorToInt8Kwargs(inputs_by, mapping_type=mapping, reduce_range=half)

        def quantize(weight: Tensor) -> Tensor:
            factors = torch.linspace(0.5, 1.5, weight.shape[1], dtype=weight.dtype) if pre_scaled else None
            return workflows.Int8Tensor.from_hp(
                weight, weight_by, act_quant_kwargs=kwargs, reduce_range=half, act_pre_scale=factors, **more
            )

        return quantize

    def float8(by):
        kwargs = workflows.QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, by, mm_config=mm)
        return lambda weight: workflows.Float8Tensor.from_hp(
            weight, granularity=by, act_quant_kwargs=kwargs, mm_config=mm
        )

    def nvfp4(each_time: bool, weight_scale: bool, tiles: bool, static: float | None = None):
        kwargs = nvfp4_tensor.QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=each_time)
        return lambda weight: nvfp4_tensor.NVFP4Tensor.to_nvfp4(
            weight,
            per_tensor_scale=nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().max()) if weight_scale else None,
            act_per_tensor_scale=None if static is None else torch.tensor(static),
            act_quant_kwargs=kwargs,
            is_swizzled_scales=tiles,
        )

    configs = {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8, blocks": ao.Int8WeightOnlyConfig(granularity=blocks),
        "int8, inputs": ao.Int8DynamicActivationInt8WeightConfig(),
        "int8, inputs with zero points": ao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=asymmetric),
        "float8": ao.Float8WeightOnlyConfig(),
        "float8, all": ao.Float8WeightOnlyConfig(granularity=whole),
        "e5m2": ao.Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2),
        "int4": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=blocks),
        "int3, zero points": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=ao.PerAxis(0), mapping_type=asymmetric
        ),
        "int4, inputs": ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=blocks),
        "nvfp4": NVFP4WeightOnlyConfig(),
        "nvfp4, one scale": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
    }
    return {name: by_config(config) for name, config in configs.items()} | {
        "int8, a scale each time": int8(rows, whole),
        "int8, half the range": int8(whole, rows, half=True),
        "int8, static": int8(rows, whole, pre_scaled=True, act_quant_scale=scale),
        "int8, static and shifted": int8(
            rows, whole, mapping=asymmetric, act_quant_scale=scale,
            act_quant_zero_point=torch.full((1, 1, 1), 3, dtype=torch.int8),
        ),
        "float8, rows": float8(rows),
        "float8, each time": float8(whole),
        "nvfp4, each time": nvfp4(True, True, True),
        "nvfp4, static": nvfp4(False, True, False, static=0.002),
        "nvfp4, blocks alone": nvfp4(False, False, True),
    }  # fmt: skip


def save_flattened(network: nn.Module, folder: Path) -> dict[str, str]:
    """As save_pretrained writes it, with every kind of weight in turn; the kinds by layer."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    kinds, state = dict(zip(layers, cycle(makers := quantizers()), strict=False)), network.state_dict()
    state |= {f"{name}.weight": makers[kind](state[f"{name}.weight"]) for name, kind in kinds.items()}
    pieces, metadata = flatten_tensor_state_dict(state)
    pieces = {name: piece.contiguous() for name, piece in pieces.items()}
    save_file(pieces, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"} | metadata)
    network.save_config(folder)
    config = json.loads((folder / "config.json").read_text())
    default = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": default}}
    (folder / "config.json").write_text(json.dumps(config))
    assert set(kinds.values()) == makers.keys()
    return kinds


def torchao_weights(folder: Path) -> dict[str, Tensor]:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(folder / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        pieces = {name: file.get_tensor(name) for name in file.keys()}
        state, left = unflatten_tensor_state_dict(pieces, file.metadata())
    assert not left
    return {name.removesuffix(".weight"): each for name, each in state.items() if type(each) is not Tensor}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_and_layers(dtype, tiny, tmp_path):
    """torchao multiplies inputs in NVFP4 on Blackwell alone; it makes and decodes codes everywhere."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    sdxl = tiny("sdxl")
    kinds = save_flattened(sdxl.kind.from_pretrained(sdxl.folder, torch_dtype=dtype), tmp_path)
    candidate, theirs = sdxl.read(tmp_path, READER), torchao_weights(tmp_path)
    assert candidate.layers.keys() == theirs.keys() == kinds.keys() and candidate.runtime is None
    for name, layer in candidate.layers.items():
        weight, found, kind = theirs[name], layer.weight.read(), kinds[name]
        assert found.dtype == layer.weight.dtype in (torch.float32, dtype)
        options = {} if hasattr(weight, "target_dtype") else {"output_dtype": found.dtype}
        assert torch.equal(found, weight.dequantize(**options)), (name, kind)
        if dtype != torch.float32:
            continue
        x = 3 * torch.randn(1, 40, found.shape[1], generator=torch.Generator().manual_seed(0))
        if kind.startswith("nvfp4") and layer.inputs:
            x[0, 3] *= 1e-3  # with scales below E4M3's normal numbers
            scale = weight.act_per_tensor_scale
            if weight.act_quant_kwargs.use_dynamic_per_tensor_scale:
                scale = per_tensor_amax_to_scale(x.abs().max())
            assert torch.equal(layer.inputs(x[0]), NVFP4Tensor.to_nvfp4(x[0], per_tensor_scale=scale).dequantize())
            continue
        output, inputs = linear(x, weight), x if layer.inputs is None else layer.inputs(x)
        assert (linear(inputs, found) - output).norm() < 1e-6 * output.norm(), (name, kind)
        if layer.inputs is not None:
            assert (linear(x, found) - output).norm() > 1e-3 * output.norm()


def test_a_pipeline_with_shards(tiny, tmp_path):
    """PixArt, one of whose tensors is the denoiser's own and no layer's."""
    case, config = tiny("pixart"), TorchAoConfig(ao.Int8WeightOnlyConfig())
    network = case.kind.from_pretrained(case.folder, quantization_config=config, torch_dtype=torch.float32)
    network.save_pretrained(tmp_path / "pipeline/transformer", max_shard_size="300KB")
    assert len(list((tmp_path / "pipeline/transformer").glob("*.safetensors"))) > 1
    candidate = case.read(tmp_path / "pipeline", READER)
    assert "scale_shift_table" in candidate.parameters
    theirs = candidate.runtime()
    assert case.error(theirs, case.network(candidate)) < 1e-5 < 1e-4 < case.error(theirs, case.denoiser())


# Folders of ours, which diffusers loads; see ``tests.programs``


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_zeros_stays_zeros_in_torchao(written_once, dtype):
    """SDXL's empty prompt is one. torchao by itself divides it by a scale of zero, and images are black."""
    case, assignment, folder = written_once(READER, "sdxl", "fp8", **PER_ROW_FP8)
    layer = case.loaded(folder, dtype).get_submodule(next(name for name, row in assignment.items() if row.format))
    x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    bias = 0 if layer.bias is None else layer.bias
    assert torch.equal(layer(x)[0], torch.zeros_like(layer(x)[0]) + bias) and layer(x).isfinite().all()
    layer.weight.act_quant_kwargs.hp_value_lb = None
    assert layer(x)[0].isnan().all()


def test_bfloat16_keeps_every_scale_of_torchao_and_its_own_quantizer_does_not(written_once):
    """It computes a scale in the weight's dtype; that of a file stays fp32, whatever dtype is loaded."""
    case, assignment, folder = written_once(READER, "flux", "fp8", **PER_ROW_FP8)
    from torchao.quantization.quantize_.workflows import Float8Tensor

    name = next(name for name, layer in assignment.items() if layer.format)
    dtypes = torch.float32, torch.bfloat16
    expected, brain = (case.loaded(folder, dtype).get_submodule(name).weight for dtype in dtypes)
    assert torch.equal(brain.scale, expected.scale) and brain.scale.dtype == torch.float32
    theirs = Float8Tensor.from_hp(case.denoiser().get_submodule(name).weight.detach().bfloat16()).scale
    assert torch.equal(theirs, theirs.bfloat16().float()) and not torch.equal(expected.scale, theirs)
    assert 5e-4 < ((theirs - expected.scale).abs() / expected.scale).max() < 8e-3
