"""SDXL as one file that ComfyUI opens: Stability's keys, each quantized linear marked by a tensor ``comfy_quant``.

Per linear X behind ``model.diffusion_model.``, as ComfyUI's ``ops.py`` reads them (``_load_quantized_module``):

| format | X.weight         | scales                                                             | inputs        |
|--------|------------------|--------------------------------------------------------------------|---------------|
| fp8    | E4M3 [N, K]      | weight_scale, input_scale: fp32 scalars                            | static        |
| int8   | INT8 [N, K]      | weight_scale fp32 [N, 1]                                           | a scale a row |
| nvfp4  | uint8 [N, K / 2] | weight_scale E4M3 in tiles of 128 x 4, weight_scale_2, input_scale | in blocks     |

A byte of NVFP4 has its first number in the high half, where ONNX and ModelOpt have it in the low one. Convolutions stay
in fp16, as all that is not quantized: ComfyUI has no quantized ones. The mark of an INT8 linear may say ``convrot``:
groups of inputs are then rotated by the matrix of ``quantization.rotation``, and the codes are of the rotated weight.
The road not taken is the older ``scaled_fp8``, which ComfyUI converts when it loads a file.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.checkpoints.nemo_state import network_state
from sd_quant.files.safetensors import write_safetensors
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange.candidate import Inputs
from sd_quant.interchange.comfyui_inputs import INT8, Rotated
from sd_quant.interchange.weights import Assignment, high_precision, quantized
from sd_quant.models.checkpoint import Checkpoint, denoiser_part
from sd_quant.names.nemo import locations
from sd_quant.names.sgm import sgm_key
from sd_quant.numbers import up_to
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import TILE_COLUMNS, TILE_ROWS, in_tiles

FILE = "sdxl.safetensors"
NAMES = {"fp8": "float8_e4m3fn", "int8": "int8_tensorwise", "nvfp4": "nvfp4"}  # in ComfyUI's QUANT_ALGOS
MULTIPLE = 16  # of a packed weight's sides


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> None:
    """Write ``folder``/sdxl.safetensors with all four networks; one tensor is in memory at a time.

    Raises ResourceError when the disk is full.
    """
    denoiser = denoiser_part(checkpoint).component
    components: dict[str, Mapping[str, Readable]] = {
        name: weights.parameters for name, weights in checkpoint.components.items()
    }
    parameters, places = components[denoiser], locations(denoiser, components[denoiser])
    components[denoiser] = high_precision(checkpoint, assignment)
    state: dict[str, Readable] = {sgm_key(key): in_fp16(each) for key, each in network_state(components).items()}
    for layer in quantized(assignment).values():
        key = sgm_key(places[f"{layer.name}.weight"].key)
        del state[key]
        tensors = tensors_of(parameters[f"{layer.name}.weight"], layer)
        state |= {f"{key.removesuffix('weight')}{name}": each for name, each in tensors}
    with progress(len(state), f"write {FILE}") as advance:
        write_safetensors(folder / FILE, state, advance)


def per_row(rotation: int) -> Inputs:
    """What ComfyUI makes of an INT8 linear's input, see ``rounding_of_rows``."""
    return Rotated(rotation) if rotation else INT8


def in_fp16(parameter: Readable) -> LazyTensor:
    return LazyTensor(tuple(parameter.shape), torch.float16, lambda: parameter.read().half())


def tensors_of(source: Readable, layer: LayerAssignment) -> Iterator[tuple[str, Readable]]:
    """The tensors of a quantized linear in place of its weight ``source``, by the ends of their names."""
    fmt = FORMATS[layer.format]
    mark = json.dumps({"format": NAMES[fmt.name]} | rotation_of(layer)).encode()
    yield "comfy_quant", lazy(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
    if fmt.block is not None:
        yield from packed(source, layer)
    else:

        def codes() -> Tensor:
            return layer.codes_and_scales(rewritten(source.read(), layer))[0]

        dtype = fmt.quantize(torch.zeros(1), torch.ones(1)).dtype
        yield "weight", LazyTensor(tuple(source.shape), dtype, codes)
        scale = layer.weight_scale.float()
        per_output = scale.expand(source.shape[0])[:, None].contiguous()
        yield "weight_scale", lazy(scale[0] if layer.activation_format else per_output)
    if layer.activation_format is not None:
        yield "input_scale", lazy(torch.tensor(input_scale(layer)))
    if layer.multiplies:
        yield "pre_quant_scale", lazy(layer.pre_quant_scale.half())


def rotation_of(layer: LayerAssignment) -> dict[str, bool | int]:
    """What a mark says of inputs that ComfyUI rotates before it quantizes them, as the weight's codes are rotated."""
    return {"convrot": True, "convrot_groupsize": layer.rotation} if layer.rotation else {}


def input_scale(layer: LayerAssignment) -> float:
    """The static scale of the input, or the global one of its blocks."""
    return layer.activation_scales(torch.zeros(1, FORMATS[layer.activation_format].block or 1))[-1].item()


def packed(source: Readable, layer: LayerAssignment) -> Iterator[tuple[str, Readable]]:
    """Codes of four bits, the first in the high half of a byte, padded to multiples of 16, and their two scales."""
    rows, columns = (up_to(side, MULTIPLE) for side in source.shape)
    block = FORMATS[layer.format].block

    def made() -> tuple[Tensor, tuple[Tensor, ...]]:
        return layer.codes_and_scales(rewritten(source.read(), layer))

    def codes() -> Tensor:
        found = made()[0]
        padded = F.pad(found, (0, columns - found.shape[1], 0, rows - found.shape[0]))
        return padded[:, ::2] << 4 | padded[:, 1::2]

    def scales() -> Tensor:
        return in_tiles(made()[1][0].to(torch.float8_e4m3fn))

    yield "weight", LazyTensor((rows, columns // 2), torch.uint8, codes)
    shape = (up_to(rows, TILE_ROWS), up_to(columns // block, TILE_COLUMNS))
    yield "weight_scale", LazyTensor(shape, torch.float8_e4m3fn, scales)
    yield "weight_scale_2", LazyTensor((), torch.float32, lambda: made()[1][1].float().reshape(()))
