"""A network with an assignment's smoothing in its weights and quantized products in its attentions, not yet rounded.

What rounds the weights comes on top: ModelOpt's quantizers (``modelopt``) or layers that multiply codes (``native``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS


@torch.no_grad()
def rewrite(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> None:
    """In place: weights and norms with smoothing in them, not yet rounded, and attention with quantized products."""
    for layer in assignment.values():
        target = module.get_submodule(layer.name)
        if layer.role != "attention":
            for parameter in target.parameters(recurse=False):
                parameter.copy_(rewritten(parameter, layer))
        elif layer.activation_format is not None:
            target.set_processor(QuantizedAttention(layer))


class QuantizedAttention:
    """A processor of diffusers' attention whose two matrix products take quantized numbers.

    What a softmax returns lies in 0..1, so its range is 1 without calibration. (ModelOpt gives it the scale 1, which in
    E4M3 turns what is below 2^-10 into zero: half of everything from about 1000 tokens on.)
    """

    def __init__(self, layer: LayerAssignment):
        """Scales are numbers of Python's: nothing waits for a GPU in a call, and a graph of CUDA can record it."""
        self.form = FORMATS[layer.activation_format]
        self.scales = [self.form.scales(torch.empty(0), torch.tensor(amax))[0].item() for amax in layer.attention_amax]
        self.scales.append(self.form.scales(torch.empty(0), torch.tensor(1.0))[0].item())

    def __call__(self, attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_) -> Tensor:
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        found = attention.to_q(hidden_states), attention.to_k(text), attention.to_v(text)
        query, key, value = (attention.head_to_batch_dim(part) for part in found)
        root = query.shape[-1] ** -0.25

        def near(x: Tensor, number: float) -> Tensor:
            scale = torch.full((), number, device=x.device)
            return self.form.dequantize(self.form.quantize(x, scale), scale).to(x)

        of_query, of_key, of_value, of_softmax = self.scales
        scores = near(query * root, of_query) @ near(key * root, of_key).transpose(1, 2)
        mixed = near(scores.softmax(-1), of_softmax) @ near(value, of_value)
        return attention.to_out[1](attention.to_out[0](attention.batch_to_head_dim(mixed)))
