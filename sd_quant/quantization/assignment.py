"""The assignment: one row per layer, saying how it is quantized or why it is not. Everything downstream reads it.

Deriving it is a pure function of the statistics, the weights and the recipe, so another quant_level or alpha costs no
calibration. The torch simulation, the ONNX export and the layer report decide nothing themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.calibration.statistics import LayerStatistics
from sd_quant.errors import SdQuantError
from sd_quant.quantization.int8 import scale_of
from sd_quant.quantization.levels import reason_kept
from sd_quant.quantization.percentile import percentile_amax
from sd_quant.quantization.smoothing import pre_quant_scale


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a user chooses. Ranges are checked where the configuration is read."""

    quant_level: float
    alpha: float
    percentile: float
    collect_method: str


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """How one layer is computed. ``format`` None means high precision, and ``reason`` says why.

    ``weight_scale`` [out_channels] and ``pre_quant_scale`` [in_features] are fp32, representable in fp16.
    """

    name: str
    role: str
    weight_shape: tuple[int, ...]
    format: str | None = None
    reason: str | None = None
    weight_axis: int | None = None
    weight_scale: Tensor | None = None
    activation_scale: float | None = None
    pre_quant_scale: Tensor | None = None
    alpha: float | None = None

    def row(self) -> dict[str, object]:
        """The row of ``layers.csv``."""
        smoothing, weight = self.pre_quant_scale, self.weight_scale
        return {
            "name": self.name,
            "role": self.role,
            "weight_shape": "x".join(map(str, self.weight_shape)),
            "format": self.format or "high precision",
            "reason": self.reason or "",
            "alpha": self.alpha,
            "activation_scale": self.activation_scale,
            "weight_scale_min": None if weight is None else weight.min().item(),
            "weight_scale_max": None if weight is None else weight.max().item(),
            "pre_quant_scale_min": None if smoothing is None else smoothing.min().item(),
            "pre_quant_scale_max": None if smoothing is None else smoothing.max().item(),
        }


def assign_layer(name: str, role: str, weight: Tensor, statistics: LayerStatistics, recipe: Recipe) -> LayerAssignment:
    """INT8 for one layer: smoothing and a per-tensor input for linears, the percentile calibrator for convolutions."""
    weight = weight.float()
    if statistics.kind == "conv":
        smoothing = None
        activation_amax = percentile_amax(statistics.amax, recipe.percentile, recipe.collect_method)
    else:
        channel_amax = statistics.amax.amax(dim=0)
        # rounded to fp16, which is how the graph stores it, before the weight is divided by it
        smoothing = pre_quant_scale(channel_amax, weight.abs().amax(dim=0), recipe.alpha).half().float()
        weight = weight / smoothing
        activation_amax = (channel_amax * smoothing).max().item()
    if activation_amax == 0:
        raise SdQuantError(
            f"layer {name} only ever saw zeros during calibration, so its input has no scale; "
            "calibrate with more prompts or a lower quant_level"
        )
    try:
        weight_scale = scale_of(weight.flatten(1).abs().amax(dim=1))
        activation_scale = scale_of(torch.tensor(activation_amax)).item()
    except OverflowError as error:
        raise SdQuantError(
            f"layer {name} cannot be quantized: {error}; keep it out with a lower quant_level"
        ) from error
    return LayerAssignment(
        name=name,
        role=role,
        weight_shape=tuple(weight.shape),
        format="int8",
        weight_axis=0,
        weight_scale=weight_scale,
        activation_scale=activation_scale,
        pre_quant_scale=smoothing,
        alpha=None if smoothing is None else recipe.alpha,
    )


def derive(
    roles: Mapping[str, str],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
) -> dict[str, LayerAssignment]:
    """The assignment of every layer in ``roles`` (name to role), reading one weight at a time.

    Raises SdQuantError when a layer to quantize was never reached by calibration or saw only zeros.
    """
    assignment = {}
    for name, role in roles.items():
        weight = weight_of(name)
        reason = reason_kept(role, recipe.quant_level)
        if reason is not None:
            assignment[name] = LayerAssignment(name, role, tuple(weight.shape), reason=reason)
        elif name not in statistics:
            raise SdQuantError(
                f"layer {name} was never reached during calibration, so it has no range to quantize with"
            )
        else:
            assignment[name] = assign_layer(name, role, weight, statistics[name], recipe)
    return assignment
