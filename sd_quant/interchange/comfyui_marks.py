"""ComfyUI's formats of quantized linears: their tensors, and how inputs are rounded.

One entry of ``METHODS`` each, from ComfyUI's ``ops.py`` and ``quant_ops.py``; N outputs, K inputs, g inputs in a group:

| format          | X.weight         | X.weight_...                                               | inputs          |
|-----------------|------------------|------------------------------------------------------------|-----------------|
| float8_e4m3fn   | E4M3 [N, K]      | scale: one number; also input_scale or none                | cast, or scaled |
| float8_e5m2     | E5M2 [N, K]      | the same                                                   | the same        |
| int8_tensorwise | INT8 [N, K]      | scale: one number or [N, 1]                                | INT8, by row    |
| nvfp4           | uint8 [N, K / 2] | scale E4M3 in tiles, scale_2; also input_scale             | NVFP4           |
| mxfp8           | E4M3 [N, K]      | scale E8M0 in tiles, as uint8                              | MXFP8           |
| convrot_w4a4    | INT8 [N, K / 2]  | scale [N]                                                  | INT4, by row    |
| asym_w4a8_int8  | INT8 [N, K / 2]  | s_rel E4M3 [N, K/g], s_channel [N], codebook [16] or none, | INT8, by row    |
|                 | or [N, 3 K / 4]  | correction [K/g, N] or none                                |                 |
| awq_w4a16       | INT8 [N, K / 2]  | scale, zeros [K/g, N]                                      | as they are     |

NVFP4 has the first of two numbers in the high half of a byte, unlike ONNX and ModelOpt; both sides are padded to
multiples of 16, MXFP8's to 32. All other formats have the first number in the low half. convrot_w4a4 is signed,
awq_w4a16 is (code - 8) * scale + zeros. asym_w4a8_int8 has numbers from the codebook or code - 8: times s_rel they are
rounded to INT8, then multiplied by s_channel. In six bits numbers are code - 32; behind all lower bits, a byte has the
upper bits of four codes. A correction is added last, with unquantized inputs: comfy-kitchen saves it, ComfyUI omits it.

With ``full_precision_matrix_mult`` inputs are not quantized. With ``convrot``, always on in convrot_w4a4 and
asym_w4a8_int8, groups of inputs are rotated by the matrix of ``quantization.rotation``, and the weight is stored
rotated. ``linear_dtype`` int8 means INT8 inputs of convrot_w4a4, for GPUs without INT4 products. Formulas are those of
comfy-kitchen's ``backends/eager``, in fp32.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import Readable, lazy
from sd_quant.interchange import AS_ASSIGNED
from sd_quant.interchange.denoiser import Inputs
from sd_quant.interchange.inputs import LARGEST_FP8, Multiplied, Nvfp4, Rotated, RowInteger, StaticFloat8, in_blocks
from sd_quant.interchange.layouts import (
    ADDED,
    E4M3,
    FACTOR,
    HALF_FIRST,
    INPUTS,
    NUMBERS,
    OF_ALL,
    OTHER,
    TILES,
    TURNED,
    UINT8,
    Layout,
    Packing,
    Piece,
)
from sd_quant.interchange.layouts import INT8 as BYTES
from sd_quant.interchange.single_files import Coded
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, Shape
from sd_quant.interchange.weights import JoinedLayers
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import e2m1
from sd_quant.quantization.formats.blocks import from_tiles, in_tiles, pack_nibbles

MARK = "comfy_quant"  # the end of the name of a tensor with a mark
FLOAT8 = {torch.float8_e4m3fn: FP8, torch.float8_e5m2: "float8_e5m2"}
HIGH = "full_precision_matrix_mult"
HARMLESS = {"format", HIGH, "orig_dtype", "orig_shape"}  # entries of a mark
ROTATING = frozenset({"convrot", "convrot_groupsize", "params"})
LARGEST_GROUP = 1024  # largest number of inputs rotated together; ComfyUI has 256
INT8 = RowInteger(smallest=1e-30)  # quantize_int8_rowwise
INT4 = RowInteger(-7, 7, smallest=1e-10 / 7)  # quantize_signed_int4_rowwise
NVFP4_MULTIPLE, MXFP8_BLOCK = 16, 32  # both sides of a stored weight are multiples
W4A8, SIX_BITS_MULTIPLE = "asym_w4a8_int8", 32
E8M0_BIAS, LARGEST_E8M0 = 127, 254
MANTISSA = 23  # bits of fp32's

Mark = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """A quantized format of ComfyUI: its tensors, the rounding of inputs, and the entries of its marks."""

    layout: Layout
    inputs: Callable[["Marked"], Inputs | None]
    entries: frozenset[str] = frozenset()  # of a mark
    rotates: bool = False  # always
    group: int = 1  # default number of inputs per scale; 1: not in groups
    says: Mark = field(default_factory=dict)  # entries of every mark that is written

    @property
    def ends(self) -> set[str]:
        """The suffixes of the tensors' names."""
        return {piece.end for piece in self.layout.pieces}


