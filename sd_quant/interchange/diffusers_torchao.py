"""diffusers with torchao: linears whose weights are tensors of torchao's own classes.

A safetensors file holds such a tensor in pieces, ``X._weight_qdata`` and others, and its header's metadata says which
class they make up and with what other fields, as JSON (torchao's ``prototype.safetensors``, 0.16 and newer, read by
diffusers' ``TorchAoHfQuantizer``). The config says with which options the tensors were made; it is not read, because
the tensors decide.

| class                    | codes                                      | scales                                      |
|--------------------------|--------------------------------------------|---------------------------------------------|
| Int8Tensor               | int8 [out, in]                             | fp32 for a row, a block or all              |
| IntxUnpackedToInt8Tensor | int8 [out, in], of 1 to 8 bits             | for a row or a block, with zero points      |
| Float8Tensor             | E4M3 or E5M2 [out, in]                     | fp32 for a row, a block or all              |
| NVFP4Tensor              | uint8 [out, in / 2], first in the low half | E4M3 for 16 numbers, in tiles; fp32 for all |

Where codes are multiplied, a weight is given in fp32; where torchao dequantizes a weight first, in the dtype to which
it does. Formulas are those of torchao 0.18 (BSD licence).

Written are Int8Tensors, which hold all that SmoothQuant needs: inputs with a static scale or one a row, and factors in
front; or weights alone, text encoders' too, which transformers opens by the same metadata. A static scale has as many
axes as the input, else torchao asserts. Float8Tensors are written with a scale for each row of the weight and inputs
scaled by row while the network runs: they have no static scale for inputs and no factors. torchao's own quantizer
computes scales in the weight's dtype, in bfloat16 up to 0.3 % away from ours, which are fp32 and stay so. It divides a
row of zeros, such as SDXL's empty prompt, by a scale of zero, and images are black; against that a bound of the largest
magnitude is written, ``hp_value_lb``. CUDA multiplies FP8 only where both sides are multiples of 16. No
convolution can be held.

The roads not taken: torchao makes no tensors here, because it imports for seconds, looks names of a file up in torch,
and would hold the whole network; and its ``quantize_`` chooses other codes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.safetensors import FORMAT, read_header, without_duplicates
from sd_quant.files.tensors import Readable, StoredTensor, size_of
from sd_quant.interchange import DIFFUSERS, PER_ROW, STATIC, ForeignFormat
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, QuantizedLayer, checked_whole, input_ranks
from sd_quant.interchange.inputs import Affine, Multiplied, Nvfp4, RowFloat8
from sd_quant.interchange.layouts import (
    E4M3,
    FACTOR,
    INPUTS,
    INT8,
    NUMBERS,
    OF_ALL,
    TILES,
    TWO_IN_A_BYTE,
    UINT8,
    ZEROS,
    Layout,
    Piece,
    has_static_input,
)
from sd_quant.interchange.stored import DTYPES, FLOAT_SCALES, FP8, Folder, LayerTensors, Shape, plain
from sd_quant.interchange.weights import Assignment, alone, high_precision, quantized, write_folder
from sd_quant.knobs import BOUNDED
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import SMALLEST_TOKEN, LayerAssignment

FACTS = ForeignFormat(
    "diffusers_torchao",
    reads="a diffusers folder quantized with torchao",
    method="torchao",
    bf16=True,
    consumer="diffusers with torchao",
    tried=(*DIFFUSERS, "torchao==0.18.0"),
    formats={"int8": STATIC, "fp8": PER_ROW},
    loading="import torch\nfrom diffusers import DiffusionPipeline\n\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.bfloat16)",
    weights_alone=frozenset({"int8"}),
    multiplied=frozenset({"int8"}),
    per_token=frozenset({"int8"}),
    multiples={"fp8": 16},
    networks=("*",),
    broken={"torchao<0.18": "its tensors take no description of static inputs"},
)
NAMES = "tensor_names"  # of the metadata
BLOCK = 16  # numbers of NVFP4 to a scale
SMALLEST_NVFP4 = 2.0**-6  # of a block's scale for inputs: E4M3's smallest normal number
BY_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
BY_TENSOR = {"_type": "PerTensor", "_data": {}}
SCALE_DTYPES = (*FLOAT_SCALES, torch.float64)
CODES = {"int8": (INT8,), "fp8": (E4M3, torch.float8_e5m2)}
ZERO_POINTS = (INT8, torch.int32, torch.int64, *FLOAT_SCALES)
NUMBER = "|1|1 1|1 1 1|1 1 1 1"
BLOCKS = "N/{0} K/{1}"  # numbers of a block of rows and columns
OF_INT8 = (
    Piece("zero_point", BLOCKS, (INT8,), ZEROS, optional=True),
    Piece("act_quant_scale", NUMBER, FLOAT_SCALES, INPUTS, optional=True),
    Piece("act_pre_scale", "K", SCALE_DTYPES, FACTOR, optional=True),
    Piece("act_quant_zero_point", NUMBER, ZERO_POINTS, INPUTS, optional=True),
)
NVFP4 = {
    tiled: Layout("nvfp4", f"1 for {BLOCK} numbers", (
        Piece("qdata", "N K/2", (UINT8,), NUMBERS, packing=TWO_IN_A_BYTE),
        scale,
        Piece("per_tensor_scale", "", (torch.float32,), OF_ALL, optional=True),
        Piece("act_per_tensor_scale", NUMBER, FLOAT_SCALES, INPUTS, optional=True),
    ), columns=BLOCK)
    for tiled, scale in {
        False: Piece("scale", f"N K/{BLOCK}", (E4M3,)),
        True: Piece("scale", f"N^128/4 K/{BLOCK}^4*4", (E4M3,), packing=TILES),
    }.items()
}  # fmt: skip
OTHERS = {
    "Int4Tensor": "which mslk packs for NVIDIA GPUs",
    "Int4TilePackedTo4dTensor": "which is packed in tiles for tensor cores",
    "Int4PlainInt32Tensor": "which is packed for kernels on XPU and NPU",
    "MXTensor": "whose scales are powers of two in a type of their own",
}


@dataclass(frozen=True)
class Described:
    """A tensor as the metadata of a file describes it."""

    kind: str  # torchao's class
    fields: Mapping[str, Any]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Computed:
    """How torchao computes with a weight."""

    layout: Layout
    dtype: torch.dtype  # of the weight
    inputs: Inputs | None = None
    computes: bool = True  # whether torchao does, in fp32 on a processor


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """The denoiser in ``path`` as torchao computes it."""
    folder = Folder(path, checkpoint)
    refuse_pickles(folder.place)
    stored = dict(folder.tensors)
    descriptions = descriptions_of(path, stored.values())
    linears = {name: shape for name, shape in folder.shapes.items() if len(shape) == 2}
    layers: dict[str, QuantizedLayer] = {}
    computes = True
    parameters: dict[str, Readable] = {}
    for name, description in descriptions.items():
        if description.kind == "Tensor":
            if name in stored:
                parameters[name] = stored.pop(name)
            continue
        layer, _, ending = name.rpartition(".")
        keys = {piece: f"{layer}._{ending}_{piece}" for piece in description.pieces}
        if missing := [key for key in keys.values() if key not in stored]:
            raise ArtifactError(f"{path} holds no {missing[0][:200]!r}, a piece of {name[:200]!r}; fetch it again")
        pieces = LayerTensors(path, layer, {piece: stored.pop(key) for piece, key in keys.items()})
        if layer not in linears or ending != "weight":
            raise ArtifactError(
                f"{path} has {name[:200]!r} as a {description.kind[:100]}, expected none but weights of the model's "
                "linears; give a quantization of that very model"
            )
        layers[layer], computed = quantized_layer(description, pieces, linears[layer])
        computes = computes and computed
    size = size_of(parameters.values()) + sum(layer.stored_bytes for layer in layers.values())
    runtime = folder.opened_by(FACTS.method) if computes else None
    found = QuantizedDenoiser(path, FACTS.name, FACTS.method, layers, parameters, size, runtime=runtime)
    return checked_whole(found, checkpoint, unknown=list(stored))


def refuse_pickles(folder: Path) -> None:
    """Raises ArtifactError for a folder from before torchao could write safetensors."""
    names = [file.name for file in folder.iterdir()]
    if any(name.endswith(".bin") for name in names) and not any(".safetensors" in name for name in names):
        raise ArtifactError(
            f"{folder} holds weights as pickles (.bin), which can execute anything and are never opened; expected "
            "safetensors, so load it with torchao 0.16 or newer and save it with safe_serialization=True"
        )


# The metadata


def descriptions_of(path: Path, stored: Iterable[StoredTensor]) -> dict[str, Described]:
    """The descriptions in the headers of all files by tensors' names. Raises ArtifactError where one is missing."""
    files = {tensor.member.name: tensor.member for tensor in stored}
    found: dict[str, Described] = {}
    for member in files.values():
        metadata = read_header(member)[1]
        what = f"{member.name} does not say in its header how torchao's tensors are made of its own"
        advice = "expected what save_pretrained writes with torchao 0.16 or newer"
        with refusing(what, KeyError, TypeError, ValueError, RecursionError, advice=advice):
            names = parsed(metadata[NAMES])
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{NAMES} is {BOUNDED.repr(names)}")
            found |= {name: described(parsed(metadata[name])) for name in names}
    return found


