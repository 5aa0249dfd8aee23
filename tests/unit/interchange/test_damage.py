"""Written files with another config or with damaged tensors. ``test_layouts`` has damage that a layout's row says."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.quantization_config import FineGrainedFP8Config

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.interchange import READERS
from sd_quant.interchange.diffusers_autoround import AWQ

from ..tiny import changed
from .conftest import PLAIN

pytestmark = [pytest.mark.commit, pytest.mark.slow]

ALONE = PLAIN | {"activation": None}
WRITTEN = {
    "diffusers_autoround": ("flux", "int4", ALONE),
    "diffusers_bfl": ("flux", "nvfp4", PLAIN),
    "diffusers_modelopt": ("sd21", "fp8", {"per_channel": False}),
    "diffusers_nunchaku_lite": ("flux", "int4", {"rank": 0.1, "smoothing": "modelopt"}),
    "diffusers_sdnq": ("sd21", "int4", {"activation": None, "alpha": None, "rank": 0.1}),
    "diffusers_torchao": ("flux", "int8", {"per_channel": False, "smoothing": "modelopt"}),
    "modelopt_export": ("flux", "nvfp4", PLAIN),
    "nunchaku": ("flux", "int4", {"rank": 0.1}),
    "sglang_fp8": ("flux", "fp8_128x128", PLAIN | {"activation": "fp8_128"}),
    "vllm_int8": ("flux", "int8", PLAIN | {"per_token": True}),
}
SINGLE, QUERY = "single_transformer_blocks.0", "transformer_blocks.0.attn.to_q"
IN_SDNQ = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"


@pytest.fixture
def written(written_once):
    """``written(target)``: a case, the quantized layers, and the file or the denoiser's folder."""

    def write(target: str):
        family, fmt, options = WRITTEN[target]
        case, assignment, path = written_once(target, family, fmt, **options)
        return (
            case,
            {row.name for row in assignment.values() if row.format},
            path / case.component if path.is_dir() else path,
        )

    return write


@pytest.fixture
def damaged(written, tmp_path):
    """``damaged(target, change, config, **metadata)``: what is read of a copy with these changes, as of ``changed``."""

    def read(target: str, *change: Callable, **more: object):
        case, _, path = written(target)
        return READERS[target].module.read(changed(path, tmp_path, *change, **more), case.checkpoint)

    return read


# Configs


def section(change: Callable[[dict], object]) -> Callable[[dict], object]:
    return lambda config: change(config["svdq_w4a4"])


def as_transformers_writes(config: dict) -> None:
    """Its name for the list, and its keys as they are by default."""
    config["modules_to_not_convert"] = config.pop("ignored_layers")
    config.update(FineGrainedFP8Config(**config).to_dict())


