"""Small ONNX graphs, node by node: what the exported networks are made of. What is in a file, and what it computes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from sd_quant.engines import load_engine

WIDTH, OUT = 64, 32
Shapes = Mapping[str, Sequence[int | str]]


def save_graph(
    path: Path,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, np.ndarray],
    inputs: Shapes,
    outputs: Shapes,
    dtype: type = np.float16,
    **options: object,
) -> Path:
    """Inputs and outputs are of ``dtype``, but those whose name ends in "ids", which are int64."""

    def values(shapes: Shapes) -> list[onnx.ValueInfoProto]:
        types = {name: np.int64 if name.endswith("ids") else dtype for name in shapes}
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(types[name])), shape)
            for name, shape in shapes.items()
        ]

    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", values(inputs), values(outputs), tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path, **options)
    return path


def product_of_codes(
    weight: np.ndarray, weight_scale: np.ndarray, scale: float, op_type: str = "MatMul", **attributes: object
) -> tuple[list[NodeProto], dict[str, np.ndarray]]:
    """Nodes and constants of y = QDQ(x) @ DQ(weight), all scales of the weight's scales' type."""
    constants = {
        "x_scale": np.array(scale, weight_scale.dtype), "x_zero": np.array(0, np.int8), "w_int8": weight,
        "w_scale": weight_scale, "w_zero": np.zeros(weight_scale.shape, np.int8),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_int8"]),
        helper.make_node("DequantizeLinear", ["x_int8", "x_scale", "x_zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w_int8", "w_scale", "w_zero"], ["w_dq"], axis=int(op_type == "MatMul")),
        helper.make_node(op_type, ["x_dq", "w_dq"], ["y"], name="product", **attributes),
    ]
    return nodes, constants


@dataclass(frozen=True)
class Tiny:
    """y [B, 32] fp16 = QDQ(x [B, 64] fp16) @ DQ(int8 weight), scales in fp16, one weight scale per output channel."""

    path: Path
    weight: np.ndarray
    weight_scale: np.ndarray
    scale: float = 2.0**-5

    def expected(self, x: np.ndarray) -> np.ndarray:
        levels = np.clip(np.round(x.astype(np.float32) / self.scale), -128, 127)
        return levels * self.scale @ (self.weight * self.weight_scale.astype(np.float32))

    def write(self) -> "Tiny":
        """With its weights in a file beside it, as in the exports that are larger than protobuf's 2 GB."""
        nodes, constants = product_of_codes(self.weight, self.weight_scale, self.scale)
        beside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 1024}
        save_graph(self.path, nodes, constants, {"x": ["B", WIDTH]}, {"y": ["B", OUT]}, **beside)
        return self


def tiny_in(folder: Path) -> Tiny:
    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (WIDTH, OUT)).astype(np.int8)
    return Tiny(folder / "tiny.onnx", weight, (random.random(OUT) * 0.01 + 0.001).astype(np.float16)).write()


def stored_in(path: Path) -> dict[str, TensorProto]:
    """The initializers of a file by their names."""
    return {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}


def producers(path: Path) -> dict[str, NodeProto]:
    """The nodes of a file by their one output."""
    return {node.output[0]: node for node in onnx.load(path).graph.node}


def readers(path: Path) -> dict[str, list[NodeProto]]:
    """The nodes of a file by each value that they read."""
    found: dict[str, list[NodeProto]] = {}
    for node in onnx.load(path).graph.node:
        for value in node.input:
            found.setdefault(value, []).append(node)
    return found


def exposing(path: Path, values: Iterable[str], to: Path) -> Path:
    """The graph with more outputs [batch, tokens, width], so that a piece of it can be computed again."""
    model = ir.load(path)
    made = {output.name: output for node in model.graph for output in node.outputs}
    for value in (made[name] for name in dict.fromkeys(values) if name in made):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([None] * 3)
        model.graph.outputs.append(value)
    ir.save(model, to)
    return to


def run(engine: str, path: Path, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a file in fp32. The engine "reference" is ONNX's own."""
    if engine != "reference":
        return {name: found.float() for name, found in load_engine(engine, path, threads=1)(**given).items()}
    model = onnx.load(path)
    types = {
        value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in model.graph.input
    }
    with np.errstate(over="ignore", invalid="ignore"):  # in the branch of a sigmoid that is not taken
        found = ReferenceEvaluator(model).run(None, {name: given[name].numpy().astype(types[name]) for name in types})
    return {value.name: torch.from_numpy(y).float() for value, y in zip(model.graph.output, found, strict=True)}
