"""diffusers' UNet2DConditionModel (Stable Diffusion 1, 2 and XL) as a part, and its layers' roles and inputs."""

from collections.abc import Iterable, Mapping

from sd_quant.models.family import Family
from sd_quant.models.parts import SharedInput
from sd_quant.models.roles import Row, attention_heads, inputs_by_place

# What the diffusion recipes of ModelOpt and Quark exclude: the embeddings of time and size, the first and the last
# convolution, and the skip convolutions. NeMo calls these emb_layers.1, time_embed, label_emb, input_blocks.0.0, out.1
# and skip_connection.
EXCLUDED = ("time_emb_proj", "time_embedding", "add_embedding", "conv_in", "conv_out", "conv_shortcut")


INPUTS: tuple[Row, ...] = (
    ("", ("proj_in",), "norm", False),  # a GroupNorm; all other norms are LayerNorms
    ("", ("proj_out",), None, False),  # the residual stream
    ("attn1.", ("to_q", "to_k", "to_v"), "norm1", False),
    ("attn1.", ("to_out.0",), "attn1.to_v", False),  # a weighted mean of values, as in attn2
    ("attn2.", ("to_q",), "norm2", False),
    ("attn2.", ("to_k", "to_v"), None, True),  # the text, an input of the network
    ("attn2.", ("to_out.0",), "attn2.to_v", False),
    ("ff.net.", ("0.proj",), "norm3", False),
    ("ff.net.", ("2",), "ff.net.0.proj", False),  # value * gelu(gate): of the first rows, the value half
)


def shared_inputs(linears: Iterable[str]) -> list[SharedInput]:
    """Return the tensors that the UNet's linears in ``INPUTS`` read, each with its linears by diffusers' names."""
    return inputs_by_place(linears, INPUTS)


def guidance_embedding(unet: Mapping) -> dict[str, tuple]:
    """Return the shape of the guidance scale's embedding, an input of distilled UNets (LCM); {} for any other UNet."""
    return {"timestep_cond": ("batch", unet["time_cond_proj_dim"])} if unet.get("time_cond_proj_dim") else {}


class UnetFamily(Family):
    """A family whose denoiser is diffusers' UNet2DConditionModel."""

    EXCLUDED = EXCLUDED
    shared_inputs, attentions = staticmethod(shared_inputs), staticmethod(attention_heads)
