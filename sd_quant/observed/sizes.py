"""Modules whose outputs depend on tensor sizes alone (position tables), computed by torch outside of the graph.

Tables of positions depend on the size of the image and the length of the text. Some networks compute them in fp64, with
Python numbers, or from arguments that count rows and columns. A module without weights whose outputs depend on the
shapes of the network's inputs alone needs no place in the graph: its outputs become inputs of the graph.

At full size such modules are computed without weights: a network with parameters on the meta device runs until the last
of the modules returns. Tensors that depend on weights have no numbers then, all other tensors do. Alternatives not
taken: a table of positional embeddings by class; and freezing decisions that code makes by the inputs' numbers (``if
mask.all()``) as recorded, which gave a useful graph for HunyuanVideo 1.5 alone.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.models.empty import META, WithoutNumbers, random_weights, reader, run, with_weights
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

KEPT = 8  # most results in the cache
Outputs = dict[str, list[Any]]  # by module path, the output of each call of the module


class Enough(Exception):
    """Raised to end a network's run as soon as the modules of interest have returned."""


def weightless(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules without parameters, by their paths."""
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
    """Replace the forward of the modules at ``paths`` in this context by ``call(path, own forward, args, kwargs)``."""
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
    """Run a network; return the output of each call of its modules at ``paths``, by path."""
    seen = Outputs()

    def call(path: str, own: Callable, args: tuple, kwargs: dict) -> Any:
        seen.setdefault(path, []).append(own(*args, **kwargs))
        return seen[path][-1]

    with torch.no_grad(), replaced_calls(network, paths, call):
        run(network, method, arguments)
    return seen


def same(first: Any, second: Any) -> bool:
    """Whether two nested values are equal in structure, shapes, dtypes and numbers."""
    found, expected = children(first), children(second)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    if found is not None and expected is not None:
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(a == b and same(x, y) for (a, x), (b, y) in pairs)
    return type(first) is type(second) and first == second


def other_numbers(value: Any, seed: int = 0) -> Any:
    """Return nested arguments with other numbers in their tensors, of the same shapes and dtypes."""
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
    """Return the paths of the modules whose outputs depend on sizes alone, and how often each module is called.

    Outputs of such modules hold tensors, and stay equal in all steps of the first run, and when the inputs' numbers or
    the weights change. Weights are random, because weights of 0 make outputs look constant. ``build`` returns the
    network without weights. The result is empty for a network that fails with other numbers.
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
    """Return, by module path, a tree for JSON (``tree_of``) of each call's output, with a name for each tensor."""

    def named(path: str, number: int, output: Any) -> dict:
        def leaf(value: Any, inner: tuple) -> dict:
            if isinstance(value, Tensor):
                name = identifier((path.replace(".", "_"), number, *inner))
                return {"tensor": name} | ({"complex": True} if value.is_complex() else {})
            return {"constant": encoded(value, (path, number, *inner))}

        return tree_of(output, leaf)

    return {path: [named(path, *each) for each in enumerate(of_calls)] for path, of_calls in outputs.items()}


def named_tensors(trees: Mapping[str, Sequence[dict]], outputs: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Return the tensors of the modules' outputs by their names in ``trees``.

    Raises ArtifactError for outputs whose tensors or constants are not where the trees have them.
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
    """Return outputs, by path, of modules without weights whose arguments depend on no weight; {} if the run fails."""
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
    """Callable for outputs of modules that a graph lacks, computed without weights. Can be pickled if ``build`` can.

    ``build`` returns the network with its parameters on the meta device. ``counts`` is the number of calls by module
    path. With ``of_sizes`` the modules depend on sizes alone, so that outputs are cached by the arguments' shapes.
    """

    def __init__(self, build: Callable[[], nn.Module], method: str, counts: Mapping[str, int], of_sizes: bool = True):
        self.build, self.method, self.counts, self.of_sizes = build, method, dict(counts), of_sizes
        self.network: nn.Module | None = None
        self.known: dict[str, Outputs] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"network": None, "known": {}}

    def __call__(self, arguments: Mapping[str, Any]) -> Outputs:
        """Return the modules' outputs in a call with these nested ``arguments``.

        Raises SdQuantError for modules that depend on weights, ArtifactError for fewer calls than in ``counts``.
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
    """Return zeros for a meta tensor, any other value unchanged; for modules whose outputs depend on sizes alone."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.device == META else value


@contextmanager
def given_outputs(
    network: nn.Module, trees: Mapping[str, Sequence[dict]], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Make the modules at the paths of ``trees`` return ``tensors`` in this context, without computing."""
    calls = dict.fromkeys(trees, 0)

    def call(path: str, own: Callable, args: tuple, kwargs: dict) -> Any:
        if calls[path] == len(trees[path]):
            raise ArtifactError(f"{path} is called more often than it was observed to be")
        tree = trees[path][calls[path]]
        calls[path] += 1
        return rebuilt(tree, tensors)

    with replaced_calls(network, trees, call):
        yield
