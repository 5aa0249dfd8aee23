"""Denoisers of a few layers: folders of SDNQ, torchao, bitsandbytes, quanto, AutoRound, ModelOpt, servers, nunchaku.

What the project writes is written by its writers. What it only reads is made here by hand, because a run without those
libraries is to fuzz their readers too: bitsandbytes, quanto, and of SDNQ, torchao and AutoRound zero points, static
inputs with a factor, tiles, codes that cross words, and layers with settings of their own.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from sd_quant.interchange import READERS, TARGETS
from sd_quant.interchange.diffusers_bitsandbytes import TABLES
from sd_quant.interchange.holding import adapted
from sd_quant.models.parts import SharedInput
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.statistics import LayerStatistics, layer_kind, width_of

from ..unit.calibration.some_statistics import sample
from ..unit.interchange.conftest import recipe_of
from .harness import Reader
from .mutations import byte_edits, changed, document_edits, edited, pickle_edits, repickled, to_json, with_pickle
from .shared import Files, damaged_metadata, damaged_safetensors, described, digest, header_of, ways, with_numbers

CONFIG, FOLDER = "config.json", "transformer"
KIND = "FluxTransformer2DModel"
Tensors = dict[str, Tensor]


class Few(nn.Module):
    """A single block of Flux, but for its attention's norms, a convolution, and the last linear."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.norm, block.attn, block.proj_mlp = nn.Module(), nn.Module(), nn.Linear(128, 128)
        block.norm.linear, block.proj_out = nn.Linear(128, 384), nn.Linear(256, 128)
        for name in ("to_q", "to_k", "to_v"):
            block.attn.add_module(name, nn.Linear(128, 128))
        self.single_transformer_blocks, self.conv = nn.ModuleList([block]), nn.Conv2d(8, 4, 3)
        self.proj_out = nn.Linear(128, 4)

    def to_json_string(self) -> str:
        """Of the config, which a denoiser of diffusers has."""
        return "{}"


torch.manual_seed(0)
NETWORK = Few()
LAYERS = {name: each for name, each in NETWORK.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)}
PART = SimpleNamespace(component=FOLDER, prefix="", contract=SimpleNamespace(weights=torch.float16))
CHECKPOINT: Any = SimpleNamespace(
    family=SimpleNamespace(DENOISER=FOLDER, NETWORKS={FOLDER: KIND}, PIPELINES=("FluxPipeline",), NAME="flux"),
    parts=lambda: {FOLDER: PART},
    build=lambda: {FOLDER: deepcopy(NETWORK)},
    components={FOLDER: {name: each.detach().half() for name, each in NETWORK.named_parameters()}},
)
ROLES = {"conv": "conv", "proj_mlp": "ffn", "0.proj_out": "ffn", "to_q": "qkv", "to_k": "qkv", "to_v": "qkv"}
BLOCK = "single_transformer_blocks.0."
PLAIN = {"smoothing": "none", "alpha": None}
ALONE = PLAIN | {"activation": None}
WRITTEN = {  # by reader: the target that writes it, and what its layers have in turn
    "diffusers_sdnq": ("diffusers_sdnq", [("int4", ALONE | {"rank": 0.1}), ("int8", ALONE), ("fp8", ALONE)]),
    "diffusers_torchao": ("diffusers_torchao", [
        ("int8", PLAIN | {"per_token": True}), ("int8", ALONE | {"per_channel": True}),
        ("fp8", PLAIN | {"per_channel": True, "per_token": True}),
    ]),
    "autoround": ("diffusers_autoround", [("int4", ALONE), ("int8", ALONE | {"per_channel": False})]),
    "modelopt": ("diffusers_modelopt", [("int8", {"smoothing": "modelopt"})]),
    "modelopt_hf": ("modelopt_export", [("nvfp4", PLAIN)]),
    "vllm_int8": ("vllm_int8", [("int8", PLAIN | {"per_token": True})]),
    "sglang_fp8": ("sglang_fp8", [("fp8_128x128", PLAIN | {"activation": "fp8_128"})]),
    "nunchaku_lite": ("diffusers_nunchaku_lite", [("int4", {"rank": 0.125})]),
    "nunchaku": ("nunchaku", [("int4", PLAIN | {"rank": 0.125})]),
    "nunchaku_nvfp4": ("nunchaku", [("nvfp4", PLAIN | {"rank": 0.125})]),
}  # fmt: skip


