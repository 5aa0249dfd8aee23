"""diffusers with SDNQ, SD.Next's quantization library: integers and small floats of 2 to 8 bits, for convolutions too.

    W = codes * scale + zero_point + svd_up @ svd_down

``X.weight`` [out, in, ...] has scales ``X.scale`` per row, block or tensor, and unsigned numbers also ``X.zero_point``
of the same shape; a low-rank branch is ``X.svd_up`` [out, rank] and ``X.svd_down`` [rank, in]. All is computed in fp32,
SDNQ's default. The config alone says which number format the codes have, layer by layer.

| numbers              | stored                                                                                   |
|----------------------|------------------------------------------------------------------------------------------|
| int8, uint8, float8  | one by one, in the weight's shape                                                        |
| int2 to int7         | code minus the smallest, packed as the unsigned of the same width                        |
| uint2 to uint7       | packed in bytes: see ``PLACES``                                                          |
| float4_e2m1fn, ...   | sign, exponent, mantissa, without infinities; packed as the unsigned of the same width   |

With ``use_quantized_matmul`` inputs of 32 rows or more are quantized too, with a scale per row. Weights of 8 bits and
branches are then stored transposed, [in, out]. A weight in blocks, or in another format than its inputs, is requantized
with a scale per row before each product; a branch multiplies unrounded inputs.

INT8 and FP8 are written with scales [out, 1, ...] or [1, 1, ...], INT4 in blocks, [out, blocks, 1], with a branch. The
config has the commonest layer config once, others by exact layer name, and the list of unquantized layers, which SDNQ
would otherwise choose by patterns and sizes.

Facts are of SDNQ 0.2.8, by its files and its layers' outputs. It is under the GPL: nothing of it is imported or copied.
Alternatives not taken: telling formats by shapes, as int4, uint4 and a 4-bit float look the same; and SDNQ's own
quantizer, which chooses other scales.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.files.tensors import LazyTensor, Readable, lazy, size_of
from sd_quant.interchange import DIFFUSERS, FP16, ForeignFormat
from sd_quant.interchange.denoiser import FLOATS, Inputs, QuantizedDenoiser, QuantizedLayer, checked_whole, input_ranks
from sd_quant.interchange.inputs import LARGEST_FP8, ManyRows, Rotated, RowFloat8, RowInteger, RowUnsigned, in_groups
from sd_quant.interchange.layouts import FP32, NUMBERS, UINT8, Layout, Packing, Piece
from sd_quant.interchange.stored import FP8, Folder, LayerTensors, weight_shapes
from sd_quant.interchange.weights import Assignment, quantized, with_coded_weights, write_folder
from sd_quant.knobs import between
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import pack_nibbles
from sd_quant.quantization.rotation import rotation_matrix

FACTS = ForeignFormat(
    "diffusers_sdnq",
    reads="a diffusers folder quantized with SDNQ",
    method="sdnq",
    bf16=True,
    consumer="diffusers with SDNQ",
    tried=(*DIFFUSERS, "sdnq==0.2.8"),
    formats={"int8": FP16, "fp8": FP16, "int4": FP16},
    loading="import sdnq  # without it transformers takes a text encoder's codes for weights, and does not say so\n"
    "import torch\nfrom diffusers import DiffusionPipeline\n\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.{dtype})",
    also="InvokeAI 6.14.2 opens a Flux too, in INT8 and FP8.",
    convolutions=frozenset({"int8", "fp8"}),
    low_rank=True,
    networks=("*",),
    traps={"int4": ("InvokeAI 6.14.2 does not open INT4 (`shape ... is invalid for input`).",)},
    broken={"sdnq<0.2.2": "diffusers refuses older ones"},
)
MAKER = "SDNQ"
PIECES = ("weight", "scale", "zero_point", "svd_up", "svd_down")
INPUTS: dict[str, Inputs] = {"int8": RowInteger(), "uint8": RowUnsigned(), FP8: RowFloat8()}
# By default SDNQ would compile for each input shape, and with OpenVINO multiply FP8 as 256 evenly spaced numbers.
ENVIRONMENT = {"SDNQ_USE_TORCH_COMPILE": "0", "SDNQ_USE_OPENVINO_MM": "0"}
MANY = 32  # rows of an input from which on SDNQ quantizes it
ALIGNED = 16  # a layer with quantized inputs has sides that are multiples
OTHER_NAMES = {  # that a config may use
    "fp8": "float8_e4m3fn", "fp7": "float7_e3m3fn", "fp6": "float6_e3m2fn", "fp5": "float5_e2m2fn",
    "fp4": "float4_e2m1fn", "fp3": "float3_e1m1fn", "fp2": "float2_e1m0fn",
    "ufp8": "float8_e4m4fnu", "ufp7": "float7_e3m4fnu", "ufp6": "float6_e3m3fnu", "ufp5": "float5_e2m3fnu",
    "ufp4": "float4_e2m2fnu", "ufp3": "float3_e1m2fnu", "ufp2": "float2_e1m1fnu",
}  # fmt: skip
UNPACKED = {"int8": torch.int8, FP8: torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
# Places of the bits of numbers that share bytes: for each number (byte, first bit, number of bits), the lowest first
PLACES = {
    2: (1, [[(0, 0, 2)], [(0, 2, 2)], [(0, 4, 2)], [(0, 6, 2)]]),
    3: (3, [[(0, 0, 3)], [(1, 0, 3)], [(2, 0, 3)], [(0, 3, 3)], [(1, 3, 3)], [(2, 3, 3)],
            [(0, 6, 2), (2, 6, 1)], [(1, 6, 2), (2, 7, 1)]]),
    4: (1, [[(0, 0, 4)], [(0, 4, 4)]]),
    5: (5, [*([(byte, 0, 5)] for byte in range(5)),
            [(0, 5, 3), (3, 5, 2)], [(1, 5, 3), (4, 5, 2)], [(2, 5, 3), (4, 7, 1), (3, 7, 1)]]),
    6: (3, [*([(byte, 0, 6)] for byte in range(3)), [(2, 6, 2), (1, 6, 2), (0, 6, 2)]]),
    7: (7, [*([(byte, 0, 7)] for byte in range(7)), [(byte, 7, 1) for byte in reversed(range(7))]]),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The part of ``quantization_config`` that is read; defaults are SDNQ's."""

    weights_dtype: str = "int8"
    quantized_matmul_dtype: str | None = None
    scale_dtype: str | None = None  # of scales that are quantized themselves
    zero_point_dtype: str | None = None
    group_size: Annotated[int, between(-2, 2**31)] = 0
    hadamard_group_size: Annotated[int, between(1, 4096)] = 256  # their square is held
    use_hadamard: bool = False
    use_codebook: bool = False
    use_quantized_matmul: bool = False
    use_quantized_matmul_conv: bool = False
    modules_to_not_use_matmul: list[str] | None = None
    modules_dtype_dict: dict[str, list[str]] | None = None


