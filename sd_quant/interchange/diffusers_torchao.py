"""diffusers with torchao: linears whose weights are tensors of torchao's own classes.

A safetensors file holds such a tensor in pieces, ``X._weight_qdata`` and others, and its header's metadata says which
class they make up and with what other fields, as JSON (torchao's ``prototype.safetensors``, 0.16 and newer). The config
says with which options the tensors were made; they decide, so it is not read.

| class                    | codes                                      | scales                                      |
|--------------------------|--------------------------------------------|---------------------------------------------|
| Int8Tensor               | int8 [out, in]                             | fp32 for a row, a block or all              |
| IntxUnpackedToInt8Tensor | int8 [out, in], of 1 to 8 bits             | for a row or a block, with zero points      |
| Float8Tensor             | E4M3 or E5M2 [out, in]                     | fp32 for a row, a block or all              |
| NVFP4Tensor              | uint8 [out, in / 2], first in the low half | E4M3 for 16 numbers, in tiles; fp32 for all |

Where codes are multiplied, a weight is given in fp32; where torchao dequantizes a weight first, in the dtype to which
it does. Formulas are those of torchao 0.18 (BSD licence).
The road not taken is to let torchao make the tensors: it imports for seconds, and looks names of a file up in torch.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.safetensors import read_header, without_duplicates
from sd_quant.files.tensors import Readable, StoredTensor
from sd_quant.interchange import DIFFUSERS, STATIC, ForeignFormat
from sd_quant.interchange.candidate import FLOATS, Candidate, Inputs, StoredLayer, check_whole, size_in_file
from sd_quant.interchange.folders import by_diffusers, decoded, denoiser_folder, quantized_by, stored_tensors
from sd_quant.interchange.inputs import Affine, Multiplied, NvidiaBlocks, RowFloat8
from sd_quant.knobs import BOUNDED
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.numbers import up_to
from sd_quant.quantization.formats import e2m1
from sd_quant.quantization.formats.blocks import TILE_COLUMNS, TILE_ROWS, from_tiles

FACTS = ForeignFormat(
    "diffusers_torchao",
    reads="a diffusers folder quantized with torchao",
    consumer="diffusers with torchao",
    tried=(*DIFFUSERS, "torchao==0.18.0"),
    formats={"int8": STATIC},
    loading="import torch\nfrom diffusers import DiffusionPipeline\n\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.bfloat16)",
    multiplied=frozenset({"int8"}),
    per_token=frozenset({"int8"}),
    broken={"torchao<0.18": "its tensors take no description of static inputs"},
)
METHOD = "torchao"
NAMES = "tensor_names"  # of the metadata
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FLOATS8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
BLOCK = 16  # numbers of NVFP4 to a scale
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
PER_TENSOR = {"_type": "PerTensor", "_data": {}}
OTHERS = {
    "Int4Tensor": "which mslk packs for NVIDIA GPUs",
    "Int4TilePackedTo4dTensor": "which is packed in tiles for tensor cores",
    "Int4PlainInt32Tensor": "which is packed for kernels on XPU and NPU",
    "MXTensor": "whose scales are powers of two in a type of their own",
}


@dataclass(frozen=True)
class Described:
    """What a file's metadata says of a tensor."""

    kind: str  # torchao's class
    fields: Mapping[str, Any]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Decoded:
    """A weight [out, in], not read yet."""

    format: str
    block: tuple[int, int]  # rows and columns to a scale
    dtype: torch.dtype
    read: Callable[[], Tensor]
    inputs: Inputs | None = None
    computes: bool = True  # whether torchao does, in fp32 on a processor


def recognizes(path: Path) -> bool:
    return quantized_by(path, METHOD)


def read(path: Path, checkpoint: Checkpoint) -> Candidate:
    """The denoiser in ``path`` as torchao computes it.

    Raises ArtifactError for a damaged folder, one of pickles, a class or a field that cannot be decoded here, and for
    whatever is not the denoiser of ``checkpoint``.
    """
    refuse_pickles(path)
    stored = stored_tensors(path)
    descriptions = descriptions_of(path, stored.values())
    modules = dict(empty_denoiser(checkpoint).named_modules())
    layers: dict[str, StoredLayer] = {}
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
        pieces = {piece: stored.pop(key) for piece, key in keys.items()}
        module = modules.get(layer)
        if not isinstance(module, nn.Linear) or ending != "weight":
            raise ArtifactError(
                f"{path} has {name[:200]!r} as a {description.kind[:100]}, expected none but weights of the model's "
                "linears; give a quantization of that very model"
            )
        shape = tuple(module.weight.shape)
        weight = decoded_weight(path, layer, shape, description, pieces)
        layers[layer] = stored_layer(path, layer, shape, weight, pieces)
        computes = computes and weight.computes
    candidate = Candidate(
        path=path,
        reader="diffusers_torchao",
        maker="torchao",
        layers=layers,
        parameters=parameters,
        stored_bytes=size_in_file(parameters.values()) + sum(layer.stored_bytes for layer in layers.values()),
        runtime=by_diffusers(path, checkpoint, "torchao") if computes else None,
    )
    return check_whole(candidate, checkpoint, unknown=list(stored))


