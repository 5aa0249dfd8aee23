"""The denoiser's weights by a run's layer assignments: quantized values with scales, all other tensors in 16 bits.

A text encoder or VAE may take the denoiser's place, see ``models.checkpoint.OtherNetwork``; if it computes in fp32,
unquantized weights keep their dtype.

Each weight is read, smoothed and quantized when it is written: one is in memory at a time. Alternative not taken: a
network with all its weights, as other tools save it: SDXL's has 10 GB.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sd_quant.files import write_json
from sd_quant.files.safetensors import FORMAT, write_safetensors
from sd_quant.files.tensors import LazyTensor, Readable, Weights
from sd_quant.interchange.stored import CONFIG, weights_name
from sd_quant.models.checkpoint import Checkpoint, OtherNetwork, denoiser_part, denoiser_weights, empty_denoiser
from sd_quant.models.parts import Part
from sd_quant.names.authors import Pieces, Rows, assembled, pieces_of, rows_in
from sd_quant.names.diffusers import TIED
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS

Assignment = Mapping[str, LayerAssignment]  # as ``holding.adapted`` makes it for a format


def quantized(assignment: Assignment) -> dict[str, LayerAssignment]:
    """Return the assignments of layers whose weight is quantized, by layer name."""
    return {name: layer for name, layer in assignment.items() if layer.format is not None}


def sixteen_bits(part: Part) -> torch.dtype:
    """Return the dtype of a part's unquantized weights: bf16 if its graph has bf16, else fp16."""
    return torch.bfloat16 if part.contract.weights == torch.bfloat16 else torch.float16


def high_precision(checkpoint: Checkpoint, assignment: Assignment) -> dict[str, LazyTensor]:
    """Return the denoiser's weights and biases, unquantized, with the smoothing of their layers' assignments.

    Keys are diffusers' names. Floating-point tensors have the dtype of ``sixteen_bits``.
    """
    weights, part = cast(Weights, denoiser_weights(checkpoint)), denoiser_part(checkpoint)
    stored = isinstance(checkpoint, OtherNetwork) and part.contract.weights == torch.float32

    def read(name: str, layer: LayerAssignment | None, dtype: torch.dtype) -> Tensor:
        if layer is None or layer.role == "attention":
            return weights[name].to(dtype)
        if layer.format is None and layer.multiplies:  # no consumer multiplies for it, so its weight is not divided
            layer = replace(layer, pre_quant_scale=None)
        return rewritten(weights[name], layer).to(dtype)

    found = {}
    for name, tensor in empty_denoiser(checkpoint).state_dict().items():
        if name in weights and name not in TIED:
            floating = weights.parameters[name].dtype if stored else sixteen_bits(part)
            dtype = floating if tensor.is_floating_point() else tensor.dtype
            layer = assignment.get(name.rpartition(".")[0])
            found[name] = LazyTensor(tuple(tensor.shape), dtype, partial(read, name, layer, dtype))
    return found


def codes_and_scales(checkpoint: Checkpoint, layer: LayerAssignment) -> tuple[Tensor, ...]:
    """Return a layer's codes [out, in * kernel] and its scales, fp32: [out, 1], [1, 1] or [out, blocks].

    NVFP4 has a common scale [1, 1] besides.
    """
    weight = denoiser_weights(checkpoint)[f"{layer.name}.weight"]
    codes, scales = layer.codes_and_scales(rewritten(weight, layer).flatten(1))
    return codes, *(each.float() for each in scales)


def has_static_input(layer: LayerAssignment) -> bool:
    """Return whether a file has a static scale for the layer's input."""
    read = layer.activation_format
    return read is not None and FORMATS[read].needs_amax and not layer.per_token


@dataclass(frozen=True)
class JoinedLayers:
    """Quantized linears that the original checkpoint's layout stores as one tensor."""

    pieces: Pieces  # the rows of their weights in the tensor
    layers: Mapping[str, LayerAssignment]  # by the weight's name

    @property
    def first(self) -> LayerAssignment:
        """The linear with the first rows; ``holding`` has given all linears its format and common range."""
        return self.layers[self.pieces[0].name]

    @property
    def shape(self) -> tuple[int, ...]:
        return rows_in(self.pieces), *self.first.weight_shape[1:]

    def rows(self, of: Callable[[LayerAssignment], Tensor]) -> Tensor:
        """Concatenate ``of(layer)`` [out, ...] of all layers along the rows, in the stored order."""
        return assembled(self.pieces, lambda name: of(self.layers[name]))


def alone(layer: LayerAssignment) -> JoinedLayers:
    name, rows = f"{layer.name}.weight", layer.weight_shape[0]
    return JoinedLayers((Rows(name, 0, rows, rows),), {name: layer})


def by_authors_names(
    checkpoint: Checkpoint, assignment: Assignment
) -> tuple[dict[str, LazyTensor], dict[str, JoinedLayers]]:
    """Return high-precision tensors and quantized weights by the original checkpoint's names, without a prefix."""
    weights = high_precision(checkpoint, assignment)
    layers = {f"{name}.weight": layer for name, layer in quantized(assignment).items()}
    shapes = {name: tensor.shape for name, tensor in weights.items()}

    def read(pieces: Pieces) -> Tensor:
        return assembled(pieces, lambda name: weights[name].read())

    plain, joined = {}, {}
    for stored, pieces in pieces_of(empty_denoiser(checkpoint), shapes).items():
        first = weights[pieces[0].name]
        if pieces[0].name in layers:
            joined[stored] = JoinedLayers(pieces, layers)
        elif len(pieces) == 1:
            plain[stored] = first
        else:
            plain[stored] = LazyTensor((rows_in(pieces), *first.shape[1:]), first.dtype, partial(read, pieces))
    return plain, joined


def with_coded_weights(
    checkpoint: Checkpoint,
    assignment: Assignment,
    tensors_of: Callable[[Checkpoint, LayerAssignment], Mapping[str, Readable]],
) -> dict[str, Readable]:
    """Return the denoiser's tensors by name, with ``tensors_of(checkpoint, layer)`` for each quantized weight."""
    layers, tensors = quantized(assignment), dict[str, Readable]()
    for name, tensor in high_precision(checkpoint, assignment).items():
        layer = layers.get(name.removesuffix(".weight"))
        tensors |= {name: tensor} if layer is None else tensors_of(checkpoint, layer)
    return tensors


def write_file(path: Path, tensors: Mapping[str, Readable], metadata: Mapping[str, str] = FORMAT) -> Path:
    """Write a safetensors file with a progress bar. Raises ResourceError when the disk is full."""
    with progress(len(tensors), f"write {path.name}") as advance:
        write_safetensors(path, tensors, advance, metadata)
    return path


def write_folder(
    checkpoint: Checkpoint,
    folder: Path,
    tensors: Mapping[str, Readable],
    quantization: Mapping[str, Any],
    metadata: Mapping[str, str] = FORMAT,
) -> Path:
    """Write the denoiser into the pipeline ``folder``, and ``quantization_config`` into its config; return ``folder``.

    Raises ResourceError when the disk is full.
    """
    target = folder / denoiser_part(checkpoint).component
    write_file(target / f"{weights_name(empty_denoiser(checkpoint))}.safetensors", tensors, metadata)
    config = json.loads((target / CONFIG).read_text(encoding="utf-8"))
    write_json(target / CONFIG, config | {"quantization_config": quantization})
    return folder
