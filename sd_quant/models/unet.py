"""diffusers' UNet2DConditionModel, of Stable Diffusion 1, 2 and XL: its layers' roles and what reads which input."""

from collections.abc import Iterable

from torch import nn

from sd_quant.models.layers import attention_widths, roles_of
from sd_quant.models.parts import SharedInput

# The layers that ModelOpt's diffusion recipes and Quark's leave alone, in diffusers' names: embeddings of time and
# size, the first and last convolution, and the skip convolutions. NeMo's names for the same are emb_layers.1,
# time_embed, label_emb, input_blocks.0.0, out.1 and skip_connection.
EXCLUDED = ("time_emb_proj", "time_embedding", "add_embedding", "conv_in", "conv_out", "conv_shortcut")


def layer_roles(unet: nn.Module) -> dict[str, str]:
    """Name to role of every Linear and Conv2d of the UNet, in the order of the network."""
    return roles_of(unet, EXCLUDED)


attentions = attention_widths


def shared_inputs(linears: Iterable[str]) -> list[SharedInput]:
    """Which linears of the UNet read one tensor, and what makes it, by their diffusers names.

    Query, key and value of self-attention read a LayerNorm, and so does the gated feed-forward's first linear; its
    second reads value * gelu(gate), so a factor moves into the value half, the first rows of the first linear. An
    attention's output is a mean of value rows, so a factor moves into to_v. proj_in reads the GroupNorm. The text that
    cross-attention's key and value read is an input of the network, and proj_out reads a residual stream: neither has
    anything in front that could take a factor.
    """
    inputs = []
    for name in linears:
        block, _, layer = name.rpartition(".")
        if layer == "proj_in":
            inputs.append(SharedInput((name,), f"{block}.norm"))
        elif layer == "proj_out":
            inputs.append(SharedInput((name,)))
        elif name.endswith(".attn1.to_q"):
            block = name.removesuffix(".attn1.to_q")
            attention, cross = f"{block}.attn1", f"{block}.attn2"
            inputs += [
                SharedInput((f"{attention}.to_q", f"{attention}.to_k", f"{attention}.to_v"), f"{block}.norm1"),
                SharedInput((f"{attention}.to_out.0",), f"{attention}.to_v"),
                SharedInput((f"{cross}.to_q",), f"{block}.norm2"),
                SharedInput((f"{cross}.to_k", f"{cross}.to_v")),
                SharedInput((f"{cross}.to_out.0",), f"{cross}.to_v"),
                SharedInput((f"{block}.ff.net.0.proj",), f"{block}.norm3"),
                SharedInput((f"{block}.ff.net.2",), f"{block}.ff.net.0.proj"),
            ]
    return inputs
