"""A network as its assignment rewrites it before weights are rounded: smoothed weights, quantized attention products.

Two things are built on top, both of which round the weights: ModelOpt's quantizers (``modelopt``) and layers that
multiply codes (``native``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS


@torch.no_grad()
def rewrite(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> None:
    """Smooth weights and norms of ``module`` in place, without rounding them, and quantize its attentions' products."""
    for layer in assignment.values():
        target = module.get_submodule(layer.name)
        if layer.role != "attention":
            for parameter in target.parameters(recurse=False):
                parameter.copy_(rewritten(parameter, layer))
        elif layer.activation_format is not None:
            target.set_processor(QuantizedAttention(layer))


class QuantizedAttention:
    """An attention processor of diffusers whose two matrix products, QK^T and softmax times V, read quantized inputs.

    A softmax lies in 0..1, so its range is 1 without calibration. (ModelOpt gives it the scale 1, which in E4M3 turns
    what is below 2^-10 into zero: half of everything from about 1000 tokens on.)
    """

    def __init__(self, layer: LayerAssignment):
        """Keep the scales as Python floats, so that no call waits for a GPU and a CUDA graph can record it."""
        self.fmt = FORMATS[layer.activation_format]
        self.scales = [self.fmt.scales(torch.empty(0), torch.tensor(amax))[0].item() for amax in layer.attention_amax]
        self.scales.append(self.fmt.scales(torch.empty(0), torch.tensor(1.0))[0].item())

    def __call__(self, attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_) -> Tensor:
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projections = attention.to_q(hidden_states), attention.to_k(text), attention.to_v(text)
        query, key, value = (attention.head_to_batch_dim(projection) for projection in projections)
        root = query.shape[-1] ** -0.25

        def fake_quantized(x: Tensor, number: float) -> Tensor:
            scale = torch.full((), number, device=x.device)
            return self.fmt.dequantize(self.fmt.quantize(x, scale), scale).to(x)

        query_scale, key_scale, value_scale, softmax_scale = self.scales
        scores = fake_quantized(query * root, query_scale) @ fake_quantized(key * root, key_scale).transpose(1, 2)
        mixed = fake_quantized(scores.softmax(-1), softmax_scale) @ fake_quantized(value, value_scale)
        return attention.to_out[1](attention.to_out[0](attention.batch_to_head_dim(mixed)))
