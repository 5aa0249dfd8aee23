"""Which linears of a transformer read one tensor, and what could absorb a factor of it, by their names alone."""

import pytest

from sd_quant.models.parts import SharedInput
from sd_quant.models.roles import inputs_of_transformer

BLOCK = "transformer_blocks.0"


def of_attention(*layers: str) -> list[str]:
    return [f"{BLOCK}.attn.{layer}" for layer in layers]


SELF, TEXT = tuple(of_attention("to_q", "to_k", "to_v")), tuple(of_attention("add_q_proj", "add_k_proj", "add_v_proj"))
OUT, TEXT_OUT = of_attention("to_out.0", "to_add_out")
QUERY, KEY, VALUE, CROSS_OUT = (f"{BLOCK}.attn2.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0"))


@pytest.mark.parametrize(
    "producers",  # of each input, by its readers
    [
        {SELF: None, (OUT,): f"{BLOCK}.attn.to_v"},  # the output is a mean of the value's rows
        {SELF: None, TEXT: None, (OUT,): None, (TEXT_OUT,): None},  # of rows of both ``to_v`` and ``add_v_proj``
        {(QUERY,): None, (KEY, VALUE): None, (CROSS_OUT,): VALUE},
        {(*SELF, f"{BLOCK}.proj_mlp"): None, (f"{BLOCK}.proj_out",): None},  # of a block of one stream
    ],
    ids=["attention", "joint attention", "cross-attention", "single block"],
)
def test_which_linears_read_one_tensor_and_what_absorbs_a_factor(producers):
    found = inputs_of_transformer([name for readers in producers for name in readers])
    assert found == [SharedInput(readers, producer) for readers, producer in producers.items()]


def modulated(readers: list[str], producer: str, modulation: tuple[int, int]) -> SharedInput:
    return SharedInput(tuple(readers), producer, modulation=modulation)


def of_sd3(block: str, goes_on: bool, second: bool = False) -> tuple[list[str], dict[str, list[str]]]:
    """The names of a block's linears in the network's order, and the readers of each modulated input."""
    inputs = {
        "image": [f"{block}.attn.{layer}" for layer in ("to_q", "to_k", "to_v")],
        "text": [f"{block}.attn.{layer}" for layer in ("add_q_proj", "add_k_proj", "add_v_proj")],
        "second": [f"{block}.attn2.{layer}" for layer in ("to_q", "to_k", "to_v")] if second else [],
        "ff": [f"{block}.ff.net.0.proj"],
        "ff_context": [f"{block}.ff_context.net.0.proj"] if goes_on else [],
    }
    modulations = [f"{block}.norm1.linear", f"{block}.norm1_context.linear"]
    return [*modulations, *(name for readers in inputs.values() for name in readers)], inputs


def test_a_block_of_stable_diffusion_3_has_a_modulation_for_picture_and_one_for_text():
    names, inputs = of_sd3(BLOCK, goes_on=True)
    image, text = names[:2]
    assert inputs_of_transformer(names) == [
        SharedInput((image,)),
        SharedInput((text,)),
        modulated(inputs["image"], image, (0, 1)),
        modulated(inputs["text"], text, (0, 1)),
        modulated(inputs["ff"], image, (3, 4)),
        modulated(inputs["ff_context"], text, (3, 4)),
    ]


def test_in_the_last_block_the_texts_scale_comes_before_its_shift():
    """AdaLayerNormContinuous, in a block without a feed-forward for the text."""
    names, inputs = of_sd3(BLOCK, goes_on=False)
    others, _ = of_sd3("transformer_blocks.1", goes_on=True)
    assert modulated(inputs["text"], names[1], (1, 0)) in inputs_of_transformer([*names, *others])


def test_the_second_attention_of_stable_diffusion_35_reads_the_picture_and_has_chunks_of_its_own():
    names, inputs = of_sd3(BLOCK, goes_on=True, second=True)
    found = inputs_of_transformer(names)
    assert modulated(inputs["second"], names[0], (6, 7)) in found
    assert modulated(inputs["image"], names[0], (0, 1)) in found and len(found) == 7


def test_a_modulation_for_all_blocks_absorbs_nothing():
    """PixArt's, to which every block adds a table."""
    names = ["adaln_single.linear", *of_attention("to_q", "to_k", "to_v"), f"{BLOCK}.ff.net.0.proj"]
    assert all(shared.producer is None for shared in inputs_of_transformer(names))


def test_a_modulation_that_is_not_named_absorbs_nothing():
    names, inputs = of_sd3(BLOCK, goes_on=True)
    assert SharedInput(tuple(inputs["image"])) in inputs_of_transformer(names[2:])
