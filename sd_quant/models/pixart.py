"""PixArt-alpha and PixArt-Sigma: a transformer with cross-attention to T5's text.

| part           | inputs                                                                   | outputs                  |
|----------------|--------------------------------------------------------------------------|--------------------------|
| `transformer`  | hidden_states [B,4,H/8,W/8], encoder_hidden_states [B,T,C],              | out_sample [B,8,H/8,W/8] |
|                | encoder_attention_mask [B,T], timestep [B]                               |                          |
|                | (alpha at 1024 also: resolution [B,2], aspect_ratio [B,1])               |                          |
| `vae`          | z [B,4,H/8,W/8]                                                          | dec [B,3,H,W]            |
| `text_encoder` | input_ids [B,T], attention_mask [B,T]                                    | last_hidden_state        |

B: batch; H, W: image in pixels; T: most tokens for T5; C: width of T5's output. quant_level 4 quantizes self-attention
and, in FP8, cross-attention, which has a mask of the text's padding.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.models.family import Family
from sd_quant.models.parts import NamedPart, Part, half_contract, vae_part
from sd_quant.models.roles import attention_heads
from sd_quant.models.text_encoders import t5_part

ADDED = {"resolution": 2, "aspect_ratio": 1}  # inputs of alpha at 1024, and how many numbers each has


class Positions(nn.Module):
    """Patch embedding with diffusers' positional sinusoids (``get_2d_sincos_pos_embed``) in fp32, for any image size.

    diffusers keeps the sinusoids of one size in a buffer, which no checkpoint holds, and computes other sizes in fp64,
    which TensorRT lacks.
    """

    def __init__(self, patch_embed: Any):
        super().__init__()
        self.proj, self.patch_size = patch_embed.proj, patch_embed.patch_size
        self.base_size, self.interpolation_scale = patch_embed.base_size, patch_embed.interpolation_scale

    def axis(self, count: int, width: int, device: torch.device) -> Tensor:
        """Compute the sines, then the cosines of ``count`` positions along one axis: fp32 [count, width]."""
        places = torch.arange(count, dtype=torch.float32, device=device)
        places = places * (self.base_size / count) / self.interpolation_scale
        exponents = torch.arange(width // 2, dtype=torch.float32, device=device) / (width / 2)
        angles = places[:, None] * 10000.0**-exponents
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, latent: Tensor) -> Tensor:
        patches = self.proj(latent)
        rows, columns, width = patches.shape[2], patches.shape[3], patches.shape[1]
        across = self.axis(columns, width // 2, latent.device)[None].expand(rows, columns, -1)
        down = self.axis(rows, width // 2, latent.device)[:, None].expand(rows, columns, -1)
        places = torch.cat([across, down], dim=-1).reshape(1, -1, width)
        return (patches.flatten(2).transpose(1, 2) + places).to(patches.dtype)


def with_positions(inputs: Collection[str], transformer: Any) -> NamedPart:
    """Wrap the transformer, with its patch and position embedding replaced by ``Positions``."""
    transformer.pos_embed = Positions(transformer.pos_embed)
    return NamedPart("transformer", inputs, transformer)


class PixArt(Family):
    PIPELINES = ("PixArtSigmaPipeline", "PixArtAlphaPipeline")
    NETWORKS = {"transformer": "PixArtTransformer2DModel", "vae": "AutoencoderKL", "text_encoder": "T5EncoderModel"}
    TOKENS = 300
    # Neither ModelOpt nor Quark has a list for PixArt. These are the layers that both exclude in other transformers:
    # the embeddings of patches, time and text, and the last projection.
    EXCLUDED = ("pos_embed", "adaln_single", "caption_projection", "proj_out")
    attentions = staticmethod(attention_heads)  # all

    def parts(self, configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
        transformer, tokens = configs["transformer"], tokens or self.TOKENS
        shapes: dict[str, tuple] = {
            "hidden_states": ("batch", transformer["in_channels"], "height", "width"),
            "encoder_hidden_states": ("batch", tokens, transformer["caption_channels"]),
            "encoder_attention_mask": ("batch", tokens),
            "timestep": ("batch",),
        }
        sized = transformer["use_additional_conditions"]
        if sized is None:  # diffusers' own default
            sized = transformer["sample_size"] == 128
        if sized:
            shapes |= {name: ("batch", width) for name, width in ADDED.items()}
        contract = half_contract(shapes, "out_sample", single=("timestep", *ADDED))
        return {
            "transformer": Part("transformer", "transformer.", contract, partial(with_positions, tuple(shapes))),
            "vae": vae_part(configs["vae"]["latent_channels"]),
            "text_encoder": t5_part("text_encoder", tokens, masked=True),
        }

    def call_arguments(self, tokens: int | None) -> dict[str, Any]:
        """Turn off diffusers' cleaning of captions, which would depend on whether two packages are installed."""
        return super().call_arguments(tokens) | {"clean_caption": False}


FAMILY = PixArt()
