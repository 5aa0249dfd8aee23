"""Single safetensors files for ComfyUI: the denoiser or the whole model, with scales or merely cast to eight bits.

What quantizes a linear X says a mark: the tensor ``X.comfy_quant``, which is JSON in bytes, or an entry of the header's
``_quantization_metadata``. An older file has one tensor ``scaled_fp8`` and names its scales otherwise. As ComfyUI's
``ops.py``, ``quant_ops.py`` and ``utils.py`` read them:

| format          | X.weight         | scales                                                   | inputs           |
|-----------------|------------------|----------------------------------------------------------|------------------|
| float8_e4m3fn   | E4M3 [N, K]      | weight_scale and, if at all, input_scale: one number     | cast, or scaled  |
| float8_e5m2     | E5M2 [N, K]      | the same                                                 | the same         |
| int8_tensorwise | INT8 [N, K]      | weight_scale: one number or [N, 1]                       | INT8, by row     |
| nvfp4           | uint8 [N, K / 2] | weight_scale E4M3 in tiles, weight_scale_2; input_scale  | NVFP4            |
| mxfp8           | E4M3 [N, K]      | weight_scale E8M0 in tiles, as uint8                     | MXFP8            |
| scaled_fp8      | E4M3 [N, K]      | scale_weight, scale_input: one number                    | as float8_e4m3fn |

A byte of NVFP4 has its first number in the high half, and its sides are padded to multiples of 16, MXFP8's to 32. With
``full_precision_matrix_mult``, of the older files a ``scaled_fp8`` of two numbers, inputs stay as they are. A weight in
eight bits without a mark is multiplied as it is stored.

The road not taken is to guess formats from names of scales: two tools give one name to different things, and ComfyUI
itself reads marks alone.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import read_header, without_duplicates
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor
from sd_quant.interchange import AS_ASSIGNED, PER_ROW, SDXL, STATIC, ForeignFormat
from sd_quant.interchange.candidate import Candidate, Inputs, StoredLayer, check_whole, needed, size_in_file
from sd_quant.interchange.comfyui_inputs import (
    INT8,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Float8,
    Mxfp8,
    Nvfp4,
    Rotated,
    powers_of_two,
)
from sd_quant.interchange.inputs import Multiplied
from sd_quant.interchange.other_names import (
    OTHER_NETWORKS,
    PREFIX,
    Rows,
    denoiser_tensors,
    joined,
    places_in,
    rows_of,
    told_family,
)
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.numbers import up_to
from sd_quant.quantization.formats import e2m1
from sd_quant.quantization.formats.blocks import TILE_COLUMNS, TILE_ROWS, from_tiles
from sd_quant.quantization.rotation import rotated

FACTS = ForeignFormat(
    "comfyui",
    reads="a safetensors file for ComfyUI, with its marks or merely cast",
    consumer="ComfyUI",
    tried=("comfy-kitchen==0.2.40",),  # whose kernels and layouts ComfyUI calls
    formats={"fp8": STATIC, "int8": PER_ROW, "nvfp4": AS_ASSIGNED},
    loading=(
        "Copy `sdxl.safetensors` to `ComfyUI/models/checkpoints`.",
        "Open it with the node Load Checkpoint.",
    ),
    multiplied=frozenset({"nvfp4"}),
    rotated=frozenset({"int8"}),
    per_channel={"fp8": False},
    in_fp32=frozenset({"nvfp4"}),
    excluded={"nvfp4": ("attn2.to_k", "attn2.to_v")},  # ComfyUI reads the model's kind off their shape
    families=SDXL,
    others=None,
)
MARK, METADATA, OLD_MARK = "comfy_quant", "_quantization_metadata", "scaled_fp8"
OLD_NAMES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
MAX_MARK = 4096  # bytes
HARMLESS = {"format", "full_precision_matrix_mult", "orig_dtype", "orig_shape"}  # entries of a mark
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
LARGEST_GROUP = 1024  # that is rotated; ComfyUI's is 256
FOREIGN = ".qweight"  # the end of a name that others give to codes in their own order

Marks = Mapping[str, Mapping[str, Any]]  # by layer, in the file's names without the prefix


@dataclass(frozen=True)
class Codes:
    """A ``Readable`` of rows of a weight [N, K] that a mark says is quantized."""

    path: Path
    layer: str
    mark: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]  # by the ends of their names
    shape: tuple[int, ...]
    rows: Rows
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def method(self) -> "Method":
        return METHODS[self.mark["format"]]

    def read(self) -> Tensor:
        """fp32. Raises ArtifactError when a number is NaN or infinite."""
        return finite(self.method.decode(self), self.path, self.layer)

    def codes(self) -> Tensor:
        """These rows as they are stored."""
        return rows_of(self.tensors["weight"], replace(self.rows, of=self.tensors["weight"].shape[0])).read()

    def number(self, name: str) -> float | None:
        """The one number of a tensor; None where there is no such tensor. Raises ArtifactError if it is no scale."""
        if name not in self.tensors:
            return None
        number = self.tensors[name].read().float().item()
        if not (number > 0 and math.isfinite(number) and 1 / number < torch.finfo(torch.float32).max):
            raise ArtifactError(
                f"{self.path}: {name} of {self.layer[:200]!r} is {number:g}; expected a finite number above 0, so "
                "fetch the file again"
            )
        return number

    def tiled(self, block: int) -> Tensor:
        """The codes of the scales of these rows, uint8 [rows, blocks], from their tiles."""
        stored = self.tensors["weight_scale"].read().view(torch.uint8)
        plain = from_tiles(stored, self.rows.of, up_to(self.shape[1], block) // block)
        return plain[self.rows.start : self.rows.stop]


@dataclass(frozen=True)
class Method:
    """A format of ComfyUI's: its tensors, and what they stand for."""

    dtype: torch.dtype  # of the weight as it is stored
    scales: str  # see ``StoredLayer``
    decode: Callable[[Codes], Tensor]
    inputs: Callable[[Codes], Inputs]
    # shapes that its tensors may have, and dtypes, by the ends of their names, for a weight [N, K]
    shapes: Callable[[int, int], Mapping[str, tuple[tuple[int, ...], ...]]]
    needs: tuple[str, ...] = ("weight_scale",)
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)  # others are floating point
    multiple: int = 1  # of which the sides of a stored weight are
    entries: frozenset[str] = frozenset()  # of a mark


