"""diffusers with torchao: linears whose weights are tensors of torchao's classes.

A safetensors file holds tensors such as ``X._weight_qdata``; the header's metadata has each weight's class and other
fields as JSON (torchao's ``prototype.safetensors``, 0.16 and newer, read by diffusers' ``TorchAoHfQuantizer``). The
config, with the options that made the tensors, is not read.

| class                    | codes                                      | scales                                      |
|--------------------------|--------------------------------------------|---------------------------------------------|
| Int8Tensor               | int8 [out, in]                             | fp32 for a row, a block or all              |
| IntxUnpackedToInt8Tensor | int8 [out, in], of 1 to 8 bits             | for a row or a block, with zero points      |
| Float8Tensor             | E4M3 or E5M2 [out, in]                     | fp32 for a row, a block or all              |
| NVFP4Tensor              | uint8 [out, in / 2], first in the low half | E4M3 for 16 numbers, in tiles; fp32 for all |

The weight is fp32 where quantized values are multiplied, and in torchao's dtype where it is dequantized first. Formulas
are those of torchao 0.18 (BSD licence).

Int8Tensors are written with or without quantized inputs (static scales or one per row) and with smoothing factors, also
for text encoders, which transformers opens alike. A static scale has as many axes as the input, else torchao asserts.
Float8Tensors have a scale per row of weight and input, and neither static scales nor smoothing factors. Scales stay
fp32; torchao's own quantizer computes them in the weight's dtype, in bfloat16 up to 0.3 % off. It divides rows of
zeros, such as SDXL's empty prompt, by zero, and images are black: ``hp_value_lb`` bounds the largest magnitude. CUDA
multiplies FP8 only where both sides are multiples of 16. Convolutions cannot be stored.

Alternatives not taken: torchao's own tensor classes, which take seconds to import, look names of a file up in torch,
and need the whole network in memory; and torchao's ``quantize_``, which chooses other quantized values.
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
from sd_quant.interchange.layouts import FACTOR, INPUTS, NUMBERS, OF_ALL, TILES, TWO_IN_A_BYTE, ZEROS, Layout, Piece
from sd_quant.interchange.stored import DTYPES, FLOAT_SCALES, FP8, Folder, LayerTensors, Shape, fits, plain
from sd_quant.interchange.weights import Assignment, alone, has_static_input, high_precision, quantized, write_folder
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
Fields = Mapping[str, Any]
CODES = {"int8": (torch.int8,), "fp8": (torch.float8_e4m3fn, torch.float8_e5m2)}
ZERO_POINTS = (torch.int8, torch.int32, torch.int64, *FLOAT_SCALES)
NUMBER = "|1|1 1|1 1 1|1 1 1 1"
BLOCKS = "N/{0} K/{1}"  # numbers of a block of rows and columns
OF_INT8 = (
    Piece("zero_point", BLOCKS, (torch.int8,), ZEROS, optional=True),
    Piece("act_quant_scale", NUMBER, FLOAT_SCALES, INPUTS, optional=True),
    Piece("act_pre_scale", "K", SCALE_DTYPES, FACTOR, optional=True),
    Piece("act_quant_zero_point", NUMBER, ZERO_POINTS, INPUTS, optional=True),
)
NVFP4 = {
    tiled: Layout("nvfp4", f"1 for {BLOCK} numbers", (
        Piece("qdata", "N K/2", (torch.uint8,), NUMBERS, packing=TWO_IN_A_BYTE),
        scale,
        Piece("per_tensor_scale", "", (torch.float32,), OF_ALL, optional=True),
        Piece("act_per_tensor_scale", NUMBER, FLOAT_SCALES, INPUTS, optional=True),
    ), columns=BLOCK)
    for tiled, scale in {
        False: Piece("scale", f"N K/{BLOCK}", (torch.float8_e4m3fn,)),
        True: Piece("scale", f"N^128/4 K/{BLOCK}^4*4", (torch.float8_e4m3fn,), packing=TILES),
    }.items()
}  # fmt: skip
OTHERS = {
    "Int4Tensor": "which mslk packs for NVIDIA GPUs",
    "Int4TilePackedTo4dTensor": "which is packed in tiles for tensor cores",
    "Int4PlainInt32Tensor": "which is packed for kernels on XPU and NPU",
    "MXTensor": "whose scales are powers of two in a type of their own",
}


@dataclass(frozen=True)
class Computed:
    """How torchao computes with a weight: layout, dtype and rounding of inputs."""

    layout: Layout
    dtype: torch.dtype  # of the weight
    inputs: Inputs | None = None
    computes: bool = True  # whether torchao does, in fp32 on a processor


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in ``path`` as torchao computes it."""
    folder = Folder(path, checkpoint)
    names = [file.name for file in folder.place.iterdir()]
    if any(name.endswith(".bin") for name in names) and not any(".safetensors" in name for name in names):
        raise ArtifactError(
            f"{folder.place} holds weights as pickles (.bin), which can execute anything and are never opened; "
            "expected safetensors, so load it with torchao 0.16 or newer and save it with safe_serialization=True"
        )
    stored = dict(folder.tensors)
    descriptions = descriptions_of(path, stored.values())
    linears = {name: shape for name, shape in folder.shapes.items() if len(shape) == 2}
    layers: dict[str, QuantizedLayer] = {}
    computes = True
    parameters: dict[str, Readable] = {}
    for name, description in descriptions.items():
        if description["_type"] == "Tensor":
            if name in stored:
                parameters[name] = stored.pop(name)
            continue
        layer, _, ending = name.rpartition(".")
        keys = {piece: f"{layer}._{ending}_{piece}" for piece in description["_tensor_data_names"]}
        if missing := [key for key in keys.values() if key not in stored]:
            raise ArtifactError(f"{path} holds no {missing[0][:200]!r}, a piece of {name[:200]!r}; fetch it again")
        pieces = LayerTensors(path, layer, {piece: stored.pop(key) for piece, key in keys.items()})
        if layer not in linears or ending != "weight":
            raise ArtifactError(
                f"{path} has {name[:200]!r} as a {description['_type'][:100]}, expected none but weights of the "
                "model's linears; give a quantization of that very model"
            )
        layers[layer], computed = quantized_layer(description, pieces, linears[layer])
        computes = computes and computed
    size = size_of(parameters.values()) + sum(layer.stored_bytes for layer in layers.values())
    runtime = folder.opened_by(FACTS.method) if computes else None
    found = QuantizedDenoiser(path, FACTS.name, FACTS.method, layers, parameters, size, runtime=runtime)
    return checked_whole(found, checkpoint, unknown=list(stored))