def refuse_pickles(path: Path) -> None:
    """Raises ArtifactError for a folder from before torchao could write safetensors."""
    folder = denoiser_folder(path) or path
    names = [file.name for file in folder.iterdir()]
    if any(name.endswith(".bin") for name in names) and not any(".safetensors" in name for name in names):
        raise ArtifactError(
            f"{folder} holds weights as pickles (.bin), which can execute anything and are never opened; expected "
            "safetensors, so load it with torchao 0.16 or newer and save it with safe_serialization=True"
        )


# The metadata


def descriptions_of(path: Path, stored: Iterable[StoredTensor]) -> dict[str, Described]:
    """What the headers of all files say of tensors, by their names. Raises ArtifactError unless they say it in full."""
    files = {tensor.member.name: tensor.member for tensor in stored}
    found: dict[str, Described] = {}
    for member in files.values():
        metadata = read_header(member)[1]
        try:
            names = parsed(metadata[NAMES])
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{NAMES} is {BOUNDED.repr(names)}")
            found |= {name: described(parsed(metadata[name])) for name in names}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{member.name} does not say in its header how torchao's tensors are made of its own "
                f"({type(error).__name__}: {str(error)[:200]}); expected what save_pretrained writes with torchao 0.16 "
                "or newer"
            ) from error
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


