"""Quantized denoisers of other tools: folders, GGUF, and safetensors files of ComfyUI and Black Forest Labs.

The network is a Flux with one block of each kind. Where a target writes a format, the sample is what it writes of an
assignment in which the authors' tensors have its recipes in turn. What is read and not written is made here by hand,
because a run without the tools' libraries is to fuzz their readers too.
"""

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.interchange import READERS, gguf
from sd_quant.interchange.comfyui import METADATA
from sd_quant.interchange.comfyui_marks import MARK
from sd_quant.interchange.diffusers_bitsandbytes import TABLES
from sd_quant.names.authors import authors_places

from ..unit.interchange.conftest import INT4_ROWS, PER_ROW_FP8, PLAIN, ROTATED, W4A8, recipe_of
from ..unit.tiny import TOKENS, Tiny
from ..zoo.families import TINY, redraw
from .harness import Reader
from .mutations import Files, Way, byte_edits, damages, digest, edited, to_json, ways

CONFIG, FOLDER = "config.json", "transformer"
ALONE = PLAIN | {"activation": None}
WRITTEN = {  # by reader: the target that writes it, and what its layers have in turn
    "comfyui": ("comfyui", [
        ("fp8", PLAIN | {"per_channel": False}), ("int8", ROTATED | {"rotation": 16}), ("nvfp4", PLAIN),
        ("mxfp8", PLAIN), ("int4", ALONE), ("int4_per_row", INT4_ROWS), ("int4_in_int8", W4A8),
    ]),
    "diffusers_bfl": ("diffusers_bfl", [("fp8", PER_ROW_FP8), ("nvfp4", PLAIN)]),
    "diffusers_sdnq": ("diffusers_sdnq", [("int4", ALONE | {"rank": 0.1}), ("int8", ALONE), ("fp8", ALONE)]),
    "diffusers_torchao": ("diffusers_torchao", [
        ("int8", ROTATED), ("int8", ALONE | {"per_channel": True}), ("fp8", PER_ROW_FP8),
        ("int8", {"per_channel": False, "smoothing": "modelopt"}),
    ]),
    "autoround": ("diffusers_autoround", [("int4", ALONE), ("int8", ALONE | {"per_channel": False})]),
    "modelopt": ("diffusers_modelopt", [("int8", {"smoothing": "modelopt"})]),
    "modelopt_hf": ("modelopt_export", [("nvfp4", PLAIN)]),
    "vllm_int8": ("vllm_int8", [("int8", ROTATED)]),
    "sglang_fp8": ("sglang_fp8", [("fp8_128x128", PLAIN | {"activation": "fp8_128"})]),
    "nunchaku_lite": ("diffusers_nunchaku_lite", [("int4", {"rank": 0.125})]),
    "nunchaku": ("nunchaku", [("int4", PLAIN | {"rank": 0.125})]),
    "nunchaku_nvfp4": ("nunchaku", [("nvfp4", PLAIN | {"rank": 0.125})]),
}  # fmt: skip
Tensors = dict[str, Tensor]


def denoisers(scratch: Path) -> list[Reader]:
    """One for each kind of file."""
    flux = Flux(scratch)
    samples = {"gguf": ("gguf", *gguf_file(flux.stored_shapes))}
    samples |= {name: flux.written(target, recipes, scratch / name) for name, (target, recipes) in WRITTEN.items()}
    samples |= {name: (reader, flux.by_hand(*made), ".") for name, (reader, made) in by_hand(flux).items()}
    return [flux.reader(name, *sample) for name, sample in samples.items()]


