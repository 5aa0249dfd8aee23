"""A folder of diffusers that NVIDIA ModelOpt saved, with its quantizers or with compressed weights.

Both kinds have ``modelopt_state.pth`` beside the weights; ``modelopt_export`` reads exports for servers.

- With quantizers: the unquantized weight and its range ``X.weight_quantizer._amax``; weights are rounded in every
  call. The file is not smaller.
- Compressed (``mtq.compress``): quantized values, with ``X.weight_quantizer._scale``.

A ``pre_quant_scale`` multiplies the input first. Formulas are those of ``modelopt.torch.quantization.tensor_quant``
(0.47) in fp32: ``_tensor_quant`` for integers, ``_fp8_eager`` for E4M3, and ``NVFP4QTensor`` for NVFP4, whose own fake
quantization needs a GPU. A range is ``amax``, the largest magnitude, computed at each call where none is stored.

The first kind is written: ModelOpt's checkpointing for Hugging Face inserts the quantizers of the state and loads their
ranges, fp16, with the weights. A weight is stored dequantized in fp16, and the quantizer rounds it to the same numbers.
No ``quantization_config`` is written: diffusers 0.42 passes ModelOpt 0.47 an empty one, which it cannot read.

Alternative not taken: diffusers' ``from_pretrained``, in which ModelOpt unpickles files of the folder; so there is no
``runtime``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path, refusing
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange import AS_ASSIGNED, DIFFUSERS, ForeignFormat, modelopt_export
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.inputs import LARGEST_FP8, Nvfp4
from sd_quant.interchange.modelopt_export import CODES, MAKER, NVFP4, layouts_of, multiplied, with_codes
from sd_quant.interchange.modelopt_state import Name, State, read_state
from sd_quant.interchange.stored import DTYPES, FILE, FLOAT_SCALES, FP8, Folder, LayerTensors, Shape, holds, told
from sd_quant.interchange.weights import Assignment, codes_and_scales, high_precision, quantized, write_file
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, e2m1, nvfp4
from sd_quant.simulation.modelopt import simulate

FACTS = ForeignFormat(
    "diffusers_modelopt",
    reads="a folder of diffusers with NVIDIA ModelOpt's quantizers, or compressed",
    consumer="diffusers with ModelOpt",
    tried=(*DIFFUSERS, "nvidia-modelopt==0.47.0"),
    formats={"int8": AS_ASSIGNED, "fp8": AS_ASSIGNED},
    loading="import modelopt.torch.opt as mto\nimport torch\nfrom diffusers import DiffusionPipeline\n\n"
    "mto.enable_huggingface_checkpointing()\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.float16)",
    convolutions=frozenset({"int8", "fp8"}),
    multiplied=frozenset({"int8", "fp8"}),
    zero_point=True,
    left_out=(
        "smaller files: weights are fp16; diffusers_torchao and diffusers_sdnq store codes, so does modelopt_export",
    ),
)
STATE = "modelopt_state.pth"
WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
AMAX, PRE, BIAS, SCALE, DOUBLE = "_amax", "_pre_quant_scale", "_bias_value", "_scale", "_double_scale"
BUFFERS = [f"{WEIGHT}.{each}" for each in (AMAX, SCALE, DOUBLE)] + [f"{INPUT}.{each}" for each in (AMAX, PRE, BIAS)]
BLOCK = nvfp4.BLOCK
NVFP4_BLOCKS = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
NVFP4_RANGE = e2m1.LARGEST * LARGEST_FP8  # of all numbers, where its global scale is 1
SMALLEST = 2.0**-24  # of a range that ModelOpt divides by
LARGEST_BLOCK = 2**16
# Properties without an effect here: how ranges were found, how gradients pass, how ONNX is written, shapes that follow
WITHOUT_EFFECT = {
    "_dynamic", "_learn_amax", "_trt_high_precision_dtype", "_effective_bits", "_pass_through_bwd", "_if_calib",
    "_input_dtype", "_enable_pre_quant_scale", "_pytorch_state_metadata", "_amax_for_smoothing", "_quant_max_bound",
    "_amax_shape_for_export", "_slices", "_padding", "_original_shape", "_block_reshape_size", "backend_extra_args",
    "_is_static_block_scale_quantizer", "_bias_axis",
}  # fmt: skip
READ = {
    "_num_bits", "_axis", "_block_sizes", "_narrow_range", "_bias", "_disabled", "_if_quant", "_fake_quant",
    "_dequantize",
}  # fmt: skip


# Quantizers


@dataclass(frozen=True)
class Quantizer:
    """A ModelOpt quantizer: int2 to int8, FP8 or NVFP4, with one range, one per index of ``axes``, or per ``block``."""

    format: str
    axes: tuple[int, ...] = ()
    block: int | None = None
    narrow: bool = False  # without the smallest of an integer's codes
    biased: bool = False

    @property
    def bits(self) -> int:
        return int(self.format.removeprefix("int"))

    def __call__(self, x: Tensor, amax: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Round ``x - bias`` and add ``bias``. A stored ``amax`` broadcasts to ``x``, or has one row for each block."""
        given = x if bias is None else x - bias.to(x)
        if amax is None:
            others = [axis for axis in range(x.ndim) if axis not in {each % x.ndim for each in self.axes}]
            amax = given.abs().amax(others, keepdim=True) if others else given.abs()
        amax = amax.float().to(x.device)
        rounded = FORMULAS.get(self.format, integer)(self, given, amax)
        return rounded if bias is None else rounded + bias.to(x)


