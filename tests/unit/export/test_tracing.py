from collections.abc import Callable, Mapping
from functools import partial
from unittest.mock import Mock

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from diffusers.models.embeddings import PatchEmbed
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.export import tracing
from sd_quant.export.tracing import OPSET, raise_opset, trace, transpose_keys
from sd_quant.models.parts import Contract
from tests.graphs import run, save_graph

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # the tracing

HALF, FULL = torch.float16, torch.float32
Call = Callable[[Tensor, Tensor], Tensor]


def shapes_of(values) -> dict[str, tuple]:
    return {each.name: tuple(axis if isinstance(axis, int) else axis.value for axis in each.shape) for each in values}


def test_inputs_and_outputs_are_the_contracts_with_its_dynamic_axes_and_nothing_but_the_graph_is_kept(network):
    """Of operators that every engine takes."""
    traced, graph = network.traced, network.traced.graph
    inputs = graph.inputs[: len(network.contract.inputs)]
    assert shapes_of(inputs) == network.contract.inputs == {
        "x": ("batch", 4, "height", "width"), "timesteps": ("batch",), "context": ("batch", 80, 64),
        "y": ("batch", 64),
    }  # fmt: skip
    dtypes = {value.name: value.dtype for value in inputs}
    assert dtypes == {name: ir.DataType.FLOAT16 for name in ("x", "context", "y")} | {"timesteps": ir.DataType.FLOAT}
    assert shapes_of(graph.outputs) == {"out": ("batch", 4, None, None)}
    assert graph.outputs[0].dtype == ir.DataType.FLOAT16
    operators = {node.op_type for node in graph}
    assert {node.domain for node in graph} == {""}
    assert not {name for name in operators if "Sequence" in name or name in ("If", "Loop", "Scan", "Constant")}
    assert traced.opset_imports[""] == OPSET and not traced.functions
    inner = [value for node in graph for value in node.outputs if value not in set(graph.outputs)]
    assert not any(node.metadata_props or node.doc_string for node in graph)
    assert all(value.shape is None and not value.metadata_props for value in inner)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("held", torch.full((6,), 2.0))
        self.register_buffer("computed", torch.full((6,), 3.0), persistent=False)
        self.register_buffer("places", torch.arange(6))

    def forward(self, x):
        return self.linear(x) + self.held[self.places] + self.computed


def test_what_a_checkpoint_holds_is_an_input_and_what_is_computed_a_constant():
    half = torch.float16
    graph = trace(Buffers, Contract({"x": ("batch", 6)}, ("y",), {"x": half}, half)).graph
    weights = {value.name: value.dtype for value in graph.inputs[1:]}
    single = ir.DataType.FLOAT
    assert weights == {"linear.weight": ir.DataType.FLOAT16, "linear.bias": ir.DataType.FLOAT16, "held": single}
    constants = [value.const_value.numpy() for value in graph.initializers.values()]
    assert any(np.array_equal(each, np.full(6, 3)) for each in constants)
    assert not any(np.array_equal(each, np.full(6, 2)) for each in constants)


def test_a_network_that_takes_few_latents_is_traced_with_fewer():
    """As Stable Diffusion 3 begins: with places that the checkpoint knows, of which an image takes the middle."""
    build = partial(PatchEmbed, 8, 8, patch_size=1, in_channels=4, embed_dim=16, pos_embed_max_size=8)
    single = torch.float32
    contract = Contract({"latent": ("batch", 4, "height", "width")}, ("out",), {"latent": single}, single, latents=8)
    assert all(size < 8 for size in tracing.example_shapes(contract)["latent"][2:])
    module = build().eval()
    evaluator = ReferenceEvaluator(ir.to_proto(trace(build, contract)))
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    for height, width in ((8, 8), (4, 6)):  # the most that it takes too
        x = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(height))
        (found,) = evaluator.run(None, {"latent": x.numpy()} | weights)
        assert torch.allclose(torch.from_numpy(found), module(x), atol=1e-5)


