"""Single safetensors files for ComfyUI: the denoiser or the whole model, with scales or merely cast to eight bits.

A linear's quantization is described by the tensor ``X.comfy_quant``, which is JSON in bytes, or by an entry of the
header's ``_quantization_metadata``. An older file has one tensor ``scaled_fp8`` and other names for its scales. As
ComfyUI's ``ops.py``, ``quant_ops.py`` and ``utils.py`` read them:

| format          | X.weight         | scales                                                   | inputs           |
|-----------------|------------------|----------------------------------------------------------|------------------|
| float8_e4m3fn   | E4M3 [N, K]      | weight_scale, and input_scale or none: one number        | cast, or scaled  |
| float8_e5m2     | E5M2 [N, K]      | the same                                                 | the same         |
| int8_tensorwise | INT8 [N, K]      | weight_scale: one number or [N, 1]                       | INT8, by row     |
| nvfp4           | uint8 [N, K / 2] | weight_scale E4M3 in tiles, weight_scale_2; input_scale  | NVFP4            |
| mxfp8           | E4M3 [N, K]      | weight_scale E8M0 in tiles, as uint8                     | MXFP8            |
| scaled_fp8      | E4M3 [N, K]      | scale_weight, scale_input: one number                    | as float8_e4m3fn |

A byte of NVFP4 has its first number in the high half, where ONNX and ModelOpt have it in the low one, and its sides are
padded to multiples of 16, MXFP8's to 32. With ``full_precision_matrix_mult``, in the older files with a ``scaled_fp8``
of two numbers, inputs stay as they are. With ``convrot`` groups of inputs are rotated by the matrix of
``quantization.rotation``, and the codes are of the rotated weight. A weight in eight bits without a mark is multiplied
as it is stored. Formulas of inputs are those of ``comfy_kitchen/backends/eager/quantization.py``, in fp32.

A denoiser is written with its authors' keys and marks in tensors, which are found with a prefix and without, while the
header's are not: ``fp8`` as float8_e4m3fn with static inputs, ``int8`` with a scale for each row, and ``nvfp4``.
Convolutions are fp16, because ComfyUI has no quantized ones. SDXL is written whole, behind the prefixes of its four
networks. In diffusers' keys ComfyUI opens models too, and loses marks and scales on the way.

The roads not taken: guessing formats from names of scales, because two tools give one name to different things, and
ComfyUI itself reads marks alone; and calling comfy-kitchen, which picks a kernel by the machine.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.checkpoints.nemo_state import to_nemo
from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.files import refusing
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import read_header, without_duplicates, write_safetensors
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor, lazy, size_of
from sd_quant.interchange import AS_ASSIGNED, PER_ROW, STATIC, UNETS, ForeignFormat
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, QuantizedLayer, check_whole, needed
from sd_quant.interchange.inputs import LARGEST_FP8, Multiplied, Nvfp4, Rotated, RowInteger, StaticFloat8, in_blocks
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, LayerTensors, Shape, finite
from sd_quant.interchange.weights import Assignment, JoinedLayers, by_authors_names, codes_and_scales, lazy_piece
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.names.authors import (
    OTHER_NETWORKS,
    PREFIX,
    Rows,
    denoiser_tensors,
    joined,
    places_in,
    rows_of,
    told_family,
)
from sd_quant.names.nemo import PREFIX as NETWORKS
from sd_quant.names.sgm import sgm_key
from sd_quant.numbers import up_to
from sd_quant.progress import progress
from sd_quant.quantization.formats import FORMATS, e2m1, nvfp4
from sd_quant.quantization.formats.blocks import TILE_COLUMNS, TILE_ROWS, from_tiles, in_tiles
from sd_quant.quantization.rotation import rotated

FACTS = ForeignFormat(
    "comfyui",
    reads="a safetensors file for ComfyUI, with its marks or merely cast",
    consumer="ComfyUI",
    tried=("comfy-kitchen==0.2.40",),  # whose kernels and layouts ComfyUI calls
    formats={"fp8": STATIC, "int8": PER_ROW, "nvfp4": AS_ASSIGNED},
    loading={
        "sdxl": (
            "Copy `sdxl.safetensors` to `ComfyUI/models/checkpoints`.",
            "Open it with the node Load Checkpoint.",
        ),
        **{
            family: (
                f"Copy `{part}.safetensors` to `ComfyUI/models/diffusion_models`.",
                "Open it with the node Load Diffusion Model.",
                f"Text encoders and VAE are not in it: open the model's own with {text} and Load VAE.",
                *more,
            )
            for family, part, text, *more in (
                ("sd15", "unet", "Load CLIP, type stable_diffusion,"),
                (
                    "sd21",
                    "unet",
                    "Load CLIP, type stable_diffusion,",
                    "Where images are noise, add the node ModelSamplingDiscrete with v_prediction: ComfyUI guesses "
                    "what the model predicts by the spread of a norm's bias, which smoothing=folded changes.",
                ),
                ("sd3", "transformer", "TripleCLIPLoader, or DualCLIPLoader, type sd3, where it has no T5,"),
                ("flux", "transformer", "DualCLIPLoader, type flux,"),
                ("pixart", "transformer", "Load CLIP, type pixart,"),
            )
        },
    },
    multiplied=frozenset({"nvfp4"}),
    rotated=frozenset({"int8"}),
    per_channel={"fp8": False},
    excluded={  # by the shape of their weight ComfyUI tells models and their sizes apart
        "nvfp4": (
            "*.attentions.*.attn2.to_k",
            "*.attentions.*.attn2.to_v",
            "add_embedding.linear_1",
            "time_text_embed.text_embedder.linear_1",
            "context_embedder",
            "x_embedder",
            "caption_projection.linear_1",
            "proj_out",
        ),
    },
    fused=True,
    families=UNETS | {"sd3", "flux", "pixart"},
    others=None,
)
MARK, METADATA, OLD_MARK = "comfy_quant", "_quantization_metadata", "scaled_fp8"
OLD_NAMES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
MAX_MARK = 4096  # bytes
HARMLESS = {"format", "full_precision_matrix_mult", "orig_dtype", "orig_shape"}  # entries of a mark
FLOAT8 = {torch.float8_e4m3fn: FP8, torch.float8_e5m2: "float8_e5m2"}
LARGEST_GROUP = 1024  # that is rotated; ComfyUI's is 256
FOREIGN = ".qweight"  # the end of a name that others give to codes in their own order
INT8 = RowInteger(smallest=1e-30)  # quantize_int8_rowwise
NVFP4_BLOCK, MXFP8_BLOCK = nvfp4.BLOCK, 32
NVFP4_MULTIPLE = 16  # of a packed weight's sides
E8M0_BIAS, LARGEST_E8M0 = 127, 254
MANTISSA = 23  # bits of fp32's
WHOLE = "sdxl.safetensors"
NAMES = {"fp8": FP8, "int8": "int8_tensorwise", "nvfp4": "nvfp4"}  # in ComfyUI's QUANT_ALGOS

Marks = Mapping[str, Mapping[str, Any]]  # by layer, in the file's names without the prefix


# Formats


@dataclass(frozen=True)
class Codes:
    """A ``Readable`` of rows of a weight [N, K] that a mark says is quantized; fp32."""

    stored: LayerTensors
    mark: Mapping[str, Any]
    shape: tuple[int, ...]
    rows: Rows
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def method(self) -> "Method":
        return METHODS[self.mark["format"]]

    def read(self) -> Tensor:
        """Raises ArtifactError when a number is NaN or infinite."""
        return finite(self.method.decode(self), self.stored.path, self.stored.layer)

    def codes(self) -> Tensor:
        """These rows as they are stored."""
        weight = self.stored.tensors["weight"]
        return rows_of(weight, replace(self.rows, of=weight.shape[0])).read()

    def scale(self, name: str = "weight_scale") -> Tensor:
        """The scale of these rows, fp32: [] or [rows, 1]."""
        scale = self.stored.tensors[name].read().float().flatten()
        return scale.reshape(()) if len(scale) == 1 else scale[self.rows.start : self.rows.stop, None]

    def number(self, name: str) -> float | None:
        """The one number of a tensor; None where there is no such tensor. Raises ArtifactError if it is no scale."""
        if name not in self.stored:
            return None
        number = self.stored.tensors[name].read().float().item()
        if not (number > 0 and math.isfinite(number) and 1 / number < torch.finfo(torch.float32).max):
            raise ArtifactError(
                f"{self.stored.path}: {name} of {self.stored.layer[:200]!r} is {number:g}; expected a finite number "
                "above 0, so fetch the file again"
            )
        return number

    def scaled(self, numbers: Tensor, block: int, values: Callable[[Tensor], Tensor]) -> Tensor:
        """``numbers`` [rows, padded K] times the scales of their blocks, the ``values`` of the codes in tiles."""
        stored = self.stored.tensors["weight_scale"].read().view(torch.uint8)
        scales = from_tiles(stored, self.rows.of, up_to(self.shape[1], block) // block)
        scales = values(scales[self.rows.start : self.rows.stop])
        return (numbers.unflatten(1, (-1, block)) * scales[..., None]).flatten(1)[:, : self.shape[1]]


@dataclass(frozen=True)
class Method:
    """A format of ComfyUI's: its tensors, and what they stand for."""

    dtype: torch.dtype  # of the weight as it is stored
    scales: str  # see ``QuantizedLayer``
    decode: Callable[[Codes], Tensor]
    inputs: Callable[[Codes], Inputs]
    # of its tensors by the ends of their names: shapes for a weight [N, K], and dtypes that are not floating point
    shapes: Callable[[int, int], Mapping[str, tuple[Shape, ...]]]
    needs: tuple[str, ...] = ("weight_scale",)
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    multiple: int = 1  # of which the sides of a stored weight are
    entries: frozenset[str] = frozenset()  # of a mark


