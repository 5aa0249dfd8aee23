"""Which linears of a transformer read one tensor, and what could absorb a factor of it, by their names alone."""

import pytest

from sd_quant.models.parts import SharedInput
from sd_quant.models.roles import inputs_of_transformer

pytestmark = pytest.mark.commit

BLOCK = "transformer_blocks.0"


def of_attention(*layers: str) -> list[str]:
    return [f"{BLOCK}.attn.{layer}" for layer in layers]


SELF, TEXT = tuple(of_attention("to_q", "to_k", "to_v")), tuple(of_attention("add_q_proj", "add_k_proj", "add_v_proj"))
OUT, TEXT_OUT = of_attention("to_out.0", "to_add_out")
FF, TEXT_FF = f"{BLOCK}.ff.net.0.proj", f"{BLOCK}.ff_context.net.0.proj"
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


def test_the_second_attention_of_stable_diffusion_35_reads_the_image_and_has_chunks_of_its_own():
    image, text = f"{BLOCK}.norm1.linear", f"{BLOCK}.norm1_context.linear"
    inputs = {
        SELF: SharedInput(SELF, image, modulation=(0, 1)),
        TEXT: SharedInput(TEXT, text, modulation=(0, 1)),
        (QUERY, KEY, VALUE): SharedInput((QUERY, KEY, VALUE), image, modulation=(6, 7)),
        (FF,): SharedInput((FF,), image, modulation=(3, 4)),
        (TEXT_FF,): SharedInput((TEXT_FF,), text, modulation=(3, 4)),
    }
    found = inputs_of_transformer([image, text, *(name for readers in inputs for name in readers)])
    assert found == [SharedInput((image,)), SharedInput((text,)), *inputs.values()]
