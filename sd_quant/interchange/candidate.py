"""What a reader returns: the denoiser as somebody else has quantized it, by the names that diffusers has.

It is to a file what an assignment is to a recipe: a row for each quantized layer. Where an assignment says how to make
codes, this says what they stand for, because the codes are made.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import problems_in
from sd_quant.files.tensors import Readable
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of what is not quantized


class Inputs(Protocol):
    """What becomes of a layer's input [..., in] or [N, in, H, W] before it is multiplied; see ``inputs``."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def __str__(self) -> str:
        """For a table: ``int8, one scale``."""
        ...


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer."""

    format: str  # of its weight, in the words of who made it: Q4_K, float8_e4m3fn, nf4
    scales: str  # how many numbers share one: "1 for 32 numbers", "1 for a row", "1 for all"
    stored_bytes: int  # of all that is stored for the weight: codes, scales, a low-rank branch
    weight: Readable  # what its consumer multiplies with, in diffusers' shape; floating point, a branch added
    inputs: Inputs | None = None  # None: they stay as they are
    # up [out, rank] and down [rank, in], part of ``weight`` too, that are multiplied with inputs as they came
    branch: tuple[Readable, Readable] | None = None

    @property
    def bits(self) -> float:
        """Effective bits of a weight."""
        return 8 * self.stored_bytes / prod(self.weight.shape)


@dataclass(frozen=True)
class Candidate:
    """A quantized denoiser of somebody else. No weight is in memory."""

    path: Path
    reader: str  # of ``READERS``
    maker: str  # who made it, as far as the file says, for people: "GGUF", "SDNQ 0.2.8"
    layers: Mapping[str, StoredLayer]  # by diffusers' name
    parameters: Mapping[str, Readable] = field(repr=False)  # all others, by diffusers' name of the parameter
    stored_bytes: int = 0  # of the denoiser, all parameters
    # What becomes of the inputs of modules that are no quantized layers, norms say, by diffusers' name of the module.
    rounded: Mapping[str, Inputs] = field(default_factory=dict, repr=False)
    # Opens the denoiser by the candidate's own library, for the pipeline's network of the same class; None where the
    # library is not installed or cannot compute on a processor. May raise anything.
    runtime: Callable[[], nn.Module] | None = field(default=None, repr=False)

    @property
    def bits(self) -> float:
        """Effective bits of a weight, those of the layers that are not quantized among them."""
        count = sum(prod(layer.weight.shape) for layer in self.layers.values())
        count += sum(prod(each.shape) for each in self.parameters.values())
        return 8 * self.stored_bytes / count


def check_whole(candidate: Candidate, checkpoint: Checkpoint, unknown: Collection[str] = ()) -> Candidate:
    """``candidate`` itself, if it is the denoiser of ``checkpoint``, whole and nothing besides.

    ``unknown`` are the names in the file that the reader has no use for; empty for a file that is understood.
    Raises ArtifactError with the first ten names of what is missing, unknown or of another shape or dtype.
    """
    expected = {name: tuple(each.shape) for name, each in needed(empty_denoiser(checkpoint)).items()}
    found: dict[str, Readable] = {f"{name}.weight": layer.weight for name, layer in candidate.layers.items()}
    found |= candidate.parameters
    problems = {
        "missing": [name for name in expected if name not in found],
        "unknown": [*unknown, *(name for name in found if name not in expected)],
        "of another shape": [
            f"{name} {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and tuple(found[name].shape) != shape
        ],
        "in no floating point": [
            f"{name} {each.dtype}" for name, each in found.items() if name in expected and each.dtype not in FLOATS
        ],
    }
    if told := problems_in(problems):
        raise ArtifactError(
            f"{candidate.path} ({candidate.maker}) does not hold the denoiser of the full-precision model, "
            f"{len(expected)} tensors ({told}); give a quantization of that very model"
        )
    return candidate


def needed(network: nn.Module) -> dict[str, Tensor]:
    """The tensors without which a network cannot compute."""
    return dict(network.state_dict())


def size_in_file(tensors: Iterable[Readable]) -> int:
    """Bytes that tensors take as they are stored."""
    return sum(prod(each.shape) * each.dtype.itemsize for each in tensors)
