"""Export with torch's ONNX exporter, without repeated work and without needless decomposition of operations.

Operations are exported undecomposed if all have a translation (``translations``), change nothing in place and run
without autocast. Alternative not taken: always decomposing, which traces a network two more times.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import _lru_cache_wrapper, cache, partial
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.export.translations import TRANSLATIONS
from sd_quant.models.parts import Contract

aten = torch.ops.aten


def converted(module: nn.Module, example: dict[str, Tensor], contract: Contract, opset: int) -> ir.Model:
    """Convert the module to ONNX. If an operation has no translation, all are decomposed, by two more traces.

    ``example`` has the contract's inputs. Raises ArtifactError, before the conversion, if ``check_axes`` fails.
    """
    dynamic = {
        name: {index: torch.export.Dim.AUTO for index, axis in enumerate(shape) if isinstance(axis, str)}
        for name, shape in contract.inputs.items()
    }
    classes = {type(each).__module__ for each in module.modules()}  # files with code of the network

    def exported() -> torch.export.ExportedProgram:
        own = [value for each in module.modules() for value in vars(each).values() if type(value).__module__ in classes]
        before = [(each, dict(vars(each))) for each in (*module.modules(), *own) if hasattr(each, "__dict__")]
        try:
            with without_idle_autocast():
                return torch.export.export(module, (), example, dynamic_shapes=dynamic, strict=False)
        finally:
            for each, attributes in before:  # a network that remembers a tensor would remember one without numbers
                vars(each).clear()
                vars(each).update(attributes)
            for kind in {kind for each, _ in before for kind in type(each).__mro__}:  # and so would its methods
                for value in vars(kind).values():
                    if isinstance(value, _lru_cache_wrapper):
                        value.cache_clear()

    def in_onnx(program: torch.export.ExportedProgram) -> ir.Model:
        options = {"output_names": list(contract.outputs), "custom_translation_table": TRANSLATIONS}
        return torch.onnx.export(
            program, dynamo=True, opset_version=opset, optimize=False, verbose=False, **options
        ).model

    program = exported()
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    check_axes({name: value.shape for name, value in values.items() if isinstance(value, Tensor)}, contract)
    keep_what_is_changed(program)
    program.run_decompositions = lambda *_: program
    with suppress(torch.onnx.errors.OnnxExporterError), torchs_exporter(promotes=not dtypes_agree(program)):
        return in_onnx(program)
    with torchs_exporter(promotes=True):
        return in_onnx(exported())  # traced again, because the attempt has changed the program


def check_axes(shapes: Mapping[str, Iterable], contract: Contract) -> None:
    """Raise ArtifactError if a traced input shape has a fixed size for an axis that the contract declares dynamic."""
    for name in contract.inputs.keys() & shapes.keys():
        for traced, axis in zip(shapes[name], contract.inputs[name], strict=True):
            if isinstance(axis, str) and str(getattr(traced, "value", traced)).isdecimal():
                raise ArtifactError(f"the graph serves {traced} as {axis} of {name} and nothing else")


@contextmanager
def without_idle_autocast() -> Iterator[None]:
    """In the block, ignore ``torch.autocast`` contexts that change nothing: disabled, or for another device.

    torch's exporter would trace the code in such a context as a subgraph, for which it decomposes the whole network.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    idle = list[int]()

    def entered(self: torch.autocast) -> Any:
        if torch.is_autocast_enabled("cpu") or (self._enabled and self.device == "cpu"):
            return enter(self)
        idle.append(id(self))
        return self

    def left(self: torch.autocast, *error: Any) -> Any:
        if id(self) not in idle:
            return leave(self, *error)
        return idle.remove(id(self))

    with mock.patch.object(torch.autocast, "__enter__", entered), mock.patch.object(torch.autocast, "__exit__", left):
        yield


def keep_what_is_changed(program: torch.export.ExportedProgram) -> None:
    """Replace in-place operations, such as ``add_``, by those that return a new tensor, such as ``add``.

    It does so only for tensors that share no memory: results of elementwise operations of which there are no views.
    """
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        pure = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
        if pure is None or not name.endswith("_") or name.endswith("__"):
            continue
        changed, operands = node.args[0], node.all_input_nodes
        shared = any(shares_memory(user) for user in changed.users if order[user] < order[node])
        alike = len({getattr(each.meta.get("val"), "dtype", None) for each in operands}) == 1
        if not shares_memory(changed) and alike and not shared:
            node.target = pure
            changed.replace_all_uses_with(node, lambda user, at=order[node]: order.get(user, at) > at)


def shares_memory(node: torch.fx.Node) -> bool:
    """Return whether a node's output may share memory with an input; elementwise operations return new memory."""
    return torch.Tag.pointwise not in getattr(node.target, "tags", ()) or node.target._schema.is_mutable


def dtypes_agree(program: torch.export.ExportedProgram) -> bool:
    """Return whether type promotion changes nothing: all tensors read by one operation have one floating dtype."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    values = [[operand.meta.get("val") for operand in call.all_input_nodes] for call in calls]
    dtypes = [{value.dtype for value in each if isinstance(value, Tensor)} for each in values]
    return all(len(each) < 2 and all(dtype.is_floating_point for dtype in each) for each in dtypes)


@contextmanager
def torchs_exporter(promotes: bool) -> Iterator[None]:
    """In the block, let torch's exporter cache its table of translations, and skip type promotion unless ``promotes``.

    These take a fifth and a quarter of a trace, and torch has no options for them. Unknown versions are not patched.
    """
    with ExitStack() as stack:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter import _fx_passes, _registration

            table = _registration.ONNXRegistry
            made = partial(copy_of_table, table.from_torchlib)
            stack.enter_context(mock.patch.object(table, "from_torchlib", made))
            if not promotes:
                stack.enter_context(mock.patch.object(_fx_passes, "insert_type_promotion_nodes", lambda module: None))
        yield


@cache
def table_of(make: Callable[..., Any], opset: int) -> Any:
    """Return torch's table of translations for an opset, built once per process."""
    return make(opset_version=opset)


def copy_of_table(make: Callable[..., Any], opset_version: int) -> Any:
    """Return a copy of torch's table of translations, to which an export adds its own."""
    table = copy(table_of(make, opset_version))
    table.functions = {name: list(translations) for name, translations in table.functions.items()}
    return table
