"""torch on a GPU: products of codes by its own kernels and by ours, calls recorded as a CUDA graph, statistics."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.devices import CPU
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, placed
from sd_quant.inference.loading import load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.parts import Contract
from sd_quant.models.sdxl import FAMILY
from sd_quant.numbers import relative_error
from sd_quant.places import HOME
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.native import PRODUCTS, NativeConv, NativeLinear, RoundedConv, layer_of
from tests.layers import static_layer

pytestmark = pytest.mark.commit

if torch.cuda.is_available():
    pytest.importorskip("triton")
    from sd_quant.simulation.kernels import product_kernel

GPU, HALF = torch.device("cuda"), torch.float16


@pytest.fixture(autouse=True)
def one_tiling(gpu, request, monkeypatch):
    """One of the kernels' tilings, drawn for each test: to compile and time all of them takes seconds a shape."""
    drawn = random.Random(request.node.name).choice(product_kernel.configs)
    monkeypatch.setattr(product_kernel, "configs", [drawn])


@torch.no_grad()
def check(made_as: type, fmt: str, per_row: bool, build, shape: tuple[int, ...], whole: bool, zero_point: int = 0):
    """The GPU gives in fp16 what the processor gives in fp32 for the same codes. fp16 rounds the output, and a GPU adds
    up FP8's products with some bits less."""
    if torch.cuda.get_device_capability() < FORMATS[fmt].torch_compute_capability:
        pytest.skip(f"this GPU multiplies no {fmt}")
    torch.manual_seed(0)
    module, x = build(), torch.randn(shape).half()
    layer = replace(static_layer(module.weight.detach(), fmt, per_row), activation_zero_point=zero_point)
    expected = placed(layer_of(module, layer, PRODUCTS["cpu"]), CPU, torch.float32)(x.float())
    made = placed(layer_of(module, layer, PRODUCTS["cuda"]), GPU, HALF)
    if whole:
        made.compile()
    found = made(x.to(GPU)).float().cpu()
    assert isinstance(made, made_as) and expected.shape == found.shape
    assert relative_error(expected, found) < 4e-3


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sizes", [(640, 1280), (40, 24), (36, 20)])
@pytest.mark.parametrize("rows", [1, 160])
@pytest.mark.parametrize("fmt, per_row", [("int8", True), ("fp8", False), ("fp8", True)])
def test_a_linear_gives_what_the_processor_does(fmt, per_row, rows, sizes, whole):
    check(NativeLinear, fmt, per_row, lambda: nn.Linear(*sizes), (2, rows, sizes[0]), whole)


@torch.no_grad()
@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "nvfp4"])
def test_a_weight_alone_is_dequantized_in_a_cuda_graph_as_on_the_processor(fmt):
    torch.manual_seed(0)
    module, x = nn.Linear(512, 1280), torch.randn(2, 154, 512).half()
    layer = replace(static_layer(module.weight.detach(), "int8", True), format=fmt, activation_format=None)
    expected = placed(layer_of(module, layer, {}), CPU, torch.float32)(x.float())
    made = placed(layer_of(module, layer, {}), GPU, HALF)
    made.compile()
    contract = Contract({"x": ("batch", 154, 512)}, ("y",), {"x": HALF}, HALF)
    found = Replayed(TorchEngine(made, contract))(x=x.to(GPU))["y"]
    assert relative_error(expected, found.float().cpu()) < 4e-3


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size, stride, padding", [(3, 1, 1), (3, 2, 1), (3, 2, 0), (1, 1, 0)])
@pytest.mark.parametrize("fmt", [name for name, fmt in FORMATS.items() if fmt.torch_compute_capability])
@pytest.mark.parametrize("zero_point", [0, -100])
def test_a_convolution_gives_what_the_processor_does(fmt, size, stride, padding, whole, zero_point):
    """Shifted too, where codes have equal levels."""
    if zero_point and not FORMATS[fmt].equal_levels:
        pytest.skip(f"no input is shifted in {fmt}")
    build, shape = lambda: nn.Conv2d(320, 640, size, stride, padding), (2, 320, 20, 12)
    check(NativeConv if fmt == "fp8" else RoundedConv, fmt, fmt == "int8", build, shape, whole, zero_point)


@pytest.mark.parametrize("whole", [False, True])
@torch.no_grad()
def test_a_replayed_call_gives_what_the_call_gives(whole):
    torch.manual_seed(0)
    module = placed(nn.Linear(64, 32).requires_grad_(False), GPU, HALF)
    contract = Contract({"input": ("batch", 64)}, ("y",), {"input": HALF}, HALF)
    plain = TorchEngine(module, contract)
    engine = Replayed(TorchEngine(compiled(module) if whole else module, contract))
    for batch in (3, 3, 5, 3):
        given = torch.randn(batch, 64)
        torch.testing.assert_close(engine(input=given)["y"], plain(input=given)["y"], rtol=2e-3, atol=2e-3)
    first = engine(input=torch.ones(3, 64))["y"]
    kept = first.clone()
    engine(input=torch.zeros(3, 64))
    assert torch.equal(first, kept)
    engine.close()


@pytest.fixture(scope="module")
def statistics():
    model = load_model(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"))
    prompts = [f"a glossy icon of a {thing}" for thing in ("duck", "robot", "frog", "taxi")]
    names = [name for name, role in FAMILY.layer_roles(model.modules["unet"]).items() if role != "excluded"]

    def collect(accelerator: str, devices: int = 1):
        sampling = Sampling(2, 5.0, 64, 64, 1, 42)
        return calibrate(Pass(model, names, prompts, sampling), fabric_for(accelerator, devices), checkpoint_sha256="")

    return collect


def test_the_gpu_sees_what_the_cpu_sees(statistics):
    """Convolutions run in TF32 there (10 bits of mantissa), so ranges differ by about 2^-10, a few steps deep."""
    expected, found = statistics("cpu"), statistics("cuda")
    assert expected.layers.keys() == found.layers.keys()
    for name, layer in expected.layers.items():
        torch.testing.assert_close(found.layers[name].amax, layer.amax, rtol=2e-2, atol=2e-2 * layer.amax.max().item())
        assert torch.equal(found.layers[name].rows.priority, layer.rows.priority)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_merge_to_what_one_sees(statistics):
    one, two = statistics("cuda"), statistics("cuda", devices=2)
    for name, layer in one.layers.items():
        torch.testing.assert_close(two.layers[name].amax, layer.amax, rtol=1e-5, atol=0)