def folders(scratch: Path) -> list[Reader]:
    """One for each kind."""
    scratch.mkdir(parents=True, exist_ok=True)
    return [
        *(of_written(name, *row, scratch / name) for name, row in WRITTEN.items()),
        by_hand("bnb_nf4", "diffusers_bitsandbytes", stored_by(nf4), NF4),
        by_hand("bnb_int8", "diffusers_bitsandbytes", stored_by(int8), INT8),
        by_hand("quanto", "diffusers_quanto", stored_by(int4), {"quant_method": "quanto", "weights_dtype": "int4"}),
        by_hand("sdnq_with_zero_points", "diffusers_sdnq", *sdnq()),
        by_hand("torchao_with_inputs", "diffusers_torchao", *torchao()),
        by_hand("autoround_asymmetric", "diffusers_autoround", *autoround()),
        by_hand("quark", "diffusers_quark", *quark()),
        by_hand("quark_with_branch", "diffusers_quark", *quark_with_branch()),
    ]


def of_written(name: str, target: str, recipes: Sequence[tuple[str, dict]], folder: Path) -> Reader:
    """What the target writes of an assignment in which one layer after the other has the next recipe's row."""
    (folder / FOLDER).mkdir(parents=True)
    (folder / FOLDER / CONFIG).write_bytes(to_json({"_class_name": KIND}))
    rows = [adapted(derived(fmt, options), TARGETS[target]) for fmt, options in recipes]
    assignment = {layer: rows[number % len(rows)][layer] for number, layer in enumerate(rows[0])}
    opened = TARGETS[target].module.write(CHECKPOINT, assignment, folder)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    where = str(opened.relative_to(folder))
    return of_files(name, target, files if opened.is_dir() else {where: files[where]}, where)


def derived(fmt: str, options: Mapping[str, Any]) -> dict:
    random = torch.Generator().manual_seed(0)
    statistics = {
        name: LayerStatistics(layer_kind(layer), torch.rand(2, of_amax(layer), generator=random) + 1,
                              sample(random, 8, width_of(layer), dtype=torch.float16))
        for name, layer in LAYERS.items()
    }  # fmt: skip
    roles = {name: next((role for end, role in ROLES.items() if name.endswith(end)), "excluded") for name in LAYERS}
    weights = {name: layer.weight.detach() for name, layer in LAYERS.items()}
    inputs = [SharedInput((name,)) for name, role in roles.items() if role in ("ffn", "qkv")]
    return derive(roles, weights.__getitem__, statistics, recipe_of(fmt, **options), inputs, bias_of=bias_of)


def of_amax(layer: nn.Module) -> int:
    return width_of(layer) if isinstance(layer, nn.Linear) else 2


def bias_of(name: str) -> Tensor:
    return LAYERS[name].bias.detach()


def of_files(name: str, reader: str, files: Mapping[str, bytes], where: str) -> Reader:
    """Damaged are the weights' header, texts and numbers, the config's document, and ModelOpt's state."""
    damages = []
    for path, data in files.items():
        if path.endswith(".safetensors"):
            damages += list(of_weights(path, data)) * 2
        elif path.endswith(CONFIG):
            damages += list(of_config(path, data))
        else:
            damages += list(of_state(path, data)) * 2
    return Reader(name, files, weight=20, **ways(*damages), **reading(reader, where))


Way = tuple[st.SearchStrategy, Callable[[Any], Files]]


def of_weights(path: str, data: bytes) -> Iterator[Way]:
    header, _ = header_of(data)
    yield described, lambda recipe: {path: damaged_safetensors(data, recipe)}
    numbers = st.tuples(st.sampled_from(sorted(header.keys() - {"__metadata__"})), byte_edits)
    yield numbers, lambda drawn: {path: with_numbers(data, *drawn)}
    if places := texts(data):
        yield byte_edits, lambda edits: {path: edited(data, edits, places)}
    known = st.tuples(st.sampled_from(sorted(header["__metadata__"])), document_edits)
    yield known, lambda drawn: {path: damaged_metadata(data, *drawn)}


def of_config(path: str, data: bytes) -> Iterator[Way]:
    yield document_edits, lambda edits: {path: to_json(changed(json.loads(data), edits))}
    yield byte_edits, lambda edits: {path: edited(data, edits)}


def of_state(path: str, data: bytes) -> Iterator[Way]:
    yield byte_edits, lambda edits: {path: edited(data, edits)}
    yield pickle_edits, lambda edits: {path: with_pickle(data, lambda pickle: repickled(pickle, edits))}


def texts(data: bytes) -> list[tuple[int, int]]:
    """Where the JSON lies that is stored as a tensor."""
    found, position = [], data.find(b'{"quant_type"')
    while position >= 0:
        found.append((position, data.index(b"}", position) + 1))
        position = data.find(b'{"quant_type"', position + 1)
    return found


