"""Tensors that torchao itself has quantized and saved: weights are its own bit for bit, and layers compute the same."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import TorchAoConfig, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from sd_quant.candidates import READERS
from sd_quant.candidates.diffusers_torchao import read
from sd_quant.errors import ArtifactError

from .diffusers_folders import layer_errors, network_errors, tiny_checkpoint

pytestmark = pytest.mark.consumer
ao = pytest.importorskip("torchao.quantization")
WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIG = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}


def configs() -> dict:
    """What torchao quantizes by its configs on a processor, and the tolerance of a layer's output."""
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    blocks, asymmetric = ao.PerGroup(32), ao.MappingType.ASYMMETRIC
    return {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8, blocks": ao.Int8WeightOnlyConfig(granularity=blocks),
        "int8, inputs": ao.Int8DynamicActivationInt8WeightConfig(),
        "int8, inputs with zero points": ao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=asymmetric),
        "float8": ao.Float8WeightOnlyConfig(),
        "float8, all": ao.Float8WeightOnlyConfig(granularity=ao.PerTensor()),
        "e5m2": ao.Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2),
        "int4": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=blocks),
        "int3, zero points": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=ao.PerAxis(0), mapping_type=asymmetric
        ),
        "int4, inputs": ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=blocks),
        "nvfp4": NVFP4WeightOnlyConfig(),
        "nvfp4, one scale": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
    }


def tensors() -> dict:
    """What its configs make on GPUs only or with a calibration, by the tensors themselves."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        QuantizeTensorToNVFP4Kwargs,
        per_tensor_amax_to_scale,
    )
    from torchao.quantization.quantize_.workflows import (
        Float8Tensor,
        Int8Tensor,
        QuantizeTensorToFloat8Kwargs,
        QuantizeTensorToInt8Kwargs,
    )

    rows, whole = ao.PerRow(), ao.PerTensor()

    def int8(weight_by, inputs_by, half: bool = False, **more):
        kwargs = QuantizeTensorToInt8Kwargs(inputs_by, reduce_range=half)
        return lambda weight: Int8Tensor.from_hp(
            weight, weight_by, act_quant_kwargs=kwargs, reduce_range=half,
            **{name: make(weight) for name, make in more.items()},
        )  # fmt: skip

    def float8(by):
        kwargs = QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, by, mm_config=Float8MMConfig())
        return lambda weight: Float8Tensor.from_hp(
            weight, granularity=by, act_quant_kwargs=kwargs, mm_config=Float8MMConfig()
        )

    def nvfp4(each_time: bool, weight_scale: bool, tiles: bool, static: float | None = None):
        kwargs = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=each_time)
        return lambda weight: NVFP4Tensor.to_nvfp4(
            weight,
            per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()) if weight_scale else None,
            act_per_tensor_scale=None if static is None else torch.tensor(static),
            act_quant_kwargs=kwargs,
            is_swizzled_scales=tiles,
        )

    return {
        "int8, a scale each time": int8(rows, whole),
        "int8, half the range": int8(whole, rows, half=True),
        "int8, static": int8(
            rows, whole,
            act_quant_scale=lambda weight: torch.full((1, 1, 1), 0.031),
            act_pre_scale=lambda weight: torch.linspace(0.5, 1.5, weight.shape[1], dtype=weight.dtype),
        ),
        "float8, rows": float8(rows),
        "float8, each time": float8(whole),
        "nvfp4, each time": nvfp4(True, True, True),
        "nvfp4, static": nvfp4(False, True, False, static=0.002),
        "nvfp4, blocks alone": nvfp4(False, False, True),
    }  # fmt: skip


NAMES = list(configs()), list(tensors())
RANK_3 = "int8, static"  # torchao asserts that a static scale has as many axes as its input


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdxl")


@pytest.fixture
def saved(checkpoint, tmp_path):
    def save(name: str, dtype: torch.dtype = torch.float32) -> Path:
        config = configs().get(name)
        options = {} if config is None else {"quantization_config": TorchAoConfig(config)}
        network = UNet2DConditionModel.from_pretrained(checkpoint.path, subfolder="unet", torch_dtype=dtype, **options)
        if config is None:
            save_flattened(network, tensors()[name], tmp_path)
        else:
            network.save_pretrained(tmp_path)
        return tmp_path

    return save


def save_flattened(network: nn.Module, quantize, folder: Path) -> None:
    """As save_pretrained writes it, which a GPU's tensors would need too."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    weights = {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    state = {name: quantize(each.data) if name in weights else each.data for name, each in network.state_dict().items()}
    pieces, metadata = flatten_tensor_state_dict(state)
    save_file(
        {name: piece.contiguous() for name, piece in pieces.items()}, folder / WEIGHTS, {"format": "pt"} | metadata
    )
    network.save_config(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))


