"""Folders of pipelines as diffusers saves them, small enough to make in a second and to run in another.

The classes, the wiring of their parts and the schedulers are those of the published checkpoints; only the sizes differ,
and the weights are random. Random as the classes draw them would not do: a diffusion model starts with outputs and
modulations of zero, so most of its layers would not reach the picture. All are drawn again, alive and without overflow.
A linear layer of a denoiser is some multiple of 64 wide (PixArt's last, which writes 32 features, excepted), a head of
its attention 16 or 32, a latent 8 pixels of the picture.
"""

import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH, clip_tokenizer

CLIP_VOCAB, CLIP_WIDTH = 1000, 64
T5_WIDTH = 192  # wider than two CLIPs, whose features Stable Diffusion 3 pads to it
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
PROJECTING = transformers.CLIPTextModelWithProjection
SD_NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}


def redraw(module: nn.Module) -> None:
    """Kernels that keep the scale of their input, norms of about 1, biases of about 0."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.7 * parameter[0].numel() ** -0.5)
        else:
            nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.02)


def write(pipeline: diffusers.DiffusionPipeline, folder: Path) -> None:
    torch.manual_seed(0)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            redraw(part)
    pipeline.save_pretrained(folder)


def clip(kind: type = transformers.CLIPTextModel, pad_token: str = "<|endoftext|>", act: str = "quick_gelu") -> Any:
    """A text encoder and its tokenizer; only ``CLIPTextModelWithProjection`` has the projection."""
    config = transformers.CLIPTextConfig(
        vocab_size=CLIP_VOCAB, hidden_size=CLIP_WIDTH, intermediate_size=2 * CLIP_WIDTH, projection_dim=CLIP_WIDTH,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=CONTEXT_LENGTH, hidden_act=act,
        bos_token_id=CLIP_VOCAB - 2, eos_token_id=CLIP_VOCAB - 1,
        pad_token_id=0 if pad_token == "!" else CLIP_VOCAB - 1,
    )  # fmt: skip
    return kind(config), clip_tokenizer(CLIP_VOCAB, pad_token)


def t5() -> tuple[transformers.T5EncoderModel, Any]:
    """A text encoder and its tokenizer, for which every printable ASCII character is a word."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    vocab: Any = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    config = transformers.T5Config(
        vocab_size=128,  # more than the tokenizer has, as T5's own
        d_model=T5_WIDTH,
        d_kv=32,
        d_ff=2 * T5_WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    return transformers.T5EncoderModel(config), transformers.T5Tokenizer(vocab, extra_ids=0, model_max_length=512)


def texts(*pairs: tuple[nn.Module, Any]) -> dict[str, Any]:
    """Text encoders and their tokenizers, by the names that a pipeline has for the first, the second and the third."""
    ends = ("", "_2", "_3")[: len(pairs)]
    encoders = {f"text_encoder{end}": encoder for end, (encoder, _) in zip(ends, pairs, strict=True)}
    return encoders | {f"tokenizer{end}": tokenizer for end, (_, tokenizer) in zip(ends, pairs, strict=True)}


def vae(scaling_factor: float, latent_channels: int = 4, **options: Any) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[16, 16, 16, 16],
        layers_per_block=0,  # and one on the way up
        norm_num_groups=8,
        latent_channels=latent_channels,
        scaling_factor=scaling_factor,
        sample_size=64,
        **options,
    )


def vae16(scaling_factor: float, shift_factor: float) -> diffusers.AutoencoderKL:
    """With 16 channels, as the transformers of 2024 have it."""
    plain = {"use_quant_conv": False, "use_post_quant_conv": False}
    return vae(scaling_factor, latent_channels=16, shift_factor=shift_factor, **plain)


def unet(**options: Any) -> diffusers.UNet2DConditionModel:
    """Two levels, of which one has attention, unless told otherwise.

    ``attention_head_dim`` is the number of heads, whatever its name says.
    """
    defaults = {
        "block_out_channels": [64, 128],
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "cross_attention_dim": CLIP_WIDTH,
    }
    return diffusers.UNet2DConditionModel(sample_size=8, layers_per_block=1, **defaults | options)


