"""Tiny autoencoders of videos, one of each class that a text-to-video pipeline has.

Each keeps the compression that the published one has, in space and in time, so that the pipelines' arithmetic of sizes
is the same; only channels and layers are few.
"""

from typing import Any

import diffusers

WIDTHS = (8, 8, 16, 16)
LATENTS = 16  # channels of the latents, where the class does not fix another number


def wan() -> Any:
    """Returns an ``AutoencoderKLWan``: 8 x 8 pixels and 4 frames after the first to a latent of 16 channels."""
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=LATENTS, dim_mult=[1, 1, 2, 2], num_res_blocks=1)


def hunyuan() -> Any:
    """Returns an ``AutoencoderKLHunyuanVideo``: 8 x 8 pixels and 4 frames after the first to 16 channels."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=LATENTS, block_out_channels=WIDTHS, layers_per_block=1, norm_num_groups=4
    )


def hunyuan_15() -> Any:
    """Returns an ``AutoencoderKLHunyuanVideo15``: 16 x 16 pixels and 4 frames after the first to 16 channels."""
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=LATENTS, block_out_channels=(8, 8, 8, 16, 16), layers_per_block=1
    )


def allegro() -> Any:
    """Returns an ``AutoencoderKLAllegro``: 8 x 8 pixels and 4 frames to 4 channels.

    It decodes in tiles only, of 24 frames and ``sample_size`` pixels that overlap by 120: what is smaller than a tile
    decodes to zeros.
    """
    return diffusers.AutoencoderKLAllegro(
        block_out_channels=WIDTHS, layers_per_block=1, norm_num_groups=4, sample_size=128
    )


def cogvideox() -> Any:
    """Returns an ``AutoencoderKLCogVideoX``: 8 x 8 pixels and 4 frames after the first to 16 channels."""
    return diffusers.AutoencoderKLCogVideoX(
        latent_channels=LATENTS, block_out_channels=WIDTHS, layers_per_block=1, norm_num_groups=4
    )


def magvit() -> Any:
    """Returns an ``AutoencoderKLMagvit``: 8 x 8 pixels and 4 frames after the first to 16 channels."""
    return diffusers.AutoencoderKLMagvit(
        latent_channels=LATENTS, block_out_channels=WIDTHS, layers_per_block=1, norm_num_groups=4
    )


def ltx() -> Any:
    """Returns an ``AutoencoderKLLTXVideo``: 32 x 32 pixels and 8 frames after the first to 16 channels."""
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=LATENTS, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
    )  # fmt: skip


def mochi() -> Any:
    """Returns an ``AutoencoderKLMochi``: 8 x 8 pixels and 6 frames after the first to 12 channels.

    Its norms have 32 groups, so no width is less.
    """
    widths = (32, 32, 32, 32)
    return diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=widths, decoder_block_out_channels=widths, layers_per_block=(1,) * 5
    )


def frame_by_frame() -> Any:
    """Returns an ``AutoencoderKL`` for pipelines that encode each frame as an image: 8 x 8 pixels to 4 channels."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=WIDTHS, latent_channels=4, norm_num_groups=4, sample_size=32,
    )  # fmt: skip
