"""llama.cpp's names of the tensors of T5's encoder, of the gated kind that pipelines have (version 1.1)."""

import re

ENDS = {
    "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k",
    "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_o",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
    "layer.1.layer_norm": "ffn_norm",
}
OTHERS = {"shared.weight": "token_embd.weight", "encoder.final_layer_norm.weight": "enc.output_norm.weight"}


def llama_name(name: str) -> str:
    """Returns llama.cpp's name of a tensor of transformers' ``T5EncoderModel``; a name that it has not, unchanged."""
    block = re.fullmatch(r"encoder\.block\.(\d+)\.(.+)\.weight", name)
    if block is None or block[2] not in ENDS:
        return OTHERS.get(name, name)
    return f"enc.blk.{block[1]}.{ENDS[block[2]]}.weight"
