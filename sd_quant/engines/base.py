"""The interface of every engine: a callable from named tensors to named tensors.

Outputs own their memory. Alternative not taken: a base class with buffers to allocate, bind and copy, as in NeMo and
demoDiffusion, where a second call overwrites the outputs of the first.
"""

from typing import Protocol

import torch

from sd_quant.devices import CPU


class Engine(Protocol):
    """A network loaded in some runtime, ready to be called."""

    name: str  # of its runtime, a key of sd_quant.engines.RUNTIMES
    inputs: dict[str, torch.dtype]  # names of the inputs in their order, and the dtypes to which they are cast
    device: torch.device  # where it computes and leaves its outputs; inputs that are there already are not copied

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs, on the engine's device, for ``inputs`` on any device and of any dtype.

        Raises ValueError for wrong names and for shapes that the graph does not support, ConfigError for shapes outside
        a TensorRT plan's optimization profile, because the user configures shapes and profile.
        """
        ...

    def reopen(self) -> bool:
        """Move the engine to other memory addresses, which affect its speed by chance; return whether it moved."""
        ...

    def close(self) -> None:
        """Free the engine's memory; the engine cannot be called afterwards."""
        ...


def cast_inputs(
    expected: dict[str, torch.dtype],
    given: dict[str, torch.Tensor],
    device: torch.device = CPU,
    contiguous: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the inputs ``given`` on ``device``, in the order and dtypes of ``expected``, as contiguous tensors.

    Unless ``contiguous``, memory formats stay. Raises ValueError for missing or unknown names.
    """
    if expected.keys() != given.keys():
        raise ValueError(f"the engine takes inputs {sorted(expected)} but was given {sorted(given)}")
    cast = {name: given[name].detach().to(device, dtype) for name, dtype in expected.items()}
    return {name: tensor.contiguous() for name, tensor in cast.items()} if contiguous else cast
