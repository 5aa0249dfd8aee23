import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn

from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import SdQuantError
from sd_quant.export.tracing import trace
from sd_quant.models.empty import without_weights
from sd_quant.models.parts import Contract
from sd_quant.observed.calls import Call, restored
from sd_quant.observed.ladder import climb
from sd_quant.observed.part import INPUTS, Rung, part_of

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # the tracing

RUNS = {"base": (2, 8), "larger": (2, 12), "batch": (3, 8), "prompt": (2, 8)}


class Network(nn.Module):
    """With a tied weight, a buffer, and a tensor of its constructor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.factor = torch.arange(1.0, 7.0)

    def forward(self, x: Tensor, conditions: dict, return_dict: bool = True) -> tuple[Tensor] | dict:
        y = self.second(self.first(x) + self.table) * self.factor + conditions["scale"][:, None, None]
        return {"sample": y} if return_dict else (y,)


class Frozen(Network):
    """Whose output depends on a number of tokens that torch.export takes for a constant."""

    def forward(self, x: Tensor, conditions: dict, tokens: int) -> Tensor:
        return super().forward(x, conditions)["sample"] * tokens


class Chooses(nn.Module):
    """Between booleans, for which ONNX Runtime has no kernel."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return self.linear(x) * torch.where(other, mask, torch.where(mask, other, mask))[..., None]


class Positions(nn.Module):
    """Of a size that torch.export takes for a number, in complex numbers."""

    def forward(self, tokens: int) -> Tensor:
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64), torch.arange(3, dtype=torch.float64))
        return torch.polar(torch.ones_like(angles), angles)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.positions = nn.Linear(6, 6), Positions()

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).float().unflatten(-1, (3, 2)))
        return torch.view_as_real(pairs * self.positions(tokens)).flatten(-2).float()


class Single(nn.Module):
    """Whose time is embedded in fp32, in which autocast computes on a GPU, as in Kandinsky 5; with a trained buffer."""

    def __init__(self):
        super().__init__()
        self.time, self.linear = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float32):
            angles = timestep.float()[:, None] * torch.arange(6, dtype=torch.float32)
            embedded = self.time(torch.cos(angles))
        return self.linear(x + embedded[:, None]) + self.shift


def empty(kind: type) -> nn.Module:
    with without_weights():
        return kind()


def weights_of(kind: type) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(kind().named_parameters())


def calls() -> list[Call]:
    generator = torch.Generator().manual_seed(0)

    def arguments(batch: int, tokens: int) -> dict:
        x, scale = torch.randn(batch, tokens, 6, generator=generator), torch.randn(batch, generator=generator)
        return {"x": x, "conditions": {"scale": scale}}

    return [Call(arguments(*sizes), run, step) for run, sizes in RUNS.items() for step in range(2)]


def climbed(kind: type, change: Callable[[Call], dict] = lambda call: call.arguments, **options) -> Rung:
    """The rung of a network for ``calls`` whose arguments are changed."""
    recorded = [replace(call, arguments=change(call)) for call in calls()]
    return climb(partial(empty, kind), recorded, **{"weights": weights_of(kind), "threads": 1} | options)


@pytest.fixture(scope="module")
def rung() -> Rung:
    return climbed(Network)


def test_a_plain_network_is_verified_on_every_call_in_each_runtime(rung):
    assert rung.name == "plain" and rung.cause is None and rung.serves == tuple(range(8))
    assert rung.verified.keys() == {"onnxruntime", "openvino"}
    assert all(each.calls == 8 and each.error < 1e-5 for each in rung.verified.values())


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_products_of_two_dtypes_are_in_the_weights_and_a_trained_buffer_is_a_weight():
    weights = weights_of(Single) | {"shift": torch.full((6,), 5.0)}
    rung = climbed(
        Single, lambda call: {"x": call.arguments["x"], "timestep": call.arguments["conditions"]["scale"]},
        weights=weights,
    )  # fmt: skip
    assert (rung.weights, rung.notes) == ("float16", ()) and INPUTS in rung.remedies
    assert rung.verified.keys() == {"onnxruntime", "openvino"}, "against a network with the buffer of the checkpoint"
    part = part_of("", rung.signature, rung, partial(empty, Single))
    graph = trace(lambda: part.wrap(empty(Single)), part.contract).graph
    assert "network.shift" in {value.name for value in graph.inputs}


def test_the_part_of_a_rung_is_what_families_write_by_hand(rung):
    """Weights are inputs of its graph, a shared one under one of its names at least, and buffers constants."""
    part = pickle.loads(pickle.dumps(part_of("transformer", rung.signature, rung)))
    network, given = Network(), calls()[0].arguments
    module = part.wrap(network)
    assert set(dict(module.named_parameters())) == {"network.first.weight", "network.first.bias", "network.second.bias"}
    assert part.contract.inputs == {"x": ("batch", "size_1", 6), "conditions_scale": ("batch",)}
    outputs = TorchEngine(module, part.contract)(**part.arguments(part.contract, given))
    assert torch.equal(part.answer(outputs)["sample"], network(**given)["sample"])
    with pytest.raises(SdQuantError, match="is called with mask"):
        part.arguments(part.contract, given | {"mask": None})
    graph = trace(lambda: part.wrap(empty(Network)), part.contract).graph
    names, shared = [value.name for value in graph.inputs], {"network.first.weight", "network.second.weight"}
    assert names[:2] == ["x", "conditions_scale"]
    assert shared & set(names) and set(names[2:]) - shared == {"network.first.bias", "network.second.bias"}
    assert all(value.const_value is not None for value in graph.initializers.values())


