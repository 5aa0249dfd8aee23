"""diffusers with AutoRound, Intel's quantization library: integers of 2 to 8 bits in groups, for linears.

    W = (codes - zero_point) * scale

A linear [N, K] has ``X.qweight``, ``X.qzeros`` and ``X.scales`` [groups, N] instead of its weight. Codes and zero
points are unsigned and lie in int32 words as one stream of bits, the lowest first; 32 of them take as many words as
they have bits, so that both sides of a weight have to be multiples of 32.

| ``packing_format``                    | qweight                | qzeros                 | a zero point is stored |
|---------------------------------------|------------------------|------------------------|------------------------|
| auto_round:auto_gptq                  | [K bits / 32, N]       | [groups, N bits / 32]  | minus one              |
| auto_round, auto_round:gptqmodel      | the same               | the same               | as it is               |
| auto_round:auto_awq                   | [K, N bits / 32]       | the same               | as it is               |

auto_awq stores each eight numbers of a row in ``AWQ_ORDER``. A symmetric weight's zero point is the middle code (8 for
4 bits), and some kernels ignore the stored one: a file with any other zero point is refused, also one of the other
convention. The config alone says which layers are quantized, and how: those below ``block_name_to_quantize``, and
others by name or regular expression in ``extra_config``.

INT4 is written in groups of 64 and INT8 with a scale for a row, symmetric, as auto_round:auto_gptq, which SGLang and
vLLM-Omni read too. Sources: auto-round 0.16.1 (``inference/convert_model.py``, ``utils/bit_packing.py``,
``auto_round_extension/torch``).

Alternatives not taken: deriving bits and groups from shapes, as AutoRound builds layers from the config alone; and
reading its FP8, MXFP and NVFP layers, which are files of other libraries.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.checks import listing
from sd_quant.files.tensors import Readable
from sd_quant.interchange import DIFFUSERS, FP16, ForeignFormat
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.layouts import HALF_FIRST, INT32, NUMBERS, TURNED, ZEROS, Layout, Packing, Piece
from sd_quant.interchange.stored import Folder, LayerTensors, told, weight_shapes
from sd_quant.interchange.weights import Assignment, quantized, with_coded_weights, write_folder
from sd_quant.knobs import BOUNDED, between
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

FACTS = ForeignFormat(
    "diffusers_autoround",
    reads="a diffusers folder quantized with AutoRound",
    method="auto-round",
    consumer="diffusers with AutoRound",
    tried=(*DIFFUSERS, "auto-round==0.16.1"),
    formats={"int4": FP16, "int8": FP16},
    loading="import torch\nfrom diffusers import DiffusionPipeline\n\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.float16)",
    multiples={"int4": 32, "int8": 32},
    networks=("CLIPTextModel*", "T5EncoderModel"),
)
MAKER, PACKAGE = "AutoRound", "auto_round"
GPTQ, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
PACKINGS = {  # by all names that AutoRound knows
    GPTQ: GPTQ, "auto_round:gptq": GPTQ, "auto": GPTQ, "auto_round": "auto_round", "auto_round:gptqmodel": "auto_round",
    AWQ: AWQ, "auto_round:awq": AWQ,
}  # fmt: skip
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of eight numbers is stored
PIECES = ("qweight", "qzeros", "scales")
WORD = 32  # bits of a word, and numbers that fill whole words
OTHER_WAYS = (  # entries that change what is computed, and are not read here
    "rotation_config", "spinquant_config", "dynamic", "modules_in_block_to_quantize", "modules_to_not_convert",
)  # fmt: skip
BLOCKS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")  # the first that is there
PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*){1,200}\$?")  # the regular expressions that are read
MOST_STARS = 4  # in one: the time to match it grows with their power


@dataclass(frozen=True)
class Scheme:
    """Storage of a layer: bits, group size and symmetry; defaults are AutoRound's."""

    bits: Annotated[int, between(1, 32)] = 4
    group_size: Annotated[int, between(-1, 2**31)] = 128  # numbers of a row with one scale; -1: all
    sym: bool = True
    data_type: str = "int"
    act_bits: int | None = None  # of inputs


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in ``path`` as AutoRound's torch layers compute it, in fp32."""
    folder = Folder(path, checkpoint)
    packing = PACKINGS.get(name) if isinstance(name := folder.config.get("packing_format", GPTQ), str) else None
    if packing is None:
        raise ConfigError(
            f"{path}: quantization_config.packing_format is {told(name)}, expected one of {', '.join(PACKINGS)}; "
            "export integers of weights alone"
        )
    found, others = folder.by_layer(PIECES)
    schemes = {layer: scheme for layer, scheme in schemes_of(folder, found) if scheme.bits <= 8}
    differ = [*(f"{name} only stored" for name in found if name not in schemes),
              *(f"{name} only said" for name in schemes if name not in found)]  # fmt: skip
    if differ:
        raise ArtifactError(
            f"{path}: config and weights quantize other layers ({len(differ)}: {listing(differ, 5)}); fetch both "
            "again, together"
        )
    layers = {name: stored_layer(own, folder.shapes[name], schemes[name], packing) for name, own in found.items()}
    runtime = folder.opened_by(PACKAGE, torch.float16)  # which refuses fp32
    return folder.whole(FACTS.name, folder.maker(MAKER, "autoround_version"), layers, others, runtime=runtime)


