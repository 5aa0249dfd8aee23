"""The framework itself as an engine: the baseline of every comparison and the reference of every parity check."""

import torch
import torch._dynamo
from torch import nn

from sd_quant.engines.base import cast_inputs
from sd_quant.models.parts import Contract
from sd_quant.simulation.native import NativeLayer, RoundedConv

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REPEATED = ("ResnetBlock2D", "Downsample2D", "Upsample2D")  # beside the blocks that diffusers' networks name themselves
SHAPES = 256  # of one block, that a process may compile; torch gives up after 8 and computes eagerly without a word


class TorchEngine:
    """A part module (``sd_quant.models.parts``) called like any other engine, in the module's own dtype."""

    name = "torch"

    def __init__(self, module: nn.Module, contract: Contract):
        weight = next(module.parameters())
        self.module, self.outputs, self.device = module, contract.outputs, weight.device
        self.inputs = {
            name: weight.dtype if dtype == torch.float16 else dtype for name, dtype in contract.dtypes.items()
        }

    @torch.inference_mode()
    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.module(**cast_inputs(self.inputs, inputs, self.device))
        return dict(zip(self.outputs, output if isinstance(output, tuple) else (output,), strict=True))

    def close(self) -> None:
        del self.module
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other engines do not take from torch's memory what their weights need


def dtype_on(device: torch.device, precision: str, contract: Contract) -> torch.dtype:
    """What a part computes in: ``precision`` (infer.precision), by default fp16 on a GPU, as exported graphs have it,
    and fp32 elsewhere. A part that is stored in fp32 because fp16 overflows (the VAE) stays in it.
    """
    if contract.weights == torch.float32 or (precision == "auto" and device.type == "cpu"):
        return torch.float32
    return contract.weights if precision == "auto" else PRECISIONS[precision]


def compiled(module: nn.Module) -> nn.Module:
    """``module``, in place, to be compiled block by block when it is called; whole where it has no known blocks.

    Blocks of one kind and shape share what was compiled: a network at once takes minutes. Compiled at their first call
    with each shape. Layers of codes outside of blocks are compiled by themselves, so that they quantize in one kernel.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    own = (getattr(part, "_repeated_blocks", None) or () for part in module.modules())
    names = {*REPEATED, *(name for found in own for name in found)}
    blocks = [part for part in module.modules() if type(part).__name__ in names]
    inside = {part for block in blocks for part in block.modules()}
    layers = [part for part in module.modules() if isinstance(part, NativeLayer | RoundedConv) and part not in inside]
    for block in [*blocks, *layers] or [module]:
        block.compile(dynamic=False)
    return module


def placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``module`` on ``device``, in place, its parameters in ``dtype``. Buffers, such as codes and scales, keep their
    types. On a GPU its pictures have their channels last, as its convolutions want them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.to(device)
    return module.to(memory_format=torch.channels_last) if device.type == "cuda" else module  # type: ignore[call-overload]
