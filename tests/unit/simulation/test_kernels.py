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
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of the output, and fp32 sums
PRODUCT_OF_CODES = {  # by compute capability, the instruction that multiplies FP8
    89: r"mma\.sync\.aligned\.m16n8k32.*e4m3\.e4m3",
    90: r"wgmma\.mma_async.*f32\.e4m3\.e4m3",
}


@pytest.mark.nightly
def test_interpreted_it_computes_what_torch_does_in_double_precision():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(CASES)


def every_configuration() -> Iterator:
    """For each instruction, of a linear and of a convolution: all in a soak, else each instruction and each once."""
    for (place, capability), config, size in product(enumerate(PRODUCT_OF_CODES), range(4), (1, 3)):
        long = config % 2 != place or size != (1, 3)[config // 2]
        yield pytest.param(capability, config, size, marks=pytest.mark.nightly if long else ())


@pytest.mark.parametrize("capability, config, size", every_configuration())
def test_every_configuration_compiles_for_gpus_to_products_of_codes(capability, config, size, monkeypatch, tmp_path):
    """With 16 bytes a copy, and all in registers, but for the tiles that are Hopper's: 128 sums a thread."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where neither is chosen
    from sd_quant.simulation.kernels import PRODUCT_TILES

    assert len(PRODUCT_TILES) == 4
    config = PRODUCT_TILES[config]
    ptx, resources = compiled_for(capability, config, size, tmp_path / "cubin")
    assert re.search(PRODUCT_OF_CODES[capability], ptx)
    assert re.search(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10", ptx)
    tile = config.kwargs["BLOCK_ROWS"] * config.kwargs["BLOCK_OUTPUTS"]
    if capability >= 90 or tile // (32 * config.num_warps) <= 64:
        assert "STACK:0 " in resources and "LOCAL:0 " in resources, resources


def compiled_for(capability: int, config, size: int, file: Path) -> tuple[str, str]:
    """The PTX, and what the assembler says of registers and memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sd_quant.simulation.kernels import product_kernel

    pointers = {"codes": "*fp8e4nv", "weight": "*fp8e4nv", "scale": "*fp32", "bias": "*fp16", "output": "*fp16"}
    sizes = ("rows", "outputs", "channels", "height", "width", "output_height", "output_width")
    ones = dict.fromkeys(sizes[3:], 1) if size == 1 else {}  # of a linear: Triton takes 1 for a constant
    fixed = {**ones,
             "STRIDE": 1, "PADDING": size // 2, "DILATION": 1, "KERNEL_HEIGHT": size, "KERNEL_WIDTH": size,
             "HAS_BIAS": True, "GROUP": 8, **config.kwargs}  # fmt: skip
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
    for batch, height, width, channels, outputs, size, stride, padding, dilation, has_bias, dtype in CASES:
        shapes = (batch, height, width, channels), (outputs, size, size, channels)
        drawn = (torch.randn(shape, generator=random) * 448 / 3 for shape in shapes)
        codes, weight = (values.clamp(-448, 448).to(torch.float8_e4m3fn) for values in drawn)
        scale = torch.rand(outputs, generator=random) * 1e-4
        bias = torch.randn(outputs, generator=random).to(dtype) if has_bias else None
        pictures, filters = (values.double().movedim(-1, 1) for values in (codes, weight))
        expected = F.conv2d(pictures, filters, None, stride, padding, dilation).movedim(1, -1) * scale.double()
        expected = expected if bias is None else expected + bias.double()
        given = (codes, weight, scale, bias, [stride, padding, dilation], dtype)
        found = torch.ops.sd_quant.product(*given)
        assert found.shape == expected.shape and found.dtype == dtype
        error = ((found.double() - expected).norm() / expected.norm()).item()
        assert error < ROUNDING[dtype], (dtype, error)
        print(dtype, error)
    # what compilers rely on, but for a check that compares inputs, which torch cannot do in FP8
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.sd_quant.product, given, test_utils=checks)


if __name__ == "__main__":
    with torch.no_grad():
        interpret_product()