# The config


def schemes_of(folder: Folder, found: Mapping[str, LayerTensors]) -> Iterator[tuple[str, Scheme]]:
    """Yield each linear that the config covers with its scheme; without a list of blocks, the linears in ``found``.

    Raises ConfigError for an entry of another type or without a decoder here.
    """
    linears = [name for name, shape in folder.shapes.items() if len(shape) == 2]
    if strange := [name for name in OTHER_WAYS if folder.config.get(name)]:
        raise ConfigError(
            f"{folder.path}: quantization_config has {listing(strange)}, not decoded here; export it without, and list "
            "layers in extra_config"
        )
    usual, blocks = scheme_of(folder, folder.config, Scheme()), blocks_of(folder)
    exceptions = folder.exceptions("extra_config")
    for name in exceptions:
        if name not in linears and (PATTERN.fullmatch(name) is None or name.count("*") > MOST_STARS):
            raise ConfigError(
                f"{folder.path}: quantization_config names layers by the regular expression {name[:200]!r}, and only "
                f"names, . and up to {MOST_STARS} times .* are read here; save it with the layers' names"
            )
    inside = [name for name in linears if (name in found if blocks is None else name.startswith(blocks))]
    own: dict[str, Mapping[str, object]] = {name: given for name, given in exceptions.items() if name in linears}
    for pattern, given in exceptions.items():
        if pattern not in linears and given:
            expression = re.compile(pattern)
            matched = [name for name in inside if expression.search(name)]
            own = dict.fromkeys(matched or [name for name in linears if expression.search(name)], given) | own
    for name in dict.fromkeys([*inside, *own]):
        yield name, scheme_of(folder, own.get(name, {}), usual)


def scheme_of(folder: Folder, given: Mapping[str, object], usual: Scheme) -> Scheme:
    """Return the scheme ``usual`` updated with those entries of the config ``given`` that are not null."""
    stated = {name: value for name, value in given.items() if value is not None}
    return folder.checked(stated, usual)


def blocks_of(folder: Folder) -> tuple[str, ...] | None:
    """Return name prefixes of layers that are quantized unless ``extra_config`` differs; None without an entry.

    Raises ConfigError for anything except a string, a list of strings, or a list of lists of strings.
    """
    given = next((folder.config[name] for name in BLOCKS if folder.config.get(name) is not None), None)
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [None]
    names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{folder.path}: quantization_config names blocks by {BOUNDED.repr(given)}, expected names of modules; "
            "give a folder that AutoRound has saved"
        )
    return tuple(names)


# A layer


def stored_layer(stored: LayerTensors, shape: tuple[int, ...], scheme: Scheme, packing: str) -> QuantizedLayer:
    """Return a linear [N, K]. Raises ArtifactError for misfit tensors, ConfigError for an unsupported ``scheme``."""
    (rows, columns), bits = shape, scheme.bits
    group = columns if scheme.group_size == -1 else scheme.group_size
    if scheme.data_type != "int" or (scheme.act_bits or 16) < 16 or bits == 1:
        raise ConfigError(
            f"{stored.path}: {stored.layer} has {bits} bits of {scheme.data_type[:100]!r} with inputs of "
            f"{scheme.act_bits or 16}; expected int of 2 to 8 bits and inputs of 16, so export weights alone"
        )
    if group < 1 or columns % group or rows % WORD or columns % WORD:
        raise ArtifactError(
            f"{stored.path}: {stored.layer}, a weight {list(shape)}, has groups of {group}; expected a divisor of its "
            f"{columns} inputs, and sides that are multiples of {WORD}"
        )
    stored.refuse(["weight"], "two weights for one layer")
    layout = layout_of(bits, group, packing)
    if scheme.sym:
        layout = replace(layout, formula=partial(symmetric, stored, bits, packing))
    name = f"int{bits}" if scheme.sym else f"int{bits} with zero points"
    scales = "1 for a row" if group == columns else layout.scales
    return replace(layout, format=name, scales=scales).layer(stored, shape, stored.size(), None)


