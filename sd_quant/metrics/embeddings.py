"""Measure how much quantization changes a text encoder's embeddings.

A quantized text encoder changes images as another prompt would, so image distances do not show its accuracy. The cosine
of embeddings, token by token, does: cross-attention reads single tokens, and normalization removes their length. The
first token, which is the same in all texts and often far longer, would dominate a mean, and is reported separately.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sd_quant.numbers import relative_error


def moved(full: Tensor, quantized: Tensor) -> dict[str, Any]:
    """Build the record's entry ``Moved``: relative error and cosines of ``quantized`` outputs against ``full`` ones.

    Outputs [B, T, C] are tokens, of which zero vectors are padding and left out; [B, C] is one vector for each text.
    Outputs of other shapes, such as pixels, get no cosines.
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
