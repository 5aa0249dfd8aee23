"""The product of an input in high precision with a weight of E2M1 codes on a GPU, dequantized while it multiplies.

Weights stay in four bits in memory: what is read is a quarter of fp16's, and nothing is written. E2M1 is a part of
fp16: its three bits of magnitude, put where fp16 has the lowest bits of its exponent and the highest of its mantissa,
are the same number times 2^-14, so that a code costs two shifts and a product with its scale.

The road not taken is to dequantize the whole weight first, as ``native.WeightOnly`` does elsewhere: it writes and reads
every number in fp16 once more, and multiplies with cuBLAS's tuned product. Many rows of inputs favour that, few favour
this kernel; no GPU has measured where they meet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sd_quant.simulation.product_kernel import TOO_MANY, timed

E2M1_IN_FP16 = tl.constexpr(2.0**14)


def _config(rows: int, outputs: int, inputs: int, stages: int, warps: int) -> triton.Config:
    blocks = {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs}
    return triton.Config(blocks, num_stages=stages, num_warps=warps)


CONFIGS = [_config(128, 128, 64, 3, 8), _config(64, 128, 64, 4, 4), _config(16, 128, 128, 4, 4)]


@triton.autotune(CONFIGS, key=["rows", "outputs", "inputs"], do_bench=timed)
@triton.jit
def weight_kernel(
    x, codes, scale, bias, output, rows, outputs, inputs,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``output`` [rows, outputs]. BLOCK_INPUTS is a multiple of BLOCK, which divides ``inputs``."""
    program, row_blocks = tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS)
    row = program % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = program // row_blocks * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    for first in range(0, inputs, BLOCK_INPUTS):
        here = first + tl.arange(0, BLOCK_INPUTS)
        a = tl.load(
            x + row[:, None] * inputs + here[None, :], mask=(row < rows)[:, None] & (here < inputs)[None, :], other=0.0
        )
        byte = first // 2 + tl.arange(0, BLOCK_INPUTS // 2)
        pairs = tl.load(
            codes + column[:, None] * (inputs // 2) + byte[None, :],
            mask=(column < outputs)[:, None] & (byte < inputs // 2)[None, :], other=0,
        ).to(tl.uint16)  # fmt: skip
        nibbles = tl.interleave(pairs & 0xF, pairs >> 4)  # the first code is in the low half of its byte
        numbers = (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32)
        block = first // BLOCK + tl.arange(0, BLOCK_INPUTS // BLOCK)
        factor = tl.load(
            scale + column[:, None] * (inputs // BLOCK) + block[None, :],
            mask=(column < outputs)[:, None] & (block < inputs // BLOCK)[None, :], other=0.0,
        ).to(tl.float32) * E2M1_IN_FP16  # fmt: skip
        in_blocks = numbers.reshape(BLOCK_OUTPUTS, BLOCK_INPUTS // BLOCK, BLOCK) * factor[:, :, None]
        b = in_blocks.reshape(BLOCK_OUTPUTS, BLOCK_INPUTS).to(x.dtype.element_ty)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < outputs, other=0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * outputs + column[None, :], sums.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outputs)[None, :],
    )  # fmt: skip


@torch.library.custom_op("sd_quant::weight_product", mutates_args=())
def weight_product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """``x`` [M, K] in any float dtype by the weight of packed E2M1 ``codes``, uint8 [N, K / 2]: [M, N] in x's dtype.

    ``scale`` [N, blocks] has one scale for each of as many equal blocks of a row. Weights are rounded to x's dtype, as
    they are where they are dequantized first; sums are fp32. Raises ValueError for tensors of 2^31 numbers and more.
    """
    (rows, inputs), (outputs, blocks) = x.shape, scale.shape
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if max(x.numel(), output.numel(), outputs * inputs) >= TOO_MANY:
        raise ValueError(f"a layer of {max(x.numel(), output.numel())} numbers is too large; use a smaller batch")

    def grid(config: dict) -> tuple[int]:
        return (triton.cdiv(rows, config["BLOCK_ROWS"]) * triton.cdiv(outputs, config["BLOCK_OUTPUTS"]),)

    with torch.cuda.device_of(x):
        weight_kernel[grid](
            x.contiguous(), codes, scale, bias, output, rows, outputs, inputs,
            BLOCK=inputs // blocks, HAS_BIAS=bias is not None,
        )  # fmt: skip
    return output


@weight_product.register_fake
def _(x, codes, scale, bias):
    return x.new_empty((x.shape[0], scale.shape[0]))