ALSO = {"ignored_layers": [], "modules_to_not_convert": ["single_transformer_blocks.1", "proj_mlp"]}
LAYOUT = "checkpoint_weight_scale_layout"
ORDER = "its {} is {}, expected {} as in what ModelOpt exports; give the folder"
CONFIGS = {
    "diffusers_autoround": [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format is auto_round:llm_compressor"),
        ({"packing_format": ["auto_round"]}, "packing_format is a list"),
        ({"packing_format": AWQ}, "qweight"),
        ({"bits": "4"}, "bits"),
        ({"group_size": 32}, "qzeros|scales"),
        ({"group_size": 24}, "groups of 24"),
        ({"group_size": 0}, "groups of 0"),
        ({"bits": 8}, "qweight"),
        ({"data_type": "mx_fp"}, "mx_fp"),
        ({"act_bits": 8}, "inputs of 8"),
        ({"rotation_config": {"block_size": 32}}, "rotation_config, not decoded here"),
        ({"extra_config": ["x"]}, "extra_config"),
        ({"extra_config": {"x": 16}}, "extra_config"),
        ({"extra_config": {"(a+)+$": {"bits": 16}}}, "regular expression"),
        ({"extra_config": {".*" * 30: {"bits": 16}}}, "regular expression"),
        ({"extra_config": {".*attn.*": {"bits": 16}}}, "quantize other layers"),
        ({"extra_config": {}}, "quantize other layers.*only said"),
        ({"block_name_to_quantize": 3}, "names blocks"),
        ({"block_name_to_quantize": "nothing"}, "quantize other layers.*only stored"),
    ],
    "diffusers_nunchaku_lite": [
        (section(lambda own: own.update(rank=32)), "rank 32"),
        (section(lambda own: own.update(precision="nvfp4", group_size=16)), "nvfp4"),
        (section(lambda own: own.update(group_size=32)), "groups of 32"),
        (section(lambda own: own.update(targets="all")), "targets 'all'"),
        (section(lambda own: own["targets"].append("proj_out")), "'proj_out'"),
        (section(lambda own: own["targets"].append(own["targets"][0])), "twice"),
        (section(lambda own: own["targets"].pop()), "unknown"),
        (section(lambda own: own.pop("rank")), "broken quantization_config"),
    ],
    "diffusers_sdnq": [
        ({name: 3}, f"{name} is 3")
        for name in ("weights_dtype", "modules_dtype_dict", "modules_quant_config", "use_hadamard")
    ],
    "modelopt_export": [
        ({"quant_algo": "FP8"}, "has codes of nvfp4, and its quant_algo is FP8"),
        ({"quant_algo": "NVFP4_SVD"}, "is NVFP4_SVD, expected one of FP8, "),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo of .* is None"),
        ({"ignore": ["transformer_blocks.0.*"]}, "quantizes layers that its ignore excludes"),
        ({"ignore": {"a": 1}}, "ignore in its config is no list"),
        # SGLang's converters say these of their own order, in which the same codes and scales mean other numbers
        ({"swap_weight_nibbles": True}, ORDER.format("swap_weight_nibbles", True, False)),
        ({"checkpoint_uses_packed_qkv": True}, ORDER.format("checkpoint_uses_packed_qkv", True, False)),
        ({"dynamic_input_scale": True}, ORDER.format("dynamic_input_scale", True, False)),
        ({LAYOUT: "swizzled"}, ORDER.format(LAYOUT, "swizzled", "linear")),
        ({"weight_scale_layout": ["swizzled"]}, ORDER.format("weight_scale_layout", "a list", "linear")),
        ({"swap_weight_nibbles": False, LAYOUT: "linear", "dynamic_input_scale": None}, None),  # and of ModelOpt's
    ],
    "sglang_fp8": [
        ({"activation_scheme": "static"}, "lacks activation_scheme dynamic"),
        ({"weight_block_size": [64, 128]}, r"lacks weight_block_size \[128, 128\]"),
        ({"scale_fmt": "ue8m0"}, "has scale_fmt ue8m0, which is not decoded"),
        ({"ignored_layers": "proj_out"}, "is no list of names"),
        ({"ignored_layers": [f"{SINGLE}.proj_out"]}, rf"ignores \(1: {SINGLE}.proj_out\), so SGLang"),
        (as_transformers_writes, None),
        (ALSO, r"for layers that its config ignores \(6: "),  # all of the second block, and another proj_mlp
    ],
    "vllm_int8": [
        ({"is_checkpoint_int8_serialized": False}, "lacks is_checkpoint_int8_serialized True"),
        ({"weight_block_size": [1, 2]}, "has weight_block_size a list, which is not decoded"),
        ({"ignored_layers": [f"{SINGLE}.proj_mlp"]}, rf"that its config ignores \(1: {SINGLE}.proj_mlp"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("target, change, words", [(name, *row) for name, rows in CONFIGS.items() for row in rows])
def test_a_config_that_its_tool_takes_otherwise_is_refused(written, damaged, target, change, words):
    change = change if callable(change) else lambda config, entries=change: config.update(entries)
    with nullcontext() if words is None else pytest.raises((ArtifactError, ConfigError), match=words):
        assert damaged(target, config=change).layers.keys() == written(target)[1]


def test_a_class_of_another_config_is_not_opened(written, tmp_path):
    case, _, source = written("diffusers_sdnq")
    config = json.loads((changed(source, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "Popen"}))
    runtime = case.read(tmp_path, "diffusers_sdnq").runtime
    if runtime is None:
        pytest.skip("sdnq is not installed")
    with pytest.raises(ArtifactError, match="of a 'Popen', expected UNet2DConditionModel"):
        runtime()


# Tensors


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


NUMBER = torch.ones(())
TENSORS = {
    "diffusers_autoround": [(put(f"{QUERY}.weight", torch.zeros(128, 128)), "two weights")],
    "diffusers_bfl": [
        (put("proj_out.input_scale", NUMBER), "input_scale and no weight_scale"),
        (put(f"{QUERY}.input_scale", 0 * NUMBER), "input_scale' is 0, expected a number above 0"),
    ],
    "diffusers_nunchaku_lite": [
        (put(f"{QUERY}.wzeros", torch.zeros(2, 128)), "wzeros"),
        (put(f"{QUERY}.smooth_factor", torch.zeros(128)), "not above 0"),
        (drop(f"{QUERY}.bias"), "missing"),
    ],
    "diffusers_sdnq": [
        (lambda own: [own.pop(name) for name in [*own] if name.startswith(f"{IN_SDNQ}.")], "missing: .*net.2.weight"),
    ],
    "modelopt_export": [
        (drop(f"{QUERY}.input_scale"), "has no input_scale, which NVFP4 requires"),
        (put(f"{QUERY}.input_scale", 0 * NUMBER), "expected a number above 0"),
        (put(f"{QUERY}.input_scale", NUMBER * torch.nan), "input_scale' holds NaN or infinite numbers"),
        (drop(f"{QUERY}.weight_scale_2"), "with other scales"),
    ],
    "nunchaku": [
        (drop(f"{SINGLE}.mlp_fc2.qweight"), "missing: .*unknown"),
        (drop(f"{SINGLE}.out_proj.qweight"), "missing: .*proj_out.weight"),
        (put(f"{SINGLE}.qkv_proj.proj_down", NUMBER), "twice"),
        (drop(f"{SINGLE}.norm.linear.wzeros"), "has no 'proj_down'"),
        (put(f"{SINGLE}.norm.linear.bias", torch.zeros(9)), "bias"),
    ],
    "sglang_fp8": [(drop(f"{SINGLE}.attn.to_q.weight_scale_inv"), "in no floating point")],
}  # fmt: skip
TENSORS = {
    name: [(put("what.is_this", NUMBER), r"1 unknown: what\.is_this"), *TENSORS.get(name, [])] for name in WRITTEN
}


@pytest.mark.parametrize("target, change, words", [(name, *row) for name, rows in TENSORS.items() for row in rows])
def test_tensors_that_make_no_whole_denoiser_are_refused(damaged, target, change, words):
    with pytest.raises(ArtifactError, match=words):
        damaged(target, change)


def test_a_file_of_another_class_of_nunchakus_is_refused(damaged, written, tiny):
    with pytest.raises(ArtifactError, match="is of NunchakuQwen.*expected NunchakuFlux"):
        damaged("nunchaku", model_class="NunchakuQwenImageTransformer2DModel")
    with pytest.raises(ArtifactError, match="which a SD3Transformer2DModel is not"):
        tiny("sd3").read(written("nunchaku")[2], "nunchaku")


# torchao's descriptions

TORCHAO, LAYER = "diffusers_torchao", "transformer_blocks.0.ff.net.2"


def described(path: Path, change: Callable[[dict, dict], object]) -> None:
    """The description of one layer in the header, and its pieces, changed."""
    (file,) = path.glob("*.safetensors")
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    pieces, entry, prefix = load_file(file), json.loads(metadata[f"{LAYER}.weight"]), f"{LAYER}._weight_"
    own = {key.removeprefix(prefix): pieces.pop(key) for key in list(pieces) if key.startswith(prefix)}
    change(entry, own)
    metadata[f"{LAYER}.weight"] = json.dumps(entry)
    save_file(pieces | {prefix + key: piece for key, piece in own.items()}, file, metadata)


DESCRIPTIONS = {
    "which mslk packs for NVIDIA GPUs": lambda entry, own: entry.update(_type="Int4Tensor"),
    "which torchao 0.18 cannot save": lambda entry, own: entry.update(_type="os.system"),
    "1 unknown: .*zero_point": lambda entry, own: entry["_tensor_data_names"].remove("zero_point"),
    "no .*_weight_other": lambda entry, own: entry["_tensor_data_names"].append("other"),
    "has no 'scale'": lambda entry, own: (entry["_tensor_data_names"].remove("scale"), own.pop("scale")),
    "block_size \\[1, 7\\]": lambda entry, own: entry["_data"].update(block_size=[1, 7]),
    "block_size '": lambda entry, own: entry["_data"].update(block_size="1"),
    "dtype {.*load": lambda entry, own: entry["_data"].update(dtype={"_type": "torch.dtype", "_data": "load"}),
    "act_quant_kwargs \\[\\]": lambda entry, own: entry["_data"].update(act_quant_kwargs=[]),
    "swizzled, not known": lambda entry, own: entry["_data"].update(swizzled=True),
    "has zero points": lambda entry, own: own["zero_point"].add_(1),
    "does not say in its header": lambda entry, own: entry.pop("_type"),
}  # fmt: skip


@pytest.mark.parametrize("words", DESCRIPTIONS)
def test_a_description_of_another_tensor_is_refused(written, tmp_path, words):
    case, _, source = written(TORCHAO)
    described(changed(source, tmp_path), DESCRIPTIONS[words])
    with pytest.raises(ArtifactError, match=words):
        READERS[TORCHAO].module.read(tmp_path, case.checkpoint).layers[LAYER].weight.read()


def test_pickles_and_files_without_descriptions_are_refused(written, tmp_path):
    case, _, source = written(TORCHAO)
    (file,) = changed(source, tmp_path).glob("*.safetensors")
    save_file({"a": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match="does not say in its header .*tensor_names"):
        READERS[TORCHAO].module.read(tmp_path, case.checkpoint)
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(ArtifactError, match="as pickles .*safe_serialization=True"):
        READERS[TORCHAO].module.read(tmp_path, case.checkpoint)
