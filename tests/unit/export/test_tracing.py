import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from diffusers.models.embeddings import PatchEmbed
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxscript import optimizer
from torch import nn

from sd_quant.export import tracing
from sd_quant.export.tracing import OPSET, copy_of, drop_squeezes, fake_module, trace, transpose_keys
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

    def fold_by_all_rules(model):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        tracing.transpose_keys(model)  # which is ours, so it is done for both
        optimizer.optimize(model)

    monkeypatch.setattr(tracing, "fold", fold_by_all_rules)
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


class Positions(nn.Module):
    """What Stable Diffusion 3 begins with: the places that the checkpoint knows, of which an image takes the middle."""

    def __init__(self):
        super().__init__()
        self.embed = PatchEmbed(
            height=8, width=8, patch_size=1, in_channels=4, embed_dim=16, pos_embed_max_size=8
        )  # fmt: skip

    def forward(self, x):
        return self.embed(x)


def test_a_network_that_takes_few_latents_is_traced_with_fewer():
    single = torch.float32
    contract = Contract({"x": ("batch", 4, "height", "width")}, ("out",), {"x": single}, single, latents=8)
    assert all(size < 8 for size in tracing.example_shapes(contract)["x"][2:])
    module = Positions().eval()
    evaluator = ReferenceEvaluator(ir.to_proto(trace(Positions, contract)))
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    for height, width in ((8, 8), (4, 6)):  # the most that it takes too
        x = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(height))
        (found,) = evaluator.run(None, {"x": x.numpy()} | weights)
        assert torch.allclose(torch.from_numpy(found), module(x), atol=1e-5)


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


def keys_of(graph: ir.Graph) -> list[list[ir.Node]]:
    """The nodes between the projection of each attention's keys and their product with queries, the last first."""
    found = []
    for softmax in (node for node in graph if node.op_type == "Softmax"):
        value, chain = softmax.inputs[0].producer().inputs[1], []
        while (node := value.producer()) is not None and node.op_type != "MatMul":
            chain.append(node)
            value = node.inputs[0]
        found.append(chain)
    return found


def test_keys_are_transposed_once(traced):
    """torch writes a Reshape, a Transpose and a Reshape behind the Transpose of heads and tokens."""
    chains = keys_of(traced.graph)
    assert chains and all([node.op_type for node in chain] == ["Mul", "Transpose", "Reshape"] for chain in chains)
    assert all(chain[1].attributes["perm"].as_ints() == (0, 2, 3, 1) for chain in chains)


@pytest.mark.parametrize(("axes", "replaced"), [((-1, -2), True), ((-2, -1), False)])
def test_a_reshape_that_is_no_transposition_stays(axes, replaced):
    """The two that torch writes around a Transpose swap the last axes; with the sizes the other way they do not."""

    def size(axis: int) -> onnx.NodeProto:
        end = {-1: 2**63 - 1, -2: -1}[axis]
        return helper.make_node("Slice", ["shape", f"at{axis}", f"to{end}"], [f"size{axis}"])

    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        size(-1), size(-2),
        helper.make_node("Slice", ["shape", "first", "to-2"], ["leading"]),
        helper.make_node("Concat", ["at-1", "size-2", "size-1"], ["merged"], axis=0),
        helper.make_node("Reshape", ["x", "merged"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Concat", ["leading", *(f"size{axis}" for axis in axes)], ["parted"], axis=0),
        helper.make_node("Reshape", ["turned", "parted"], ["y"]),
        helper.make_node("Identity", ["y"], ["out"]),
    ]  # fmt: skip
    numbers = {"at-1": -1, "at-2": -2, f"to{2**63 - 1}": 2**63 - 1, "to-1": -1, "first": -(2**63), "to-2": -2}
    weights = [numpy_helper.from_array(np.array([number], np.int64), name) for name, number in numbers.items()]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b", "c", "d"]) for name in ("x", "out")]
    graph = helper.make_graph(nodes, "keys", ends[:1], ends[1:], weights)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]))
    x = np.arange(120, dtype=np.float32).reshape(1, 2, 3, 20)
    (expected,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    transpose_keys(model)
    (found,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    np.testing.assert_array_equal(found, expected)
    made = {node.outputs[0].name: node for node in model.graph}["out"].inputs[0].producer()
    assert (made.op_type == "Transpose") == replaced
