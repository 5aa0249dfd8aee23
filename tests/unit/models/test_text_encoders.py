"""CLIP's tokenizer; which tensors linears of text encoders share, and that their makers absorb factors of channels."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from sd_quant.calibration.hooks import collect, draw
from sd_quant.models.checkpoint import build_module
from sd_quant.models.clip_tokenizer import CLIP_VOCAB_SIZE, CONTEXT_LENGTH, clip_tokenizer
from sd_quant.models.roles import roles_of
from sd_quant.models.text_encoders import inputs_of_part
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.rewrite import rewrite

pytestmark = pytest.mark.commit

IDS = torch.tensor([[3, 4, 5, 6, 7], [7, 6, 5, 4, 3]])


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=8, max_position_embeddings=8, **sizes))


def t5() -> nn.Module:
    sizes = {"vocab_size": 8, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


@pytest.mark.parametrize(
    "make, excluded, shared, without",
    [
        (clip, (), {("q_proj", "k_proj", "v_proj"): "layer_norm1", ("fc1",): "layer_norm2", ("out_proj",): "v_proj"},
         {"fc2"}),
        (t5, ("wo",), {("q", "k", "v"): "layer_norm", ("wi_0", "wi_1"): "layer_norm", ("o",): "v"}, set()),
    ],
)  # fmt: skip
def test_norms_and_values_absorb_factors_and_the_function_stays(make, excluded, shared, without):
    """With large factors: no gain or column of weights is like another."""
    torch.manual_seed(0)
    network = make().eval().requires_grad_(False)
    for name, parameter in network.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(torch.logspace(-1, 1, parameter.numel()))
    roles = roles_of(network, excluded)
    inputs = inputs_of_part(network, roles)
    assert sorted(name for each in inputs for name in each.readers) == sorted(roles), "each linear reads one input"
    end = lambda name: name.rpartition(".")[2]  # noqa: E731
    found = {tuple(map(end, each.readers)): each.producer and end(each.producer) for each in inputs}
    assert {key: found[key] for key in shared} == shared
    assert {end(name) for each in inputs if each.producer is None for name in each.readers} == without | set(excluded)

    layers = {name: network.get_submodule(name) for name, role in roles.items() if role != "excluded"}
    with collect(network, layers, [0, 1], 1, lambda: (0, [0, 1]), draw(layers, [0, 1], 1, 0)) as statistics:
        before = network(input_ids=IDS).last_hidden_state
    bias_of = lambda name: network.get_submodule(name).bias  # noqa: E731
    weight_of = lambda name: network.get_submodule(name).weight  # noqa: E731
    made = derive(roles, weight_of, statistics.layers, Recipe(3.0, 0.7), inputs, bias_of=bias_of)
    folded = [layer for layer in made.values() if layer.folded_into]
    assert len(folded) == 2 * sum(map(len, shared)) and not any(layer.multiplies for layer in folded)
    changed = copy.deepcopy(network)
    folds = {name: layer for name, layer in made.items() if end(name) not in without}
    rewrite(changed, folds)
    moved = [name for name, each in changed.named_parameters() if not torch.equal(each, network.get_parameter(name))]
    assert len(moved) > len(folded)
    torch.testing.assert_close(changed(input_ids=IDS).last_hidden_state, before, rtol=1e-4, atol=1e-4)


def test_a_norm_that_is_not_there_makes_nothing():
    """As in language models, whose attentions have such names and whose norms have others."""
    widths = {"q_proj": 4, "k_proj": 2, "v_proj": 2, "out_proj": 4}
    linears = {name: nn.Linear(4, width) for name, width in widths.items()}
    network = nn.ModuleDict({"self_attn": nn.ModuleDict(linears)})
    inputs = inputs_of_part(network, [f"self_attn.{name}" for name in linears])
    assert [(len(each.readers), each.producer) for each in inputs] == [(3, None), (1, None)]


def test_an_embedding_of_two_names_is_one_in_memory():
    """So what a file gives it reaches the encoder, which reads it by its other name."""
    stored = {name: each.clone() for name, each in t5().state_dict().items()}  # as files are read
    checkpoint = SimpleNamespace(components={"text_encoder": stored}, build=lambda: {"text_encoder": t5()})
    built = build_module(checkpoint, "text_encoder")
    built.shared.weight.zero_()
    assert not built.encoder.embed_tokens.weight.any()


# The tokenizer

START, END = 49406, 49407


def test_ids_are_those_that_openai_published_and_other_sizes_are_refused():
    tokenizer = clip_tokenizer()
    for text in ("a photo of a cat", "A  Photo of a CAT "):
        assert tokenizer(text)["input_ids"] == [START, 320, 1125, 539, 320, 2368, END]
    assert tokenizer("")["input_ids"] == [START, END]
    for size in (0, 513, CLIP_VOCAB_SIZE + 1):
        with pytest.raises(ValueError, match=f"not {size}"):
            clip_tokenizer(size)


@pytest.mark.parametrize("pad_token, id", [("<|endoftext|>", END), ("!", 0)])  # OpenAI's and OpenCLIP's
def test_texts_of_any_length_become_a_context(pad_token, id):
    fill = {"padding": "max_length", "truncation": True, "max_length": CONTEXT_LENGTH}
    short, long = clip_tokenizer(pad_token=pad_token)(["a cat", "cat " * 200], **fill)["input_ids"]
    assert short == [START, 320, 2368, END, *[id] * (CONTEXT_LENGTH - 4)]
    assert len(long) == CONTEXT_LENGTH and long[0] == START and long[-1] == END


@pytest.mark.parametrize("vocab_size", [514, 1000])
def test_a_smaller_vocabulary_knows_fewer_merges_but_every_text(vocab_size):
    """Without merges every byte is a symbol."""
    tokenizer = clip_tokenizer(vocab_size)
    ids = tokenizer("a photo of a cat, ein Kätzchen 🐈")["input_ids"]
    assert len(tokenizer) == vocab_size and max(ids) == ids[-1] == vocab_size - 1 and ids[0] == vocab_size - 2
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "aphotoofacat,einkätzchen🐈"
    assert (len(tokenizer("cat")["input_ids"]) == 5) == (vocab_size == 514)
