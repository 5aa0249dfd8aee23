"""Count a network's floating-point operations by torch's FlopCounterMode, on the meta device, without computing.

A multiplication with its addition counts as two operations; attention is included.
"""

import torch
from torch import Tensor, nn


def operations(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, dict[str, int]]:
    """Return the floating-point operations of one call on the meta device, in total and by submodule name."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        module(**inputs)
    root = f"{type(module).__name__}."
    of_submodules = {name.removeprefix(root): sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    return counter.get_total_flops(), of_submodules
