from collections import OrderedDict
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sd_quant.calibration.hooks import ROWS_PER_CALL, collect, draw, take_row
from sd_quant.errors import SdQuantError
from sd_quant.quantization.statistics import CALLS, ROWS, Sample, Statistics, merge

from .some_statistics import CONVOLUTIONS, assert_same

pytestmark = pytest.mark.commit

PROMPTS, STEPS = 8, 3  # 192 candidates for ROWS, 24 for CALLS
NAMES = ("conv", "linear")


class Own(nn.Module):
    """Two layers, and a call of them that a test gives."""

    def __init__(self, call):
        super().__init__()
        self.conv, self.linear, self.call = nn.Conv2d(2, 3, 1), nn.Linear(2, 1), call

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> None:
        self.call(self, *args, **named)


class Network(nn.Module):
    """Layers that see what the network is given, so that ranges can be told in advance."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.other = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, 2, h, w]; the linear sees it as [B, h * w, 2]."""
        tokens = tokens_of(x)
        return self.conv(x).sum() + self.linear(tokens).sum() + self.other(tokens).sum()


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def layers_of(network: nn.Module) -> dict[str, nn.Module]:
    return {name: network.get_submodule(name) for name in NAMES}


def sample(prompt: int, step: int, half: int) -> torch.Tensor:
    """What the network sees of a prompt at a step, in the unconditional (0) or conditional (1) half: [2, 4, 4].

    Values that fp16 holds exactly.
    """
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(100 * prompt + 10 * step + half)).half().float()


def halves_of(prompt: int, step: int, halves=(0, 1)) -> torch.Tensor:
    return torch.stack([sample(prompt, step, half) for half in halves])


def calibrate(
    prompts=range(PROMPTS), batch_size: int = 1, *, halves=(0, 1), wanted=None, change=lambda x, batch, step: None
) -> Statistics:  # fmt: skip
    """Statistics of a pipeline that runs ``batch_size`` prompts at a time, unconditional halves first."""
    network, now = Network(), SimpleNamespace()
    layers = layers_of(network)
    wanted = draw(layers, prompts, STEPS, seed=7) if wanted is None else wanted
    position = lambda: (now.step, now.batch)  # noqa: E731
    with collect(network, layers, prompts, STEPS, position, wanted) as statistics:
        for start in range(0, len(prompts), batch_size):
            now.batch = list(prompts[start : start + batch_size])
            for now.step in range(STEPS):
                x = torch.stack([sample(prompt, now.step, half) for half in halves for prompt in now.batch])
                change(x, now.batch, now.step)
                network(x=x)
    return statistics


def of_one_call(network: nn.Module, layers: dict[str, nn.Module], x: torch.Tensor, wanted=None) -> Statistics:
    """No rows unless they are ``wanted``."""
    with collect(network, layers, [0], 1, lambda: (0, [0]), wanted or {}) as statistics:
        network(x)
    return statistics


@pytest.fixture(scope="module")
def whole() -> Statistics:
    return calibrate()


@pytest.fixture(scope="module")
def singles() -> list[Statistics]:
    return [calibrate([prompt]) for prompt in range(PROMPTS)]


@pytest.mark.parametrize("halves", [(0, 1), (1,)])
def test_ranges_by_prompt_and_step_and_by_step_and_channel(halves):
    statistics = calibrate(batch_size=2, halves=halves)
    assert statistics.layers.keys() == set(NAMES)
    assert (statistics.layers["conv"].kind, statistics.layers["linear"].kind) == ("conv", "linear")
    conv, linear = statistics.layers["conv"].amax, statistics.layers["linear"].amax
    assert (conv.shape, linear.shape) == ((PROMPTS, STEPS), (STEPS, 2))
    assert conv.dtype == linear.dtype == torch.float32
    of_all = torch.stack([halves_of(prompt, step, halves) for prompt in range(PROMPTS) for step in range(STEPS)]).abs()
    of_prompts = of_all.view(PROMPTS, STEPS, *of_all.shape[1:]).amax(dim=(1, 2, 4, 5))
    folds = torch.stack([of_prompts[fold::2].amax(0) for fold in (0, 1)])
    assert torch.equal(statistics.layers["linear"].folds, folds) and not torch.equal(*folds)
    for step in range(STEPS):
        seen = torch.stack([halves_of(prompt, step, halves) for prompt in range(PROMPTS)]).abs()
        assert torch.equal(conv[:, step], seen.amax(dim=(1, 2, 3, 4)))
        assert torch.equal(linear[step], seen.amax(dim=(0, 1, 3, 4)))