def reading(reader: str, where: str) -> dict[str, Callable]:
    """A reader's ``read`` and ``check`` of a folder, or of the file ``where`` in it."""
    expected = {name: tuple(each.shape) for name, each in NETWORK.named_parameters()}

    def read(folder: Path) -> tuple | None:
        path = folder / where
        if not READERS[reader].recognizes(path) and path.is_dir():
            return None
        found = READERS[reader].module.read(path, CHECKPOINT)
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
        assert shapes | {parameter: own[1] for parameter, own in parameters.items()} == expected
        [weights] = path.rglob("*.safetensors")
        assert bits * sum(map(math.prod, expected.values())) / 8 <= weights.stat().st_size

    return {"read": read, "check": check}


# What nothing here writes: files in which the linears Q and OUT are stored as a tool does, and all else in fp16

Q, OUT = f"{BLOCK}attn.to_q", f"{BLOCK}proj_out"  # [128, 128] and [128, 256]
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}


def by_hand(name: str, reader: str, quantized: Tensors, quantization: dict, metadata: dict | None = None) -> Reader:
    weights = {f"{layer}.weight" for layer in LAYERS if any(each.startswith(f"{layer}.") for each in quantized)}
    plain = {parameter: each for parameter, each in CHECKPOINT.components[FOLDER].items() if parameter not in weights}
    config = to_json({"_class_name": KIND, "quantization_config": quantization})
    stored = save_safetensors(plain | quantized, metadata or {"format": "pt"})
    files = {f"{FOLDER}/diffusion_pytorch_model.safetensors": stored, f"{FOLDER}/{CONFIG}": config}
    return of_files(name, reader, files, ".")


def stored_by(store: Callable[[Tensor], Tensors]) -> Tensors:
    """``store`` makes what a tool has for a weight [out, in], by the ends of their names."""
    return {f"{layer}.{end}": each for layer in (Q, OUT) for end, each in store(LAYERS[layer].weight).items()}


