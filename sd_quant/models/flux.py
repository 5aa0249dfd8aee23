"""Flux.1: a transformer over packed latents with CLIP and T5. Guidance is an input of the network, not a second pass.

| part             | inputs                                                                  | outputs                 |
|------------------|-------------------------------------------------------------------------|-------------------------|
| `transformer`    | hidden_states [B,N,64], encoder_hidden_states [B,T,J],                  | out_sample [B,N,64]     |
|                  | pooled_projections [B,P], timestep [B], img_ids [N,3], txt_ids [T,3]    |                         |
|                  | (dev also: guidance [B]; schnell was distilled to do without)           |                         |
| `vae`            | z [B,16,H/8,W/8]                                                        | dec [B,3,H,W]           |
| `text_encoder`   | input_ids [B,77]                                                        | pooler_output [B,P]     |
| `text_encoder_2` | input_ids [B,T]                                                         | last_hidden_state       |

B: batch; H, W: image in pixels; N = H/16 * W/16; T: most tokens for T5; J, P: widths of T5's and CLIP's outputs.
quant_level 4 quantizes the joint attention, with rotary embeddings of queries and keys, in double and single blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.models.family import Family
from sd_quant.models.parts import Part, half_contract, vae_part
from sd_quant.models.roles import attention_heads
from sd_quant.models.text_encoders import clip_part, t5_part
from sd_quant.models.transformer import TransformerPart

LAST = "proj_out"  # the whole name: the single blocks have layers that end in it


class Rotary(nn.Module):
    """diffusers' FluxPosEmbed in fp32, as on devices without fp64, because TensorRT has no fp64."""

    def __init__(self, theta: int, axes_dim: list[int]):
        super().__init__()
        self.theta, self.axes_dim = theta, axes_dim

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        angles_of_axes = []
        for axis, width in enumerate(self.axes_dim):
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=ids.device) / width
            angles_of_axes.append(ids[:, axis : axis + 1].float() * self.theta**-exponents)
        angles = torch.cat(angles_of_axes, dim=-1).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


def with_rotary(transformer: Any) -> TransformerPart:
    """Wrap the transformer, with its position embedding replaced by ``Rotary``."""
    transformer.pos_embed = Rotary(transformer.pos_embed.theta, transformer.pos_embed.axes_dim)
    return TransformerPart(transformer)


class Flux(Family):
    PIPELINES = ("FluxPipeline",)
    NETWORKS = {
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
    }
    GUIDES = False
    TOKENS = 512
    # What ModelOpt's filter for Flux excludes (its proj_out is LAST), and the modulations that Quark excludes.
    EXCLUDED = ("time_text_embed", "context_embedder", "x_embedder", "norm_out", "norm1.linear", "norm1_context.linear",
                "norm.linear")  # fmt: skip
    attentions = staticmethod(attention_heads)  # all; each rotates queries and keys

    def parts(self, configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
        transformer, tokens = configs["transformer"], tokens or self.TOKENS
        shapes: dict[str, tuple] = {
            "hidden_states": ("batch", "image_tokens", transformer["in_channels"]),
            "encoder_hidden_states": ("batch", tokens, transformer["joint_attention_dim"]),
            "pooled_projections": ("batch", transformer["pooled_projection_dim"]),
            "timestep": ("batch",),
            "img_ids": ("image_tokens", 3),
            "txt_ids": (tokens, 3),
        }
        if transformer["guidance_embeds"]:
            shapes["guidance"] = ("batch",)
        contract = half_contract(shapes, "out_sample", single=("timestep", "img_ids", "txt_ids", "guidance"))
        return {
            "transformer": Part("transformer", "transformer.", contract, with_rotary),
            "vae": vae_part(configs["vae"]["latent_channels"]),
            "text_encoder": clip_part("text_encoder", "pooler_output"),
            "text_encoder_2": t5_part("text_encoder_2", tokens),
        }

    def layer_roles(self, denoiser: nn.Module) -> dict[str, str]:
        roles = super().layer_roles(denoiser)
        return roles | {name: "excluded" for name in roles if name == LAST}

    def pack(self, pipe, latents: Tensor) -> Tensor:
        """Pack latents [B, 16, h, w] into tokens [B, h/2 * w/2, 64]; a token is two by two latents."""
        return pipe._pack_latents(latents, *latents.shape)


FAMILY = Flux()