def parsed(text: object) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"{BOUNDED.repr(text)} is no text")
    return json.loads(text, object_pairs_hook=without_duplicates)


def described(entry: Any) -> Described:
    """Raises KeyError, TypeError or ValueError for what is no description."""
    kind = entry["_type"]
    if kind == "Tensor":
        return Described(kind, {}, ())
    fields, pieces = entry["_data"], entry["_tensor_data_names"]
    fits = isinstance(kind, str) and isinstance(fields, dict) and isinstance(pieces, list)
    if not fits or not all(isinstance(piece, str) for piece in pieces) or len(set(pieces)) < len(pieces):
        raise ValueError(f"a description is {BOUNDED.repr(entry)}")
    return Described(kind, fields, tuple(pieces))


def options_of(value: Any, kind: str, known: Iterable[str]) -> dict[str, Any]:
    """The fields of a ``kind`` of value. Raises ValueError for anything else, and for a field that is not known."""
    options = named(value, kind)
    if not isinstance(options, dict):
        raise ValueError(f"{BOUNDED.repr(options)} where the fields of a {kind} belong")
    only(options, known)
    return options


def named(value: Any, kind: str) -> Any:
    """The data of a ``kind`` of value, such as a dtype's name. Raises ValueError for anything else."""
    if not isinstance(value, dict) or value.keys() != {"_type", "_data"} or value["_type"] != kind:
        raise ValueError(f"{BOUNDED.repr(value)} where a {kind} belongs")
    return value["_data"]