def test_a_second_call_within_a_step_only_widens_the_range():
    """As samplers of second order do. Rows are taken once, from the first call."""
    network = Network()
    layers = layers_of(network)
    with collect(network, layers, [0], 1, lambda: (0, [0]), draw(layers, [0], 1, seed=0)) as statistics:
        for magnitude in (2.0, 5.0, 3.0):
            network(x=torch.full((2, 2, 4, 4), -magnitude))
    conv, linear = statistics.layers["conv"], statistics.layers["linear"]
    assert conv.amax.tolist() == [[5.0]] and linear.amax.tolist() == [[5.0, 5.0]]
    assert linear.folds.tolist() == [[5.0, 5.0], [0.0, 0.0]]
    assert len(conv.rows.values) == len(conv.rows.priority) == len(linear.rows.values) == ROWS_PER_CALL
    assert (linear.rows.values == -2).all() and set(conv.rows.values.unique().tolist()) <= {0.0, -2.0}
    assert statistics.calls["x"].values.tolist() == torch.full((1, 2, 2, 4, 4), -2.0).tolist()


def test_a_layer_that_is_used_twice_in_a_call_has_the_wider_range():
    """Ranges are per channel, of tokens and of rows without tokens, as modulations have it; fp32 of fp16 inputs too."""
    layer = nn.Linear(2, 2)
    network = nn.Sequential(layer, layer).requires_grad_(False)
    layer.weight.copy_(torch.diag(torch.tensor([3.0, 0.5])))
    layer.bias.zero_()
    for x in (torch.ones(2, 4, 2), torch.ones(2, 2)):
        assert of_one_call(network, {"0": layer}, x).layers["0"].amax.tolist() == [[3.0, 1.0]]
    amax = of_one_call(network.half(), {"0": layer}, torch.full((1, 2), 20000.0).half()).layers["0"].amax
    assert amax.dtype == torch.float32 and amax.tolist() == [[60000.0, 20000.0]]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_a_patch_is_what_an_output_of_the_convolution_multiplies(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, **options)
    x = torch.randn(2, 3, 9, 7).half().float()
    output = conv(x).movedim(1, -1).flatten(0, 2)  # [positions of both samples, 5]
    everywhere = [(position + 0.5) / len(output) for position in range(len(output))]
    patches = torch.stack([take_row(conv, x, place) for place in everywhere])
    assert patches.shape == (len(output), conv.weight[0].numel())
    torch.testing.assert_close(patches @ conv.weight.flatten(1).T + conv.bias, output)


def test_what_fp16_cannot_hold_is_cut():
    network = nn.Sequential(nn.Linear(4, 1))
    x, wanted = torch.tensor([[[1e30, -1e30, 65504.0, 2.0]]]), {(0, 0): {"0": [(0.1, 0.5)]}}
    rows = of_one_call(network, {"0": network[0]}, x, wanted).layers["0"].rows.values
    assert rows.dtype == torch.float16 and rows.tolist() == [[65504.0, -65504.0, 65504.0, 2.0]]


def test_rows_are_inputs_of_their_prompt_and_step():
    wanted = draw(NAMES, range(PROMPTS), STEPS, seed=7)
    came_from = {
        (name, kept[0]): call for call, each in wanted.items() for name in NAMES for kept in each.get(name, ())
    }
    statistics = calibrate(batch_size=3, wanted=wanted)
    for name in NAMES:
        rows, found = statistics.layers[name].rows, []
        for row, priority in zip(rows.values.float(), rows.priority.tolist(), strict=True):
            x = halves_of(*came_from[name, priority])
            inputs = F.unfold(x, 3, padding=1, stride=2).mT if name == "conv" else tokens_of(x)
            found += (inputs == row).all(-1).nonzero().tolist()
        assert len(found) == ROWS
        halves, positions = (set(places) for places in zip(*found, strict=True))
        assert halves == {0, 1} and positions == set(range(inputs.shape[1]))


