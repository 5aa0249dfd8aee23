"""A factor that is folded into a producer and its readers changes nothing; where it would, there is no producer."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sd_quant.layers.producers import _before
from sd_quant.layers.roles import observed_layers
from sd_quant.layers.tape import noted
from sd_quant.models.parts import SharedInput

from ...zoo.denoisers import FAMILIES, OTHERS, Watched, watched

pytestmark = [pytest.mark.commit, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi's positions, in fp64

ALL = [*FAMILIES, *OTHERS]


# Whole networks


def answer(network: nn.Module, known: Watched) -> Tensor:
    found = network(**known.arguments)
    while not isinstance(found, Tensor):
        found = found[0]
    return found


def fold(network: nn.Module, shared: SharedInput, factor: Tensor, absorbed: bool = True) -> None:
    """Divides the columns of the readers by ``factor``; the producer's outputs are multiplied, as in export."""
    for reader in shared.readers:
        network.get_submodule(reader).weight /= factor
    if absorbed:
        producer = network.get_submodule(shared.producer)
        ones = (0.0, 1.0) if shared.modulation else (0.0,)  # a modulation makes scale, of which 1 + scale multiplies
        for rows, one in zip(shared.rows(len(factor)), ones, strict=True):
            producer.weight[rows] *= factor.view(-1, *(1,) * (producer.weight.ndim - 1))
            if getattr(producer, "bias", None) is not None:
                producer.bias[rows] = factor * (producer.bias[rows] + one) - one


def factor_for(network: nn.Module, shared: SharedInput, seed: int) -> Tensor:
    """Powers of two, so that only the network's own use of fp32 rounds."""
    width = network.get_submodule(shared.readers[0]).in_features
    return 2.0 ** torch.randint(-2, 3, (width,), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_all_producers_absorb_at_once(name):
    """In the order of the list, in which a producer's own columns change before its rows."""
    known, network = watched(name), watched(name).real()
    expected = answer(network, known)
    folded = [each for each in observed_layers(network, known.arguments, known.text).shared_inputs if each.producer]
    changed = copy.deepcopy(network)
    for seed, shared in enumerate(folded):
        factor = factor_for(network, shared, seed).to(known.dtype)
        fold(network, shared, factor)
        fold(changed, shared, factor, absorbed=False)
    exact = 1e-9 if known.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(answer(network, known), expected, rtol=0, atol=exact * float(expected.abs().max()))
    assert bool(folded) == (name != "flux2")  # whose modulations all blocks share
    if folded:
        assert (answer(changed, known) - expected).abs().max() > 0.05


# Small networks


class Small(nn.Module):
    """A first and a last layer, with what is tried between them."""

    def __init__(self, function: Callable, **modules: nn.Module):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x), time))


linear, norm, plain_norm = partial(nn.Linear, 8, 8), partial(nn.LayerNorm, 8), partial(nn.RMSNorm, 8)


class Gain(nn.Module):
    """A norm that is written out, with or without a bias, before or behind the weight."""

    def __init__(self, bias: bool = False, added_first: bool = False, of_one: bool = False):
        super().__init__()
        self.weight, self.added_first, self.of_one = nn.Parameter(torch.rand(8)), added_first, of_one
        if bias:
            self.bias = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        if self.added_first:
            return (x + self.bias) * self.weight
        x = x * (1 + self.weight if self.of_one else self.weight)
        return x + self.bias if hasattr(self, "bias") else x


def half(tensor: Tensor, which: int) -> Tensor:
    return tensor.chunk(2, dim=-1)[which]


def gated(made: Tensor, value: int) -> Tensor:
    return half(made, value) * nn.functional.gelu(half(made, 1 - value))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (8,)) * (1 + scale[:, None]) + shift[:, None]


def by_six(n: Small, x: Tensor, time: Tensor) -> Tensor:
    made = n.m(time).unflatten(1, (6, 8)).unbind(1)
    return n.a(modulated(x, made[3], made[4])) * made[5][:, None]


def by_chunks(n: Small, x: Tensor, time: Tensor) -> Tensor:
    scale, shift = n.m(time.relu()).chunk(2, dim=1)
    return n.a(torch.addcmul(shift[:, None], x, 1 + scale[:, None]))


def twice_modulated(n: Small, x: Tensor, time: Tensor) -> Tensor:
    shift, scale = n.m(time).chunk(2, dim=1)
    return n.b(modulated(n.a(modulated(x, shift, scale)), shift, scale))


def heads(tensor: Tensor) -> Tensor:
    return tensor.unflatten(-1, (2, 4)).transpose(1, 2)


