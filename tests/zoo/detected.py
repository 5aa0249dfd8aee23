"""Tiny pipelines of sizes that programs detect: ComfyUI tells a model by sizes of published checkpoints.

Each is the tiny pipeline of its family with another denoiser. ComfyUI 0.33.0 fixes these numbers: Flux's heads of 128
with axes of 16, 56 and 56; Stable Diffusion 3's heads of 64, as many of them as layers; the width of a UNet's first
level and of its text, with one level at least; PixArt's width, heads and text. SDXL is missing, because ComfyUI fixes
three levels and the depth of each: its smallest has 90 million numbers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers

from .families import flux, pixart, redraw, sd3, sd15_of_one_level, sd21


def resized(make: Callable[[Path], None], component: str, kind: Any, **sizes: Any) -> Callable[[Path], None]:
    """A maker of the pipeline that ``make`` writes, with a denoiser of other sizes."""

    def write(folder: Path) -> None:
        make(folder)
        denoiser = kind.from_config(kind.load_config(folder / component), **sizes)
        redraw(denoiser)
        denoiser.save_pretrained(folder / component)

    return write


UNET = diffusers.UNet2DConditionModel
COMFYUI: dict[str, Callable[[Path], None]] = {
    "flux": resized(
        flux, "transformer", diffusers.FluxTransformer2DModel, num_layers=1, num_single_layers=1,
        axes_dims_rope=(16, 56, 56), num_attention_heads=2, attention_head_dim=128,
    ),
    "sd3": resized(
        sd3, "transformer", diffusers.SD3Transformer2DModel, num_layers=2, num_attention_heads=2, attention_head_dim=64,
        caption_projection_dim=128,
    ),
    "sd15": resized(
        sd15_of_one_level, "unet", UNET, block_out_channels=[320], cross_attention_dim=768, attention_head_dim=8,
    ),
    "sd21": resized(
        sd21, "unet", UNET, block_out_channels=[320], cross_attention_dim=1024, attention_head_dim=5,
    ),
    "pixart": resized(
        pixart, "transformer", diffusers.PixArtTransformer2DModel, num_layers=1, num_attention_heads=16,
        sample_size=64, attention_head_dim=72, cross_attention_dim=1152, caption_channels=4096,
    ),
}  # fmt: skip
# And of the widths of the published text encoders, which InvokeAI and stable-diffusion.cpp expect
PUBLISHED = {
    "flux": resized(
        flux, "transformer", diffusers.FluxTransformer2DModel, axes_dims_rope=(16, 56, 56), num_attention_heads=2,
        attention_head_dim=128, joint_attention_dim=4096, pooled_projection_dim=768,
    )
}  # fmt: skip