@dataclass(frozen=True)
class Marked(Coded):
    """A linear with ComfyUI's mark, a description in JSON. Methods raise ArtifactError for an invalid entry of it."""

    counted = "weight"
    mark: Mark

    @property
    def method(self) -> Method:
        return METHODS[self.mark["format"]]

    @property
    def layout(self) -> Layout:
        layout = self.method.layout if self.method.group == 1 else self.method.layout.in_groups(self.group())
        return replace(layout, rotation=self.rotation())

    def inputs(self, shape: Shape) -> Inputs | None:
        self.check_six_bits()
        self.linear_dtype()
        high = self.mark.get(HIGH, False)
        if type(high) is not bool:
            raise self.refusal(f"{HIGH} {ascii(high)[:100]}", "true or false")
        inputs = None if high else self.method.inputs(self)
        if "pre_quant_scale" in self.own:
            inputs = Multiplied(self.own.finite("pre_quant_scale").float(), False, inputs)
        return inputs

    def unpacked(self) -> Shape:
        """Return the weight's shape; asym_w4a8_int8's follows from its scales, as bytes may hold four or six bits."""
        shape, scales = tuple(self.own.tensors["weight"].shape), self.own.tensors.get("weight_s_rel")
        if self.mark["format"] == W4A8 and scales is not None and len(scales.shape) == len(shape) == 2:
            return shape[0], scales.shape[1] * self.group()
        return self.method.layout.unpacked(shape)

    def entry(self, name: str, usual: Any = None) -> Any:
        """Return the entry ``name`` of the mark or of the mark's ``params``; without one, the default ``usual``."""
        inner = self.mark.get("params", {})
        return {**(inner if isinstance(inner, Mapping) else {}), **self.mark}.get(name, usual)

    def group(self) -> int:
        """Return the number of consecutive inputs that share a scale."""
        group = self.entry("group_size", self.method.group)
        fits = type(group) is int and 4 <= group <= LARGEST_GROUP
        if not fits or self.mark["format"] == W4A8 and 16 % group and group % 16:
            expected = f"from 4 to {LARGEST_GROUP}, of {W4A8} a divisor or multiple of 16"
            raise self.refusal(f"group_size {ascii(group)[:100]}", expected)
        return group

    def rotation(self) -> int:
        """Return the number of inputs that are rotated together, 0 without a rotation."""
        if not self.entry("convrot", self.method.rotates):
            if self.method.rotates:
                raise self.refusal("no convrot", f"it of {self.mark['format']}, which ComfyUI rotates all the same")
            return 0
        group, columns = self.entry("convrot_groupsize", 256), self.unpacked()[-1]
        powers = [4**power for power in range(1, LARGEST_GROUP.bit_length() // 2 + 1)]
        if type(group) is not int or group not in powers or columns % group:
            expected = f"a power of 4 up to {LARGEST_GROUP} that divides its {columns} inputs"
            raise self.refusal(f"convrot_groupsize {ascii(group)[:100]}", expected)
        return group

    def linear_dtype(self) -> str:
        """Return convrot_w4a4's input format. Raises ArtifactError unless int4 or int8 with quant_group_size 64."""
        found = self.entry("linear_dtype", "int4")
        if found not in ("int4", "int8") or self.entry("quant_group_size", 64) != 64:
            what = f"linear_dtype {ascii(found)[:100]} or another quant_group_size than 64"
            raise self.refusal(what, "int4 or int8")
        return found

    def check_six_bits(self) -> None:
        rows, columns = self.unpacked()
        if self.mark["format"] != W4A8 or tuple(self.own.tensors["weight"].shape) == (rows, columns // 2):
            return
        self.own.refuse(["weight_codebook", "weight_correction"], "which six bits do not have")
        if self.group() % 16 or columns % SIX_BITS_MULTIPLE:
            what = f"groups of {self.group()} of its {columns} inputs in six bits"
            raise self.refusal(what, f"multiples of 16 and of {SIX_BITS_MULTIPLE}")

    def refusal(self, found: str, expected: str) -> ArtifactError:
        return ArtifactError(
            f"{self.own.path}: {self.own.layer[:200]!r} has {found}; expected {expected}, so quantize it again"
        )


# How numbers are packed


def four_bits(packed: Tensor) -> Tensor:
    """Unpack unsigned 4-bit codes [rows, columns] from bytes with the first code in the low half."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def levels(packed: Tensor, shape: Shape) -> Tensor:
    """Unpack asym_w4a8_int8's signed numbers of four or six bits to fp32; ``shape`` is the weight's."""
    bits, columns = 8 * packed.shape[1] // shape[1], shape[1]
    packed = packed.view(torch.uint8)
    codes = four_bits(packed[:, : columns // 2])
    if bits == 6:
        upper = packed[:, columns // 2 :, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
        codes = codes | upper.flatten(1) << 4
    return codes.float() - 2 ** (bits - 1)


def in_high_half_first(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, the first in the high half of a byte, with both sides padded to multiples of 16."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % NVFP4_MULTIPLE, 0, -rows % NVFP4_MULTIPLE))
    return padded[:, ::2] << 4 | padded[:, 1::2]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Decode E8M0 codes to fp32; code 0 is the number 0, as in comfy-kitchen."""
    return (exponents.to(torch.int32) << MANTISSA).view(torch.float32)


def e8m0(codes: Tensor, scales: Tensor) -> Tensor:
    """Encode power-of-two scales [rows, blocks] as E8M0, uint8; 0 for a block of zeros, as in comfy-kitchen."""
    zeros = codes.float().unflatten(1, (-1, MXFP8_BLOCK)).eq(0).all(-1)
    return torch.where(zeros, 0, scales.view(torch.int32) >> MANTISSA).to(torch.uint8)


SIGNED = Packing(
    lambda stored, shape: (four_bits(stored) ^ 8).to(torch.int8) - 8,
    lambda codes: pack_nibbles(codes).view(torch.int8),
    in_a_byte=2,
)
FROM_8 = Packing(levels, lambda codes: pack_nibbles(codes + 8).view(torch.int8), in_a_byte=2)
PADDED_E2M1 = Packing(
    lambda stored, shape: e2m1.decode(torch.stack([stored >> 4, stored & 15], -1)).flatten(1)[: shape[0], : shape[1]],
    in_high_half_first,
    in_a_byte=2,
)
PADDED = Packing(  # of whole blocks in a row, but not of rows
    lambda stored, shape: stored[: shape[0], : shape[1]],
    lambda codes: F.pad(codes.view(UINT8), (0, 0, 0, -len(codes) % MXFP8_BLOCK)).view(codes.dtype),
)
E8M0_TILES = Packing(
    lambda stored, shape: powers_of_two(from_tiles(stored.view(UINT8), *shape)),
    lambda codes, scales: in_tiles(e8m0(codes, scales)),
)
MAYBE_BYTES = Packing(lambda stored, shape: stored.view(E4M3) if stored.dtype == UINT8 else stored)


def rounded_product(layout: Layout, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
    """Compute asym_w4a8_int8's weight: round(numbers * s_rel) to INT8, times s_channel, plus any correction."""
    by_end = {piece.end.removeprefix("weight_"): each.float() for piece, each in found.items()}
    numbers = by_end["weight"]
    if "codebook" in by_end:
        numbers = by_end["codebook"][(numbers + 8).long()]
    integers = (numbers * layout.spread(by_end["s_rel"], shape)).round().clamp(-127, 127)
    weight = integers * by_end["s_channel"].reshape(-1, 1)
    return weight + layout.spread(by_end["correction"], shape) if "correction" in by_end else weight


# Inputs


def int8_inputs(marked: Marked) -> Inputs:
    group = marked.rotation()
    return Rotated(INT8, group) if group else INT8


def static_scale(marked: Marked) -> float | None:
    return marked.own.number("input_scale", positive=True) if "input_scale" in marked.own else None


def nvfp4_inputs(marked: Marked) -> Inputs:
    static = static_scale(marked)
    return Nvfp4(static, smallest=0.0, also=" and one each time" if static is None else "")


@dataclass(frozen=True)
class Mxfp8:
    """Rounding of inputs to E4M3 in blocks of 32 with power-of-two scales: ``quantize_mxfp8``."""

    def __call__(self, x: Tensor) -> Tensor:
        blocks = in_blocks(x, MXFP8_BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        wanted = (largest / LARGEST_FP8).clamp(min=2.0**-E8M0_BIAS)
        exponents = (wanted.log2().ceil().to(torch.int32) + E8M0_BIAS).clamp(0, LARGEST_E8M0)
        scales = powers_of_two(exponents)
        codes = torch.where(scales > 0, blocks / scales, 0.0).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return (codes.float() * scales).flatten(-2)[..., : x.shape[-1]].to(x)

    def __str__(self) -> str:
        return "mxfp8, a scale for 32 numbers"


# Methods

NUMBER = "|1|1 1"
COMFYUI = "ComfyUI"  # which quantizes linears alone
INPUT_SCALE = Piece("input_scale", NUMBER, FLOAT_SCALES, INPUTS, optional=True)


def float8(dtype: torch.dtype) -> Method:
    pieces = Piece("weight", "N K", (dtype,), NUMBERS), Piece("weight_scale", NUMBER, FLOAT_SCALES, OF_ALL), INPUT_SCALE
    return Method(
        Layout(FLOAT8[dtype], "1 for all", pieces, COMFYUI),
        lambda marked: StaticFloat8(static_scale(marked) or 1.0, dtype, reciprocal=True),
    )


ROWS = (
    *map(float8, FLOAT8),
    Method(
        Layout("int8_tensorwise", "1 for a row", (
            Piece("weight", "N K", (BYTES,), NUMBERS), Piece("weight_scale", f"N 1|N|{NUMBER}", FLOAT_SCALES),
        ), COMFYUI),
        int8_inputs, ROTATING,
    ),
    Method(
        Layout("nvfp4", "1 for 16 numbers", (
            Piece("weight", "N^16 K^16/2", (UINT8,), NUMBERS, packing=PADDED_E2M1),
            Piece("weight_scale", "N^128 K/16^4", (E4M3, UINT8), packing=TILES),
            Piece("weight_scale_2", NUMBER, FLOAT_SCALES, OF_ALL), INPUT_SCALE,
            Piece("pre_quant_scale", "K", HALF_FIRST, FACTOR, optional=True),
        ), COMFYUI, columns=16, multiple=NVFP4_MULTIPLE),
        nvfp4_inputs,
    ),
    Method(
        Layout("mxfp8", "1 for 32 numbers", (
            Piece("weight", "N^32 K^32", (E4M3,), NUMBERS, packing=PADDED),
            Piece("weight_scale", "N^128 K/32^4", (UINT8, torch.float8_e8m0fnu), packing=E8M0_TILES, of=(0, 1)),
            INPUT_SCALE,
        ), COMFYUI, columns=MXFP8_BLOCK, multiple=MXFP8_BLOCK),
        lambda marked: Mxfp8(),
    ),
    Method(
        Layout("convrot_w4a4", "1 for a row", (
            Piece("weight", "N K/2", (BYTES,), NUMBERS, packing=SIGNED), Piece("weight_scale", "N|N 1", FLOAT_SCALES),
        ), COMFYUI),
        lambda marked: Rotated(INT4 if marked.linear_dtype() == "int4" else INT8, marked.rotation()),
        ROTATING | {"linear_dtype", "quant_group_size"}, rotates=True, says={"linear_dtype": "int4"},
    ),
    Method(
        Layout(W4A8, "1 for {group} numbers", (
            Piece("weight", "N K/2|N K/4*3", (BYTES,), NUMBERS, packing=FROM_8),
            Piece("weight_s_rel", "N K/g", (E4M3, UINT8, torch.float32), packing=MAYBE_BYTES),
            Piece("weight_s_channel", "N", FLOAT_SCALES, of=(2,)),
            Piece("weight_codebook", "1*16", FLOAT_SCALES, OTHER, optional=True),
            Piece("weight_correction", "K/g N", FLOAT_SCALES, ADDED, optional=True, packing=TURNED),
        ), COMFYUI, formula=rounded_product),
        lambda marked: None if "weight_correction" in marked.own else int8_inputs(marked),
        ROTATING | {"group_size"}, rotates=True, group=16, says={"group_size": 16},
    ),
    Method(
        Layout("awq_w4a16", "1 for {group} numbers", (
            Piece("weight", "N K/2", (BYTES,), NUMBERS, packing=FROM_8),
            Piece("weight_scale", "K/g N", HALF_FIRST, packing=TURNED),
            Piece("weight_zeros", "K/g N", HALF_FIRST, ADDED, packing=TURNED),
        ), COMFYUI),
        lambda marked: None, frozenset({"group_size"}), group=64,
    ),
)  # fmt: skip
METHODS = {row.layout.format: row for row in ROWS}


# Writing

WRITTEN = {  # marks by our formats
    "fp8": FP8, "int8": "int8_tensorwise", "nvfp4": "nvfp4", "mxfp8": "mxfp8", "int4_per_row": "convrot_w4a4",
    "int4_in_int8": W4A8, "int4": "awq_w4a16",
}  # fmt: skip


def mark_of(layer: LayerAssignment, inputs: str) -> Mark:
    name = WRITTEN[layer.format]
    mark = {"format": name, **METHODS[name].says}
    if layer.rotation:
        mark["convrot_groupsize"] = layer.rotation
        if not METHODS[name].rotates:  # by its name
            mark["convrot"] = True
    if layer.activation_format is None and inputs == AS_ASSIGNED:
        mark[HIGH] = True
    return mark


def tensors_of(checkpoint: Checkpoint, layers: JoinedLayers, formats: Mapping[str, str]) -> dict[str, Readable]:
    """Return a quantized linear's tensors by name suffix; ``formats`` has how inputs are computed, by weight format."""
    method = METHODS[WRITTEN[layers.first.format]]
    mark = json.dumps(mark_of(layers.first, formats[layers.first.format])).encode()
    tensors = method.layout.in_groups(method.group).of_joined(checkpoint, layers)
    return {MARK: lazy(torch.frombuffer(bytearray(mark), dtype=torch.uint8)), **tensors}
