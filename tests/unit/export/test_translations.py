"""Operations as a network calls them, in ONNX: what ONNX Runtime computes of the graph is what torch computes."""

from collections.abc import Callable, Mapping
from unittest.mock import Mock

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from sd_quant.export.tracing import trace
from sd_quant.models.parts import Contract

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # the tracing
HALF, FULL = torch.float16, torch.float32
Call = Callable[[Tensor, Tensor], Tensor]


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
    "an axis of three not squeezed": lambda x, weight: x.squeeze(1),
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


def computed(calls: Mapping[str, Call], dtype: torch.dtype) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    """What ONNX Runtime computes of the traced graph and what torch computes, by call."""
    contract = Contract({"x": ("batch", 3, 4, 6)}, tuple(calls), {"x": dtype}, dtype)
    module = Calls(calls).to(dtype)
    model = trace(lambda: Calls(calls), contract)
    for value in list(model.graph.inputs)[1:]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(module.weight.detach().numpy(), name=value.name)
        model.graph.initializers[value.name] = value
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = dict(zip(calls, session.run(list(calls), {"x": x.numpy()}), strict=True))
    return found, {name: y.detach().numpy() for name, y in module(x).items()}


@pytest.mark.parametrize(
    "calls, dtype, taken_apart",
    [
        (AS_CALLED, HALF, False),
        ({name: AS_CALLED[name] for name in ("rms norm", "clip")}, FULL, False),
        *(({name: call}, HALF, True) for name, call in IN_PARTS.items()),
        (PROMOTED, HALF, False),
    ],
    ids=["as called", "in fp32", *IN_PARTS, "promoted"],
)
def test_a_graph_computes_what_torch_computes(calls, dtype, taken_apart, monkeypatch):
    """A program is taken apart, and operands to promote are looked for, only where a call needs it."""
    from torch.onnx._internal.exporter import _fx_passes

    decompose = Mock(wraps=torch.export.ExportedProgram.run_decompositions)
    promote = Mock(wraps=_fx_passes.insert_type_promotion_nodes)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *given: decompose(*given))
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", promote)
    ours, theirs = computed(calls, dtype)
    rounding = 1e-6 if dtype == FULL else 2e-3  # a last bit or two: means are summed in another order
    for name in calls:
        expected = theirs[name]
        assert ours[name].dtype == expected.dtype and ours[name].shape == expected.shape, name
        np.testing.assert_allclose(ours[name], expected, rtol=rounding, atol=rounding, err_msg=name)
    assert decompose.called == taken_apart and (promote.called or calls is not PROMOTED)
