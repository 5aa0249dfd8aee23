"""torch as an engine: the baseline of every comparison and the reference of every parity check."""

import torch
from torch import nn

from sd_quant.engines.base import cast_inputs
from sd_quant.models.parts import Contract
from sd_quant.simulation.native import NativeLayer, RoundedConv

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
COMPILED_BLOCKS = ("ResnetBlock2D", "Downsample2D", "Upsample2D")  # in addition to those that a network names
# Of one block's code in a process. Beyond torch's limits, 8 and 256, it silently stays eager.
MAX_COMPILATIONS = 10_000


class TorchEngine:
    """The module of a part (``sd_quant.models.parts``) as an ``Engine``, in the module's own dtype."""

    name = "torch"

    def __init__(self, module: nn.Module, contract: Contract):
        weight = next(module.parameters())
        self.module, self.outputs, self.device = module, contract.outputs, weight.device
        self.inputs = {
            name: weight.dtype if dtype in SIXTEEN_BITS else dtype for name, dtype in contract.dtypes.items()
        }

    @torch.inference_mode()
    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        # images come channels last, and convolutions add in the order of their memory, as in diffusers' own call
        output = self.module(**cast_inputs(self.inputs, inputs, self.device, contiguous=False))
        return dict(zip(self.outputs, output if isinstance(output, tuple) else (output,), strict=True))

    def reopen(self) -> bool:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.data = tensor.data.clone()
        return True

    def close(self) -> None:
        del self.module
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other engines cannot use what torch has reserved


def dtype_on(device: torch.device, precision: str, contract: Contract) -> torch.dtype:
    """Return the dtype in which a part computes, given the knob ``infer.precision``.

    ``auto`` means the exported graph's dtype on a GPU, usually fp16, and fp32 on a CPU. A part exported in fp32 because
    it overflows in fp16, such as a VAE, always computes in fp32; a part exported in bf16 never computes in fp16.
    """
    if contract.weights == torch.float32 or (precision == "auto" and device.type == "cpu"):
        return torch.float32
    if precision == "auto" or (precision, contract.weights) == ("fp16", torch.bfloat16):
        return contract.weights
    return PRECISIONS[precision]


def compiled(module: nn.Module, mode: str | None = None) -> nn.Module:
    """Let torch compile ``module`` block by block, in place; as a whole where it has no known blocks.

    ``mode`` is torch.compile's: ``max-autotune-no-cudagraphs`` also tries Triton's and CUTLASS's kernels, not only
    cuBLAS's. Equal blocks share the code compiled at the first call; compiling a whole network takes minutes. Natively
    quantized layers outside of blocks are compiled one by one, so that each quantizes its input in one kernel.
    """
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), MAX_COMPILATIONS))
    repeated = (getattr(child, "_repeated_blocks", None) or () for child in module.modules())  # as diffusers names them
    names = {*COMPILED_BLOCKS, *(name for block_names in repeated for name in block_names)}
    blocks = [child for child in module.modules() if type(child).__name__ in names]
    inside = {child for block in blocks for child in block.modules()}
    outside = (child for child in module.modules() if child not in inside)
    layers = [child for child in outside if isinstance(child, NativeLayer | RoundedConv)]
    for block in [*blocks, *layers] or [module]:
        block.compile(dynamic=False, mode=mode)
    return module


def placed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move ``module`` to ``device``, in place; parameters become ``dtype``, buffers (quantized weights) do not.

    On a GPU its memory format is channels last, the fastest for convolutions.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.to(device)
    return module.to(memory_format=torch.channels_last) if device.type == "cuda" else module  # type: ignore[call-overload]
