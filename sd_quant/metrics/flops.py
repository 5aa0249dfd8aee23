"""How much arithmetic a network is, and how fast this machine does arithmetic: enough to say how long work will take.

Two operations for each multiplication with its addition, attention's products included, as everybody counts. Counted on
the meta device by torch's own counter, so nothing is computed.
"""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

SIDE, SECONDS = 1024, 0.5  # of the matrices that the processor is timed on, and for how long


def operations(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, dict[str, int]]:
    """Floating-point operations of one call on the meta device: in all, and of each submodule by its name."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**inputs)
    root = f"{type(module).__name__}."
    of_submodules = {name.removeprefix(root): sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    return counter.get_total_flops(), of_submodules


def operations_a_second(clock: Callable[[], float] = perf_counter) -> float:
    """How many fp32 operations this machine's processor does a second, in matrix products, as a UNet mostly is."""
    matrix, calls = torch.rand(SIDE, SIDE), 0
    matrix @ matrix
    start = clock()
    while (seconds := clock() - start) < SECONDS:
        matrix @ matrix
        calls += 1
    return 2 * SIDE**3 * calls / seconds