class Divided(nn.Module):
    """Ends as SANA's attention does; beside it, each operation with a constant that almost changes nothing."""

    def __init__(self, epsilon: float):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x):
        total = x.sum(-1, keepdim=True)
        almost = (total * (1 + 2**-20) - total / (1 + 2**-20)) - (total - self.epsilon)
        return x / (total + self.epsilon), almost


@pytest.mark.parametrize("epsilon", [1e-9, 1e-15])
def test_an_epsilon_stays(epsilon, tmp_path):
    """Without it a row of zeros is divided by zero."""
    single = torch.float32
    traced = trace(lambda: Divided(epsilon), Contract({"x": ("batch", 8)}, ("y", "almost"), {"x": single}, single))
    path = tmp_path / "divided.onnx"
    ir.save(traced, path)
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.0], [1.0], [1e-9]])
    found = run("onnxruntime", path, {"x": x})
    for name, expected in zip(("y", "almost"), Divided(epsilon)(x), strict=True):
        assert found[name].isfinite().all() and torch.allclose(found[name], expected, rtol=1e-5, atol=0)
    assert [node.op_type for node in traced.graph] == ["ReduceSum", "Mul", "Div", "Sub", "Sub", "Sub", "Add", "Div"]


@pytest.mark.parametrize(("operation", "number"), [("Mul", 1), ("Add", 0), ("Sub", 0), ("Div", 1)])
@pytest.mark.parametrize(("shape", "left"), [((), 0), ((1, 1, 1), 1), ((4, 6), 1)])
def test_a_scalar_that_changes_nothing_goes_and_one_that_widens_stays(operation, number, shape, left, tmp_path):
    constant = np.full(shape, number, np.float32)
    nodes = [helper.make_node(operation, ["x", "constant"], ["z"]), helper.make_node("Neg", ["z"], ["y"])]
    path = save_graph(tmp_path / "x.onnx", nodes, {"constant": constant}, {"x": ["n", 6]}, {"y": None}, np.float32)
    model = ir.load(path)
    tracing.fold(model)
    assert [node.op_type for node in model.graph] == [operation] * left + ["Neg"]


def test_keys_are_transposed_once(network):
    """torch writes a Reshape, a Transpose and a Reshape behind the Transpose of heads and tokens."""
    softmaxes = [node for node in network.traced.graph if node.op_type == "Softmax"]
    for softmax in softmaxes:
        node, chain = softmax.inputs[0].producer().inputs[1].producer(), []
        while node.op_type != "MatMul":  # the projection of keys
            chain.append(node)
            node = node.inputs[0].producer()
        assert [node.op_type for node in chain] == ["Mul", "Transpose", "Reshape"]
        assert chain[1].attributes["perm"].as_ints() == (0, 2, 3, 1)
    assert len(softmaxes) == 8


@pytest.mark.parametrize(("axes", "replaced"), [((-1, -2), True), ((-2, -1), False)])
def test_a_reshape_that_is_no_transposition_stays(axes, replaced, tmp_path):
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
    constants = {name: np.array([number], np.int64) for name, number in numbers.items()}
    shape = ["a", "b", "c", "d"]
    path = save_graph(tmp_path / "keys.onnx", nodes, constants, {"x": shape}, {"out": shape}, np.float32)
    model, given = ir.load(path), {"x": torch.arange(120.0).reshape(1, 2, 3, 20)}
    expected = run("reference", path, given)["out"]
    transpose_keys(model)
    ir.save(model, path)
    assert torch.equal(run("reference", path, given)["out"], expected)
    made = {node.outputs[0].name: node for node in model.graph}["out"].inputs[0].producer()
    assert (made.op_type == "Transpose") == replaced


