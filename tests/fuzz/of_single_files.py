"""Other people's denoisers as single files: GGUF, safetensors with ComfyUI's marks, and Black Forest Labs'."""

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors
from torch import Tensor

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.interchange import READERS, gguf
from sd_quant.interchange.denoiser import QuantizedDenoiser, needed
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import authors_places

from ..zoo.families import TINY
from .harness import Reader
from .mutations import byte_edits, document_edits, edited
from .shared import Files, damaged_metadata, damaged_safetensors, header_of, ways, with_header, with_numbers


def single_files(scratch: Path) -> list[Reader]:
    """A checkpoint of a tiny SDXL, which is not damaged: a reader reads only the file."""
    TINY["sdxl"](scratch / "single_files")
    opened = open_pipeline(scratch / "single_files", "sdxl")
    build = cache(opened.build)  # once, as it takes longer than reading a file
    checkpoint = SimpleNamespace(family=opened.family, parts=opened.parts, build=build)
    return [of_gguf(checkpoint), of_comfyui(checkpoint), of_bfl(checkpoint)]


def shapes_in_file(checkpoint: Any) -> dict[str, tuple[int, ...]]:
    network = empty_denoiser(checkpoint)
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    return {parts[0].name: shapes[name] for name, parts in authors_places(network, shapes).items()}


def summary(candidate: QuantizedDenoiser, decodes: bool = True) -> tuple:
    """Returns the tensors that were read, with values of a few of every kind if the decoding package is installed."""
    layers = {
        name: (each.format, each.scales, each.stored_bytes, str(each.inputs)) for name, each in candidate.layers.items()
    }
    first = sorted(candidate.layers)[:4]
    numbers = [candidate.layers[name].weight.read() for name in first if decodes]
    numbers += [each.read() for _, each in sorted(candidate.parameters.items())[:4]]
    applied = []
    for name in first:
        if (inputs := candidate.layers[name].inputs) is not None:
            weight = candidate.layers[name].weight
            applied.append(inputs(torch.linspace(-2, 2, weight.shape[1]).expand(2, -1)))
    assert all(each.isfinite().all() for each in applied)
    return layers, [each.double().sum().item() for each in (*numbers, *applied)], candidate.stored_bytes


def stays_within(name: str):
    def check(folder: Path, found: tuple) -> None:
        assert found[2] <= (folder / name).stat().st_size
        assert sum(layer[2] for layer in found[0].values()) <= found[2]

    return check