def stable_diffusion(folder: Path, unet: nn.Module, scheduler: Any, text: tuple[nn.Module, Any]) -> None:
    unsafe = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    parts = {"unet": unet, "vae": vae(0.18215), "scheduler": scheduler, **texts(text)}
    write(diffusers.StableDiffusionPipeline(**parts, **unsafe), folder)


def sd15(folder: Path) -> None:
    scheduler = diffusers.PNDMScheduler(**SD_NOISE, skip_prk_steps=True, set_alpha_to_one=False)
    stable_diffusion(folder, unet(attention_head_dim=4), scheduler, clip())


ONE_LEVEL = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}


def sd15_of_one_level(folder: Path) -> None:
    """``sd15``, which is soon traced."""
    sd15(folder)
    small = unet(block_out_channels=[64], attention_head_dim=4, **ONE_LEVEL)
    redraw(small)
    small.save_pretrained(folder / "unet")


def for_inpainting(make: Callable[[Path], None], folder: Path) -> None:
    """As a checkpoint for inpainting is stored: its UNet reads nine channels."""
    make(folder)
    plain = diffusers.DiffusionPipeline.from_pretrained(folder)
    nine = diffusers.UNet2DConditionModel.from_config(plain.unet.config, in_channels=9)
    redraw(nine)
    known = {**plain.config, **plain.components, "unet": nine}
    kind = getattr(diffusers, type(plain).__name__.replace("Pipeline", "InpaintPipeline"))
    names = [name for name in kind._get_signature_types() if name in known]
    kind(**{name: known[name] for name in names}).save_pretrained(folder)


def controlnet(folder: Path, unet: Path, seed: int = 1, **options: Any) -> None:
    """A ControlNet of the sizes of a stored UNet."""
    torch.manual_seed(seed)
    made = diffusers.ControlNetModel.from_unet(
        diffusers.UNet2DConditionModel.from_pretrained(unet), load_weights_from_unet=False
    )
    made = diffusers.ControlNetModel.from_config(made.config, **options)
    redraw(made)
    made.save_pretrained(folder)


def sd21(folder: Path) -> None:
    denoiser = unet(
        block_out_channels=[128], attention_head_dim=[4], use_linear_projection=True, upcast_attention=True, **ONE_LEVEL
    )
    v_prediction = {"prediction_type": "v_prediction", "clip_sample": False, "set_alpha_to_one": False}
    scheduler = diffusers.DDIMScheduler(**SD_NOISE, **v_prediction)
    stable_diffusion(folder, denoiser, scheduler, clip(pad_token="!", act="gelu"))


def sdxl(folder: Path) -> None:
    size_features = 32
    denoiser = unet(
        block_out_channels=[64, 64],
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
        transformer_layers_per_block=[1, 2],
        cross_attention_dim=2 * CLIP_WIDTH,
        attention_head_dim=[2, 4],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=size_features,
        projection_class_embeddings_input_dim=CLIP_WIDTH + 6 * size_features,
    )
    pipeline = diffusers.StableDiffusionXLPipeline(
        unet=denoiser,
        vae=vae(0.13025),
        scheduler=diffusers.EulerDiscreteScheduler(**SD_NOISE, timestep_spacing="leading"),
        add_watermarker=False,
        **texts(clip(), clip(PROJECTING, pad_token="!", act="gelu")),
    )
    write(pipeline, folder)


def sdxl_wide(folder: Path) -> None:
    """``sdxl`` with 128 channels in its attentions, of which nunchaku's tiles are."""
    sdxl(folder)
    config = diffusers.UNet2DConditionModel.load_config(folder / "unet")
    wide = diffusers.UNet2DConditionModel.from_config(config, block_out_channels=[64, 128])
    redraw(wide)
    wide.save_pretrained(folder / "unet")


