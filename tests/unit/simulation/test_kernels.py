"""The GPU's kernels without a GPU: Triton interprets them in numpy, and compiles them for GPUs that are not here.

Triton decides at import whether it interprets, so that runs in a process of its own: this file as a script. It
interprets no product of bf16, which is compiled alone.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.commit, pytest.mark.slow]
triton = pytest.importorskip("triton")

CASES = [  # batch, height, width, channels, outputs, kernel, stride, padding, dilation, bias, dtype
    (2, 5, 6, 40, 24, 3, 1, 1, 1, True, torch.float32),
    (1, 8, 8, 16, 70, 3, 2, 1, 1, False, torch.float16),
    (1, 5, 6, 16, 16, 3, 1, 2, 2, True, torch.bfloat16),
    (2, 35, 1, 96, 33, 1, 1, 0, 1, True, torch.float16),
]
IN_BLOCKS = [(70, 300, 256, torch.float32), (3, 40, 384, torch.float16)]  # rows, outputs, inputs, dtype
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of the output, and fp32 sums
PRODUCT_OF_CODES = {  # the instructions that multiply these
    ("int8", 80): r"mma\.sync\.aligned\.m16n8k32.*s8\.s8\.s32",
    ("int8", 90): r"wgmma\.mma_async.*s32\.s8\.s8",
    ("fp8", 89): r"mma\.sync\.aligned\.m16n8k32.*e4m3\.e4m3",
    ("fp8", 90): r"wgmma\.mma_async.*f32\.e4m3\.e4m3",
}


@pytest.mark.nightly
def test_interpreted_it_computes_what_torch_does_in_double_precision():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2 * len(CASES) + len(IN_BLOCKS)


def every_configuration() -> Iterator:
    """For each instruction, of a linear and of a convolution: all in a soak, else each instruction and each once."""
    for (place, (fmt, capability)), config, size in product(enumerate(PRODUCT_OF_CODES), range(4), (1, 3)):
        long = config != place or size != (1, 3)[place % 2]
        yield pytest.param(fmt, capability, config, size, marks=pytest.mark.nightly if long else ())


@pytest.mark.parametrize("fmt, capability, config, size", every_configuration())
def test_every_configuration_compiles_for_gpus_to_products_of_codes(
    fmt, capability, config, size, monkeypatch, tmp_path
):
    """With 16 bytes a copy, and all in registers, but for the tiles that are Hopper's: 128 sums a thread."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where neither is chosen
    from sd_quant.simulation.kernels import PRODUCT_TILES

    assert len(PRODUCT_TILES) == 4
    config = PRODUCT_TILES[config]
    ptx, resources = compiled_for(fmt, capability, config, size, tmp_path / "cubin")
    assert re.search(PRODUCT_OF_CODES[fmt, capability], ptx)
    assert re.search(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10", ptx)
    tile = config.kwargs["BLOCK_ROWS"] * config.kwargs["BLOCK_OUTPUTS"]
    if capability >= 90 or tile // (32 * config.num_warps) <= 64:
        assert "STACK:0 " in resources and "LOCAL:0 " in resources, resources


def compiled_for(fmt: str, capability: int, config, size: int, file: Path) -> tuple[str, str]:
    """The PTX, and what the assembler says of registers and memory."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sd_quant.simulation.kernels import product_kernel

    codes, whole = {"int8": "*i8", "fp8": "*fp8e4nv"}[fmt], fmt == "int8"
    pointers = {"codes": codes, "weight": codes, "scale": "*fp32", "bias": "*fp16", "output": "*fp16"}
    sizes = ("rows", "outputs", "channels", "height", "width", "output_height", "output_width")
    ones = dict.fromkeys(sizes[3:], 1) if size == 1 else {}  # of a linear: Triton takes 1 for a constant
    fixed = {**ones,
             "STRIDE": 1, "PADDING": size // 2, "DILATION": 1, "KERNEL_HEIGHT": size, "KERNEL_WIDTH": size,
             "SUM": tl.int32 if whole else tl.float32, "ZERO": 0 if whole else 0.0, "HAS_BIAS": True, "GROUP": 8,
             **config.kwargs}  # fmt: skip
    function, aligned = product_kernel.fn, (*pointers, *(name for name in sizes if name not in ones))
    place = {name: (index,) for index, name in enumerate(function.arg_names)}
    source = ASTSource(  # pointers and sizes divisible by 16, as Triton sees at run time
        fn=function,
        signature=dict.fromkeys(function.arg_names, "i32") | pointers | dict.fromkeys(fixed, "constexpr"),
        constexprs={place[name]: value for name, value in fixed.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    file.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return made.asm["ptx"], told


def interpret_product() -> None:
    from sd_quant.simulation import kernels

    kernels.product_kernel.configs = [kernels.tile(32, 32, 32, 1, 4)]  # nothing is there to choose by
    random = torch.Generator().manual_seed(0)
    for fmt, largest in ((torch.int8, 127), (torch.float8_e4m3fn, 448)):
        for batch, height, width, channels, outputs, size, stride, padding, dilation, has_bias, dtype in CASES:
            shapes = (batch, height, width, channels), (outputs, size, size, channels)
            drawn = (torch.randn(shape, generator=random) * largest / 3 for shape in shapes)
            codes, weight = (values.clamp(-largest, largest).to(fmt) for values in drawn)
            scale = torch.rand(outputs, generator=random) * 1e-4
            bias = torch.randn(outputs, generator=random).to(dtype) if has_bias else None
            pictures, filters = (values.double().movedim(-1, 1) for values in (codes, weight))
            zero_point = -113 if fmt == torch.int8 else 0
            geometry = [stride, padding, dilation]
            pictures = F.pad(pictures, 4 * [padding], value=zero_point)
            expected = F.conv2d(pictures, filters, None, stride, 0, dilation).movedim(1, -1) * scale.double()
            expected = expected if bias is None else expected + bias.double()
            found = torch.ops.sd_quant.product(codes, weight, scale, bias, geometry, zero_point, dtype)
            assert found.shape == expected.shape and found.dtype == dtype
            error = ((found.double() - expected).norm() / expected.norm()).item()
            assert error < ROUNDING[dtype], (fmt, dtype, error)
            print(fmt, dtype, error)
        if fmt == torch.int8:  # torch's check of what compilers rely on compares inputs, and cannot do so in FP8
            given = (codes, weight, scale, bias, geometry, zero_point, dtype)
            torch.library.opcheck(torch.ops.sd_quant.product, given)


def interpret_block_product() -> None:
    from sd_quant.quantization.formats import FORMATS
    from sd_quant.simulation import kernels

    kernels.block_product_kernel.configs = [kernels.tile(32, 32, 128, 1, 4)]
    random = torch.Generator().manual_seed(0)
    weights, inputs_of = FORMATS["fp8_128x128"], FORMATS["fp8_128"]
    for rows, outputs, inputs, dtype in IN_BLOCKS:
        x, weight = (torch.randn(size, inputs, generator=random) for size in (rows, outputs))
        bias = torch.randn(outputs, generator=random).to(dtype) if rows > 9 else None
        (of_x,), (of_weight,) = inputs_of.scales(x, x), weights.scales(weight, weight)
        codes, stored = inputs_of.quantize(x, of_x), weights.quantize(weight, of_weight)
        expected = inputs_of.dequantize(codes, of_x).double() @ weights.dequantize(stored, of_weight).double().T
        expected = expected if bias is None else expected + bias.double()
        given = (codes, stored, of_x, of_weight[::128].contiguous(), bias, 128, dtype)
        found = torch.ops.sd_quant.block_product(*given)
        error = ((found.double() - expected).norm() / expected.norm()).item()
        assert found.shape == expected.shape and error < ROUNDING[dtype], (dtype, error)
        print(dtype, error)


if __name__ == "__main__":
    with torch.no_grad():
        interpret_product()
        interpret_block_product()
