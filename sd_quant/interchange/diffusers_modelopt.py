"""A folder of diffusers that NVIDIA ModelOpt saved: with its quantizers, with compressed weights, or exported.

- With quantizers (``modelopt_state.pth`` beside the weights): a weight is stored as it was, a quantizer's range as
  ``X.weight_quantizer._amax``, and ModelOpt rounds in every call. The file is not smaller for it.
- Compressed (``mtq.compress``): the weight is codes, with ``X.weight_quantizer._scale`` beside them.
- Exported (``export_hf_checkpoint``; ``quant_method`` modelopt in the config): codes with ``X.weight_scale`` and
  ``X.input_scale``, and for NVFP4 ``X.weight_scale_2``. Linears alone are codes there.

A ``pre_quant_scale`` multiplies the input first. Two codes of NVFP4 lie in a byte, the first in the low half.
The road not taken is diffusers' ``from_pretrained``: ModelOpt unpickles what lies in the folder, so a candidate has no
``runtime``.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, StoredTensor
from sd_quant.interchange import AS_ASSIGNED, DIFFUSERS, ForeignFormat
from sd_quant.interchange.candidate import Candidate, Inputs, StoredLayer, size_in_file
from sd_quant.interchange.folders import denoiser_folder, holds, quantized_by, stored_tensors
from sd_quant.interchange.inputs import BlocksNvfp4, Multiplied, StaticFloat8
from sd_quant.interchange.layer_tensors import (
    FLOAT_SCALES,
    Fields,
    Shape,
    by_layer,
    check,
    field,
    finite,
    one_number,
    weight_shapes,
    whole,
)
from sd_quant.interchange.modelopt_quantizers import FP8, NVFP4, Quantizer, Ranged, quantizer_of
from sd_quant.interchange.modelopt_state import Name, State, read_state
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.quantization.formats import e2m1
from sd_quant.quantization.formats.blocks import spread

FACTS = ForeignFormat(
    "diffusers_modelopt",
    reads="a folder of diffusers with NVIDIA ModelOpt's quantizers, compressed or exported",
    consumer="diffusers with ModelOpt",
    tried=(*DIFFUSERS, "nvidia-modelopt==0.47.0"),
    formats={"int8": AS_ASSIGNED, "fp8": AS_ASSIGNED},
    loading="import modelopt.torch.opt as mto\nimport torch\nfrom diffusers import DiffusionPipeline\n\n"
    "mto.enable_huggingface_checkpointing()\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.float16)",
    convolutions=frozenset({"int8", "fp8"}),
    multiplied=frozenset({"int8", "fp8"}),
    zero_point=True,
    half=True,
)
NAME, MAKER = "diffusers_modelopt", "ModelOpt"
STATE = "modelopt_state.pth"
WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
AMAX, PRE, BIAS, SCALE, DOUBLE = "_amax", "_pre_quant_scale", "_bias_value", "_scale", "_double_scale"
BUFFERS = [f"{WEIGHT}.{each}" for each in (AMAX, SCALE, DOUBLE)] + [f"{INPUT}.{each}" for each in (AMAX, PRE, BIAS)]
EXPORTED = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
CODES = {torch.float8_e4m3fn: FP8, torch.int8: "int8", torch.uint8: NVFP4}
DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
BLOCK = 16  # of NVFP4


def recognizes(path: Path) -> bool:
    """Whether a denoiser's folder holds ModelOpt's state, or its config says that ModelOpt quantized it."""
    return quantized_by(path, "modelopt") or holds(path, STATE)


def read(path: Path, checkpoint: Checkpoint) -> Candidate:
    """The denoiser in a folder, a pipeline's or its own. What multiplies or rounds inputs is read, no weight.

    Raises ArtifactError for anything that is not the whole denoiser as ModelOpt stores it, and for what is rounded in
    it beside weights and inputs.
    """
    if not recognizes(path):
        raise ArtifactError(f"{path} holds no {STATE} and no config of ModelOpt; expected a folder that it saved")
    tensors, shapes = stored_tensors(path), weight_shapes(checkpoint)
    found, others = by_layer(tensors, shapes, EXPORTED)
    if found:
        layers = {name: exported(path, name, fields, shapes[name]) for name, fields in found.items()}
        return whole(path, NAME, MAKER, checkpoint, layers, tensors, others)
    if not holds(path, STATE):
        raise ArtifactError(f"{path} holds neither {STATE} nor scales of weights; fetch the whole folder")
    state = read_state(path, whole_file(denoiser_folder(path) / STATE))
    leaves = {name for name, module in empty_denoiser(checkpoint).named_modules() if not list(module.children())}
    used = quantizers_of(path, state, shapes, leaves)
    found, others = by_layer(tensors, leaves, BUFFERS)
    if without := [name for name, each in used.items() if WEIGHT in each and name not in found]:
        raise ArtifactError(
            f"{path} has no ranges of {listing(without)}, which ModelOpt rounds; fetch the folder again"
        )
    layers, rounded = {}, {}
    for name in dict.fromkeys([*used, *found]):
        fields, roles = found.get(name, {}), used.get(name, {})
        if name in shapes and (WEIGHT in roles or name in state.stored):
            layers[name] = with_quantizers(path, name, fields, shapes[name], roles, state.stored.get(name))
            continue
        if (inputs := inputs_of(path, name, fields, shapes.get(name), roles.get(INPUT))) is not None:
            rounded[name] = inputs
        if "weight" in fields:
            others[f"{name}.weight"] = fields["weight"]
    candidate = whole(path, NAME, f"{MAKER} {state.version}", checkpoint, layers, tensors, others)
    return replace(candidate, rounded=rounded)


def quantizers_of(
    path: Path, state: State, shapes: Mapping[str, Shape], leaves: Collection[str]
) -> dict[str, dict[str, Quantizer]]:
    """The quantizers that are on, by module and then WEIGHT or INPUT.

    Raises ArtifactError for others than those of the weights of layers and of inputs of ``leaves``.
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
    path: Path, name: str, fields: Fields, shape: Shape, used: Mapping[str, Quantizer], stored: object
) -> StoredLayer:
    """A layer with a quantizer of its weight, or with codes. Raises ArtifactError for what does not fit."""
    source = field(path, name, fields, "weight")
    inputs = inputs_of(path, name, fields, shape, used.get(INPUT))
    size = size_in_file(tensor for end, tensor in fields.items() if end == "weight" or end.startswith(WEIGHT))
    if stored is not None:
        codes, scales, read = compressed(path, name, fields, shape, dtype_of(path, name, stored))
        return StoredLayer(codes, scales, size, read, inputs)
    if f"{WEIGHT}.{SCALE}" in fields:
        raise ArtifactError(
            f"{path}: {STATE} does not say that {listing([name])} is compressed; fetch the whole folder"
        )
    check(path, f"{name}.weight", source, [shape], FLOAT_SCALES)
    weight = used[WEIGHT]
    amax = field(path, name, fields, f"{WEIGHT}.{AMAX}")
    fitting, scales = ranges(path, name, shape, weight)
    check(path, f"{name}.{WEIGHT}.{AMAX}", amax, fitting, FLOAT_SCALES)

    def rounded() -> Tensor:
        return weight(source.read(), magnitudes(path, f"{name}.{WEIGHT}.{AMAX}", amax))

    return StoredLayer(weight.format, scales, size, LazyTensor(shape, source.dtype, rounded), inputs)


