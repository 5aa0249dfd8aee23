"""A Triton kernel for FP8 matrix products and convolutions on a GPU, with scales, bias and cast fused.

torch has no convolution of FP8. Here a convolution is an implicit GEMM, which unfolds nothing in memory, and a linear
is a 1 x 1 convolution.

Triton comes with every torch for NVIDIA GPUs; its launcher requires a C compiler and Python's headers, once.
Alternatives not taken: CUTLASS, better tuned but with a build system; and a kernel that dequantizes 4-bit weights while
it multiplies, on an H200 1.6 to 4 times slower than torch's product of dequantized weights, except for a few rows of
inputs. INT8 is torch's: by such a kernel SDXL's UNet was 0.64 times as fast as in compiled fp16 on an H100.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
import triton.testing
from torch import Tensor

TOO_MANY = 2**31  # elements of a tensor: the kernels' indices have 32 bits


def tile(rows: int, outputs: int, inputs: int, stages: int, warps: int) -> triton.Config:
    """Build a Triton configuration: rows, outputs and inputs of one program's tile, pipeline stages and warps."""
    blocks = {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs}
    return triton.Config(blocks, num_stages=stages, num_warps=warps)


PRODUCT_TILES = [tile(128, 256, 64, 4, 8), tile(128, 128, 128, 3, 8), tile(128, 128, 64, 4, 4), tile(64, 128, 64, 4, 4)]


def tile_time(call, quantiles):
    """Benchmark as Triton's autotuner does, with a fifth of its repetitions: SDXL has some forty shapes to tune."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.jit
def tile_of_program(
    rows, outputs, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr
):  # fmt: skip
    """Return the row and column indices of this program's tile of an output [rows, outputs].

    Consecutive programs form groups that read the same columns of the weight, which then stay in the L2 cache.
    """
    program, columns = tl.program_id(0), tl.cdiv(outputs, BLOCK_OUTPUTS)
    group = program // (GROUP * columns)
    in_group = min(tl.cdiv(rows, BLOCK_ROWS) - group * GROUP, GROUP)
    row_block = group * GROUP + (program % (GROUP * columns)) % in_group
    column_block = (program % (GROUP * columns)) // in_group
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    return row, column


@triton.autotune(PRODUCT_TILES, key=["rows", "outputs", "channels", "KERNEL_HEIGHT"], do_bench=tile_time)
@triton.jit
def product_kernel(
    codes, weight, scale, bias, output,
    rows, outputs, channels, height, width, output_height, output_width,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``output`` [rows, outputs], with one row per output pixel, as an implicit GEMM."""
    row, column = tile_of_program(rows, outputs, GROUP, BLOCK_ROWS, BLOCK_OUTPUTS)
    channel = tl.arange(0, BLOCK_INPUTS)
    image, pixel = row // (output_height * output_width), row % (output_height * output_width)
    top = pixel // output_width * STRIDE - PADDING
    left = pixel % output_width * STRIDE - PADDING
    first = ((image * height + top) * width + left) * channels  # of the window; outside the image it is masked
    inputs = KERNEL_HEIGHT * KERNEL_WIDTH * channels

    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    blocks = tl.cdiv(channels, BLOCK_INPUTS)
    # one loop over taps and channels, so that it is pipelined
    for step in range(KERNEL_HEIGHT * KERNEL_WIDTH * blocks):
        tap = step // blocks
        down, across = tap // KERNEL_WIDTH * DILATION, tap % KERNEL_WIDTH * DILATION
        here = step % blocks * BLOCK_INPUTS + channel
        inside = (top + down >= 0) & (top + down < height) & (left + across >= 0) & (left + across < width)
        place = first + (down * width + across) * channels
        a = tl.load(
            codes + place[:, None] + here[None, :],
            mask=(inside & (row < rows))[:, None] & (here < channels)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weight + column[None, :] * inputs + (tap * channels + here)[:, None],
            mask=(column < outputs)[None, :] & (here < channels)[:, None], other=0.0,
        )  # fmt: skip
        sums = tl.dot(a, b, sums, out_dtype=tl.float32)

    result = sums * tl.load(scale + column, mask=column < outputs, other=0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column < outputs, other=0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * outputs + column[None, :], result.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outputs)[None, :],
    )  # fmt: skip


@torch.library.custom_op("sd_quant::product", mutates_args=())
def product(
    codes: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, geometry: Sequence[int], dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Convolve a quantized input ``codes`` [B, H, W, C] with ``weight`` [N, KH, KW, C]: [B, OH, OW, N] in ``dtype``.

    Both are float8_e4m3fn, with fp32 sums. ``scale``, fp32 [N], is the product of input scale and weight scale;
    ``bias`` is [N]. ``geometry`` is stride, padding and dilation. Raises ValueError for tensors of 2^31 elements and
    more.
    """
    (_, height, width, channels), (outputs, kernel_height, kernel_width, _) = codes.shape, weight.shape
    stride, padding, dilation = geometry
    shape = product_shape(codes, weight, geometry)
    output = torch.empty(shape, dtype=dtype, device=codes.device)
    if (numbers := max(codes.numel(), output.numel())) >= TOO_MANY:
        raise ValueError(f"a layer of {numbers} numbers is too large; use a smaller batch")
    rows = output.numel() // outputs

    def programs(config: dict) -> tuple[int]:
        return (triton.cdiv(rows, config["BLOCK_ROWS"]) * triton.cdiv(outputs, config["BLOCK_OUTPUTS"]),)

    with torch.cuda.device_of(codes):
        product_kernel[programs](
            codes.contiguous(), weight.contiguous(), scale, bias, output,
            rows, outputs, channels, height, width, *shape[1:3],
            STRIDE=stride, PADDING=padding, DILATION=dilation, KERNEL_HEIGHT=kernel_height, KERNEL_WIDTH=kernel_width,
            HAS_BIAS=bias is not None, GROUP=8,
        )  # fmt: skip
    return output


@product.register_fake
def product_like(codes, weight, scale, bias, geometry, dtype):
    return codes.new_empty(product_shape(codes, weight, geometry), dtype=dtype)


def product_shape(codes: Tensor, weight: Tensor, geometry: Sequence[int]) -> tuple[int, ...]:
    """Return the shape [B, OH, OW, N] of the output of ``product``."""
    stride, padding, dilation = geometry
    sizes = (
        (codes.shape[axis] + 2 * padding - dilation * (weight.shape[axis] - 1) - 1) // stride + 1 for axis in (1, 2)
    )
    return codes.shape[0], *sizes, weight.shape[0]
