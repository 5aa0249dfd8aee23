"""Tiny pipelines of sizes that programs detect: ComfyUI tells a model by sizes of published checkpoints.

Each is the tiny pipeline of its family with another denoiser. ComfyUI 0.33.0 fixes these numbers: Flux's heads of 128
with axes of 16, 56 and 56; Stable Diffusion 3's heads of 64, as many of them as layers; the width of a UNet's first
level and of its text, with one level at least; PixArt's width, heads and text. SDXL is missing, because ComfyUI fixes
three levels and the depth of each: its smallest has 90 million numbers.
"""

from .families import Make, changed, flux, pixart, sd3, sd15_of_one_level, sd21

HEADS = {"axes_dims_rope": (16, 56, 56), "num_attention_heads": 2, "attention_head_dim": 128}  # of Flux
COMFYUI: dict[str, Make] = {
    "flux": changed(flux, {"num_layers": 1, "num_single_layers": 1, **HEADS}),
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
PUBLISHED = {"flux": changed(flux, {"joint_attention_dim": 4096, "pooled_projection_dim": 768, **HEADS})}
