"""Derivation of a network's signature (tensor inputs, dynamic axes, constants) by comparing recorded calls.

Arguments may be nested lists, tuples and dictionaries. Each tensor in them becomes a named input. An argument without
tensors (None, flags, numbers, tuples of sizes) is a constant of the graph, with its recorded value. An axis whose
length is equal in all calls is static. Any other axis is dynamic and named after what changes its length: batch, image
size or text; axes that have equal lengths in each call have one name. Alternative not taken: reading the network's
Python signature or documentation, which do not say which axes of two tensors agree.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pkgutil import resolve_name
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError, SdQuantError

BASE, LARGER, BATCH, PROMPT = "base", "larger", "batch", "prompt"  # runs of a pipeline
FOLLOWS = {BATCH: "batch", LARGER: "size", PROMPT: "text"}  # names of axes that differ in one run only
SCALAR = re.compile(r"time|sigma|guidance|^t$|_t$")  # numbers that a network takes as a tensor, too
MISSING = object()
LIBRARIES = ("diffusers", "transformers")  # whose classes of outputs are built again
Tree = dict[str, Any]  # a nested argument for JSON, see ``tree_of``
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Call:
    """One call of a network by its pipeline."""

    # By parameter name, bound to the signature of the method, with its **kwargs among them; may nest dicts, lists and
    # tuples
    arguments: dict[str, Any]
    run: str  # pipeline run: base, larger (another image size), batch (another batch size), prompt (a longer prompt)
    step: int  # number of scheduler steps before the call


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a network, common to all of its recorded calls."""

    arguments: Tree  # structure of the calls' arguments
    inputs: dict[str, Shape]  # of each tensor; a string is a dynamic axis
    dtypes: dict[str, str]  # of the tensors, as torch calls them
    example: dict[str, int]  # sizes of the dynamic axes in one of the calls
    outputs: Tree = field(default_factory=dict)
    results: tuple[str, ...] = ()  # names of the outputs' tensors
    outside: dict[str, list[Tree]] = field(default_factory=dict)  # by module path, outputs computed elsewhere
    notes: tuple[str, ...] = ()  # sentences about arguments and outputs that were converted or left out


def restored(kind: Any, value: Any) -> Any:
    """Build a value of type ``kind`` from its ``asdict`` form after JSON, which turns tuples into lists."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: restored(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    if origin is UnionType and value is not None:
        return restored(inner[0], value)
    if origin is dict:
        return {key: restored(inner[1], each) for key, each in value.items()}
    if origin in (list, tuple):
        kinds = inner[:1] * len(value) if origin is list or ... in inner else inner
        return origin(map(restored, kinds, value))
    return value


def identifier(path: Sequence[object]) -> str:
    """Return an identifier for a path in nested arguments: ("img_shapes", 0, 1) -> img_shapes_0_1."""
    name = re.sub(r"\W+", "_", "_".join(str(key) for key in path), flags=re.ASCII)
    return name if name[:1].isalpha() else f"x_{name}"


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a container; None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_distribution(value):
        return [("parameters", value.parameters)]
    return list(enumerate(value)) if isinstance(value, list | tuple) else None


def is_distribution(value: Any) -> bool:
    """Whether a value is a latent distribution with one tensor ``parameters``, as an autoencoder's encoder returns."""
    return isinstance(getattr(value, "parameters", None), Tensor)


def tensors_in(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yield (path, tensor) for each tensor in a nested value."""
    if isinstance(value, Tensor):
        yield path, value
    for key, child in children(value) or ():
        yield from tensors_in(child, (*path, key))


def encoded(value: Any, path: Sequence[object]) -> Any:
    """Convert a value without tensors for JSON; a tuple becomes {"tuple": [...]}, a dictionary {"dict": {...}}.

    Raises ArtifactError for a value of any type except None, bool, int, float, str, and containers of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encoded(each, path) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(each, path) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(each, path) for key, each in value.items()}}
    raise ArtifactError(
        f"the argument {identifier(path)} is of type {type(value).__name__}, expected tensors, None, flags, numbers, "
        "texts and containers of them; this network cannot be exported as it is called"
    )


