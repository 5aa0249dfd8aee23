"""The interface of every engine: a callable from named tensors to named tensors.

Outputs own their memory. The road not taken is a base class with buffers to allocate, bind and copy, as in NeMo and
demoDiffusion: there a second call overwrites the outputs of the first.
"""

from typing import Protocol

import torch

from sd_quant.devices import CPU


class Engine(Protocol):
    """A loaded network."""

    name: str  # that of its runtime in sd_quant.engines.RUNTIMES
    inputs: dict[str, torch.dtype]  # names of the inputs in their order, and the dtypes to which they are cast
    device: torch.device  # where it computes and leaves its outputs; inputs that are there already are not copied

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs, on the engine's device, for ``inputs`` from any device and of any dtype.

        Raises ValueError for wrong names and for shapes that the graph does not support, ConfigError for shapes
        outside the profile of a plan, because knobs chose both.
        """
        ...

    def reopen(self) -> bool:
        """Move the engine's memory, whose addresses change its speed by chance. Returns whether it moved."""
        ...

    def close(self) -> None:
        """Free the engine's memory; it cannot be called afterwards."""
        ...


def cast_inputs(
    expected: dict[str, torch.dtype],
    given: dict[str, torch.Tensor],
    device: torch.device = CPU,
    contiguous: bool = True,
) -> dict[str, torch.Tensor]:
    """The tensors in the expected order and dtype on ``device``, ``contiguous`` or in their own memory formats.

    Raises ValueError unless the names agree.
    """
    if expected.keys() != given.keys():
        raise ValueError(f"the engine takes inputs {sorted(expected)} but was given {sorted(given)}")
    cast = {name: given[name].detach().to(device, dtype) for name, dtype in expected.items()}
    return {name: tensor.contiguous() for name, tensor in cast.items()} if contiguous else cast