@pytest.mark.parametrize("opset", [21, 22, 23])
def test_an_opset_is_raised_past_operations_that_gain_types_and_not_past_others(opset):
    """SDXL's text encoders are padded with zeros; group normalization reads its scales per channel from opset 21 on."""
    header = '<ir_version: 9, opset_import: ["" : 20]>'
    padded = f"{header} graph (float16[2,77,8] x, int64[6] pads) => (float16[2,80,8] y) {{ y = Pad(x, pads) }}"
    raise_opset(model := ir.from_proto(onnx.parser.parse_model(padded)), opset)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert model.opset_imports[""] == opset
    grouped = (
        f"{header} graph (float16[2,8,4] x, float16[2] scale, float16[2] bias) => (float16[2,8,4] y) "
        "{ y = GroupNormalization <num_groups = 2> (x, scale, bias) }"
    )
    with pytest.raises(ArtifactError, match=f"GroupNormalization, which may mean something else in opset {opset}"):
        raise_opset(ir.from_proto(onnx.parser.parse_model(grouped)), opset)


class Calls(nn.Module):
    """A network of calls, each with an output of its own, which has a weight where the calls take one."""

    def __init__(self, calls: Mapping[str, Call]):
        super().__init__()
        self.calls, self.weight = calls, nn.Parameter(torch.linspace(0.5, 2, 6))

    def forward(self, x):
        return {name: call(x, self.weight) for name, call in self.calls.items()}


AS_CALLED = {
    "to a device": lambda x, weight: x.to("cpu", FULL) / 3,
    "to a dtype by its name": lambda x, weight: torch.ops.aten.to.dtype_layout(x, dtype=FULL, layout=torch.strided) / 3,
    "clip": lambda x, weight: torch.clip(x, -1, 0.5),
    "clip below": lambda x, weight: torch.clip(x, min=-0.25),
    "a number minus x": lambda x, weight: torch.rsub(x, 2, alpha=3),
    "1 minus x": lambda x, weight: 1 - x,
    "an axis of one squeezed": lambda x, weight: x[:, :1].squeeze(1),
    "longer axes not squeezed": lambda x, weight: x.squeeze(0) + x.squeeze(1),
    "flattened": lambda x, weight: x.flatten(1),
    "flattened but for two": lambda x, weight: x.flatten(2),
    "flattened in the middle": lambda x, weight: x.flatten(1, 2),
    "both": lambda x, weight: (x > 0) & (x < 1),
    "unflattened": lambda x, weight: x.unflatten(-1, (2, -1)),
    "rms norm": lambda x, weight: nn.functional.rms_norm(x, (6,), weight, 1e-6),
    "rms norm of two axes": lambda x, weight: nn.functional.rms_norm(x, (4, 6)),
    "the smaller": lambda x, weight: torch.min(x, x * x),
    "the smaller truth": lambda x, weight: torch.min(x > 0, x < 1),
    "outer": lambda x, weight: torch.outer(x[0, 0, 0], weight),
    "a grid": lambda x, weight: sum(torch.meshgrid(x[:, 0, 0, 0], x[0, :, 0, 0], x[0, 0, :, 0], indexing="ij")),
    "a grid of images": lambda x, weight: torch.stack(torch.meshgrid(x[:, 0, 0, 0], weight, indexing="xy")),
    "a difference": lambda x, weight: torch.diff(x),
    "a difference along another axis": lambda x, weight: torch.diff(x, dim=1),
    "a difference of differences": lambda x, weight: torch.diff(x, 2, prepend=x[..., 2:]),
    "an axis moved": lambda x, weight: x.movedim(1, -1),
    "an axis moved forth": lambda x, weight: x.movedim(-1, 1),
    "larger": lambda x, weight: nn.functional.interpolate(x, scale_factor=(2.0, 3.0), mode="nearest-exact"),
    "of a size": lambda x, weight: nn.functional.interpolate(x, size=(6, 5), mode="nearest-exact"),
    "of a size that is not known": lambda x, weight: nn.functional.interpolate(
        x, size=(2 * x.shape[0], 3), mode="nearest-exact"
    ),
    "a transposed convolution": lambda x, weight: nn.functional.conv_transpose2d(
        x, weight.reshape(3, 1, 1, 2), weight[:1], stride=2, padding=(0, 1), output_padding=1
    ),
    "under an autocast that is off": lambda x, weight: without_autocast(without_autocast, x),
    "a changed result": lambda x, weight: (x * 2).add_(1).div_(x),
    "a result that was read before it was changed": lambda x, weight: read_and_changed(x * 2),
}
IN_PARTS = {
    "unflattened in the middle": lambda x, weight: x.unflatten(2, (2, 2)),
    "changed by another dtype": lambda x, weight: (x * 2).mul_(x.to(FULL) + 1),
    "changes what a view shows": lambda x, weight: changed_below(x * 2),
    "changes a view": lambda x, weight: changed_above(x * 2),
}
PROMOTED = {
    "joined of two dtypes": lambda x, weight: torch.cat([x, x.to(FULL) / 3]),
    "of two dtypes": lambda x, weight: x.to(FULL) + x,
    "of an integer": lambda x, weight: torch.arange(6) * x,
    "of a truth": lambda x, weight: (x > 0) * x,
    "outer, of integers": lambda x, weight: torch.outer(torch.arange(5), weight),
    "the smaller of an integer and x": lambda x, weight: torch.min(torch.arange(6) - 3, x),
    "the smaller of x and one number": lambda x, weight: torch.min(x, weight.float().mean()),
}


