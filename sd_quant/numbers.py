"""Arithmetic that several packages share, importable without the dependencies of the metrics."""

import math

import torch

from sd_quant.errors import ArtifactError


def finite(value: float) -> float | None:
    """Return ``value``, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def up_to(number: int, multiple: int) -> int:
    """Round ``number`` up to the next multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def relative_error(reference: torch.Tensor, output: torch.Tensor) -> float | None:
    """Return ||output - reference|| / ||reference||, or None if not finite. Raises ArtifactError if shapes differ."""
    if reference.shape != output.shape:
        raise ArtifactError(
            f"an output of shape {list(output.shape)} was compared with a reference of {list(reference.shape)}, "
            "expected one shape; give both the same inputs"
        )
    reference, output = reference.double(), output.double()
    return finite((torch.linalg.vector_norm(output - reference) / torch.linalg.vector_norm(reference)).item())