def integer(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    if quantizer.block is not None:
        width = x.shape[-1]
        padded = F.pad(x, (0, -width % quantizer.block))
        rounded = whole_integer(quantizer, padded.reshape(-1, quantizer.block), amax)
        return rounded.view(padded.shape)[..., :width]
    return whole_integer(quantizer, x, amax)


def whole_integer(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    high = 2 ** (quantizer.bits - 1) - 1
    low = -high if quantizer.narrow else -high - 1
    none = amax <= SMALLEST
    scale = torch.tensor(float(high), device=x.device) / amax
    codes = (x.float() * scale.masked_fill(none, 0)).round().clamp(low, high)
    return (codes / scale.masked_fill(none, 1)).to(x)


def fp8(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    scale = LARGEST_FP8 / torch.where(amax <= SMALLEST, torch.ones_like(amax), amax)
    codes = (x.float() * scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return (codes.float() * (1 / scale)).to(x)


def in_nvfp4(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    peak = amax.max()
    return Nvfp4(float(torch.where(peak == 0, torch.ones_like(peak), peak / NVFP4_RANGE)))(x)


FORMULAS = {FP8: fp8, NVFP4: in_nvfp4}


@dataclass(frozen=True)
class Ranged:
    """Rounding of a layer's input by ModelOpt's quantizer, with the stored range and shift, if any."""

    quantizer: Quantizer
    amax: Tensor | None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.quantizer(x, self.amax, self.bias)

    def __str__(self) -> str:
        shift = "" if self.bias is None else " and a shift"
        if self.quantizer.format == NVFP4:
            return f"nvfp4, a scale for 16 numbers{shift}"
        return f"{self.quantizer.format}, {'one scale' if self.amax is not None else 'a scale each time'}{shift}"


def quantizer_of(path: Path, name: str, properties: Mapping[str, object]) -> Quantizer | None:
    """Return the quantizer of these ``properties``, None if disabled. Raises ArtifactError for unknown properties."""
    if properties.get("_disabled") is True or properties.get("_if_quant") is False:
        return None
    more = [key for key in properties if key not in WITHOUT_EFFECT | READ and is_set(properties[key])]
    if more:
        raise ArtifactError(
            f"{path}: ModelOpt's {listing([name])} has {listing(more)}, which is not understood; give a checkpoint "
            "without"
        )
    advice = (
        "expected INT2 to INT8, FP8 or NVFP4 with one range, one for a row or one for a block; give such a checkpoint"
    )
    with refusing(f"{path}: ModelOpt's {listing([name])} has other properties", ValueError, TypeError, advice=advice):
        return understood(properties)


def is_set(value: object) -> bool:
    return not (value is None or value is False or value == {} or value == "")


def understood(properties: Mapping[str, object]) -> Quantizer:
    """Build a ``Quantizer`` from ModelOpt's ``properties``. Raises ValueError or TypeError for any others."""
    bits, blocks = properties.get("_num_bits"), properties.get("_block_sizes")
    bias, narrow = properties.get("_bias"), properties.get("_narrow_range", False)
    axis = properties.get("_axis")
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if len(axes) > 4 or not all(type(each) is int and -4 <= each < 4 for each in axes) or not isinstance(narrow, bool):
        raise ValueError("another axis or range of codes")
    if bias is not None and (not isinstance(bias, dict) or bias.get("type") != "static"):
        raise ValueError("a bias that is not static")
    plain = Quantizer("", axes, None, narrow, bias is not None)
    if type(bits) is int and 2 <= bits <= 8:
        return replace(plain, format=f"int{bits}", block=None if blocks is None else static_block(blocks))
    if bits == (4, 3) and blocks is None:
        return replace(plain, format=FP8)
    if bits == (2, 1) and blocks == NVFP4_BLOCKS:
        return replace(plain, format=NVFP4, block=16)
    raise ValueError(f"num_bits {told(bits)} and block_sizes {told(blocks)}")


def static_block(blocks: object) -> int:
    """Return the block size along the last axis. Raises ValueError for dynamic blocks, other axes or sizes."""
    along_last = isinstance(blocks, dict) and blocks.keys() <= {-1, "type"}
    if not isinstance(blocks, dict) or not along_last or blocks.get("type") not in (None, "static"):
        raise ValueError(f"block_sizes {told(blocks)}")
    if type(blocks.get(-1)) is not int or not 2 <= blocks[-1] <= LARGEST_BLOCK:
        raise ValueError("another size of blocks")
    return blocks[-1]


# Reading


def recognizes(path: Path) -> bool:
    """Return whether a denoiser's folder holds ModelOpt's state and is no export for servers."""
    return holds(path, STATE) and not modelopt_export.recognizes(path)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a folder of a pipeline or of the denoiser alone.

    Raises ArtifactError unless it is the whole denoiser, with quantizers of weights and inputs only.
    """
    folder = Folder(path, checkpoint)
    tensors, shapes = folder.tensors, folder.shapes
    state = read_state(path, whole_file(folder.place / STATE))
    leaves = {name for name, module in empty_denoiser(checkpoint).named_modules() if not list(module.children())}
    used = quantizers_of(path, state, shapes, leaves)
    found, others = folder.by_layer(BUFFERS, leaves)
    if without := [name for name, each in used.items() if WEIGHT in each and name not in found]:
        raise ArtifactError(
            f"{path} has no ranges of {listing(without)}, which ModelOpt rounds; fetch the folder again"
        )
    layers, rounded = {}, {}
    for name in dict.fromkeys([*used, *found]):
        stored, roles = found.get(name, LayerTensors(path, name, {})), used.get(name, {})
        if name in shapes and (WEIGHT in roles or name in state.stored):
            layers[name] = with_quantizers(stored, shapes[name], roles, state.stored.get(name))
            continue
        if (inputs := inputs_of(stored, shapes.get(name), roles.get(INPUT))) is not None:
            rounded[name] = inputs
        if "weight" in stored:
            others[f"{name}.weight"] = tensors[f"{name}.weight"]
    return folder.whole(FACTS.name, f"{MAKER} {state.version}", layers, others, rounded=rounded)


def quantizers_of(
    path: Path, state: State, shapes: Mapping[str, Shape], leaves: Collection[str]
) -> dict[str, dict[str, Quantizer]]:
    """Return the enabled quantizers by module name and role, WEIGHT or INPUT.

    Raises ArtifactError unless all are of weights in ``shapes`` or inputs of ``leaves``, modules without children.
    """
    found: dict[str, dict[str, Quantizer]] = {}
    foreign = []
    for name, properties in state.quantizers.items():
        quantizer = quantizer_of(path, name, properties)
        module, _, role = name.rpartition(".")
        if quantizer is None:
            continue
        if (role == WEIGHT and module in shapes) or (role == INPUT and module in leaves):
            found.setdefault(module, {})[role] = quantizer
        else:
            foreign.append(name)
    if foreign:
        raise ArtifactError(
            f"{path}: ModelOpt rounds more than weights and inputs ({len(foreign)}: {listing(foreign)}), such as "
            "outputs or attention; give a checkpoint without"
        )
    return found


def with_quantizers(
    stored: LayerTensors, shape: Shape, used: Mapping[str, Quantizer], compression: object
) -> QuantizedLayer:
    """Return a layer, quantized by ``used`` or compressed (``compression``). Raises ArtifactError for unfit tensors."""
    source = stored.checked("weight", None, (*CODES, *FLOAT_SCALES))
    inputs = inputs_of(stored, shape, used.get(INPUT))
    if compression is not None:
        layouts = layouts_of(f"{WEIGHT}.{SCALE}", f"{WEIGHT}.{DOUBLE}")
        return with_codes(stored, shape, layouts, inputs, dtype_of(stored, compression))
    if f"{WEIGHT}.{SCALE}" in stored:
        raise ArtifactError(
            f"{stored.path}: {STATE} does not say that {listing([stored.layer])} is compressed; fetch the whole folder"
        )
    stored.checked("weight", [shape], FLOAT_SCALES)
    weight, amax = used[WEIGHT], f"{WEIGHT}.{AMAX}"
    fitting, scales = ranges(stored, shape, weight)
    stored.checked(amax, fitting, FLOAT_SCALES)

    def rounded() -> Tensor:
        return weight(stored.finite("weight"), magnitudes(stored, amax))

    return QuantizedLayer(
        weight.format, scales, stored.size("weight"), LazyTensor(shape, source.dtype, rounded), inputs
    )


def ranges(stored: LayerTensors, shape: Shape, quantizer: Quantizer) -> tuple[list[Shape], str]:
    """Return allowed shapes of a weight's ranges, and the numbers per range. Raises ArtifactError if unsupported."""
    told = f"{stored.path}: ModelOpt's weight of {listing([stored.layer])}"
    if quantizer.biased:
        raise ArtifactError(f"{told} is shifted, expected symmetric codes")
    if quantizer.format == NVFP4:
        if shape[-1] % BLOCK:
            raise ArtifactError(
                f"{told} has {shape[-1]} numbers along its last axis, expected blocks of {BLOCK} in NVFP4; give a "
                "checkpoint that keeps it in high precision"
            )
        return [(), (1,)], f"1 for {BLOCK} numbers"
    if quantizer.block is not None:
        rows = prod(shape[:-1]) * -(-shape[-1] // quantizer.block)
        return [(rows, 1)], f"1 for {quantizer.block} numbers"
    if quantizer.axes == (0,):
        return [(shape[0], *(1 for _ in shape[1:]))], "1 for a row"
    if quantizer.axes:
        raise ArtifactError(f"{told} has ranges that differ along {list(quantizer.axes)}, expected along rows")
    return [(), (1,)], "1 for all"


def magnitudes(stored: LayerTensors, end: str) -> Tensor:
    """Read the ranges in the tensor ``end`` as fp32. Raises ArtifactError for NaN, infinity and negative numbers."""
    values = stored.finite(end).float()
    if bool((values < 0).any()):
        raise ArtifactError(
            f"{stored.path}: {stored.name(end)} has numbers below 0, expected magnitudes; fetch the file again"
        )
    return values


def inputs_of(stored: LayerTensors, shape: Shape | None, quantizer: Quantizer | None) -> Inputs | None:
    """Return the rounding and scaling of a module's inputs, or None. Raises ArtifactError for unsupported ranges.

    ``shape`` is the weight's; None: no linear or convolution. Scaling by a pre_quant_scale needs no quantizer.
    """
    rounding: Inputs | None = None
    told = f"{stored.path}: ModelOpt's inputs of {listing([stored.layer])}"
    if quantizer is not None:
        if quantizer.block is not None and quantizer.format != NVFP4:
            raise ArtifactError(f"{told} are integers in blocks, expected no blocks")
        if quantizer.format == NVFP4 and shape is not None and len(shape) != 2:
            raise ArtifactError(f"{told} are a convolution's in NVFP4, expected linears alone")
        amax, bias = f"{INPUT}.{AMAX}", f"{INPUT}.{BIAS}"
        if quantizer.biased != (bias in stored) or (amax in stored and quantizer.axes):
            raise ArtifactError(f"{told} have other ranges than its state says")
        for end in (amax, bias):
            if end in stored:
                stored.number(end)
        largest = magnitudes(stored, amax).reshape(()) if amax in stored else None
        shift = stored.finite(bias).float().reshape(()) if bias in stored else None
        rounding = Ranged(quantizer, largest, shift)
    factor = f"{INPUT}.{PRE}"
    if factor not in stored:
        return rounding
    if shape is None:
        raise ArtifactError(f"{told} are multiplied, expected of linears alone")
    return multiplied(stored, factor, shape, rounding)


def dtype_of(stored: LayerTensors, compression: object) -> torch.dtype:
    """Return the dtype to which a compressed weight is dequantized. Raises ArtifactError if the state lacks it."""
    metadata = compression.get("metadata") if isinstance(compression, dict) else None
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    name = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else ""
    if name not in DTYPES:
        raise ArtifactError(
            f"{stored.path}: {STATE} does not say which dtype {listing([stored.layer])} had; fetch the whole folder"
        )
    return DTYPES[name]


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser into the pipeline ``folder``. Raises ResourceError when the disk is full."""
    import modelopt.torch.opt as mto

    component = denoiser_part(checkpoint).component
    network = simulate(empty_denoiser(checkpoint), assignment)
    tensors: dict[str, Readable] = dict(high_precision(checkpoint, assignment))
    tensors |= {f"{layer.name}.weight": of_codes(checkpoint, layer) for layer in quantized(assignment).values()}
    buffers = {name: buffer for name, buffer in network.state_dict().items() if name not in tensors}
    tensors |= {name: lazy(buffer.half()) for name, buffer in buffers.items()}
    write_file(folder / component / FILE, tensors)
    with atomic_path(folder / component / STATE) as temporary:
        torch.save(mto.modelopt_state(network), temporary)
    return folder


def of_codes(checkpoint: Checkpoint, layer: LayerAssignment) -> LazyTensor:
    """Return a quantized weight dequantized to fp16."""

    def read() -> Tensor:
        codes, *scales = codes_and_scales(checkpoint, layer)
        return FORMATS[layer.format].dequantize(codes, *scales).half().view(layer.weight_shape)

    return LazyTensor(layer.weight_shape, torch.float16, read)