def sdxl_lcm(folder: Path) -> None:
    """The one that was distilled to read the guidance scale, with its own scheduler (arXiv:2310.04378)."""
    sdxl(folder)
    base = diffusers.StableDiffusionXLPipeline.from_pretrained(folder)
    denoiser = diffusers.UNet2DConditionModel.from_config(base.unet.config, time_cond_proj_dim=32)
    redraw(denoiser)
    components = {**base.components, "unet": denoiser, "scheduler": diffusers.LCMScheduler(**SD_NOISE)}
    diffusers.StableDiffusionXLPipeline(**components, add_watermarker=False).save_pretrained(folder)


def sd3(folder: Path) -> None:
    denoiser = diffusers.SD3Transformer2DModel(
        sample_size=16, in_channels=16, out_channels=16, num_layers=2, caption_projection_dim=128,
        joint_attention_dim=T5_WIDTH, pooled_projection_dim=2 * CLIP_WIDTH, pos_embed_max_size=24, **HEADS,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=denoiser,
        vae=vae16(1.5305, 0.0609),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        **texts(clip(PROJECTING), clip(PROJECTING, pad_token="!", act="gelu"), t5()),
    )
    write(pipeline, folder)


def flux(folder: Path) -> None:
    denoiser = diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, axes_dims_rope=(4, 14, 14), joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH, guidance_embeds=True, **HEADS,
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        transformer=denoiser,
        vae=vae16(0.3611, 0.1159),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        **texts(clip(), t5()),
    )
    write(pipeline, folder)


def pixart(folder: Path) -> None:
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2, **HEADS}
    denoiser = diffusers.PixArtTransformer2DModel(cross_attention_dim=128, caption_channels=T5_WIDTH, **sizes)
    scheduler = diffusers.DPMSolverMultistepScheduler()
    pipeline = diffusers.PixArtSigmaPipeline(transformer=denoiser, vae=vae(0.13025), scheduler=scheduler, **texts(t5()))
    write(pipeline, folder)


def sd3_no_t5(folder: Path) -> None:
    """As ``save_pretrained`` leaves a pipeline that was loaded without T5."""
    sd3(folder)
    lean = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    shutil.rmtree(folder)
    lean.save_pretrained(folder)


def flux_schnell(folder: Path) -> None:
    """The one that is told no guidance, with its own scheduler."""
    flux(folder)
    dev = diffusers.FluxPipeline.from_pretrained(folder)
    denoiser = diffusers.FluxTransformer2DModel.from_config(dev.transformer.config, guidance_embeds=False)
    redraw(denoiser)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    components = {**dev.components, "transformer": denoiser, "scheduler": scheduler}
    diffusers.FluxPipeline(**components).save_pretrained(folder)


def pixart_alpha(folder: Path) -> None:
    """The one that is told the size, which diffusers sees by the number of latents."""
    pixart(folder)
    sigma = diffusers.PixArtSigmaPipeline.from_pretrained(folder)
    sizes = {"num_attention_heads": 6, "cross_attention_dim": 192}  # the features of three numbers fill the width
    denoiser = diffusers.PixArtTransformer2DModel.from_config(sigma.transformer.config, sample_size=128, **sizes)
    redraw(denoiser)
    diffusers.PixArtAlphaPipeline(**{**sigma.components, "transformer": denoiser}).save_pretrained(folder)


TINY: dict[str, Callable[[Path], None]] = {
    "sd15": sd15, "sd21": sd21, "sdxl": sdxl, "sd3": sd3, "flux": flux, "pixart": pixart,
}  # fmt: skip
VARIANTS: dict[str, Callable[[Path], None]] = {  # by the family's name and what is special
    "sdxl_lcm": sdxl_lcm,
    "sd3_no_t5": sd3_no_t5,
    "flux_schnell": flux_schnell,
    "pixart_alpha": pixart_alpha,
}
WIDE: dict[str, Callable[[Path], None]] = {"sdxl_wide": sdxl_wide}