@pytest.mark.parametrize("name, limit", [("conv", ROWS), ("linear", ROWS), ("", CALLS)])
def test_exactly_the_lowest_priorities_are_kept(whole, singles, name, limit):
    def rows(statistics):
        return statistics.layers[name].rows if name else statistics.calls["x"]

    candidates = [
        pair for single in singles for pair in zip(rows(single).priority.tolist(), rows(single).values, strict=True)
    ]
    candidates.sort(key=lambda pair: pair[0])
    assert len(candidates) == PROMPTS * STEPS * (ROWS_PER_CALL if name else 1) > limit
    assert rows(whole).priority.dtype == torch.float64
    assert rows(whole).priority.tolist() == [priority for priority, _ in candidates[:limit]]
    assert torch.equal(rows(whole).values, torch.stack([values for _, values in candidates[:limit]]))


def test_another_seed_and_another_layer_draw_others():
    wanted, other = (draw(("a", "b"), [0], 1, seed)[0, 0] for seed in (1, 2))
    everything = [tuple(pair) for drawn in (wanted, other) for kept in drawn.values() for pair in kept]
    assert len(everything) == len(set(everything)) == 2 * (2 * ROWS_PER_CALL + 1)


def test_calls_are_the_inputs_that_the_network_was_given_by_name(whole):
    wanted = draw(NAMES, range(PROMPTS), STEPS, seed=7)
    came_from = {kept[""][0][0]: call for call, kept in wanted.items() if "" in kept}
    assert whole.calls.keys() == {"x"}
    calls = whole.calls["x"]
    assert calls.values.shape == (CALLS, 2, 2, 4, 4) and calls.values.dtype == torch.float32
    for values, priority in zip(calls.values, calls.priority.tolist(), strict=True):
        assert torch.equal(values, halves_of(*came_from[priority]))


def test_calls_are_kept_of_the_prompts_that_may_and_of_all_segments_the_lowest():
    def kept(prompts, whole):
        wanted = draw(NAMES, prompts, STEPS, seed=7, whole=whole)
        assert set(wanted) >= {(prompt, step) for prompt in prompts for step in range(STEPS)}  # rows, of all prompts
        return sorted((found[""][0][0], prompt) for (prompt, _), found in wanted.items() if "" in found)

    together, segments = kept(range(PROMPTS), [0, 2, 4, 6]), (([0], [0]), ([1], []), (range(2, PROMPTS), [2, 4, 6]))
    assert len(together) == CALLS and {prompt % 2 for _, prompt in together} == {0}
    assert sorted(call for segment in segments for call in kept(*segment))[:CALLS] == together


@given(order=st.permutations(range(PROMPTS)), batch_size=st.integers(1, PROMPTS))
@settings(max_examples=10, deadline=None)
def test_the_order_of_the_prompts_and_the_batch_size_do_not_matter(whole, order, batch_size):
    assert_same(calibrate(order, batch_size), whole)


def test_a_snapshot_is_a_pass_of_that_size_and_can_be_continued(whole, singles):
    snapshot, rest = calibrate(range(5)), calibrate(range(5, PROMPTS))
    assert_same(snapshot, merge(singles[:5]))
    assert_same(merge([snapshot, rest]), whole)
    merged = merge([Statistics({"conv": singles[0].layers["conv"]}, {}), singles[1]])  # only some reach the linear
    assert torch.equal(merged.layers["linear"].amax, singles[1].layers["linear"].amax)
    assert torch.equal(merged.layers["conv"].amax[1], singles[1].layers["conv"].amax[1])