def decoded_weight(
    path: Path, name: str, shape: tuple[int, ...], description: Described, pieces: Mapping[str, Readable]
) -> Decoded:
    """Raises ArtifactError unless ``pieces`` are the weight of a linear as the ``description`` has it."""
    kind = description.kind
    if kind not in DECODERS:
        raise ArtifactError(
            f"{path}: {name} is a {kind[:100]}, {OTHERS.get(kind, 'which torchao 0.18 cannot save')}, and is not "
            f"decoded here; expected {', '.join(DECODERS)}"
        )
    try:
        return DECODERS[kind](description.fields, pieces, (shape[0], shape[1]))
    except (KeyError, ValueError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ArtifactError(
            f"{path}: {name}, a {kind} for a weight {list(shape)}, has {str(reason)[:300]}; fetch it again, or save it "
            "with torchao 0.18"
        ) from error


def stored_layer(
    path: Path, name: str, shape: tuple[int, ...], weight: Decoded, pieces: Mapping[str, Readable]
) -> StoredLayer:
    rows, columns = weight.block
    told = f"{columns} numbers" if rows == 1 else f"{rows} x {columns} numbers"
    told = "all" if weight.block == shape else "a row" if weight.block == (1, shape[1]) else told
    return StoredLayer(
        format=weight.format,
        scales=f"1 for {told}",
        stored_bytes=size_in_file(pieces.values()),
        weight=decoded(path, name, shape, weight.read, weight.dtype),
        inputs=weight.inputs,
    )


def expect(
    pieces: Mapping[str, Readable], name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Readable:
    """The piece of that name. Raises KeyError where there is none, ValueError for another shape or dtype."""
    piece = pieces[name]
    if tuple(piece.shape) != shape or piece.dtype not in dtypes:
        raise ValueError(f"a {name} {list(piece.shape)} {piece.dtype} where {list(shape)} {dtypes[0]} belongs")
    return piece


def only(found: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a piece or field that nothing here reads."""
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{', '.join(unknown)[:200]}, not known here")


def one_number(piece: Readable, name: str) -> float:
    """Read now. Raises ValueError unless it is one finite number."""
    if prod(piece.shape) != 1:
        raise ValueError(f"a {name} {list(piece.shape)} where one number belongs")
    value = float(piece.read().float())
    if not isfinite(value):
        raise ValueError(f"a {name} of {value}")
    return value


def positive(value: float, name: str) -> float:
    if value <= 0:
        raise ValueError(f"a {name} of {value:g}")
    return value


def affine(
    codes: Tensor, zero_point: Tensor | None, scale: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """``(codes - zero_point) * scale``, in torchao's order and dtypes."""
    blocks = codes.to(dtype).unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    if zero_point is not None:
        blocks = blocks - zero_point[:, None, :, None].to(dtype)
    return (blocks * scale[:, None, :, None]).to(dtype).view(codes.shape)


def int8(fields: Mapping[str, Any], pieces: Mapping[str, Readable], shape: tuple[int, int]) -> Decoded:
    """Rows are multiplied as codes, whether inputs are quantized or not; weights in blocks are dequantized first."""
    only(fields, ("act_quant_kwargs", "reduce_range", "block_size", "dtype"))
    only(pieces, ("qdata", "scale", "zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale"))
    block = block_of(fields["block_size"], shape)
    inputs: Inputs | None = int8_inputs(fields.get("act_quant_kwargs"), pieces)
    blocks = (shape[0] // block[0], shape[1] // block[1])
    codes, scale = expect(pieces, "qdata", shape, (torch.int8,)), expect(pieces, "scale", blocks, FLOATS)
    zero_point = expect(pieces, "zero_point", blocks, (torch.int8,)) if "zero_point" in pieces else None
    in_blocks = block[1] < shape[1]
    if in_blocks and fields.get("act_quant_kwargs") is not None or not in_blocks and block[0] not in (1, shape[0]):
        raise ValueError(f"block_size {list(block)}, with which torchao multiplies no codes")
    dtype = dtype_of(fields["dtype"])

    def weight() -> Tensor:
        zero = zero_point.read() if zero_point is not None else None
        if in_blocks:
            return affine(codes.read(), zero, scale.read(), block, dtype)
        if zero is not None and zero.any():
            raise ArtifactError("an Int8Tensor has zero points, which torchao leaves out of its product; make it anew")
        return affine(codes.read(), None, scale.read().float(), block, torch.float32)

    if "act_pre_scale" in pieces:
        factor = expect(pieces, "act_pre_scale", (shape[1],), FLOATS).read()
        if not torch.isfinite(factor).all():
            raise ValueError("an act_pre_scale with NaN or infinite numbers")
        inputs = Multiplied(factor.float(), False, inputs)
    return Decoded("int8", block, dtype if in_blocks else torch.float32, weight, inputs)


def int8_inputs(value: Any, pieces: Mapping[str, Readable]) -> Affine | None:
    """What ``act_quant_kwargs`` says, with a static scale where there is one."""
    if value is None:
        return None
    options = options_of(value, "QuantizeTensorToInt8Kwargs", ("granularity", "mapping_type", "reduce_range"))
    granularity, mapping = options["granularity"], named(options["mapping_type"], "MappingType")
    if granularity not in (PER_ROW, PER_TENSOR) or mapping not in ("SYMMETRIC", "ASYMMETRIC"):
        raise ValueError(f"inputs with {BOUNDED.repr(granularity)}, {BOUNDED.repr(mapping)}")
    half, static = options["reduce_range"], None
    if not isinstance(half, bool):
        raise ValueError(f"reduce_range {BOUNDED.repr(half)}")
    if "act_quant_scale" in pieces:
        static = positive(one_number(pieces["act_quant_scale"], "act_quant_scale"), "act_quant_scale")
    zero = pieces.get("act_quant_zero_point")
    return Affine(
        low=-64 if half else -128,
        high=63 if half else 127,
        whole=granularity == PER_TENSOR,
        symmetric=mapping == "SYMMETRIC",
        smallest=torch.finfo(torch.float32).eps,
        scale=static,
        zero_point=0.0 if zero is None or static is None else one_number(zero, "act_quant_zero_point"),
    )


def intx(fields: Mapping[str, Any], pieces: Mapping[str, Readable], shape: tuple[int, int]) -> Decoded:
    only(fields, ("target_dtype", "block_size", "dtype", "activation_quantization"))
    only(pieces, ("qdata", "scale", "zero_point"))
    widths = {f"int{bits}": torch.int8 for bits in range(1, 9)}
    dtype_of(fields["target_dtype"], widths)
    block, dtype = block_of(fields["block_size"], shape), dtype_of(fields["dtype"])
    blocks = (shape[0] // block[0], shape[1] // block[1])
    codes, scale = expect(pieces, "qdata", shape, (torch.int8,)), expect(pieces, "scale", blocks, FLOATS)
    zero_point = expect(pieces, "zero_point", blocks, (torch.int8, *FLOATS))
    inputs = fields["activation_quantization"]
    if inputs not in (None, "int8_asym_per_token"):
        raise ValueError(f"inputs with {BOUNDED.repr(inputs)}")
    return Decoded(
        format=f"{fields['target_dtype']['_data']} in bytes",
        block=block,
        dtype=dtype,
        read=lambda: affine(codes.read(), zero_point.read(), scale.read(), block, dtype),
        inputs=Affine(symmetric=False, smallest=torch.finfo(torch.float32).tiny) if inputs else None,
    )


def float8(fields: Mapping[str, Any], pieces: Mapping[str, Readable], shape: tuple[int, int]) -> Decoded:
    only(fields, ("block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"))
    only(pieces, ("qdata", "scale"))
    block = block_of(fields["block_size"], shape)
    codes = expect(pieces, "qdata", shape, tuple(FLOATS8.values()))
    scale = expect(pieces, "scale", (shape[0] // block[0], shape[1] // block[1]), FLOATS)
    inputs = float8_inputs(fields.get("act_quant_kwargs"))
    dtype = torch.float32 if inputs is not None else dtype_of(fields["dtype"])
    return Decoded(
        format=str(codes.dtype).removeprefix("torch."),
        block=block,
        dtype=dtype,
        read=lambda: affine(codes.read(), None, scale.read().float(), block, torch.float32).to(dtype),
        inputs=inputs,
        computes=dtype == torch.float32,  # it multiplies no inputs of another dtype
    )


def float8_inputs(value: Any) -> RowFloat8 | None:
    if value is None:
        return None
    options = options_of(
        value,
        "QuantizeTensorToFloat8Kwargs",
        ("float8_dtype", "granularity", "mm_config", "hp_value_lb", "hp_value_ub", "kernel_preference"),
    )
    dtype_of(options["float8_dtype"], {"float8_e4m3fn": torch.float8_e4m3fn})
    bounds = [options.get(name) for name in ("hp_value_lb", "hp_value_ub")]
    if options["granularity"] not in (PER_ROW, PER_TENSOR) or bounds != [None, None]:
        raise ValueError(f"inputs with {BOUNDED.repr(options['granularity'])}, bounds {BOUNDED.repr(bounds)}")
    return RowFloat8(whole=options["granularity"] == PER_TENSOR)


def nvfp4(fields: Mapping[str, Any], pieces: Mapping[str, Readable], shape: tuple[int, int]) -> Decoded:
    only(fields, ("block_size", "orig_dtype", "is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs"))
    only(pieces, ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale"))
    tiled, rows, columns = fields.get("is_swizzled_scales"), shape[0], shape[1] // BLOCK
    if fields["block_size"] != BLOCK or shape[1] % BLOCK or not isinstance(tiled, bool):
        raise ValueError(f"blocks of {BOUNDED.repr(fields['block_size'])}, in tiles: {BOUNDED.repr(tiled)}")
    codes = expect(pieces, "qdata", (rows, shape[1] // 2), (torch.uint8,))
    scale_shape = (up_to(rows, TILE_ROWS) // 4, 4 * up_to(columns, TILE_COLUMNS)) if tiled else (rows, columns)
    scale = expect(pieces, "scale", scale_shape, (torch.float8_e4m3fn,))
    common = expect(pieces, "per_tensor_scale", (), (torch.float32,)) if "per_tensor_scale" in pieces else None
    inputs = nvfp4_inputs(fields.get("act_quant_kwargs"), pieces)
    dtype = torch.float32 if inputs is not None else dtype_of(fields["orig_dtype"])

    def weight() -> Tensor:
        stored = codes.read()
        numbers = e2m1.decode(torch.stack([stored & 0xF, stored >> 4], -1).flatten(1))
        scales = (from_tiles(scale.read(), rows, columns) if tiled else scale.read()).float()
        scales = scales if common is None else common.read() * scales
        return (numbers.unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1).to(dtype)

    return Decoded("nvfp4", (1, BLOCK), dtype, weight, inputs, computes=inputs is None)


def nvfp4_inputs(value: Any, pieces: Mapping[str, Readable]) -> NvidiaBlocks | None:
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
        return NvidiaBlocks("each time")
    static = pieces.get("act_per_tensor_scale")
    return NvidiaBlocks(None if static is None else positive(one_number(static, "act_per_tensor_scale"), "scale"))


DECODERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Readable], tuple[int, int]], Decoded]] = {
    "Int8Tensor": int8,
    "IntxUnpackedToInt8Tensor": intx,
    "Float8Tensor": float8,
    "NVFP4Tensor": nvfp4,
}