@dataclass(frozen=True)
class Numbers:
    """A number format of a weight, with the storage and decoding of its codes."""

    name: str
    bits: int
    stored: torch.dtype
    unsigned: bool  # and so with a zero point
    integer: bool
    decode: Callable[[Tensor], Tensor]  # codes as they are stored, unpacked, to fp32
    turns: bool = False  # is stored [in, out] where codes are multiplied
    largest: float = 0.0  # of a float
    in_fp8: bool = True  # whether E4M3 has all numbers of a float


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in ``path`` as SDNQ dequantizes it, in fp32."""
    folder = Folder(path, checkpoint)
    config, exceptions = folder.checked(folder.config, Config()), folder.exceptions("modules_quant_config")
    stored = dict(folder.tensors)
    layers: dict[str, QuantizedLayer] = {}
    ranks = cache(partial(input_ranks, checkpoint))
    for name, shape in folder.shapes.items():
        if f"{name}.scale" in stored and f"{name}.weight" in stored:
            pieces = {piece: stored.pop(key) for piece in PIECES if (key := f"{name}.{piece}") in stored}
            own = of_layer(folder, config, exceptions, name)
            layers[name] = quantized_layer(LayerTensors(path, name, pieces), shape, own, ranks)
    maker, size = folder.maker(MAKER, "sdnq_version"), size_of(folder.tensors.values())
    runtime = folder.opened_by(FACTS.method, torch.float32, **ENVIRONMENT)
    return checked_whole(QuantizedDenoiser(path, FACTS.name, maker, layers, stored, size, runtime=runtime), checkpoint)


# The config


def of_layer(folder: Folder, config: Config, exceptions: Mapping[str, Mapping[str, object]], layer: str) -> Config:
    """Return one layer's config: updated by the first matching pattern in ``exceptions``, then by lists of layers."""
    name, path = f"{layer}.weight", folder.path
    numbers_by_layer, no_codes = config.modules_dtype_dict or {}, config.modules_to_not_use_matmul or []
    if given := next((given for pattern, given in exceptions.items() if matches(path, pattern, name)), None):
        config = folder.checked(given, config)
    for wanted, patterns in numbers_by_layer.items():
        if any(matches(path, pattern, name) for pattern in patterns):
            config = replace(config, weights_dtype=at_least_as_wide(path, wanted, config.weights_dtype))
            break
    if any(matches(path, pattern, name) for pattern in no_codes):
        config = replace(config, use_quantized_matmul=False, use_quantized_matmul_conv=False)
    return config