class Flux:
    """A checkpoint whose denoiser is that small, which is not damaged: a reader reads the file alone."""

    def __init__(self, scratch: Path):
        folder = scratch / "flux"
        TINY["flux"](folder)
        kind = diffusers.FluxTransformer2DModel
        config = kind.load_config(folder / FOLDER)
        network = kind.from_config(config, num_layers=1, num_single_layers=1)
        redraw(network)
        network.save_pretrained(folder / FOLDER)
        self.tiny = Tiny(open_pipeline(folder, "flux", TOKENS))
        checkpoint, plain = self.tiny.checkpoint, dict(self.tiny.checkpoint.components[FOLDER])
        self.shapes = {name: tuple(each.shape) for name, each in plain.items()}
        self.halves = {name: each.half() for name, each in plain.items()}
        self.places = authors_places(network, self.shapes)
        self.layers = {name for name, each in network.named_modules() if isinstance(each, nn.Linear)}
        build = cache(checkpoint.build)  # once, as it takes longer than reading a file
        self.for_readers: Any = SimpleNamespace(family=checkpoint.family, parts=checkpoint.parts, build=build)

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the authors' tensors."""
        return {part.name: (part.of, *self.shapes[name][1:]) for name, (part, *_) in self.places.items()}

    def written(self, target: str, recipes: Sequence[tuple[str, dict]], folder: Path) -> tuple[str, Files, str]:
        """The reader's name, the files and the one that is opened."""
        rows = [self.tiny.assignment(recipe_of(fmt, **options), target) for fmt, options in recipes]
        stored = list(self.stored_shapes)
        turns = {layer: stored.index(self.places[f"{layer}.weight"][0].name) for layer in rows[0]}
        assignment = {layer: rows[turn % len(rows)][layer] for layer, turn in turns.items()}
        opened = self.tiny.written(assignment, target, folder)
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        where = str(opened.relative_to(folder))
        if target == "comfyui":
            files[where] = with_what_is_only_read(files[where])
        return target, files if opened.is_dir() else {where: files[where]}, where

    def by_hand(self, quantized: Tensors, quantization: dict, metadata: dict | None = None) -> Files:
        """A folder in which layers are stored as a tool does, and all else in fp16."""
        stored = [layer for layer in self.layers if any(each.startswith(f"{layer}.") for each in quantized)]
        plain = {name: each for name, each in self.halves.items() if name.removesuffix(".weight") not in stored}
        config = to_json({"_class_name": "FluxTransformer2DModel", "quantization_config": quantization})
        tensors = save_safetensors(plain | quantized, metadata or {"format": "pt"})
        return {f"{FOLDER}/diffusion_pytorch_model.safetensors": tensors, f"{FOLDER}/{CONFIG}": config}

    def reader(self, name: str, reader: str, files: Files, where: str) -> Reader:
        decodes = reader != "gguf" or find_spec("gguf") is not None

        def read(folder: Path) -> tuple | None:
            path = folder / where
            if not READERS[reader].recognizes(path) and path.is_dir():
                return None
            found = READERS[reader].module.read(path, self.for_readers)
            layers = {
                layer: (each.format, each.scales, each.bits, str(each.inputs), each.weight.shape,
                        digest(each.weight.read()) if decodes else None,
                        None if each.inputs is None else digest(each.inputs(torch.ones(40, each.weight.shape[1]))))
                for layer, each in found.layers.items()
            }  # fmt: skip
            return layers, {each: digest(tensor.read()) for each, tensor in found.parameters.items()}, found.bits

        def check(folder: Path, found: tuple | None) -> None:
            """The whole network, of as many bytes as the file has."""
            if found is None:
                return
            layers, parameters, bits = found
            shapes = {f"{layer}.weight": own[4] for layer, own in layers.items()}
            assert shapes | {parameter: own[1] for parameter, own in parameters.items()} == self.shapes
            [weights] = [each for each in folder.rglob("*") if each.suffix in (".safetensors", ".gguf")]
            assert bits * sum(map(math.prod, self.shapes.values())) / 8 <= weights.stat().st_size

        given = ways(*of_gguf(where, files[where])) if reader == "gguf" else damages(files)
        return Reader(name, files, read=read, check=check, **given)


