"""diffusers with torchao: linears of INT8 codes whose inputs have a static scale or one a row, and factors in front.

torchao's ``Int8Tensor`` holds all that SmoothQuant needs. A safetensors file holds such a tensor in pieces, and its
metadata says how to join them (torchao's ``prototype.safetensors``, read by diffusers' ``TorchAoHfQuantizer``). The
pieces are written here as that code names them, without importing torchao, which would hold the whole network. No
convolution can be held, and no other format of ours: torchao's FP8 tensor has no static scale for inputs.
The road not taken is ``quantize_`` with torchao's own config, which chooses other codes.

The scale of an input has as many axes as the input, else torchao asserts; so the network runs once on tensors without
numbers to tell how many each layer's input has.
"""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.export.tracing import example_shapes, fake_module
from sd_quant.files import write_json
from sd_quant.files.safetensors import FORMAT, write_safetensors
from sd_quant.files.tensors import LazyTensor, lazy
from sd_quant.interchange.candidate import Inputs
from sd_quant.interchange.inputs import Affine
from sd_quant.interchange.weights import (
    Assignment,
    codes_and_scales,
    flat_shape,
    high_precision,
    quantized,
)
from sd_quant.models.checkpoint import Checkpoint, denoiser_of, denoiser_part
from sd_quant.quantization.assignment import LayerAssignment

FILE = "diffusion_pytorch_model.safetensors"
# diffusers wants to be told some config; the tensors in the file say everything, so it has no values.
CONFIG = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8StaticActivationInt8WeightConfig", "_version": 1, "_data": {}}},
    "modules_to_not_convert": None,
}
STATIC = {"_type": "PerTensor", "_data": {}}
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}  # the scale is found each time


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> None:
    """Writes the denoiser into the pipeline ``folder``: its weights, and ``quantization_config`` in its config.

    Per quantized layer there are codes int8 [out, in], scales fp32 [out, 1], the input's scale fp32 [1, ...] unless it
    is scaled per token and, where the layer multiplies, its factors fp32 [in]; all other weights are fp16.
    Raises ResourceError when the disk is full.
    """
    layers = quantized(assignment)
    ranks = input_ranks(checkpoint, [name for name, layer in layers.items() if not layer.per_token])
    tensors: dict[str, LazyTensor] = {}
    metadata: dict[str, str] = {}
    for name, tensor in high_precision(checkpoint, assignment).items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            tensors[name], metadata[name] = tensor, json.dumps({"_type": "Tensor"})
            continue
        pieces = pieces_of(checkpoint, layer, ranks.get(name.removesuffix(".weight")))
        tensors |= {f"{layer.name}._weight_{piece}": each for piece, each in pieces.items()}
        metadata[name] = json.dumps(description(layer, list(pieces)))
    metadata["tensor_names"] = json.dumps(list(metadata))
    target = folder / denoiser_part(checkpoint).component
    write_safetensors(target / FILE, tensors, metadata=FORMAT | metadata)
    config = json.loads((target / "config.json").read_text())
    write_json(target / "config.json", config | {"quantization_config": CONFIG})


def per_row(rotation: int) -> Inputs:
    """What torchao makes of an input without a static scale, see ``rounding_of_rows``. It rotates none."""
    assert not rotation
    return Affine(smallest=torch.finfo(torch.float32).eps)


def pieces_of(checkpoint: Checkpoint, layer: LayerAssignment, rank: int | None) -> dict[str, LazyTensor]:
    """The tensors that make up a layer's ``Int8Tensor``, by torchao's names.

    ``rank`` is that of the layer's input, None where the input has no static scale.
    """
    outputs, inputs = flat_shape(layer)
    per_output = (outputs, 1)

    def scales() -> Tensor:  # one per output, also where the weight has one alone: torchao takes it for either
        return codes_and_scales(checkpoint, layer)[1].expand(per_output)

    pieces = {
        "qdata": LazyTensor((outputs, inputs), torch.int8, lambda: codes_and_scales(checkpoint, layer)[0]),
        "scale": LazyTensor(per_output, torch.float32, scales),
        "zero_point": lazy(torch.zeros(per_output, dtype=torch.int8)),
    }
    if rank is not None:
        pieces["act_quant_scale"] = lazy(torch.full([1] * rank, layer.activation_scale))
    if layer.multiplies:
        pieces["act_pre_scale"] = lazy(layer.pre_quant_scale.half().float())  # as every graph of ours has it
    return pieces


def description(layer: LayerAssignment, pieces: list[str]) -> dict:
    """What the metadata says of a layer's weight: the class to make of its pieces, and its other fields.

    The dtype is the one that diffusers loads by default and advises for integers.
    """
    inputs = {
        "granularity": PER_ROW if layer.per_token else STATIC,
        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
        "reduce_range": False,
    }
    fields = {
        "act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs", "_data": inputs},
        "reduce_range": False,
        "block_size": [1, flat_shape(layer)[1]],
        "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
    }
    return {"_type": "Int8Tensor", "_data": fields, "_tensor_data_names": pieces}


def input_ranks(checkpoint: Checkpoint, layers: Collection[str]) -> dict[str, int]:
    """How many axes the input of each of these layers of the denoiser has; no weight is read."""
    if not layers:
        return {}
    part = denoiser_part(checkpoint)
    mode, module = fake_module(lambda: part.wrap(checkpoint.build()[part.component]), part.contract.weights)
    ranks: dict[str, int] = {}

    def remember(name: str):
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            ranks[name] = inputs[0].ndim

        return hook

    denoiser = denoiser_of(checkpoint, module)
    for name in layers:
        denoiser.get_submodule(name).register_forward_pre_hook(remember(name))
    with mode, torch.no_grad():
        shapes = example_shapes(part.contract)
        module(**{name: torch.zeros(shape, dtype=part.contract.dtypes[name]) for name, shape in shapes.items()})
    return ranks