def matches(path: Path, pattern: str, name: str) -> bool:
    """Return whether SDNQ's ``pattern`` matches a parameter's ``name``.

    A pattern is the name, a part of it between dots, its beginning after a leading dot, or has ``*`` for anything.
    Raises ConfigError for any other regular expression.
    """
    if pattern.startswith("."):
        return name.startswith(pattern[1:])
    if pattern == name or pattern in name.split("."):
        return True
    if "*" not in pattern:
        return False
    if re.search(r"[\[\](){}+?|^$\\]", pattern):
        raise ConfigError(
            f"{path}: quantization_config names layers by the regular expression {pattern[:200]!r}, and only names and "
            "* are read here; save it with the layers' names"
        )
    return fnmatchcase(name, f"{pattern}*")


def at_least_as_wide(path: Path, wanted: str, name: str) -> str:
    """Return the number format ``wanted``; if it is a minimum width, ``name`` or a wider integer."""
    wanted = wanted.lower()
    least = re.fullmatch(r"(minimum)?[-_]?(u?int|)(\d{1,2})[-_]?(bits?)?", wanted)
    if least is None or not (least[1] or least[4]):
        return wanted
    if numbers(path, name).bits >= int(least[3]):
        return name
    return f"{'uint' if least[2] == 'uint' or int(least[3]) <= 4 else 'int'}{least[3]}"


# Numbers


def numbers(path: Path, name: str) -> Numbers:
    """Return the number format called ``name``. Raises ConfigError for a format without a decoder here."""
    found = numbers_named(OTHER_NAMES.get(name, name))
    if found is None:
        raise ConfigError(
            f"{path}: quantization_config has weights of {name[:100]!r}; expected integers or floats of 2 to 8 bits, "
            "because SDNQ's wider ones are not decoded here"
        )
    return found


@cache
def numbers_named(name: str) -> Numbers | None:
    if name in UNPACKED:
        largest = torch.finfo(UNPACKED[name]).max if UNPACKED[name].is_floating_point else 0.0
        return Numbers(name, 8, UNPACKED[name], False, name == "int8", Tensor.float, True, largest, name == FP8)
    if integer := re.fullmatch(r"(u?)int([2-8])", name):
        bits, unsigned = int(integer[2]), bool(integer[1])
        smallest = 0 if unsigned else -(2 ** (bits - 1))
        return Numbers(
            name, bits, torch.uint8, unsigned, True, lambda codes: codes.float().add_(smallest),
            turns=bits == 8,
        )  # fmt: skip
    if small := re.fullmatch(r"float([2-8])_e([1-5])m([0-7])fn(u?)(_sdnq)?", name):
        bits, exponent, mantissa = (int(small[index]) for index in (1, 2, 3))
        if bits == exponent + mantissa + (not small[4]):
            unsigned = bool(small[4])
            values = small_floats(exponent, mantissa, unsigned)
            return Numbers(
                name, bits, torch.uint8, unsigned, False, lambda codes: values[codes.int()],
                largest=float(values.max()), in_fp8=torch.equal(values.to(torch.float8_e4m3fn).float(), values),
            )  # fmt: skip
    return None


