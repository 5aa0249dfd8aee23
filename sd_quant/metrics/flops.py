"""Counts a network's arithmetic: two operations for a multiplication with its addition, attention's included.

torch's own counter counts on the meta device, so nothing is computed.
"""

import time

import torch
from torch import Tensor, nn


def operations(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, dict[str, int]]:
    """Floating-point operations of one call on the meta device, in total and by the names of submodules."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        module(**inputs)
    root = f"{type(module).__name__}."
    of_submodules = {name.removeprefix(root): sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    return counter.get_total_flops(), of_submodules


def rate(size: int = 1024, seconds: float = 0.2) -> float:
    """Operations per second in products of two matrices in fp32 on the CPU, here and now: no network is faster."""
    x = torch.rand(size, size)
    torch.mm(x, x)
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        torch.mm(x, x)
        count += 1
    return 2 * size**3 * count / elapsed
