"""Denoisers of a few layers: folders of SDNQ, torchao, bitsandbytes, quanto, AutoRound, ModelOpt, servers, nunchaku.

They are made here by hand, because a run without those libraries is to fuzz their readers too; what the libraries write
themselves is read in ``tests/unit/interchange``.
"""

import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from sd_quant.interchange import READERS
from sd_quant.interchange.diffusers_bitsandbytes import TABLES

from .harness import Reader
from .mutations import LARGE, byte_edits, changed, document_edits, edited, pickle_edits, repickled, to_json, with_pickle
from .shared import damaged_metadata, damaged_safetensors, described, digest, ways, with_numbers

CONFIG, WEIGHTS, STATE = "config.json", "diffusion_pytorch_model.safetensors", "modelopt_state.pth"
SHAPES = {"a": (32, 64), "b": (64, 32), "c": (4, 8, 3, 3), "last": (4, 16)}
Tensors = dict[str, Tensor]


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(64, 32), nn.Linear(32, 64), nn.Conv2d(8, 4, 3), nn.Linear(16, 4)


def checkpoint_of(network: Callable[[], nn.Module], kind: str = "UNet2DConditionModel") -> Any:
    return SimpleNamespace(
        family=SimpleNamespace(DENOISER="unet", NETWORKS={"unet": kind}),
        parts=lambda: {"unet": SimpleNamespace(component="unet", prefix="")},
        build=lambda: {"unet": network()},
    )


CHECKPOINT = checkpoint_of(Four)


def folders() -> list[Reader]:
    """One for each kind."""
    nvfp4_config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["last*"]}
    nf4_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    int8_config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return [
        folder("diffusers_sdnq", "diffusers_sdnq", *sdnq()),
        folder("diffusers_torchao", "diffusers_torchao", *torchao()),
        folder("bnb_nf4", "diffusers_bitsandbytes", stored_by(nf4), nf4_config),
        folder("bnb_int8", "diffusers_bitsandbytes", stored_by(int8), int8_config),
        folder("quanto", "diffusers_quanto", stored_by(int4), {"quant_method": "quanto", "weights_dtype": "int4"}),
        folder("autoround", "diffusers_autoround", *autoround()),
        folder("modelopt", "diffusers_modelopt", stored_by(ranged), {}, state=modelopt_state("ab")),
        folder("modelopt_hf", "modelopt_export", stored_by(nvfp4), nvfp4_config),
        folder("vllm_int8", "vllm_int8", stored_by(int8_by_row), INT8_CONFIG),
        folder("sglang_fp8", "sglang_fp8", fp8_in_blocks(), FP8_CONFIG, checkpoint=checkpoint_of(Wide)),
        nunchaku_lite(),
        nunchaku(),
    ]


def folder(
    name: str, reader: str, quantized: Tensors, quantization: dict, metadata: dict | None = None, state: bytes = b"",
    checkpoint: Any = CHECKPOINT,
) -> Reader:  # fmt: skip
    """A file of these tensors, with fp16 for the others."""
    tensors = with_plain(quantized, checkpoint)
    config = {"_class_name": "UNet2DConditionModel"} | ({"quantization_config": quantization} if quantization else {})
    weights, text = save_safetensors(tensors, metadata or {"format": "pt"}), to_json(config)
    damages = [
        (described, lambda recipe: {WEIGHTS: damaged_safetensors(weights, recipe)}),
        (document_edits, lambda edits: {CONFIG: to_json(changed(config, edits))}),
        (byte_edits, lambda edits: {CONFIG: edited(text, edits)}),
    ]
    if metadata:
        keys = sorted(metadata)
        damages += [(st.tuples(LARGE, document_edits), lambda drawn: {
            WEIGHTS: damaged_metadata(weights, keys[drawn[0] % len(keys)], drawn[1])
        })] * 2  # fmt: skip
    if places := texts(weights):
        damages.append((byte_edits, lambda edits: {WEIGHTS: edited(weights, edits, places)}))
    if state:
        damages.append((byte_edits, lambda edits: {STATE: edited(state, edits)}))
        damages += [(pickle_edits, lambda edits: {STATE: with_pickle(state, lambda data: repickled(data, edits))})] * 2

    files = {WEIGHTS: weights, CONFIG: text} | ({STATE: state} if state else {})
    return Reader(name, files, weight=20, **ways(*damages), **reading(reader, checkpoint, WEIGHTS))