NUMBER = ((), (1,), (1, 1))


def decode_scaled(stored: Codes) -> Tensor:
    numbers = stored.codes().float() * stored.scale()
    return rotated(numbers, rotation(stored))


def decode_nvfp4(stored: Codes) -> Tensor:
    packed = stored.codes()
    numbers = e2m1.decode(torch.stack([packed >> 4, packed & 15], dim=-1)).flatten(1)
    common = stored.scale("weight_scale_2")
    return stored.scaled(numbers, NVFP4_BLOCK, lambda codes: common * codes.view(torch.float8_e4m3fn).float())


def decode_mxfp8(stored: Codes) -> Tensor:
    return stored.scaled(stored.codes().float(), MXFP8_BLOCK, powers_of_two)


def powers_of_two(exponents: Tensor) -> Tensor:
    """The numbers of E8M0's codes, fp32; 0 for code 0, as comfy-kitchen has it."""
    return (exponents.to(torch.int32) << MANTISSA).view(torch.float32)


def rotation(stored: Codes) -> int:
    """How many inputs are rotated together, 0 for none. Raises ArtifactError for a number that cannot be."""
    inner = stored.mark.get("params", {})
    mark = {**(inner if isinstance(inner, Mapping) else {}), **stored.mark}
    if not mark.get("convrot", False):
        return 0
    group = mark.get("convrot_groupsize", 256)
    powers = [4**power for power in range(1, LARGEST_GROUP.bit_length() // 2 + 1)]
    if type(group) is not int or group not in powers or stored.shape[1] % group:
        raise ArtifactError(
            f"{stored.stored.path}: {stored.stored.layer[:200]!r} has convrot_groupsize {ascii(group)[:100]}; expected "
            f"a power of 4 up to {LARGEST_GROUP} that divides its {stored.shape[1]} inputs, so quantize it again"
        )
    return group


def int8_inputs(stored: Codes) -> Inputs:
    group = rotation(stored)
    return Rotated(INT8, group) if group else INT8


def nvfp4_inputs(stored: Codes) -> Inputs:
    static = stored.number("input_scale")
    return Nvfp4(static, smallest=0.0, also=" and one each time" if static is None else "")


@dataclass(frozen=True)
class Mxfp8:
    """Inputs in E4M3, in blocks of 32 with scales that are powers of two: ``quantize_mxfp8``."""

    def __call__(self, x: Tensor) -> Tensor:
        blocks = in_blocks(x, MXFP8_BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        wanted = (largest / LARGEST_FP8).clamp(min=2.0**-E8M0_BIAS)
        exponents = (wanted.log2().ceil().to(torch.int32) + E8M0_BIAS).clamp(0, LARGEST_E8M0)
        scales = powers_of_two(exponents)
        codes = torch.where(scales > 0, blocks / scales, 0.0).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return (codes.float() * scales).flatten(-2)[..., : x.shape[-1]].to(x)

    def __str__(self) -> str:
        return "mxfp8, a scale for 32 numbers"


def float8(dtype: torch.dtype) -> Method:
    return Method(
        dtype, "1 for all", decode_scaled,
        lambda stored: StaticFloat8(stored.number("input_scale") or 1.0, dtype, reciprocal=True),
        lambda rows, columns: {"weight_scale": NUMBER, "input_scale": NUMBER},
    )  # fmt: skip


def tiles(rows: int, columns: int, multiple: int, block: int) -> tuple[Shape]:
    """The shape of the scales of a weight [rows, columns] whose sides are padded to a ``multiple``."""
    blocks = up_to(columns, multiple) // block
    return ((up_to(up_to(rows, multiple), TILE_ROWS), up_to(blocks, TILE_COLUMNS)),)


METHODS = {
    **{name: float8(dtype) for dtype, name in FLOAT8.items()},
    "int8_tensorwise": Method(
        torch.int8, "1 for a row", decode_scaled, int8_inputs,
        lambda rows, columns: {"weight_scale": (*NUMBER, (rows, 1), (rows,))},
        entries=frozenset({"convrot", "convrot_groupsize", "params"}),
    ),
    "nvfp4": Method(
        torch.uint8, "1 for 16 numbers", decode_nvfp4, nvfp4_inputs,
        lambda rows, columns: {
            "weight_scale": tiles(rows, columns, NVFP4_MULTIPLE, NVFP4_BLOCK), "weight_scale_2": NUMBER,
            "input_scale": NUMBER, "pre_quant_scale": ((columns,),),
        },
        needs=("weight_scale", "weight_scale_2"), dtypes={"weight_scale": (torch.float8_e4m3fn, torch.uint8)},
        multiple=NVFP4_MULTIPLE,
    ),
    "mxfp8": Method(
        torch.float8_e4m3fn, "1 for 32 numbers", decode_mxfp8, lambda stored: Mxfp8(),
        lambda rows, columns: {"weight_scale": tiles(rows, columns, MXFP8_BLOCK, MXFP8_BLOCK), "input_scale": NUMBER},
        dtypes={"weight_scale": (torch.uint8, torch.float8_e8m0fnu)}, multiple=MXFP8_BLOCK,
    ),
}  # fmt: skip


# Reading


def recognizes(path: Path) -> bool:
    """Whether ``path`` is a safetensors file with a denoiser's tensors, or with ComfyUI's marks."""
    try:
        tensors, metadata = read_header(whole_file(path))
    except (SdQuantError, OSError, ValueError):
        return False
    if any(name.endswith(FOREIGN) for name in tensors):
        return False
    marked = METADATA in metadata or any(name.endswith((f".{MARK}", OLD_MARK)) for name in tensors)
    return marked or told_family(denoiser_tensors(tensors)[0]) is not None


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Locates the denoiser of ``checkpoint`` in a safetensors file for ComfyUI; no weight is read.

    Raises ConfigError when ``path`` does not exist, ArtifactError when it is damaged, marks a layer in two ways or in
    one that is not known here, or holds any other denoiser.
    """
    tensors, metadata = read_header(whole_file(path))
    names, unknown = denoiser_tensors(tensors)
    found = {name: tensors[full] for name, full in names.items()}
    marks, old = marks_in(path, found, metadata, whole=any(full != name for name, full in names.items()))
    weights, used = marked_tensors(path, found, marks, old)
    rest = {name: each for name, each in found.items() if name not in used}
    network = empty_denoiser(checkpoint)
    modules = dict(network.named_modules())
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    places, others = places_in(
        path, network, shapes,
        {name: unpacked(rest[name], marks.get(name.removesuffix(".weight"))) for name in rest},
        {f"{layer}.weight": METHODS[mark["format"]].multiple for layer, mark in marks.items()},
    )  # fmt: skip
    layers: dict[str, QuantizedLayer] = {}
    parameters: dict[str, Readable] = {}
    for name, parts in places.items():
        first = parts[0]
        linear = modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if (layer := first.name.removesuffix(".weight")) in marks and first.name.endswith(".weight"):
            if not isinstance(linear, nn.Linear):
                raise ArtifactError(
                    f"{path} marks {layer[:200]!r} as quantized, which is no linear; ComfyUI quantizes linears only, "
                    "so give a file that it opens"
                )
            codes = Codes(weights[layer], marks[layer], (first.of, *shapes[name][1:]), first)
            check_codes(codes)
            layers[name.removesuffix(".weight")] = quantized_layer(codes, parts)
            continue
        stored = joined([rows_of(rest[rows.name], rows) for rows in parts])
        if stored.dtype not in FLOAT8:
            parameters[name] = stored
        elif isinstance(linear, nn.Linear | nn.Conv2d):
            weight = cast(stored, path, first.name)
            layers[name.removesuffix(".weight")] = QuantizedLayer(
                FLOAT8[stored.dtype], "none", size_of([stored]), weight
            )
        else:
            parameters[name] = cast(stored, path, first.name)
    unplaced = [f"{layer}.weight, marked" for layer in marks if f"{layer}.weight" not in rest]
    denoiser = QuantizedDenoiser(path, FACTS.name, "ComfyUI", layers, parameters, size_of(found.values()))
    check_whole(denoiser, checkpoint, [*unknown, *unplaced, *others])
    return denoiser


def quantized_layer(codes: Codes, parts: tuple[Rows, ...]) -> QuantizedLayer:
    """The layer of the rows ``parts`` of a marked weight; bytes of shared scales are prorated by rows."""
    count = sum(rows.stop - rows.start for rows in parts)
    of_weight = [codes.stored.tensors[name] for name in ("weight", *codes.method.needs)]
    inputs = None if codes.mark.get("full_precision_matrix_mult", False) else codes.method.inputs(codes)
    if "pre_quant_scale" in codes.stored:
        inputs = Multiplied(codes.stored.finite("pre_quant_scale").float(), False, inputs)
    scales = codes.method.scales
    if scales == "1 for a row" and prod(codes.stored.tensors["weight_scale"].shape) == 1:
        scales = "1 for all"
    rows = [replace(codes, shape=(each.stop - each.start, *codes.shape[1:]), rows=each) for each in parts]
    size = size_of(of_weight) * count // codes.rows.of
    return QuantizedLayer(codes.mark["format"], scales, size, joined(rows), inputs)


def unpacked(tensor: StoredTensor, mark: Mapping[str, Any] | None) -> Shape:
    """The shape of a tensor; where two numbers share a byte, that of the numbers."""
    if mark is not None and METHODS[mark["format"]].dtype == torch.uint8 and tensor.shape:
        return (*tensor.shape[:-1], 2 * tensor.shape[-1])
    return tensor.shape


def cast(stored: Readable, path: Path, name: str) -> LazyTensor:
    """A tensor that is stored in eight bits, in fp32."""
    return LazyTensor(tuple(stored.shape), torch.float32, lambda: finite(stored.read().float(), path, name))


def marks_in(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any], whole: bool
) -> tuple[Marks, bool]:
    """The mark of each quantized layer of the denoiser, and whether it is marked in the older way.

    ``tensors`` have names without the prefix; ``whole`` says that names in the metadata have it. Raises ArtifactError
    for marks of two kinds that do not say the same, and for a format that is not known here.
    """
    suffix = f".{MARK}"
    single = {name.removesuffix(suffix): read_mark(path, name, each) for name, each in tensors.items()
              if name.endswith(suffix)}  # fmt: skip
    listed = marks_in_metadata(path, metadata, whole) if METADATA in metadata else {}
    if OLD_MARK in tensors and (single or METADATA in metadata):
        raise ArtifactError(
            f"{path} has marks of two kinds, {OLD_MARK} and {MARK if single else METADATA}, and so two meanings; "
            "expected one of them, so quantize the model again"
        )
    if twice := [layer for layer in single if layer in listed and single[layer] != listed[layer]]:
        raise ArtifactError(
            f"{path} marks {len(twice)} layers in two ways ({listing(twice, 5)}), and so has two meanings; quantize "
            "the model again"
        )
    marks = {**single, **listed}
    if old := OLD_MARK in tensors:
        high = prod(tensors[OLD_MARK].shape) == 2
        ends = ".scale_weight"
        marks = {
            name.removesuffix(ends): {"format": FP8, "full_precision_matrix_mult": high}
            for name in tensors
            if name.endswith(ends)
        }
    strange = [f"{layer} {ascii(mark.get('format'))[:100]}" for layer, mark in marks.items()
               if not isinstance(mark.get("format"), str) or mark["format"] not in METHODS]  # fmt: skip
    if strange:
        raise ArtifactError(
            f"{path} has {len(strange)} layers in formats that are not read here ({listing(strange, 3)}); expected "
            f"{', '.join(METHODS)}, so choose such a file"
        )
    for layer, mark in marks.items():
        known = HARMLESS | METHODS[mark["format"]].entries
        if extra := [key for key in mark if key not in known]:
            raise ArtifactError(
                f"{path}: the mark of {layer[:200]!r} has entries that are not known here ({listing(extra, 3)}); "
                f"expected {', '.join(sorted(known))}, so give a file that ComfyUI itself has written"
            )
    return marks, old


def read_mark(path: Path, name: str, tensor: StoredTensor) -> Mapping[str, Any]:
    """The JSON in a tensor ``comfy_quant``. Raises ArtifactError when it is none."""
    if tensor.dtype != torch.uint8 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_MARK:
        raise ArtifactError(
            f"{path}: {name[:200]!r} is {tensor.dtype} {list(tensor.shape)}; expected JSON in at most {MAX_MARK} "
            "bytes, so fetch the file again"
        )
    return as_object(path, name, bytes(tensor.read().tolist()))


def marks_in_metadata(path: Path, metadata: Mapping[str, Any], whole: bool) -> Marks:
    """The denoiser's marks in the header; those of other networks are left out."""
    layers = as_object(path, METADATA, metadata[METADATA]).get("layers")
    if not isinstance(layers, Mapping) or not all(isinstance(mark, Mapping) for mark in layers.values()):
        raise ArtifactError(f"{path}: {METADATA} lists no layers with their marks; fetch the file again")
    if not whole:
        return layers
    if bare := [name for name in layers if not name.startswith((PREFIX, *OTHER_NETWORKS))]:
        raise ArtifactError(
            f"{path}: {METADATA} has {len(bare)} layers without the prefix {PREFIX} of their tensors "
            f"({listing(bare, 5)}), which ComfyUI does not find; quantize the model again"
        )
    return {name.removeprefix(PREFIX): mark for name, mark in layers.items() if name.startswith(PREFIX)}


def as_object(path: Path, name: str, text: Any) -> Mapping[str, Any]:
    with refusing(f"{path}: {name[:200]!r} is not JSON", ValueError, TypeError, RecursionError):
        found = json.loads(text, object_pairs_hook=without_duplicates)
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{path}: {name[:200]!r} is no object of JSON; fetch the file again")
    return found


def marked_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], marks: Marks, old: bool
) -> tuple[dict[str, LayerTensors], set[str]]:
    """The tensors of each marked layer's weight by the ends of their names, and the names of those and of marks."""
    new_names = OLD_NAMES if old else {}
    found: dict[str, dict[str, StoredTensor]] = {layer: {} for layer in marks}
    used = {OLD_MARK} if old else set()
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        if layer not in marks:
            continue
        known = METHODS[marks[layer]["format"]].shapes(0, 0)
        if end == MARK:
            used.add(name)
        elif end == "weight":
            found[layer][end] = tensor
        elif (new := new_names.get(end, end)) in known and (not old or end in new_names):
            found[layer][new] = tensor
            used.add(name)
    return {layer: LayerTensors(path, layer, own) for layer, own in found.items()}, used


def check_codes(codes: Codes) -> None:
    """Raises ArtifactError when a tensor of a marked weight is missing, or of a shape or dtype that does not fit."""
    stored, method = codes.stored, codes.method
    shapes = {"weight": [tuple(stored.tensors["weight"].shape)], **method.shapes(*codes.shape)}
    dtypes = {"weight": (method.dtype,), **method.dtypes}
    for end in dict.fromkeys((*method.needs, *stored.tensors)):
        stored.checked(end, shapes[end], dtypes.get(end, FLOAT_SCALES))
    high = codes.mark.get("full_precision_matrix_mult", False)
    if type(high) is not bool:
        raise ArtifactError(
            f"{stored.path}: {stored.layer[:200]!r} has full_precision_matrix_mult {ascii(high)[:100]}; expected true "
            "or false"
        )
    rotation(codes)


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Writes the denoiser, and of SDXL the other networks too, into a file in ``folder``, whose path it returns.

    One tensor of the file is in memory at a time. Raises ResourceError when the disk is full.
    """
    plain, joined = by_authors_names(checkpoint, assignment)
    state: dict[str, Readable] = dict(plain)
    for stored, layers in joined.items():
        state |= {f"{stored.removesuffix('weight')}{end}": each for end, each in tensors_of(checkpoint, layers)}
    denoiser = denoiser_part(checkpoint).component
    name = f"{denoiser}.safetensors"
    if NETWORKS.keys() <= checkpoint.components.keys():  # SDXL's
        name = WHOLE
        state = {PREFIX + key: each for key, each in state.items()}
        for component in (each for each in NETWORKS if each != denoiser):
            others = to_nemo(component, checkpoint.components[component].parameters)
            state |= {sgm_key(key): in_fp16(each) for key, each in others.items()}
    with progress(len(state), f"write {name}") as advance:
        write_safetensors(folder / name, state, advance)
    return folder / name


def in_fp16(parameter: Readable) -> LazyTensor:
    return LazyTensor(tuple(parameter.shape), torch.float16, lambda: parameter.read().half())


def tensors_of(checkpoint: Checkpoint, layers: JoinedLayers) -> Iterator[tuple[str, Readable]]:
    """The tensors of a quantized linear in place of its weight, by the ends of their names."""
    layer, shape = layers.first, layers.shape
    method, block = METHODS[NAMES[layer.format]], FORMATS[layer.format].block

    def rows(
        index: int, shape: tuple[int, ...], dtype: torch.dtype, stored: Callable[[Tensor], Tensor] = lambda rows: rows
    ) -> LazyTensor:
        return LazyTensor(
            shape, dtype, lambda: stored(layers.rows(lambda each: codes_and_scales(checkpoint, each)[index])).to(dtype)
        )

    turned = {"convrot": True, "convrot_groupsize": layer.rotation} if layer.rotation else {}
    mark = json.dumps({"format": NAMES[layer.format]} | turned).encode()
    yield MARK, lazy(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
    if block is None:
        yield "weight", rows(0, shape, method.dtype)
        per_output = layers.rows(lambda each: each.weight_scale.float().expand(each.weight_shape[0]))[:, None]
        yield (
            "weight_scale",
            lazy(layer.weight_scale.float()[0] if layer.activation_format else per_output.contiguous()),
        )
    else:
        high, wide = (up_to(side, NVFP4_MULTIPLE) for side in shape)
        (tiled,) = tiles(*shape, NVFP4_MULTIPLE, block)
        yield "weight", rows(0, (high, wide // 2), torch.uint8, packed)
        yield "weight_scale", rows(1, tiled, torch.float8_e4m3fn, in_tiles_of_e4m3)
        yield "weight_scale_2", lazy_piece(checkpoint, layer, 2, (), torch.float32)
    if layer.activation_format is not None:  # one static scale, or the common one of its blocks
        yield "input_scale", lazy(layer.activation_scales(torch.zeros(1, block or 1))[-1].reshape(()).float())
    if layer.multiplies:
        yield "pre_quant_scale", lazy(layer.pre_quant_scale.half())


def in_tiles_of_e4m3(scales: Tensor) -> Tensor:
    return in_tiles(scales.to(torch.float8_e4m3fn))


def packed(codes: Tensor) -> Tensor:
    """Codes of four bits, the first in the high half of a byte, padded to multiples of 16."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % NVFP4_MULTIPLE, 0, -rows % NVFP4_MULTIPLE))
    return padded[:, ::2] << 4 | padded[:, 1::2]