def torchao_weights(folder: Path) -> dict[str, Tensor]:
    """torchao's own tensors, made of the file by its own code."""
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        state, left = unflatten_tensor_state_dict(
            {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        )
    assert not left
    return {name.removesuffix(".weight"): each for name, each in state.items() if type(each) is not Tensor}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES[0] + NAMES[1])
def test_weights_and_layers(name, dtype, saved, checkpoint):
    path = saved(name, dtype)
    assert [row.name for row in READERS.values() if row.recognizes(path)] == ["diffusers_torchao"]
    candidate, theirs = read(path, checkpoint), torchao_weights(path)
    assert candidate.layers.keys() == theirs.keys() and len(theirs) > 50
    for layer_name, layer in candidate.layers.items():
        expected, found = theirs[layer_name], layer.weight.read()
        assert found.dtype == layer.weight.dtype in (torch.float32, dtype)
        options = {} if hasattr(expected, "target_dtype") else {"output_dtype": found.dtype}
        assert torch.equal(found, expected.dequantize(**options)), layer_name
        if name.startswith("nvfp4") and layer.inputs or dtype != torch.float32:
            continue
        x = 3 * torch.randn(1, 40, found.shape[1], generator=torch.Generator().manual_seed(0))
        output, inputs = linear(x, expected), x if layer.inputs is None else layer.inputs(x)
        assert (linear(inputs, found) - output).norm() < 1e-6 * output.norm(), layer_name
        if layer.inputs is not None:
            assert (linear(x, found) - output).norm() > 1e-3 * output.norm()


@pytest.mark.parametrize("name", [name for name in NAMES[1] if name.startswith("nvfp4")])
def test_inputs_in_nvfp4(name, saved, checkpoint):
    """torchao multiplies these on Blackwell alone; it makes and decodes codes everywhere."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    candidate, theirs = read(saved(name), checkpoint), torchao_weights(saved(name))
    assert candidate.runtime is None
    for layer_name, layer in list(candidate.layers.items())[::10]:
        x = torch.randn(40, layer.weight.shape[1], generator=torch.Generator().manual_seed(0))
        x[3] *= 1e-3  # with scales below E4M3's normal numbers
        kwargs = theirs[layer_name].act_quant_kwargs
        scale = theirs[layer_name].act_per_tensor_scale
        scale = per_tensor_amax_to_scale(x.abs().max()) if kwargs.use_dynamic_per_tensor_scale else scale
        assert torch.equal(layer.inputs(x), NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize())


@pytest.mark.parametrize("name", [name for name in NAMES[0] + NAMES[1] if name != RANK_3])
def test_the_network_as_diffusers_loads_it(name, saved, checkpoint):
    candidate = read(saved(name), checkpoint)
    if candidate.runtime is None:
        pytest.skip("torchao computes it on GPUs alone")
    theirs = candidate.runtime()
    assert max(layer_errors(checkpoint, candidate, theirs).values()) < 3e-6
    if not any(layer.inputs for layer in candidate.layers.values()):  # else a last bit changes codes, and they others
        error = network_errors(checkpoint, candidate, theirs)
        assert error.ours < 1e-5 and error.plain > 1e-4
    assert candidate.maker == "torchao"


def test_a_pipeline_with_shards(tmp_path):
    """PixArt, one of whose tensors is the denoiser's own and no layer's."""
    from diffusers import PixArtTransformer2DModel

    checkpoint = tiny_checkpoint(tmp_path / "pixart", "pixart")
    network = PixArtTransformer2DModel.from_pretrained(
        checkpoint.path, subfolder="transformer", quantization_config=TorchAoConfig(ao.Int8WeightOnlyConfig()),
        torch_dtype=torch.float32,
    )  # fmt: skip
    network.save_pretrained(tmp_path / "pipeline/transformer", max_shard_size="300KB")
    assert len(list((tmp_path / "pipeline/transformer").glob("*.safetensors"))) > 1
    candidate = read(tmp_path / "pipeline", checkpoint)
    assert "scale_shift_table" in candidate.parameters
    error = network_errors(checkpoint, candidate, candidate.runtime())
    assert error.ours < 1e-5 < 1e-4 < error.plain


def test_what_dequantizes_to_another_dtype_is_not_computed_in_fp32(saved, checkpoint):
    assert read(saved("float8", torch.bfloat16), checkpoint).runtime is None
    assert read(saved("float8"), checkpoint).runtime is not None


def damaged(path: Path, change) -> None:
    """The header's metadata and the pieces of one layer, changed."""
    from safetensors import safe_open

    with safe_open(path / WEIGHTS, framework="pt") as file:
        pieces, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    name = "down_blocks.1.attentions.0.proj_in"
    entry = json.loads(metadata[f"{name}.weight"])
    prefix = f"{name}._weight_"
    own = {key.removeprefix(prefix): pieces.pop(key) for key in list(pieces) if key.startswith(prefix)}
    change(entry, own)
    metadata[f"{name}.weight"] = json.dumps(entry)
    save_file(pieces | {prefix + key: piece.contiguous() for key, piece in own.items()}, path / WEIGHTS, metadata)


