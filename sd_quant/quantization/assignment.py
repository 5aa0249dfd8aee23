"""Layer assignments: how each layer is quantized, with all of its scales, or why it stays in high precision.

``derivation`` computes them. The torch simulation, the ONNX export and ``layers.csv`` read them and decide nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.formats.blocks import per_channel
from sd_quant.quantization.rotation import rotated

WITHOUT_WEIGHTS = ("norm", "attention")  # roles of assignments without a quantized weight
SMALLEST_TOKEN = 2.0**-14  # lower limit of a token's largest magnitude: fp16's smallest normal number
FIXED_ALPHA = 0.8  # NeMo and ModelOpt recommend it for SDXL; alpha=auto is compared with it


@dataclass(frozen=True, slots=True)
class LayerAssignment:
    """How one layer is quantized: formats, ranges (amax), and changes before quantization, such as smoothing.

    Attentions have an assignment of role ``attention``, without a weight, if the recipe has a format for attention;
    norms have one of role ``norm`` if they absorb the smoothing factors of a linear.
    """

    name: str
    role: str
    weight_shape: tuple[int, ...]
    format: str | None = None  # of the weight; None: high precision
    activation_format: str | None = None  # of the input; None: high precision
    reason: str | None = None  # why the layer stays in high precision
    weight_axis: int | None = None  # 0: one range per output channel of the weight; None: one in all
    # Ranges after smoothing. A format with blocks measures ranges itself, and needs these for a global scale only.
    weight_amax: Tensor | None = None  # fp32, [out_channels] with weight_axis 0, else [1]
    activation_amax: float | None = None
    per_token: bool = False  # each token is divided by its largest magnitude first, and ``activation_amax`` is 1
    rotation: int = 0  # channels of input and weight that are rotated together before quantization, see ``rotation``
    activation_zero_point: int = 0  # the integer to which zero is quantized, see ``convolutions``
    bias: Tensor | None = None  # fp32 [out_channels] of a shifted convolution: its own plus its response to the shift
    pre_quant_scale: Tensor | None = None  # fp32 [in_features]; divides the weight and multiplies the input
    folded_into: str | None = None  # the module that absorbed pre_quant_scale; None: the graph multiplies the input
    output_scale: Tensor | None = None  # fp32 [out_channels], absorbed smoothing: multiplies this weight and bias
    output_shift: Tensor | None = None  # fp32 [out_channels], absorbed by a modulation: added to this bias afterwards
    rounded: tuple[Tensor, ...] | None = None  # quantized weight [out, in] and its scales, if ``rounding`` chose them
    low_rank: tuple[Tensor, Tensor] | None = None  # fp16 up [out, rank] and down [rank, in], see ``low_rank``
    # Ranges of query, key and value as multiplied, each fp32 [1]; in integers also of the scores, each [heads].
    attention_amax: tuple[Tensor, ...] | None = None
    key_mean: Tensor | None = None  # fp32 [heads, head_width], subtracted from the keys of an attention in integers
    alpha: float | None = None
    output_error: float | None = None  # on the sampled inputs, relative to the norm of the output, see ``row_chunks``
    fixed_alpha_error: float | None = None  # output_error with FIXED_ALPHA, where alpha was searched

    def weight_scales(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the scales of a weight that is ``rewritten`` and rotated: [out, 1...], [1, 1...] or one per block."""
        return FORMATS[self.format].scales(weight, per_channel(self.weight_amax, weight))

    def codes_and_scales(self, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rotate and quantize a weight [out, in...] (from ``rewritten``): quantized values in its shape, and scales."""
        if self.rounded is not None:
            static = self.weight_scale
            scales = self.rounded[1:] if static is None else (per_channel(static, weight),)
            return self.rounded[0].view(weight.shape), scales
        weight = rotated(weight, self.rotation)
        scales = self.weight_scales(weight)
        return FORMATS[self.format].quantize(weight, *scales), scales

    def rounded_weight(self, weight: Tensor) -> Tensor:
        """Rotate a weight [out, in...] (from ``rewritten``), quantize, dequantize and rotate it back, fp32."""
        codes, scales = self.codes_and_scales(weight)
        return rotated(FORMATS[self.format].dequantize(codes, *scales), self.rotation)

    def rounded_input(self, x: Tensor) -> Tensor:
        """Rotate a smoothed input [..., in], quantize, dequantize and rotate it back, fp32."""
        amax = torch.tensor(self.activation_amax, device=x.device)
        return rounded_by(self.activation_format, x, amax, self.per_token, self.rotation, self.shift)

    def activation_scales(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the scales of an input [..., in]: one scale, or one per block."""
        return FORMATS[self.activation_format].scales(x, torch.tensor(self.activation_amax, device=x.device))

    @property
    def weight_scale(self) -> Tensor | None:
        """Static scales of the weight, fp32 [out_channels] or [1]; None for a weight in blocks or high precision."""
        if self.format is None or not FORMATS[self.format].static_scale:
            return None
        if self.rounded:
            return self.rounded[1].flatten()
        return FORMATS[self.format].scales(self.weight_amax, self.weight_amax)[0]

    @property
    def activation_scale(self) -> float | None:
        """The static scale of the layer's input; None for an input in blocks or in high precision."""
        static = self.activation_format is not None and FORMATS[self.activation_format].static_scale
        return self.activation_scales(torch.empty(0))[0].item() if static and self.activation_amax else None

    @property
    def shift(self) -> float:
        """The constant subtracted from the input before quantization, a multiple of the scale, so zero is exact."""
        return -self.activation_zero_point * self.activation_scale if self.activation_zero_point else 0.0

    @property
    def scales_product(self) -> bool:
        """Whether a dynamic scale per token multiplies the output (8-bit inputs), not the input (4-bit inputs)."""
        return self.per_token and FORMATS[self.activation_format].bits == 8

    @property
    def rank(self) -> int:
        """The rank of the low-rank branch; 0 without one."""
        return 0 if self.low_rank is None else len(self.low_rank[1])

    @property
    def attention_products(self) -> tuple[str, ...]:
        """The names of a quantized attention's two matrix products; empty for every other layer."""
        return (f"{self.name}.scores", f"{self.name}.values") if self.attention_amax is not None else ()

    @property
    def multiplies(self) -> bool:
        """Whether the graph multiplies the input of this layer by ``pre_quant_scale``."""
        return self.pre_quant_scale is not None and self.folded_into is None

    @property
    def smoothing(self) -> str:
        """Where ``pre_quant_scale`` is applied, as ``layers.csv`` prints it; empty for a layer without smoothing."""
        if self.pre_quant_scale is None:
            return ""
        return f"folded into {self.folded_into}" if self.folded_into else "multiplication"

    def row(self) -> dict[str, object]:
        """Return this layer's row of the report ``layers.csv``: values by column name."""
        smoothing, weight_scale = self.pre_quant_scale, self.weight_scale
        return {
            "name": self.name,
            "role": self.role,
            "weight_shape": "x".join(map(str, self.weight_shape)),
            "format": self.format or self.activation_format or "high precision",
            "activation_format": self.activation_format or "",
            "rank": self.rank or None,
            "per_token": self.per_token or None,
            "rotation": self.rotation or None,
            "reason": self.reason or "",
            "alpha": self.alpha,
            "smoothing": self.smoothing,
            "output_error": self.output_error,
            f"output_error_alpha_{FIXED_ALPHA}": self.fixed_alpha_error,
            "activation_scale": self.activation_scale,
            "activation_zero_point": self.activation_zero_point if self.activation_scale else None,
            "weight_scale_min": None if weight_scale is None else weight_scale.min().item(),
            "weight_scale_max": None if weight_scale is None else weight_scale.max().item(),
            "pre_quant_scale_min": None if smoothing is None else smoothing.min().item(),
            "pre_quant_scale_max": None if smoothing is None else smoothing.max().item(),
        }


def weights_alone(assignment: Mapping[str, LayerAssignment]) -> dict[str, LayerAssignment]:
    """Return the assignment with the same quantized weights, but inputs and attention in high precision (W8A16)."""
    without: dict[str, Any] = {
        "activation_format": None, "activation_zero_point": 0, "per_token": False,
        "bias": None, "attention_amax": None, "key_mean": None,
    }  # fmt: skip
    return {name: replace(layer, **without) for name, layer in assignment.items()}


def rounded_by(fmt: str, x: Tensor, amax: Tensor, per_token: bool, rotation: int, shift: float = 0.0) -> Tensor:
    """Rotate ``x`` [..., in], fake-quantize it with range ``amax``, rotate back; fp32. See ``LayerAssignment``."""
    x = rotated(x.float(), rotation)
    largest = token_amax(x) if per_token else 1.0
    return rotated(largest * (fake_quantize(FORMATS[fmt], x / largest - shift, amax) + shift), rotation)


def token_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each token of ``x`` [..., tokens, in], at least 2^-14: [..., tokens, 1]."""
    return x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_TOKEN)


def rewritten(parameter: Tensor, layer: LayerAssignment) -> Tensor:
    """Smooth a checkpoint's weight [out, ...] or bias [out]; subtract the low-rank branch from a weight. fp32."""
    parameter, is_weight = parameter.float(), parameter.ndim > 1
    if layer.pre_quant_scale is not None and is_weight:
        parameter = parameter / layer.pre_quant_scale
    if layer.output_scale is not None:
        parameter = parameter * per_channel(layer.output_scale, parameter)
    if layer.output_shift is not None and not is_weight:
        parameter = parameter + layer.output_shift
    if layer.low_rank is not None and is_weight:
        up, down = layer.low_rank
        parameter = torch.addmm(parameter, up.float(), down.float(), alpha=-1)
    return parameter