def attention(n: Small, x: Tensor, time: Tensor) -> Tensor:
    made = nn.functional.scaled_dot_product_attention(heads(n.q(x)), heads(n.q(x).sin()), heads(n.v(x)))
    return n.a(made.transpose(1, 2).flatten(2) / 2)


def joint(n: Small, x: Tensor, time: Tensor) -> Tensor:
    q, v = (heads(torch.cat([n.q(x), x], 1)), heads(torch.cat([n.v(x), x], 1)))
    made = nn.functional.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2)
    return n.a(made[:, :5])


def chunks_elsewhere(n: Small, x: Tensor, time: Tensor) -> Tensor:
    made = n.m(time)
    return n.a(modulated(x, made[:, 4:12], made[:, 12:20]))


def tokens_as_channels(n: Small, x: Tensor, time: Tensor) -> Tensor:
    return n.a(nn.functional.scaled_dot_product_attention(x.mT, x.mT, n.w(x).mT).mT)


def repeated(n: Small, x: Tensor, time: Tensor) -> Tensor:
    q, v = heads(n.q(x)), n.w(x)[:, None]
    made = nn.functional.scaled_dot_product_attention(q, q[:, :1], v, enable_gqa=True)
    return n.a(made.transpose(1, 2).flatten(2))


A, M = {"a": linear}, {"a": linear, "m": lambda: nn.Linear(8, 16)}
N, QV = {"a": linear, "n": norm}, {"a": linear, "q": linear, "v": linear}
W, WIDE = {"w": linear}, {"w": lambda: nn.Linear(8, 16)}
ABSORBED = {  # what is computed, the layers, and what absorbs the factor of what "a" reads
    "an affine norm": (lambda n, x, t: n.a(n.n(x)), N, ("n", None)),
    "a norm in another dtype": (lambda n, x, t: n.a(n.n(x)), N | {"n": lambda: FP32LayerNorm(8)}, ("n", None)),
    "a written norm": (lambda n, x, t: n.a(n.n(x)), N | {"n": Gain}, ("n", None)),
    "a written norm with bias": (lambda n, x, t: n.a(n.n(x)), N | {"n": lambda: Gain(bias=True)}, ("n", None)),
    "a norm's output times others": (lambda n, x, t: n.a(n.n(x) * (1 + n.m(t)[:, None, :8])), N | M, ("n", None)),
    "GroupNorm": (
        lambda n, x, t: n.a(n.n(x.mT.unflatten(2, (5, 1))).flatten(2).transpose(1, 2)),
        N | {"n": lambda: nn.GroupNorm(2, 8)}, ("n", None),
    ),
    "a linear": (lambda n, x, t: n.a(n.w(x) * 3), A | W, ("w", None)),
    "the value in front of a gate": (lambda n, x, t: n.a(gated(n.w(x), 0)), A | WIDE, ("w", None)),
    "a gate beside": (lambda n, x, t: n.a(n.w(x).sigmoid() * n.v(x)), QV | W, ("v", None)),
    "values of an attention": (attention, QV, ("v", None)),
    "six chunks as an axis": (by_six, A | {"m": lambda: nn.Linear(8, 48)}, ("m", (3, 4))),
    "scale, then shift": (by_chunks, M, ("m", (1, 0))),
}  # fmt: skip
NONE = {
    "the residual goes on": (lambda n, x, t: n.a(y := n.n(x)) + y, N),
    "the norm has no weight": (lambda n, x, t: n.a(nn.functional.layer_norm(x, (8,))), A),
    "the norm counts from one": (lambda n, x, t: n.a(n.n(x)), N | {"n": lambda: Gain(of_one=True)}),
    "the norm is called twice": (lambda n, x, t: n.a(n.n(x)) + n.n(t)[:, None], N),
    "a norm without bias is called twice": (lambda n, x, t: n.a(n.n(x)) + n.n(t)[:, None], N | {"n": plain_norm}),
    "a written norm is called twice": (lambda n, x, t: n.a(n.n(x)) + n.n(t)[:, None], N | {"n": Gain}),
    "the norm adds before it multiplies": (
        lambda n, x, t: n.a(n.n(x)), N | {"n": lambda: Gain(bias=True, added_first=True)}
    ),
    "an activation between": (lambda n, x, t: n.a(n.w(x).relu()), A | W),
    "the value behind the gate": (lambda n, x, t: n.a(gated(n.w(x), 1)), A | WIDE),
    "the value is its own gate": (lambda n, x, t: n.a((y := n.w(x)) * y.sigmoid()), A | W),
    "a square": (lambda n, x, t: n.a((y := n.w(x)) * y), A | W),
    "a joint attention": (joint, QV),
    "repeated heads": (repeated, QV | {"w": lambda: nn.Linear(8, 4)}),
    "a mean of channels": (lambda n, x, t: n.a(y := n.n(x)) * y.mean(-1, keepdim=True), N),
    "interleaved channels": (lambda n, x, t: n.a(n.w(x).unflatten(-1, (8, 2))[..., 0]), A | WIDE),
    "a token apart": (lambda n, x, t: n.a((y := n.w(x))[:, 1:]).sum(1, keepdim=True) + y[:, :1], A | W),
    "its tokens are the channels": (tokens_as_channels, A | W),
    "the chunks begin elsewhere": (chunks_elsewhere, A | {"m": lambda: nn.Linear(8, 24)}),
    "two blocks read the modulation": (twice_modulated, M | {"b": linear}),
    "a table is added": (lambda n, x, t: n.a(modulated(x, *(n.m(t) + torch.ones(16, dtype=x.dtype)).chunk(2, 1))), M),
    "the scale is bounded": (lambda n, x, t: n.a(modulated(x, half(y := n.m(t), 0), half(y, 1).tanh())), M),
    "the scale is multiplied": (lambda n, x, t: n.a(modulated(x, half(y := n.m(t), 0), half(y, 1) * 2)), M),
    "the modulation has no bias": (
        lambda n, x, t: n.a(modulated(x, *n.m(t).chunk(2, 1))), M | {"m": lambda: nn.Linear(8, 16, bias=False)}
    ),
    "shift and scale of two linears": (lambda n, x, t: n.a(modulated(x, n.s(t), half(n.m(t), 0))), M | {"s": linear}),
    "no shift and no weight": (
        lambda n, x, t: n.a(nn.functional.layer_norm(x, (8,)) * (1 + half(n.m(t), 0)[:, None])), M
    ),
    "somebody looks": (lambda n, x, t: n.a(y) if bool((y := n.n(x)).sum() < 1e9) else x, N),
}  # fmt: skip