def with_plain(quantized: Tensors, checkpoint: Any) -> Tensors:
    """The tensors of a whole file: those of quantized layers, and for the others weights in fp16 and biases."""
    shapes = {name: tuple(each.shape) for name, each in checkpoint.build()["unet"].named_parameters()}
    plain = {name: some(*shape).half() if len(shape) > 1 else some(*shape) for name, shape in shapes.items()}
    layers = {name.removesuffix(".weight") for name in shapes if name.endswith(".weight")}
    layers = {layer for layer in layers if any(name.startswith(f"{layer}.") for name in quantized)}
    return {name: each for name, each in plain.items() if name.removesuffix(".weight") not in layers} | quantized


def reading(reader: str, checkpoint: Any, weights: str, opened: str = "") -> dict[str, Callable]:
    """A reader's ``read`` and ``check`` of a folder, or of a file in it, whose tensors are in the file ``weights``."""
    expected = {name: tuple(each.shape) for name, each in checkpoint.build()["unet"].named_parameters()}

    def read(folder: Path) -> tuple | None:
        path = folder / opened
        if not READERS[reader].recognizes(path) and not opened:
            return None
        found = READERS[reader].module.read(path, checkpoint)
        layers = {
            layer: (each.format, each.scales, each.bits, str(each.inputs), digest(each.weight.read()),
                    None if each.inputs is None else digest(each.inputs(torch.ones(40, each.weight.shape[1]))))
            for layer, each in found.layers.items()
        }  # fmt: skip
        return layers, {parameter: digest(each.read()) for parameter, each in found.parameters.items()}, found.bits

    def check(path: Path, found: tuple | None) -> None:
        """The whole network, of as many bytes as the file has."""
        if found is None:
            return
        layers, parameters, bits = found
        shapes = {f"{layer}.weight": own[4][1] for layer, own in layers.items()}
        shapes |= {parameter: own[1] for parameter, own in parameters.items()}
        assert shapes == expected
        count = sum(map(math.prod, expected.values()))
        assert bits * count / 8 <= (path / weights).stat().st_size

    return {"read": read, "check": check}


def texts(data: bytes) -> list[tuple[int, int]]:
    """Where the JSON lies that is stored as a tensor."""
    found, position = [], data.find(b'{"quant_type"')
    while position >= 0:
        found.append((position, data.index(b"}", position) + 1))
        position = data.find(b'{"quant_type"', position + 1)
    return found


def some(*shape: int) -> Tensor:
    """Different numbers from 0 to 1, the same every time."""
    return (torch.arange(math.prod(shape)) * 0.37 % 1).view(shape)


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """All that a byte can be, one after the other."""
    return torch.arange(math.prod(shape)).to(dtype).view(shape)