# The metadata


def descriptions_of(path: Path, stored: Iterable[StoredTensor]) -> dict[str, Fields]:
    """Read torchao's class and fields of each tensor from the files' headers. Raises ArtifactError if missing."""
    files = {tensor.member.name: tensor.member for tensor in stored}
    found: dict[str, Fields] = {}
    for member in files.values():
        metadata = read_header(member)[1]
        what = f"{member.name} does not say in its header how torchao's tensors are made of its own"
        advice = "expected what save_pretrained writes with torchao 0.16 or newer"
        with refusing(what, KeyError, TypeError, ValueError, RecursionError, advice=advice):
            names = parsed(metadata[NAMES])
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{NAMES} is {BOUNDED.repr(names)}")
            for name in names:
                found[name] = entry = parsed(metadata[name])
                if entry["_type"] != "Tensor" and not is_description(entry):
                    raise ValueError(f"a description is {BOUNDED.repr(entry)}")
    return found


def parsed(text: object) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"{BOUNDED.repr(text)} is no text")
    return json.loads(text, object_pairs_hook=without_duplicates)


def is_description(entry: Fields) -> bool:
    pieces = entry["_tensor_data_names"]
    plain = isinstance(entry["_type"], str) and isinstance(entry["_data"], dict) and isinstance(pieces, list)
    return plain and all(isinstance(piece, str) for piece in pieces) and len(set(pieces)) == len(pieces)


