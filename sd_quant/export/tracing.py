"""Trace a part's ONNX graph with fake tensors, weights as named graph inputs, and simplify it.

Tracing needs only shapes, so a UNet of 2.57 B parameters takes no memory, and all recipes share the graph. Without
weights, constant folding is cheap, too. Alternative not taken: ModelOpt's own export of a quantized model, which holds
every weight in fp32 and writes INT8 weights as floats with a QuantizeLinear.
"""

import logging
import operator
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.export.nodes import insert
from sd_quant.models import LATENT_FACTOR
from sd_quant.models.empty import replace_buffers, replace_parameters, without_weights
from sd_quant.models.parts import Contract

if TYPE_CHECKING:
    from onnxscript.rewriter import RewriteRule

# Operations to which opsets 21, 22 and 23 only add types.
ONLY_MORE_TYPES = set(
    "Cast Constant ConstantOfShape Conv Cos Flatten Identity InstanceNormalization Pad Reshape Shape Sin Size Squeeze "
    "Transpose Unsqueeze".split()
)
OPSET = 20  # the first with fp16 scales, group normalisation and GELU, and below the opset that fuses attention
# The first opset with bf16 for convolutions, instance normalisation and sinusoids, which ONNX infers types by.
BF16_OPSET = 22
TYPE = "tensor(bfloat16)"  # as ONNX's schemas name it
FIRST, LAST = -(2**63), 2**63 - 1  # the open ends of a Slice in the output of torch's exporter
# Loggers of every node that is changed, or of errors that are raised as well.
NOISY_LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript", "torch.fx.experimental.symbolic_shapes", "torch.export")
# All different, so that none is taken for another, and large enough to stay above 1 after three halvings.
EXAMPLE = {"batch": 2, "width": 256, "height": 128}


