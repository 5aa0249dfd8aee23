"""diffusers' UNet2DConditionModel (Stable Diffusion 1, 2 and XL) as a part, and its layers' roles and inputs."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from sd_quant.models.family import Family
from sd_quant.models.parts import SharedInput
from sd_quant.models.roles import attention_heads as attentions
from sd_quant.models.roles import roles_of

__all__ = ["attentions"]

# What the diffusion recipes of ModelOpt and Quark exclude: the embeddings of time and size, the first and the last
# convolution, and the skip convolutions. NeMo calls these emb_layers.1, time_embed, label_emb, input_blocks.0.0, out.1
# and skip_connection.
EXCLUDED = ("time_emb_proj", "time_embedding", "add_embedding", "conv_in", "conv_out", "conv_shortcut")


def layer_roles(unet: nn.Module) -> dict[str, str]:
    """Returns the role of every Linear and Conv2d of the UNet by name, in the network's order."""
    return roles_of(unet, EXCLUDED)


def shared_inputs(linears: Iterable[str]) -> list[SharedInput]:
    """Returns the inputs of the UNet's linears, with the module that can absorb a factor of each, by diffusers' names.

    | readers                                      | input                   | absorbed by                             |
    |----------------------------------------------|-------------------------|-----------------------------------------|
    | self-attention: query, key and value         | LayerNorm's output      | the LayerNorm                           |
    | cross-attention: query                       | LayerNorm's output      | the LayerNorm                           |
    | cross-attention: key and value               | text                    | nothing: it is an input of the network  |
    | output projection of an attention            | weighted mean of values | to_v                                    |
    | first linear of the feed-forward             | LayerNorm's output      | the LayerNorm                           |
    | second linear of the feed-forward            | value * gelu(gate)      | the value half, the first linear's      |
    |                                              |                         | first rows                              |
    | proj_in                                      | GroupNorm's output      | the GroupNorm                           |
    | proj_out                                     | residual stream         | nothing                                 |
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
                SharedInput((f"{cross}.to_k", f"{cross}.to_v"), text=True),
                SharedInput((f"{cross}.to_out.0",), f"{cross}.to_v"),
                SharedInput((f"{block}.ff.net.0.proj",), f"{block}.norm3"),
                SharedInput((f"{block}.ff.net.2",), f"{block}.ff.net.0.proj"),
            ]
    return inputs


def guidance_embedding(unet: Mapping) -> dict[str, tuple]:
    """Returns the input of a UNet of this config that was distilled to read the guidance scale, if it is one (LCM)."""
    return {"timestep_cond": ("batch", unet["time_cond_proj_dim"])} if unet.get("time_cond_proj_dim") else {}


class UnetFamily(Family):
    """A family whose denoiser is such a UNet."""

    EXCLUDED = EXCLUDED
    shared_inputs, attentions = staticmethod(shared_inputs), staticmethod(attentions)


class UnetPart(nn.Module):
    """The UNet with diffusers' inputs. SDXL's also reads the pooled text and six sizes."""

    def __init__(self, unet: nn.Module):
        super().__init__()
        self.unet = unet

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_embeds: Tensor | None = None,
        time_ids: Tensor | None = None,
        timestep_cond: Tensor | None = None,
    ) -> Tensor:
        added = None
        if text_embeds is not None and time_ids is not None:  # diffusers concatenates the two, so they need one dtype
            added = {"text_embeds": text_embeds.to(time_ids.dtype), "time_ids": time_ids}
        return self.unet(
            sample, timestep, encoder_hidden_states, None, timestep_cond, added_cond_kwargs=added, return_dict=False
        )[0]
