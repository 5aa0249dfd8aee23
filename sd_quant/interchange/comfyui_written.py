"""How a quantized linear is written with ComfyUI's marks: one row of ``WRITTEN`` for each number format.

``comfyui_marks`` has what each mark stands for, and reads it. Linears whose weights are one in the file, such as query,
key and value, are written together.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange import AS_ASSIGNED
from sd_quant.interchange.comfyui_marks import MANTISSA, MARK, METHODS, MXFP8_BLOCK, NVFP4_MULTIPLE, W4A8
from sd_quant.interchange.layouts import E4M3, FP32, INT8, UINT8, sizes
from sd_quant.interchange.stored import FP8
from sd_quant.interchange.weights import JoinedLayers, codes_and_scales, lazy_piece
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import in_tiles, pack_nibbles

Tensors = Mapping[str, Readable]  # by the ends of their names


@dataclass(frozen=True)
class Stored:
    """A tensor of all rows: its shape for a weight [N, K] as in ``layouts``, and of which codes (0) or scales it is."""

    end: str
    shape: str  # "": the scale of all
    dtype: torch.dtype
    of: tuple[int, ...]  # none: zeros
    stored: Callable[..., Tensor] = Tensor.contiguous

    def read(self, checkpoint: Checkpoint, layers: JoinedLayers) -> LazyTensor:
        """The tensor for linears that are one weight in the file."""
        shape = sizes(self.shape, layers.shape)
        if not shape:
            return lazy_piece(checkpoint, layers.first, -1, shape, self.dtype)
        if not self.of:
            return lazy(torch.zeros(shape, dtype=self.dtype))

        def rows(index: int) -> Tensor:
            return layers.rows(lambda each: codes_and_scales(checkpoint, each)[index].expand(each.weight_shape[0], -1))

        return LazyTensor(shape, self.dtype, lambda: self.stored(*map(rows, self.of)).to(self.dtype).reshape(shape))


@dataclass(frozen=True)
class Written:
    """A mark and the tensors beside it."""

    name: str  # in ComfyUI's QUANT_ALGOS
    tensors: tuple[Stored, ...]
    entries: Mapping[str, Any] = field(default_factory=dict)  # of every such mark


# Codes as they are stored


def in_tiles_of_e4m3(scales: Tensor) -> Tensor:
    return in_tiles(scales.to(torch.float8_e4m3fn))


def e8m0(codes: Tensor, scales: Tensor) -> Tensor:
    """The exponents of powers of two [rows, blocks] plus 127, uint8; 0 for a block of zeros, as in comfy-kitchen."""
    zeros = codes.float().unflatten(1, (-1, MXFP8_BLOCK)).eq(0).all(-1)
    return torch.where(zeros, 0, scales.view(torch.int32) >> MANTISSA).to(torch.uint8)


def with_rows_of_zeros(codes: Tensor) -> Tensor:
    """Codes of eight bits, to a multiple of 32 rows."""
    return F.pad(codes.view(torch.uint8), (0, 0, 0, -len(codes) % MXFP8_BLOCK)).view(codes.dtype)


def signed(codes: Tensor) -> Tensor:
    """Codes of four bits in two's complement, the first in the low half of a byte."""
    return pack_nibbles(codes).view(torch.int8)


def unsigned(codes: Tensor) -> Tensor:
    """Codes of four bits plus 8, the first in the low half of a byte."""
    return pack_nibbles(codes + 8).view(torch.int8)


def packed(codes: Tensor) -> Tensor:
    """Codes of four bits, the first in the high half of a byte, padded to multiples of 16."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % NVFP4_MULTIPLE, 0, -rows % NVFP4_MULTIPLE))
    return padded[:, ::2] << 4 | padded[:, 1::2]


INT4_GROUP, RELATIVE = FORMATS["int4"].block, FORMATS["int4_in_int8"].block
WRITTEN = {
    "fp8": Written(FP8, (Stored("weight", "N K", E4M3, (0,)), Stored("weight_scale", "", FP32, (1,)))),
    "int8": Written(
        "int8_tensorwise", (Stored("weight", "N K", INT8, (0,)), Stored("weight_scale", "N 1", FP32, (1,)))
    ),
    "nvfp4": Written("nvfp4", (
        Stored("weight", "N^16 K^16/2", UINT8, (0,), packed),
        Stored("weight_scale", "N^128 K^16/16^4", E4M3, (1,), in_tiles_of_e4m3),
        Stored("weight_scale_2", "", FP32, (2,)),
    )),
    "mxfp8": Written("mxfp8", (
        Stored("weight", "N^32 K", E4M3, (0,), with_rows_of_zeros),
        Stored("weight_scale", "N^128 K/32^4", UINT8, (0, 1), lambda codes, scales: in_tiles(e8m0(codes, scales))),
    )),
    "int4_per_row": Written(
        "convrot_w4a4", (Stored("weight", "N K/2", INT8, (0,), signed), Stored("weight_scale", "N", FP32, (1,))),
        {"linear_dtype": "int4"},
    ),
    "int4_in_int8": Written(W4A8, (
        Stored("weight", "N K/2", INT8, (0,), unsigned), Stored("weight_s_rel", f"N K/{RELATIVE}", E4M3, (1,)),
        Stored("weight_s_channel", "N", FP32, (2,)),
    ), {"group_size": RELATIVE}),
    "int4": Written("awq_w4a16", (
        Stored("weight", "N K/2", INT8, (0,), unsigned),
        Stored("weight_scale", f"K/{INT4_GROUP} N", torch.float16, (1,), Tensor.t),
        Stored("weight_zeros", f"K/{INT4_GROUP} N", torch.float16, ()),
    )),
}  # fmt: skip


def mark_of(layer: LayerAssignment, inputs: str) -> dict[str, Any]:
    written = WRITTEN[layer.format]
    mark = {"format": written.name, **written.entries}
    if layer.rotation:
        mark["convrot_groupsize"] = layer.rotation
        if not METHODS[written.name].rotates:  # by its name
            mark["convrot"] = True
    if layer.activation_format is None and inputs == AS_ASSIGNED:
        mark["full_precision_matrix_mult"] = True
    return mark


def tensors_of(checkpoint: Checkpoint, layers: JoinedLayers, formats: Mapping[str, str]) -> Tensors:
    """The tensors of a quantized linear in place of its weight; ``formats`` are those of ``ForeignFormat``."""
    layer = layers.first
    mark = json.dumps(mark_of(layer, formats[layer.format])).encode()
    tensors = {
        MARK: lazy(torch.frombuffer(bytearray(mark), dtype=torch.uint8)),
        **{each.end: each.read(checkpoint, layers) for each in WRITTEN[layer.format].tensors},
    }
    inputs = layer.activation_format
    if inputs is not None and FORMATS[inputs].needs_amax:  # one static scale, or the common one of its blocks
        blocks = torch.zeros(1, FORMATS[layer.format].block or 1)
        tensors["input_scale"] = lazy(layer.activation_scales(blocks)[-1].reshape(()).float())
    if layer.multiplies:
        tensors["pre_quant_scale"] = lazy(layer.pre_quant_scale.half())
    return tensors
