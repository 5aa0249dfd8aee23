"""Products of codes on a GPU, torch's own and our kernel's. Skipped, with the reason, where there is none."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sd_quant.devices import CPU
from sd_quant.engines.torch import placed
from sd_quant.numbers import relative_error
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.native import PRODUCTS, NativeConv, NativeLinear, layer_of
from tests.layers import static_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")

if torch.cuda.is_available():
    pytest.importorskip("triton")
    import sd_quant.simulation.product_kernel  # noqa: F401

GPU = torch.device("cuda")


def skip_without(fmt: str) -> None:
    if torch.cuda.get_device_capability() < FORMATS[fmt].torch_compute_capability:
        pytest.skip(f"this GPU multiplies no {fmt}")


def on_both(module: nn.Module, fmt: str, per_row: bool, x: torch.Tensor, compiled: bool, zero_point: int = 0):
    """What the processor gives in fp32 and the GPU in fp16 for the same codes."""
    layer = replace(static_layer(module.weight.detach(), fmt, per_row), activation_zero_point=zero_point)
    expected = placed(layer_of(module, layer, PRODUCTS["cpu"]), CPU, torch.float32)(x.float())
    made = placed(layer_of(module, layer, PRODUCTS["cuda"]), GPU, torch.float16)
    if compiled:
        made.compile()
    return made, expected, made(x.to(GPU)).float().cpu()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sizes", [(640, 1280), (40, 24)])
@pytest.mark.parametrize("rows", [1, 160])
@pytest.mark.parametrize("fmt, per_row", [("int8", True), ("fp8", False), ("fp8", True)])
@torch.no_grad()
def test_a_linear_gives_what_the_processor_does(fmt, per_row, rows, sizes, compiled):
    """The same codes; fp16 rounds the output, and a GPU adds up FP8's products with some bits less."""
    skip_without(fmt)
    torch.manual_seed(0)
    module, x = nn.Linear(*sizes), torch.randn(2, rows, sizes[0]).half()
    made, expected, found = on_both(module, fmt, per_row, x, compiled)
    assert isinstance(made, NativeLinear)
    assert relative_error(expected, found) < 4e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size, stride, padding", [(3, 1, 1), (3, 2, 1), (3, 2, 0), (1, 1, 0)])
@pytest.mark.parametrize("fmt", [name for name, fmt in FORMATS.items() if fmt.torch_compute_capability])
@pytest.mark.parametrize("zero_point", [0, -100])
@torch.no_grad()
def test_a_convolution_gives_what_the_processor_does(fmt, size, stride, padding, compiled, zero_point):
    """Shifted too, where codes have equal levels."""
    skip_without(fmt)
    if zero_point and not FORMATS[fmt].equal_levels:
        pytest.skip(f"no input is shifted in {fmt}")
    torch.manual_seed(0)
    module, x = nn.Conv2d(320, 640, size, stride, padding), torch.randn(2, 320, 20, 12).half()
    made, expected, found = on_both(module, fmt, fmt == "int8", x, compiled, zero_point)
    assert isinstance(made, NativeConv) and expected.shape == found.shape
    assert relative_error(expected, found) < 4e-3