def with_what_is_only_read(sound: bytes) -> bytes:
    """ComfyUI's file with half of its marks in the header, a layer in float8_e5m2, and a ``pre_quant_scale``."""
    tensors = load_safetensors(sound)
    inside = sorted(name for name in tensors if name.endswith(MARK))
    marked = {name.removesuffix(f".{MARK}"): json.loads(bytes(tensors[name].tolist())) for name in inside}
    first = {mark["format"]: layer for layer, mark in reversed(marked.items())}
    wide, scaled = first["float8_e4m3fn"], first["nvfp4"]
    marked[wide]["format"] = "float8_e5m2"
    tensors[f"{wide}.weight"] = tensors[f"{wide}.weight"].float().to(torch.float8_e5m2)
    tensors[f"{wide}.{MARK}"] = text_tensor(marked[wide])
    tensors[f"{scaled}.pre_quant_scale"] = torch.ones(2 * tensors[f"{scaled}.weight"].shape[1])
    marks = {name.removesuffix(f".{MARK}"): marked[name.removesuffix(f".{MARK}")] for name in inside[::2]}
    kept = {name: each for name, each in tensors.items() if name not in inside[::2]}
    return save_safetensors(kept, {METADATA: json.dumps({"format_version": "1.0", "layers": marks})})


def text_tensor(document: dict) -> Tensor:
    return torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)