def test_positions_are_computed_outside_of_the_graph(caplog):
    with caplog.at_level("DEBUG", "sd_quant.observed.ladder"):
        rung = climbed(Rotary, lambda call: {"x": call.arguments["x"], "tokens": call.arguments["x"].shape[1]})
    assert "plain: no runtime computes with complex numbers" in caplog.messages, "nothing complex is traced"
    assert rung.name == "positions outside of the graph" and len(rung.verified) == 2 and len(rung.serves) == 8
    assert rung.signature.inputs["positions_0"] == ("size_1", 3, 2) and rung.single == ("positions_0",)
    assert restored(Rung, json.loads(json.dumps(asdict(rung)))) == rung
    part = pickle.loads(pickle.dumps(part_of("transformer", rung.signature, rung, partial(empty, Rotary))))
    x = torch.randn(2, 31, 6)
    tensors = part.arguments(part.contract, {"x": x, "tokens": 31})
    assert tensors["positions_0"].shape == (31, 3, 2)
    network = Rotary()
    (found,) = part.wrap(network)(**tensors)
    assert torch.allclose(found, network(x, 31), atol=1e-5)


def test_a_choice_between_booleans_is_served_by_every_runtime():
    def arguments(call: Call) -> dict:
        x = call.arguments["x"]
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        return {"x": x, "mask": mask, "other": torch.arange(x.shape[1]).expand(x.shape[:2]) % 2 == 0}

    rung = climbed(Chooses, arguments)
    assert rung.name == "plain" and rung.verified.keys() == {"onnxruntime", "openvino"}


class OneSize(nn.Module):
    """Whose code takes the length and the batch of ``x`` for numbers, and no other axis."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.linear(x) * len(x) * len(x[0]) + text.mean(1, keepdim=True)


def test_one_graph_a_size_serves_every_text():
    sizes = {"base": (2, 8, 3), "larger": (2, 12, 3), "batch": (3, 8, 3), "prompt": (2, 8, 5)}
    torch.manual_seed(0)
    recorded = [
        Call({"x": torch.randn(batch, tokens, 6), "text": torch.randn(batch, length, 6)}, run, 0)
        for run, (batch, tokens, length) in sizes.items()
    ]
    rung = climb(partial(empty, OneSize), recorded, weights_of(OneSize), threads=1)
    assert rung.name == "one graph a size: plain" and rung.serves == (0, 3)
    assert isinstance(rung.signature.inputs["text"][1], str) and rung.signature.inputs["x"] == (2, 8, 6)


class Chunks(OneSize):
    def forward(self, x: Tensor, chunks: list[int]) -> Tensor:
        return self.linear(x) * sum(chunks)


def test_a_network_that_fails_or_changes_its_arguments_is_refused_with_the_cause():
    """Although nothing was traced. A graph that is right at one size only is not taken."""
    rung = climbed(Chunks, lambda call: {"x": call.arguments["x"], "chunks": [1] * (1 + call.step)})
    assert rung.name == "refused" and "chunks is an argument that changes between steps" in rung.cause
    rung = climbed(Network, lambda call: call.arguments | {"unknown": None})
    assert rung.name == "refused" and "Network fails as it is called" in rung.cause
    rung = climbed(Frozen, lambda call: call.arguments | {"tokens": call.arguments["x"].shape[1]})
    assert rung.name != "plain"


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_large_network_is_verified_by_a_copy_of_two_blocks():
    rung = climbed(Deep, lambda call: {"x": call.arguments["x"]}, weights={}, large=100)
    assert rung.name == "plain" and "2 blocks of each list" in rung.notes[0]


def test_what_a_network_remembers_while_it_is_traced_is_forgotten():
    class Tables:  # no module, as in Z-Image
        made = None

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table, self.tables = nn.Linear(6, 6), None, Tables()

        @lru_cache(maxsize=8)  # noqa: B019  as in Nucleus
        def ones(self, count: int) -> Tensor:
            return torch.ones(count)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table, self.tables.made = torch.arange(6, dtype=x.dtype), torch.ones(6)
            return self.linear(x) * self.table * self.tables.made * self.ones(6)

    module = empty(Remembers)
    contract = Contract({"x": ("batch", 6)}, ("y",), {"x": torch.float32}, torch.float32, example={"batch": 3})
    graph = trace(lambda: module, contract).graph
    assert module.table is None and module.tables.made is None and len(graph.inputs) == 3
    assert type(module.ones(6)) is Tensor
