"""How far a quantized text encoder moves the embeddings of a text.

An encoder changes images as another prompt would, so their distance does not say how well it computes. The angle
between the embeddings does, token by token: the denoiser's cross-attention reads tokens one by one, and its norms take
their length away. The first token, the same in every text and often far longer, would hide all others in a mean.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sd_quant.numbers import relative_error


def moved(full: Tensor, quantized: Tensor) -> dict[str, Any]:
    """The record's ``Moved`` for an output in full precision and quantized.

    [B, T, C] are tokens, without those of zeros, which pad a text; [B, C] is one for each text. Other outputs, such as
    pixels, have no cosines.
    """
    full, quantized = full.float().cpu(), quantized.float().cpu()
    found: dict[str, Any] = {"relative_error": relative_error(full, quantized)}
    if full.ndim not in (2, 3):
        return found
    cosines = F.cosine_similarity(full, quantized, dim=-1)
    if full.ndim == 3:
        found["first_token"] = cosines[:, 0].mean().item()
        cosines = cosines[:, 1:][full[:, 1:].abs().amax(-1) > 0]
    if cosines.numel():
        found |= {"cosine": cosines.mean().item(), "worst": cosines.min().item()}
    return found