def dtype_of(value: Any, among: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    name = named(value, "torch.dtype")
    if not isinstance(name, str) or name not in among:
        raise ValueError(f"the dtype {BOUNDED.repr(name)} where {', '.join(among)} belong")
    return among[name]


def block_of(value: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns to a scale. Raises ValueError unless they divide ``shape``."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"block_size {BOUNDED.repr(value)}")
    rows, columns = value
    if shape[0] % rows or shape[1] % columns:
        raise ValueError(f"block_size {value}")
    return rows, columns


# Layers


def quantized_layer(
    description: Described, pieces: LayerTensors, shape: tuple[int, ...]
) -> tuple[QuantizedLayer, bool]:
    """A linear, and whether torchao computes it, in fp32 on a processor.

    Raises ArtifactError unless ``pieces`` are its weight as the ``description`` has it.
    """
    kind, told = description.kind, f"{pieces.path}: {pieces.layer}"
    if kind not in DECODERS:
        raise ArtifactError(
            f"{told} is a {kind[:100]}, {OTHERS.get(kind, 'which torchao 0.18 cannot save')}, and is not decoded here; "
            f"expected {', '.join(DECODERS)}"
        )
    try:
        found = DECODERS[kind](description.fields, pieces, (shape[0], shape[1]))
        only(pieces.tensors, [piece.end for piece in found.layout.pieces])
    except (KeyError, ValueError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ArtifactError(
            f"{told}, a {kind} for a weight {list(shape)}, has {str(reason)[:300]}; fetch it again, or save it with "
            "torchao 0.18"
        ) from error
    return found.layout.layer(pieces, shape, pieces.size(), found.inputs, found.dtype), found.computes


def only(found: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a piece or field that nothing here reads."""
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{', '.join(unknown)[:200]}, not known here")


def affine(layout: Layout, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
    """``(codes - zero_point) * scale``, in torchao's order and dtypes: scales keep theirs."""
    by_end = {piece.end: each for piece, each in found.items()}
    codes = by_end["qdata"]
    if "zero_point" in by_end:
        codes = codes - layout.spread(by_end["zero_point"].to(codes), shape)
    return codes * layout.spread(by_end["scale"], shape)


def affine_rows(layout: Layout, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
    """The same of an Int8Tensor whose codes are multiplied."""
    if any(piece.holds == ZEROS and bool(each.any()) for piece, each in found.items()):
        raise ArtifactError("an Int8Tensor has zero points, which torchao leaves out of its product; make it anew")
    return affine(layout, found, shape)


def in_blocks(name: str, block: tuple[int, int], shape: Shape, *more: Piece) -> Layout:
    """Codes of eight bits with a scale for each block of rows and columns of a weight of this ``shape``."""
    rows, columns = block
    share = f"{columns} numbers" if rows == 1 else f"{rows} x {columns} numbers"
    share = "all" if block == shape else "a row" if block == (1, shape[1]) else share
    pieces = (Piece("qdata", "N K", CODES[name], NUMBERS), Piece("scale", BLOCKS, SCALE_DTYPES), *more)
    pieces = tuple(replace(piece, shapes=piece.shapes.format(*block)) for piece in pieces)
    return Layout(name, f"1 for {share}", pieces, rows=rows, columns=columns, formula=affine)


def int8(fields: Mapping[str, Any], pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    """Rows are multiplied as codes, whether inputs are quantized or not; weights in blocks are dequantized first."""
    only(fields, ("act_quant_kwargs", "reduce_range", "block_size", "dtype"))
    block = block_of(fields["block_size"], shape)
    divided = block[1] < shape[1]
    if divided and fields.get("act_quant_kwargs") is not None or not divided and block[0] not in (1, shape[0]):
        raise ValueError(f"block_size {list(block)}, with which torchao multiplies no codes")
    layout, dtype = in_blocks("int8", block, shape, *OF_INT8), dtype_of(fields["dtype"])
    inputs: Inputs | None = int8_inputs(fields.get("act_quant_kwargs"), pieces)
    if "act_pre_scale" in pieces:
        inputs = Multiplied(pieces.finite("act_pre_scale").float(), False, inputs)
    if divided:
        return Computed(layout, dtype, inputs)
    return Computed(replace(layout, formula=affine_rows), torch.float32, inputs)


def int8_inputs(value: Any, pieces: LayerTensors) -> Affine | None:
    """The rounding that ``act_quant_kwargs`` describes, with a static scale where there is one."""
    if value is None:
        return None
    options = options_of(value, "QuantizeTensorToInt8Kwargs", ("granularity", "mapping_type", "reduce_range"))
    granularity, mapping = options["granularity"], named(options["mapping_type"], "MappingType")
    if granularity not in (BY_ROW, BY_TENSOR) or mapping not in ("SYMMETRIC", "ASYMMETRIC"):
        raise ValueError(f"inputs with {BOUNDED.repr(granularity)}, {BOUNDED.repr(mapping)}")
    half, static = options["reduce_range"], None
    if not isinstance(half, bool):
        raise ValueError(f"reduce_range {BOUNDED.repr(half)}")
    if "act_quant_scale" in pieces:
        static = pieces.number("act_quant_scale", positive=True)
    zero = "act_quant_zero_point"
    return Affine(
        low=-64 if half else -128,
        high=63 if half else 127,
        whole=granularity == BY_TENSOR,
        symmetric=mapping == "SYMMETRIC",
        smallest=torch.finfo(torch.float32).eps,
        scale=static,
        zero_point=0.0 if zero not in pieces or static is None else pieces.number(zero, dtypes=ZERO_POINTS),
    )


def intx(fields: Mapping[str, Any], pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    only(fields, ("target_dtype", "block_size", "dtype", "activation_quantization"))
    dtype_of(fields["target_dtype"], {f"int{bits}": torch.int8 for bits in range(1, 9)})
    block, dtype = block_of(fields["block_size"], shape), dtype_of(fields["dtype"])
    inputs = fields["activation_quantization"]
    if inputs not in (None, "int8_asym_per_token"):
        raise ValueError(f"inputs with {BOUNDED.repr(inputs)}")
    layout = in_blocks("int8", block, shape, Piece("zero_point", BLOCKS, (INT8, *SCALE_DTYPES), ZEROS))
    return Computed(
        replace(layout, format=f"{fields['target_dtype']['_data']} in bytes"),
        dtype,
        Affine(symmetric=False, smallest=torch.finfo(torch.float32).tiny) if inputs else None,
    )


def float8(fields: Mapping[str, Any], pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    only(fields, ("block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"))
    layout = in_blocks("fp8", block_of(fields["block_size"], shape), shape)
    inputs = float8_inputs(fields.get("act_quant_kwargs"))
    dtype = torch.float32 if inputs is not None else dtype_of(fields["dtype"])
    name = plain(pieces.checked("qdata", [shape], CODES["fp8"]).dtype)
    return Computed(replace(layout, format=name), dtype, inputs, dtype == torch.float32)  # it multiplies no others


def float8_inputs(value: Any) -> RowFloat8 | None:
    if value is None:
        return None
    options = options_of(
        value,
        "QuantizeTensorToFloat8Kwargs",
        ("float8_dtype", "granularity", "mm_config", "hp_value_lb", "hp_value_ub", "kernel_preference"),
    )
    dtype_of(options["float8_dtype"], {FP8: torch.float8_e4m3fn})
    least, most = (options.get(name) for name in ("hp_value_lb", "hp_value_ub"))
    bounded = least is None or type(least) is float and 0 <= least < float("inf")
    if options["granularity"] not in (BY_ROW, BY_TENSOR) or most is not None or not bounded:
        told = BOUNDED.repr(options["granularity"]), BOUNDED.repr([least, most])
        raise ValueError(f"inputs with {told[0]}, bounds {told[1]}")
    return RowFloat8(whole=options["granularity"] == BY_TENSOR, least=least or 0.0)


def nvfp4(fields: Mapping[str, Any], pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    only(fields, ("block_size", "orig_dtype", "is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs"))
    tiled = fields.get("is_swizzled_scales")
    if fields["block_size"] != BLOCK or shape[1] % BLOCK or not isinstance(tiled, bool):
        raise ValueError(f"blocks of {BOUNDED.repr(fields['block_size'])}, in tiles: {BOUNDED.repr(tiled)}")
    inputs = nvfp4_inputs(fields.get("act_quant_kwargs"), pieces)
    dtype = torch.float32 if inputs is not None else dtype_of(fields["orig_dtype"])
    return Computed(NVFP4[tiled], dtype, inputs, computes=inputs is None)


def nvfp4_inputs(value: Any, pieces: LayerTensors) -> Nvfp4 | None:
    if value is None:
        return None
    options = options_of(
        value,
        "QuantizeTensorToNVFP4Kwargs",
        ("block_size", "is_swizzled_scales", "use_triton_kernel", "use_dynamic_per_tensor_scale"),
    )
    if options["block_size"] != BLOCK or not isinstance(options["use_dynamic_per_tensor_scale"], bool):
        raise ValueError(f"inputs with {BOUNDED.repr(options)}")
    if options["use_dynamic_per_tensor_scale"]:
        return Nvfp4(None, SMALLEST_NVFP4, reciprocal=True, also=", and one each time")
    if "act_per_tensor_scale" not in pieces:
        return Nvfp4(1.0, SMALLEST_NVFP4, reciprocal=True)
    static = pieces.number("act_per_tensor_scale", positive=True)
    return Nvfp4(static, SMALLEST_NVFP4, reciprocal=True, also=", and one")


DECODERS: Mapping[str, Callable[[Mapping[str, Any], LayerTensors, tuple[int, int]], Computed]] = {
    "Int8Tensor": int8,
    "IntxUnpackedToInt8Tensor": intx,
    "Float8Tensor": float8,
    "NVFP4Tensor": nvfp4,
}


# Writing

# diffusers asks for some config; the tensors in the file say everything, so it has no values.
CONFIGS = {
    "int8": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}},
    "int8 with inputs": {"_type": "Int8StaticActivationInt8WeightConfig", "_version": 1, "_data": {}},
    "fp8": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": {}},
}
# a Float8Tensor's fields as torchao's own quantizer sets them, but for the bound
PRODUCT = {"_type": "Float8MMConfig", "_data": {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}}
KERNEL = {"_type": "KernelPreference", "_data": "AUTO"}
INPUTS_BY_ROW = {
    "_type": "QuantizeTensorToFloat8Kwargs",
    "_data": {
        "float8_dtype": {"_type": "torch.dtype", "_data": FP8},
        "granularity": BY_ROW,
        "mm_config": None,
        "hp_value_lb": SMALLEST_TOKEN,  # holds in fp16 too, and 1 / 448 of it
        "hp_value_ub": None,
        "kernel_preference": KERNEL,
    },
}


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Writes the denoiser into the pipeline ``folder``: its weights, and ``quantization_config`` in its config.

    Per quantized layer there are codes int8 or E4M3 [out, in], scales fp32 [out, 1], the input's scale fp32 [1, ...]
    if it has a static one and, where the layer multiplies, its factors fp32 [in].
    """
    layers = quantized(assignment)
    ranks = input_ranks(checkpoint) if any(has_static_input(layer) for layer in layers.values()) else {}
    tensors: dict[str, Readable] = {}
    metadata: dict[str, str] = {}
    for name, tensor in high_precision(checkpoint, assignment).items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            tensors[name], metadata[name] = tensor, json.dumps({"_type": "Tensor"})
            continue
        pieces = pieces_of(checkpoint, layer, ranks.get(layer.name, 0))
        tensors |= {f"{layer.name}._weight_{piece}": each for piece, each in pieces.items()}
        metadata[name] = json.dumps(description_of(layer, list(pieces)))
    metadata[NAMES] = json.dumps(list(metadata))
    first = next(iter(layers.values()))
    kind = CONFIGS["int8 with inputs" if first.format == first.activation_format == "int8" else first.format]
    written = {"quant_method": FACTS.method, "quant_type": {"default": kind}, "modules_to_not_convert": None}
    return write_folder(checkpoint, folder, tensors, written, FORMAT | metadata)


def pieces_of(checkpoint: Checkpoint, layer: LayerAssignment, rank: int) -> dict[str, Readable]:
    """The tensors that make up a layer's ``Int8Tensor`` or ``Float8Tensor``, by torchao's names.

    ``rank`` is that of the layer's input, as which a static scale has axes. There is a scale for each output, also
    where the weight has one alone: torchao takes it for either.
    """
    more = [replace(piece, shapes=" ".join("1" * rank)) if piece.holds == INPUTS else piece for piece in OF_INT8[:3]]
    columns = layer.weight_shape[1]
    layout = in_blocks(layer.format, (1, columns), layer.weight_shape, *(more if layer.format == "int8" else ()))
    return layout.of_joined(checkpoint, alone(layer))


def description_of(layer: LayerAssignment, pieces: list[str]) -> dict:
    """The metadata of a layer's weight: the class to make of its pieces, and its other fields.

    The dtype is the one that diffusers loads by default and advises for integers, and the only one in which CUDA
    multiplies FP8 by rows.
    """
    fields: dict[str, object] = {
        "block_size": [1, layer.weight_shape[1]],
        "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
    }
    if layer.format == "fp8":
        kind = "Float8Tensor"
        fields |= {"mm_config": PRODUCT, "act_quant_kwargs": INPUTS_BY_ROW, "kernel_preference": KERNEL}
    else:
        kind, inputs = (
            "Int8Tensor",
            {
                "granularity": BY_ROW if layer.per_token else BY_TENSOR,
                "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
                "reduce_range": False,
            },
        )
        options = {"_type": "QuantizeTensorToInt8Kwargs", "_data": inputs}
        fields |= {"act_quant_kwargs": options if layer.activation_format else None, "reduce_range": False}
    return {"_type": kind, "_data": fields, "_tensor_data_names": pieces}
