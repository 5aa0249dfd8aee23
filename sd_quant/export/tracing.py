"""The graph of a part without its weights: traced once with fake tensors, cleaned, weights left as named inputs.

Tracing needs shapes only, so a 2.57 B-parameter UNet costs no memory, and the graph depends on the architecture alone:
every recipe shares it. Leaving the weights out also keeps constant folding cheap, which on a graph that carries them
reads them all. Not taken: ModelOpt's own export of a quantized model, which holds every weight in fp32 and writes
INT8 weights as floats with a QuantizeLinear behind them.
"""

import logging
import warnings
from collections.abc import Callable

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.models.parts import Contract, axes

# Of the operations that opsets 21, 22 and 23 define anew, those that get more types and no other meaning.
MORE_TYPES = {
    *("Cast", "Conv", "Cos", "InstanceNormalization", "Reshape", "Shape", "Sin", "Squeeze", "Transpose", "Unsqueeze"),
}
OPSET = 20  # the first with fp16 scales, group normalisation and GELU, and below the opset that fuses attention
TALKATIVE = ("torch.onnx", "onnx_ir", "onnxscript")  # they tell of every node that they touch
# All different, so that none is taken for another, and no longer 1 where a network has halved them three times.
EXAMPLE_AXES = axes(batch=2, width=256, height=128)


def fake_module(build: Callable[[], nn.Module], dtype: torch.dtype):
    """The module with shapes but no storage, and the mode it lives in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, previous = FakeTensorMode(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # fake parameters cannot be cast afterwards
    try:
        with mode:
            return mode, build().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(previous)


def trace(build: Callable[[], nn.Module], contract: Contract) -> ir.Model:
    """ONNX graph of the module that ``build`` returns, with the contract's names and dynamic axes.

    Weights are graph inputs under their parameter's name, and come after the contract's own inputs.
    """
    mode, module = fake_module(build, contract.weights)
    with mode, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own internals
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        shapes = contract.shapes(**EXAMPLE_AXES)
        example = {name: torch.zeros(shape, dtype=contract.dtypes[name]) for name, shape in shapes.items()}
        dynamic = {
            name: {index: torch.export.Dim.DYNAMIC for index, axis in enumerate(shape) if isinstance(axis, str)}
            for name, shape in contract.inputs.items()
        }
        program = torch.export.export(module, (), example, dynamic_shapes=dynamic, strict=False)
        model = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            output_names=list(contract.outputs),
        ).model
    for value in list(model.graph.initializers.values()):
        value.const_value = None
        del model.graph.initializers[value.name]
        model.graph.inputs.append(value)
    drop_squeezes(model)
    fold(model)
    name_axes(model, contract)
    strip(model)
    return model


def drop_squeezes(model: ir.Model) -> None:
    """torch leaves an axis that is longer than one as it is; to ONNX that is an error, which TensorRT reports.

    An axis without a number is longer than one too: torch.export takes 1 for another graph.
    """
    for node in list(model.graph):
        if node.op_type == "Squeeze" and node.inputs[0].shape is not None:
            axes = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is not None and all(node.inputs[0].shape[axis] != 1 for axis in axes.numpy().flatten().tolist()):
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
                model.graph.remove(node, safe=True)


def fold(model: ir.Model) -> None:
    """onnxscript's optimizer without the 40 rules that never fit here.

    One of those looks for Slices that make up a Split, and takes 94 of the 111 s that the whole costs on the full-size
    UNet, where it finds none. The graph that comes out is the same (tested). What engines need of this: TensorRT parses
    no sequences, which the gated feed-forward's halves are traced as, and no CastLike.
    """
    from onnxscript import optimizer
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules import common as rules

    fitting = [
        rules.mul_by_1_rule,
        rules.add_0_rule,
        rules.sub_0_rule,
        rules.div_by_1_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.reshape_reshape_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
    ]
    for _ in range(2):  # what a rule leaves may fold again
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        RewritePass(fitting)(model)
        passes.RemoveUnusedNodesPass()(model)
        passes.RemoveUnusedOpsetsPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.OutputFixPass()(model)
    passes.NameFixPass()(model)


def defined_in(op_type: str, opset: int) -> int:
    """The opset that an operation's definition in ``opset`` comes from."""
    return onnx.defs.get_schema(op_type, opset, "").since_version


def raise_opset(model: ir.Model, opset: int) -> None:
    """Declare a later opset, up to 23, for the types that it adds.

    Nothing else has to change where an operation's definition is the same in both, or has only more types. Not taken:
    onnxscript's version converter, which would say so node by node.
    Raises ArtifactError for a graph with an operation that is not known to mean the same.
    """
    if opset > OPSET:
        changed = {
            kind
            for kind in {node.op_type for node in model.graph}
            if defined_in(kind, OPSET) != defined_in(kind, opset)
        }
        if unknown := sorted(changed - MORE_TYPES):
            raise ArtifactError(f"the graph has {unknown[0]}, which may mean something else in opset {opset}")
        model.opset_imports[""], model.ir_version = opset, max(model.ir_version, 10 if opset < 23 else 11)
        for node in model.graph:
            node.version = None


def copy_of(model: ir.Model) -> ir.Model:
    """Another graph to give weights to; cheap, because it has none yet."""
    return ir.from_proto(ir.to_proto(model))


def name_axes(model: ir.Model, contract: Contract) -> None:
    """The contract's axis names instead of the tracer's; outputs keep only the axis they share by name, the batch."""
    for value in model.graph.inputs:
        if value.name in contract.inputs:
            value.shape = ir.Shape(contract.inputs[value.name])
    for value in model.graph.outputs:
        axes = [axis if isinstance(axis, int) else None for axis in value.shape]
        value.shape = ir.Shape(["batch", *axes[1:]])


def strip(model: ir.Model) -> None:
    """Stack traces and intermediate shapes, which are most of a small model's file, and say nothing to an engine."""
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
