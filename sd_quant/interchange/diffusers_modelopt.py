"""A folder of diffusers that NVIDIA ModelOpt saved, with its quantizers or with compressed weights.

Both have ``modelopt_state.pth`` beside the weights; what ModelOpt exports for servers is read by ``modelopt_export``.

- With quantizers: a weight is stored as it was, a quantizer's range as ``X.weight_quantizer._amax``, and ModelOpt
  rounds in every call. The file is not smaller for it.
- Compressed (``mtq.compress``): the weight is codes, with ``X.weight_quantizer._scale`` beside them.

A ``pre_quant_scale`` multiplies the input first.

The first way is written: ModelOpt's checkpointing for Hugging Face inserts the quantizers that the state describes, and
loads their ranges, which are fp16, with the weights. A weight is stored as the numbers that its codes stand for, in
fp16; the quantizer makes the same codes of them. No ``quantization_config`` is written: diffusers 0.42 passes ModelOpt
0.47 an empty one, which it cannot read.

The road not taken is diffusers' ``from_pretrained``: ModelOpt unpickles files in the folder, so there is no
``runtime``.
"""

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange import AS_ASSIGNED, DIFFUSERS, ForeignFormat, modelopt_export
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.modelopt_export import CODES, layouts_of, multiplied, with_codes
from sd_quant.interchange.modelopt_quantizers import NVFP4, Quantizer, Ranged, quantizer_of
from sd_quant.interchange.modelopt_state import Name, State, read_state
from sd_quant.interchange.stored import DTYPES, FILE, FLOAT_SCALES, Folder, LayerTensors, Shape, by_layer, holds
from sd_quant.interchange.weights import Assignment, codes_and_scales, high_precision, quantized, write_file
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, nvfp4
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
MAKER = "ModelOpt"
STATE = "modelopt_state.pth"
WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
AMAX, PRE, BIAS, SCALE, DOUBLE = "_amax", "_pre_quant_scale", "_bias_value", "_scale", "_double_scale"
BUFFERS = [f"{WEIGHT}.{each}" for each in (AMAX, SCALE, DOUBLE)] + [f"{INPUT}.{each}" for each in (AMAX, PRE, BIAS)]
BLOCK = nvfp4.BLOCK


def recognizes(path: Path) -> bool:
    """Whether a denoiser's folder holds ModelOpt's state, and is no export for servers."""
    return holds(path, STATE) and not modelopt_export.recognizes(path)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """The denoiser in a folder, a pipeline's or its own. What multiplies or rounds inputs is read, no weight.

    Raises ArtifactError for anything that is not the whole denoiser as ModelOpt stores it, and for quantizers of
    anything but weights and inputs.
    """
    folder = Folder(path, checkpoint)
    tensors, shapes = folder.tensors, folder.shapes
    state = read_state(path, whole_file(folder.place / STATE))
    leaves = {name for name, module in empty_denoiser(checkpoint).named_modules() if not list(module.children())}
    used = quantizers_of(path, state, shapes, leaves)
    found, others = by_layer(path, tensors, leaves, BUFFERS)
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
    stored: LayerTensors, shape: Shape, used: Mapping[str, Quantizer], compression: object
) -> QuantizedLayer:
    """A layer with a quantizer of its weight, or with codes. Raises ArtifactError for what does not fit."""
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
    """The shapes that a weight's ranges may have, and how many numbers share one. Raises ArtifactError."""
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
    """Ranges, fp32. Raises ArtifactError for NaN, infinities and numbers below zero."""
    values = stored.finite(end).float()
    if bool((values < 0).any()):
        raise ArtifactError(
            f"{stored.path}: {stored.name(end)} has numbers below 0, expected magnitudes; fetch the file again"
        )
    return values


def inputs_of(stored: LayerTensors, shape: Shape | None, quantizer: Quantizer | None) -> Inputs | None:
    """How ModelOpt multiplies and rounds a module's inputs; it multiplies them also where the quantizer is off.

    ``shape`` is that of its weight, None unless it is a linear or convolution. Raises ArtifactError.
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
    """The dtype that a compressed weight had, and gets again. Raises ArtifactError where the state does not say it."""
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
    """Writes the denoiser into its folder in ``folder``, a pipeline's; one weight is in memory at a time.

    Raises ResourceError when the disk is full.
    """
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
    """A quantized weight as the numbers that its codes stand for, in fp16."""

    def read() -> Tensor:
        codes, *scales = codes_and_scales(checkpoint, layer)
        return FORMATS[layer.format].dequantize(codes, *scales).half().view(layer.weight_shape)

    return LazyTensor(layer.weight_shape, torch.float16, read)