def small(function: Callable, modules: dict[str, Callable[[], nn.Module]]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    network = Small(function, **{name: build() for name, build in modules.items()}).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    network.requires_grad_(False)
    return network, {"x": torch.randn(2, 5, 8).double(), "time": torch.randn(2, 8).double()}


def producer(network: nn.Module, arguments: dict[str, Tensor]) -> SharedInput:
    inputs = observed_layers(network, arguments, ()).shared_inputs
    return next(shared for shared in inputs if "a" in shared.readers)


@pytest.mark.parametrize("case", ABSORBED)
def test_what_absorbs(case):
    function, modules, expected = ABSORBED[case]
    network, arguments = small(function, modules)
    shared = producer(network, arguments)
    assert (shared.producer, shared.modulation) == expected
    before = network(**arguments)
    factor = factor_for(network, shared, 0)
    fold(network, shared, factor, absorbed=False)
    assert (network(**arguments) - before).abs().max() > 1e-3
    network = small(function, modules)[0]
    fold(network, shared, factor)
    tolerance = 1e-5 if "dtype" in case else 1e-9
    torch.testing.assert_close(network(**arguments), before, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", NONE)
def test_what_does_not(case):
    shared = producer(*small(*NONE[case]))
    assert (shared.producer, shared.modulation) == (None, None)


def test_a_tensor_that_the_network_returns_absorbs_nothing():
    network, arguments = small(lambda n, x, t: n.a(n.n(x)), N)
    assert producer(network, arguments).producer == "n"
    seen = []
    network.n.register_forward_hook(lambda module, inputs, output: seen.append(output))
    network.register_forward_hook(lambda module, inputs, output: (output, seen.pop()))
    assert producer(network, arguments).producer is None


# Channels


SIZES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SIZES, st.data())
def test_channels_are_found_again_behind_a_reshape_and_a_permutation(sizes, data):
    total = torch.Size(sizes).numel()
    shape, rest = [], total
    while rest > 1:
        shape.append(data.draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0])))
        rest //= shape[-1]
    order = data.draw(st.permutations(range(len(shape))))
    channels = torch.randint(-1, 3, [shape[axis] if data.draw(st.booleans()) else 1 for axis in order])

    class Moved(nn.Module):
        def forward(self, x):
            return x.reshape(shape).permute(order) + 0

    tape = noted(Moved(), {"x": torch.arange(total).reshape(sizes)})
    operation = next(each for each in tape.operations if each.kind == "permute")
    (value,) = tape.outputs[operation]
    found, expected = channels, torch.empty(total, dtype=torch.int64)
    while operation is not None:
        source = operation.operands[0]
        found, value, operation = _before(operation, value, source, found), source, source.operation
    expected[torch.arange(total).reshape(shape).permute(order)] = channels.expand([shape[axis] for axis in order])
    assert torch.equal(found.expand(sizes), expected.reshape(sizes))