# GGUF


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def gguf_file(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Files, str]:
    """A file of zeros and of scales of 1, by the description of the format. Some tensors are stored as rows of 256."""
    infos, data = b"", b""
    entries = [text("general.architecture") + struct.pack("<I", 8) + text("flux"),
               text("general.alignment") + struct.pack("<II", 4, 32),
               text("a list") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
               text("numbers") + struct.pack("<IIQ", 9, 6, 3) + bytes(12)]  # fmt: skip
    for number, (name, shape) in enumerate(shapes.items()):
        count, (kind, size) = math.prod(shape), [(2, 18), (8, 34), (1, 64)][number % 3]  # Q4_0, Q8_0, F16
        content = (struct.pack("<e", 1) + bytes(range(size - 2))) * (count // 32) if kind > 1 else bytes(2 * count)
        if len(shape) < 2:
            kind, content = 0, bytes(4 * count)
        elif kind > 1 and number % 4 == 0:
            key = text(f"comfy.gguf.orig_shape.{name}")
            entries.append(key + struct.pack("<IIQ2i", 9, 5, 2, *shape))
            shape = (count // 256, 256)
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += content + bytes(-len(content) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(entries)) + b"".join(entries) + infos
    return {"a.gguf": header + bytes(-len(header) % 32) + data}, "a.gguf"


def of_gguf(path: str, sound: bytes) -> Iterator[Way]:
    header = gguf.Header(sound)
    name = st.sampled_from([name.encode() for name, *_ in header.parsed()[2]])
    hot = [(0, 24), (24, 500), (24, header.position), (header.position - 500, header.position)]

    def behind(name: bytes) -> int:
        """Where the sides, type and offset of a tensor are."""
        return sound.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)

    def of_tensor(drawn: tuple) -> Files:
        name, edits = drawn
        return {path: edited(sound, edits, [(behind(name), behind(name) + 4 + 16 + 12)])}

    def renamed(drawn: tuple) -> Files:
        name, other = drawn
        at = behind(name)
        return {path: sound[: at - len(name)] + (other * 9)[: len(name)] + sound[at:]}

    yield byte_edits, lambda edits: {path: edited(sound, edits, hot)}
    yield from [(st.tuples(name, byte_edits), of_tensor)] * 2
    yield st.tuples(name, name), renamed


# What nothing here writes: files in which the linears Q and OUT, and sometimes a third, are stored as a tool does

BLOCK = "single_transformer_blocks.0."
Q, OUT, MLP = f"{BLOCK}attn.to_q", f"{BLOCK}proj_out", f"{BLOCK}proj_mlp"  # [128, 128], [128, 640] and [512, 128]
STATIC, FOUR_BITS = {"dtype": "int8", "is_dynamic": False, "qscheme": "per_tensor"}, {"weight": {"dtype": "int4"}}
SHAPES = {Q: (128, 128), OUT: (128, 640), MLP: (512, 128)}


def by_hand(flux: Flux) -> dict[str, tuple[str, tuple]]:
    """The reader, and what ``Flux.by_hand`` takes, by name."""
    bnb, in_8_bits = "diffusers_bitsandbytes", {"load_in_8bit": True, "llm_int8_threshold": 6.0}
    return {
        "bnb_nf4": (bnb, (of_both(nf4), {"quant_method": "bitsandbytes", "load_in_4bit": True})),
        "bnb_int8": (bnb, (of_both(int8), {"quant_method": "bitsandbytes", **in_8_bits})),
        "quanto": ("diffusers_quanto", (of_both(int4), {"quant_method": "quanto", "weights_dtype": "int4"})),
        "sdnq_with_zero_points": ("diffusers_sdnq", sdnq(flux.layers)),
        "torchao_nvfp4": ("diffusers_torchao", torchao(flux.shapes)),
        "autoround_asymmetric": ("diffusers_autoround", autoround()),
        "quark": ("diffusers_quark", quark({"weight": STATIC, "input_tensors": STATIC}, in_words(MLP, 512, 128) | {
            f"{Q}.weight": codes(128, 128, dtype=torch.int8),
            **{f"{Q}.{of}_quantizer.scale": torch.tensor(0.1) for of in ("weight", "input")},
        }, {"*proj_mlp": FOUR_BITS})),
        "quark_with_branch": ("diffusers_quark", quark(FOUR_BITS, in_words(f"{OUT}.layer", 128, 640) | {
            f"{OUT}.correction.l1.weight": some(4, 640), f"{OUT}.correction.l2.weight": some(128, 4),
            f"{OUT}.smooth_factor": some(640) + 1,
        })),
    }  # fmt: skip


def of_both(store: Callable[[int, int], Tensors]) -> Tensors:
    """``store`` makes what a tool has for a weight [out, in], by the ends of their names."""
    return {f"{layer}.{end}": each for layer in (Q, OUT) for end, each in store(*SHAPES[layer]).items()}


def some(*shape: int) -> Tensor:
    """Different numbers from 0 to 1, the same every time."""
    return (torch.arange(math.prod(shape)) * 0.37 % 1).view(shape)


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """All that a byte can be, one after the other."""
    return torch.arange(math.prod(shape)).to(dtype).view(shape)


def words_of(*shape: int) -> Tensor:
    return codes(*shape, dtype=torch.int32) * 0x1234567


def nf4(rows: int, width: int) -> Tensors:
    """In two levels. Any codes will do."""
    blocks = -(-rows * width // 64)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, width],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    return {
        "weight": codes(rows * width // 2, 1), "weight.absmax": codes(blocks),
        "weight.quant_map": TABLES["nf4"].clone(), "weight.nested_absmax": some(-(-blocks // 256)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": text_tensor(state),
    }  # fmt: skip


def int8(rows: int, width: int) -> Tensors:
    of_rows = {"SCB": some(rows), "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": codes(rows, width, dtype=torch.int8), **of_rows}


def int4(rows: int, width: int) -> Tensors:
    """In groups of 128 inputs, two codes a byte."""
    scales = {end: some(rows * width // 128, 1) for end in ("weight._scale", "weight._shift")}
    ones = {end: torch.ones(()) for end in ("input_scale", "output_scale")}
    return {"weight._data._data": codes(rows * width // 256, 128), **scales, **ones}


def sdnq(layers: Collection[str]) -> tuple[Tensors, dict]:
    """Four bits in groups with zero points and a branch, codes turned for products, and five bits that cross bytes."""
    tensors = {
        f"{Q}.weight": codes(8192), f"{Q}.scale": some(128, 8, 1) + 0.1, f"{Q}.zero_point": some(128, 8, 1),
        f"{Q}.svd_up": some(128, 2), f"{Q}.svd_down": some(2, 128),
        f"{OUT}.weight": codes(640, 128, dtype=torch.int8), f"{OUT}.scale": some(1, 128) + 0.1,
        f"{MLP}.weight": codes(8192, 5), f"{MLP}.scale": some(512, 1),
    }  # fmt: skip
    config = {
        "quant_method": "sdnq", "weights_dtype": "uint4", "group_size": 16, "use_hadamard": False, "use_svd": True,
        "hadamard_group_size": 256, "use_codebook": False, "scale_dtype": None, "zero_point_dtype": None,
        "use_quantized_matmul": False, "use_quantized_matmul_conv": False, "quantized_matmul_dtype": None,
        "modules_to_not_convert": [f".{layer}" for layer in layers if layer not in SHAPES],
        "modules_to_not_use_matmul": ["*to_q*", f".{MLP}"], "sdnq_version": "0.2.8",
        "modules_quant_config": {
            f".{OUT}": {"weights_dtype": "int8", "use_quantized_matmul": True, "group_size": -1, "use_svd": False},
            f".{MLP}": {"weights_dtype": "int5", "group_size": -1, "use_svd": False},
        },
    }  # fmt: skip
    return tensors, config


def torchao(parameters: Collection[str]) -> tuple[Tensors, dict, dict[str, str]]:
    """NVFP4 in tiles, with inputs."""
    blocks = {"block_size": 16, "is_swizzled_scales": False, "use_triton_kernel": False}
    inputs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": blocks | {"use_dynamic_per_tensor_scale": True}}
    pieces = {
        "qdata": codes(128, 320), "per_tensor_scale": torch.tensor(0.01),
        "scale": some(32, 160).to(torch.float8_e4m3fn),
    }  # fmt: skip
    told: dict[str, Any] = {parameter: {"_type": "Tensor"} for parameter in parameters}
    told[f"{OUT}.weight"] = {"_type": "NVFP4Tensor", "_tensor_data_names": list(pieces), "_data": blocks | {
        "orig_dtype": {"_type": "torch.dtype", "_data": "float32"}, "is_swizzled_scales": True,
        "act_quant_kwargs": inputs,
    }}  # fmt: skip
    metadata = {name: json.dumps(entry) for name, entry in told.items()} | {"tensor_names": json.dumps(list(told))}
    return {f"{OUT}._weight_{piece}": each for piece, each in pieces.items()}, {"quant_method": "torchao"}, metadata


def autoround() -> tuple[Tensors, dict]:
    """Four bits in groups with zero points, and three bits that cross words; patterns of what is left out."""
    tensors = {}
    for layer, columns, bits, groups in ((Q, 128, 4, 4), (OUT, 640, 3, 1)):
        tensors |= {
            f"{layer}.qweight": words_of(columns * bits // 32, 128),
            f"{layer}.qzeros": words_of(groups, 128 * bits // 32), f"{layer}.scales": some(groups, 128).half(),
        }  # fmt: skip
    config = {
        "quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False,
        "data_type": "int", "block_name_to_quantize": "single_transformer_blocks", "autoround_version": "0.16.1",
        "extra_config": {
            OUT: {"bits": 3, "group_size": -1},
            **{f".*{end}.*": {"bits": 16} for end in ("to_k", "to_v", "norm.linear", "proj_mlp")},
        },
    }  # fmt: skip
    return tensors, config


def quark(spec: dict, tensors: Tensors, exceptions: dict | None = None) -> tuple[Tensors, dict]:
    export = {"pack_method": "reorder"}
    config = {"quant_method": "quark", "global_quant_config": spec, "layer_quant_config": exceptions, "export": export}
    return tensors, config


def in_words(layer: str, rows: int, width: int) -> Tensors:
    return {
        f"{layer}.weight": words_of(width, rows // 8), f"{layer}.weight_quantizer.scale": some(width // 16, rows),
        f"{layer}.weight_quantizer.zero_point": torch.zeros(width // 16, rows // 8, dtype=torch.int32),
    }  # fmt: skip