def some(*shape: int) -> Tensor:
    """Different numbers from 0 to 1, the same every time."""
    return (torch.arange(math.prod(shape)) * 0.37 % 1).view(shape)


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """All that a byte can be, one after the other."""
    return torch.arange(math.prod(shape)).to(dtype).view(shape)


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
    """In groups of 128 inputs, two codes a byte."""
    rows, width = weight.shape
    scales = {end: some(rows * width // 128, 1) for end in ("weight._scale", "weight._shift")}
    ones = {end: torch.ones(()) for end in ("input_scale", "output_scale")}
    return {"weight._data._data": codes(rows * width // 256, 128), **scales, **ones}


def sdnq() -> tuple[Tensors, dict]:
    """Four bits in groups with zero points and a branch, codes turned for products, and a packed convolution."""
    tensors = {
        f"{Q}.weight": codes(8192), f"{Q}.scale": some(128, 8, 1) + 0.1, f"{Q}.zero_point": some(128, 8, 1),
        f"{Q}.svd_up": some(128, 2), f"{Q}.svd_down": some(2, 128),
        f"{OUT}.weight": codes(256, 128, dtype=torch.int8), f"{OUT}.scale": some(1, 128) + 0.1,
        "conv.weight": codes(36, 5), "conv.scale": some(4, 1, 3, 3),
    }  # fmt: skip
    config = {
        "quant_method": "sdnq", "weights_dtype": "uint4", "group_size": 16, "use_hadamard": False, "use_svd": True,
        "hadamard_group_size": 256, "use_codebook": False, "scale_dtype": None, "zero_point_dtype": None,
        "use_quantized_matmul": False, "use_quantized_matmul_conv": False, "quantized_matmul_dtype": None,
        "modules_to_not_convert": [f".{layer}" for layer in LAYERS if layer not in (Q, OUT, "conv")],
        "modules_to_not_use_matmul": ["*to_q*", ".conv"], "sdnq_version": "0.2.8",
        "modules_dtype_dict": {"minimum_5bit": ["conv"]},
        "modules_quant_config": {f".{OUT}": {"weights_dtype": "int8", "use_quantized_matmul": True, "group_size": -1}},
    }  # fmt: skip
    return tensors, config


def torchao() -> tuple[Tensors, dict, dict[str, str]]:
    """Codes with static inputs and a factor in front, and NVFP4 in tiles with inputs."""

    def tagged(kind: str, data: Any) -> dict:
        return {"_type": kind, "_data": data}

    inputs = tagged("QuantizeTensorToInt8Kwargs", {
        "granularity": tagged("PerTensor", {}), "mapping_type": tagged("MappingType", "SYMMETRIC"),
        "reduce_range": False,
    })  # fmt: skip
    kinds = {
        Q: tagged("Int8Tensor", {
            "act_quant_kwargs": inputs, "reduce_range": False, "block_size": [1, 128],
            "dtype": tagged("torch.dtype", "bfloat16"),
        }),
        OUT: tagged("NVFP4Tensor", {
            "block_size": 16, "orig_dtype": tagged("torch.dtype", "float32"), "is_swizzled_scales": True,
            "use_triton_kernel": False, "act_quant_kwargs": tagged("QuantizeTensorToNVFP4Kwargs", {
                "block_size": 16, "is_swizzled_scales": False, "use_triton_kernel": False,
                "use_dynamic_per_tensor_scale": True,
            }),
        }),
    }  # fmt: skip
    pieces = {
        Q: {
            "qdata": codes(128, 128, dtype=torch.int8), "scale": some(128, 1),
            "zero_point": torch.zeros(128, 1, dtype=torch.int8), "act_quant_scale": torch.full((1, 1), 0.1),
            "act_pre_scale": some(128),
        },
        OUT: {
            "qdata": codes(128, 128), "per_tensor_scale": torch.tensor(0.01),
            "scale": some(32, 64).to(torch.float8_e4m3fn),
        },
    }  # fmt: skip
    told: dict[str, Any] = {parameter: {"_type": "Tensor"} for parameter in CHECKPOINT.components[FOLDER]}
    told |= {f"{name}.weight": {**kind, "_tensor_data_names": list(pieces[name])} for name, kind in kinds.items()}
    metadata = {name: json.dumps(entry) for name, entry in told.items()} | {"tensor_names": json.dumps(list(told))}
    tensors = {f"{name}._weight_{piece}": each for name, own in pieces.items() for piece, each in own.items()}
    return tensors, {"quant_method": "torchao"}, metadata


def autoround() -> tuple[Tensors, dict]:
    """Four bits in groups with zero points, and three bits that cross words; patterns of what is left out."""
    tensors = {}
    for layer, columns, bits, groups in ((Q, 128, 4, 4), (OUT, 256, 3, 1)):
        tensors |= {
            f"{layer}.qweight": codes(columns * bits // 32, 128, dtype=torch.int32) * 0x1234567,
            f"{layer}.qzeros": codes(groups, 128 * bits // 32, dtype=torch.int32) * 0x1234567,
            f"{layer}.scales": some(groups, 128).half(),
        }
    config = {
        "quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False,
        "data_type": "int", "block_name_to_quantize": "single_transformer_blocks", "autoround_version": "0.16.1",
        "extra_config": {
            OUT: {"bits": 3, "group_size": -1},
            **{f".*{end}.*": {"bits": 16} for end in ("to_k", "to_v", "norm.linear", "proj_mlp")},
        },
    }  # fmt: skip
    return tensors, config


def quark() -> tuple[Tensors, dict]:
    """INT8 with static inputs, and four bits in words in one layer."""
    spec = {"dtype": "int8", "is_dynamic": False, "qscheme": "per_tensor"}
    tensors = {
        f"{Q}.weight": codes(128, 128, dtype=torch.int8), **in_words(OUT),
        **{f"{Q}.{of}_quantizer.scale": torch.tensor(0.1) for of in ("weight", "input")},
    }  # fmt: skip
    return tensors, by_quark({"weight": spec, "input_tensors": spec}, {"*proj_out": {"weight": {"dtype": "int4"}}})


def quark_with_branch() -> tuple[Tensors, dict]:
    branch = {
        "correction.l1.weight": some(4, 256),
        "correction.l2.weight": some(128, 4),
        "smooth_factor": some(256) + 1,
    }
    tensors = {f"{OUT}.{end}": tensor for end, tensor in branch.items()}
    return in_words(f"{OUT}.layer") | tensors, by_quark({"weight": {"dtype": "int4"}})


def in_words(layer: str) -> Tensors:
    return {
        f"{layer}.weight": codes(256, 16, dtype=torch.int32) * 0x1234567,
        f"{layer}.weight_quantizer.scale": some(16, 128),
        f"{layer}.weight_quantizer.zero_point": torch.zeros(16, 16, dtype=torch.int32),
    }


def by_quark(spec: dict, exceptions: dict | None = None) -> dict:
    return {
        "quant_method": "quark", "global_quant_config": spec, "layer_quant_config": exceptions,
        "export": {"pack_method": "reorder"},
    }  # fmt: skip
