"""Products of codes on a GPU, torch's own and our kernel's. Skipped, with the reason, where there is none."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from sd_quant.devices import CPU
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, placed
from sd_quant.models.parts import Contract
from sd_quant.numbers import relative_error
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.native import PRODUCTS, NativeConv, NativeLinear, layer_of
from tests.layers import static_layer

pytestmark = [
    pytest.mark.commit,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]

if torch.cuda.is_available():
    pytest.importorskip("triton")
    from sd_quant.simulation.kernels import product_kernel

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def one_tiling(request, monkeypatch):
    """One of the kernels' tilings, drawn for each test: to compile and time all of them takes seconds a shape."""
    drawn = random.Random(request.node.name).choice(product_kernel.configs)
    monkeypatch.setattr(product_kernel, "configs", [drawn])


@torch.no_grad()
def check(made_as: type, fmt: str, per_row: bool, build, shape: tuple[int, ...], compiled: bool, zero_point: int = 0,
          products: str = "cuda"):  # fmt: skip
    """The GPU gives in fp16 what the processor gives in fp32 for the same codes.

    fp16 rounds the output, and a GPU adds up FP8's products with some bits less.
    """
    if torch.cuda.get_device_capability() < FORMATS[fmt].torch_compute_capability:
        pytest.skip(f"this GPU multiplies no {fmt}")
    torch.manual_seed(0)
    module, x = build(), torch.randn(shape).half()
    layer = replace(static_layer(module.weight.detach(), fmt, per_row), activation_zero_point=zero_point)
    expected = placed(layer_of(module, layer, PRODUCTS["cpu"]), CPU, torch.float32)(x.float())
    made = placed(layer_of(module, layer, PRODUCTS[products]), GPU, torch.float16)
    if compiled:
        made.compile()
    found = made(x.to(GPU)).float().cpu()
    assert isinstance(made, made_as) and expected.shape == found.shape
    assert relative_error(expected, found) < 4e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sizes", [(640, 1280), (40, 24)])
@pytest.mark.parametrize("rows", [1, 160])
@pytest.mark.parametrize(
    "fmt, per_row, products",
    [("int8", True, "cuda"), ("int8", True, "hopper"), ("fp8", False, "cuda"), ("fp8", True, "cuda")],
)
def test_a_linear_gives_what_the_processor_does(fmt, per_row, products, rows, sizes, compiled):
    check(NativeLinear, fmt, per_row, lambda: nn.Linear(*sizes), (2, rows, sizes[0]), compiled, products=products)


@torch.no_grad()
@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "nvfp4"])
def test_a_weight_alone_is_dequantized_in_a_cuda_graph_as_on_the_processor(fmt):
    torch.manual_seed(0)
    module, x = nn.Linear(512, 1280), torch.randn(2, 154, 512).half()
    layer = replace(static_layer(module.weight.detach(), "int8", True), format=fmt, activation_format=None)
    expected = placed(layer_of(module, layer, {}), CPU, torch.float32)(x.float())
    made = placed(layer_of(module, layer, {}), GPU, torch.float16)
    made.compile()
    contract = Contract({"x": ("batch", 154, 512)}, ("y",), {"x": torch.float16}, torch.float16)
    found = Replayed(TorchEngine(made, contract))(x=x.to(GPU))["y"]
    assert relative_error(expected, found.float().cpu()) < 4e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size, stride, padding", [(3, 1, 1), (3, 2, 1), (3, 2, 0), (1, 1, 0)])
@pytest.mark.parametrize("fmt", [name for name, fmt in FORMATS.items() if fmt.torch_compute_capability])
@pytest.mark.parametrize("zero_point", [0, -100])
def test_a_convolution_gives_what_the_processor_does(fmt, size, stride, padding, compiled, zero_point):
    """Shifted too, where codes have equal levels."""
    if zero_point and not FORMATS[fmt].equal_levels:
        pytest.skip(f"no input is shifted in {fmt}")
    build, shape = lambda: nn.Conv2d(320, 640, size, stride, padding), (2, 320, 20, 12)
    check(NativeConv, fmt, fmt == "int8", build, shape, compiled, zero_point)
