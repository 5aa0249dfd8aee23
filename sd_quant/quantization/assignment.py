"""The assignment: one row per layer, saying how it is quantized or why it is not. Everything downstream reads it.

The torch simulation, the ONNX export and the layer report decide nothing themselves. ``derivation`` makes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.int8 import per_channel

FIXED_ALPHA = 0.8  # what NeMo and ModelOpt recommend for SDXL; alpha=auto is compared with it
PIECE = 2**18  # numbers of a weight that are worked on at a time


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """How one layer is computed. ``format``, that of its weight, None means high precision, and ``reason`` says why.

    ``activation_format`` None leaves the input in high precision. ``weight_amax`` fp32, [out_channels] with
    ``weight_axis`` 0 and else [1], and ``activation_amax`` are ranges after smoothing; formats with a scale per block
    take no range. ``low_rank`` (up [out, rank], down [rank, in], fp16) is a product that is taken out of the weight and
    computed beside it. An attention's two matrix products have a row of role ``attention``, without weights, and
    ``attention_amax`` of query, key and value as they are multiplied. ``pre_quant_scale`` fp32
    [in_features] divides the weight; the input is multiplied by it, in the graph or, with ``folded_into``, in the
    module of that name. ``output_scale`` fp32 [out_channels] is what this module takes over from the linear behind it:
    it multiplies weight and bias. Norms have a row only when they have one.
    ``output_error`` is that of the layer's output on its sampled inputs, relative to the output's norm;
    ``accumulated_error`` the same over all denoising steps, and ``fixed_alpha_error`` what that would be with alpha
    ``FIXED_ALPHA``, where alpha was searched.
    """

    name: str
    role: str
    weight_shape: tuple[int, ...]
    format: str | None = None
    activation_format: str | None = None
    reason: str | None = None
    weight_axis: int | None = None
    weight_amax: Tensor | None = None
    activation_amax: float | None = None
    pre_quant_scale: Tensor | None = None
    folded_into: str | None = None
    output_scale: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    attention_amax: tuple[float, float, float] | None = None
    alpha: float | None = None
    output_error: float | None = None
    accumulated_error: float | None = None
    fixed_alpha_error: float | None = None

    def weight_scales(self, weight: Tensor) -> tuple[Tensor, ...]:
        """As the format stores them, of a rewritten weight [out, in...]: [out, 1...], [1, 1...] or one per block.

        Blocks lie along the inputs of an output, those of a convolution in the order of its weight.
        """
        return FORMATS[self.format].scales(weight, per_channel(self.weight_amax, weight))

    def activation_scales(self, x: Tensor) -> tuple[Tensor, ...]:
        """Of an input [..., in]: one, or one per block."""
        return FORMATS[self.activation_format].scales(x, torch.tensor(self.activation_amax, device=x.device))

    @property
    def weight_scale(self) -> Tensor | None:
        """fp32 [out_channels] or [1] where ranges decide, None where the scales are those of blocks."""
        static = self.format is not None and FORMATS[self.format].block is None
        return FORMATS[self.format].scales(self.weight_amax, self.weight_amax)[0] if static else None

    @property
    def activation_scale(self) -> float | None:
        """The one of all inputs, None where there is none or where they are those of blocks."""
        static = self.activation_format is not None and FORMATS[self.activation_format].block is None
        return self.activation_scales(torch.empty(0))[0].item() if static and self.activation_amax else None

    @property
    def multiplies(self) -> bool:
        """The graph has a multiplication before this layer."""
        return self.pre_quant_scale is not None and self.folded_into is None

    @property
    def smoothing(self) -> str:
        """In words: where the input is multiplied by ``pre_quant_scale``."""
        if self.pre_quant_scale is None:
            return ""
        return f"folded into {self.folded_into}" if self.folded_into else "multiplication"

    def row(self) -> dict[str, object]:
        """The row of ``layers.csv``."""
        smoothing, weight_scale = self.pre_quant_scale, self.weight_scale
        return {
            "name": self.name,
            "role": self.role,
            "weight_shape": "x".join(map(str, self.weight_shape)),
            "format": self.format or self.activation_format or "high precision",
            "activation_format": self.activation_format or "",
            "rank": None if self.low_rank is None else len(self.low_rank[1]),
            "reason": self.reason or "",
            "alpha": self.alpha,
            "smoothing": self.smoothing,
            "output_error": self.output_error,
            "accumulated_error": self.accumulated_error,
            f"accumulated_error_alpha_{FIXED_ALPHA}": self.fixed_alpha_error,
            "activation_scale": self.activation_scale,
            "weight_scale_min": None if weight_scale is None else weight_scale.min().item(),
            "weight_scale_max": None if weight_scale is None else weight_scale.max().item(),
            "pre_quant_scale_min": None if smoothing is None else smoothing.min().item(),
            "pre_quant_scale_max": None if smoothing is None else smoothing.max().item(),
        }


def rewritten(parameter: Tensor, layer: LayerAssignment) -> Tensor:
    """A weight [out, ...] or bias [out] with smoothing in it and without the low-rank branch, fp32, not yet rounded."""
    parameter = parameter.float()
    if layer.pre_quant_scale is not None and parameter.ndim > 1:
        parameter = parameter / layer.pre_quant_scale
    if layer.output_scale is not None:
        parameter = parameter * per_channel(layer.output_scale, parameter)
    if layer.low_rank is not None and parameter.ndim > 1:
        up, down = layer.low_rank
        parameter = torch.addmm(parameter, up.float(), down.float(), alpha=-1)
    return parameter


def rows_a_piece(weight: Tensor) -> int:
    return max(1, PIECE // weight[0].numel())


def pieces(weight: Tensor, layer: LayerAssignment) -> Iterator[tuple[Tensor, LayerAssignment]]:
    """Some rows of the weight at a time, flat, with the layer as it is for them.

    What happens to a weight happens row by row once its range is known, and a piece stays in the processor's cache: on
    the full-size UNet this is three times as fast as whole weights, and takes a third of the memory.
    """
    rows = rows_a_piece(weight)
    for start in range(0, len(weight), rows):
        piece = weight[start : start + rows]
        yield piece.flatten(1) if piece.ndim > 1 else piece, some_rows(layer, slice(start, start + rows))


def some_rows(layer: LayerAssignment, rows: slice) -> LayerAssignment:
    """The layer as it is for these outputs alone."""
    per_row = layer.weight_axis == 0 and layer.weight_amax is not None
    return replace(
        layer,
        output_scale=None if layer.output_scale is None else layer.output_scale[rows],
        low_rank=None if layer.low_rank is None else (layer.low_rank[0][rows], layer.low_rank[1]),
        weight_amax=layer.weight_amax[rows] if per_row else layer.weight_amax,
    )
