"""What calibration keeps of every layer's inputs: all that a recipe is derived from.

Nothing here knows a recipe. Ranges are kept per denoising step: per channel for a linear, per prompt for a convolution,
which is enough for every quant_level, alpha, percentile and collect_method. Beside them stands a small sample of real
inputs to measure errors on: each row is what one output element multiplies, a token of a linear or a padded patch of a
convolution. Rows have random priorities and the lowest are kept, so statistics of different prompts merge exactly, by a
maximum and by keeping the lowest priorities, whatever was collected where and in which order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 128  # of a layer's inputs that are kept
CALLS = 8  # of the whole network that are kept


@dataclass(slots=True)
class Sample:
    """``values`` [rows, ...] with their ``priority`` fp64 [rows], ascending."""

    values: Tensor
    priority: Tensor


@dataclass(slots=True)
class LayerStatistics:
    """``amax`` is fp32: [steps, in_features] for a ``linear``, [prompts, steps] for a ``conv``.

    ``rows`` holds up to ``ROWS`` inputs, fp16: [rows, in_features], or patches [rows, in_channels * kh * kw].
    """

    kind: str
    amax: Tensor
    rows: Sample


@dataclass(slots=True)
class Statistics:
    """Of every layer by name, and ``calls``: up to ``CALLS`` inputs of the whole network, each name to a sample."""

    layers: dict[str, LayerStatistics]
    calls: dict[str, Sample]


def kind_of(module: nn.Module) -> str:
    return "conv" if isinstance(module, nn.Conv2d) else "linear"


def width_of(layer: nn.Module) -> int:
    """Numbers that one output element multiplies: in_features, or in_channels * kh * kw."""
    return layer.get_parameter("weight")[0].numel()


def lowest(samples: Sequence[Sample], limit: int) -> Sample:
    """The ``limit`` rows of lowest priority of all."""
    priority = torch.cat([sample.priority for sample in samples])
    order = priority.argsort()[:limit]
    return Sample(torch.cat([sample.values for sample in samples])[order], priority[order])


def merge(statistics: Sequence[Statistics]) -> Statistics:
    """Statistics of disjoint prompts as those of all of them; exact, in any order."""
    names = dict.fromkeys(name for part in statistics for name in part.layers)
    layers = {}
    for name in names:
        parts = [part.layers[name] for part in statistics if name in part.layers]
        prompts = max(len(part.amax) for part in parts)  # of a linear these are steps, the same everywhere
        padded = [F.pad(part.amax, (0, 0, 0, prompts - len(part.amax))) for part in parts]
        rows = lowest([part.rows for part in parts], ROWS)
        layers[name] = LayerStatistics(parts[0].kind, reduce(torch.maximum, padded), rows)
    inputs = dict.fromkeys(name for part in statistics for name in part.calls)
    calls = {name: lowest([part.calls[name] for part in statistics if name in part.calls], CALLS) for name in inputs}
    return Statistics(layers, calls)


def bytes_bound(layers: Mapping[str, nn.Module], prompts: int, steps: int) -> int:
    """Most bytes that statistics of these layers can take, the few whole calls left out."""
    total = 0
    for layer in layers.values():
        width = width_of(layer)
        amax = prompts * steps if kind_of(layer) == "conv" else steps * width
        total += 4 * amax + ROWS * (2 * width + 8)
    return total
