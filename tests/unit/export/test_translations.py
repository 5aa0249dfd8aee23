"""Operations as a network calls them, in ONNX: what ONNX Runtime computes of the graph is what torch computes."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from sd_quant.export import tracing, translations
from sd_quant.export.tracing import trace
from sd_quant.models.parts import Contract

HALF, FULL = torch.float16, torch.float32


class Calls(nn.Module):
    """A network of one call, which has a weight where the call takes one."""

    def __init__(self, call):
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.linspace(0.5, 2, 6))

    def forward(self, x):
        return {"out": self.call(x, self.weight)}


CALLS = {
    "to a dtype": lambda x, weight: x.to(FULL) / 3,
    "to a device": lambda x, weight: x.to("cpu", FULL) / 3,
    "to a dtype by its name": lambda x, weight: torch.ops.aten.to.dtype_layout(x, dtype=FULL, layout=torch.strided) / 3,
    "clip": lambda x, weight: torch.clip(x, -1, 0.5),
    "clip below": lambda x, weight: torch.clip(x, min=-0.25),
    "a number minus x": lambda x, weight: torch.rsub(x, 2, alpha=3),
    "1 minus x": lambda x, weight: 1 - x,
    "flattened": lambda x, weight: x.flatten(1),
    "flattened but for two": lambda x, weight: x.flatten(2),
    "flattened in the middle": lambda x, weight: x.flatten(1, 2),
    "unflattened": lambda x, weight: x.unflatten(-1, (2, -1)),
    "unflattened in the middle": lambda x, weight: x.unflatten(2, (2, 2)),
    "rms norm": lambda x, weight: nn.functional.rms_norm(x, (6,), weight, 1e-6),
    "rms norm of two axes": lambda x, weight: nn.functional.rms_norm(x, (4, 6)),
    "what changes its input": lambda x, weight: (x * 2).add_(1),
    "what has a translation in its parts alone": lambda x, weight: torch.min(x, x * x),
}
DECOMPOSED = {
    "flattened in the middle", "unflattened in the middle", "what changes its input",
    "what has a translation in its parts alone",
}  # fmt: skip


def computed(call, dtype: torch.dtype) -> tuple[np.ndarray, torch.Tensor]:
    """What ONNX Runtime computes of the traced call, and what torch computes."""
    contract = Contract({"x": ("batch", 3, 4, 6)}, ("out",), {"x": dtype}, dtype)
    module = Calls(call).to(dtype)
    model = trace(lambda: Calls(call), contract)
    for value in list(model.graph.inputs)[1:]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(module.weight.detach().numpy(), name=value.name)
        model.graph.initializers[value.name] = value
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    return session.run(None, {"x": x.numpy()})[0], module(x)["out"].detach()


@pytest.mark.parametrize("name, dtype", [*((name, HALF) for name in CALLS), ("rms norm", FULL)])
def test_a_graph_computes_what_torch_computes(name, dtype, monkeypatch):
    tables = []
    decompose = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda self, *arguments: tables.append(arguments) or decompose(self, *arguments),
    )
    ours, theirs = computed(CALLS[name], dtype)
    assert ours.dtype == theirs.numpy().dtype and ours.shape == theirs.shape
    rounding = 1e-6 if dtype == FULL else 2e-3  # a last bit or two: means are summed in another order
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=rounding, atol=rounding)
    assert bool(tables) == (name in DECOMPOSED)


def test_the_test_would_notice_a_wrong_translation(monkeypatch):
    wrong = translations.TRANSLATIONS | {torch.ops.aten.clip.default: lambda x, *_, **__: translations.op.Identity(x)}
    monkeypatch.setattr(translations, "TRANSLATIONS", wrong)
    ours, theirs = computed(CALLS["clip"], FULL)
    assert np.abs(ours - theirs.numpy()).max() > 0.1


def test_a_size_in_pixels_is_no_number_of_the_graph():
    """Sizes that are read while the network runs stay so: another image size gives another shape."""
    contract = Contract({"x": ("batch", 2, "height", "width")}, ("out",), {"x": FULL}, FULL)
    model = trace(lambda: Calls(lambda x, weight: x.flatten(2).transpose(1, 2)), contract)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    assert tracing.OPSET == model.opset_imports[""]
    for height, width in ((4, 8), (3, 5)):
        (out,) = session.run(None, {"x": np.zeros((2, 2, height, width), np.float32)})
        assert out.shape == (2, height * width, 2)


PROMOTED = {
    "of two dtypes": lambda x, weight: x.to(FULL) + x,
    "of an integer": lambda x, weight: torch.arange(6) * x,
    "of a truth": lambda x, weight: (x > 0) * x,
}


@pytest.mark.parametrize("name", PROMOTED)
def test_operands_of_other_dtypes_are_promoted_as_torch_does(name, promotions):
    ours, theirs = computed(PROMOTED[name], HALF)
    assert promotions and ours.dtype == theirs.numpy().dtype
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-3, atol=2e-3)


def test_where_all_dtypes_agree_the_graph_is_the_same_without_looking(promotions, monkeypatch):
    def call(x, weight):
        return (x * weight + 1).softmax(-1) / 3

    contract = Contract({"x": ("batch", 3, 4, 6)}, ("out",), {"x": HALF}, HALF)
    graphs, outputs = [], []
    for look in (False, True):
        monkeypatch.setattr(tracing, "dtypes_agree", tracing.dtypes_agree if not look else lambda program: False)
        graphs.append([node.op_type for node in trace(lambda: Calls(call), contract).graph])
        outputs.append(computed(call, HALF)[0])
        assert bool(promotions) == look
    assert graphs[0] == graphs[1]
    np.testing.assert_array_equal(*outputs)


def test_a_torch_that_names_it_otherwise_looks_for_operands_to_promote(promotions, monkeypatch):
    monkeypatch.setattr(tracing, "PROMOTION", "another_name")
    computed(lambda x, weight: x * weight, HALF)
    assert promotions


@pytest.fixture
def promotions(monkeypatch) -> list:
    """Has an entry for each time that torch's exporter has looked for operands to promote."""
    from torch.onnx._internal.exporter import _fx_passes

    looked, look = [], _fx_passes.insert_type_promotion_nodes
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", lambda module: looked.append(1) or look(module))
    return looked
