"""Torch's own products of codes on a GPU. Skipped, with the reason, where there is none."""

import pytest
import torch

from sd_quant.engines.native import CAPABILITY, NativeLinear
from sd_quant.engines.torch import placed
from sd_quant.metrics.fidelity import relative_error
from sd_quant.quantization.assignment import LayerAssignment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [1, 160])
@pytest.mark.parametrize("form", CAPABILITY)
@torch.no_grad()
def test_a_gpu_computes_what_the_cpu_does(form, rows, compiled):
    """The same codes; fp16 rounds the output. INT8's product takes 17 rows at least, and gets them."""
    if torch.cuda.get_device_capability() < CAPABILITY[form]:
        pytest.skip(f"this GPU multiplies no {form}")
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(640, 1280, generator=random), torch.randn(2, rows, 1280, generator=random).half()
    amax = weight.abs().amax(1) if form == "int8" else weight.abs().amax().view(1)
    axis = 0 if form == "int8" else None
    layer = LayerAssignment(
        "linear", "ffn", (640, 1280), form, form, weight_axis=axis, weight_amax=amax, activation_amax=4.0
    )
    expected = NativeLinear(weight, None, layer)(x.float())
    linear = placed(NativeLinear(weight, None, layer), torch.device("cuda"), torch.float16)
    if compiled:
        linear.compile()
    assert relative_error(expected, linear(x.cuda()).float().cpu()) < 2e-3