def decoded(value: Any) -> Any:
    """Convert the result of ``encoded`` back to the original value."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if isinstance(value, Mapping):
        ((kind, inner),) = value.items()
        return tuple(map(decoded, inner)) if kind == "tuple" else {key: decoded(each) for key, each in inner.items()}
    return value


def tree_of(value: Any, leaf: Callable[[Any, tuple], Tree], path: tuple = ()) -> Tree:
    """Return the structure of a nested value as a tree for JSON.

    A container of tensors becomes {"list" | "tuple" | "dict": children}; a tensor, and a value without any tensor,
    becomes ``leaf(value, path)``.
    """
    found = None if isinstance(value, Tensor) else children(value)
    if found is None or not holds_tensors(value):
        return leaf(value, path)
    trees = [(key, tree_of(child, leaf, (*path, key))) for key, child in found]
    if isinstance(value, Mapping) or is_distribution(value):
        return {"dict": {str(key): tree for key, tree in trees}, **class_of(value)}
    return {"list" if isinstance(value, list) else "tuple": [tree for _, tree in trees]}


def output_class(name: str) -> type:
    """Return the class with this ``name``, "module:class" as from ``class_of``; the name may be from a hostile file.

    Raises SdQuantError for a class other than the model outputs of diffusers and transformers.
    """
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.utils import BaseOutput
    from transformers.utils import ModelOutput

    root, accepted = name.partition(".")[0], (BaseOutput, ModelOutput, DiagonalGaussianDistribution)
    found = resolve_name(name) if root in LIBRARIES else None
    if not (isinstance(found, type) and issubclass(found, accepted)):
        raise SdQuantError(
            f"{name[:200]} is no class of outputs of diffusers or transformers; observe the folder again"
        )
    return found


def class_of(value: Any) -> dict[str, str]:
    """Return {"class": "module:name"} for a dataclass or latent distribution; an empty dictionary for other values."""
    kind = type(value)
    return {"class": f"{kind.__module__}:{kind.__qualname__}"} if is_dataclass(value) or is_distribution(value) else {}


def leaves(tree: Tree, path: tuple = ()) -> Iterator[tuple[tuple, Tree]]:
    """Yield (path, leaf) for each leaf of a tree from ``tree_of``."""
    for kind in ("list", "tuple", "dict"):
        if kind in tree:
            for key, child in tree[kind].items() if kind == "dict" else enumerate(tree[kind]):
                yield from leaves(child, (*path, key))
            return
    yield path, tree


def rebuilt(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Build the value described by ``tree`` from its constants and ``tensors`` by name (complex as reals [..., 2])."""
    if "list" in tree:
        return [rebuilt(each, tensors) for each in tree["list"]]
    if "tuple" in tree:
        return tuple(rebuilt(each, tensors) for each in tree["tuple"])
    if "dict" in tree:
        values = {key: rebuilt(each, tensors) for key, each in tree["dict"].items()}
        return output_class(tree["class"])(**values) if "class" in tree else values
    if "constant" in tree:
        return decoded(tree["constant"])
    tensor = tensors[tree["tensor"]]
    return torch.view_as_complex(tensor) if tree.get("complex") else tensor


