"""The marks of ComfyUI: which tensors a quantized linear has, what they stand for, and how its inputs are rounded.

Each is a row of ``METHODS``, as ComfyUI's ``ops.py`` and ``quant_ops.py`` load it; N outputs, K inputs, g a group of
them:

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

A byte of NVFP4 has its first number in the high half, where ONNX and ModelOpt have it in the low one, and its sides are
padded to multiples of 16, MXFP8's to 32. The other packed ones have the first number in the low half: convrot_w4a4's
are signed; awq_w4a16's are (code - 8) * scale + zeros. asym_w4a8_int8 has levels, of the codebook or code - 8, which
become INT8 when they are multiplied by s_rel and rounded, and then weights times s_channel; in six bits, code - 32, the
two upper bits of four codes lie in a byte behind all lower ones. A correction is added at the end, and inputs stay as
they are: so comfy-kitchen's layout computes and saves it, while ComfyUI's own loader leaves the tensor out.

With ``full_precision_matrix_mult`` inputs stay as they are. With ``convrot``, which the two formats of four bits
always have, groups of inputs are rotated by the matrix of ``quantization.rotation``, and the codes are of the rotated
weight. ``linear_dtype`` int8 gives convrot_w4a4 inputs in INT8, which GPUs without products of INT4 have besides.
Formulas are those of comfy-kitchen's ``backends/eager``, in fp32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import StoredTensor
from sd_quant.interchange.denoiser import Inputs
from sd_quant.interchange.inputs import LARGEST_FP8, Nvfp4, Rotated, RowInteger, StaticFloat8, in_blocks
from sd_quant.interchange.layouts import fitting
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, LayerTensors, Shape, finite
from sd_quant.names.authors import Rows, rows_of
from sd_quant.numbers import up_to
from sd_quant.quantization.formats import e2m1, nvfp4
from sd_quant.quantization.formats.blocks import from_tiles
from sd_quant.quantization.rotation import rotated

MARK = "comfy_quant"  # the end of the name of a tensor with a mark
FLOAT8 = {torch.float8_e4m3fn: FP8, torch.float8_e5m2: "float8_e5m2"}
HARMLESS = {"format", "full_precision_matrix_mult", "orig_dtype", "orig_shape"}  # entries of a mark
ROTATING = frozenset({"convrot", "convrot_groupsize", "params"})
LARGEST_GROUP = 1024  # that is rotated; ComfyUI's is 256
INT8 = RowInteger(smallest=1e-30)  # quantize_int8_rowwise
INT4 = RowInteger(-7, 7, smallest=1e-10 / 7)  # quantize_signed_int4_rowwise
NVFP4_BLOCK, MXFP8_BLOCK = nvfp4.BLOCK, 32
NVFP4_MULTIPLE = 16  # of a packed weight's sides
W4A8, SIX_BITS_MULTIPLE = "asym_w4a8_int8", 32
E8M0_BIAS, LARGEST_E8M0 = 127, 254
MANTISSA = 23  # bits of fp32's

Mark = Mapping[str, Any]


@dataclass(frozen=True)
class Codes:
    """A ``Readable`` of rows of a weight [N, K] that a mark says is quantized; fp32."""

    stored: LayerTensors
    mark: Mark
    shape: tuple[int, ...]
    rows: Rows
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def method(self) -> "Method":
        return METHODS[self.mark["format"]]

    @property
    def group(self) -> int:
        return group_of(self.stored, self.mark)

    def read(self) -> Tensor:
        """Raises ArtifactError when a number is NaN or infinite."""
        return finite(self.method.decode(self), self.stored.path, self.stored.layer)

    def piece(self, end: str) -> Tensor:
        """These rows of a tensor [N, ...] as it is stored."""
        tensor = self.stored.tensors[end]
        return rows_of(tensor, replace(self.rows, of=tensor.shape[0])).read()

    def columns(self, end: str) -> Tensor:
        """These rows' part of a tensor [groups, N], fp32 [rows, groups, 1]."""
        tensor = self.stored.tensors[end].read().float()
        return tensor[:, self.rows.start : self.rows.stop].T.unsqueeze(-1)

    def scale(self, name: str = "weight_scale") -> Tensor:
        """The scale of these rows, fp32: [] or [rows, 1]."""
        scale = self.stored.tensors[name].read().float().flatten()
        return scale.reshape(()) if len(scale) == 1 else scale[self.rows.start : self.rows.stop, None]

    def number(self, name: str) -> float | None:
        """The one number of a tensor; None where there is no such tensor. Raises ArtifactError if it is no scale."""
        if name not in self.stored:
            return None
        number = self.stored.tensors[name].read().float().item()
        if not (number > 0 and math.isfinite(number) and 1 / number < torch.finfo(torch.float32).max):
            raise ArtifactError(
                f"{self.stored.path}: {name} of {self.stored.layer[:200]!r} is {number:g}; expected a finite number "
                "above 0, so fetch the file again"
            )
        return number

    def scaled(self, numbers: Tensor, block: int, values: Callable[[Tensor], Tensor]) -> Tensor:
        """``numbers`` [rows, padded K] times the scales of their blocks, the ``values`` of the codes in tiles."""
        stored = self.stored.tensors["weight_scale"].read().view(torch.uint8)
        scales = from_tiles(stored, self.rows.of, up_to(self.shape[1], block) // block)
        scales = values(scales[self.rows.start : self.rows.stop])
        return (numbers.unflatten(1, (-1, block)) * scales[..., None]).flatten(1)[:, : self.shape[1]]


@dataclass(frozen=True)
class Method:
    """A format of ComfyUI's: its tensors, and what they stand for."""

    dtype: torch.dtype  # of the weight as it is stored
    scales: str  # see ``QuantizedLayer``; with {group}
    decode: Callable[[Codes], Tensor]
    inputs: Callable[[Codes], Inputs | None]
    # of its tensors by the ends of their names: shapes as in ``layouts``, g for a group, and dtypes that are not
    # floating point; of the weight itself only where K does not follow from it
    shapes: Mapping[str, str]
    needs: tuple[str, ...] = ("weight_scale",)
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    multiple: int = 1  # of which the sides of a stored weight are
    entries: frozenset[str] = frozenset()  # of a mark
    packed: bool = False  # two numbers to a byte
    rotates: bool = False  # always
    group: int = 1  # of inputs with one scale, where the mark names none; 1: it never does


NUMBER = "|1|1 1"


def entry(mark: Mark, name: str, usual: Any = None) -> Any:
    """An entry of the mark, or of the ``params`` in it."""
    inner = mark.get("params", {})
    return {**(inner if isinstance(inner, Mapping) else {}), **mark}.get(name, usual)


def group_of(stored: LayerTensors, mark: Mark) -> int:
    """How many inputs of a row have one scale. Raises ArtifactError for a number that cannot be."""
    method = METHODS[mark["format"]]
    if method.group == 1:
        return 1
    group = entry(mark, "group_size", method.group)
    fits = type(group) is int and 4 <= group <= LARGEST_GROUP
    if not fits or mark["format"] == W4A8 and 16 % group and group % 16:
        raise ArtifactError(
            f"{stored.path}: {stored.layer[:200]!r} has group_size {ascii(group)[:100]}; expected from 4 to "
            f"{LARGEST_GROUP}, of {W4A8} a divisor or multiple of 16, so quantize it again"
        )
    return group


def unpacked(stored: LayerTensors, mark: Mark) -> Shape:
    """The shape of a weight's numbers, of which bytes may hold several.

    Six bits cannot be told from the bytes, so that the scales' shape says how many there are.
    """
    shape, method = tuple(stored.tensors["weight"].shape), METHODS[mark["format"]]
    scales = stored.tensors.get("weight_s_rel")
    if mark["format"] == W4A8 and scales is not None and len(scales.shape) == len(shape) == 2:
        return shape[0], scales.shape[1] * group_of(stored, mark)
    return (*shape[:-1], 2 * shape[-1]) if method.packed and shape else shape


def check_codes(codes: Codes) -> None:
    """Raises ArtifactError when a tensor of a marked weight is missing, or of a shape or dtype that does not fit."""
    stored, method, columns = codes.stored, codes.method, codes.shape[1]
    if columns % codes.group:
        raise ArtifactError(
            f"{stored.path}: {stored.layer[:200]!r} has group_size {codes.group}, which does not divide its {columns} "
            "inputs; fetch the file again"
        )
    shapes = {"weight": [tuple(stored.tensors["weight"].shape)]} | {
        end: fitting(text.replace("g", str(codes.group)), codes.shape) for end, text in method.shapes.items()
    }
    dtypes = {"weight": (method.dtype,), **method.dtypes}
    for end in dict.fromkeys((*method.needs, *stored.tensors)):
        stored.checked(end, shapes[end], dtypes.get(end, FLOAT_SCALES))
    high = codes.mark.get("full_precision_matrix_mult", False)
    if type(high) is not bool:
        raise ArtifactError(
            f"{stored.path}: {stored.layer[:200]!r} has full_precision_matrix_mult {ascii(high)[:100]}; expected true "
            "or false"
        )
    if codes.mark["format"] == W4A8 and bits_of(stored.tensors["weight"], columns) == 6:
        stored.refuse(["weight_codebook", "weight_correction"], "which six bits do not have")
        if codes.group % 16 or columns % SIX_BITS_MULTIPLE:
            raise ArtifactError(
                f"{stored.path}: {stored.layer[:200]!r} has groups of {codes.group} of its {columns} inputs in six "
                f"bits; expected multiples of 16 and of {SIX_BITS_MULTIPLE}, so quantize it again"
            )
    rotation(codes)
    linear_dtype(codes)


# Weights


def decode_scaled(stored: Codes) -> Tensor:
    numbers = stored.piece("weight").float() * stored.scale()
    return rotated(numbers, rotation(stored))


def decode_nvfp4(stored: Codes) -> Tensor:
    packed = stored.piece("weight")
    numbers = e2m1.decode(torch.stack([packed >> 4, packed & 15], dim=-1)).flatten(1)
    common = stored.scale("weight_scale_2")
    return stored.scaled(numbers, NVFP4_BLOCK, lambda codes: common * codes.view(torch.float8_e4m3fn).float())


def decode_mxfp8(stored: Codes) -> Tensor:
    return stored.scaled(stored.piece("weight").float(), MXFP8_BLOCK, powers_of_two)


def powers_of_two(exponents: Tensor) -> Tensor:
    """The numbers of E8M0's codes, fp32; 0 for code 0, as comfy-kitchen has it."""
    return (exponents.to(torch.int32) << MANTISSA).view(torch.float32)


def four_bits(packed: Tensor) -> Tensor:
    """Unsigned codes [rows, K] of bytes whose low half has the first."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def decode_w4a4(stored: Codes) -> Tensor:
    signed = (four_bits(stored.piece("weight")) ^ 8).to(torch.int8) - 8
    return rotated(signed.float() * stored.scale(), rotation(stored))


def bits_of(weight: StoredTensor, columns: int) -> int:
    return 8 * weight.shape[1] // columns


def decode_w4a8(stored: Codes) -> Tensor:
    packed, (_, columns), group = stored.piece("weight").view(torch.uint8), stored.shape, stored.group
    bits = bits_of(stored.stored.tensors["weight"], columns)
    codes = four_bits(packed[:, : columns // 2])
    if bits == 6:
        upper = packed[:, columns // 2 :, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
        codes = codes | upper.flatten(1) << 4
    if "weight_codebook" in stored.stored:
        levels = stored.stored.tensors["weight_codebook"].read().float()[codes.long()]
    else:
        levels = codes.float() - 2 ** (bits - 1)
    relative = stored.piece("weight_s_rel")
    relative = (relative.view(torch.float8_e4m3fn) if relative.dtype == torch.uint8 else relative).float()
    integers = (levels.unflatten(1, (-1, group)) * relative[..., None]).round().clamp(-127, 127)
    weight = integers * stored.scale("weight_s_channel").reshape(-1, 1, 1)
    if "weight_correction" in stored.stored:
        weight = weight + stored.columns("weight_correction")
    return rotated(weight.flatten(1), rotation(stored))


def decode_awq(stored: Codes) -> Tensor:
    numbers = four_bits(stored.piece("weight")).float().unflatten(1, (-1, stored.group)) - 8
    return (numbers * stored.columns("weight_scale") + stored.columns("weight_zeros")).flatten(1)


def rotation(stored: Codes) -> int:
    """How many inputs are rotated together, 0 for none. Raises ArtifactError for a number that cannot be."""
    always, layer = stored.method.rotates, f"{stored.stored.path}: {stored.stored.layer[:200]!r}"
    if not entry(stored.mark, "convrot", always):
        if always:
            raise ArtifactError(
                f"{layer} is in {stored.mark['format']} without convrot, which ComfyUI rotates all the same; quantize "
                "it again"
            )
        return 0
    group = entry(stored.mark, "convrot_groupsize", 256)
    powers = [4**power for power in range(1, LARGEST_GROUP.bit_length() // 2 + 1)]
    if type(group) is not int or group not in powers or stored.shape[1] % group:
        raise ArtifactError(
            f"{layer} has convrot_groupsize {ascii(group)[:100]}; expected "
            f"a power of 4 up to {LARGEST_GROUP} that divides its {stored.shape[1]} inputs, so quantize it again"
        )
    return group


# Inputs


def int8_inputs(stored: Codes) -> Inputs:
    group = rotation(stored)
    return Rotated(INT8, group) if group else INT8


def linear_dtype(stored: Codes) -> str:
    """Raises ArtifactError for one that convrot_w4a4 does not have, and for scales in groups, which no GPU has."""
    found = entry(stored.mark, "linear_dtype", "int4")
    if found not in ("int4", "int8") or entry(stored.mark, "quant_group_size", 64) != 64:
        raise ArtifactError(
            f"{stored.stored.path}: {stored.stored.layer[:200]!r} has linear_dtype {ascii(found)[:100]} or another "
            "quant_group_size than 64; expected int4 or int8, so quantize it again"
        )
    return found


def w4a4_inputs(stored: Codes) -> Inputs:
    return Rotated(INT4 if linear_dtype(stored) == "int4" else INT8, rotation(stored))


def w4a8_inputs(stored: Codes) -> Inputs | None:
    return None if "weight_correction" in stored.stored else int8_inputs(stored)


def nvfp4_inputs(stored: Codes) -> Inputs:
    static = stored.number("input_scale")
    return Nvfp4(static, smallest=0.0, also=" and one each time" if static is None else "")


@dataclass(frozen=True)
class Mxfp8:
    """Inputs in E4M3, in blocks of 32 with scales that are powers of two: ``quantize_mxfp8``."""

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


def float8(dtype: torch.dtype) -> Method:
    return Method(
        dtype, "1 for all", decode_scaled,
        lambda stored: StaticFloat8(stored.number("input_scale") or 1.0, dtype, reciprocal=True),
        {"weight_scale": NUMBER, "input_scale": NUMBER},
    )  # fmt: skip


METHODS = {
    **{name: float8(dtype) for dtype, name in FLOAT8.items()},
    "int8_tensorwise": Method(
        torch.int8, "1 for a row", decode_scaled, int8_inputs,
        {"weight_scale": f"{NUMBER}|N 1|N"}, entries=ROTATING,
    ),
    "nvfp4": Method(
        torch.uint8, "1 for 16 numbers", decode_nvfp4, nvfp4_inputs,
        {
            "weight_scale": "N^128 K/16^4", "weight_scale_2": NUMBER, "input_scale": NUMBER, "pre_quant_scale": "K",
        },
        needs=("weight_scale", "weight_scale_2"), dtypes={"weight_scale": (torch.float8_e4m3fn, torch.uint8)},
        multiple=NVFP4_MULTIPLE, packed=True,
    ),
    "mxfp8": Method(
        torch.float8_e4m3fn, "1 for 32 numbers", decode_mxfp8, lambda stored: Mxfp8(),
        {"weight_scale": "N^128 K/32^4", "input_scale": NUMBER},
        dtypes={"weight_scale": (torch.uint8, torch.float8_e8m0fnu)}, multiple=MXFP8_BLOCK,
    ),
    "convrot_w4a4": Method(
        torch.int8, "1 for a row", decode_w4a4, w4a4_inputs,
        {"weight_scale": "N|N 1"},
        entries=ROTATING | {"linear_dtype", "quant_group_size"}, packed=True, rotates=True,
    ),
    W4A8: Method(
        torch.int8, "1 for {group} numbers", decode_w4a8, w4a8_inputs,
        {
            "weight": "N K/2|N K/4*3", "weight_s_rel": "N K/g", "weight_s_channel": "N",
            "weight_codebook": "1*16", "weight_correction": "K/g N",
        },
        needs=("weight_s_rel", "weight_s_channel"),
        dtypes={"weight_s_rel": (torch.float8_e4m3fn, torch.uint8, torch.float32)},
        entries=ROTATING | {"group_size"}, packed=True, rotates=True, group=16,
    ),
    "awq_w4a16": Method(
        torch.int8, "1 for {group} numbers", decode_awq, lambda stored: None,
        {"weight_scale": "K/g N", "weight_zeros": "K/g N"},
        needs=("weight_scale", "weight_zeros"), entries=frozenset({"group_size"}), packed=True, group=64,
    ),
}  # fmt: skip
