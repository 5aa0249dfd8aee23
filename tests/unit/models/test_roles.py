"""Which linears of a transformer read one tensor, and what could absorb a factor of it, by their names alone."""

from sd_quant.models.parts import SharedInput
from sd_quant.models.roles import inputs_of_transformer

BLOCK = "transformer_blocks.0"


def of_attention(*layers: str) -> list[str]:
    return [f"{BLOCK}.attn.{layer}" for layer in layers]


def test_an_attentions_output_is_a_mean_of_value_rows():
    names = of_attention("to_q", "to_k", "to_v", "to_out.0")
    assert inputs_of_transformer(names) == [
        SharedInput(tuple(names[:3])),
        SharedInput((names[3],), f"{BLOCK}.attn.to_v"),
    ]


def test_where_text_is_attended_too_no_single_value_takes_the_factor():
    """The output is a mean of rows of both ``to_v`` and ``add_v_proj``."""
    image, text = of_attention("to_q", "to_k", "to_v"), of_attention("add_q_proj", "add_k_proj", "add_v_proj")
    (out, text_out) = of_attention("to_out.0", "to_add_out")
    found = inputs_of_transformer([*image, *text, out, text_out])
    assert found == [SharedInput(tuple(image)), SharedInput(tuple(text)), SharedInput((out,)), SharedInput((text_out,))]


def test_the_query_of_a_cross_attention_stands_alone():
    query, key, value, out = (f"{BLOCK}.attn2.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0"))
    assert inputs_of_transformer([query, key, value, out]) == [
        SharedInput((query,)),
        SharedInput((key, value)),
        SharedInput((out,), value),
    ]


def test_a_single_blocks_feed_forward_reads_what_its_attention_reads():
    block = "single_transformer_blocks.3"
    names = [f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v", f"{block}.proj_mlp", f"{block}.proj_out"]
    assert inputs_of_transformer(names) == [SharedInput(tuple(names[:4])), SharedInput((names[4],))]