def kind_of(value: Any) -> str:
    """Describe a tensor or constant in words, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.ndim} axes in {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"


def structure_of(arguments: Mapping[str, Any]) -> str:
    """Return a key that is equal for arguments with constants and like tensors (rank, dtype) in the same places."""

    def leaf(value: Any, path: tuple) -> Tree:
        return {"kind": kind_of(value) if value is None or isinstance(value, Tensor) else "constant"}

    return json.dumps({name: tree_of(value, leaf) for name, value in arguments.items()}, sort_keys=True)


def one_structure(calls: Sequence[Call]) -> list[int]:
    """Return the indices of the calls that have the same structure as the first call."""
    structures = [structure_of(call.arguments) for call in calls]
    return [number for number, structure in enumerate(structures) if structure == structures[0]]


def at(value: Any, path: Sequence[Any]) -> Any:
    """Return the item of a nested value at a path of keys and indices."""
    for key in path:
        value = value[key]
    return value


def changes_between_steps(calls: Sequence[Call], values: Sequence[Any]) -> bool:
    """Whether the ``values``, one for each call, change between the denoising steps of a run."""
    seen: dict[str, dict[int, list]] = {}
    for call, value in zip(calls, values, strict=True):
        seen.setdefault(call.run, {}).setdefault(call.step, []).append(value)
    return any(step != next(iter(steps.values())) for steps in seen.values() for step in steps.values())


def signature_of(calls: Sequence[Call], extra: Mapping[str, Sequence[Tensor]] | None = None) -> Signature:
    """Derive the signature, except outputs, of a network from calls of the same structure (see ``one_structure``).

    ``extra`` holds further inputs: by name, one tensor for each call. A number that changes between steps becomes a
    scalar tensor if ``SCALAR`` matches its name (a timestep, a guidance scale).
    Raises ArtifactError for any other argument that is not a tensor and changes between steps.
    """
    first, notes, tensors = calls[0].arguments, list[str](), dict[str, list[Tensor]]()

    def leaf(value: Any, path: tuple) -> Tree:
        values, name = [at(call.arguments, path) for call in calls], identifier(path)
        if isinstance(value, Tensor):
            tensors[name] = [as_reals(each) for each in values]
            return {"tensor": name} | ({"complex": True} if value.is_complex() else {})
        constant: Tree = {"constant": encoded(value, path)}
        if changes_between_steps(calls, values):
            number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
            if not number or not SCALAR.search(name):
                raise ArtifactError(
                    f"{name} is an argument that changes between steps and no tensor ({kind_of(values[0])}, then "
                    f"{differing(values)}); this network cannot be exported"
                )
            tensors[name] = [torch.as_tensor(each, dtype=torch.float32) for each in values]
            notes.append(f"{name} is a number and becomes a tensor")
            return {"tensor": name, "number": True}
        if any(each != value for each in values):
            notes.append(f"{name} follows the size: {kind_of(value)}, then {differing(values)}")
            constant["sized"] = True
        return constant

    arguments = {"dict": {name: tree_of(value, leaf, (name,)) for name, value in first.items()}}
    tensors |= {name: [as_reals(each) for each in values] for name, values in (extra or {}).items()}
    shapes = {name: [tuple(each.shape) for each in values] for name, values in tensors.items()}
    inputs, axes = named_axes(shapes, [call.run for call in calls])
    dtypes = {name: str(values[0].dtype).removeprefix("torch.") for name, values in tensors.items()}
    return Signature(arguments, inputs, dtypes, example_of(axes), notes=tuple(notes))


def as_reals(tensor: Tensor) -> Tensor:
    """Return a complex tensor [...] as reals [..., 2]; a real tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def differing(values: Sequence[Any]) -> str:
    return kind_of(next(each for each in values if each != values[0]))


def named_axes(
    shapes: Mapping[str, Sequence[tuple[int, ...]]], runs: Sequence[str]
) -> tuple[dict[str, Shape], dict[str, tuple[int, ...]]]:
    """Name the axes that differ between calls; return each tensor's shape with these names, and each name's sizes.

    ``shapes`` maps a tensor's name to its shape in each call; ``runs`` names the pipeline run of each call.
    """
    names: dict[tuple[int, ...], str] = {}

    def name_of(sizes: tuple[int, ...]) -> int | str:
        if len(set(sizes)) == 1:
            return sizes[0]
        if sizes not in names:
            word = followed(sizes, runs)
            count = sum(name.rstrip("_0123456789") == word for name in names.values()) + 1
            names[sizes] = word if word == "batch" and count == 1 else f"{word}_{count}"
        return names[sizes]

    named = {name: tuple(map(name_of, zip(*of_calls, strict=True))) for name, of_calls in shapes.items()}
    return named, {name: sizes for sizes, name in names.items()}


