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
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.interchange import READERS, TARGETS, gguf
from sd_quant.interchange.comfyui import METADATA
from sd_quant.interchange.comfyui_marks import MARK
from sd_quant.interchange.denoiser import QuantizedDenoiser, needed
from sd_quant.interchange.holding import adapted
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.models.parts import SharedInput
from sd_quant.names.authors import authors_places
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive

from ..unit.interchange.conftest import recipe_of
from ..unit.tiny import Tiny
from ..zoo.families import TINY
from .harness import Reader
from .mutations import byte_edits, document_edits, edited
from .shared import Files, damaged_metadata, damaged_safetensors, header_of, ways, with_header, with_numbers


def single_files(scratch: Path) -> list[Reader]:
    """A checkpoint of a tiny SDXL, which is not damaged: a reader reads only the file."""
    folder = scratch / "single_files"
    TINY["sdxl"](folder)
    tiny = Tiny(open_pipeline(folder, "sdxl"))
    bfl, comfyui = (written(target, tiny, scratch) for target in ("diffusers_bfl", "comfyui"))
    build = cache(tiny.checkpoint.build)  # once, as it takes longer than reading a file
    checkpoint = SimpleNamespace(family=tiny.checkpoint.family, parts=tiny.checkpoint.parts, build=build)
    return [of_gguf(checkpoint), of_comfyui(checkpoint, comfyui), of_bfl(checkpoint, bfl)]


def shapes_in_file(checkpoint: Any) -> dict[str, tuple[int, ...]]:
    network = empty_denoiser(checkpoint)
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    return {parts[0].name: shapes[name] for name, parts in authors_places(network, shapes).items()}


def summary(candidate: QuantizedDenoiser, decodes: bool = True) -> tuple:
    """Returns the tensors that were read, with values of a few of every kind if the decoding package is installed."""
    layers = {
        name: (each.format, each.scales, each.stored_bytes, str(each.inputs)) for name, each in candidate.layers.items()
    }
    first, others = sorted(candidate.layers)[:4], sorted(candidate.parameters)[:4]
    read = [candidate.layers[name].weight for name in first] + [candidate.parameters[name] for name in others]
    numbers = [each.read() for each in read if decodes]
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


# What the project writes of an assignment, in which one layer after the other has the next recipe's row


PLAIN = {"smoothing": "none", "alpha": None}
ROTATED = PLAIN | {"per_token": True}
IN_ROWS = PLAIN | {"per_channel": True, "per_token": True}
RECIPES = {
    "diffusers_bfl": [("fp8", IN_ROWS), ("nvfp4", PLAIN)],
    "comfyui": [
        ("fp8", PLAIN | {"per_channel": False}),
        ("int8", {**ROTATED, "rotation": 16}),
        ("nvfp4", PLAIN),
        ("mxfp8", PLAIN),
        ("int4", PLAIN | {"activation": None}),
        ("int4_per_row", IN_ROWS | {"rotation": 256}),
        ("int4_in_int8", {**ROTATED, "activation": "int8", "rotation": 256}),
    ],
}


def written(target: str, tiny: Tiny, folder: Path) -> bytes:
    recipes, roles, denoiser = RECIPES[target], tiny.roles, tiny.denoiser()
    assignment = dict[str, LayerAssignment]()
    for number, (fmt, options) in enumerate(recipes):
        own = dict(list(roles.items())[number :: len(recipes)])
        inputs = [SharedInput((name,)) for name, role in own.items() if role not in ("conv", "excluded")]
        rows = derive(own, lambda name: denoiser.get_submodule(name).weight, tiny.statistics.layers,
                      recipe_of(fmt, **options), inputs)  # fmt: skip
        assignment |= adapted(rows, TARGETS[target])
    return tiny.written(assignment, target, folder / target).read_bytes()


def of_bfl(checkpoint: Any, sound: bytes) -> Reader:
    endings = ["weight_scale", "weight_scale_2", "input_scale", "weight", "bias"]
    return of_safetensors("diffusers_bfl", checkpoint, sound, ("_scale", "_scale_2"), endings)


def of_comfyui(checkpoint: Any, sound: bytes) -> Reader:
    """Every second mark stands in the header, where a file may have it too.

    One layer is in float8_e5m2 and one has a ``pre_quant_scale``, which are read and not written.
    """
    tensors = load_safetensors(sound)
    inside = sorted(name for name in tensors if name.endswith(MARK))
    marked = {name.removesuffix(f".{MARK}"): json.loads(bytes(tensors[name].tolist())) for name in inside}
    first = {mark["format"]: layer for layer, mark in reversed(marked.items())}
    wide, scaled = first["float8_e4m3fn"], first["nvfp4"]
    marked[wide]["format"] = "float8_e5m2"
    tensors[f"{wide}.weight"] = tensors[f"{wide}.weight"].float().to(torch.float8_e5m2)
    tensors[f"{wide}.{MARK}"] = torch.tensor(list(json.dumps(marked[wide]).encode()), dtype=torch.uint8)
    tensors[f"{scaled}.pre_quant_scale"] = torch.ones(2 * tensors[f"{scaled}.weight"].shape[1])
    for name in inside[::2]:
        del tensors[name]
    marks = {name.removesuffix(f".{MARK}"): marked[name.removesuffix(f".{MARK}")] for name in inside[::2]}
    metadata = json.dumps({"format_version": "1.0", "layers": marks})
    sound = save_safetensors(tensors, {METADATA: metadata})
    small = ("_scale", "_scale_2", "_s_rel", "_zeros", MARK)
    endings = ["weight_scale", "scale_weight", "input_scale", "scaled_fp8", MARK, "weight", "bias"]
    marked_otherwise = (document_edits, lambda edits: {"a.safetensors": damaged_metadata(sound, METADATA, edits)})
    return of_safetensors("comfyui", checkpoint, sound, small, endings, inside[1::2], [marked_otherwise] * 2)