def sdnq() -> tuple[Tensors, dict]:
    """Packed in blocks with a branch, turned for products of codes, a convolution; and one that is not quantized."""
    tensors = {
        "a.weight": codes(1024), "a.scale": some(32, 4, 1) + 0.1,
        "a.zero_point": some(32, 4, 1), "a.svd_up": some(32, 2), "a.svd_down": some(2, 64),
        "b.weight": codes(32, 64, dtype=torch.int8), "b.scale": some(1, 64) + 0.1,
        "c.weight": codes(36, 5), "c.scale": some(4, 1, 3, 3),
    }  # fmt: skip
    config = {
        "quant_method": "sdnq", "weights_dtype": "uint4", "group_size": 16, "use_hadamard": False, "use_svd": True,
        "hadamard_group_size": 256, "use_codebook": False, "scale_dtype": None, "zero_point_dtype": None,
        "use_quantized_matmul": False, "use_quantized_matmul_conv": False, "quantized_matmul_dtype": None,
        "modules_to_not_convert": ["last"], "modules_to_not_use_matmul": ["a*", ".c"], "sdnq_version": "0.2.8",
        "modules_dtype_dict": {"minimum_5bit": ["c"]},
        "modules_quant_config": {"b": {"weights_dtype": "int8", "use_quantized_matmul": True, "group_size": -1}},
    }  # fmt: skip
    return tensors, config


def torchao() -> tuple[Tensors, dict, dict[str, str]]:
    """Codes with static inputs and a factor in front, NVFP4 in tiles with inputs; and two that are not quantized."""

    def tagged(kind: str, data: Any) -> dict:
        return {"_type": kind, "_data": data}

    inputs = tagged("QuantizeTensorToInt8Kwargs", {
        "granularity": tagged("PerTensor", {}), "mapping_type": tagged("MappingType", "SYMMETRIC"),
        "reduce_range": False,
    })  # fmt: skip
    int8 = {
        "act_quant_kwargs": inputs, "reduce_range": False, "block_size": [1, 64],
        "dtype": tagged("torch.dtype", "bfloat16"),
    }  # fmt: skip
    blocks = {
        "block_size": 16, "is_swizzled_scales": False, "use_triton_kernel": False, "use_dynamic_per_tensor_scale": True,
    }  # fmt: skip
    nvfp4 = {
        "block_size": 16, "orig_dtype": tagged("torch.dtype", "float32"), "is_swizzled_scales": True,
        "use_triton_kernel": False, "act_quant_kwargs": tagged("QuantizeTensorToNVFP4Kwargs", blocks),
    }  # fmt: skip
    pieces = {
        "a": {
            "qdata": codes(32, 64, dtype=torch.int8), "scale": some(32, 1),
            "zero_point": torch.zeros(32, 1, dtype=torch.int8), "act_quant_scale": torch.full((1, 1), 0.1),
            "act_pre_scale": some(64),
        },
        "b": {
            "qdata": codes(64, 16), "per_tensor_scale": torch.tensor(0.01),
            "scale": some(32, 16).to(torch.float8_e4m3fn),
        },
    }  # fmt: skip
    told: dict[str, Any] = {f"{name}.bias": {"_type": "Tensor"} for name in SHAPES}
    told |= {f"{name}.weight": {"_type": "Tensor"} for name in ("c", "last")} | {
        f"{name}.weight": {**tagged(kind, data), "_tensor_data_names": list(pieces[name])}
        for name, kind, data in (("a", "Int8Tensor", int8), ("b", "NVFP4Tensor", nvfp4))
    }
    metadata = {name: json.dumps(entry) for name, entry in told.items()} | {"tensor_names": json.dumps(list(told))}
    tensors = {f"{name}._weight_{piece}": each for name, own in pieces.items() for piece, each in own.items()}
    return tensors, {"quant_method": "torchao"}, metadata


# Tensors that the other tools store for one weight, fp32 [out, in]


def stored_by(store: Callable[[Tensor], Tensors]) -> Tensors:
    return {f"{layer}.{end}": each for layer in "ab" for end, each in store(some(*SHAPES[layer])).items()}


