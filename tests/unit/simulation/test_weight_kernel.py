"""The GPU's product with E2M1 weights without a GPU: interpreted by Triton, and compiled for GPUs that are not here.

Triton interprets no product of bf16, which is compiled alone. This file runs as a script, as ``test_product_kernel``.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from sd_quant.quantization.assignment import LayerAssignment

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton")

CASES = [  # tokens, inputs, outputs, bias, dtype, relative error: that of fp16's output, and of fp32's sums
    ((2, 17), 96, 33, True, torch.float16, 2**-11),
    ((5,), 160, 40, False, torch.float32, 1e-6),
    ((1, 3, 4), 32, 16, True, torch.float32, 1e-6),
]


def test_it_multiplies_what_the_codes_stand_for():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(CASES)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype, product", [("fp16", "f16"), ("bf16", "bf16")])
def test_it_compiles_for_gpus_to_products_of_the_models_own_precision(capability, dtype, product, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where neither is chosen
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sd_quant.simulation.weight_kernel import CONFIGS, weight_kernel

    function, config = weight_kernel.fn, CONFIGS[1]
    pointers = {"x": f"*{dtype}", "codes": "*u8", "scale": "*fp16", "bias": f"*{dtype}", "output": f"*{dtype}"}
    fixed = {"BLOCK": 32, "HAS_BIAS": True, **config.kwargs}
    place = {name: (function.arg_names.index(name),) for name in function.arg_names}
    source = ASTSource(
        fn=function,
        signature=dict.fromkeys(function.arg_names, "i32") | pointers | dict.fromkeys(fixed, "constexpr"),
        constexprs={place[name]: value for name, value in fixed.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in (*pointers, "rows", "outputs", "inputs")},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    assert f".{product}.{product}" in ptx and ("wgmma.mma_async" if capability >= 90 else "mma.sync") in ptx


def interpret() -> None:
    from sd_quant.simulation import weight_kernel
    from sd_quant.simulation.native import WEIGHT_PRODUCTS, WeightOnly, layer_of

    weight_kernel.weight_kernel.configs = [weight_kernel._config(16, 32, 64, 1, 4)]  # nothing is there to choose by
    random = torch.Generator().manual_seed(0)
    for tokens, inputs, outputs, has_bias, dtype, most in CASES:
        linear = nn.Linear(inputs, outputs, bias=has_bias)
        # scales from the smallest to some thousand, so that every exponent and subnormal numbers occur
        weight = torch.randn(outputs, inputs, generator=random) * torch.logspace(-7, 3, outputs)[:, None]
        linear.weight.data = weight
        row = LayerAssignment("linear", "ff", tuple(weight.shape), "mxfp4", weight_amax=weight.abs().amax().view(1))
        made = layer_of(linear, row, {}, WEIGHT_PRODUCTS["cuda"]).to(dtype)
        assert isinstance(made, WeightOnly) and made.product is not None and made.codes.dtype == torch.uint8
        x = torch.randn(*tokens, inputs, generator=random).to(dtype)
        found = made(x)
        expected = x.double() @ made.dequantized().to(dtype).double().T
        expected = expected if made.bias is None else expected + made.bias.double()
        assert found.shape == expected.shape and found.dtype == dtype
        error = ((found.double() - expected).norm() / expected.norm()).item()
        assert error < most, (dtype, error)
        print(dtype, error)
    scale = made.float16_scale
    given = x.flatten(0, -2), made.codes.view(len(scale), -1), scale, made.bias
    torch.library.opcheck(torch.ops.sd_quant.weight_product, given)


if __name__ == "__main__":
    with torch.no_grad():
        interpret()
