"""Stable Diffusion 1.x and 2.x: one UNet and one CLIP text encoder. Their configs say how the two versions differ.

| part           | inputs                                                              | outputs                      |
|----------------|---------------------------------------------------------------------|------------------------------|
| `unet`         | sample [B,4,H/8,W/8], timestep [1], encoder_hidden_states [B,77,C]  | out_sample [B,4,H/8,W/8]     |
| `vae`          | z [B,4,H/8,W/8]                                                     | dec [B,3,H,W]                |
| `text_encoder` | input_ids [B,77]                                                    | last_hidden_state [B,77,C]   |
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.parts import Contract, Part, pack, unpack, vae_part
from sd_quant.models.text_encoders import clip_part
from sd_quant.models.unet import attentions, layer_roles, shared_inputs

__all__ = ["attentions", "layer_roles", "pack", "shared_inputs", "unpack"]

PIPELINES = ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
FROM_IMAGES = ("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline")
NETWORKS = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
OPTIONAL = ()
DENOISER = "unet"
GUIDES = True
TOKENS = None


class UnetPart(nn.Module):
    def __init__(self, unet: nn.Module):
        super().__init__()
        self.unet = unet

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]


def parts(configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
    unet, half = configs["unet"], torch.float16
    contract = Contract(
        {
            "sample": ("batch", unet["in_channels"], "height", "width"),
            "timestep": (1,),
            "encoder_hidden_states": ("batch", CONTEXT_LENGTH, unet["cross_attention_dim"]),
        },
        ("out_sample",),
        {"sample": half, "timestep": torch.float32, "encoder_hidden_states": half},
        half,
    )
    return {
        "unet": Part("unet", "unet.", contract, UnetPart),
        "vae": vae_part(configs["vae"]["latent_channels"]),
        "text_encoder": clip_part("text_encoder", "last_hidden_state"),
    }


def encode(pipe, prompts: list[str], negative: list[str] | None, guided: bool, tokens: int | None) -> dict[str, Tensor]:
    positive, negative = pipe.encode_prompt(prompts, "cpu", 1, guided, negative)
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative}
