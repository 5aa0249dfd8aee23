"""Stable Diffusion 1.x and 2.x, which differ in configs only. B: batch; H, W: image in pixels; C: width of CLIP.

| part           | inputs                                                              | outputs                      |
|----------------|---------------------------------------------------------------------|------------------------------|
| `unet`         | sample [B,4,H/8,W/8], timestep [1], encoder_hidden_states [B,77,C]  | out_sample [B,4,H/8,W/8]     |
| `vae`          | z [B,4,H/8,W/8]                                                     | dec [B,3,H,W]                |
| `text_encoder` | input_ids [B,77]                                                    | last_hidden_state [B,77,C]   |
"""

from collections.abc import Mapping
from functools import partial

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.parts import NamedPart, Part, half_contract, vae_part
from sd_quant.models.text_encoders import clip_part
from sd_quant.models.unet import UnetFamily, guidance_embedding


class StableDiffusion(UnetFamily):
    PIPELINES = ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
    FROM_IMAGES = ("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline")
    CONTROLLED = "StableDiffusionControlNetPipeline"
    NETWORKS = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
    DENOISER = "unet"

    def parts(self, configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
        unet = configs["unet"]
        shapes = {
            "sample": ("batch", unet["in_channels"], "height", "width"),
            "timestep": (1,),
            "encoder_hidden_states": ("batch", CONTEXT_LENGTH, unet["cross_attention_dim"]),
            **guidance_embedding(unet),
        }
        contract = half_contract(shapes, "out_sample", single=("timestep",))
        return {
            "unet": Part("unet", "unet.", contract, partial(NamedPart, "unet", tuple(shapes))),
            "vae": vae_part(configs["vae"]["latent_channels"]),
            "text_encoder": clip_part("text_encoder", "last_hidden_state"),
        }


FAMILY = StableDiffusion()
