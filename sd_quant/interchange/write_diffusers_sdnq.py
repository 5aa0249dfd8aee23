"""diffusers with SDNQ: INT8 and FP8 weights, convolutions too, and INT4 linears with a low-rank branch.

SD.Next's quantization library computes with dequantized weights: inputs stay as they are, so nothing here multiplies or
shifts them. Its files hold our codes and scales as they are (SDNQ 0.2.8). It is under the GPL, so nothing of it is
imported or copied: what is written follows from its files, and tests load them with it.

| format | weight                                           | scale                                    |
|--------|--------------------------------------------------|------------------------------------------|
| int8   | int8 [out, in, ...]                              | fp32 [out, 1, ...]                       |
| fp8    | E4M3 [out, in, ...]                              | fp32 [out, 1, ...] or one, [1, 1, ...]   |
| int4   | uint8, flat: code + 8, the first in the low half | fp32 [out, blocks, 1]; one block: [out, 1] |

The config says for every layer how it is stored: the commonest way once, others by the layer's exact name, and which
layers are not quantized. Left to itself, SDNQ would skip layers by patterns and sizes of its own.
The road not taken is its quantizer, which chooses other scales.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.files import write_json
from sd_quant.files.safetensors import write_safetensors
from sd_quant.files.tensors import LazyTensor, lazy
from sd_quant.interchange.weights import (
    Assignment,
    codes_and_scales,
    high_precision,
    quantized,
    scales_shape,
)
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

FILE = "diffusion_pytorch_model.safetensors"
DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "int4": "int4"}
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
PER_ROW, PER_TENSOR = -1, -2  # of a config's group_size
OFFSET = 8  # of the unsigned number that holds a code of four bits
CONFIG = {
    "quant_method": "sdnq",
    "quant_conv": True,
    "use_quantized_matmul": False,
    "dequantize_fp32": True,
    "add_skip_keys": False,
    "minimum_allowed_numel": 0,
    "minimum_allowed_channel_size": 0,
}


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> None:
    """Writes the denoiser into the pipeline ``folder``: its weights, and ``quantization_config`` in its config.

    What is not quantized is fp16, a branch ``svd_up`` [out, rank] and ``svd_down`` [rank, in] too. Raises ResourceError
    when the disk is full.
    """
    layers = quantized(assignment)
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in high_precision(checkpoint, assignment).items():
        layer = layers.get(name.removesuffix(".weight"))
        tensors |= {name: tensor} if layer is None else tensors_of(checkpoint, layer)
    target = folder / denoiser_part(checkpoint).component
    write_safetensors(target / FILE, tensors)
    config = json.loads((target / "config.json").read_text())
    chosen = config_of(layers, empty_denoiser(checkpoint))
    write_json(target / "config.json", config | {"quantization_config": chosen})


def tensors_of(checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, LazyTensor]:
    """The tensors of a quantized layer by the names that they have in the file."""

    def read(index: int, shaped: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: shaped(codes_and_scales(checkpoint, layer)[index])

    shape, ones = layer.weight_shape, (1,) * (len(layer.weight_shape) - 2)
    rows, columns = scales_shape(layer)
    if FORMATS[layer.format].block is None:
        stored, scale_shape, shaped = shape, (rows, columns, *ones), lambda codes: codes.view(shape)
    else:
        stored = (shape[0] * shape[1] // 2,)
        scale_shape = (rows, columns, 1) if columns > 1 else (rows, 1)
        shaped = pack
    tensors = {
        f"{layer.name}.weight": LazyTensor(stored, STORED[layer.format], read(0, shaped)),
        f"{layer.name}.scale": LazyTensor(scale_shape, torch.float32, read(1, lambda scale: scale.view(scale_shape))),
    }
    if layer.low_rank is not None:
        up, down = layer.low_rank
        tensors |= {f"{layer.name}.svd_up": lazy(up), f"{layer.name}.svd_down": lazy(down)}
    return tensors


def pack(codes: Tensor) -> Tensor:
    """Codes of four bits, int8, as uint8 in one axis: two to a byte."""
    unsigned = (codes.flatten() + OFFSET).to(torch.uint8)
    return unsigned[::2] | unsigned[1::2] << 4


def config_of(layers: Assignment, denoiser: nn.Module) -> dict:
    """The ``quantization_config`` of a ``denoiser`` with these quantized layers."""
    kinds = {name: kind_of(layer) for name, layer in layers.items()}
    common = Counter(tuple(kind.items()) for kind in kinds.values()).most_common(1)
    default = dict(common[0][0]) if common else {}
    others = [
        name
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and name not in layers
    ]
    return {
        **CONFIG,
        **default,
        "modules_to_not_convert": [f"{name}.weight" for name in others],
        "modules_quant_config": {f"{name}.weight": kind for name, kind in kinds.items() if kind != default},
    }


def kind_of(layer: LayerAssignment) -> dict[str, str | int | bool]:
    """How a layer is stored, in the words of SDNQ's config."""
    static = PER_ROW if layer.weight_axis == 0 else PER_TENSOR
    return {
        "weights_dtype": DTYPES[layer.format],
        "group_size": FORMATS[layer.format].block or static,
        "use_svd": layer.low_rank is not None,
        "svd_rank": layer.rank or 1,  # which SDNQ wants to be positive
    }
