"""Folders of quantized denoisers as diffusers saves them: SDNQ's and torchao's, of three layers."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors
from torch import nn

from sd_quant.candidates import diffusers_sdnq, diffusers_torchao
from sd_quant.candidates.candidate import Candidate

from .harness import Reader
from .mutations import changed, document_edits, edited, to_json
from .shared import damaged_safetensors, described, digest, header_of, with_header

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(64, 32), nn.Linear(32, 64), nn.Conv2d(8, 4, 3), nn.Linear(16, 4)


SHAPES = {"a": (32, 64), "b": (64, 32), "c": (4, 8, 3, 3), "last": (4, 16)}
CHECKPOINT: Any = SimpleNamespace(
    family=SimpleNamespace(DENOISER="unet", NETWORKS={"unet": "UNet2DConditionModel"}),
    parts=lambda: {"unet": SimpleNamespace(component="unet", prefix="")},
    build=lambda: {"unet": Three()},
)


def some(*shape: int) -> torch.Tensor:
    """Different numbers from 0 to 1, the same every time."""
    return (torch.arange(math.prod(shape)) * 0.37 % 1).view(shape)


def sdnq() -> tuple[dict[str, torch.Tensor], dict, dict[str, str]]:
    """Packed in blocks with a branch, turned for products of codes, a convolution; and one that is not quantized."""
    tensors = {
        "a.weight": torch.arange(1024).to(torch.uint8), "a.scale": some(32, 4, 1) + 0.1,
        "a.zero_point": some(32, 4, 1), "a.svd_up": some(32, 2), "a.svd_down": some(2, 64),
        "b.weight": torch.arange(2048).to(torch.int8).view(32, 64), "b.scale": some(1, 64) + 0.1,
        "c.weight": torch.arange(180).to(torch.uint8).view(36, 5), "c.scale": some(4, 1, 3, 3),
        "last.weight": some(4, 16).half(),
    }  # fmt: skip
    config = {
        "quant_method": "sdnq", "weights_dtype": "uint4", "group_size": 16, "use_hadamard": False, "use_svd": True,
        "hadamard_group_size": 256, "use_codebook": False, "scale_dtype": None, "zero_point_dtype": None,
        "use_quantized_matmul": False, "use_quantized_matmul_conv": False, "quantized_matmul_dtype": None,
        "modules_to_not_convert": ["last"], "modules_to_not_use_matmul": ["a*", ".c"], "sdnq_version": "0.2.8",
        "modules_dtype_dict": {"minimum_5bit": ["c"]},
        "modules_quant_config": {"b": {"weights_dtype": "int8", "use_quantized_matmul": True, "group_size": -1}},
    }  # fmt: skip
    return tensors, config, {"format": "pt"}


def torchao() -> tuple[dict[str, torch.Tensor], dict, dict[str, str]]:
    """Codes with static inputs and a factor in front, NVFP4 in tiles with inputs; and two that are not quantized."""

    def dtype(name: str) -> dict:
        return {"_type": "torch.dtype", "_data": name}

    inputs = {
        "_type": "QuantizeTensorToInt8Kwargs",
        "_data": {
            "granularity": {"_type": "PerTensor", "_data": {}},
            "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
            "reduce_range": False,
        },
    }
    int8 = {"act_quant_kwargs": inputs, "reduce_range": False, "block_size": [1, 64], "dtype": dtype("bfloat16")}
    blocks = {
        "block_size": 16, "is_swizzled_scales": False, "use_triton_kernel": False, "use_dynamic_per_tensor_scale": True,
    }  # fmt: skip
    nvfp4 = {
        "block_size": 16, "orig_dtype": dtype("float32"), "is_swizzled_scales": True, "use_triton_kernel": False,
        "act_quant_kwargs": {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": blocks},
    }  # fmt: skip
    pieces = {
        "a": {
            "qdata": torch.arange(2048).to(torch.int8).view(32, 64), "scale": some(32, 1),
            "zero_point": torch.zeros(32, 1, dtype=torch.int8), "act_quant_scale": torch.full((1, 1), 0.1),
            "act_pre_scale": some(64),
        },
        "b": {
            "qdata": torch.arange(1024).to(torch.uint8).view(64, 16), "per_tensor_scale": torch.tensor(0.01),
            "scale": some(32, 16).to(torch.float8_e4m3fn),
        },
    }  # fmt: skip
    plain = {"c.weight": some(4, 8, 3, 3), "last.weight": some(4, 16).half()}
    plain |= {f"{name}.bias": some(shape[0]) for name, shape in SHAPES.items()}
    kinds = {"a": ("Int8Tensor", int8), "b": ("NVFP4Tensor", nvfp4)}
    told: dict[str, Any] = {name: {"_type": "Tensor"} for name in plain} | {
        f"{name}.weight": {"_type": kind, "_data": data, "_tensor_data_names": list(pieces[name])}
        for name, (kind, data) in kinds.items()
    }
    metadata = {name: json.dumps(entry) for name, entry in told.items()} | {"tensor_names": json.dumps(list(told))}
    tensors = {f"{name}._weight_{piece}": each for name, own in pieces.items() for piece, each in own.items()}
    return tensors | plain, {"quant_method": "torchao"}, metadata


def sdnq_and_torchao() -> list[Reader]:
    return [folder("diffusers_sdnq", sdnq(), diffusers_sdnq), folder("diffusers_torchao", torchao(), diffusers_torchao)]


def folder(name: str, made: tuple[dict[str, torch.Tensor], dict, dict[str, str]], module: Any) -> Reader:
    tensors, quantization, metadata = made
    tensors |= {f"{layer}.bias": some(shape[0]) for layer, shape in SHAPES.items() if f"{layer}.bias" not in tensors}
    config = {"_class_name": "UNet2DConditionModel", "quantization_config": quantization}
    sound = save_safetensors(tensors, metadata)

    def mutate(recipe: tuple) -> dict[str, bytes]:
        which, (kind, edits), document, number = recipe
        if which == "weights":
            return {WEIGHTS: damaged_safetensors(sound, (kind, edits))}
        if which == "config":
            return {"config.json": to_json(changed(config, document))}
        if which == "bytes":
            return {"config.json": edited(to_json(config), edits if kind == "bytes" else [])}
        header, content = header_of(sound)
        own = header["__metadata__"]
        key = sorted(own)[number % len(own)]
        text = own[key]
        own[key] = to_json(changed(json.loads(text) if text.startswith(("{", "[")) else text, document)).decode(
            "utf-8", "replace"
        )
        return {WEIGHTS: with_header(header, content)}

    def read(place: Path) -> Any:
        if not module.recognizes(place):
            return None
        return told(module.read(place, CHECKPOINT))

    def told(candidate: Candidate) -> Any:
        layers = {
            layer: (found.format, found.scales, found.bits, str(found.inputs), digest(found.weight.read()),
                    None if found.inputs is None else digest(found.inputs(torch.ones(40, found.weight.shape[1]))))
            for layer, found in candidate.layers.items()
        }  # fmt: skip
        return layers, {name: digest(each.read()) for name, each in candidate.parameters.items()}, candidate.bits

    def check(place: Path, found: Any) -> None:
        """The whole network, of as many bytes as the file has."""
        if found is None:
            return
        layers, parameters, bits = found
        shapes = {f"{layer}.weight": own[4][1] for layer, own in layers.items()}
        shapes |= {parameter: own[1] for parameter, own in parameters.items()}
        expected = {f"{layer}.{kind}": shape[: None if kind == "weight" else 1]
                    for layer, shape in SHAPES.items() for kind in ("weight", "bias")}  # fmt: skip
        assert shapes == expected
        count = sum(map(math.prod, expected.values()))
        assert bits * count / 8 <= (place / WEIGHTS).stat().st_size

    kinds = ["weights", "config", "config", "bytes"] if name.endswith("sdnq") else ["weights", "metadata", "metadata"]
    recipes = st.tuples(st.sampled_from(kinds), described, document_edits, st.integers(0, 2**16))
    files = {WEIGHTS: sound, "config.json": to_json(config)}
    return Reader(name, files, recipes, mutate, read, check, weight=20)