NUMBER = ((), (1,), (1, 1))
SCALES = (torch.float32, torch.float16, torch.bfloat16)


def decode_float8(stored: Codes) -> Tensor:
    return stored.codes().float() * stored.tensors["weight_scale"].read().float().reshape(())


def decode_int8(stored: Codes) -> Tensor:
    scale = stored.tensors["weight_scale"].read().float().reshape(-1, 1)
    numbers = stored.codes().float() * (scale if len(scale) == 1 else scale[stored.rows.start : stored.rows.stop])
    group = rotation(stored)
    return numbers if group is None else rotated(numbers, group)


def decode_nvfp4(stored: Codes) -> Tensor:
    packed = stored.codes()
    numbers = e2m1.decode(torch.stack([packed >> 4, packed & 15], dim=-1)).flatten(1)
    scales = stored.tiled(NVFP4_BLOCK).view(torch.float8_e4m3fn).float()
    scales = stored.tensors["weight_scale_2"].read().float().reshape(()) * scales
    return (numbers.unflatten(1, (-1, NVFP4_BLOCK)) * scales[..., None]).flatten(1)[:, : stored.shape[1]]


def decode_mxfp8(stored: Codes) -> Tensor:
    scales = powers_of_two(stored.tiled(MXFP8_BLOCK))
    numbers = stored.codes().float().unflatten(1, (-1, MXFP8_BLOCK)) * scales[..., None]
    return numbers.flatten(1)[:, : stored.shape[1]]


