"""Numbers as a record holds them: finite, or None. Whoever measures uses it, without the packages of the metrics."""

import math

import torch

from sd_quant.errors import ArtifactError


def finite(value: float) -> float | None:
    """``value``, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def up_to(number: int, multiple: int) -> int:
    """The smallest multiple that is not smaller than ``number``."""
    return -(-number // multiple) * multiple


def relative_error(reference: torch.Tensor, output: torch.Tensor) -> float | None:
    """||output - reference|| / ||reference||, computed in float64 for two tensors of one shape and any float type.

    None when it is not finite, as where the reference is all zero. Raises ArtifactError when the shapes differ.
    """
    if reference.shape != output.shape:
        raise ArtifactError(
            f"an output of shape {list(output.shape)} was compared with a reference of {list(reference.shape)}, "
            "expected one shape; give both the same inputs"
        )
    reference, output = reference.double(), output.double()
    return finite((torch.linalg.vector_norm(output - reference) / torch.linalg.vector_norm(reference)).item())
