"""Does everything that the table needs work on this machine at all? Each engine and kernel once, at a small size.

A check is a function of a device that raises, or says what it has seen. Products are compared with the same codes
multiplied in fp32.
"""

import copy
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, placed
from sd_quant.models.parts import Contract
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.native import Products, kernel_convolution, kernel_linear, layer_of, products_on

from .sides import SIMULATED

TOLERANCE = 5e-3  # relative: fp16 rounds the output, and a GPU adds up FP8's products with some bits less
Result = dict[str, Any]


def compared(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> Result:
    """Raises ValueError unless they agree."""
    error = relative_error(expected.float().cpu(), found.float().cpu())
    if error is None or not error <= tolerance:
        raise ValueError(f"the output differs by {error}, tolerated are {tolerance}")
    return {"error": error}


def the_machine(device: torch.device) -> Result:
    if device.type == "cpu":
        return {"device": "the processor"}
    free, total = torch.cuda.mem_get_info()
    return {
        "device": torch.cuda.get_device_name(),
        "compute_capability": torch.cuda.get_device_capability(),
        "free_gb": free / 1e9,
        "total_gb": total / 1e9,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def row_for(module: nn.Linear | nn.Conv2d, fmt: str, x: Tensor) -> LayerAssignment:
    """How a layer is quantized, by the largest magnitudes."""
    weight, per_row = module.weight.detach().float(), fmt == "int8"
    amax = weight.abs().flatten(1).amax(1) if per_row else weight.abs().amax().view(1)
    return LayerAssignment("", "linear", tuple(weight.shape), fmt, fmt, weight_axis=0 if per_row else None,
                           weight_amax=amax, activation_amax=x.abs().max().item())  # fmt: skip


def product(fmt: str, module: Callable[[], nn.Linear | nn.Conv2d], shape: tuple[int, ...], device: torch.device,
            products: Products | None = None) -> Result:  # fmt: skip
    """A layer of codes against its simulation."""
    if device.type == "cuda":
        import sd_quant.simulation.kernels  # noqa: F401

        if torch.cuda.get_device_capability() < FORMATS[fmt].torch_compute_capability:
            return {"left out": f"this GPU multiplies no {fmt}"}
    elif products is not None:
        return {"left out": "there is no GPU"}
    torch.manual_seed(0)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    layer, x = module().to(device), torch.randn(shape, device=device).to(dtype)
    row, onnx_type = row_for(layer, fmt, x), FORMATS[fmt].onnx_type
    own = {onnx_type: products} if products else products_on(device)
    found, expected = (placed(layer_of(copy.deepcopy(layer), row, each), device, dtype)(x) for each in (own, SIMULATED))
    return compared(found, expected)


class Small(nn.Module):
    """Layers of codes, and what stands between them in a network."""

    def __init__(self, fmt: str, device: torch.device):
        super().__init__()
        torch.manual_seed(0)
        linear, x = nn.Linear(64, 64).to(device), torch.randn(4, 64, device=device)
        self.norm, self.linear = (
            nn.LayerNorm(64).to(device),
            layer_of(linear, row_for(linear, fmt, x), products_on(device)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(self.norm(x)))


def small(fmt: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return placed(Small(fmt, device), device, dtype), torch.randn(32, 64, device=device, dtype=dtype)


@torch.no_grad()
def compiles(device: torch.device) -> Result:
    if device.type == "cuda":
        import sd_quant.simulation.kernels  # noqa: F401
    module, x = small("int8", device)
    expected = module(x)
    return compared(compiled(module)(x), expected)


@torch.no_grad()
def is_replayed(device: torch.device) -> Result:
    """A CUDA graph of layers of codes, called twice with different inputs."""
    if device.type == "cpu":
        return {"left out": "there is no GPU"}
    module, x = small("int8", device)
    contract = Contract({"x": ("batch", 64)}, ("out",), {"x": torch.float16}, torch.float16)
    engine = Replayed(TorchEngine(module, contract))
    engine(x=x)
    return compared(engine(x=2 * x)["out"], module(2 * x))


def plan_runs(library: str, device: torch.device) -> Result:
    """A plan of a small INT8 network, built here and run."""
    for package in ("onnx", library):
        if importlib.util.find_spec(package) is None:
            return {"left out": f"{package} is not installed"}
    if device.type == "cpu":
        return {"left out": "there is no GPU"}
    from sd_quant.engines import load_engine
    from sd_quant.engines.tensorrt.build import build_for

    with tempfile.TemporaryDirectory() as folder:
        path, scale, weight = Path(folder) / "small.onnx", 2.0**-5, torch.randint(-127, 128, (64, 32), dtype=torch.int8)
        write_small(path, scale, weight)
        x = torch.randn(2, 64).half()
        plan = build_for(path, library, {"x": (2, 64)})
        engine = load_engine(library, plan)
        expected = (x.float() / scale).round().clamp(-128, 127) * scale @ (weight.float() * 2.0**-8)
        found = compared(engine(x=x)["y"], expected)
        engine.close()
    return found


def write_small(path: Path, scale: float, weight: Tensor) -> None:
    """y [2, 32] fp16 of x [2, 64] fp16, both and the weight through INT8."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    constants = {"scale": np.array(scale, np.float16), "zero": np.array(0, np.int8), "w": weight.numpy(),
                 "w_scale": np.full(32, 2.0**-8, np.float16), "w_zero": np.zeros(32, np.int8)}  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["weight"], axis=1),
        helper.make_node("MatMul", ["rounded", "weight"], ["y"]),
    ]
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT16)
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "small", [value("x", shape=[2, 64])], [value("y", shape=[2, 32])], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


LINEAR, CONVOLUTION = partial(nn.Linear, 128, 64), partial(nn.Conv2d, 64, 64, 3, padding=1)
TOKENS, IMAGE = (2, 40, 128), (2, 64, 12, 12)
KERNEL = Products(kernel_linear, kernel_convolution)
CHECKS: dict[str, Callable[[torch.device], Result]] = {
    "the machine": the_machine,
    "int8 linear": partial(product, "int8", LINEAR, TOKENS),
    "fp8 linear": partial(product, "fp8", LINEAR, TOKENS),
    "int8 convolution": partial(product, "int8", CONVOLUTION, IMAGE),
    "fp8 convolution": partial(product, "fp8", CONVOLUTION, IMAGE),
    "fp8 linear by the kernel": partial(product, "fp8", LINEAR, TOKENS, products=KERNEL),
    "torch.compile": compiles,
    "CUDA graph": is_replayed,
    "plan of tensorrt": partial(plan_runs, "tensorrt"),
    "plan of tensorrt_rtx": partial(plan_runs, "tensorrt_rtx"),
}
