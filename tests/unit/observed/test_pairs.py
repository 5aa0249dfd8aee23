import pytest
import torch
from torch import Tensor, nn

from sd_quant.observed.pairs import Numbers, Pair, RealNumbers, with_real_constants

pytestmark = pytest.mark.commit


class Rotary(nn.Module):
    """Rotates as networks do, with a table in a buffer and frequencies in a list."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(9, dtype=torch.float64), 0.5 ** torch.arange(3, dtype=torch.float64))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.axes = [self.table[:, :1].clone(), self.table[:, 1:].clone()]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        split = self.table[:tokens].split([1, 2], dim=1)
        joined = torch.cat([split[0], self.axes[1][:tokens]], dim=-1).unsqueeze(0).expand(x.shape[0], -1, -1)
        made = torch.polar(
            torch.ones(tokens, 3), torch.arange(tokens, dtype=torch.float64)[:, None].float().repeat(1, 3)
        )
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * joined
        turned = torch.stack([turned, turned * made], dim=0).mean(0).sub(made[None]) - made[None] + joined.conj() / 2
        return (
            torch.view_as_real(turned.to(torch.complex64)).flatten(-2)
            + turned.real.abs().sum()
            + (1 + turned + 2).imag.mean()
        )


def test_a_network_computes_the_same_with_pairs_of_reals_and_nothing_complex_or_in_fp64_is_left():
    torch.manual_seed(0)
    x, module = torch.randn(2, 5, 6), with_real_constants(Rotary())

    def in_reals(x: Tensor) -> Tensor:
        with RealNumbers():
            return Rotary.forward(module, x)

    module.forward = in_reals
    found = module(x)
    assert found.dtype == torch.float32
    assert torch.allclose(found, Rotary()(x).float(), atol=1e-5)
    program = torch.export.export(module, (x,), strict=False)
    dtypes = {node.meta["val"].dtype for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert dtypes <= {torch.float32, torch.int64}


def test_tensors_are_made_in_fp32_and_an_operation_without_a_form_for_pairs_is_refused():
    with RealNumbers():
        assert torch.arange(3, dtype=torch.float64).dtype == torch.float32
        assert torch.zeros(2).double().dtype == torch.zeros(2).to(torch.float64).dtype == torch.float32
        with pytest.raises(NotImplementedError, match="torch's exp has no form"):
            torch.exp(Pair(torch.zeros(2), torch.zeros(2)))
    assert torch.zeros(2).double().dtype == torch.float64


def test_linspace_of_a_dynamic_length_is_not_frozen():
    class Centers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with RealNumbers():
                return torch.linspace(0, 2 * x.shape[0], x.shape[0] + 1)

    x, dynamic = torch.zeros(5), {"x": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Centers(), (x,), dynamic_shapes=dynamic, strict=False)
    assert "linspace" not in str(program.graph)
    assert torch.allclose(program.module()(torch.zeros(9)), torch.linspace(0, 18, 10))


@pytest.mark.parametrize(
    "made, noticed",
    [
        (lambda: torch.zeros(2).cos(), (False, False)),
        (lambda: torch.zeros(2).double(), (False, True)),
        (lambda: torch.linspace(0, 1, 3), (False, True)),
        (lambda: torch.view_as_complex(torch.zeros(1, 2)).abs(), (True, True)),
    ],
    ids=["reals", "fp64", "linspace", "complex"],
)
def test_the_kinds_of_numbers_are_noticed(made, noticed):
    with Numbers() as numbers:
        made()
    assert (numbers.complex, numbers.changed) == noticed
