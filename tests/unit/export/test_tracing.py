import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from onnxscript import optimizer
from torch import nn

from sd_quant.export import tracing
from sd_quant.export.tracing import OPSET, copy_of, drop_squeezes, fake_module, trace
from sd_quant.models.parts import Contract

pytestmark = pytest.mark.slow  # the tracing


def shapes_of(values) -> dict[str, tuple]:
    return {
        value.name: tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape) for value in values
    }


def test_inputs_are_the_contracts_with_its_dynamic_axes(traced, contract):
    inputs = traced.graph.inputs[: len(contract.inputs)]
    assert shapes_of(inputs) == contract.inputs == {
        "x": ("batch", 4, "height", "width"),
        "timesteps": ("batch",),
        "context": ("batch", 80, 48),
        "y": ("batch", 80),
    }  # fmt: skip
    dtypes = {value.name: value.dtype for value in inputs}
    assert dtypes == {name: ir.DataType.FLOAT16 for name in ("x", "context", "y")} | {"timesteps": ir.DataType.FLOAT}


def test_the_output_shares_the_batch(traced):
    assert shapes_of(traced.graph.outputs) == {"out": ("batch", 4, None, None)}
    assert traced.graph.outputs[0].dtype == ir.DataType.FLOAT16


def test_every_weight_is_an_fp16_input_of_its_own_name_and_shape(traced, contract, weights):
    inputs = traced.graph.inputs[len(contract.inputs) :]
    assert shapes_of(inputs) == {name: tuple(weight.shape) for name, weight in weights.items()}
    assert {value.dtype for value in inputs} == {ir.DataType.FLOAT16}
    assert all(value.const_value is None for value in inputs)


def test_no_weight_has_become_a_constant(traced):
    assert sum(value.const_value.size for value in traced.graph.initializers.values()) < 1000


def test_only_operators_that_every_engine_takes(traced):
    operators = {(node.domain, node.op_type) for node in traced.graph}
    assert {domain for domain, _ in operators} == {""}
    assert not {name for _, name in operators if "Sequence" in name or name in ("If", "Loop", "Scan", "Constant")}
    assert traced.opset_imports[""] == OPSET and not traced.functions


def test_nothing_but_the_graph_is_kept(traced):
    inner = [value for node in traced.graph for value in node.outputs if value not in set(traced.graph.outputs)]
    assert not any(node.metadata_props or node.doc_string for node in traced.graph)
    assert all(value.shape is None and not value.metadata_props for value in inner)


def test_a_copy_is_another_graph(traced):
    copy = copy_of(traced)
    before = len(traced.graph.inputs), [node.op_type for node in traced.graph]
    del copy.graph.inputs[4:]
    copy.graph.remove(list(copy.graph)[-1], safe=False)
    assert (len(traced.graph.inputs), [node.op_type for node in traced.graph]) == before


def test_a_fake_module_has_shapes_but_no_memory():
    mode, module = fake_module(lambda: nn.Linear(2**20, 2**20), torch.float16)  # 2 TiB
    assert module.weight.shape == (2**20, 2**20) and module.weight.dtype == torch.float16
    assert not module.training and not module.weight.requires_grad


def test_the_default_dtype_is_put_back_even_after_a_failure():
    def fail() -> nn.Module:
        assert torch.get_default_dtype() == torch.float16
        raise RuntimeError("no such architecture")

    with pytest.raises(RuntimeError, match="no such architecture"):
        fake_module(fail, torch.float16)
    assert torch.get_default_dtype() == torch.float32


class GatedFeedForward(nn.Module):
    """With what is traced as a sequence, as a cast and as shapes that fold."""

    def __init__(self):
        super().__init__()
        self.norm, self.first = nn.GroupNorm(4, 16), nn.Linear(16, 64)

    def forward(self, x):
        batch, channels, height, width = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        value, gate = self.first(tokens).chunk(2, dim=-1)
        value, gate = value[:, None], gate[:, None]
        attended = nn.functional.scaled_dot_product_attention(value, gate, value)
        return attended.reshape(batch, height, width, -1).permute(0, 3, 1, 2) * 1.0


def test_folding_is_what_onnxscripts_whole_optimizer_does(monkeypatch):
    half = torch.float16
    contract = Contract({"x": ("batch", 16, "height", "width")}, ("out",), {"x": half}, half)
    ours = ir.to_proto(trace(GatedFeedForward, contract))
    monkeypatch.setattr(tracing, "fold", optimizer.optimize)
    theirs = ir.to_proto(trace(GatedFeedForward, contract))
    assert ours.graph.SerializeToString(deterministic=True) == theirs.graph.SerializeToString(deterministic=True)


@pytest.mark.parametrize("size, left", [(1, 1), (3, 0), ("n", 0)])
def test_an_axis_that_is_longer_than_one_is_not_squeezed(size, left):
    """torch leaves it as it is, and so does the graph then; an axis of one goes away as it should."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    nodes = [helper.make_node("Squeeze", ["x", "axes"], ["squeezed"]), helper.make_node("Neg", ["squeezed"], ["y"])]
    graph = helper.make_graph(nodes, "squeeze", [x], [y], [axes])
    model = ir.serde.deserialize_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    drop_squeezes(model)
    assert [node.op_type for node in model.graph] == ["Squeeze"] * left + ["Neg"]
    assert model.graph[-1].inputs[0].name == ("squeezed" if left else "x")


class Squeezing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(1) * self.scale


def test_a_traced_graph_squeezes_no_long_axis():
    half = torch.float16
    traced = trace(Squeezing, Contract({"x": ("batch", 4, 6)}, ("out",), {"x": half}, half))
    assert [node.op_type for node in traced.graph] == ["Mul"]
