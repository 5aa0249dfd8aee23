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
from sd_quant.interchange.comfyui_marks import (
    MANTISSA,
    MARK,
    METHODS,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    NVFP4_MULTIPLE,
    W4A8,
    tiles,
)
from sd_quant.interchange.stored import FP8
from sd_quant.interchange.weights import JoinedLayers, codes_and_scales, lazy_piece
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.numbers import up_to
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import in_tiles, pack_nibbles

Tensors = Mapping[str, Readable]  # by the ends of their names


@dataclass(frozen=True)
class Rows:
    """The codes and the scales of linears that are one weight in the file."""

    checkpoint: Checkpoint
    layers: JoinedLayers

    def piece(
        self, index: int, shape: tuple[int, ...], dtype: torch.dtype, stored: Callable[[Tensor], Tensor] = lambda x: x
    ) -> LazyTensor:
        """The codes, or from ``index`` 1 on the scales, of all rows as the file stores them."""

        def read() -> Tensor:
            pieces = self.layers.rows(lambda each: codes_and_scales(self.checkpoint, each)[index])
            return stored(pieces).to(dtype).reshape(shape)

        return LazyTensor(shape, dtype, read)


@dataclass(frozen=True)
class Written:
    """A mark and the tensors beside it."""

    name: str  # in ComfyUI's QUANT_ALGOS
    tensors: Callable[[Rows], Tensors]
    entries: Mapping[str, Any] = field(default_factory=dict)  # of every such mark


# The formats


def fp8(rows: Rows) -> Tensors:
    scale = rows.layers.first.weight_scale.float()[0]
    return {"weight": rows.piece(0, rows.layers.shape, torch.float8_e4m3fn), "weight_scale": lazy(scale)}


def int8(rows: Rows) -> Tensors:
    scale = rows.layers.rows(lambda each: each.weight_scale.float().expand(each.weight_shape[0]))
    return {
        "weight": rows.piece(0, rows.layers.shape, torch.int8),
        "weight_scale": lazy(scale[:, None].contiguous()),
    }


def nvfp4(rows: Rows) -> Tensors:
    high, wide = (up_to(side, NVFP4_MULTIPLE) for side in rows.layers.shape)
    (tiled,) = tiles(*rows.layers.shape, NVFP4_MULTIPLE, NVFP4_BLOCK)
    return {
        "weight": rows.piece(0, (high, wide // 2), torch.uint8, packed),
        "weight_scale": rows.piece(1, tiled, torch.float8_e4m3fn, in_tiles_of_e4m3),
        "weight_scale_2": lazy_piece(rows.checkpoint, rows.layers.first, 2, (), torch.float32),
    }


def mxfp8(rows: Rows) -> Tensors:
    high, wide = rows.layers.shape
    (tiled,) = tiles(high, wide, MXFP8_BLOCK, MXFP8_BLOCK)

    def exponents() -> Tensor:
        return in_tiles(rows.layers.rows(lambda each: e8m0(*codes_and_scales(rows.checkpoint, each))))

    return {
        "weight": rows.piece(0, (up_to(high, MXFP8_BLOCK), wide), torch.float8_e4m3fn, with_rows_of_zeros),
        "weight_scale": LazyTensor(tiled, torch.uint8, exponents),
    }


def convrot_w4a4(rows: Rows) -> Tensors:
    high, wide = rows.layers.shape
    return {
        "weight": rows.piece(0, (high, wide // 2), torch.int8, signed),
        "weight_scale": rows.piece(1, (high,), torch.float32),
    }


def asym_w4a8_int8(rows: Rows) -> Tensors:
    high, wide = rows.layers.shape
    return {
        "weight": rows.piece(0, (high, wide // 2), torch.int8, unsigned),
        "weight_s_rel": rows.piece(1, (high, wide // FORMATS["int4_in_int8"].block), torch.float8_e4m3fn),
        "weight_s_channel": rows.piece(2, (high,), torch.float32),
    }


def awq_w4a16(rows: Rows) -> Tensors:
    high, wide = rows.layers.shape
    by_block = (wide // FORMATS["int4"].block, high)
    return {
        "weight": rows.piece(0, (high, wide // 2), torch.int8, unsigned),
        "weight_scale": rows.piece(1, by_block, torch.float16, Tensor.t),
        "weight_zeros": lazy(torch.zeros(by_block, dtype=torch.float16)),
    }


WRITTEN = {
    "fp8": Written(FP8, fp8),
    "int8": Written("int8_tensorwise", int8),
    "nvfp4": Written("nvfp4", nvfp4),
    "mxfp8": Written("mxfp8", mxfp8),
    "int4_per_row": Written("convrot_w4a4", convrot_w4a4, {"linear_dtype": "int4"}),
    "int4_in_int8": Written(W4A8, asym_w4a8_int8, {"group_size": FORMATS["int4_in_int8"].block}),
    "int4": Written("awq_w4a16", awq_w4a16),
}


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
        **WRITTEN[layer.format].tensors(Rows(checkpoint, layers)),
    }
    inputs = layer.activation_format
    if inputs is not None and FORMATS[inputs].needs_amax:  # one static scale, or the common one of its blocks
        blocks = torch.zeros(1, FORMATS[layer.format].block or 1)
        tensors["input_scale"] = lazy(layer.activation_scales(blocks)[-1].reshape(()).float())
    if layer.multiplies:
        tensors["pre_quant_scale"] = lazy(layer.pre_quant_scale.half())
    return tensors


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