def block_of(value: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Raises ValueError unless they divide ``shape``."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"block_size {BOUNDED.repr(value)}")
    rows, columns = value
    if shape[0] % rows or shape[1] % columns:
        raise ValueError(f"block_size {value}")
    return rows, columns


# Layers


def quantized_layer(description: Fields, pieces: LayerTensors, shape: tuple[int, ...]) -> tuple[QuantizedLayer, bool]:
    """Return the linear of a ``description`` (class and fields), and whether torchao can compute it in fp32 on a CPU.

    Raises ArtifactError unless ``pieces`` fit the ``description``.
    """
    kind, fields, told = description["_type"], description["_data"], f"{pieces.path}: {pieces.layer}"
    if kind not in DECODERS:
        raise ArtifactError(
            f"{told} is a {kind[:100]}, {OTHERS.get(kind, 'which torchao 0.18 cannot save')}, and is not decoded here; "
            f"expected {', '.join(DECODERS)}"
        )
    try:
        decode, templates = DECODERS[kind]
        only(fields, templates)
        for name, template in templates.items():
            if not fits(fields.get(name), template):
                raise ValueError(f"{name} {BOUNDED.repr(fields.get(name))}")
        found = decode(fields, pieces, (shape[0], shape[1]))
        only(pieces.tensors, [piece.end for piece in found.layout.pieces])
    except (ValueError, OverflowError) as error:
        raise ArtifactError(
            f"{told}, a {kind} for a weight {list(shape)}, has {str(error)[:300]}; fetch it again, or save it with "
            "torchao 0.18"
        ) from error
    return found.layout.layer(pieces, shape, pieces.size(), found.inputs, found.dtype), found.computes


def only(found: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for a tensor or field that is not in ``known``."""
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{', '.join(unknown)[:200]}, not known here")


def affine(layout: Layout, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
    """Compute ``(codes - zero_point) * scale``, in torchao's order and dtypes: scales keep their dtype."""
    by_end = {piece.end: each for piece, each in found.items()}
    codes = by_end["qdata"]
    if "zero_point" in by_end:
        codes = codes - layout.spread(by_end["zero_point"].to(codes), shape)
    return codes * layout.spread(by_end["scale"], shape)


def affine_rows(layout: Layout, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
    """Compute ``affine`` of an Int8Tensor multiplied by its codes. Raises ArtifactError for nonzero zero points."""
    if any(piece.holds == ZEROS and bool(each.any()) for piece, each in found.items()):
        raise ArtifactError("an Int8Tensor has zero points, which torchao leaves out of its product; make it anew")
    return affine(layout, found, shape)


def in_blocks(name: str, block: tuple[int, int], shape: Shape, *more: Piece) -> Layout:
    """Return the layout of 8-bit codes in the format ``name``, a scale per ``block`` (rows, columns), and ``more``."""
    rows, columns = block
    share = f"{columns} numbers" if rows == 1 else f"{rows} x {columns} numbers"
    share = "all" if block == shape else "a row" if block == (1, shape[1]) else share
    pieces = (Piece("qdata", "N K", CODES[name], NUMBERS), Piece("scale", BLOCKS, SCALE_DTYPES), *more)
    pieces = tuple(replace(piece, shapes=piece.shapes.format(*block)) for piece in pieces)
    return Layout(name, f"1 for {share}", pieces, rows=rows, columns=columns, formula=affine)


def int8(fields: Fields, pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    """Return how torchao computes an Int8Tensor: it multiplies codes, or the weight if a row has several scales."""
    block, options = block_of(fields["block_size"], shape), fields.get("act_quant_kwargs")
    divided = block[1] < shape[1]
    if divided and options is not None or not divided and block[0] not in (1, shape[0]):
        raise ValueError(f"block_size {list(block)}, with which torchao multiplies no codes")
    layout = in_blocks("int8", block, shape, *OF_INT8)
    inputs: Inputs | None = None if options is None else int8_inputs(options["_data"], pieces)
    if "act_pre_scale" in pieces:
        inputs = Multiplied(pieces.finite("act_pre_scale").float(), False, inputs)
    if divided:
        return Computed(layout, dtype_of(fields["dtype"]), inputs)
    return Computed(replace(layout, formula=affine_rows), torch.float32, inputs)


def int8_inputs(options: Fields, pieces: LayerTensors) -> Affine:
    """Return the rounding of an Int8Tensor's inputs, with a static scale if one is stored."""
    static, zero, half = None, "act_quant_zero_point", options["reduce_range"]
    if "act_quant_scale" in pieces:
        static = pieces.number("act_quant_scale", positive=True)
    return Affine(
        low=-64 if half else -128,
        high=63 if half else 127,
        whole=options["granularity"] == BY_TENSOR,
        symmetric=options["mapping_type"]["_data"] == "SYMMETRIC",
        smallest=torch.finfo(torch.float32).eps,
        scale=static,
        zero_point=0.0 if zero not in pieces or static is None else pieces.number(zero, dtypes=ZERO_POINTS),
    )


def intx(fields: Fields, pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    zeros = Piece("zero_point", BLOCKS, (torch.int8, *SCALE_DTYPES), ZEROS)
    layout = in_blocks("int8", block_of(fields["block_size"], shape), shape, zeros)
    inputs = Affine(symmetric=False, smallest=torch.finfo(torch.float32).tiny)
    return Computed(
        replace(layout, format=f"{fields['target_dtype']['_data']} in bytes"),
        dtype_of(fields["dtype"]),
        inputs if fields["activation_quantization"] else None,
    )


def float8(fields: Fields, pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    layout = in_blocks("fp8", block_of(fields["block_size"], shape), shape)
    inputs: Inputs | None = None
    if (kwargs := fields.get("act_quant_kwargs")) is not None:
        options = kwargs["_data"]
        least = options.get("hp_value_lb") or 0.0
        if not 0 <= least < float("inf"):
            raise ValueError(f"hp_value_lb {least}")
        inputs = RowFloat8(whole=options["granularity"] == BY_TENSOR, least=least)
    dtype = torch.float32 if inputs is not None else dtype_of(fields["dtype"])
    name = plain(pieces.checked("qdata", [shape], CODES["fp8"]).dtype)
    return Computed(replace(layout, format=name), dtype, inputs, dtype == torch.float32)  # it multiplies no others


def nvfp4(fields: Fields, pieces: LayerTensors, shape: tuple[int, int]) -> Computed:
    layout, kwargs = NVFP4[fields["is_swizzled_scales"]], fields.get("act_quant_kwargs")
    if kwargs is None:
        return Computed(layout, dtype_of(fields["orig_dtype"]))
    inputs = Nvfp4(1.0, SMALLEST_NVFP4, reciprocal=True)
    if kwargs["_data"]["use_dynamic_per_tensor_scale"]:
        inputs = replace(inputs, common=None, also=", and one each time")
    elif "act_per_tensor_scale" in pieces:
        inputs = replace(inputs, common=pieces.number("act_per_tensor_scale", positive=True), also=", and one")
    return Computed(layout, torch.float32, inputs, computes=False)


def dtypes(*names: str) -> tuple[Fields, ...]:
    return tuple({"_type": "torch.dtype", "_data": name} for name in names)


def dtype_of(value: Fields) -> torch.dtype:
    return DTYPES[value["_data"]]


def inputs_of(kind: str, **options: Any) -> tuple[Any, ...]:
    """Return what ``act_quant_kwargs`` may be, as a template for ``fits``: None, or a class with ``options``."""
    return None, {"_type": f"QuantizeTensorTo{kind}Kwargs", "_data": options}


MAPPINGS = tuple({"_type": "MappingType", "_data": name} for name in ("SYMMETRIC", "ASYMMETRIC"))
OF_FLOATS, ANY = dtypes(*DTYPES), object
DECODERS: Mapping[str, tuple[Callable[[Fields, LayerTensors, tuple[int, int]], Computed], Fields]] = {  # with templates
    "Int8Tensor": (int8, {
        "block_size": list, "dtype": OF_FLOATS, "reduce_range": ANY,
        "act_quant_kwargs": inputs_of(
            "Int8", granularity=(BY_ROW, BY_TENSOR), mapping_type=MAPPINGS, reduce_range=bool,
        ),
    }),
    "IntxUnpackedToInt8Tensor": (intx, {
        "target_dtype": dtypes(*(f"int{bits}" for bits in range(1, 9))), "block_size": list, "dtype": OF_FLOATS,
        "activation_quantization": (None, "int8_asym_per_token"),
    }),
    "Float8Tensor": (float8, {
        "block_size": list, "dtype": OF_FLOATS, "mm_config": ANY, "kernel_preference": ANY,
        "act_quant_kwargs": inputs_of(
            "Float8", float8_dtype=dtypes(FP8), granularity=(BY_ROW, BY_TENSOR), hp_value_lb=(None, float),
            hp_value_ub=None, mm_config=ANY, kernel_preference=ANY,
        ),
    }),
    "NVFP4Tensor": (nvfp4, {
        "block_size": BLOCK, "orig_dtype": OF_FLOATS, "is_swizzled_scales": bool, "use_triton_kernel": ANY,
        "act_quant_kwargs": inputs_of(
            "NVFP4", block_size=BLOCK, use_dynamic_per_tensor_scale=bool, is_swizzled_scales=ANY, use_triton_kernel=ANY,
        ),
    }),
}  # fmt: skip


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
    """Write the denoiser into the pipeline ``folder``: its weights, and ``quantization_config`` in its config.

    A quantized layer has codes int8 or E4M3 [out, in], scales fp32 [out, 1], a static scale of inputs fp32 [1,
    ...], and smoothing factors fp32 [in].
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
    """Return the tensors of a layer's ``Int8Tensor`` or ``Float8Tensor`` by torchao's names.

    ``rank`` is the number of axes of the input and of its static scale. Each output gets a scale, even if the
    weight has one in all.
    """
    more = [replace(piece, shapes=" ".join("1" * rank)) if piece.holds == INPUTS else piece for piece in OF_INT8[:3]]
    columns = layer.weight_shape[1]
    layout = in_blocks(layer.format, (1, columns), layer.weight_shape, *(more if layer.format == "int8" else ()))
    return layout.of_joined(checkpoint, alone(layer))


def description_of(layer: LayerAssignment, pieces: list[str]) -> dict:
    """Return the metadata of a layer's weight: its class and fields.

    The dtype, bfloat16, is diffusers' default, advised for integers, and the only one for CUDA's FP8 by row.
    """
    fields: dict[str, object] = {
        "block_size": [1, layer.weight_shape[1]],
        "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
    }
    if layer.format == "fp8":
        fields |= {"mm_config": PRODUCT, "act_quant_kwargs": INPUTS_BY_ROW, "kernel_preference": KERNEL}
        return {"_type": "Float8Tensor", "_data": fields, "_tensor_data_names": pieces}
    inputs = {
        "granularity": BY_ROW if layer.per_token else BY_TENSOR,
        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
        "reduce_range": False,
    }
    options = {"_type": "QuantizeTensorToInt8Kwargs", "_data": inputs}
    fields |= {"act_quant_kwargs": options if layer.activation_format else None, "reduce_range": False}
    return {"_type": "Int8Tensor", "_data": fields, "_tensor_data_names": pieces}