def rotation(stored: Codes) -> int | None:
    """How many inputs are rotated together, None for none. Raises ArtifactError for a number that cannot be."""
    inner = stored.mark.get("params", {})
    mark = {**(inner if isinstance(inner, Mapping) else {}), **stored.mark}
    if not mark.get("convrot", False):
        return None
    group = mark.get("convrot_groupsize", 256)
    powers = [4**power for power in range(1, LARGEST_GROUP.bit_length() // 2 + 1)]
    if type(group) is not int or group not in powers or stored.shape[1] % group:
        raise ArtifactError(
            f"{stored.path}: {stored.layer[:200]!r} has convrot_groupsize {ascii(group)[:100]}; expected a power of 4 "
            f"up to {LARGEST_GROUP} that divides its {stored.shape[1]} inputs, so quantize it again"
        )
    return group


def int8_inputs(stored: Codes) -> Inputs:
    group = rotation(stored)
    return INT8 if group is None else Rotated(group)


def float8(dtype: torch.dtype) -> Method:
    return Method(
        dtype, "1 for all", decode_float8, lambda stored: Float8(dtype, stored.number("input_scale") or 1.0),
        lambda rows, columns: {"weight_scale": NUMBER, "input_scale": NUMBER},
    )  # fmt: skip


def tiles(rows: int, columns: int, multiple: int, block: int) -> tuple[tuple[int, ...], ...]:
    blocks = up_to(columns, multiple) // block
    return ((up_to(up_to(rows, multiple), TILE_ROWS), up_to(blocks, TILE_COLUMNS)),)


METHODS = {
    **{name: float8(dtype) for dtype, name in FLOAT8.items()},
    "int8_tensorwise": Method(
        torch.int8, "1 for a row", decode_int8, int8_inputs,
        lambda rows, columns: {"weight_scale": (*NUMBER, (rows, 1), (rows,))},
        entries=frozenset({"convrot", "convrot_groupsize", "params"}),
    ),
    "nvfp4": Method(
        torch.uint8, "1 for 16 numbers", decode_nvfp4, lambda stored: Nvfp4(stored.number("input_scale")),
        lambda rows, columns: {
            "weight_scale": tiles(rows, columns, NVFP4_BLOCK, NVFP4_BLOCK), "weight_scale_2": NUMBER,
            "input_scale": NUMBER, "pre_quant_scale": ((columns,),),
        },
        needs=("weight_scale", "weight_scale_2"), dtypes={"weight_scale": (torch.float8_e4m3fn, torch.uint8)},
        multiple=16,
    ),
    "mxfp8": Method(
        torch.float8_e4m3fn, "1 for 32 numbers", decode_mxfp8, lambda stored: Mxfp8(),
        lambda rows, columns: {"weight_scale": tiles(rows, columns, MXFP8_BLOCK, MXFP8_BLOCK), "input_scale": NUMBER},
        dtypes={"weight_scale": (torch.uint8, torch.float8_e8m0fnu)}, multiple=32,
    ),
}  # fmt: skip


def recognizes(path: Path) -> bool:
    """Whether ``path`` is a safetensors file with a denoiser's tensors, or with ComfyUI's marks."""
    try:
        tensors, metadata = read_header(whole_file(path))
    except (SdQuantError, OSError, ValueError):
        return False
    if any(name.endswith(FOREIGN) for name in tensors):
        return False
    marked = METADATA in metadata or any(name.endswith((f".{MARK}", OLD_MARK)) for name in tensors)
    return marked or told_family(denoiser_tensors(tensors)[0]) is not None


def read(path: Path, checkpoint: Checkpoint) -> Candidate:
    """Locates the denoiser of ``checkpoint`` in a safetensors file for ComfyUI; no weight is read.

    Raises ConfigError when ``path`` does not exist, ArtifactError when it is damaged, marks a layer in two ways or in
    one that is not known here, or holds any other denoiser.
    """
    tensors, metadata = read_header(whole_file(path))
    names, unknown = denoiser_tensors(tensors)
    found = {name: tensors[full] for name, full in names.items()}
    marks, old = marks_in(path, found, metadata, whole=any(full != name for name, full in names.items()))
    weights, used = marked_tensors(found, marks, old)
    rest = {name: each for name, each in found.items() if name not in used}
    network = empty_denoiser(checkpoint)
    modules = dict(network.named_modules())
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    places, others = places_in(
        path, network, shapes,
        {name: unpacked(rest[name], marks.get(name.removesuffix(".weight"))) for name in rest},
        {f"{layer}.weight": METHODS[mark["format"]].multiple for layer, mark in marks.items()},
    )  # fmt: skip
    layers: dict[str, StoredLayer] = {}
    parameters: dict[str, Readable] = {}
    for name, parts in places.items():
        first = parts[0]
        linear = modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if (layer := first.name.removesuffix(".weight")) in marks and first.name.endswith(".weight"):
            if not isinstance(linear, nn.Linear):
                raise ArtifactError(
                    f"{path} marks {layer[:200]!r} as quantized, which is no linear; ComfyUI quantizes linears only, "
                    "so give a file that it opens"
                )
            whole = Codes(path, layer, marks[layer], weights[layer], (first.of, *shapes[name][1:]), first)
            check_codes(whole)
            layers[name.removesuffix(".weight")] = quantized_layer(whole, parts)
            continue
        stored = joined([rows_of(rest[rows.name], rows) for rows in parts])
        if stored.dtype not in FLOAT8:
            parameters[name] = stored
        elif isinstance(linear, nn.Linear | nn.Conv2d):
            size, weight = size_in_file([stored]), cast(stored, path, first.name)
            layers[name.removesuffix(".weight")] = StoredLayer(FLOAT8[stored.dtype], "none", size, weight)
        else:
            parameters[name] = cast(stored, path, first.name)
    unplaced = [f"{layer}.weight, marked" for layer in marks if f"{layer}.weight" not in rest]
    candidate = Candidate(path, "comfyui", "ComfyUI", layers, parameters, size_in_file(found.values()))
    return check_whole(candidate, checkpoint, [*unknown, *unplaced, *others])


def quantized_layer(stored: Codes, parts: "tuple[Rows, ...]") -> StoredLayer:
    """Of the rows ``parts`` of a marked weight; scales that all rows share count for each by its rows."""
    count = sum(rows.stop - rows.start for rows in parts)
    of_weight = [stored.tensors[name] for name in ("weight", *stored.method.needs)]
    high = stored.mark.get("full_precision_matrix_mult", False)
    inputs = None if high else stored.method.inputs(stored)
    if "pre_quant_scale" in stored.tensors:
        factor = finite(
            stored.tensors["pre_quant_scale"].read().float(), stored.path, f"{stored.layer}.pre_quant_scale"
        )
        inputs = Multiplied(factor, False, inputs)
    scales = stored.method.scales
    if stored.mark["format"] == "int8_tensorwise" and prod(stored.tensors["weight_scale"].shape) == 1:
        scales = "1 for all"
    rows = [replace(stored, shape=(each.stop - each.start, *stored.shape[1:]), rows=each) for each in parts]
    return StoredLayer(
        stored.mark["format"], scales, size_in_file(of_weight) * count // stored.rows.of, joined(rows), inputs
    )


def unpacked(tensor: StoredTensor, mark: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The shape of a tensor, of one with two numbers in a byte that of the numbers."""
    if mark is not None and METHODS[mark["format"]].dtype == torch.uint8 and tensor.shape:
        return (*tensor.shape[:-1], 2 * tensor.shape[-1])
    return tensor.shape


def cast(stored: Readable, path: Path, name: str) -> LazyTensor:
    """A tensor that is stored in eight bits, in fp32."""
    return LazyTensor(tuple(stored.shape), torch.float32, lambda: finite(stored.read().float(), path, name))


def finite(tensor: Tensor, path: Path, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(
            f"{path}: {name[:200]!r} holds numbers that are not finite; expected finite ones, so fetch the file again"
        )
    return tensor


def marks_in(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any], whole: bool
) -> tuple[Marks, bool]:
    """What each quantized layer of the denoiser is marked as, and whether in the older way.

    ``tensors`` have names without the prefix; ``whole`` says that names in the metadata have it. Raises ArtifactError
    for marks of two kinds that do not say the same, and for a format that is not known here.
    """
    suffix = f".{MARK}"
    single = {name.removesuffix(suffix): read_mark(path, name, each) for name, each in tensors.items()
              if name.endswith(suffix)}  # fmt: skip
    listed = marks_in_metadata(path, metadata, whole) if METADATA in metadata else {}
    if OLD_MARK in tensors and (single or METADATA in metadata):
        raise ArtifactError(
            f"{path} has marks of two kinds, {OLD_MARK} and {MARK if single else METADATA}, and so two meanings; "
            "expected one of them, so quantize the model again"
        )
    if twice := [layer for layer in single if layer in listed and single[layer] != listed[layer]]:
        raise ArtifactError(
            f"{path} marks {len(twice)} layers in two ways ({listing(twice, 5)}), and so has two meanings; quantize "
            "the model again"
        )
    marks = {**single, **listed}
    if old := OLD_MARK in tensors:
        high = prod(tensors[OLD_MARK].shape) == 2
        ends = ".scale_weight"
        marks = {
            name.removesuffix(ends): {"format": "float8_e4m3fn", "full_precision_matrix_mult": high}
            for name in tensors
            if name.endswith(ends)
        }
    strange = [f"{layer} {ascii(mark.get('format'))[:100]}" for layer, mark in marks.items()
               if not isinstance(mark.get("format"), str) or mark["format"] not in METHODS]  # fmt: skip
    if strange:
        raise ArtifactError(
            f"{path} has {len(strange)} layers in formats that are not read here ({listing(strange, 3)}); expected "
            f"{', '.join(METHODS)}, so choose such a file"
        )
    for layer, mark in marks.items():
        known = HARMLESS | METHODS[mark["format"]].entries
        if extra := [key for key in mark if key not in known]:
            raise ArtifactError(
                f"{path}: the mark of {layer[:200]!r} has entries that are not known here ({listing(extra, 3)}); "
                f"expected {', '.join(sorted(known))}, so give a file that ComfyUI itself has written"
            )
    return marks, old


def read_mark(path: Path, name: str, tensor: StoredTensor) -> Mapping[str, Any]:
    """The JSON in a tensor ``comfy_quant``. Raises ArtifactError when it is none."""
    if tensor.dtype != torch.uint8 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_MARK:
        raise ArtifactError(
            f"{path}: {name[:200]!r} is {tensor.dtype} {list(tensor.shape)}; expected JSON in at most {MAX_MARK} "
            "bytes, so fetch the file again"
        )
    return as_object(path, name, bytes(tensor.read().tolist()))


def marks_in_metadata(path: Path, metadata: Mapping[str, Any], whole: bool) -> Marks:
    """The denoiser's marks in the header; those of other networks are left out."""
    layers = as_object(path, METADATA, metadata[METADATA]).get("layers")
    if not isinstance(layers, Mapping) or not all(isinstance(mark, Mapping) for mark in layers.values()):
        raise ArtifactError(f"{path}: {METADATA} lists no layers with their marks; fetch the file again")
    if not whole:
        return layers
    if bare := [name for name in layers if not name.startswith((PREFIX, *OTHER_NETWORKS))]:
        raise ArtifactError(
            f"{path}: {METADATA} has {len(bare)} layers without the prefix {PREFIX} of their tensors "
            f"({listing(bare, 5)}), which ComfyUI does not find; quantize the model again"
        )
    return {name.removeprefix(PREFIX): mark for name, mark in layers.items() if name.startswith(PREFIX)}


def as_object(path: Path, name: str, text: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, TypeError, RecursionError) as error:
        reason = ascii(str(error))[1:-1][:200]
        raise ArtifactError(f"{path}: {name[:200]!r} is not JSON ({reason}); fetch the file again") from error
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{path}: {name[:200]!r} is no object of JSON; fetch the file again")
    return found


def marked_tensors(
    tensors: Mapping[str, StoredTensor], marks: Marks, old: bool
) -> tuple[dict[str, dict[str, StoredTensor]], set[str]]:
    """The tensors of each marked layer's weight by the ends of their names, and the names of those and of marks."""
    new_names = {f".{end}": new for end, new in OLD_NAMES.items()} if old else {}
    found: dict[str, dict[str, StoredTensor]] = {layer: {} for layer in marks}
    used = {OLD_MARK} if old else set()
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        if layer not in marks:
            continue
        end = new_names.get(f".{end}", end)
        known = METHODS[marks[layer]["format"]].shapes(0, 0)
        if end == MARK:
            used.add(name)
        elif end == "weight":
            found[layer][end] = tensor
        elif end in known and (not old or name.endswith(tuple(new_names))):
            found[layer][end] = tensor
            used.add(name)
    return found, used


def check_codes(stored: Codes) -> None:
    """Raises ArtifactError when a tensor of a marked weight is missing, or of a shape or dtype that does not fit."""
    method, what = stored.method, f"{stored.path}: {stored.layer[:200]!r}, marked {stored.mark['format']},"
    shapes = method.shapes(*stored.shape)
    if missing := [name for name in method.needs if name not in stored.tensors]:
        raise ArtifactError(f"{what} has no {' and no '.join(missing)}; fetch the file again")
    if stored.tensors["weight"].dtype != method.dtype:
        raise ArtifactError(
            f"{what} is stored as {stored.tensors['weight'].dtype}; expected {method.dtype}, so quantize it again"
        )
    for name, tensor in stored.tensors.items():
        dtypes = method.dtypes.get(name, SCALES)
        if name != "weight" and (tensor.shape not in shapes[name] or tensor.dtype not in dtypes):
            expected = " or ".join(str(list(shape)) for shape in shapes[name])
            raise ArtifactError(
                f"{what} has {name} {tensor.dtype} {list(tensor.shape)}; expected {expected} in "
                f"{' or '.join(str(dtype) for dtype in dtypes)}, so quantize it again"
            )
    high = stored.mark.get("full_precision_matrix_mult", False)
    if type(high) is not bool:
        raise ArtifactError(f"{what} has full_precision_matrix_mult {ascii(high)[:100]}; expected true or false")
    rotation(stored)