@pytest.mark.parametrize("bad, half", [(torch.nan, 0), (torch.inf, 1), (-torch.inf, 1)])
def test_what_is_not_finite_names_layer_prompt_and_step(bad, half):
    def spoil(x, batch, step):
        if step == 1 and 3 in batch:
            x[half * len(batch) + batch.index(3), 0, 2, 2] = bad

    for prompts in (range(PROMPTS), [6, 3, 1]):
        with pytest.raises(SdQuantError, match="layer conv is not finite at prompt 3, step 1"):
            calibrate(prompts, 2, change=spoil)


@pytest.mark.parametrize("broken, named", [(None, "a"), ("a", "b")])
def test_the_first_layer_of_the_network_is_named(broken, named):
    """Not the first in the list of layers, nor one that only received the damage."""
    network = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in "abc"))
    if broken:
        nn.init.constant_(network.get_submodule(broken).weight, torch.inf)
    x = torch.ones(1, 3, 2) if broken else torch.full((1, 3, 2), torch.nan)
    with pytest.raises(SdQuantError, match=f"^the input of layer {named} is not finite at prompt 0, step 0$"):
        of_one_call(network, {name: network.get_submodule(name) for name in "cba"}, x)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_gone_afterwards_and_what_is_never_called_has_no_statistics(fails):
    network = Network()
    watched = collect(network, layers_of(network), [0], 1, lambda: (0, [0]), draw(NAMES, [0], 1, 0))
    with pytest.raises(SdQuantError) if fails else nullcontext(), watched as statistics:
        assert len(network.conv._forward_pre_hooks) == 1 and not network.other._forward_pre_hooks
        if fails:
            network(torch.full((1, 2, 1, 1), torch.nan))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())
    assert statistics == Statistics({}, {})


def test_inputs_that_samples_share_are_kept_whole():
    """As Flux has it: places that all samples share."""
    module, x, places = Own(lambda network, x, places: network.linear(x)), torch.rand(2, 3, 2), torch.ones(3, 3)
    wanted = draw(["linear"], range(2), 1, seed=0)
    with collect(module, {"linear": module.linear}, range(2), 1, lambda: (0, [0, 1]), wanted, ["x"]) as found:
        module(x=x, places=(buffer := places.clone()))
        buffer.zero_()  # the caller may reuse it
    assert found.calls["x"].values.shape == (2, 1, 3, 2) and found.calls["places"].values.shape == (2, 3, 3)
    assert all(torch.equal(kept, places) for kept in found.calls["places"].values)


# Networks that are observed, which call their layers in ways of their own


def of_own(call, steps: int = 1, called=None) -> Statistics:
    """Statistics of one call for each step of those ``called``, of two prompts together."""
    network, now = Own(call), SimpleNamespace()
    with collect(network, layers_of(network), [0, 1], steps, lambda: (now.step, [0, 1]), {}) as statistics:
        for now.step in called or range(steps):
            network(torch.stack([sample(prompt, now.step, 0) for prompt in (0, 1)]))
    return statistics


TOKENS_OF_ALL, READ = torch.tensor([[1.0, -2.0], [-5.0, 0.5], [3.0, 0.0]]), torch.arange(8.0).view(2, 2, 1, 2)


def both(*counts: int):
    """Calls of both layers for these numbers of samples one after the other, of 10, 20, ..."""
    inputs = [torch.full((count, 2), 10.0 * (index + 1)) for index, count in enumerate(counts)]
    return lambda network, x: [(network.linear(each), network.conv(each[..., None, None])) for each in inputs]


OWN_CALLS = {  # a call, and the ranges of its linear and its convolution
    # of the tokens of all images behind each other, of which each image has as many as it needs
    "no samples": (lambda network, x: (network.linear(TOKENS_OF_ALL), network.conv(TOKENS_OF_ALL.view(3, 2, 1, 1))),
                   [[5.0, 2.0]], [[5.0], [5.0]]),
    "one tensor for both kinds": (lambda network, x: (network.conv(READ), network.linear(READ)),
                                  [[6.0, 7.0]], [[3.0], [7.0]]),
    "an input by its name": (lambda network, x: network.linear(input=READ.transpose(1, 2)), [[6.0, 7.0]], None),
    "an expert to which nothing was sent": (lambda network, x: network.linear(torch.ones(0, 2)), None, None),
    "and one that gets some": (lambda network, x: (network.linear(torch.ones(0, 2)), network.linear(READ[0, 0])),
                               [[0.0, 1.0]], None),
    **{f"{counts}": (both(*counts), [[10.0 * len(counts)] * 2], [[10.0 * len(counts)]] * 2)
       for counts in ((2, 4), (4, 2), (2, 3), (3, 2), (4, 2, 4))},
}  # fmt: skip


