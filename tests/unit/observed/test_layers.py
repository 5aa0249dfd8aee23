"""Roles and inputs that are seen in a call of tiny networks, against the families' that are written by hand."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from sd_quant.models import FAMILIES as KNOWN_FAMILIES
from sd_quant.models import OBSERVED
from sd_quant.models.family import family_named
from sd_quant.models.parts import SharedInput
from sd_quant.observed import layers
from sd_quant.observed.layers import ObservedLayers, observed_layers
from sd_quant.observed.tape import NotObservable

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


# The families

MODULATIONS = ("norm1.linear", "norm1_context.linear")
# What is seen and what is written, by family and the end of the layer's name. Nothing else differs.
EXPLAINED = {
    # They read one row an image, as the modulations that the lists of Flux, PixArt and the UNets exclude. ModelOpt and
    # Quark do not name those of SD3, so the family quantizes them: a third of its weights, none of its work.
    "sd3": {end: ("linear", "excluded") for end in MODULATIONS},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_seen_is_what_the_family_states_but_what_is_explained(name):
    known = FAMILIES[name][1]
    family, network, observed = family_named(known), watched(name).meta(), seen(name)
    roles = family.layer_roles(network)
    assert list(observed.roles) == list(roles)
    explained = EXPLAINED.get(known, {})
    met = set()
    for layer in (layer for layer in roles if roles[layer] != observed.roles[layer]):
        end = next(end for end in explained if layer.endswith(end))
        assert (roles[layer], observed.roles[layer]) == explained[end], layer
        assert observed.reasons[layer] == layers.ONE_ROW
        met.add(end)
    assert met == explained.keys()
    of_family = family.shared_inputs([name for name, role in roles.items() if role != "conv"])
    # what excluded layers alone read is not compared, since nothing is done with it
    quantized = {name for name in roles if "excluded" not in (roles[name], observed.roles[name])}
    stated, found = (
        {each.readers[0]: each for each in inputs if quantized & set(each.readers)}
        for inputs in (of_family, observed.shared_inputs)
    )
    assert stated == found
    assert observed.attentions == family.attentions(network)


def test_the_table_of_networks_has_every_family():
    assert {family for _, family, _ in FAMILIES.values()} == set(KNOWN_FAMILIES) - {OBSERVED}


@pytest.mark.slow
def test_a_modulations_own_input_precedes_those_that_it_modulates():
    for name in ALL:
        met = set()
        for shared in of(name).shared_inputs:
            linear = any(shared.producer in each.readers for each in of(name).shared_inputs)
            assert not linear or shared.producer in met, (name, shared)
            met |= set(shared.readers)


# Others

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
@pytest.mark.parametrize("name", OTHERS)
def test_golden_counts_of_other_networks(name):
    observed = of(name)
    wanted = [each for each in observed.shared_inputs if any(observed.roles[reader] != E for reader in each.readers)]
    producers = Counter("producer" if each.producer else "none" for each in wanted)
    assert (Counter(observed.roles.values()), producers) == COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_weights_change_nothing_and_every_linear_reads_one_input(name):
    if name in READ_CONTENT:
        with pytest.raises(NotObservable, match=r"\(\w+.py, line \d+\)"):
            seen(name)
    else:
        assert seen(name) == seen(name, "cpu")
    observed = of(name)
    readers = Counter(reader for shared in observed.shared_inputs for reader in shared.readers)
    network = watched(name).meta()
    assert readers == Counter(name for name in observed.roles if isinstance(network.get_submodule(name), nn.Linear))
    assert {name for name, role in observed.roles.items() if role == E} == observed.reasons.keys() & observed.roles


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
    refiner, blocks = (
        {
            reader
            for shared in of("hunyuan_video").shared_inputs
            if shared.text
            for reader in shared.readers
            if part in reader
        }
        for part in ("refiner_blocks", "transformer_blocks")
    )
    assert {name.rpartition("blocks.0.")[2] for name in refiner} == {
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
    }
    assert not blocks  # behind the refiner's gates, which the time makes, text is no longer the prompt's alone
    assert "blocks.0.attn2.to_k" in {
        reader for shared in of("wan").shared_inputs if shared.text for reader in shared.readers
    }


# Small networks


class Small(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def seen(self, forward) -> ObservedLayers:
        self.forward = forward
        x = torch.randn(2, 5, 8)
        return observed_layers(self.double(), {"x": x.double(), "text": x.double() + 1}, ("text",))


def linears(*names: str) -> Small:
    return Small(**{name: nn.Linear(8, 8) for name in names})


def test_equal_slices_of_one_tensor_are_two_inputs_and_one_object_is_one():
    network = linears("first", "a", "b", "c", "d", "last")

    def forward(x, text):
        y = network.first(x)
        part = y[:, :2]
        return network.last(network.a(y[:, :2]) + network.b(y[:, :2]) + network.c(part) + network.d(part))

    readers = {shared.readers for shared in network.seen(forward).shared_inputs}
    assert {("a",), ("b",), ("c", "d")} < readers


def test_a_layer_that_is_called_twice_has_an_input_of_its_own_without_a_producer():
    network = linears("first", "twice", "other", "last")

    def forward(x, text):
        y = network.first(x)
        return network.last(network.twice(y) * network.other(y) + network.twice(text))

    inputs = network.seen(forward).shared_inputs
    assert SharedInput(("twice",)) in inputs and SharedInput(("other",)) in inputs


def test_a_weight_that_is_read_elsewhere_and_a_layer_that_is_not_called_are_excluded():
    network = linears("first", "tied", "idle", "last")
    reasons = network.seen(lambda x, text: network.last(network.tied(network.first(x)) @ network.tied.weight)).reasons
    assert reasons["tied"] == layers.ELSEWHERE and reasons["idle"] == layers.NOT_CALLED


def test_a_mask_is_no_query():
    network = linears("first", "q", "mask", "last")

    def forward(x, text):
        y = network.first(x)
        q, mask = network.q(y), network.mask(y).mean(-1)[:, None, :]
        return network.last(nn.functional.scaled_dot_product_attention(q, y, y, attn_mask=mask))

    roles = network.seen(forward).roles
    assert (roles["q"], roles["mask"]) == ("qkv", "linear")


def test_a_gate_that_reads_what_queries_read_is_no_embedder():
    network = linears("q", "gate", "last")

    def forward(x, text):
        q = network.q(x)
        return network.last(nn.functional.scaled_dot_product_attention(q, q, q) * network.gate(x).sigmoid())

    assert network.seen(forward).roles == {"q": "qkv", "gate": "linear", "last": "excluded"}


def test_attention_that_is_written_as_products_is_seen():
    network = linears("first", "q", "k", "v", "out", "last")

    def forward(x, text):
        y = network.first(x)
        scores = (network.q(y) @ network.k(y).transpose(1, 2)).softmax(-1)
        return network.last(network.out(scores @ network.v(y)))

    observed = network.seen(forward)
    assert {observed.roles[name] for name in "qkv"} == {"qkv"} and observed.roles["out"] == "linear"
    assert SharedInput(("out",), "v") in observed.shared_inputs


def test_the_text_of_several_blocks_has_a_vector_for_each():
    network = linears("embed", "key", "value", "between", "key2", "value2", "last")

    def forward(x, text):
        text = network.embed(text)
        attend = nn.functional.scaled_dot_product_attention
        x = attend(x, network.key(text), network.value(text))
        return network.last(attend(network.between(x), network.key2(text), network.value2(text)))

    inputs = network.seen(forward).shared_inputs
    assert SharedInput(("key", "value"), text=True) in inputs and SharedInput(("key2", "value2"), text=True) in inputs


def test_one_row_is_counted_by_what_is_returned():
    network = linears("first", "pooled", "last")
    reasons = network.seen(
        lambda x, text: network.last(network.first(x) + network.pooled(text.mean(1))[:, None])
    ).reasons
    assert reasons == {"first": layers.FIRST, "pooled": layers.ONE_ROW, "last": layers.LAST}


def test_a_skip_is_beside_other_layers_and_no_layer_in_front_of_a_block_is_one():
    convolutions = {name: nn.Conv2d(5, 5, 1) for name in ("first", "in_front", "a", "b", "skip", "last")}
    network = Small(**convolutions)

    def forward(x, text):
        x = network.in_front(network.first(x[..., None]))
        x = x + network.b(network.a(x).relu())
        return network.last(network.skip(x) + network.a(x).relu())

    reasons = network.seen(forward).reasons
    assert reasons == {"first": layers.FIRST, "skip": layers.SKIP, "last": layers.LAST, "a": layers.REPEATED}
