"""Calibration statistics of every layer's inputs, from which layer assignments are derived.

They contain ranges (amax) for each denoising step, per channel for a linear and per prompt for a convolution, enough
for every recipe; for a linear also the ranges of two folds of the prompts, to estimate clipping with unseen prompts;
and a small sample of inputs to measure errors on. A row of the sample is the input of one output element: a token for a
linear, a padded patch for a convolution. Rows with the lowest random priorities are kept, so statistics of disjoint
prompts merge exactly, in any order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 128  # rows kept of a layer's input
CALLS = 8  # calls of the whole network whose inputs are kept


@dataclass(slots=True)
class Sample:
    """Rows drawn at random: those of the lowest random priorities, in ascending order."""

    values: Tensor  # [rows, ...]
    priority: Tensor  # fp64 [rows]


@dataclass(slots=True)
class LayerStatistics:
    """Statistics of the inputs of one layer."""

    kind: str  # "linear" or "conv"
    amax: Tensor  # largest magnitudes, fp32: [steps, in_features] of a linear, [prompts, steps] of a conv
    rows: Sample  # up to ``ROWS``, fp16: [rows, in_features] of a linear, [rows, in_channels * kh * kw] of a conv
    folds: Tensor | None = None  # of a linear: largest magnitudes in even and in odd prompts, fp32 [2, in_features]


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest magnitude among the activations of a part of the pipeline (denoiser, text encoder, VAE)."""

    place: str  # "output of <layer>", or "input of <norm>", which reads a residual stream
    largest: float


@dataclass(slots=True, repr=False)
class Statistics:
    """Statistics of the inputs of all layers and of the whole network."""

    layers: dict[str, LayerStatistics]  # by the layer's name
    calls: dict[str, Sample]  # by the input's name: up to ``CALLS`` values, of the same calls for every input
    peaks: dict[str, Peak] = field(default_factory=dict)  # of each part that ran, by the part's name
    parts: dict[str, "Statistics"] = field(default_factory=dict)  # of other parts than the denoiser, by their names

    @property
    def steps(self) -> int | None:
        """The number of denoising steps recorded; None if calibration reached no layer."""
        return next((layer.amax.shape[-1 if layer.kind == "conv" else 0] for layer in self.layers.values()), None)

    @property
    def prompts(self) -> int | None:
        """The number of prompts; None without a convolution, because only convolutions have ranges per prompt."""
        return next((len(layer.amax) for layer in self.layers.values() if layer.kind == "conv"), None)

    def __repr__(self) -> str:
        calls = max((len(sample.priority) for sample in self.calls.values()), default=0)
        counts = {"layers": len(self.layers), "prompts": self.prompts, "steps": self.steps, "calls": calls}
        return f"Statistics({', '.join(f'{count} {name}' for name, count in counts.items() if count is not None)})"


def layer_kind(module: nn.Module) -> str:
    """Return the ``kind`` of a layer in ``LayerStatistics``: "conv" or "linear"."""
    return "conv" if isinstance(module, nn.Conv2d) else "linear"


def width_of(layer: nn.Module) -> int:
    """Return the number of inputs of one output element: in_features, or in_channels * kh * kw."""
    return layer.get_parameter("weight")[0].numel()


def lowest(samples: Sequence[Sample], limit: int) -> Sample:
    """Merge ``samples``: return the ``limit`` rows of lowest priority among all."""
    priority = torch.cat([sample.priority for sample in samples])
    order = priority.argsort()[:limit]
    return Sample(torch.cat([sample.values for sample in samples])[order], priority[order])


def merge(statistics: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of disjoint sets of prompts."""
    names = dict.fromkeys(name for part in statistics for name in part.layers)
    layers = {}
    for name in names:
        parts = [part.layers[name] for part in statistics if name in part.layers]
        prompts = max(len(part.amax) for part in parts)  # for a linear these are the steps, as many in every part
        padded = [F.pad(part.amax, (0, 0, 0, prompts - len(part.amax))) for part in parts]
        rows = lowest([part.rows for part in parts], ROWS)
        folds = [part.folds for part in parts if part.folds is not None]
        of_folds = reduce(torch.maximum, folds) if folds else None
        layers[name] = LayerStatistics(parts[0].kind, reduce(torch.maximum, padded), rows, of_folds)
    with_calls = [part.calls for part in statistics if part.calls]
    first = min(with_calls, key=lambda calls: min(float(each.priority.min()) for each in calls.values()), default={})
    alike = [calls for calls in with_calls if shapes_of(calls) == shapes_of(first)]  # texts may differ in length
    calls = {name: lowest([calls[name] for calls in alike], CALLS) for name in first}
    others = dict.fromkeys(name for each in statistics for name in each.parts)
    merged = {name: merge([each.parts[name] for each in statistics if name in each.parts]) for name in others}
    return Statistics(layers, calls, highest([part.peaks for part in statistics]), merged)


def highest(peaks: Sequence[Mapping[str, Peak]]) -> dict[str, Peak]:
    """Return the largest peak of each part of the pipeline, by name, among several calibration runs."""
    parts = dict.fromkeys(part for each in peaks for part in each)
    return {part: max((each[part] for each in peaks if part in each), key=lambda peak: peak.largest) for part in parts}


def shapes_of(calls: Mapping[str, Sample]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input of one call of the network, by the input's name."""
    return {name: tuple(sample.values.shape[1:]) for name, sample in calls.items()}
