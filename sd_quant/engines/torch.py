"""The framework itself as an engine: the baseline of every comparison and the reference of every parity check."""

import torch
from torch import nn

from sd_quant.engines.base import cast_inputs
from sd_quant.models.parts import Contract


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
