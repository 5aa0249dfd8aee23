"""Stable Diffusion 3 and 3.5: a transformer with joint attention of text and image, two CLIPs and T5.

| part             | inputs                                                                | outputs                   |
|------------------|-----------------------------------------------------------------------|---------------------------|
| `transformer`    | hidden_states [B,16,H/8,W/8], encoder_hidden_states [B,77+T,J],       | out_sample [B,16,H/8,W/8] |
|                  | pooled_projections [B,P], timestep [B]                                |                           |
| `vae`            | z [B,16,H/8,W/8]                                                      | dec [B,3,H,W]             |
| `text_encoder`   | input_ids [B,77]                                                      | hidden_states, text_embeds|
| `text_encoder_2` | input_ids [B,77]                                                      | hidden_states, text_embeds|
| `text_encoder_3` | input_ids [B,T]                                                       | last_hidden_state [B,T,J] |

B: batch; H, W: image in pixels; T: most tokens for T5; J: width of T5's output; P: width of both CLIPs' pooled text.
Without T5, which is optional, diffusers' pipeline passes zeros of the same shape in place of its output. quant_level 4
quantizes the joint attention of text and image, and the additional self-attention of the image in some blocks of 3.5.
"""

from collections.abc import Mapping

from torch import nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.family import Family
from sd_quant.models.parts import Heads, Part, half_contract, vae_part
from sd_quant.models.roles import attention_heads
from sd_quant.models.text_encoders import clip_part, t5_part
from sd_quant.models.transformer import TransformerPart


class StableDiffusion3(Family):
    PIPELINES = ("StableDiffusion3Pipeline",)
    NETWORKS = {
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
    }
    OPTIONAL = ("text_encoder_3",)
    TOKENS = 256  # the pipeline's default
    # What ModelOpt's default filter for diffusion models excludes, and proj_out, which Quark excludes.
    EXCLUDED = ("time_text_embed", "context_embedder", "pos_embed", "norm_out", "proj_out")

    def parts(self, configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
        transformer, tokens = configs["transformer"], tokens or self.TOKENS
        shapes = {
            "hidden_states": ("batch", transformer["in_channels"], "height", "width"),
            "encoder_hidden_states": ("batch", CONTEXT_LENGTH + tokens, transformer["joint_attention_dim"]),
            "pooled_projections": ("batch", transformer["pooled_projection_dim"]),
            "timestep": ("batch",),
        }
        most_latents = (transformer["pos_embed_max_size"] or 0) * transformer["patch_size"] or None
        contract = half_contract(shapes, "out_sample", single=("timestep",), latents=most_latents)
        t5 = {"text_encoder_3": t5_part("text_encoder_3", tokens)} if "text_encoder_3" in configs else {}
        return {
            "transformer": Part("transformer", "transformer.", contract, TransformerPart),
            "vae": vae_part(configs["vae"]["latent_channels"]),
            "text_encoder": clip_part("text_encoder", "hidden_states", "text_embeds"),
            "text_encoder_2": clip_part("text_encoder_2", "hidden_states", "text_embeds"),
            **t5,
        }

    def attentions(self, denoiser: nn.Module) -> dict[str, Heads]:
        """Return the heads of all attentions if queries and keys have no norm or RMSNorm (3.5); else an empty dict."""
        return attention_heads(denoiser) if denoiser.config.qk_norm in (None, "rms_norm") else {}


FAMILY = StableDiffusion3()
