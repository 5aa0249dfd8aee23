"""What a network computes of sizes alone, computed by torch outside of the graph.

Tables of positions depend on the size of the image and the length of the text, and some networks compute them in fp64,
by Python's numbers, or from arguments that are numbers of rows and columns. A module without weights whose outputs stay
the same with other numbers of the same shapes needs no place in the graph: its outputs are inputs of the graph.

At full size they are computed without weights: a network whose parameters are on the meta device is run until the last
of them. Whatever depends on a weight has no numbers then, and everything else has its own. The roads not taken are a
table of positional embeddings by class, and to freeze decisions by the inputs' numbers (``if mask.all()``) as they were
observed: of all pipelines HunyuanVideo 1.5 alone had a graph of use by that.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.models.empty import META, random_weights, reader, with_weights
from sd_quant.observed.calls import (
    Call,
    at,
    children,
    encoded,
    holds_tensors,
    identifier,
    leaves,
    rebuilt,
    tensors_in,
    tree_of,
)
from sd_quant.observed.pairs import mapped

ATEN = torch.ops.aten
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}
KEPT = 8  # results that are remembered
Outputs = dict[str, list[Any]]  # of each call of a network's modules, by their paths


class Enough(Exception):
    """Ends a run whose modules of interest have returned."""


class WithoutNumbers(TorchDispatchMode):
    """Operations with a meta tensor return meta tensors, all others compute on the CPU, whatever device is named."""

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        unknown = any(tensor.device == META for _, tensor in tensors_in([list(args), dict(kwargs or {})]))

        def change(value: Any) -> Any:
            if isinstance(value, torch.device):
                return META if unknown else torch.device("cpu")
            return value.to(META) if unknown and isinstance(value, Tensor) else value

        if unknown and func in INDEXING:  # how many places a mask has decides a shape
            args = (args[0], [each for index in args[1] for each in places(index)], *args[2:])
        args, kwargs = mapped((tuple(args), dict(kwargs or {})), change)
        return func(*args, **kwargs)


def places(index: Tensor | None) -> Sequence[Tensor | None]:
    """Returns the indices that a mask stands for where its numbers are known; any other index as it is."""
    is_mask = index is not None and index.dtype == torch.bool and not index.is_meta
    return index.nonzero(as_tuple=True) if is_mask else [index]  # type: ignore[union-attr]


def weightless(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have no parameter, by their paths, without those inside of others of them."""
    found: dict[str, nn.Module] = {}
    for path, module in network.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and not any(True for _ in module.parameters()):
            found[path] = module
    return found


@contextmanager
def replaced_calls(
    network: nn.Module, paths: Iterable[str], call: Callable[[str, Callable, tuple, dict], Any]
) -> Iterator[None]:
    """Let ``call`` compute the modules at ``paths``: it gets the path, the module's own forward, and the arguments."""
    modules = {path: network.get_submodule(path) for path in paths}
    for path, module in modules.items():
        forward = partial(call, path, module.forward)
        module.forward = lambda *args, forward=forward, **kwargs: forward(args, kwargs)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def look(network: nn.Module, method: str, arguments: Mapping[str, Any], paths: Collection[str]) -> Outputs:
    """Returns what a network computes in the modules at ``paths``."""
    seen = Outputs()

    def call(path: str, own: Callable, args: tuple, kwargs: dict) -> Any:
        seen.setdefault(path, []).append(own(*args, **kwargs))
        return seen[path][-1]

    with torch.no_grad(), replaced_calls(network, paths, call):
        run(network, method, arguments)
    return seen


def run(network: nn.Module, method: str, arguments: Mapping[str, Any]) -> Any:
    return (network if method == "forward" else getattr(network, method))(**arguments)


def same(first: Any, second: Any) -> bool:
    """Whether two nested values are equal."""
    found, expected = children(first), children(second)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    if found is not None and expected is not None:
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(a == b and same(x, y) for (a, x), (b, y) in pairs)
    return type(first) is type(second) and first == second


def other_numbers(value: Any, seed: int = 0) -> Any:
    """Returns nested arguments with other numbers in their tensors, of the same shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            return leaf + torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) * (leaf.abs().mean() + 0.1)
        if leaf.numel() and leaf.max() <= 1:  # a mask: the first of each row stays
            drawn = torch.rand(leaf.shape, generator=generator) < 0.5
            drawn[..., :1] = True
            return drawn.to(leaf.dtype)
        order = torch.randperm(leaf.numel(), generator=generator)
        mixed = leaf.flatten()[order].reshape(leaf.shape)
        return leaf // 2 if torch.equal(mixed, leaf) else mixed

    return mapped(value, change)


def of_sizes_alone(build: Callable[[], nn.Module], method: str, calls: Sequence[Call]) -> dict[str, int]:
    """Returns the modules of sizes alone by their paths, and how often each is called.

    Their outputs hold tensors, and are the same in all steps of the first run, with other numbers, and with other
    weights. Weights are random, because a weight of 0 lets an output look constant. ``build`` returns the network
    without weights.
    """
    network, other = (
        with_weights(each, reader(each, random_weights(each, seed))) for seed, each in enumerate((build(), build()))
    )
    paths = list(weightless(network))
    inputs = [call.arguments for call in calls if call.run == calls[0].run and shapes_of(call) == shapes_of(calls[0])]
    try:
        seen = [look(network, method, each, paths) for each in inputs]
        seen.append(look(other, method, other_numbers(inputs[0]), paths))
    except Exception:  # whatever a network raises for numbers that it does not expect
        return {}
    return {
        path: len(outputs)
        for path, outputs in seen[0].items()
        if holds_tensors(outputs) and all(same(outputs, other.get(path)) for other in seen[1:])
    }


def shapes_of(call: Call) -> list[tuple]:
    return [(path, tuple(tensor.shape)) for path, tensor in tensors_in(call.arguments)]


def input_trees(outputs: Mapping[str, Sequence[Any]]) -> dict[str, list[dict]]:
    """Returns the structure of each module's outputs for JSON, with a name for each tensor."""

    def named(path: str, number: int, output: Any) -> dict:
        def leaf(value: Any, inner: tuple) -> dict:
            if isinstance(value, Tensor):
                name = identifier((path.replace(".", "_"), number, *inner))
                return {"tensor": name} | ({"complex": True} if value.is_complex() else {})
            return {"constant": encoded(value, (path, number, *inner))}

        return tree_of(output, leaf)

    return {path: [named(path, *each) for each in enumerate(of_calls)] for path, of_calls in outputs.items()}