# GGUF


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def gguf_file(shapes: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """A file of zeros and of scales of 1, by the description of the format, and where its header ends."""
    q8_0, q4_0, number, infos, data = 8, 2, 0, b"", b""
    entries = [text("general.architecture") + struct.pack("<I", 8) + text("sdxl"),
               text("general.alignment") + struct.pack("<II", 4, 32),
               text("a list") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
               text("numbers") + struct.pack("<IIQ", 9, 6, 3) + bytes(12)]  # fmt: skip
    for name, shape in shapes.items():
        numbers, kind = 1, 0
        for side in shape:
            numbers *= side
        if len(shape) > 1 and numbers % 256 == 0:
            kind = q4_0 if (number := number + 1) % 2 else q8_0
            if shape[-1] % 32:
                key = text(f"comfy.gguf.orig_shape.{name}")
                entries.append(key + struct.pack(f"<IIQ{len(shape)}i", 9, 5, len(shape), *shape))
                shape = (numbers // 256, 256)
        elif len(shape) > 1:
            kind = 1
        size = {0: 4 * numbers, 1: 2 * numbers, q4_0: numbers // 32 * 18, q8_0: numbers // 32 * 34}[kind]
        block = struct.pack("<e", 1) + bytes(range(16 if kind == q4_0 else 32))
        content = bytes(size) if kind < 2 else block * (numbers // 32)
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += content + bytes(-len(content) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(entries)) + b"".join(entries) + infos
    return header + bytes(-len(header) % 32) + data, len(header)


def of_gguf(checkpoint: Any) -> Reader:
    shapes = shapes_in_file(checkpoint)
    sound, end = gguf_file(shapes)
    names = [name.encode() for name in shapes]
    decodes = find_spec("gguf") is not None

    def behind(name: bytes) -> int:
        """Where the sides, type and offset of a tensor are."""
        return sound.index(struct.pack("<Q", len(name)) + name, 500) + 8 + len(name)

    def of_tensor(drawn: tuple) -> Files:
        name, edits = drawn
        return {"a.gguf": edited(sound, edits, [(behind(name), behind(name) + 4 + 16 + 12)])}

    def renamed(drawn: tuple) -> Files:
        name, other = drawn
        at = behind(name)
        return {"a.gguf": sound[: at - len(name)] + (other * 9)[: len(name)] + sound[at:]}

    def read(folder: Path) -> tuple:
        assert gguf.recognizes(folder / "a.gguf") == ((folder / "a.gguf").read_bytes()[:4] == b"GGUF")
        return summary(gguf.read(folder / "a.gguf", checkpoint), decodes)

    hot, name = [(0, 24), (24, 500), (24, end), (end - 500, end)], st.sampled_from(names)
    damages = ways(
        (byte_edits, lambda edits: {"a.gguf": edited(sound, edits, hot)}),
        *[(st.tuples(name, byte_edits), of_tensor)] * 2,
        (st.tuples(name, name), renamed),
    )
    check = stays_within("a.gguf")
    return Reader("gguf", {"a.gguf": sound}, read=read, check=check, weight=15, quick=30, **damages)


# Safetensors


def of_safetensors(
    name: str, checkpoint: Any, sound: bytes, small: tuple[str, ...], endings: Sequence[str],
    texts: Collection[str] = (), damages: Collection[tuple] = (),
) -> Reader:  # fmt: skip
    """A file of which the header is damaged, tensors that hold text, and those whose names end in one of ``small``.

    These get other numbers, or a name with one of the ``endings``.
    """
    header, content = header_of(sound)
    end = len(sound) - len(content)

    def place(name: str) -> tuple[int, int]:
        start, stop = header[name]["data_offsets"]
        return end + start, end + stop

    def renamed(drawn: tuple) -> Files:
        name, ending = drawn
        other = f"{name.rpartition('.')[0]}.{ending}"
        names = {each: other if each == name else each for each in header}
        return {"a.safetensors": with_header({names[each]: value for each, value in header.items()}, content)}

    def read(folder: Path) -> tuple:
        path = folder / "a.safetensors"
        READERS[name].recognizes(path)
        return summary(READERS[name].module.read(path, checkpoint))

    drawn = st.sampled_from([name for name in header if name.endswith(small)])
    made = ways(
        (byte_edits, lambda edits: {"a.safetensors": edited(sound, edits, [(0, end), *map(place, texts)])}),
        (st.tuples(drawn, byte_edits), lambda drawn: {"a.safetensors": with_numbers(sound, *drawn)}),
        (st.tuples(drawn, st.sampled_from(endings)), renamed),
        *damages,
        (document_edits, lambda edits: {"a.safetensors": damaged_safetensors(sound, ("header", edits))}),
    )
    check = stays_within("a.safetensors")
    return Reader(name, {"a.safetensors": sound}, read=read, check=check, weight=15, quick=30, **made)


def of_bfl(checkpoint: Any) -> Reader:
    """Every linear whose inputs are whole blocks in one of the two kinds in turn."""
    tensors: dict[str, Tensor] = {}
    turn = 0
    for name, shape in shapes_in_file(checkpoint).items():
        layer = name.removesuffix(".weight")
        tensors[name] = torch.ones(shape, dtype=torch.float16)
        if len(shape) != 2 or not name.endswith(".weight") or shape[1] % 16:
            continue
        turn += 1
        if turn % 2:
            tensors |= {name: torch.ones(shape).to(torch.float8_e4m3fn), f"{layer}.weight_scale": torch.ones(shape[0])}
            continue
        tensors[name] = torch.full((shape[0], shape[1] // 2), 0x12, dtype=torch.uint8)
        tensors[f"{layer}.weight_scale"] = torch.ones(shape[0], shape[1] // 16).to(torch.float8_e4m3fn)
        tensors |= {f"{layer}.{end}": torch.ones(()) for end in ("weight_scale_2", "input_scale")}
    sound = save_safetensors(tensors, {"format": "pt"})
    endings = ["weight_scale", "weight_scale_2", "input_scale", "weight", "bias"]
    return of_safetensors("diffusers_bfl", checkpoint, sound, ("_scale", "_scale_2"), endings)


# ComfyUI


METHODS = (
    "float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16",
)  # fmt: skip


def marked(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Tensors of the denoiser, every method in turn, and the marks by layer."""
    tensors: dict[str, Tensor] = {}
    marks: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if len(shape) != 2 or not name.endswith(".weight") or "embed" in name:
            tensors[name] = torch.ones(shape, dtype=torch.float8_e5m2 if len(shape) == 4 else torch.float16)
            continue
        rows, columns = shape
        method = METHODS[len(marks) % len(METHODS)]
        marks[layer] = {"format": method}
        match method:
            case "int8_tensorwise":
                marks[layer] |= {"convrot": True, "convrot_groupsize": 16}
                more = {"weight": torch.ones(shape, dtype=torch.int8), "weight_scale": torch.ones(rows, 1)}
            case "nvfp4":
                scales = torch.ones(-(-rows // 128) * 128, -(-columns // 64) * 4)
                more = {
                    "weight": torch.full((rows, columns // 2), 0x12, dtype=torch.uint8),
                    "weight_scale": scales.to(torch.float8_e4m3fn), "weight_scale_2": torch.ones(()),
                    "pre_quant_scale": torch.ones(columns),
                }  # fmt: skip
            case "mxfp8":
                scales = torch.full((-(-rows // 128) * 128, -(-columns // 128) * 4), 127)
                more = {"weight": torch.ones(shape).to(torch.float8_e4m3fn), "weight_scale": scales.to(torch.uint8)}
            case "convrot_w4a4":
                marks[layer] |= {"params": {"convrot_groupsize": 16}, "linear_dtype": "int8"}
                packed = torch.full((rows, columns // 2), 0x12, dtype=torch.int8)
                more = {"weight": packed, "weight_scale": torch.ones(rows)}
            case "asym_w4a8_int8":
                marks[layer] |= {"convrot_groupsize": 16, "group_size": 16}
                more = {
                    "weight": torch.full((rows, columns // 2), 0x12, dtype=torch.int8),
                    "weight_s_rel": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
                    "weight_s_channel": torch.ones(rows), "weight_codebook": torch.linspace(-1, 1, 16),
                }  # fmt: skip
            case "awq_w4a16":
                marks[layer] |= {"group_size": 32}
                scales = torch.ones(columns // 32, rows)
                packed = torch.full((rows, columns // 2), 0x12, dtype=torch.int8)
                more = {"weight": packed, "weight_scale": scales, "weight_zeros": scales.clone()}
            case _:
                more = {"weight": torch.ones(shape).to(getattr(torch, method)), "weight_scale": torch.ones(()),
                        "input_scale": torch.ones(1)}  # fmt: skip
        tensors |= {f"{layer}.{end}": each for end, each in more.items()}
    return tensors, marks


def of_comfyui(checkpoint: Any) -> Reader:
    tensors, marks = marked(shapes_in_file(checkpoint))
    half = dict(sorted(marks.items())[::2])
    inside = {f"{layer}.comfy_quant": torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
              for layer, mark in marks.items() if layer not in half}  # fmt: skip
    metadata = json.dumps({"format_version": "1.0", "layers": half})
    sound = save_safetensors(tensors | inside, {"_quantization_metadata": metadata})
    small = ("_scale", "_scale_2", "_s_rel", "_zeros", "comfy_quant")
    endings = ["weight_scale", "scale_weight", "input_scale", "scaled_fp8", "comfy_quant", "weight", "bias"]
    marked_otherwise = (
        document_edits,
        lambda edits: {"a.safetensors": damaged_metadata(sound, "_quantization_metadata", edits)},
    )
    return of_safetensors("comfyui", checkpoint, sound, small, endings, inside, [marked_otherwise] * 2)