def example_shapes(contract: Contract) -> dict[str, tuple[int, ...]]:
    """Return the input shapes with which a part is traced: the contract's example if it has one.

    Otherwise image sizes stay below the network's limit for latents; at the limit, torch would make them constants.
    """
    if contract.example is not None:
        return contract.shapes(**contract.example)
    smaller = 1 if contract.latents is None else 1 + EXAMPLE["width"] // LATENT_FACTOR // contract.latents
    return contract.shapes_for(EXAMPLE["batch"], EXAMPLE["width"] // smaller, EXAMPLE["height"] // smaller)


def trace(build: Callable[[], nn.Module], contract: Contract) -> ir.Model:
    """Trace the module that ``build`` returns to an ONNX graph with the contract's names and dynamic axes.

    Weights (parameters, and buffers that a checkpoint holds) become graph inputs under their own names, after the
    contract's inputs. Other buffers and tensors become constants. No memory is allocated for parameters.
    Raises ArtifactError when the network supports only one size of an axis that the contract declares dynamic.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from sd_quant.export.torch_exporter import check_axes, converted

    with without_weights():
        module = build().eval()
    mode = FakeTensorMode()

    def fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    replace_parameters(module, lambda _, parameter: fake(parameter, contract.weights))
    replace_buffers(module, lambda _, buffer: fake(buffer, buffer.dtype))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own internals
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        shapes = example_shapes(contract)
        with mode:
            example = {name: torch.zeros(shape, dtype=contract.dtypes[name]) for name, shape in shapes.items()}
        opset = BF16_OPSET if contract.weights == torch.bfloat16 else OPSET
        model = converted(module, example, contract, opset)
    for value in list(model.graph.initializers.values()):
        if isinstance(getattr(value.const_value, "raw", None), FakeTensor):
            value.const_value = None
            del model.graph.initializers[value.name]
            model.graph.inputs.append(value)
    promote_concatenated(model)
    if contract.weights == torch.bfloat16:
        widen(model)
    drop_squeezes(model)
    fold(model)
    check_axes({value.name: value.shape for value in model.graph.inputs}, contract)
    choose_by_logic(model)
    name_axes(model, contract)
    strip(model)
    return model


def promote_concatenated(model: ir.Model) -> None:
    """Cast the inputs of each Concat to the widest of their dtypes, as torch does implicitly and ONNX does not."""
    for node in list(model.graph):
        dtypes = {value.dtype for value in node.inputs} if node.op_type == "Concat" else set()
        if len(dtypes) > 1 and None not in dtypes:
            widest = max(dtypes, key=lambda dtype: (dtype.is_floating_point(), dtype.itemsize))
            for index, value in enumerate(node.inputs):
                if value.dtype != widest:
                    name = f"{node.name}.promoted_{index}"
                    node.replace_input_with(index, insert(node, "Cast", [value], name, to=widest))


def widen(model: ir.Model) -> None:
    """Insert Casts so that operations without bf16 in ONNX, such as the Einsum that joins patches, run in fp32."""
    bf16, single = ir.DataType.BFLOAT16, ir.DataType.FLOAT
    for node in (node for node in list(model.graph) if node.domain == ""):
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports[""], "")
        lacking = {each.type_param_str for each in schema.type_constraints if TYPE not in each.allowed_type_strs}
        formal = [schema.inputs[min(index, len(schema.inputs) - 1)] for index in range(len(node.inputs))]
        for index, (value, stated) in enumerate(zip(list(node.inputs), formal, strict=True)):
            if value is not None and value.dtype == bf16 and stated.type_str in lacking:
                cast = insert(node, "Cast", [value], f"{node.name}.in_fp32_{index}", to=single)
                cast.dtype = single
                node.replace_input_with(index, cast)
        for output, stated in zip(node.outputs, schema.outputs, strict=False):
            if output.dtype == bf16 and stated.type_str in lacking:
                rounded = ir.node("Cast", [output], {"to": bf16}, name=f"{output.name}.rounded")
                (last,) = rounded.outputs
                last.name, last.shape, last.dtype = output.name, output.shape, bf16
                output.name, output.dtype = f"{output.name}.in_fp32", single
                ir.convenience.replace_all_uses_with(output, last, replace_graph_outputs=True)
                rounded.replace_input_with(0, output)
                model.graph.insert_after(node, rounded)


def drop_squeezes(model: ir.Model) -> None:
    """Remove each Squeeze of an axis longer than 1: torch ignores such a Squeeze, ONNX forbids it.

    A dynamic axis counts as longer than 1, because torch.export specializes a graph for 1.
    """
    for node in list(model.graph):
        if node.op_type == "Squeeze" and node.inputs[0].shape is not None:
            axes = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is not None and all(node.inputs[0].shape[axis] != 1 for axis in axes.numpy().flatten().tolist()):
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
                model.graph.remove(node, safe=True)


def choose_by_logic(model: ir.Model) -> None:
    """Replace each Where between booleans by And, Not and Or, because ONNX Runtime has no kernel for it."""
    for node in list(model.graph):
        if node.op_type == "Where" and node.outputs[0].dtype == ir.DataType.BOOL:
            condition, chosen, otherwise = node.inputs
            name = node.outputs[0].name
            chosen = insert(node, "And", [condition, chosen], f"{name}.chosen")
            inverse = insert(node, "Not", [condition], f"{name}.not")
            otherwise = insert(node, "And", [inverse, otherwise], f"{name}.otherwise")
            either = insert(node, "Or", [chosen, otherwise], f"{name}.either")
            either.dtype = ir.DataType.BOOL
            ir.convenience.replace_all_uses_with(node.outputs[0], either)
            model.graph.remove(node, safe=True)


def transpose_keys(model: ir.Model) -> None:
    """Replace Reshape, Transpose, Reshape on attention's keys, as torch exports them, by one Transpose of two axes.

    ``fold`` then merges this Transpose with that of heads and tokens before it.
    """
    for node in list(model.graph):
        if node.op_type != "Transpose" or node.attributes["perm"].as_ints() != (0, 2, 1):
            continue
        before, users = node.inputs[0].producer(), [usage.node for usage in node.outputs[0].uses()]
        if before is None or [each.op_type for each in (before, *users)] != ["Reshape", "Reshape"]:
            continue
        value, after = before.inputs[0], users[0]
        merged, parted = (sizes_of(reshape, value) for reshape in (before, after))
        if merged[1:] == [(-2, -1), (-1, LAST)] and parted == [(FIRST, -2), (-1, LAST), (-2, -1)]:
            swapped = insert(after, "Transpose", [value], f"{after.name}.swapped", perm=(0, 1, 3, 2))
            ir.convenience.replace_all_uses_with(after.outputs[0], swapped)


def sizes_of(reshape: ir.Node, value: ir.Value) -> list[tuple[int, int] | None]:
    """Return, for each part of a Reshape's shape, the axes (first, end) of ``value`` that it copies, otherwise None."""
    concat = reshape.inputs[1].producer()
    sizes: list[tuple[int, int] | None] = []
    for size in concat.inputs if concat is not None and concat.op_type == "Concat" else ():
        taken = size.producer()
        shape = taken.inputs[0].producer() if taken is not None and taken.op_type == "Slice" else None
        bounds = [ir.convenience.get_const_tensor(bound) for bound in taken.inputs[1:3]] if shape is not None else []
        known = shape is not None and shape.op_type == "Shape" and shape.inputs[0] is value and None not in bounds
        sizes.append(tuple(bound.numpy().item() for bound in bounds) if known else None)  # type: ignore[union-attr]
    return sizes


def without(operation: Callable, number: int) -> "RewriteRule":
    """Return the rewrite rule that removes an ``operation`` with exactly the neutral scalar ``number``, such as x * 1.

    onnxscript's own rules accept any constant within 1e-8 of zero, or 1e-5 of one, so that ``y / (x + 1e-9)`` becomes
    ``y / x``, which is not finite for x = 0. Only scalars match, because other constants may broadcast the value.
    """
    from onnxscript.rewriter import RewriteRule

    def is_exact(context: object, value: ir.Value, constant: ir.Value) -> bool:
        known = constant.const_value
        return known is not None and len(known.shape) == 0 and known.numpy().item() == number

    return RewriteRule(
        lambda op, value, constant: operation(value, constant), lambda op, value, constant: op.Identity(value), is_exact
    )


def fold(model: ir.Model) -> None:
    """Fold constants and simplify the graph, like onnxscript's optimizer without 40 rules that never apply here.

    One of these rules, which searches for Slices that form a Split, takes 94 of 111 s on the full-size UNet. Four
    rules are replaced by ``without``. TensorRT parses neither CastLike nor the sequences of a traced feed-forward.
    """
    from onnxscript import optimizer
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules import common as rules

    applicable = [
        without(operator.mul, 1), without(operator.add, 0), without(operator.sub, 0), without(operator.truediv, 1),
        rules.collapse_slice_rule, rules.collapse_slice2_rule, rules.materialize_reshape_shape_rule,
        rules.cast_cast_rule, rules.no_op_cast_rule, rules.no_op_expand_rule, rules.reshape_reshape_rule,
        rules.no_op_transpose_rule, rules.transpose_transpose_rule, rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
    ]  # fmt: skip
    for _ in range(2):  # what the rules leave may fold again
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        transpose_keys(model)
        RewritePass(applicable)(model)
        passes.RemoveUnusedNodesPass()(model)
        passes.RemoveUnusedOpsetsPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.OutputFixPass()(model)
    passes.NameFixPass()(model)


def raise_opset(model: ir.Model, opset: int) -> None:
    """Declare a newer ``opset``, up to 23, whose operations accept more types than those of the traced opset.

    Nodes are unchanged, because the newer opset defines each operation identically or adds types. Alternative not
    taken: onnxscript's version converter, which would reach the same result node by node.
    Raises ArtifactError for an operation that may have another definition.
    """
    traced = model.opset_imports[""]
    if opset <= traced:
        return

    def defined_in(kind: str, version: int) -> int:
        return onnx.defs.get_schema(kind, version, "").since_version

    kinds = {node.op_type for node in model.graph}
    changed = {kind for kind in kinds if defined_in(kind, traced) != defined_in(kind, opset)}
    if unknown := sorted(changed - ONLY_MORE_TYPES):
        raise ArtifactError(f"the graph has {unknown[0]}, which may mean something else in opset {opset}")
    model.opset_imports[""], model.ir_version = opset, max(model.ir_version, 10 if opset < 23 else 11)
    for node in model.graph:
        node.version = None


def copy_of(model: ir.Model) -> ir.Model:
    """Return a copy of a traced graph, which has no weights yet."""
    return ir.from_proto(ir.to_proto(model))


def name_axes(model: ir.Model, contract: Contract) -> None:
    """Rename the axes of inputs, and the batch axis of outputs, from the tracer's names to the contract's."""
    batches = set()
    for value in model.graph.inputs:
        if value.name in contract.inputs:
            shape = contract.inputs[value.name]
            batches |= {traced for traced, axis in zip(value.shape, shape, strict=True) if axis == "batch"}
            value.shape = ir.Shape(shape)
    for value in model.graph.outputs:
        first = ["batch" if axis in batches else axis for axis in value.shape[:1]]
        named = [*first, *value.shape[1:]]
        value.shape = ir.Shape([axis if isinstance(axis, int | str) else None for axis in named])


def strip(model: ir.Model) -> None:
    """Remove stack traces and intermediate shapes, which no engine reads and which make up most of a small file."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    boundary = {*model.graph.inputs, *model.graph.outputs}
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if value not in boundary:
                value.shape = value.type = None
    for value in boundary:
        value.metadata_props.clear()