def nf4(weight: Tensor) -> Tensors:
    """In two levels. Any codes will do."""
    numbers = weight.numel()
    blocks = -(-numbers // 64)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    return {
        "weight": codes(numbers // 2, 1), "weight.absmax": codes(blocks),
        "weight.quant_map": TABLES["nf4"].clone(), "weight.nested_absmax": some(-(-blocks // 256)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip


def int8(weight: Tensor) -> Tensors:
    of_rows = {"SCB": some(len(weight)), "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": codes(*weight.shape, dtype=torch.int8), **of_rows}


def int4(weight: Tensor) -> Tensors:
    """Tensors of rows that are too short for groups."""
    rows, width = weight.shape
    scales = {end: some(rows, 1) for end in ("weight._scale", "weight._shift")}
    ones = {end: torch.ones(()) for end in ("input_scale", "output_scale")}
    return {"weight._data._data": codes(rows // 2, width), **scales, **ones}


def autoround() -> tuple[Tensors, dict]:
    """Four bits in groups with zero points, and three bits that cross words; a name and a pattern are left out."""
    tensors = {}
    for layer, (rows, columns), bits, groups in (("a", SHAPES["a"], 4, 2), ("b", SHAPES["b"], 3, 1)):
        tensors |= {
            f"{layer}.qweight": codes(columns * bits // 32, rows, dtype=torch.int32) * 0x1234567,
            f"{layer}.qzeros": codes(groups, rows * bits // 32, dtype=torch.int32) * 0x1234567,
            f"{layer}.scales": some(groups, rows).half(),
        }
    config = {
        "quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False,
        "data_type": "int", "block_name_to_quantize": "a,b,last", "autoround_version": "0.16.1",
        "extra_config": {"b": {"bits": 3, "group_size": -1}, "last.*": {"bits": 16}},
    }  # fmt: skip
    return tensors, config


def ranged(weight: Tensor) -> Tensors:
    return {
        "weight": weight.half(), "weight_quantizer._amax": weight.abs().amax(1, keepdim=True),
        "input_quantizer._amax": torch.tensor(3.0), "input_quantizer._pre_quant_scale": some(weight.shape[1]) + 0.1,
    }  # fmt: skip


def nvfp4(weight: Tensor) -> Tensors:
    rows, width = weight.shape
    return {
        "weight": codes(rows, width // 2), "weight_scale": some(rows, width // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(0.02),
    }  # fmt: skip


INT8_CONFIG = {
    "quant_method": "int8", "is_checkpoint_int8_serialized": True, "activation_scheme": "dynamic",
    "ignored_layers": ["c", "last"],
}  # fmt: skip


def int8_by_row(weight: Tensor) -> Tensors:
    return {"weight": codes(*weight.shape, dtype=torch.int8), "weight_scale": some(len(weight), 1)}


# SGLang and nunchaku, whose linears have sides of multiples of 128


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.last = (
            nn.Linear(128, 128),
            nn.Linear(128, 256),
            nn.Conv2d(8, 4, 3),
            nn.Linear(64, 16),
        )


FP8_CONFIG = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "ignored_layers": ["c", "last"],
}  # fmt: skip


def fp8_in_blocks() -> Tensors:
    found = {}
    for layer, rows in {"a": 128, "b": 256}.items():
        found[f"{layer}.weight"] = some(rows, 128).to(torch.float8_e4m3fn)
        found[f"{layer}.weight_scale_inv"] = some(rows // 128, 1)
    return found


class Single(nn.Module):
    """A single block of Flux, but for its attention's norms, and the last linear."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.norm, block.attn, block.proj_mlp = nn.Module(), nn.Module(), nn.Linear(128, 128)
        block.norm.linear, block.proj_out = nn.Linear(128, 384), nn.Linear(256, 128)
        for name in ("to_q", "to_k", "to_v"):
            block.attn.add_module(name, nn.Linear(128, 128))
        self.single_transformer_blocks, self.proj_out = nn.ModuleList([block]), nn.Linear(128, 4)


def w4a4(name: str, rows: int, columns: int, ends: tuple[str, ...], blocks: int = 64) -> Tensors:
    """A linear whose branch has rank 16; ``ends`` are the names of the branch's matrices and of the smoothing."""
    down, up, smooth = ends
    scales = some(columns // blocks, rows)
    tensors = {
        "qweight": codes(rows, columns // 2, dtype=torch.int8),
        down: some(columns, 16).half(), up: some(rows, 16).half(),
        "wscales": scales.half() if blocks == 64 else scales.to(torch.float8_e4m3fn),
        smooth: some(columns).half() + 0.5, "bias": some(rows).half(),
    }  # fmt: skip
    tensors |= {} if blocks == 64 else {"wcscales": some(rows).half()}
    return {f"{name}.{end}": tensor for end, tensor in tensors.items()}


def w4a16(name: str, rows: int, columns: int) -> Tensors:
    tensors = {"qweight": codes(rows // 4, columns // 2, dtype=torch.int32) * 0x1234567, "bias": some(rows)}
    tensors |= {end: some(columns // 64, rows).half() for end in ("wscales", "wzeros")}
    return {f"{name}.{end}": tensor for end, tensor in tensors.items()}


def nunchaku_lite() -> Reader:
    ends = ("proj_down", "proj_up", "smooth_factor")
    tensors = w4a4("a", 128, 128, ends) | w4a4("b", 256, 128, ends) | w4a16("last", 16, 64)
    config = {
        "quant_method": "nunchaku_lite", "compute_dtype": "float16",
        "svdq_w4a4": {"precision": "int4", "group_size": 64, "rank": 16, "targets": ["a", "b"]},
        "awq_w4a16": {"precision": "int4", "group_size": 64, "targets": ["last"]},
    }  # fmt: skip
    reader = "diffusers_nunchaku_lite"
    return folder("nunchaku_lite", reader, tensors, config, checkpoint=checkpoint_of(Wide))


def nunchaku() -> Reader:
    """A file of linears in rows and in columns, in INT4, in NVFP4 and in W4A16."""
    ends, block, file = ("lora_down", "lora_up", "smooth"), "single_transformer_blocks.0", "a.safetensors"
    checkpoint = checkpoint_of(Single, "FluxTransformer2DModel")
    tensors = w4a4(f"{block}.qkv_proj", 384, 128, ends) | w4a4(f"{block}.mlp_fc1", 128, 128, ends, blocks=16)
    tensors |= w4a4(f"{block}.out_proj", 128, 128, ends) | w4a4(f"{block}.mlp_fc2", 128, 128, ends)
    tensors |= w4a16(f"{block}.norm.linear", 384, 128)
    tensors |= {"proj_out.weight": some(4, 128).half(), "proj_out.bias": some(4)}
    sound = save_safetensors(tensors, {"model_class": "NunchakuFluxTransformer2dModel", "config": "{}"})
    damages = ways(
        *[(described, lambda recipe: {file: damaged_safetensors(sound, recipe)})] * 2,
        (st.tuples(st.sampled_from(sorted(tensors)), byte_edits), lambda drawn: {file: with_numbers(sound, *drawn)}),
        (document_edits, lambda edits: {file: damaged_metadata(sound, "model_class", edits)}),
    )
    return Reader("nunchaku", {file: sound}, weight=20, **damages, **reading("nunchaku", checkpoint, file, file))


def modelopt_state(layers: str) -> bytes:
    """As ModelOpt's checkpointing writes it, of these layers' quantizers."""
    properties = {
        "_num_bits": 8, "_axis": 0, "_block_sizes": None, "_narrow_range": False, "_bias": None, "_disabled": False,
        "_if_quant": True, "_fake_quant": True, "_rotate": False, "backend": None, "_unsigned": False,
    }  # fmt: skip
    changes = {"weight_quantizer": {}, "input_quantizer": {"_axis": None}, "output_quantizer": {"_disabled": True}}
    quantizers = {f"{layer}.{role}": properties | own for layer in layers for role, own in changes.items()}
    steps = [("quantize", {"config": {}, "metadata": {"quantizer_state": quantizers}})]
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        content = {"modelopt_state_dict": steps, "modelopt_version": "0.47.0"}
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return target.getvalue()