def ranges(path: Path, name: str, shape: Shape, quantizer: Quantizer) -> tuple[list[Shape], str]:
    """The shapes that a weight's ranges may have, and how many numbers share one. Raises ArtifactError."""
    if quantizer.biased:
        raise ArtifactError(f"{path}: ModelOpt shifts the weight of {listing([name])}, expected symmetric codes")
    if quantizer.format == NVFP4:
        if shape[-1] % BLOCK:
            raise ArtifactError(
                f"{path}: {listing([name])} has {shape[-1]} numbers along its last axis, expected blocks of {BLOCK} in "
                "NVFP4; give a checkpoint that keeps it in high precision"
            )
        return [(), (1,)], f"1 for {BLOCK} numbers"
    if quantizer.block is not None:
        rows = prod(shape[:-1]) * -(-shape[-1] // quantizer.block)
        return [(rows, 1)], f"1 for {quantizer.block} numbers"
    if quantizer.axes == (0,):
        return [(shape[0], *(1 for _ in shape[1:]))], "1 for a row"
    if quantizer.axes:
        raise ArtifactError(
            f"{path}: ModelOpt's ranges of {listing([name])} differ along {list(quantizer.axes)}, expected along rows"
        )
    return [(), (1,)], "1 for all"


def magnitudes(path: Path, name: str, tensor: StoredTensor) -> Tensor:
    """Ranges, fp32. Raises ArtifactError for NaN, infinities and numbers below zero."""
    values = finite(path, name, tensor).float()
    if bool((values < 0).any()):
        raise ArtifactError(f"{path}: {listing([name])} has numbers below 0, expected magnitudes; fetch the file again")
    return values


def inputs_of(path: Path, name: str, fields: Fields, shape: Shape | None, quantizer: Quantizer | None) -> Inputs | None:
    """What ModelOpt makes of a module's inputs, of which PRE alone also where the quantizer is off.

    ``shape`` is that of its weight, None for what is no linear or convolution. Raises ArtifactError.
    """
    rounding: Inputs | None = None
    if quantizer is not None:
        if quantizer.block is not None and quantizer.format != NVFP4:
            raise ArtifactError(
                f"{path}: ModelOpt rounds inputs of {listing([name])} to integers in blocks, expected no blocks"
            )
        if quantizer.format == NVFP4 and shape is not None and len(shape) != 2:
            raise ArtifactError(
                f"{path}: {listing([name])} is a convolution with inputs in NVFP4, expected linears alone"
            )
        amax, bias = fields.get(f"{INPUT}.{AMAX}"), fields.get(f"{INPUT}.{BIAS}")
        if quantizer.biased != (bias is not None) or (amax is not None and quantizer.axes):
            raise ArtifactError(f"{path}: the ranges of the inputs of {listing([name])} do not fit what ModelOpt says")
        for end in (AMAX, BIAS):
            if (tensor := fields.get(f"{INPUT}.{end}")) is not None:
                one_number(path, f"{name}.{INPUT}.{end}", tensor)
        largest = None if amax is None else magnitudes(path, f"{name}.{INPUT}.{AMAX}", amax).reshape(())
        rounding = Ranged(quantizer, largest, None if bias is None else bias.read().float().reshape(()))
    if (factor := fields.get(f"{INPUT}.{PRE}")) is None:
        return rounding
    if shape is None:
        raise ArtifactError(f"{path}: ModelOpt multiplies inputs of {listing([name])}, expected of linears alone")
    return multiplied(path, f"{name}.{INPUT}.{PRE}", factor, shape, rounding)


def multiplied(path: Path, name: str, factor: StoredTensor, shape: Shape, then: Inputs | None) -> Multiplied:
    convolution = len(shape) == 4
    fitting = [(shape[1], 1, 1), (1, shape[1], 1, 1)] if convolution else [(shape[1],), (1, shape[1])]
    check(path, name, factor, fitting, FLOAT_SCALES)
    return Multiplied(finite(path, name, factor).flatten(), convolution, then)


def dtype_of(path: Path, name: str, stored: object) -> torch.dtype:
    """The dtype that a compressed weight had, and gets again. Raises ArtifactError where the state does not say it."""
    metadata = stored.get("metadata") if isinstance(stored, dict) else None
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    if not isinstance(dtype, Name) or dtype.text not in DTYPES:
        raise ArtifactError(f"{path}: {STATE} does not say which dtype {listing([name])} had; fetch the whole folder")
    return DTYPES[dtype.text]


def compressed(path: Path, name: str, fields: Fields, shape: Shape, dtype: torch.dtype) -> tuple[str, str, LazyTensor]:
    """The format, the scales and the weight of a layer whose weight is codes. Raises ArtifactError."""
    codes = fields["weight"]
    scale = field(path, name, fields, f"{WEIGHT}.{SCALE}")
    kind = CODES.get(codes.dtype)
    if kind == NVFP4 and f"{WEIGHT}.{DOUBLE}" in fields:
        double = fields[f"{WEIGHT}.{DOUBLE}"]
        weight = nvfp4_weight(
            path, name, codes, (f"{WEIGHT}.{SCALE}", scale), (f"{WEIGHT}.{DOUBLE}", double), shape, dtype
        )
        return NVFP4, f"1 for {BLOCK} numbers", weight
    if kind in (FP8, "int8"):
        weight, scales = scaled_weight(path, name, codes, (f"{WEIGHT}.{SCALE}", scale), shape, dtype)
        return kind, scales, weight
    raise ArtifactError(
        f"{path}: ModelOpt has compressed {listing([name])} to {codes.dtype} without scales of NVFP4, expected FP8, "
        "INT8 or NVFP4; give a checkpoint that is not compressed"
    )


def exported(path: Path, name: str, fields: Fields, shape: Shape) -> StoredLayer:
    """A layer of ``export_hf_checkpoint``. Raises ArtifactError for tensors that do not fit its ``shape``."""
    codes, scale = field(path, name, fields, "weight"), field(path, name, fields, "weight_scale")
    size = size_in_file(tensor for end, tensor in fields.items() if end.startswith("weight"))
    kind = CODES.get(codes.dtype)
    inputs: Inputs | None = None
    if (given := fields.get("input_scale")) is not None:
        number = one_number(path, f"{name}.input_scale", given)
        if number <= 0:
            raise ArtifactError(f"{path}: input_scale of {listing([name])} is {number:g}, expected a number above 0")
        inputs = BlocksNvfp4(number) if kind == NVFP4 else StaticFloat8(number)
    if (factor := fields.get("pre_quant_scale")) is not None:
        inputs = multiplied(path, f"{name}.pre_quant_scale", factor, shape, inputs)
    if kind == NVFP4:
        double = field(path, name, fields, "weight_scale_2")
        weight = nvfp4_weight(
            path, name, codes, ("weight_scale", scale), ("weight_scale_2", double), shape, torch.float32
        )
        return StoredLayer(NVFP4, f"1 for {BLOCK} numbers", size, weight, inputs)
    if kind != FP8 or "weight_scale_2" in fields:
        raise ArtifactError(
            f"{path}: ModelOpt has exported {listing([name])} as {codes.dtype}, expected FP8 or NVFP4; give such a "
            "checkpoint"
        )
    weight, scales = scaled_weight(path, name, codes, ("weight_scale", scale), shape, torch.float32)
    return StoredLayer(FP8, scales, size, weight, inputs)


def scaled_weight(
    path: Path, name: str, codes: StoredTensor, scale: tuple[str, StoredTensor], shape: Shape, dtype: torch.dtype
) -> tuple[LazyTensor, str]:
    """Codes of the weight's shape multiplied by a scale, or one a row, in ``dtype``: FP8QTensor and INT8QTensor."""
    end, stored = scale
    row = (shape[0], *(1 for _ in shape[1:]))
    check(path, f"{name}.weight", codes, [shape], [codes.dtype])
    check(path, f"{name}.{end}", stored, [(), (1,), row, (shape[0],)], FLOAT_SCALES)
    of_rows = prod(stored.shape) > 1

    def read() -> Tensor:
        factor = finite(path, f"{name}.{end}", stored).to(dtype)
        return codes.read().to(dtype) * factor.reshape(row if of_rows else ())

    return LazyTensor(shape, dtype, read), "1 for a row" if of_rows else "1 for all"


def nvfp4_weight(
    path: Path,
    name: str,
    codes: StoredTensor,
    scale: tuple[str, StoredTensor],
    double: tuple[str, StoredTensor],
    shape: Shape,
    dtype: torch.dtype,
) -> LazyTensor:
    """Codes two to a byte by a scale for 16 and one for all, in fp32 and then ``dtype``: NVFP4QTensor."""
    if shape[-1] % BLOCK:
        raise ArtifactError(f"{path}: {listing([name])} has rows of {shape[-1]} numbers, expected blocks of {BLOCK}")
    check(path, f"{name}.weight", codes, [(*shape[:-1], shape[-1] // 2)], [torch.uint8])
    check(path, f"{name}.{scale[0]}", scale[1], [(*shape[:-1], shape[-1] // BLOCK)], [torch.float8_e4m3fn])
    check(path, f"{name}.{double[0]}", double[1], [(), (1,)], FLOAT_SCALES)

    def read() -> Tensor:
        stored = codes.read()
        numbers = torch.stack([e2m1.decode(stored & 15), e2m1.decode(stored >> 4)], dim=-1).view(shape)
        blocks = finite(path, f"{name}.{scale[0]}", scale[1]).float()
        factor = blocks * finite(path, f"{name}.{double[0]}", double[1]).float().reshape(())
        return (numbers * spread(factor, shape[-1])).to(dtype)

    return LazyTensor(shape, dtype, read)
