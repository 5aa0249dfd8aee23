"""Folders of pipelines as diffusers saves them, small enough to make in a second and to run in another.

The classes, the wiring of their parts and the schedulers are those of the published checkpoints; only the sizes differ,
and the weights are random. Random as the classes draw them would not do: a diffusion model starts with outputs and
modulations of zero, so most of its layers would not reach the picture. All are drawn again, alive and without overflow.
A linear layer of a denoiser is some multiple of 64 wide (PixArt's last, which writes 32 features, excepted), a head of
its attention 16 or 32, a latent 8 pixels of the picture.
"""

import shutil
import string
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from . import text
from .autoencoders import levels
from .cases import assembled

Make = Callable[[Path], None]  # writes a folder
CLIP_VOCAB, CLIP_WIDTH = 1000, 64
T5_WIDTH = 192  # wider than two CLIPs, whose features Stable Diffusion 3 pads to it
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
SD_NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}


def redraw(module: nn.Module) -> None:
    """Kernels that keep the scale of their input, norms of about 1, biases of about 0."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.7 * parameter[0].numel() ** -0.5)
        else:
            nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.02)


def stored(kind: str, **parts: Any) -> Make:
    """What writes the folder of a pipeline of these parts, as in ``assembled``."""

    def write(folder: Path) -> None:
        pipeline = assembled(kind, **parts)
        torch.manual_seed(0)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                redraw(part)
        pipeline.save_pretrained(folder)

    return write


def changed(make: Make, sizes: Mapping[str, Any] | None = None, kind: str | None = None, **others: Any) -> Make:
    """What writes the pipeline of ``make`` with a denoiser of other ``sizes``, another class, or other parts."""

    def write(folder: Path) -> None:
        make(folder)
        plain = diffusers.DiffusionPipeline.from_pretrained(folder)
        parts, own = {**plain.config, **plain.components, **others}, getattr(diffusers, kind or type(plain).__name__)
        if sizes is not None:
            name = "unet" if "unet" in parts else "transformer"
            parts[name] = type(parts[name]).from_config(parts[name].config, **sizes)
            redraw(parts[name])
        shutil.rmtree(folder)
        own(**{each: parts[each] for each in own._get_signature_types() if each in parts}).save_pretrained(folder)

    return write


def t5() -> text.Pair:
    """A text encoder and its tokenizer, for which every printable ASCII character is a word."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    vocab: Any = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    sizes = {"vocab_size": 128, "d_model": T5_WIDTH, "d_kv": 32, "d_ff": 2 * T5_WIDTH, "num_heads": 4}
    config = transformers.T5Config(**text.t5_sizes(T5_WIDTH) | sizes)  # more than the tokenizer has, as T5's own
    return transformers.T5EncoderModel(config), transformers.T5Tokenizer(vocab, extra_ids=0, model_max_length=512)


clip = partial(text.clip, CLIP_WIDTH, vocabulary=CLIP_VOCAB, num_attention_heads=4)
projecting = partial(clip, projected=True)
open_clip = partial(clip, pad_token="!", hidden_act="gelu")
flow = diffusers.FlowMatchEulerDiscreteScheduler
VAE = levels(4) | dict(layers_per_block=0, norm_num_groups=8, latent_channels=4, sample_size=64)  # one on the way up
VAE16 = VAE | dict(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)  # as of 2024
UNET: dict[str, Any] = dict(  # two levels, of which one has attention; attention_head_dim is the number of heads
    sample_size=8, layers_per_block=1, block_out_channels=[64, 128], cross_attention_dim=CLIP_WIDTH,
    down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"], up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
)  # fmt: skip
ONE_LEVEL = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}


