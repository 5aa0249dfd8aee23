"""Where torch computes a part, in which precision, and compiled how."""

from functools import partialmethod

import pytest
import torch
from torch import nn

from sd_quant.devices import CPU
from sd_quant.engines import torch as engine
from sd_quant.engines.base import cast_inputs
from sd_quant.engines.torch import TorchEngine, compiled, dtype_on, placed
from sd_quant.models.parts import Contract
from sd_quant.simulation.native import NativeLinear, int_mm, scaled_mm
from tests.layers import static_layer

pytestmark = pytest.mark.commit

GPU = torch.device("cuda", 0)


def contract(weights: torch.dtype) -> Contract:
    return Contract({"x": ("batch", 8)}, ("y",), {"x": weights}, weights)


@pytest.mark.parametrize(("device", "precision", "expected"), [
    (CPU, "auto", torch.float32), (GPU, "auto", torch.float16), (GPU, "fp32", torch.float32),
    (GPU, "fp16", torch.float16), (GPU, "bf16", torch.bfloat16), (CPU, "bf16", torch.bfloat16),
])  # fmt: skip
def test_precision(device, precision, expected):
    assert dtype_on(device, precision, contract(torch.float16)) == expected
    assert dtype_on(device, precision, contract(torch.float32)) == torch.float32  # a VAE overflows in fp16
    in_bf16 = torch.bfloat16 if expected == torch.float16 else expected
    assert dtype_on(device, precision, contract(torch.bfloat16)) == in_bf16  # it may for the same reason


def test_an_engine_takes_and_gives_its_modules_own_dtype_and_placing_leaves_codes_and_scales_alone():
    weight = torch.ones(4, 8)
    layer = static_layer(weight, "fp8", per_row=False)
    made = NativeLinear(weight, nn.Parameter(torch.ones(4), requires_grad=False), layer, scaled_mm)
    moved = placed(made, CPU, torch.float16)
    assert moved.bias.dtype == torch.float16
    assert (moved.codes.dtype, moved.input_scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    made = TorchEngine(placed(Taking(nn.Linear(8, 4)), CPU, torch.bfloat16), contract(torch.float16))
    assert made.inputs == {"x": torch.bfloat16} and made.device == CPU
    assert TorchEngine(nn.Linear(8, 4), contract(torch.bfloat16)).inputs == {"x": torch.float32}
    assert made(x=torch.ones(2, 8))["y"].dtype == torch.bfloat16


class Taking(nn.Module):
    """A forward whose argument has the contract's name."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_an_image_keeps_its_memory_format_and_opened_again_the_same_weights_lie_elsewhere():
    """Engines of others get it contiguous, and inputs are in the order and the types that they declare."""
    image = torch.ones(1, 3, 4, 5).to(memory_format=torch.channels_last)
    made = TorchEngine(Taking(nn.Conv2d(3, 4, 1)), contract(torch.float32))
    assert made(x=image)["y"].is_contiguous(memory_format=torch.channels_last)
    cast = cast_inputs({"a": torch.float16, "x": torch.int64}, {"x": image, "a": torch.ones(3, 2).T})
    assert [(name, tensor.dtype) for name, tensor in cast.items()] == [("a", torch.float16), ("x", torch.int64)]
    assert cast["a"].is_contiguous() and cast["x"].is_contiguous()
    engine = TorchEngine(nn.BatchNorm2d(3).eval(), contract(torch.float32))
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in engine.module.state_dict().items()}
    assert engine.reopen()
    for name, tensor in engine.module.state_dict().items():
        assert tensor.data_ptr() != before[name][0] and torch.equal(tensor, before[name][1])


def test_blocks_are_compiled_and_layers_of_codes_between_them_and_what_has_none_is_whole(monkeypatch):
    seen, weight = [], torch.ones(4, 4)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: seen.append((self, given)))
    inside, loose = (NativeLinear(weight, None, static_layer(weight, "int8", True), int_mm) for _ in range(2))
    block = type("ResnetBlock2D", (nn.Sequential,), {})(inside)
    named, alone = nn.Linear(4, 4), nn.Conv2d(1, 1, 1)
    network = nn.Sequential(block, nn.Conv2d(1, 1, 1), loose, named)
    network._repeated_blocks = ["Linear"]  # as diffusers' networks name the blocks that repeat
    assert compiled(network) is network
    assert [module for module, _ in seen] == [block, named, loose]
    assert all(given == {"dynamic": False, "mode": None} for _, given in seen)
    seen.clear()
    compiled(alone)
    assert [module for module, _ in seen] == [alone]
    limits = engine.torch._dynamo.config
    assert min(limits.recompile_limit, limits.accumulated_recompile_limit) >= engine.MAX_COMPILATIONS


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_block_of_codes_computes_what_it_does_eagerly(monkeypatch):
    """As torch has traced it, without the C++ that takes half a minute; tests/gpu has kernels that were made of it."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    layer = static_layer(weight, "int8", per_row=True)

    class BasicTransformerBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(64), NativeLinear(weight, torch.zeros(32), layer, int_mm)

        def forward(self, x):
            return nn.functional.gelu(self.linear(self.norm(x)))

    class Network(nn.Sequential):
        _repeated_blocks = ["BasicTransformerBlock"]

    network, x = Network(BasicTransformerBlock()), torch.randn(2, 20, 64)
    expected = network(x)
    assert compiled(network)[0]._compiled_call_impl is not None
    torch.testing.assert_close(network(x), expected)
