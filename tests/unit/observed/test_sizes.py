import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.models.empty import random_weights, reader, shortened, with_weights, without_weights
from sd_quant.observed.calls import Call
from sd_quant.observed.sizes import (
    Outside,
    given_outputs,
    input_trees,
    known_without_weights,
    look,
    named_tensors,
    of_sizes_alone,
    weightless,
)

pytestmark = pytest.mark.commit


class Positions(nn.Module):
    def forward(self, x: Tensor, grid: Tensor, scale: float) -> tuple[Tensor, dict]:
        places = torch.arange(x.shape[1], dtype=torch.float64, device=x.device) * scale + grid.sum()
        return places.cos().float(), {"sin": places.sin().float()}


class Waves(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return t[:, None] * torch.arange(4.0, device=t.device)


class Learned(nn.Module):
    """Of a weight, which it is given."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions, self.waves, self.act = nn.Linear(3, 4), Positions(), Waves(), nn.SiLU()
        self.learned, self.table = Learned(), nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, t: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        y = self.act(self.embed(x)) + self.waves(t)[:, None] + self.learned(self.table)
        grid = torch.ones(2, x.shape[1], device=y.device)  # made in the network, of sizes
        cosines, other = self.positions(y, grid, scale)
        y = y * cosines[:, None] + other["sin"][:, None]
        if mask.all():
            y = y + 1
        for block in self.blocks:
            y = block(y)
        return y


def empty(kind: type = Network) -> nn.Module:
    with without_weights():
        return kind()


def arguments(tokens: int = 5, step: int = 0) -> dict:
    generator = torch.Generator().manual_seed(step)
    x, t = torch.randn(2, tokens, 3, generator=generator), torch.rand(2, generator=generator)
    return {"x": x, "t": t, "mask": torch.ones(2, tokens, dtype=torch.bool), "scale": tokens / 4}


def full() -> nn.Module:
    network = empty()
    return with_weights(network, reader(network, random_weights(network)))


def test_a_network_is_built_without_weights_in_no_time_and_lists_of_equal_blocks_are_cut():
    with without_weights():
        layer = nn.Linear(2**15, 2**15)  # 4 GiB
        layer.register_buffer("table", torch.arange(3.0))
    assert layer.weight.is_meta and layer.table.tolist() == [0, 1, 2]
    assert not nn.Linear(2, 2).weight.is_meta and len(shortened(empty(), 2).blocks) == 2


def test_weights_that_modules_share_stay_shared_and_are_found_by_either_name():
    with without_weights():
        network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        network[1].weight = network[0].weight
    with_weights(network, reader(network, {"1.weight": torch.ones(2, 2)}))
    assert network[0].weight is network[1].weight and network[0].weight.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(ArtifactError, match=r"Sequential has a weight 0.weight that the checkpoint lacks"):
        with_weights(network, reader(network, {}))


def test_modules_of_sizes_alone_are_told_from_those_of_numbers_steps_and_weights():
    assert weightless(full()).keys() == {"positions", "waves", "act", "learned"}
    calls = [Call(arguments(step=step), "base", step) for step in range(2)]
    assert of_sizes_alone(empty, "forward", calls) == {"positions": 1}
    seen = known_without_weights(empty, "forward", arguments())
    assert seen.keys() == {"waves"} and torch.equal(seen["waves"][0], full().waves(arguments()["t"]))


@pytest.mark.parametrize("tokens", [5, 9])
def test_outputs_are_computed_without_weights(tokens):
    outside = pickle.loads(pickle.dumps(Outside(empty, "forward", {"positions": 1})))
    given = arguments(tokens)
    seen, expected = outside(given), look(full(), "forward", given, ["positions"])
    trees = input_trees(expected)
    assert list(trees["positions"][0]) == ["tuple"]
    found, wanted = named_tensors(trees, seen), named_tensors(trees, expected)
    assert found.keys() == wanted.keys() == {"positions_0_0", "positions_0_1_sin"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_outputs_of_sizes_are_remembered_and_a_module_that_weights_have_a_part_in_has_none():
    class Deciding(Network):
        def forward(self, x: Tensor, **others) -> Tensor:
            return self.positions(x, x, 1.0) if self.embed(x).sum() > 0 else x

    outside = Outside(empty, "forward", {"positions": 1})
    assert outside(arguments()) is outside(arguments(step=1))
    assert outside(arguments()) is not outside(arguments() | {"scale": 2.0})
    with pytest.raises(SdQuantError, match="Deciding needs weights for its positions"):
        Outside(partial(empty, Deciding), "forward", {"positions": 1})(arguments())


def test_a_module_returns_what_it_is_given():
    network, given = full(), arguments()
    expected, seen = network(**given), look(network, "forward", given, ["positions"])
    trees = input_trees(seen)
    tensors = named_tensors(trees, seen)
    for factor in (1, 0):
        with given_outputs(network, trees, {name: factor * tensor for name, tensor in tensors.items()}):
            assert torch.equal(network(**given | {"scale": 77.0}), expected) == bool(factor)
    assert torch.equal(network(**given), expected)