def unet(**options: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(**UNET | options)


def for_inpainting(make: Make, folder: Path) -> None:
    """As a checkpoint for inpainting is stored: its UNet reads nine channels."""
    kind = "StableDiffusionXLInpaintPipeline" if make is sdxl else "StableDiffusionInpaintPipeline"
    changed(make, {"in_channels": 9}, kind)(folder)


def controlnet(folder: Path, unet: Path, seed: int = 1, **options: Any) -> None:
    """A ControlNet of the sizes of a stored UNet."""
    torch.manual_seed(seed)
    made = diffusers.ControlNetModel.from_unet(
        diffusers.UNet2DConditionModel.from_pretrained(unet), load_weights_from_unet=False
    )
    made = diffusers.ControlNetModel.from_config(made.config, **options)
    redraw(made)
    made.save_pretrained(folder)


sd15 = stored(
    "StableDiffusionPipeline", unet=UNET | {"attention_head_dim": 4}, vae=VAE | {"scaling_factor": 0.18215},
    scheduler=partial(diffusers.PNDMScheduler, **SD_NOISE, skip_prk_steps=True, set_alpha_to_one=False),
    text_encoder=clip, requires_safety_checker=False,
)  # fmt: skip
sd15_of_one_level = changed(sd15, {"block_out_channels": [64], **ONE_LEVEL})  # which is soon traced
sd15_by_ddim = changed(  # whose outputs can be reused
    sd15, {"block_out_channels": [64], **ONE_LEVEL},
    scheduler=diffusers.DDIMScheduler(**SD_NOISE, clip_sample=False, set_alpha_to_one=False),
)  # fmt: skip
sd21 = stored(
    "StableDiffusionPipeline", vae=VAE | {"scaling_factor": 0.18215}, text_encoder=open_clip,
    unet=UNET | ONE_LEVEL | dict(
        block_out_channels=[128], attention_head_dim=[4], use_linear_projection=True, upcast_attention=True
    ),
    scheduler=partial(
        diffusers.DDIMScheduler, **SD_NOISE, prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False
    ),
    requires_safety_checker=False,
)  # fmt: skip
sdxl = stored(
    "StableDiffusionXLPipeline", vae=VAE | {"scaling_factor": 0.13025}, add_watermarker=False, text_encoder=clip,
    text_encoder_2=partial(open_clip, projected=True),
    unet=UNET | dict(
        block_out_channels=[64, 64], down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"], transformer_layers_per_block=[1, 2],
        cross_attention_dim=2 * CLIP_WIDTH, attention_head_dim=[2, 4], use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=CLIP_WIDTH + 6 * 32,
    ),
    scheduler=partial(diffusers.EulerDiscreteScheduler, **SD_NOISE, timestep_spacing="leading"),
)  # fmt: skip
sd3 = stored(
    "StableDiffusion3Pipeline", vae=VAE16 | dict(scaling_factor=1.5305, shift_factor=0.0609), text_encoder=projecting,
    text_encoder_2=partial(open_clip, projected=True), text_encoder_3=t5, scheduler=partial(flow, shift=3.0),
    transformer=dict(
        sample_size=16, in_channels=16, out_channels=16, num_layers=2, caption_projection_dim=128,
        joint_attention_dim=T5_WIDTH, pooled_projection_dim=2 * CLIP_WIDTH, pos_embed_max_size=24, **HEADS,
    ),
)  # fmt: skip
flux = stored(
    "FluxPipeline", vae=VAE16 | dict(scaling_factor=0.3611, shift_factor=0.1159), text_encoder=clip, text_encoder_2=t5,
    scheduler=partial(flow, shift=3.0, use_dynamic_shifting=True),
    transformer=dict(
        in_channels=64, num_layers=2, num_single_layers=2, axes_dims_rope=(4, 14, 14), joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH, guidance_embeds=True, **HEADS,
    ),
)  # fmt: skip
pixart = stored(
    "PixArtSigmaPipeline", vae=VAE | {"scaling_factor": 0.13025}, text_encoder=t5,
    scheduler=diffusers.DPMSolverMultistepScheduler,
    transformer=dict(
        sample_size=16, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=128, caption_channels=T5_WIDTH,
        **HEADS,
    ),
)  # fmt: skip

TINY: dict[str, Make] = {"sd15": sd15, "sd21": sd21, "sdxl": sdxl, "sd3": sd3, "flux": flux, "pixart": pixart}
VARIANTS: dict[str, Make] = {  # by the family's name and what is special
    # distilled to read the guidance scale, with its own scheduler (arXiv:2310.04378)
    "sdxl_lcm": changed(
        sdxl, {"time_cond_proj_dim": 32}, scheduler=diffusers.LCMScheduler(**SD_NOISE), add_watermarker=False
    ),
    "sd3_no_t5": changed(sd3, text_encoder_3=None, tokenizer_3=None),  # as a pipeline loaded without T5 is saved
    "flux_schnell": changed(flux, {"guidance_embeds": False}, scheduler=flow(shift=1.0)),  # is told no guidance
    # is told the size, which diffusers sees by the number of latents; the features of three numbers fill the width
    "pixart_alpha": changed(
        pixart, {"sample_size": 128, "num_attention_heads": 6, "cross_attention_dim": 192}, "PixArtAlphaPipeline"
    ),
}
# 128 channels in its attentions, of which nunchaku's tiles are
WIDE: dict[str, Make] = {"sdxl_wide": changed(sdxl, {"block_out_channels": [64, 128]})}
# Of sizes that programs detect. ComfyUI 0.33.0 fixes these numbers of published checkpoints: Flux's heads of 128 with
# axes of 16, 56 and 56; Stable Diffusion 3's heads of 64, as many of them as layers; the width of a UNet's first level
# and of its text, with one level at least; PixArt's width, heads and text. SDXL is missing, because ComfyUI fixes three
# levels and the depth of each: its smallest has 90 million numbers.
FLUX_HEADS = {"axes_dims_rope": (16, 56, 56), "num_attention_heads": 2, "attention_head_dim": 128}  # of Flux
COMFYUI: dict[str, Make] = {
    "flux": changed(flux, {"num_layers": 1, "num_single_layers": 1, **FLUX_HEADS}),
    "sd3": changed(
        sd3, {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64, "caption_projection_dim": 128}
    ),
    "sd15": changed(
        sd15_of_one_level, {"block_out_channels": [320], "cross_attention_dim": 768, "attention_head_dim": 8}
    ),
    "sd21": changed(sd21, {"block_out_channels": [320], "cross_attention_dim": 1024, "attention_head_dim": 5}),
    "pixart": changed(pixart, dict(
        num_layers=1, num_attention_heads=16, sample_size=64, attention_head_dim=72, cross_attention_dim=1152,
        caption_channels=4096,
    )),
}  # fmt: skip
# And of the widths of the published text encoders, which InvokeAI and stable-diffusion.cpp expect
PUBLISHED = {"flux": changed(flux, {"joint_attention_dim": 4096, "pooled_projection_dim": 768, **FLUX_HEADS})}
