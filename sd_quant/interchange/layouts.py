"""Storage of quantized weights: a ``Layout`` lists a weight's tensors as ``Piece``s; one codec serves all layouts.

A weight [N, K] is quantized values times scales; a layout has names, shapes, dtypes and packing of the tensors. Each
format's module has its layouts. Alternative not taken: a reader and a writer per tool, which state shapes twice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange.denoiser import Inputs, QuantizedLayer
from sd_quant.interchange.stored import LayerTensors, Shape, finite, shown
from sd_quant.interchange.weights import JoinedLayers, alone, codes_and_scales, has_static_input
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.names.authors import Rows, joined, rows_of
from sd_quant.numbers import up_to
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, e2m1
from sd_quant.quantization.formats.blocks import from_tiles, in_tiles, pack_nibbles
from sd_quant.quantization.rotation import rotated

NUMBERS, SCALES, OF_ALL, INPUTS = "codes", "scales", "the scale of all", "the inputs' scale"  # what a tensor holds
ADDED, FACTOR, OTHER = "what is added", "the inputs' factor", "what the layout's own formula reads"
ZEROS = "zero points, which are subtracted from the codes"
E4M3, INT8, UINT8, INT32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32
FP32, HALF_FIRST = torch.float32, (torch.float16, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Packing:
    """The order of numbers in a tensor: ``unpack(tensor, shape of the numbers)``, ``pack(numbers)``."""

    unpack: Callable[[Tensor, Shape], Tensor]
    pack: Callable[..., Tensor] = Tensor.contiguous
    in_a_byte: int = 1


def in_e2m1(packed: Tensor) -> Tensor:
    """Decode E2M1 numbers [N, ..., K] to fp32 from bytes [N, ..., K / 2] with the first number in the low half."""
    return e2m1.decode(torch.stack([packed & 15, packed >> 4], dim=-1)).flatten(-2)


IN_ORDER = Packing(lambda stored, shape: stored)
TWO_IN_A_BYTE = Packing(lambda stored, shape: in_e2m1(stored), pack_nibbles, in_a_byte=2)
TURNED = Packing(lambda stored, shape: stored.T, Tensor.t)
TILES = Packing(  # of E4M3, or of its bytes
    lambda stored, shape: from_tiles(stored, *shape).view(E4M3), lambda scales: in_tiles(scales.to(E4M3))
)


@dataclass(frozen=True)
class Piece:
    """A stored tensor of a weight: name suffix, shapes separated by |, and dtypes; the first of each are written.

    In a shape such as ``N^128 K/16``, N are outputs, K inputs (a convolution's [in, height, width], _ as many ones), g
    inputs per scale, see ``Layout.in_groups``; / divides and rounds up, ^ pads to a multiple; "" is a single number.
    """

    end: str
    shapes: str
    dtypes: tuple[torch.dtype, ...]
    holds: str = SCALES
    optional: bool = False
    packing: Packing = IN_ORDER
    of: tuple[int, ...] = ()  # indices in ``codes_and_scales``; (): the codes, or the first scales


def fitting(texts: str, shape: Shape) -> list[Shape]:
    """Return the shapes that ``texts``, as in ``Piece.shapes``, allow for a tensor of a weight of this ``shape``."""
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
    """The stored tensors of a weight: quantized values, scales that multiply them, and an optional addend."""

    format: str  # and ``scales``: see ``QuantizedLayer``
    scales: str
    pieces: tuple[Piece, ...]
    consumer: str = ""  # a consumer that quantizes only linears; "": convolutions too
    rows: int = 1  # with one scale
    columns: int = 1  # likewise, of which K is a multiple unless it is padded
    multiple: int = 1  # both sides of the stored weight are padded to multiples
    rotation: int = 0  # inputs that are rotated together, and rows with them
    formula: "Callable[[Layout, Mapping[Piece, Tensor], Shape], Tensor] | None" = None  # None: the product

    def in_groups(self, columns: int) -> "Layout":
        """Return the layout with ``columns`` inputs per scale; unchanged if the layout fixes their number."""
        if "{group}" not in self.scales:
            return self
        pieces = tuple(replace(piece, shapes=piece.shapes.replace("g", str(columns))) for piece in self.pieces)
        return replace(self, columns=columns, scales=self.scales.format(group=columns), pieces=pieces)

    def unpacked(self, stored: Shape) -> Shape:
        """Return the weight's shape, given the shape of the stored tensor of quantized values."""
        return (*stored[:-1], *(size * self.pieces[0].packing.in_a_byte for size in stored[-1:]))

    def check(self, own: LayerTensors, shape: Shape) -> None:
        """Raise ArtifactError unless the tensors fit a weight of this ``shape``."""
        if (self.consumer and len(shape) != 2) or (self.multiple == 1 and shape[-1] % self.columns):
            raise ArtifactError(
                f"{own.path} has a scale for {shown(own.layer)} {list(shape)}, expected a linear whose inputs are a "
                f"multiple of {self.columns}; give a checkpoint that {self.consumer or 'its tool'} opens"
            )
        for piece in self.pieces:
            if piece.end in own or not piece.optional:
                own.checked(piece.end, fitting(piece.shapes, shape), piece.dtypes)

    def layer(
        self,
        own: LayerTensors,
        shape: Shape,
        size: int,
        inputs: Inputs | None,
        dtype: torch.dtype = FP32,
        parts: Sequence[Rows] = (),
    ) -> QuantizedLayer:
        """Return the layer with a weight of ``shape``: the tensors ``own``, of ``size`` bytes, or their rows ``parts``.

        Raises ArtifactError for tensors that do not fit.
        """
        stored = (parts[0].of, *shape[1:]) if parts else shape
        self.check(own, stored)
        one = self.scales == "1 for a row" and prod(own.tensors[self.pieces[1].end].shape) == 1
        rows = parts or [Rows("", 0, shape[0], shape[0])]
        weight = joined([self.weight(own, stored, dtype, each) for each in rows])
        return QuantizedLayer(
            self.format, "1 for all" if one else self.scales, size * shape[0] // stored[0], weight, inputs
        )

    def weight(self, own: LayerTensors, stored: Shape, dtype: torch.dtype, rows: Rows) -> LazyTensor:
        """Dequantize ``rows`` of a weight of the shape ``stored``; reading raises ArtifactError for NaN and infinity.

        Numbers that share bytes are multiplied in fp32, others in ``dtype``; a common scale multiplies scales first.
        """
        shape = (rows.stop - rows.start, *stored[1:])

        def values(piece: Piece) -> Tensor:
            tensor = own.tensors[piece.end]
            if piece.holds == NUMBERS:
                some = (rows.start, rows.stop) != (0, stored[0])
                tensor = rows_of(tensor, replace(rows, of=tensor.shape[0])) if some else tensor
                found = piece.packing.unpack(tensor.read(), shape)
                found = found if found.dtype == FP32 else found.to(dtype)
            else:
                found = piece.packing.unpack(
                    tensor.read(), (stored[0], up_to(stored[-1], self.columns) // self.columns)
                )
                found = found[rows.start : rows.stop] if found.numel() > 1 and piece.holds != OTHER else found
            return finite(found, own.path, f"{own.layer}.{piece.end}")

        def read() -> Tensor:
            found = {piece: values(piece) for piece in self.pieces
                     if piece.end in own and piece.holds not in (INPUTS, FACTOR)}  # fmt: skip
            weight = rotated((self.formula or Layout.product)(self, found, shape), self.rotation)
            return finite(weight.to(dtype), own.path, f"{own.layer}.weight")

        return LazyTensor(shape, dtype, read)

    def product(self, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
        """Compute the weight of this ``shape``: (numbers - zero points) * scales + addend."""
        (numbers,), zeros, scales, added = (
            [each for piece, each in found.items() if piece.holds in kinds]
            for kinds in ((NUMBERS,), (ZEROS,), (SCALES, OF_ALL), (ADDED,))
        )
        for each in zeros:
            numbers = numbers - self.spread(each.to(numbers), shape)
        scale = scales[0].to(numbers)
        for common in scales[1:]:
            scale = scale * common.to(numbers).reshape(())
        weight = numbers * self.spread(scale, shape)
        for each in added:
            weight = weight + self.spread(each.to(numbers), shape)
        return weight

    def spread(self, scale: Tensor, shape: Shape) -> Tensor:
        """Expand scales per tensor, row or block to multiply numbers of this ``shape``."""
        if scale.numel() == 1:
            return scale.reshape(())
        if self.columns == 1:
            return scale.reshape(-1, *(1 for _ in shape[1:]))
        rows = scale.repeat_interleave(self.rows, 0)[: shape[0]]
        return rows.repeat_interleave(self.columns, -1)[..., : shape[-1]]

    def tensors(self, checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
        """Return the tensors of a quantized linear to be written, by name."""
        return {f"{layer.name}.{end}": each for end, each in self.of_joined(checkpoint, alone(layer)).items()}

    def of_joined(self, checkpoint: Checkpoint, layers: JoinedLayers) -> dict[str, Readable]:
        """Return the tensors of linears that are one weight in a file, by the suffixes of their names."""
        first, found = layers.first, dict[str, Readable]()
        few = torch.zeros(1, FORMATS[first.format].block or 1)  # the last scale is the one that all have in common

        def rows(index: int) -> Tensor:
            return layers.rows(lambda each: codes_and_scales(checkpoint, each)[index].expand(each.weight_shape[0], -1))

        def packed(piece: Piece, shape: Shape) -> Tensor:
            found = piece.packing.pack(*map(rows, piece.of or (0 if piece.holds == NUMBERS else 1,)))
            return found[:: self.rows if piece.holds == SCALES else 1].to(piece.dtypes[0]).reshape(shape)

        for piece in self.pieces:
            shape, dtype = fitting(piece.shapes, layers.shape)[0], piece.dtypes[0]
            if piece.holds in (NUMBERS, SCALES):
                found[piece.end] = LazyTensor(shape, dtype, partial(packed, piece, shape))
            elif piece.holds == OF_ALL:
                scales = first.rounded if first.rounded is not None else first.weight_scales(few)
                found[piece.end] = lazy(scales[-1].reshape(()).to(dtype))
            elif piece.holds == ZEROS or (piece.holds == ADDED and not piece.optional):
                zeros = torch.zeros(layers.shape[0], up_to(layers.shape[1], self.columns) // self.columns)
                found[piece.end] = lazy(piece.packing.pack(zeros).to(dtype).reshape(shape))
            elif piece.holds == INPUTS and has_static_input(first):
                found[piece.end] = lazy(first.activation_scales(few)[-1].reshape(shape).to(dtype))
            elif piece.holds == FACTOR and first.multiplies:
                found[piece.end] = lazy(first.pre_quant_scale.half().to(dtype))  # as every graph of ours has it
        return found