def named_tensors(trees: Mapping[str, Sequence[dict]], outputs: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Returns the tensors of the modules' outputs by the names in their trees.

    Raises ArtifactError for outputs of another structure, or with another constant among them.
    """
    tensors: dict[str, Tensor] = {}
    for path, of_calls in trees.items():
        for tree, output in zip(of_calls, outputs[path], strict=True):
            for inner, leaf in leaves(tree):
                value = at(output, inner)
                if "tensor" in leaf and isinstance(value, Tensor):
                    tensors[leaf["tensor"]] = value
                elif "tensor" in leaf or value != rebuilt(leaf, {}):
                    raise ArtifactError(f"{path} returns {value!r:.80}, which follows the size and is no tensor")
    return tensors


def known_without_weights(build: Callable[[], nn.Module], method: str, arguments: Mapping[str, Any]) -> Outputs:
    """Returns the outputs of modules without weights whose arguments depend on no weight."""
    network, seen = build().eval(), Outputs()

    def call(path: str, own: Callable, args: tuple, kwargs: dict) -> Any:
        output = own(*args, **kwargs)
        if path not in unknown and all(tensor.device != META for _, tensor in tensors_in([args, kwargs, output])):
            seen.setdefault(path, []).append(output)
        else:
            unknown.add(path)
            seen.pop(path, None)
        return output

    unknown: set[str] = set()
    try:
        with torch.no_grad(), WithoutNumbers(), replaced_calls(network, weightless(network), call):
            run(network, method, arguments)
    except Exception:  # at the first decision by what depends on weights
        return {}
    return seen


class Outside:
    """Computes some of a network's modules without weights. Can be pickled if ``build`` can.

    ``build`` returns the network with its parameters on the meta device. ``counts`` says how often each module is
    called, by its path. With ``of_sizes`` they depend on sizes alone, and their outputs are remembered.
    """

    def __init__(self, build: Callable[[], nn.Module], method: str, counts: Mapping[str, int], of_sizes: bool = True):
        self.build, self.method, self.counts, self.of_sizes = build, method, dict(counts), of_sizes
        self.network: nn.Module | None = None
        self.known: dict[str, Outputs] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"network": None, "known": {}}

    def __call__(self, arguments: Mapping[str, Any]) -> Outputs:
        """Returns the modules' outputs in a call with these nested ``arguments``.

        Raises SdQuantError where they depend on weights.
        """
        key = repr(mapped(dict(arguments), lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf))
        if not self.of_sizes or key not in self.known:
            self.network = self.network or self.build().eval()
            seen = self.computed(self.network, arguments)
            while len(self.known) >= KEPT:
                del self.known[next(iter(self.known))]
            self.known[key] = seen
        return self.known[key]

    def computed(self, network: nn.Module, arguments: Mapping[str, Any]) -> Outputs:
        seen = Outputs()

        def call(path: str, own: Callable, args: tuple, kwargs: dict) -> Any:
            args, kwargs = mapped((args, kwargs), with_numbers)
            seen.setdefault(path, []).append(own(*args, **kwargs))
            if sum(map(len, seen.values())) >= sum(self.counts.values()):
                raise Enough
            return seen[path][-1]

        try:
            with torch.no_grad(), WithoutNumbers(), replaced_calls(network, self.counts, call):
                run(network, self.method, arguments)
        except Enough:
            return seen
        except Exception as error:  # whatever a network raises without numbers
            raise SdQuantError(
                f"{type(network).__name__} needs weights for its positions ({error}); it is not served"
            ) from error
        raise ArtifactError(f"{type(network).__name__} computes fewer positions than it was observed to")


def with_numbers(value: Any) -> Any:
    """Returns zeros for a tensor without numbers. A module of sizes alone does not look at them."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.device == META else value


@contextmanager
def given_outputs(
    network: nn.Module, trees: Mapping[str, Sequence[dict]], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Let the modules of ``trees`` return these ``tensors`` instead of computing anything, in this context."""
    calls = dict.fromkeys(trees, 0)

    def call(path: str, own: Callable, args: tuple, kwargs: dict) -> Any:
        if calls[path] == len(trees[path]):
            raise ArtifactError(f"{path} is called more often than it was observed to be")
        tree = trees[path][calls[path]]
        calls[path] += 1
        return rebuilt(tree, tensors)

    with replaced_calls(network, trees, call):
        yield