def small_floats(exponent: int, mantissa: int, unsigned: bool) -> Tensor:
    """Return each code's number, fp32: IEEE 754 with subnormals, and finite numbers in place of infinities."""
    fields, fractions = torch.arange(2**exponent)[:, None], torch.arange(2**mantissa) / 2**mantissa
    bias = 2 ** (exponent - 1) - 1
    positive = torch.where(fields > 0, 1 + fractions, fractions) * 2.0 ** (fields.clamp(min=1) - bias)
    positive = positive.float().flatten()
    return positive if unsigned else torch.cat([positive, -positive])


def unpack(stored: Tensor, bits: int) -> Tensor:
    """Unpack numbers of ``bits`` bits, as uint8 in one axis, from bytes; see ``PLACES``."""
    length, places = PLACES[bits]
    data = stored.view(-1, length)
    unpacked = torch.zeros(len(data), len(places), dtype=torch.uint8)
    for number, pieces in zip(unpacked.unbind(1), places, strict=True):
        low = 0
        for byte, first, count in pieces:
            number |= (data[:, byte] >> first & 2**count - 1) << low
            low += count
    return unpacked.flatten()


# A layer


def quantized_layer(
    tensors: LayerTensors, shape: tuple[int, ...], config: Config, ranks: Callable[[], Mapping[str, int]]
) -> QuantizedLayer:
    """Return a layer with a weight of ``shape``; ``ranks()`` has the number of axes of each linear's input.

    Raises ArtifactError or ConfigError for ``tensors`` that do not fit.
    """
    path, name, pieces = tensors.path, tensors.layer, tensors.tensors
    kind, scale = numbers(path, config.weights_dtype), tuple(pieces["scale"].shape)
    product = product_of(kind, shape, config)
    if options := not_decoded(shape, kind, config, product):
        raise ConfigError(f"{path}: {name} has {' and '.join(options)}, not decoded here; save it without")
    again = product is not None and quantized_again(kind, product, len(scale) > len(shape))
    turned = product is not None and kind.turns and not again
    group = rotated_together(shape[1], config.hadamard_group_size) if config.use_hadamard else 1
    stored = Stored(pieces, kind, shape, shape_of_codes(shape, scale, turned), turned, product is not None, group)
    check(tensors, stored)
    many = product is not None and not (again and ranks().get(name) == 2)  # else one row for each image
    inputs = INPUTS[product] if product is not None and many else None
    count = prod(scale)
    per_row = count == shape[0] and len(shape) == 2
    used = Rotated(inputs, group, hadamard) if inputs is not None and group > 1 else inputs
    return QuantizedLayer(
        format=kind.name,
        scales="1 for all" if count == 1 else "1 for a row" if per_row else f"1 for {prod(shape) // count} numbers",
        stored_bytes=tensors.size(),
        weight=tensors.decoded(shape, partial(stored.weight, inputs if again else None)),
        inputs=None if used is None else ManyRows(used, MANY),
        branch=stored.branch if inputs is not None and "svd_up" in pieces else None,
    )


def product_of(kind: Numbers, shape: tuple[int, ...], config: Config) -> str | None:
    """Return the format to which SDNQ quantizes inputs with many rows; None for unquantized inputs."""
    quantizes = config.use_quantized_matmul if len(shape) == 2 else config.use_quantized_matmul_conv
    if not quantizes or any(side < MANY or side % ALIGNED for side in shape[:2]):
        return None
    wanted = config.quantized_matmul_dtype
    usual = "uint8" if kind.name == "uint8" else "int8" if kind.integer else FP8
    return OTHER_NAMES.get(wanted, wanted) if wanted else usual


def not_decoded(shape: tuple[int, ...], kind: Numbers, config: Config, product: str | None) -> list[str]:
    """Return a description of each of a layer's options that are not decoded here."""
    found = [
        f"{name}={value[:100]}"
        for name in ("scale_dtype", "zero_point_dtype")
        if (value := getattr(config, name)) not in (None, "none")
    ]
    if config.use_codebook:
        found.append("use_codebook")
    if product is None:
        return found
    inexact = product == FP8 and not kind.integer and not quantized_again(kind, product, False) and not kind.in_fp8
    others = {
        "a convolution": len(shape) > 2,
        f"inputs of {product[:100]}": product not in INPUTS,
        f"weights of {kind.name}": inexact,  # which are rounded to E4M3 besides
    }
    return found + [f"use_quantized_matmul with {what}" for what, holds in others.items() if holds]


