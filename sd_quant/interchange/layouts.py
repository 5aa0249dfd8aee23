"""How a quantized weight is stored: a ``Layout`` is a row of ``Piece``s; one codec checks, reads and writes all rows.

A weight [N, K] is numbers times scales; tools differ in names, shapes and dtypes, which a row says. Each format keeps
its rows beside its facts. The road not taken is a reader and a writer for each tool, which state all shapes twice.
"""

import re
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange.denoiser import Inputs, QuantizedLayer
from sd_quant.interchange.stored import LayerTensors, Shape, finite, shown
from sd_quant.interchange.weights import flat_shape, lazy_piece
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.names.authors import Rows, rows_of
from sd_quant.numbers import up_to
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, e2m1
from sd_quant.quantization.formats.blocks import pack_nibbles, per_number

NUMBERS, SCALES, OF_ALL, INPUTS = "codes", "scales", "the scale of all", "the inputs' scale"  # what a tensor holds
E4M3, INT8, UINT8, FP32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.float32


@dataclass(frozen=True)
class Piece:
    """A tensor of a weight: the end of its name, its shapes, apart by |, and dtypes, of which the first are written.

    A shape is in the weight's, such as ``N^128 K/16``: / divides and rounds up, ^ pads to a multiple, "" is one number.
    Of a convolution K is [in, height, width], and _ as many ones.
    """

    end: str
    shapes: str
    dtypes: tuple[torch.dtype, ...]
    holds: str = SCALES
    optional: bool = False


def fitting(texts: str, shape: Shape) -> list[Shape]:
    """The shapes beside a weight of this ``shape``."""
    return [sizes(text, shape) for text in texts.split("|")]


def sizes(text: str, shape: Shape) -> Shape:
    found: list[int] = []
    for name, changes in re.findall(r"(\w)((?:[/^*]\d+)*)", text):
        *others, last = {"N": shape[:1], "K": shape[1:], "_": (1,) * len(shape[1:]), "1": (1,)}[name]
        for change, by in re.findall(r"(.)(\d+)", changes):
            last = last * int(by) if change == "*" else up_to(last, int(by)) // (int(by) if change == "/" else 1)
        found += [*others, last]
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """The tensors of a weight in E4M3 or INT8, or in E2M1 as bytes with the first of two numbers in the low half."""

    format: str  # and ``scales``: see ``QuantizedLayer``
    scales: str
    pieces: tuple[Piece, ...]
    consumer: str = ""  # that quantizes linears only; "": convolutions too
    rows: int = 1  # with one scale
    columns: int = 1  # likewise, of which K is a multiple

    def check(self, own: LayerTensors, shape: Shape) -> None:
        """Raises ArtifactError unless the tensors are those of a weight of this ``shape``."""
        if (self.consumer and len(shape) != 2) or shape[-1] % self.columns:
            raise ArtifactError(
                f"{own.path} has a scale for {shown(own.layer)} {list(shape)}, expected a linear whose inputs are a "
                f"multiple of {self.columns}; give a checkpoint that {self.consumer or 'its tool'} opens"
            )
        for piece in self.pieces:
            if piece.end in own or not piece.optional:
                own.checked(piece.end, fitting(piece.shapes, shape), piece.dtypes)

    def layer(
        self, own: LayerTensors, shape: Shape, size: int, inputs: Inputs | None, dtype: torch.dtype = FP32
    ) -> QuantizedLayer:
        """The layer of a weight of this ``shape``. Raises ArtifactError where its tensors are others, see ``check``."""
        self.check(own, shape)
        one = self.scales == "1 for a row" and prod(own.tensors[self.pieces[1].end].shape) == 1
        weight = self.weight(own, shape, dtype)
        return QuantizedLayer(self.format, "1 for all" if one else self.scales, size, weight, inputs)

    def weight(
        self, own: LayerTensors, shape: Shape, dtype: torch.dtype = FP32, rows: Rows | None = None
    ) -> LazyTensor:
        """The weight, or the ``rows`` of it that have ``shape``, where each row has scales of its own or all have one.

        Its read raises ArtifactError for NaN and infinity.
        E2M1 is multiplied in fp32, all others in ``dtype``, and both scales of a block before the numbers.
        """

        def stored(end: str) -> Tensor:
            tensor = own.tensors[end]
            if rows is not None and prod(tensor.shape) > 1:
                tensor = rows_of(tensor, replace(rows, name=end))
            return finite(tensor.read(), own.path, f"{own.layer}.{end}")

        def read() -> Tensor:
            codes, *scales = (stored(piece.end) for piece in self.pieces if piece.holds != INPUTS)
            numbers = in_e2m1(codes) if codes.dtype == UINT8 else codes.to(dtype)
            scale = scales[0].to(numbers)
            for common in scales[1:]:
                scale = scale * common.to(numbers).reshape(())
            return finite((numbers * self.spread(scale, shape)).to(dtype), own.path, f"{own.layer}.weight")

        return LazyTensor(shape, dtype, read)

    def spread(self, scale: Tensor, shape: Shape) -> Tensor:
        """Scales of all, of rows or of blocks, as they multiply numbers of this ``shape``."""
        if scale.numel() == 1:
            return scale.reshape(())
        if self.columns == 1:
            return scale.reshape(-1, *(1 for _ in shape[1:]))
        return per_number(scale.repeat_interleave(self.rows, 0)[: shape[0]], shape[-1])

    def tensors(self, checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
        """The tensors of a quantized linear by their names, as they are written."""
        few = torch.zeros(1, FORMATS[layer.format].block or 1)  # the last scale is the one that all have in common
        found, rows = dict[str, Readable](), layer.weight_shape[0]
        for piece in self.pieces:
            name, dtype = f"{layer.name}.{piece.end}", piece.dtypes[0]
            shape = fitting(piece.shapes, flat_shape(layer))[0]
            if piece.holds == NUMBERS:
                pack = pack_nibbles if dtype == UINT8 else Tensor.contiguous
                found[name] = lazy_piece(checkpoint, layer, 0, shape, dtype, pack)
            elif piece.holds == SCALES:  # of all rows, or one in their place
                found[name] = lazy_piece(checkpoint, layer, 1, shape, dtype, lambda x: x.expand(rows, -1)[:: self.rows])
            elif piece.holds == INPUTS:
                found[name] = lazy(layer.activation_scales(few)[-1].reshape(()).to(dtype))
            else:
                scales = layer.rounded if layer.rounded is not None else layer.weight_scales(few)
                found[name] = lazy(scales[-1].reshape(()).to(dtype))
        return found


def in_e2m1(packed: Tensor) -> Tensor:
    """The numbers [N, ..., K], fp32, of bytes [N, ..., K / 2] with the first of two in the low half."""
    return e2m1.decode(torch.stack([packed & 15, packed >> 4], dim=-1)).flatten(-2)