@pytest.mark.parametrize("call, linear, conv", OWN_CALLS.values(), ids=OWN_CALLS)
def test_ranges_of_layers_that_are_called_in_ways_of_their_own(call, linear, conv):
    """An input without samples counts for all prompts, and so does one of another number of samples than before."""
    found = {name: layer.amax.tolist() for name, layer in of_own(call).layers.items()}
    assert (found.get("linear"), found.get("conv")) == (linear, conv)


def test_a_row_of_an_input_without_samples_is_one_of_its_rows():
    for sample in (0, 1):
        taken = [take_row(nn.Linear(2, 1), TOKENS_OF_ALL, place, sample, 2).tolist() for place in (0.0, 0.4, 0.99)]
        assert all(row in TOKENS_OF_ALL.tolist() for row in taken)
        assert sample or sorted(taken) == sorted(TOKENS_OF_ALL.tolist())


def test_a_denoiser_of_some_steps_has_their_ranges_alone():
    """As one of two, each for one half of the noise levels: ranges of zero would be of steps that it never sees."""
    call = lambda network, x: (network.linear(tokens_of(x)), network.conv(x))  # noqa: E731
    some, whole = of_own(call, steps=STEPS, called=[1, 2]), of_own(call, steps=STEPS)
    assert torch.equal(some.layers["linear"].amax, whole.layers["linear"].amax[1:])
    assert torch.equal(some.layers["conv"].amax, whole.layers["conv"].amax[:, 1:])
    assert (some.layers["linear"].amax > 0).all()


def test_calls_whose_texts_differ_in_length_merge_to_those_of_one_length():
    """That of the call of the lowest priority, whatever the order of the segments."""

    def part_with(length: int, first: int) -> Statistics:
        priority, shapes = torch.tensor([first, first + 1]).double(), {"x": (2, 4), "text": (2, length, 8)}
        return Statistics({}, {name: Sample(torch.zeros(shape), priority) for name, shape in shapes.items()})

    parts = [part_with(5, 10), part_with(7, 0), Statistics({}, {}), part_with(7, 20)]
    for order in (parts, parts[::-1]):
        merged = merge(order)
        assert merged.calls["text"].values.shape == (4, 7, 8) and merged.calls["x"].values.shape == (4, 4)
        assert sorted(merged.calls["text"].priority.tolist()) == [0, 1, 20, 21]
    assert merge([Statistics({}, {})]).calls == {}


@pytest.mark.parametrize("called", [(0,), (5, 6)])
def test_a_network_that_is_called_in_few_of_many_steps_has_as_many_rows(called):
    """And the first token of the first prompt, which it sees in whichever step it is called, once."""
    layer, steps = nn.Linear(1, 1), 8
    x = torch.arange(64.0).reshape(1, 64, 1)

    def rows(**more) -> Sample:
        wanted, now = draw(["layer"], range(16), steps, 7, ["layer"], **more), SimpleNamespace()
        with collect(layer, {"layer": layer}, range(16), steps, lambda: (now.step, [now.prompt]), wanted) as statistics:
            for now.prompt, now.step in product(range(16), called):
                layer(input=x)
        return statistics.layers["layer"].rows

    assert len(rows().priority) < ROWS / 2 and len(rows(some_steps=True).priority) == ROWS
    found = rows(some_steps=True)
    assert found.priority.tolist().count(-1.0) == 1 and found.values[0].item() == 0
    drawn = draw(["layer"], range(16), steps, 7, ["layer"], some_steps=True).items()
    seen = {priority for (_, step), rows in drawn if step in called for priority, _ in rows.get("layer", ())}
    assert found.priority.tolist() == sorted(seen)[:ROWS]