def layout_of(bits: int, group: int, packing: str) -> Layout:
    """Return the layout of a linear with one scale per ``group`` inputs; ``packing`` is a value of ``PACKINGS``."""
    less, middle = int(packing == GPTQ), 2 ** (bits - 1)  # by how much less than it is a zero point is stored
    along_inputs = Packing(
        lambda words, shape: unpacked(words, bits).T, lambda codes: packed(codes.T.int() + middle, bits)
    )
    zeros = Packing(
        lambda words, shape: unpacked(words.T, bits).float() + less,
        lambda zeros: packed(zeros.int() + middle - less, bits).T,
    )
    awq = Packing(lambda words, shape: unpacked(words.T, bits).unflatten(0, (-1, 8))[:, AWQ_ORDER].flatten(0, 1))
    pieces = (
        Piece("qweight", f"K N*{bits}/{WORD}", (INT32,), NUMBERS, packing=awq)
        if packing == AWQ
        else Piece("qweight", f"K*{bits}/{WORD} N", (INT32,), NUMBERS, packing=along_inputs),
        Piece("qzeros", f"K/g N*{bits}/{WORD}", (INT32,), ZEROS, packing=awq if packing == AWQ else zeros),
        Piece("scales", "K/g N", HALF_FIRST, packing=TURNED),
    )
    return Layout("", "1 for {group} numbers", pieces, MAKER).in_groups(group)


def symmetric(own: LayerTensors, bits: int, packing: str, *given: Any) -> Tensor:
    """Dequantize from ``Layout.formula``'s arguments. Raises ArtifactError unless zero points are the middle code."""
    layout, found, shape = given
    (zeros,) = (each for piece, each in found.items() if piece.holds == ZEROS)
    if len(wrong := zeros[zeros != 2 ** (bits - 1)]):
        raise ArtifactError(
            f"{own.path}: {own.layer} is symmetric with {bits} bits and has the zero point {wrong[0].item():g}, "
            f"expected {2 ** (bits - 1)}, as {packing} stores it; export it again, or with sym=false"
        )
    return layout.product(found, shape)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack numbers of ``bits`` bits, uint8, from int32 words along the first axis."""
    whole = lcm(bits, WORD)  # bits, after which a number and a word begin together
    blocks = words.unflatten(0, (-1, whole // WORD)).long() & 2**WORD - 1
    numbers = []
    for first in range(0, whole, bits):
        word, offset = divmod(first, WORD)
        number = blocks[:, word] >> offset
        if offset + bits > WORD:
            number = number | blocks[:, word + 1] << WORD - offset
        numbers.append((number & 2**bits - 1).to(torch.uint8))
    return torch.stack(numbers, 1).flatten(0, 1)


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser and its config into the pipeline ``folder``, with scales in fp16."""
    tensors = with_coded_weights(checkpoint, assignment, tensors_of)
    return write_folder(checkpoint, folder, tensors, config_of(quantized(assignment), weight_shapes(checkpoint)))


def tensors_of(checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
    """Return the tensors of a quantized linear by their names in the file."""
    number = FORMATS[layer.format]
    return layout_of(number.bits, number.block or layer.weight_shape[1], GPTQ).tensors(checkpoint, layer)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers into int32 words, the inverse of ``unpacked``, for widths that divide 32."""
    places = torch.arange(0, WORD, bits).view(-1, *(1 for _ in numbers.shape[1:]))
    words = (numbers.long().unflatten(0, (-1, WORD // bits)) << places).sum(1)
    return (words - ((words >> WORD - 1) << WORD)).to(torch.int32)


def config_of(layers: Assignment, shapes: Mapping[str, tuple[int, ...]]) -> dict:
    """Build the ``quantization_config`` for the quantized ``layers``; ``shapes`` are those of all weights."""
    schemes = {name: (FORMATS[layer.format].bits, FORMATS[layer.format].block or -1) for name, layer in layers.items()}
    (bits, group), _ = Counter(schemes.values()).most_common(1)[0]
    blocks = tuple(dict.fromkeys(name.partition(".")[0] for name in layers))
    linears = [name for name, shape in shapes.items() if len(shape) == 2]
    others = [name for name in linears if name not in layers and name.startswith(blocks)]
    exceptions = {name: {"bits": 16} for name in others} | {
        name: {"bits": own, "group_size": size} for name, (own, size) in schemes.items() if (own, size) != (bits, group)
    }
    return {
        "quant_method": FACTS.method,
        "packing_format": GPTQ,
        "bits": bits,
        "group_size": group,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": ",".join(blocks),
        "extra_config": exceptions,
    }
