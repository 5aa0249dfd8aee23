"""Linears of nunchaku's kernels, read and written: SVDQuant's W4A4 with a branch, and AWQ's W4A16.

    y = Q(x / smooth_factor) W^T + (x proj_down) proj_up^T + bias

``smooth_factor`` divides where a ``pre_quant_scale`` multiplies, and the branch reads unsmoothed inputs. Inputs are
quantized as the network runs: INT4 in blocks of 64 with the scale amax / 7, or E2M1 in blocks of 16 with scales in E4M3
and without a common scale. Behind a fused GELU the kernel adds ``SHIFT`` to INT4 inputs before division, and rounds to
0..15. The bias compensates the shift, for W only: the branch reads unshifted inputs (``EpilogueLoraDown`` is before
``EpilogueQuantize`` in ``gemm_w4a4_launch_impl.cuh``). N are outputs, K inputs, R is the rank of the branch.

| tensor                     | W4A4 in INT4         | in NVFP4                                | W4A16            |
|----------------------------|----------------------|-----------------------------------------|------------------|
| qweight                    | int8 [N, K / 2]      | the same, E2M1                          | int32 [N/4, K/2] |
| wscales                    | 16 bits [K / 64, N]  | E4M3 [K / 16, N]                        | [K / 64, N]      |
| wcscales, wtscale          |                      | [N] and one number, which both multiply |                  |
| wzeros                     |                      |                                         | [K / 64, N]      |
| smooth_factor              | [K]                  | [K]                                     |                  |
| proj_down, proj_up         | [K, R] and [N, R]    | [K, R] and [N, R]                       |                  |
| bias                       | [N]                  | [N]                                     | [N]              |

All tensors except W4A16's scales and biases lie in the tiles of ``nunchaku_tiles``. W4A16 is ``q * wscales + wzeros``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor
from sd_quant.interchange import nunchaku_tiles as tiles
from sd_quant.interchange.denoiser import Inputs, QuantizedLayer
from sd_quant.interchange.inputs import BlockInteger, Columns, Multiplied, Nvfp4
from sd_quant.interchange.layouts import ADDED, E4M3, INT8, NUMBERS, OF_ALL, Layout, Packing, Piece, fitting
from sd_quant.interchange.stored import FLOAT_SCALES, LayerTensors
from sd_quant.interchange.weights import Assignment, codes_and_scales, quantized
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.numbers import up_to
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import e2m1, nvfp4
from sd_quant.quantization.formats.blocks import per_number
from sd_quant.quantization.formats.integers import INT4

ENDS = (
    "qweight", "wscales", "wcscales", "wtscale", "wzeros", "smooth_factor", "smooth_factor_orig",
    "proj_down", "proj_up", "bias",
)  # fmt: skip
SHIFT = 0.171875  # SHIFT_GELU in gemm_w4a4_launch_impl.cuh; the smallest number that a GELU makes is -0.17
MAX_RANK = 1024
ZERO = 8  # the code of W4A16 that stands for 0 where we write
BLOCKS = {"int4": INT4.size, "nvfp4": nvfp4.BLOCK}


def linears_of(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, LayerTensors]:
    """Return the tensors, bias included, of each linear that has a ``qweight``, by the linear's name."""
    names = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    found: dict[str, dict[str, StoredTensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        name, _, end = key.rpartition(".")
        if name in names and end in ENDS:
            found[name][end] = tensor
    return {name: LayerTensors(path, name, own) for name, own in found.items()}


# Reading


@dataclass(frozen=True)
class Stored:
    """A linear [rows, columns] of SVDQuant's W4A4 as stored in a file, in tiles."""

    tensors: LayerTensors
    rows: int
    columns: int
    format: str  # of ``BLOCKS``
    rank: int
    shift: float = 0.0  # of the inputs

    def smooth(self) -> Tensor:
        """Return the factors that divide the inputs, fp32 [columns]. Raises ArtifactError for a factor not above 0."""
        factors = tiles.vector_from_tiles(self.tensors.finite("smooth_factor").float())
        if not bool((factors > 0).all() and (1 / factors).isfinite().all()):
            raise ArtifactError(
                f"{self.tensors.path}: {self.tensors.name('smooth_factor')} has numbers that are not above 0, by which "
                "inputs are divided; fetch the file again"
            )
        return factors

    def residual(self) -> Tensor:
        """Dequantize the weight without the branch, for smoothed inputs: fp32 [rows, columns]."""
        codes = tiles.unpacked(tiles.codes(self.rows, self.columns), self.tensors.tensors["qweight"].read())
        groups = self.columns // BLOCKS[self.format]
        scales = self.tensors.finite("wscales")
        if self.format == "int4":
            numbers = ((codes.view(INT8) ^ 8) - 8).float()
            return numbers * per_number(tiles.scales(self.rows, groups).natural(scales).float(), self.columns)
        natural = tiles.micro_scales(self.rows, groups).natural(scales.view(torch.uint8))
        common = self.tensors.number("wtscale") if "wtscale" in self.tensors else 1.0
        weight = e2m1.decode(codes) * per_number(natural.view(E4M3).float() * common, self.columns)
        if "wcscales" in self.tensors:
            weight *= tiles.vector_from_tiles(self.tensors.finite("wcscales").float())[:, None]
        return weight

    def up(self) -> Tensor:
        """Return the branch's ``up``, fp32 [rows, rank]."""
        return tiles.up(self.rows, self.rank).natural(self.tensors.finite("proj_up").float())

    def down(self) -> Tensor:
        """Return the branch's ``down`` for smoothed inputs, fp32 [rank, columns]."""
        return tiles.down(self.rank, self.columns).natural(self.tensors.finite("proj_down").float()) * self.smooth()

    def rounding(self) -> Inputs:
        """Return the rounding of smoothed inputs."""
        if self.format == "nvfp4":
            return Nvfp4(1.0, smallest=0.0)
        return BlockInteger(self.shift / self.smooth() if self.shift else None)

    def bias(self) -> Tensor:
        """Return the bias for inputs that are not shifted, fp32 [rows]; zeros without a stored bias."""
        if "bias" not in self.tensors:
            return torch.zeros(self.rows)
        bias = tiles.vector_from_tiles(self.tensors.finite("bias").float())
        return bias + self.residual() @ (self.shift / self.smooth()) if self.shift else bias


def stored_w4a4(tensors: LayerTensors, rows: int, columns: int, shift: float = 0.0) -> Stored:
    """Return a W4A4 linear. Raises ArtifactError for ``tensors`` that do not fit [rows, columns]."""
    if rows % tiles.SIDE or columns % tiles.SIDE:
        raise ArtifactError(
            f"{tensors.path}: {tensors.name('qweight')} is of a linear [{rows}, {columns}], expected multiples of "
            f"{tiles.SIDE}, as nunchaku's kernels need them; give a quantization of the very model it is compared with"
        )
    scales = tensors.checked("wscales", None, (*FLOAT_SCALES, E4M3))
    fmt = "int4" if tuple(scales.shape) == (columns // BLOCKS["int4"], rows) else "nvfp4"
    shape = tuple(tensors.checked("proj_down", None, FLOAT_SCALES).shape)
    rank = shape[-1] if shape and 0 < shape[-1] <= MAX_RANK and shape[-1] % tiles.RANK == 0 else tiles.RANK
    layout = layout_of(fmt, rank)
    tensors.refuse(tensors.tensors.keys() - {piece.end for piece in layout.pieces}, "which W4A4 has not")
    layout.check(tensors, (rows, columns))
    return Stored(tensors, rows, columns, fmt, rank, shift if fmt == "int4" else 0.0)


def layout_of(fmt: str, rank: int) -> Layout:
    """Return the layout, in tiles, of a W4A4 linear in ``fmt`` (int4 or nvfp4) with a branch of ``rank``."""
    of_nvfp4 = (
        Piece("wcscales", "N", FLOAT_SCALES, optional=True), Piece("wtscale", "|1|1 1", FLOAT_SCALES, OF_ALL, True),
    )  # fmt: skip
    return Layout(fmt, "", (
        Piece("qweight", "N K/2", (INT8,), NUMBERS),
        Piece("wscales", f"K/{BLOCKS[fmt]} N", FLOAT_SCALES if fmt == "int4" else (E4M3,)),
        Piece("smooth_factor", "K", FLOAT_SCALES), Piece("smooth_factor_orig", "K", FLOAT_SCALES, optional=True),
        Piece("proj_down", f"K 1*{rank}", FLOAT_SCALES), Piece("proj_up", f"N 1*{rank}", FLOAT_SCALES),
        *(of_nvfp4 if fmt == "nvfp4" else ()), Piece("bias", "N", FLOAT_SCALES, optional=True),
    ))  # fmt: skip


def w4a4_layer(parts: Sequence[Stored], rows: slice) -> tuple[QuantizedLayer, LazyTensor | None]:
    """Return the layer that joins these ``rows`` of ``parts`` along the columns, and its bias, if any part has one."""
    first, widths = parts[0], tuple(part.columns for part in parts)
    count, columns, rank = len(range(*rows.indices(first.rows))), sum(widths), sum(part.rank for part in parts)

    def weight() -> Tensor:
        return torch.cat([torch.addmm(part.residual(), part.up(), part.down())[rows] for part in parts], 1)

    factor, roundings = 1 / torch.cat([part.smooth() for part in parts]), tuple(part.rounding() for part in parts)
    rounding: Inputs = roundings[0] if len(parts) == 1 else Columns(roundings, widths)
    up = LazyTensor((count, rank), torch.float32, lambda: torch.cat([part.up()[rows] for part in parts], 1))
    down = LazyTensor((rank, columns), torch.float32, lambda: torch.block_diag(*(part.down() for part in parts)))
    layer = QuantizedLayer(
        format=f"svdquant {first.format}",
        scales=f"1 for {BLOCKS[first.format]} numbers",
        stored_bytes=sum(part.tensors.size(but=["bias"]) for part in parts) * count // first.rows,
        weight=first.tensors.decoded((count, columns), weight),
        inputs=rounding if bool((factor == 1).all()) else Multiplied(factor, False, rounding),
        branch=(up, down),
    )
    if not any("bias" in part.tensors for part in parts):
        return layer, None
    biases = LazyTensor((count,), torch.float32, lambda: torch.stack([part.bias()[rows] for part in parts]).sum(0))
    return layer, biases


GROUPS = Packing(lambda stored, shape: stored.T[:, : shape[1]])  # some pad them
W4A16 = Layout("awq int4", f"1 for {INT4.size} numbers", (
    Piece("qweight", "N/4 K/2", (torch.int32,), NUMBERS, packing=Packing(
        lambda stored, shape: tiles.unpacked(tiles.awq_codes(*shape), stored)
    )),
    Piece("wscales", "K/64 N|K/64^16 N", FLOAT_SCALES, packing=GROUPS),
    Piece("wzeros", "K/64 N|K/64^16 N", FLOAT_SCALES, ADDED, packing=GROUPS),
), "nunchaku's loader", columns=INT4.size)  # fmt: skip


def w4a16_layer(tensors: LayerTensors, rows: int, columns: int, chunks: int = 1) -> QuantizedLayer:
    """Return a linear [rows, columns] of W4A16, with the rows of its ``chunks`` stored alternately.

    Raises ArtifactError for ``tensors`` that do not fit.
    """
    if rows % (4 * chunks):
        raise ArtifactError(
            f"{tensors.path}: {tensors.name('qweight')} is of a linear [{rows}, {columns}], expected rows by fours; "
            "give a quantization of the very model it is compared with"
        )
    tensors.refuse(set(ENDS) - {"qweight", "wscales", "wzeros", "bias"}, "which W4A16 has not")
    layout = replace(W4A16, formula=lambda own, found, shape: in_chunks(own.product(found, shape), chunks))
    return layout.layer(tensors, (rows, columns), tensors.size(but=["bias"]), None)


def in_chunks(interleaved: Tensor, chunks: int) -> Tensor:
    """Reorder alternating rows of ``chunks`` to natural order: chunk after chunk."""
    return interleaved.unflatten(0, (-1, chunks)).transpose(0, 1).flatten(0, 1)


def interleaved(natural: Tensor, chunks: int) -> Tensor:
    return natural.unflatten(0, (chunks, -1)).transpose(0, 1).flatten(0, 1)


# Writing


@dataclass(frozen=True)
class Written:
    """A linear [rows, columns] of SVDQuant's W4A4 to be written, with its numbers in natural order."""

    rows: int
    columns: int
    format: str  # of ``BLOCKS``
    read: Callable[[], tuple[Tensor, ...]]  # codes [rows, columns], scales [rows, blocks], common scales [rows, 1]
    pre_quant_scale: Tensor | None = None  # [columns], multiplies inputs
    branch: tuple[Tensor, Tensor] | None = None  # up [rows, rank] and down [rank, columns], for smoothed inputs
    bias: Readable | None = None

    @property
    def rank(self) -> int:
        return 0 if self.branch is None else len(self.branch[1])


def written_linear(checkpoint: Checkpoint, layer: LayerAssignment, bias: Readable | None) -> Written:
    rows, columns = layer.weight_shape

    def read() -> tuple[Tensor, ...]:
        codes, scales, *common = codes_and_scales(checkpoint, layer)
        return codes, scales, common[0].expand(rows, 1) if common else torch.ones(rows, 1)

    scale = layer.pre_quant_scale if layer.multiplies else None
    return Written(rows, columns, layer.format or "", read, scale, layer.low_rank, bias)


def w4a4_tensors(linear: Written, rank: int, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Return a linear's tensors by the suffixes of their names, with the branch padded to ``rank``, a multiple of 16.

    Floating-point tensors except NVFP4's scales have the ``dtype``.
    """
    rows, columns, groups = linear.rows, linear.columns, linear.columns // BLOCKS[linear.format]
    smooth = smooth_of(linear, dtype)

    def branch() -> tuple[Tensor, Tensor]:
        up, down = torch.zeros(rows, rank), torch.zeros(rank, columns)
        if linear.branch is not None:
            up[:, : linear.rank], down[: linear.rank] = balanced(linear.branch[0], linear.branch[1] / smooth)
        return up.to(dtype), down.to(dtype)

    def scales() -> Tensor:
        natural = linear.read()[1]
        if linear.format == "int4":
            return tiles.scales(rows, groups).tiled(natural.to(dtype))
        return tiles.micro_scales(rows, groups).tiled(natural.to(E4M3).view(torch.uint8)).view(E4M3)

    def vector(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: tiles.vector_in_tiles(read().to(dtype))

    numbers = {
        "qweight": lambda: tiles.packed(tiles.codes(rows, columns), linear.read()[0]).view(INT8),
        "wscales": scales,
        "smooth_factor": vector(lambda: smooth),
        "proj_down": lambda: tiles.down(rank, columns).tiled(branch()[1]),
        "proj_up": lambda: tiles.up(rows, rank).tiled(branch()[0]),
        "wcscales": vector(lambda: linear.read()[2][:, 0]),
    }
    if linear.bias is not None:
        numbers["bias"] = vector(linear.bias.read)

    def stored(piece: Piece) -> LazyTensor:
        (shape,), read = fitting(piece.shapes, (rows, columns)), numbers[piece.end]
        return LazyTensor(shape, dtype if piece.dtypes == FLOAT_SCALES else piece.dtypes[0], lambda: read().view(shape))

    return {piece.end: stored(piece) for piece in layout_of(linear.format, rank).pieces if piece.end in numbers}


def smooth_of(linear: Written, dtype: torch.dtype) -> Tensor:
    """Return the factors [columns] that divide the inputs."""
    scale = linear.pre_quant_scale
    return torch.ones(linear.columns, dtype=dtype) if scale is None else (1 / scale.half().float()).to(dtype)


def w4a16_tensors(weight: Readable, chunks: int, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Return the tensors of a weight [rows, columns], rounded to nearest, with its ``chunks`` interleaved by row."""
    rows, columns = weight.shape
    groups = columns // INT4.size

    def numbers() -> tuple[Tensor, Tensor]:
        natural = interleaved(weight.read().float(), chunks)
        (scales,) = INT4.scales(natural, natural)
        scales = scales.to(dtype)
        return INT4.quantize(natural, scales.float()), scales

    def codes() -> Tensor:
        bytes_of_codes = tiles.packed(tiles.awq_codes(rows, columns), numbers()[0] + ZERO)
        return bytes_of_codes.view(torch.int32).view(rows // 4, columns // 2)

    return {
        "qweight": LazyTensor((rows // 4, columns // 2), torch.int32, codes),
        "wscales": LazyTensor((groups, rows), dtype, lambda: numbers()[1].T.contiguous()),
        "wzeros": LazyTensor((groups, rows), dtype, lambda: -ZERO * numbers()[1].T.contiguous()),
    }


def balanced(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Move powers of two between a branch's matrices, so that 16 bits can represent both.

    Dividing by smoothing factors has moved the input's magnitudes into ``down``.
    """
    up, down = up.float(), down.float()
    ratio = (down.abs().amax(1) / up.abs().amax(0)).log2() / 2
    power = 2.0 ** torch.where(ratio.isfinite(), ratio.round(), 0.0)
    return up * power, down / power[:, None]


def common_rank(linears: Collection[Written]) -> int:
    """Return the rank to which every branch of a file is padded."""
    return up_to(max(1, *(linear.rank for linear in linears)), tiles.RANK)


def written(
    target: str, checkpoint: Checkpoint, assignment: Assignment, weights: Mapping[str, Readable]
) -> tuple[dict[str, Written], str]:
    """Return the quantized linears of an assignment, with biases from ``weights``, and their common format.

    Raises ConfigError if the linears have two formats.
    """
    layers = quantized(assignment)
    formats = {layer.format: name for name, layer in layers.items()}
    if len(formats) > 1:
        told = " and ".join(f"{name} in {fmt}" for fmt, name in formats.items())
        raise ConfigError(f"{target} holds one format for all layers, and the run has {told}; hand over a run with one")
    linears = {name: written_linear(checkpoint, row, weights.get(f"{name}.bias")) for name, row in layers.items()}
    return linears, next(iter(formats))
