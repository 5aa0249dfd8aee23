"""Roles and inputs that are seen in a call of tiny networks, against the families' that are written by hand."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sd_quant.layers import roles as layers
from sd_quant.layers.roles import ObservedLayers, observed_layers
from sd_quant.layers.tape import NotObservable
from sd_quant.models import FAMILIES as KNOWN_FAMILIES
from sd_quant.models import OBSERVED
from sd_quant.models.family import family_named
from sd_quant.models.parts import SharedInput, text_readers

from ...zoo.denoisers import FAMILIES, OTHERS, watched

pytestmark = [pytest.mark.commit, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi's positions, in fp64

ALL = [*FAMILIES, *OTHERS]
READ_CONTENT = {"hidream"}  # whose code looks at an expert's share, in which weights have a part


@cache
def seen(name: str, device: str = "meta") -> ObservedLayers:
    known = watched(name)
    network = known.meta() if device == "meta" else known.real()
    return observed_layers(network, known.arguments, known.text)


def of(name: str) -> ObservedLayers:
    return seen(name, "cpu" if name in READ_CONTENT else "meta")


# They read one row an image, as those that the lists of Flux, PixArt and the UNets exclude. ModelOpt and Quark do not
# name those of SD3, so the family quantizes them: a third of its weights, none of its work.
MODULATIONS = ("norm1.linear", "norm1_context.linear")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_seen_is_what_the_family_states_but_sd3s_modulations(name):
    known = FAMILIES[name][1]
    family, network, observed = family_named(known), watched(name).meta(), seen(name)
    roles = family.layer_roles(network)
    assert list(observed.roles) == list(roles)
    differing = {layer for layer in roles if roles[layer] != observed.roles[layer]}
    assert differing == {layer for layer in roles if known == "sd3" and layer.endswith(MODULATIONS)}
    for layer in differing:
        assert (roles[layer], observed.roles[layer], observed.reasons[layer]) == ("linear", "excluded", layers.ONE_ROW)
    of_family = family.shared_inputs([name for name, role in roles.items() if role != "conv"])
    for inputs in (of_family, observed.shared_inputs):
        assert differing <= {reader for shared in inputs if shared.one_row for reader in shared.readers}
    # what excluded layers alone read is not compared, since nothing is done with it
    quantized = {name for name in roles if "excluded" not in (roles[name], observed.roles[name])}
    stated, found = (
        {each.readers[0]: each for each in inputs if quantized & set(each.readers)}
        for inputs in (of_family, observed.shared_inputs)
    )
    assert stated == found
    assert observed.attentions == family.attentions(network)
    assert {family for _, family, _ in FAMILIES.values()} == set(KNOWN_FAMILIES) - {OBSERVED}


E, F, Q, L, C = "excluded", "ffn", "qkv", "linear", "conv"
COUNTS = {  # of roles; and of inputs that a layer that may be quantized reads, those with a producer
    # 2 blocks of two streams, 3 + 3 linears in front of and 1 + 1 behind attention, 2 + 2 of feed-forward. The last
    # block's text goes nowhere: 3 fewer.
    "qwen_image": ({Q: 12, L: 3, F: 6, E: 13}, {"producer": 7, "none": 6}),
    "z_image": ({Q: 18, L: 6, F: 18, E: 10}, {"producer": 24}),  # 2 refiners of image and of text each, 2 blocks
    "flux2": ({Q: 14, L: 6, F: 8, E: 11}, {"none": 20}),  # one modulation for all blocks
    "chroma": ({Q: 18, L: 8, F: 8, E: 9}, {"none": 20}),  # one network makes all modulations
    "sana": ({Q: 12, L: 4, C: 4, E: 9}, {"producer": 2, "none": 8}),
    "lumina2": ({Q: 18, L: 6, F: 18, E: 10}, {"producer": 18, "none": 6}),  # heads of keys and values are repeated
    "wan": ({Q: 12, L: 4, F: 4, E: 6}, {"producer": 6, "none": 8}),
    "ltx": ({Q: 12, L: 4, F: 4, E: 7}, {"producer": 4, "none": 10}),
    "cogvideox": ({Q: 6, L: 2, F: 4, E: 10}, {"producer": 2, "none": 6}),
    "hunyuan_video": ({Q: 24, L: 10, F: 12, E: 21}, {"producer": 14, "none": 16}),
    "mochi": ({Q: 18, L: 5, F: 10, E: 15}, {"producer": 5, "none": 16}),
    "auraflow": ({Q: 18, L: 6, F: 18, E: 12}, {"producer": 8, "none": 16}),
    "cogview4": ({Q: 6, L: 2, E: 14}, {"producer": 2, "none": 2}),  # one feed-forward for image and text, called twice
    "hidream": ({Q: 18, L: 6, F: 66, E: 16}, {"producer": 32, "none": 24}),
    "latte": ({Q: 18, L: 6, F: 8, E: 7}, {"producer": 6, "none": 16}),
    "kandinsky5": ({Q: 18, L: 6, F: 8, E: 11}, {"producer": 16, "none": 6}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_weights_change_nothing_and_every_linear_reads_one_input(name):
    """The input of a modulation precedes those that it modulates. Of other networks roles and inputs are counted."""
    if name in READ_CONTENT:
        with pytest.raises(NotObservable, match=r"\(\w+.py, line \d+\)"):
            seen(name)
    else:
        assert seen(name) == seen(name, "cpu")
    observed, network = of(name), watched(name).meta()
    readers = Counter(reader for shared in observed.shared_inputs for reader in shared.readers)
    assert readers == Counter(name for name in observed.roles if isinstance(network.get_submodule(name), nn.Linear))
    assert {name for name, role in observed.roles.items() if role == E} == observed.reasons.keys() & observed.roles
    met = set()
    for shared in observed.shared_inputs:
        assert shared.producer not in readers or shared.producer in met, shared
        met |= set(shared.readers)
    if name in COUNTS:
        wanted = [
            each for each in observed.shared_inputs if any(observed.roles[reader] != E for reader in each.readers)
        ]
        producers = Counter("producer" if each.producer else "none" for each in wanted)
        assert (Counter(observed.roles.values()), producers) == COUNTS[name]


@pytest.mark.parametrize(
    "name, layer, reason",
    [
        ("qwen_image", "img_in", layers.FIRST),
        ("qwen_image", "txt_in", layers.FIRST),
        ("qwen_image", "transformer_blocks.1.txt_mlp.net.2", layers.DEAD),
        ("qwen_image", "norm_out.linear", layers.ONE_ROW),
        ("qwen_image", "proj_out", layers.LAST),
        ("wan", "condition_embedder.text_embedder.linear_2", layers.OF_TEXT),
        ("wan", "patch_embedding", layers.NOT_2D),
        ("chroma", "distilled_guidance_layer.layers.0.linear_1", layers.NO_CONTENT),
        ("mochi", "time_embed.pooler.to_kv", layers.POOLED),
        ("sdxl", "up_blocks.0.resnets.0.conv_shortcut", layers.SKIP),
    ],
)
def test_reasons(name, layer, reason):
    assert of(name).reasons[layer] == reason


def test_text_is_what_depends_on_the_prompt_alone():
    refiner = {name for name in text_readers(of("hunyuan_video").shared_inputs) if "refiner_blocks" in name}
    assert {name.rpartition("blocks.0.")[2] for name in refiner} == {
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    }  # fmt: skip
    # behind the refiner's gates, which the time makes, text is no longer the prompt's alone
    assert not any("transformer_blocks" in name for name in text_readers(of("hunyuan_video").shared_inputs))
    assert "blocks.0.attn2.to_k" in text_readers(of("wan").shared_inputs)


class Small(nn.Module):
    def __init__(self, forward: Callable, modules: dict[str, nn.Module]):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.function(self, x, text)


attend = nn.functional.scaled_dot_product_attention


def slices(n: Small, x: Tensor, text: Tensor) -> Tensor:
    y = n.first(x)
    part = y[:, :2]
    return n.last(n.a(y[:, :2]) + n.b(y[:, :2]) + n.c(part) + n.d(part))


def masked(n: Small, x: Tensor, text: Tensor) -> Tensor:
    y = n.first(x)
    return n.last(attend(n.q(y), y, y, attn_mask=n.mask(y).mean(-1)[:, None, :]))


def products(n: Small, x: Tensor, text: Tensor) -> Tensor:
    y = n.first(x)
    return n.last(n.out((n.q(y) @ n.k(y).transpose(1, 2)).softmax(-1) @ n.v(y)))


def two_blocks(n: Small, x: Tensor, text: Tensor) -> Tensor:
    text = n.embed(text)
    x = attend(x, n.key(text), n.value(text))
    return n.last(attend(n.between(x), n.key2(text), n.value2(text)))


def skips(n: Small, x: Tensor, text: Tensor) -> Tensor:
    x = n.in_front(n.first(x[..., None]))
    x = x + n.b(n.a(x).relu())
    return n.last(n.skip(x) + n.a(x).relu())


ENDS = {"first": layers.FIRST, "last": layers.LAST}
SMALL: dict[str, tuple[str, Callable, dict]] = {  # linears, what is computed, and some of what is seen
    "equal slices of one tensor are two inputs, one object is one": (
        "first a b c d last", slices, {"readers": {("a",), ("b",), ("c", "d")}}
    ),
    "a layer that is called twice has an input of its own without a producer": (
        "first twice other last", lambda n, x, text: n.last(n.twice(y := n.first(x)) * n.other(y) + n.twice(text)),
        {"inputs": [SharedInput(("twice",)), SharedInput(("other",))]},
    ),
    "a weight that is read elsewhere, and a layer that is not called": (
        "first tied idle last", lambda n, x, text: n.last(n.tied(n.first(x)) @ n.tied.weight),
        {"reasons": ENDS | {"tied": layers.ELSEWHERE, "idle": layers.NOT_CALLED}},
    ),
    "a mask is no query": ("first q mask last", masked, {"roles": {"q": "qkv", "mask": "linear"}}),
    "a gate that reads what queries read is no embedder": (
        "q gate last", lambda n, x, text: n.last(attend(q := n.q(x), q, q) * n.gate(x).sigmoid()),
        {"roles": {"q": "qkv", "gate": "linear", "last": "excluded"}},
    ),
    "attention that is written as products": (
        "first q k v out last", products,
        {"roles": {"q": "qkv", "k": "qkv", "v": "qkv", "out": "linear"}, "inputs": [SharedInput(("out",), "v")]},
    ),
    "the text of several blocks has a vector for each": (
        "embed key value between key2 value2 last", two_blocks,
        {"inputs": [SharedInput(("key", "value"), text=True), SharedInput(("key2", "value2"), text=True)]},
    ),
    "one row is counted by what is returned": (
        "first pooled last", lambda n, x, text: n.last(n.first(x) + n.pooled(text.mean(1))[:, None]),
        {"reasons": ENDS | {"pooled": layers.ONE_ROW}},
    ),
    "a skip is beside other layers, and no layer in front of a block is one": (
        "first in_front a b skip last", skips, {"reasons": ENDS | {"skip": layers.SKIP, "a": layers.REPEATED}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SMALL)
def test_what_is_seen_of_small_networks(case):
    names, forward, expected = SMALL[case]
    made = {name: nn.Conv2d(5, 5, 1) if forward is skips else nn.Linear(8, 8) for name in names.split()}
    x = torch.randn(2, 5, 8).double()
    seen = observed_layers(Small(forward, made).double(), {"x": x, "text": x + 1}, ("text",))
    assert seen.reasons == expected.get("reasons", seen.reasons)
    assert expected.get("roles", {}).items() <= seen.roles.items()
    assert expected.get("readers", set()) <= {shared.readers for shared in seen.shared_inputs}
    assert all(shared in seen.shared_inputs for shared in expected.get("inputs", ()))