DAMAGE = {
    "which mslk packs for NVIDIA GPUs": lambda entry, own: entry.update(_type="Int4Tensor"),
    "which torchao 0.18 cannot save": lambda entry, own: entry.update(_type="os.system"),
    "1 unknown: .*zero_point": lambda entry, own: entry["_tensor_data_names"].remove("zero_point"),
    "no .*_weight_other": lambda entry, own: entry["_tensor_data_names"].append("other"),
    "no 'scale'": lambda entry, own: (entry["_tensor_data_names"].remove("scale"), own.pop("scale")),
    "block_size \\[1, 7\\]": lambda entry, own: entry["_data"].update(block_size=[1, 7]),
    "block_size '": lambda entry, own: entry["_data"].update(block_size="1"),
    "a scale \\[1, 1\\]": lambda entry, own: own.update(scale=torch.ones(1, 1)),
    "a qdata .* torch.uint8": lambda entry, own: own.update(qdata=own["qdata"].view(torch.uint8)),
    "the dtype 'load'": lambda entry, own: entry["_data"].update(dtype={"_type": "torch.dtype", "_data": "load"}),
    "3 where a torch.dtype": lambda entry, own: entry["_data"].update(dtype=3),
    "where a QuantizeTensorToInt8Kwargs": lambda entry, own: entry["_data"].update(act_quant_kwargs=[]),
    "swizzled, not known": lambda entry, own: entry["_data"].update(swizzled=True),
    "has zero points": lambda entry, own: own["zero_point"].add_(1),
    "NaN or infinite": lambda entry, own: own["scale"].fill_(torch.inf),
    "does not say in its header": lambda entry, own: entry.pop("_type"),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_refused(message, saved, checkpoint):
    path = saved("int8")
    damaged(path, DAMAGE[message])
    with pytest.raises(ArtifactError, match=message):
        read(path, checkpoint).layers["down_blocks.1.attentions.0.proj_in"].weight.read()


def test_pickles_and_files_without_descriptions_are_refused(saved, checkpoint):
    path = saved("int8")
    save_file({"a": torch.zeros(1)}, path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ArtifactError, match="does not say in its header .*tensor_names"):
        read(path, checkpoint)
    (path / WEIGHTS).rename(path / "diffusion_pytorch_model.bin")
    with pytest.raises(ArtifactError, match="as pickles .*safe_serialization=True"):
        read(path, checkpoint)
