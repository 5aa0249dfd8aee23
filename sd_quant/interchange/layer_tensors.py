"""The tensors of a denoiser's file, sorted by layer, and the checks that every reader of such a file makes of them.

A quantizer stores a layer under its weight's name and some beside it, such as ``X.weight`` and ``X.weight.absmax``. A
reader says which ends of names it knows; what has another end is a parameter like any other, or unknown.
The road not taken is a class for each kind of stored weight: what they share is names, shapes and finite numbers.
"""

from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import listing
from sd_quant.files.tensors import Readable, StoredTensor
from sd_quant.interchange.candidate import Candidate, StoredLayer, check_whole, needed, size_in_file
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser

FLOAT_SCALES = (torch.float32, torch.float16, torch.bfloat16)
Shape = tuple[int, ...]
Fields = Mapping[str, StoredTensor]  # of one layer, by the ends of their names


def weight_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """The shape of the weight of every linear and two-dimensional convolution by the layer's name."""
    return {
        name: tuple(module.weight.shape)
        for name, module in empty_denoiser(checkpoint).named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def by_layer(
    tensors: Mapping[str, StoredTensor], layers: Collection[str], marks: Collection[str]
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """The tensors of each of ``layers`` that has one whose name ends in one of ``marks``, and all other tensors.

    ``marks`` are the ends, behind the layer's name and a dot, that only a quantized layer has. Its ``weight`` is among
    its tensors if there is one of that name; its bias is not.
    """
    found: dict[str, dict[str, StoredTensor]] = {}
    for mark in marks:
        for name, tensor in tensors.items():
            layer = name.removesuffix(f".{mark}")
            if layer != name and layer in layers:
                found.setdefault(layer, {})[mark] = tensor
    for layer, fields in found.items():
        if (weight := tensors.get(f"{layer}.weight")) is not None:
            fields["weight"] = weight
    used = {f"{layer}.{end}" for layer, fields in found.items() for end in fields}
    return found, {name: tensor for name, tensor in tensors.items() if name not in used}


def field(path: Path, layer: str, fields: Fields, end: str) -> StoredTensor:
    """One tensor of a layer. Raises ArtifactError when it is missing."""
    if end not in fields:
        raise ArtifactError(f"{path}: layer {shown(layer)} has no {end!r} beside its others; fetch the file again")
    return fields[end]


def check(path: Path, name: str, tensor: Readable, shapes: Iterable[Shape], dtypes: Collection[torch.dtype]) -> None:
    """Raises ArtifactError for a tensor of another shape or dtype than one of these."""
    wanted = [tuple(shape) for shape in shapes]
    if tuple(tensor.shape) not in wanted or tensor.dtype not in dtypes:
        raise ArtifactError(
            f"{path}: {shown(name)} is {list(tensor.shape)} in {plain(tensor.dtype)}, expected "
            f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(wanted))} in "
            f"{' or '.join(map(plain, dtypes))}; give a quantization of the very model that it is compared with"
        )


def finite(path: Path, name: str, tensor: Readable) -> Tensor:
    """The values of a tensor of scales, in its own dtype. Raises ArtifactError for a NaN or an infinity."""
    values = tensor.read()
    if not bool(torch.isfinite(values.float()).all()):
        raise ArtifactError(f"{path}: {shown(name)} holds NaN or infinite numbers; fetch the file again")
    return values


def one_number(path: Path, name: str, tensor: Readable) -> float:
    """The value of a tensor that holds a single finite number. Raises ArtifactError for any other."""
    if prod(tensor.shape) != 1 or tensor.dtype not in FLOAT_SCALES:
        check(path, name, tensor, [(), (1,)], FLOAT_SCALES)
        raise AssertionError(name)
    return float(finite(path, name, tensor).float())


def whole(
    path: Path,
    reader: str,
    maker: str,
    checkpoint: Checkpoint,
    layers: Mapping[str, StoredLayer],
    tensors: Mapping[str, StoredTensor],
    others: Mapping[str, StoredTensor],
    ignored: Collection[str] = (),
) -> Candidate:
    """The candidate of these layers, checked to be the whole denoiser.

    ``tensors`` are all of the file, ``others`` those that are in no layer, ``ignored`` names among these that carry
    nothing. Raises ArtifactError when no layer is quantized, and what ``check_whole`` raises.
    """
    if not layers:
        raise ArtifactError(
            f"{path} holds no layer that {maker} has quantized; expected a quantized denoiser, so check the path"
        )
    expected = needed(empty_denoiser(checkpoint))
    parameters = {name: tensor for name, tensor in others.items() if name in expected}
    unknown = [name for name in others if name not in expected and name not in ignored]
    candidate = Candidate(path, reader, maker, layers, parameters, size_in_file(tensors.values()))
    return check_whole(candidate, checkpoint, unknown)


def shown(name: str) -> str:
    """A name from a file, in quotes, printable and cut."""
    return repr(listing([name]))


def plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def told(value: object) -> str:
    """A value from a file for a message: plain ones as they are, cut, of others the kind, because they may be deep."""
    return str(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
