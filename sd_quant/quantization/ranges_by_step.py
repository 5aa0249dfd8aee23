"""Magnitudes of a layer's inputs at each denoising step, beside the one range that a recipe has for all steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plots read QUARTILES without torch
    from sd_quant.quantization.assignment import LayerAssignment
    from sd_quant.quantization.statistics import LayerStatistics

QUARTILES = {"least": 0.0, "first_quartile": 0.25, "median": 0.5, "third_quartile": 0.75, "largest": 1.0}


def ranges_by_step(
    assignment: Mapping[str, LayerAssignment], statistics: Mapping[str, LayerStatistics]
) -> list[dict[str, object]]:
    """A row for each denoising step of each layer whose input is quantized: quartiles of the magnitudes.

    Quartiles are over a linear's channels, each the largest of all prompts, or over a convolution's prompts. ``kept``
    is the largest magnitude without clipping; None for an input that is smoothed, rotated or scaled at run time.
    """
    rows: list[dict[str, object]] = []
    for name, layer in assignment.items():
        if layer.activation_format is None or name not in statistics:
            continue
        seen = statistics[name].amax if statistics[name].kind == "linear" else statistics[name].amax.T
        levels = seen.float().new_tensor(list(QUARTILES.values()))
        as_it_is = layer.pre_quant_scale is None and layer.activation_scale and not (layer.per_token or layer.rotation)
        kept = layer.activation_amax + abs(layer.shift) if as_it_is else None  # type: ignore[operator]
        for step, numbers in enumerate(seen.float().quantile(levels, dim=1).T.tolist(), start=1):
            rows.append({"name": name, "step": step, **dict(zip(QUARTILES, numbers, strict=True)), "kept": kept})
    return rows