def quantized_again(kind: Numbers, product: str, blocks: bool) -> bool:
    """Return whether SDNQ requantizes a weight by row for inputs in ``product``; ``blocks``: it has block scales."""
    integer = product != FP8
    beyond = not kind.turns and not kind.integer and (kind.bits == 8 or kind.largest > LARGEST_FP8)
    return blocks or kind.integer != integer or not integer and (kind.unsigned or beyond)


def shape_of_codes(shape: tuple[int, ...], scale: tuple[int, ...], turned: bool) -> tuple[int, ...] | None:
    """Return the shape of the codes that scales of the shape ``scale`` multiply; None for an unknown layout.

    Codes have the weight's shape, [in, out] if ``turned``, or [out, blocks, in / blocks, ...].
    """
    rows, columns, *kernel = shape
    if turned:
        return (prod(shape[1:]), rows) if scale in ((1, rows), (1, 1)) else None
    ones = (1,) * len(kernel)
    if scale in ((rows, 1, *kernel), (rows, 1, *ones), (1, 1, *ones)):  # SDNQ's own, and others that it multiplies
        return shape
    count = scale[1] if len(scale) == len(shape) + 1 else 0
    if count > 1 and columns % count == 0 and scale == (rows, count, 1, *kernel):
        return (rows, count, columns // count, *kernel)
    return None


@dataclass(frozen=True)
class Stored:
    """A layer's tensors as stored in the file, and how they are decoded to a weight."""

    pieces: Mapping[str, Readable]
    kind: Numbers
    shape: tuple[int, ...]  # of the weight
    codes: tuple[int, ...] | None  # see ``shape_of_codes``
    turned: bool  # the codes
    by_codes: bool  # so that the branch is turned
    group: int  # of input channels that are rotated together, 1 for none

    def read(self, piece: str) -> Tensor:
        return self.pieces[piece].read().float()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the low-rank branch, [out, rank] and [rank, in], still rotated as the weight is."""
        up, down = self.read("svd_up"), self.read("svd_down")
        return (up.t(), down.t()) if self.by_codes else (up, down)

    @property
    def branch(self) -> tuple[Readable, Readable]:
        rank = self.pieces["svd_up"].shape[0 if self.by_codes else 1]
        return (
            LazyTensor((self.shape[0], rank), torch.float32, lambda: self.factors()[0]),
            LazyTensor((rank, self.shape[1]), torch.float32, lambda: rotated(self.factors()[1], self.group)),
        )

    def weight(self, again: Inputs | None) -> Tensor:
        """Compute the weight in fp32, in SDNQ's order, requantized by ``again`` before a branch is added."""
        weight, scale = self.pieces["weight"].read(), self.read("scale")
        weight = self.kind.decode(unpack(weight, self.kind.bits).view(self.codes) if self.kind.bits < 8 else weight)
        weight = torch.addcmul(self.read("zero_point"), weight, scale) if self.kind.unsigned else weight.mul_(scale)
        weight = (weight.t() if self.turned else weight).reshape(self.shape)
        weight = weight if again is None else again(weight)
        if "svd_up" in self.pieces:
            up, down = self.factors()
            flat = weight.flatten(1)
            weight = (flat.addmm_(up, down) if weight.ndim == 2 else flat.add_(up @ down)).view(self.shape)
        return rotated(weight, self.group)


def check(own: LayerTensors, stored: Stored) -> None:
    """Raise ArtifactError for tensors of a layer that do not fit its weight."""
    kind, (rows, *others) = stored.kind, stored.shape
    of_rows = (1, rows) if stored.turned else (rows, *(1 for _ in others))
    scale = own.checked("scale", [of_rows] if stored.codes is None else None, FLOATS)
    alike = None if kind.bits < 8 or stored.codes is None else [stored.codes]
    codes = own.checked("weight", alike, (kind.stored,))
    if 8 * prod(codes.shape) != kind.bits * prod(stored.shape):
        own.refuse(["weight"], f"which is no {kind.name} of a weight {list(stored.shape)}")
    if kind.unsigned:
        own.checked("zero_point", [tuple(scale.shape)], FLOATS)
    else:
        own.refuse(["zero_point"], f"which {kind.name} does not have")
    if "svd_up" in own or "svd_down" in own:
        step, up = -1 if stored.by_codes else 1, own.checked("svd_up", None, FLOATS)
        rank = max(1, prod(up.shape) // rows)
        own.checked("svd_up", [(rows, rank)[::step]], FLOATS)
        own.checked("svd_down", [(rank, prod(others))[::step]], FLOATS)


# Hadamard rotations


def rotated_together(columns: int, most: int) -> int:
    """Return how many of a weight's ``columns`` are rotated together; ``most`` is the config's number; 1: none."""
    group = 1 << (min(columns, most) - 1).bit_length()
    while columns % group:
        group //= 2
    return group if group >= 4 else 1


def rotated(weight: Tensor, group: int) -> Tensor:
    """Multiply each ``group`` of a weight's inputs by a symmetric Hadamard matrix; a group of 1 is unchanged."""
    return weight if group == 1 else in_groups(weight.flatten(1), hadamard(group)).view(weight.shape)


@cache
def hadamard(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix / sqrt(size); for powers of four that of ``quantization.rotation``."""
    if size.bit_length() % 2 == 1:
        return rotation_matrix(size)
    pair = matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < size:
        matrix = torch.kron(matrix, pair)
    return matrix / size**0.5


# Writing

WRITTEN = {"int8": "int8", "fp8": FP8, "int4": "int4"}  # SDNQ's numbers by our formats
PER_ROW, PER_TENSOR = -1, -2  # of a config's group_size
NIBBLES = Packing(lambda stored, shape: stored, lambda codes: pack_nibbles(codes + 8))  # as unsigned numbers
WRITTEN_CONFIG = {
    "quant_method": FACTS.method,
    "quant_conv": True,
    "use_quantized_matmul": False,
    "dequantize_fp32": True,
    "add_skip_keys": False,
    "minimum_allowed_numel": 0,
    "minimum_allowed_channel_size": 0,
}


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser and its config into the pipeline ``folder``, with fp16 branches."""
    tensors = with_coded_weights(checkpoint, assignment, tensors_of)
    return write_folder(checkpoint, folder, tensors, config_of(quantized(assignment), weight_shapes(checkpoint)))


def tensors_of(checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
    """Return the tensors of a quantized layer by their names in the file."""
    tensors = layout_of(layer).tensors(checkpoint, layer)
    if layer.low_rank is not None:
        up, down = layer.low_rank
        tensors |= {f"{layer.name}.svd_up": lazy(up), f"{layer.name}.svd_down": lazy(down)}
    return tensors


def layout_of(layer: LayerAssignment) -> Layout:
    (rows, *inputs), block, name = layer.weight_shape, FORMATS[layer.format].block, WRITTEN[layer.format]
    if block is None:
        same = 1 if layer.weight_axis == 0 else rows  # with one scale
        pieces = (
            Piece("weight", "N K", (numbers_named(name).stored,), NUMBERS),
            Piece("scale", "N _" if same == 1 else "1 _", (FP32,)),
        )
        return Layout(name, "", pieces, rows=same)
    return Layout(name, "", (
        Piece("weight", f"1*{rows * prod(inputs) // 2}", (UINT8,), NUMBERS, packing=NIBBLES),
        Piece("scale", f"N K/{block} 1" if inputs > [block] else "N 1", (FP32,)),
    ))  # fmt: skip


def config_of(layers: Assignment, names: Iterable[str]) -> dict:
    """Build the ``quantization_config`` of a denoiser with quantized ``layers`` among all layers ``names``."""
    kinds = {name: kind_of(layer) for name, layer in layers.items()}
    default = dict(Counter(tuple(kind.items()) for kind in kinds.values()).most_common(1)[0][0])
    return {
        **WRITTEN_CONFIG,
        **default,
        "modules_to_not_convert": [f"{name}.weight" for name in names if name not in layers],
        "modules_quant_config": {f"{name}.weight": kind for name, kind in kinds.items() if kind != default},
    }


def kind_of(layer: LayerAssignment) -> dict[str, str | int | bool]:
    """Return the storage of a layer as entries of SDNQ's config."""
    static = PER_ROW if layer.weight_axis == 0 else PER_TENSOR
    return {
        "weights_dtype": WRITTEN[layer.format],
        "group_size": FORMATS[layer.format].block or static,
        "use_svd": layer.low_rank is not None,
        "svd_rank": layer.rank or 1,  # which SDNQ wants to be positive
    }
