"""INT8 and FP8 products on a GPU in one kernel with what follows them: scales, bias, the cast to the model's dtype.

torch's INT8 product leaves int32 sums, four bytes a number to write and to read again, and torch has no convolution of
codes at all. Here a convolution is an implicit GEMM: a matrix product whose left operand is gathered while it is
multiplied, so that nothing is unfolded in memory. A linear is a convolution of one by one.

The kernel is written in Triton, which comes with every torch for NVIDIA GPUs; its launcher takes a C compiler and
Python's headers, once. The road not taken is CUTLASS: better tuned, but it takes a build system. On Hopper Triton waits
for every INT8 product before it begins the next (FP8's overlap), so that FP8 is the format for these GPUs.
"""

import torch
import triton
import triton.language as tl
import triton.testing
from torch import Tensor

TOO_MANY = 2**31  # numbers in a tensor: the kernel counts in 32 bits


def _config(rows: int, outputs: int, channels: int, stages: int, warps: int) -> triton.Config:
    blocks = {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": outputs, "BLOCK_CHANNELS": channels}
    return triton.Config(blocks, num_stages=stages, num_warps=warps)


CONFIGS = [
    _config(128, 256, 64, 4, 8),
    _config(128, 128, 128, 3, 8),
    _config(128, 128, 64, 4, 4),
    _config(64, 128, 64, 4, 4),
]


def timed(call, quantiles):
    """As Triton times a configuration, in a fifth of the time: SDXL has some forty shapes, each with four."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(CONFIGS, key=["rows", "outputs", "channels", "KERNEL_HEIGHT"], do_bench=timed)
@triton.jit(do_not_specialize=["zero_point"])
def product_kernel(
    codes, weight, scale, bias, output,
    rows, outputs, channels, height, width, output_height, output_width, zero_point,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    SUM: tl.constexpr, ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``output`` [rows, outputs], a row for each output pixel.

    What pads an image has the code ``zero_point``, in FP8 that of 0. Programs are numbered in groups that read the same
    columns, so that these stay in the L2 cache.
    """
    program, columns = tl.program_id(0), tl.cdiv(outputs, BLOCK_OUTPUTS)
    group = program // (GROUP * columns)
    in_group = min(tl.cdiv(rows, BLOCK_ROWS) - group * GROUP, GROUP)
    row_block = group * GROUP + (program % (GROUP * columns)) % in_group
    column_block = (program % (GROUP * columns)) // in_group

    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    image, pixel = row // (output_height * output_width), row % (output_height * output_width)
    top = pixel // output_width * STRIDE - PADDING
    left = pixel % output_width * STRIDE - PADDING
    first = ((image * height + top) * width + left) * channels  # of the window; outside the image it is masked
    inputs = KERNEL_HEIGHT * KERNEL_WIDTH * channels

    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=SUM)
    blocks = tl.cdiv(channels, BLOCK_CHANNELS)
    outside = zero_point.to(tl.int8) if SUM == tl.int32 else ZERO
    # one loop over taps and channels, so that it is pipelined
    for step in range(KERNEL_HEIGHT * KERNEL_WIDTH * blocks):
        tap = step // blocks
        down, across = tap // KERNEL_WIDTH * DILATION, tap % KERNEL_WIDTH * DILATION
        here = step % blocks * BLOCK_CHANNELS + channel
        inside = (top + down >= 0) & (top + down < height) & (left + across >= 0) & (left + across < width)
        place = first + (down * width + across) * channels
        a = tl.load(
            codes + place[:, None] + here[None, :],
            mask=(inside & (row < rows))[:, None] & (here < channels)[None, :], other=outside,
        )  # fmt: skip
        b = tl.load(
            weight + column[None, :] * inputs + (tap * channels + here)[:, None],
            mask=(column < outputs)[None, :] & (here < channels)[:, None], other=ZERO,
        )  # fmt: skip
        sums = tl.dot(a, b, sums, out_dtype=SUM)

    result = sums.to(tl.float32) * tl.load(scale + column, mask=column < outputs, other=0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column < outputs, other=0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * outputs + column[None, :], result.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outputs)[None, :],
    )  # fmt: skip


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Height or width of a convolution's output."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@torch.library.custom_op("sd_quant::product", mutates_args=())
def product(
    codes: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
    stride: int, padding: int, dilation: int, zero_point: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The convolution of ``codes`` [B, H, W, C] with ``weight`` [N, KH, KW, C], in ``dtype`` [B, OH, OW, N].

    Both are int8, whose sums are exact, or both float8_e4m3fn, whose sums are fp32. ``scale`` fp32 [N] is the scale of
    the codes times that of the weight; ``bias`` is [N]. int8 codes are padded with ``zero_point``. Raises ValueError
    for tensors of 2^31 numbers and more.
    """
    batch, height, width, channels = codes.shape
    outputs, kernel_height, kernel_width, _ = weight.shape
    shape = (
        batch,
        output_size(height, kernel_height, stride, padding, dilation),
        output_size(width, kernel_width, stride, padding, dilation),
        outputs,
    )
    output = torch.empty(shape, dtype=dtype, device=codes.device)
    if max(codes.numel(), output.numel()) >= TOO_MANY:
        raise ValueError(f"a layer of {max(codes.numel(), output.numel())} numbers is too large; use a smaller batch")
    rows, integer = output.numel() // outputs, codes.dtype == torch.int8

    def grid(config: dict) -> tuple[int]:
        return (triton.cdiv(rows, config["BLOCK_ROWS"]) * triton.cdiv(outputs, config["BLOCK_OUTPUTS"]),)

    with torch.cuda.device_of(codes):
        product_kernel[grid](
            codes.contiguous(), weight.contiguous(), scale, bias, output,
            rows, outputs, channels, height, width, *shape[1:3], zero_point,
            STRIDE=stride, PADDING=padding, DILATION=dilation, KERNEL_HEIGHT=kernel_height, KERNEL_WIDTH=kernel_width,
            SUM=tl.int32 if integer else tl.float32, ZERO=0 if integer else 0.0, HAS_BIAS=bias is not None, GROUP=8,
        )  # fmt: skip
    return output


@product.register_fake
def _(codes, weight, scale, bias, stride, padding, dilation, zero_point, dtype):
    sizes = [output_size(codes.shape[axis], weight.shape[axis], stride, padding, dilation) for axis in (1, 2)]
    return codes.new_empty((codes.shape[0], *sizes, weight.shape[0]), dtype=dtype)