def followed(sizes: Sequence[int], runs: Sequence[str]) -> str:
    """Return what changes an axis, from its size and run in each call: "batch", "size" or "text", else "tokens"."""
    of_base = {size for size, run in zip(sizes, runs, strict=True) if run == runs[0]}
    differ = {run for size, run in zip(sizes, runs, strict=True) if {size} != of_base}
    return FOLLOWS.get(differ.pop(), "tokens") if len(differ) == 1 else "tokens"


def example_of(axes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Choose sizes of the dynamic axes for tracing: distinct, and above 1 if possible, as tracers make 1 static.

    ``axes`` holds sizes by call. One call's are chosen, its batch enlarged if no other axis depends on the batch.
    """
    calls = [dict(zip(axes, sizes, strict=True)) for sizes in zip(*axes.values(), strict=True)]
    if "batch" in axes and not any(name.startswith("tokens") for name in axes):
        calls += [{**call, "batch": max(axes["batch"])} for call in calls]
    return max(calls, key=lambda call: (min(call.values()) > 1, len({*call.values()}), sum(call.values())), default={})


def given_tensors(signature: Signature, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the input tensors by name from the arguments of a call.

    Raises SdQuantError for a call whose structure or constants differ from the recorded calls.
    """
    tensors: dict[str, Tensor] = {}
    expected = signature.arguments["dict"]
    if unknown := [name for name in given if name not in expected]:
        raise SdQuantError(f"the network is called with {unknown[0]}, which was not so when it was observed; {AGAIN}")
    for path, leaf in leaves(signature.arguments):
        name = identifier(path)
        try:
            value = at(given, path)
        except (KeyError, IndexError, TypeError):
            value = MISSING
        if "tensor" in leaf:
            numeric = leaf.get("number") and isinstance(value, int | float)
            value = torch.as_tensor(value, dtype=torch.float32) if numeric else value
            value = as_reals(value) if isinstance(value, Tensor) else value
            shape = signature.inputs[name]
            if not isinstance(value, Tensor) or value.ndim != len(shape):
                raise SdQuantError(
                    f"the argument {name} is {shown(value)}, expected a tensor of shape {shape} as observed; {AGAIN}"
                )
            tensors[name] = value
        elif value is MISSING or (not leaf.get("sized") and value != rebuilt(leaf, {})) or holds_tensors(value):
            raise SdQuantError(
                f"the argument {name} is {shown(value)}, expected {rebuilt(leaf, {})!r:.80} as observed; {AGAIN}"
            )
    return tensors


AGAIN = "call the pipeline as it was observed, or observe it again"


def holds_tensors(value: Any) -> bool:
    return any(True for _ in tensors_in(value))


def shown(value: Any) -> str:
    if value is MISSING:
        return "missing"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"


def with_outputs(signature: Signature, output: Any) -> Signature:
    """Add the structure of ``output``, except caches. Raises ArtifactError for an output without tensors."""
    results: dict[int, str] = {}  # by the tensor's identity: an encoder returns its last hidden state twice
    notes = list(signature.notes)

    def leaf(value: Any, path: tuple) -> Tree:
        if isinstance(value, Tensor):
            return {"tensor": results.setdefault(id(value), identifier(("out", *path)))}
        try:
            return {"constant": encoded(value, path)}
        except ArtifactError:
            notes.append(f"{identifier(path or ('output',))} is a {type(value).__name__} and is left out")
            return {"constant": None}

    tree = tree_of(output, leaf)
    if not results:
        raise ArtifactError(f"the network returns a {type(output).__name__} without a tensor; it cannot be exported")
    return replace(signature, outputs=tree, results=tuple(results.values()), notes=tuple(notes))


def result_tensors(output: Any) -> tuple[Tensor, ...]:
    """Return the distinct tensors of an output in the order of ``Signature.results``."""
    return tuple({id(tensor): tensor for _, tensor in tensors_in(output)}.values())