@torch.autocast("cuda", enabled=False)
def without_autocast(then: Callable | None, x: Tensor) -> Tensor:
    return x * 3 if then is None else then(None, x) + 1


def read_and_changed(x: Tensor) -> Tensor:
    before = x + 1
    x.mul_(3)
    return before + x


def changed_below(x: Tensor) -> Tensor:
    view = x.flatten(1)
    x.mul_(3)
    return view * 1


def changed_above(x: Tensor) -> Tensor:
    x.flatten(1).mul_(3)
    return x * 1


@pytest.mark.parametrize("calls, dtype, taken_apart", [
    (AS_CALLED, HALF, False), ({name: AS_CALLED[name] for name in ("rms norm", "clip")}, FULL, False),
    *(({name: call}, HALF, True) for name, call in IN_PARTS.items()), (PROMOTED, HALF, False),
], ids=["as called", "in fp32", *IN_PARTS, "promoted"])  # fmt: skip
def test_a_graph_computes_what_torch_computes(calls, dtype, taken_apart, monkeypatch):
    """A program is taken apart, and operands to promote are looked for, only where a call needs it."""
    from torch.onnx._internal.exporter import _fx_passes

    decompose = Mock(wraps=torch.export.ExportedProgram.run_decompositions)
    promote = Mock(wraps=_fx_passes.insert_type_promotion_nodes)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *given: decompose(*given))
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", promote)
    module, x = Calls(calls).to(dtype), torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = trace(lambda: Calls(calls), Contract({"x": ("batch", 3, 4, 6)}, tuple(calls), {"x": dtype}, dtype))
    for value in list(model.graph.inputs)[1:]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(module.weight.detach().numpy(), name=value.name)
        model.graph.initializers[value.name] = value
    serialized = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, providers=["CPUExecutionProvider"])
    ours = dict(zip(calls, session.run(list(calls), {"x": x.numpy()}), strict=True))
    rounding = 1e-6 if dtype == FULL else 2e-3  # a last bit or two: means are summed in another order
    for name, result in module(x).items():
        expected = result.detach().numpy()
        assert ours[name].dtype == expected.dtype and ours[name].shape == expected.shape, name
        np.testing.assert_allclose(ours[name], expected, rtol=rounding, atol=rounding, err_msg=name)
    assert decompose.called == taken_apart and (promote.called or calls is not PROMOTED)
