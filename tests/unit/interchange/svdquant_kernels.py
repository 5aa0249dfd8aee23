"""comfy-kitchen's SVDQuant in place of nunchaku's kernels, which need a GPU: on tensors in nunchaku's tiles, fp32."""

import pytest
import torch
from torch import Tensor

from sd_quant.interchange import nunchaku_tiles as tiles
from sd_quant.interchange.nunchaku_linears import SHIFT


def svdquant():
    return pytest.importorskip("comfy_kitchen.backends.eager.svdquant")


def quantized_inputs(x: Tensor, down: Tensor, smooth: Tensor, size: int, unsigned: bool = False) -> tuple:
    """Codes and scales of the inputs, and their product with ``down``, which reads them as they come."""
    natural = tiles.down(down.shape[1], down.shape[0]).natural(down).T
    shifted = x + SHIFT if unsigned else x
    factors = tiles.vector_from_tiles(smooth)
    return svdquant().quantize_svdquant_w4a4(shifted, factors, natural, size, unsigned, lora_x=x)


def product(inputs: tuple, weight: Tensor, wscales: Tensor, up: Tensor, bias: Tensor | None, unsigned: bool = False):
    codes, scales, lora = inputs
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    packed = svdquant()._pack_int4_row_major(tiles.unpacked(tiles.codes(rows, columns), weight).view(torch.int8))
    natural = tiles.scales(rows, columns // 64).natural(wscales).T.contiguous()
    bias = None if bias is None else tiles.vector_from_tiles(bias)
    up = tiles.up(rows, up.shape[1]).natural(up)
    return svdquant().scaled_mm_svdquant_w4a4(codes, packed, scales, natural, lora, up, bias, unsigned)
