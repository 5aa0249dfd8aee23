"""Recording (tape) of all ATen operations in one run of a network: the tensors each reads, and the module that calls.

A torch dispatch mode sees each operation, whatever Python code led to it. In inference mode torch does not decompose
linears, norms and attention before the mode sees them, so a tape of Flux has 100 operations a block, not 300. Tensors
on the meta device have shapes and no content, so a network of any size is recorded in seconds and without memory. The
tape holds no tensor: a ``Value`` stands for each tensor and is found by weak reference, so that no id is used twice.

Alternative not taken: torch.export, which forgets which tensors were one object in Python (it merges equal slices and
views), and does not trace some networks that a tape records without difficulty.

A tensor that is changed in place becomes a new value, and so does every view of it.
"""

from __future__ import annotations

import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sd_quant.errors import SdQuantError
from sd_quant.models.empty import WithoutNumbers, autocast_of_meta, run
from sd_quant.text import one_line

# Operations that take a part of a tensor; those with several outputs are noted as one slice for each.
PARTS = ("slice", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind")
SHAPE_OF_FIRST_ONLY = ("type_as", "view_as", "expand_as", "reshape_as")  # the second operand only says how


class NotObservable(SdQuantError):
    """Raised when a network fails in the run that should be recorded."""


@dataclass(frozen=True, eq=False, repr=False)  # a repr would hold the whole run, many times over
class Value:
    """Stand-in for a tensor's content until an in-place change, which makes a new value; holds no numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: Operation | None = None  # that made it; None for inputs, parameters, buffers, constants
    name: str | None = None  # of an input, a parameter or a buffer
    depends: frozenset[str] = frozenset()  # names of the network's inputs from which it is computed


@dataclass(frozen=True, eq=False, repr=False)  # a repr would hold the whole run, many times over
class Operation:
    """One call of a function of torch's ATen library.

    ``kind`` is the function's name without overload and without the "_" of in-place variants: "linear", "add".
    Functions that take parts of a tensor are recorded as "slice", with the options axis, start, length and step, or as
    "select", which drops the axis, with axis and index. "changed" makes a view's new value when its base was changed.
    """

    kind: str
    operands: tuple[Any, ...]  # positional arguments, tensors as values; lists may hold values too
    options: Mapping[str, Any]
    module: str  # the innermost module that called it
    place: int  # in the run

    def values(self) -> Iterator[Value]:
        """Yield every value among the operation's arguments, as often as it occurs."""
        yield from _leaves((self.operands, tuple(self.options.values())), Value)


@dataclass(frozen=True, repr=False)
class Tape:
    """The recording of one run: all operations in order, and the values that they read and make."""

    operations: tuple[Operation, ...]
    outputs: Mapping[Operation, tuple[Value, ...]]
    readers: Mapping[Value, tuple[Operation, ...]]  # only operations that reach what the network returned
    inputs: Mapping[str, Value]
    parameters: Mapping[str, Value]
    returned: frozenset[Value]
    samples: int  # in the run's batch: the length of what the network returned, a tensor or a list


def noted(network: nn.Module, arguments: Mapping[str, Any], method: str = "forward") -> Tape:
    """Record one call of ``network`` with ``arguments`` by parameter name, tensors on any device.

    Tensors are moved to the parameters' device. Tensors nested in dicts, lists and tuples have names such as
    ``added_cond_kwargs.text_embeds`` and ``x.0``. The network is not changed, except that tensors it caches during the
    run, such as tables of positions, are inference tensors.
    A network on the meta device that fails, because its code reads a tensor's content or has tensors other than its
    parameters, is run again with real numbers in all tensors that depend on no weight.
    Raises NotObservable, which names module and line, when the network does not run.
    """
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return _noted(network, arguments, method, device)
    try:
        return _noted(network, arguments, method, device)
    except NotObservable:
        with WithoutNumbers():
            return _noted(network, arguments, method, torch.device("cpu"))


def _noted(network: nn.Module, arguments: Mapping[str, Any], method: str, device: torch.device) -> Tape:
    """Record one call of ``network`` with its tensors on ``device``. Raises NotObservable when the call fails."""
    mode = _Noting(network)
    with torch.inference_mode(), torch.device(device):
        given = {name: _placed(value, name, device, mode) for name, value in arguments.items()}
        with _module_names(network, mode.modules), autocast_of_meta(), mode:
            try:
                answer = run(network, method, given)
            except Exception as error:
                raise NotObservable(_sentence(network, mode.modules, error)) from error
    return mode.tape(answer)


def _placed(value: Any, name: str, device: torch.device, mode: _Noting) -> Any:
    """Move a nested argument's tensors to ``device``, each as a new object that ``mode`` registers as an input."""
    if isinstance(value, Tensor):
        tensor = value.to(device).detach()
        mode.know(tensor, name, frozenset((name,)))
        return tensor
    if isinstance(value, Mapping):
        return {key: _placed(each, f"{name}.{key}", device, mode) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_placed(each, f"{name}.{index}", device, mode) for index, each in enumerate(value))
    return value


@contextmanager
def _module_names(network: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep ``stack`` filled, in this context, with the names of the modules being called, the innermost last."""

    def push(name: str) -> Callable:
        return lambda module, inputs: stack.append(name)

    def pop(module: nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()

    with ExitStack() as hooks:
        for name, module in network.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(push(name), prepend=True))
            hooks.enter_context(module.register_forward_hook(pop))
        yield


def _sentence(network: nn.Module, modules: Sequence[str], error: Exception) -> str:
    own = Path(__file__).parents[1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if own not in Path(frame.filename).parents]
    for library, inside in (("diffusers", True), ("torch", False)):
        frames = [each for each in frames if (library in Path(each.filename).parts) == inside] or frames
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "its signature"
    kind, module = type(network).__name__, next((name for name in reversed(modules) if name), "")
    where = f"its module {module} ({place})" if module else place
    cause = one_line(error, 200) or type(error).__name__
    do = (
        "its code may decide by numbers that weights have a part in, which are not there: observe it with weights"
        if any(parameter.is_meta for parameter in network.parameters())
        else "check the arguments"
    )
    return f"{kind} could not be run to be observed: {where} raised {type(error).__name__}: {cause}; {do}"


@dataclass(eq=False, repr=False)
class _Noting(TorchDispatchMode):
    """Dispatch mode that records operations while a network runs; its ``tape`` returns the finished recording."""

    network: nn.Module
    modules: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    outputs: dict[Operation, list[Value]] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.values = WeakTensorKeyDictionary()
        self.of_storage: dict[int, list[weakref.ref]] = defaultdict(list)
        self.parameters = {name: self.know(each, name) for name, each in self.network.named_parameters()}
        for name, buffer in self.network.named_buffers():
            self.know(buffer, name)

    def know(self, tensor: Tensor, name: str | None = None, depends: frozenset[str] = frozenset()) -> Value:
        value = Value(tuple(tensor.shape), tensor.dtype, None, name, depends)
        if depends:
            self.inputs[name] = value
        return self.set(tensor, value)

    def set(self, tensor: Tensor, value: Value) -> Value:
        if tensor not in self.values:
            self.of_storage[_storage(tensor)].append(weakref.ref(tensor))
        self.values[tensor] = value
        return value

    def value(self, tensor: Tensor) -> Value:
        found = self.values.get(tensor)
        return self.know(tensor) if found is None else found

    def as_values(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.value(tree)
        if isinstance(tree, list | tuple):
            return tuple(self.as_values(each) for each in tree)
        return tree

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        kind = function._schema.name.partition("::")[2]
        if function.namespace == "prim" or kind.startswith("sym_"):  # asks for a device or a shape
            return function(*args, **kwargs)
        operands, options = self.as_values(args), {name: self.as_values(each) for name, each in kwargs.items()}
        arguments = function._schema.arguments
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        changed = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
        written = [value for name, value in given.items() if name in changed and isinstance(value, Tensor)]
        result = function(*args, **kwargs)
        kind = kind.rstrip("_") if written else kind
        self.note(kind, operands, options, list(_leaves((args, tuple(kwargs.values())), Tensor)), written, result)
        return result

    def note(
        self, kind: str, operands: tuple, options: dict, read: list[Tensor], written: list[Tensor], result: Any
    ) -> None:
        if kind.endswith("_like") or kind.startswith("new_"):
            operands = tuple(None if isinstance(each, Value) else each for each in operands)
        elif kind in SHAPE_OF_FIRST_ONLY:
            operands = operands[:1]
        made = [tensor for tensor in _leaves(result, Tensor) if not _among(tensor, read) or _among(tensor, written)]
        made += [tensor for tensor in written if not _among(tensor, made)]
        if kind in PARTS and made and not written:
            for tensor, (form, where) in zip(made, _parts(kind, operands, options, made), strict=True):
                self.made(Operation(form, operands[:1], where, self.module(), len(self.operations)), [tensor])
            return
        leaves = list(_leaves(result, Tensor))  # an operation that returns what it was given alone did nothing
        if made or not leaves or not all(_among(leaf, read) for leaf in leaves):
            self.made(Operation(kind, operands, options, self.module(), len(self.operations)), made)
        for tensor in written:
            for reference in self.of_storage[_storage(tensor)]:
                view = reference()
                if view is not None and not _among(view, written):
                    before = (self.value(view), self.value(tensor))
                    self.made(Operation("changed", before, {}, self.module(), len(self.operations)), [view])

    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def made(self, operation: Operation, tensors: Sequence[Tensor]) -> None:
        depends = frozenset[str]().union(*(value.depends for value in operation.values()))
        self.operations.append(operation)
        self.outputs[operation] = [
            self.set(tensor, Value(tuple(tensor.shape), tensor.dtype, operation, None, depends)) for tensor in tensors
        ]

    def tape(self, answer: Any) -> Tape:
        returned = frozenset(self.value(tensor) for tensor in _leaves(answer, Tensor))
        live, readers = set(returned), defaultdict[Value, list[Operation]](list)
        for operation in reversed(self.operations):
            if not self.outputs[operation] or any(value in live for value in self.outputs[operation]):
                for value in dict.fromkeys(operation.values()):
                    live.add(value)
                    readers[value].append(operation)
        return Tape(
            tuple(self.operations),
            {operation: tuple(values) for operation, values in self.outputs.items()},
            {value: tuple(reversed(operations)) for value, operations in readers.items()},
            self.inputs,
            self.parameters,
            returned,
            _samples(answer),
        )


def _samples(answer: Any) -> int:
    """Return the batch size: the length of the first list or tensor in a network's output, tuples and dicts unpacked.

    A tensor of two axes or fewer has no batch axis (it holds the tokens of one sample) and counts as 1.
    """
    while not isinstance(answer, Tensor | list):
        if isinstance(answer, Mapping):
            answer = tuple(answer.values())
        if not isinstance(answer, tuple) or not answer:
            return 1
        answer = answer[0]
    return len(answer) if isinstance(answer, list) or answer.ndim > 2 else 1


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _leaves(tree: Any, kind: type) -> Iterator[Any]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(each, kind)


def _parts(
    kind: str, operands: tuple, options: Mapping[str, Any], made: Sequence[Tensor]
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield ("slice" or "select", options) for each output in order: the part of the first operand that it is."""
    shape = operands[0].shape
    position = 1 if kind in ("slice", "select", "narrow", "unbind") else 2
    axis = options.get("dim", operands[position] if len(operands) > position else 0) % len(shape)
    size = shape[axis]
    if kind == "unbind":
        for index in range(len(made)):
            yield "select", {"axis": axis, "index": index}
    elif kind == "select":
        yield "select", {"axis": axis, "index": options.get("index", operands[-1]) % size}
    elif kind in ("slice", "narrow"):
        start = options.get("start", operands[2] if len(operands) > 2 else 0) or 0
        start = max(0, start + size if start < 0 else start)
        step = options.get("step", operands[4] if len(operands) > 4 else 1)
        yield "slice", {"axis": axis, "start": start, "length": made[0].shape[axis], "step": step}
    else:
        start = 0
        for tensor in made:
            yield "slice", {"axis": axis, "start": start, "length": tensor.shape[axis], "step": 1}
            start += tensor.shape[axis]
