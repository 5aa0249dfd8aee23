"""Networks without weights, built and run in seconds at any size, with the buffers that constructors compute.

A network of 20 billion parameters is built with its parameters on the meta device, which takes no memory. Buffers and
other tensors of a constructor (position tables, frequencies) hold their numbers: code may read them, and tensors that
no checkpoint holds become constants of the graph. "Weights" are parameters, and float buffers that checkpoints hold.
Alternative not taken: ``torch.device("meta")`` around the constructor, whose buffers would have no numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sd_quant.errors import ArtifactError

META = torch.device("meta")
ATEN = torch.ops.aten
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}
SPREAD = 0.02  # standard deviation of random weights
Read = Callable[[str], Tensor]  # a weight by its name


@contextmanager
def without_weights() -> Iterator[None]:
    """Build networks in this context with their parameters on the meta device and without their initialization.

    A parameter that several modules share stays shared.
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device != META:
            parameter = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
        register(module, name, parameter)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "register_parameter", register_empty))
        for name in dir(nn.init):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(mock.patch.object(nn.init, name, lambda tensor, *_, **__: tensor))
        yield


def replace_parameters(network: nn.Module, made: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Replace each parameter of ``network`` by ``made(name, parameter)``, in place. Returns the network.

    ``made`` is called once for a parameter that several modules share, which stays shared.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one is kept, so that no id is used twice
    for prefix, module in network.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in replaced:
                    value = made(f"{prefix}.{name}" if prefix else name, parameter)
                    replaced[id(parameter)] = parameter, nn.Parameter(value, requires_grad=False)
                module._parameters[name] = replaced[id(parameter)][1]
    return network


def replace_buffers(network: nn.Module, made: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Replace each persistent float buffer of ``network`` by ``made(name, buffer)``, in place. Returns the network."""
    for prefix, module in network.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = made(f"{prefix}.{name}" if prefix else name, buffer)
    return network


def shared_names(network: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each weight's name to all names of the same (shared) weight, the name itself included."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return {name: same for same in names.values() for name in same}


def reader(network: nn.Module, weights: Mapping[str, Tensor]) -> Read:
    """Return a function that reads a weight of ``network`` by its name, or by another name of a shared weight.

    The function raises ArtifactError for a weight that ``weights`` lack.
    """
    shared = shared_names(network)

    def read(name: str) -> Tensor:
        found = next((each for each in (name, *shared.get(name, ())) if each in weights), None)
        if found is None:
            raise ArtifactError(f"{type(network).__name__} has a weight {name} that the checkpoint lacks")
        return weights[found].detach()

    return read


def with_weights(network: nn.Module, read: Read) -> nn.Module:
    """Give ``network`` the weights that ``read`` returns, in fp32, in place. Returns the network."""
    replace_parameters(network, lambda name, _: read(name).float())
    return replace_buffers(network, lambda name, buffer: read(name).to(buffer.dtype)).eval()


def random_weights(network: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return small random weights in fp32 by name; weights of norms are about 1, so that signals do not fade.

    Buffers keep the numbers that the constructor has computed.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, parameter: Tensor) -> Tensor:
        ones = float(parameter.ndim == 1 and name.endswith("weight"))
        return torch.randn(parameter.shape, generator=generator) * SPREAD + ones

    return {name: drawn(name, each) for name, each in network.named_parameters()} | dict(network.named_buffers())


def shortened(network: nn.Module, blocks: int) -> nn.Module:
    """Cut every ModuleList whose modules are of one class to its first ``blocks``, in place. Returns the network."""
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) > blocks and len({type(each) for each in module}) == 1:
            del module[blocks:]
    return network


def run(network: nn.Module, method: str, arguments: Mapping[str, Any]) -> Any:
    return (network if method == "forward" else getattr(network, method))(**arguments)


@contextmanager
def autocast_of_meta() -> Iterator[None]:
    """Make torch.autocast do nothing for the meta device, which it does not support, in this context."""
    known = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else known(device_type, *args, **kwargs)

    with mock.patch.object(torch, "autocast", autocast):
        yield


class WithoutNumbers(TorchDispatchMode):
    """Dispatch mode: operations with a meta tensor return meta tensors, all other operations compute on the CPU."""

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        unknown = any(isinstance(each, Tensor) and each.device == META for each in pytree.tree_leaves((args, kwargs)))

        def change(value: Any) -> Any:
            if isinstance(value, torch.device):
                return META if unknown else torch.device("cpu")
            return value.to(META) if unknown and isinstance(value, Tensor) else value

        if unknown and func in INDEXING:  # how many places a mask has decides a shape
            args = (args[0], [each for index in args[1] for each in places(index)], *args[2:])
        args, kwargs = pytree.tree_map(change, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def places(index: Tensor | None) -> Sequence[Tensor | None]:
    """Convert a boolean mask with known numbers to the indices that it selects; return any other index unchanged."""
    is_mask = index is not None and index.dtype == torch.bool and not index.is_meta
    return index.nonzero(as_tuple=True) if is_mask else [index]  # type: ignore[union-attr]
