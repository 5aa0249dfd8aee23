"""SDXL. Inputs of the UNet have the names of NeMo's engines or of diffusers; all other parts have NeMo's names.

| part      | inputs                                                         | outputs                              |
|-----------|----------------------------------------------------------------|--------------------------------------|
| `unet_xl` | x [B,4,H/8,W/8], timesteps [B], context [B,S,C], y [B,A]       | out [B,4,H/8,W/8]                    |
| or        | sample [B,4,H/8,W/8], timestep [1], encoder_hidden_states      | out_sample [B,4,H/8,W/8]             |
|           | [B,S,C], text_embeds [B,P], time_ids [B,6]                     |                                      |
| `vae`     | z [B,4,H/8,W/8], already divided by the scaling factor         | dec [B,3,H,W]                        |
| `clip1`   | input_ids [B,77]                                               | z [B,S,C1]                           |
| `clip2`   | input_ids [B,77]                                               | z [B,S,C2], z_pooled [B,P]           |

B: batch; H, W: pixels; C, C1, C2, P, A: widths. S: text tokens, CLIP's 77 or, in NeMo's training and inference, padded
to 80 with zeros. `y` is the pooled text vector [B,P] followed by the sinusoids of the six size ids (`time_ids`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.parts import Contract, NamedPart, Part, half_contract, taken, vae_part
from sd_quant.models.text_encoders import clip_part
from sd_quant.models.unet import UnetFamily, guidance_embedding

TIME_IDS = 6  # of time_ids: original height and width, top and left of the crop, target height and width


class NemoUnetPart(nn.Module):
    """diffusers' UNet with NeMo's inputs.

    ``y`` already holds the size embedding, so diffusers' ``add_time_proj``, which would embed it, is made the identity.
    """

    def __init__(self, unet: nn.Module, pooled_width: int):
        super().__init__()
        self.unet = unet
        self.pooled_width = pooled_width
        self.unet.add_time_proj = nn.Identity()

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor) -> Tensor:
        added = {"text_embeds": y[:, : self.pooled_width], "time_ids": y[:, self.pooled_width :]}
        return self.unet(x, timesteps, context, added_cond_kwargs=added, return_dict=False)[0]


def vector_condition(text_embeds: Tensor, time_ids: Tensor, width: int) -> Tensor:
    """Return NeMo's ``y`` [B, P + 6 * width]: pooled text [B, P], then ``width`` sinusoids a size id, cosines first."""
    from diffusers.models.embeddings import get_timestep_embedding

    sizes = get_timestep_embedding(time_ids.flatten(), width, flip_sin_to_cos=True, downscale_freq_shift=0)
    return torch.cat([text_embeds, sizes.view(len(text_embeds), -1)], dim=-1)


def nemo_arguments(width: int, contract: Contract, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return NeMo's inputs from the arguments of a pipeline's call; ``width`` as in ``vector_condition``."""
    given = taken(given, ("sample", "timestep", "encoder_hidden_states", "text_embeds", "time_ids"))
    return {
        "x": given["sample"],
        "timesteps": torch.as_tensor(given["timestep"], dtype=torch.float32).expand(len(given["sample"])),
        "context": given["encoder_hidden_states"],
        "y": vector_condition(given["text_embeds"], given["time_ids"], width),
    }


def unet_part(unet: Mapping, tokens: int, io: str) -> Part:
    """Return the UNet's part, from its config; ``tokens`` is S, ``io`` the naming of inputs, "nemo" or "diffusers"."""
    latent = ("batch", unet["in_channels"], "height", "width")
    context, added = ("batch", tokens, unet["cross_attention_dim"]), unet["projection_class_embeddings_input_dim"]
    pooled = added - TIME_IDS * unet["addition_time_embed_dim"]
    if io == "nemo":
        shapes = {"x": latent, "timesteps": ("batch",), "context": context, "y": ("batch", added)}
        return Part(
            "unet",
            "unet.",
            half_contract(shapes, "out", single=("timesteps",)),
            partial(NemoUnetPart, pooled_width=pooled),
            arguments=partial(nemo_arguments, unet["addition_time_embed_dim"]),
        )
    shapes = {
        "sample": latent,
        "timestep": (1,),
        "encoder_hidden_states": context,
        "text_embeds": ("batch", pooled),
        "time_ids": ("batch", TIME_IDS),
        **guidance_embedding(unet),
    }
    contract = half_contract(shapes, "out_sample", single=("timestep", "time_ids"))
    return Part("unet", "unet.", contract, partial(NamedPart, "unet", tuple(shapes)))


class StableDiffusionXL(UnetFamily):
    PIPELINES = ("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline")
    FROM_IMAGES = ("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline")
    CONTROLLED = "StableDiffusionXLControlNetPipeline"
    NETWORKS = {
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
    }
    DENOISER = "unet_xl"
    PADDED = True

    def parts(self, configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
        """Return the parts as ``Family.parts``, except that ``tokens`` is S; None means CLIP's 77."""
        tokens = tokens or CONTEXT_LENGTH
        both = ("hidden_states", "text_embeds")
        return {
            "unet_xl": unet_part(configs["unet"], tokens, io),
            "vae": vae_part(configs["vae"]["latent_channels"]),
            "clip1": clip_part("text_encoder", "hidden_states", names=("z",), tokens=tokens),
            "clip2": clip_part("text_encoder_2", *both, names=("z", "z_pooled"), tokens=tokens),
        }


FAMILY = StableDiffusionXL()
