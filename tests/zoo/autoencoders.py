"""Tiny autoencoders of images: 16 channels, and as many levels as published ones, so latents are as much smaller."""

from typing import Any

import diffusers

WIDTH = 16


def kl(latents: int = 4, levels: int = 4, shifted: bool = False, **options: Any) -> Any:
    """Returns an ``AutoencoderKL``, whose latents are ``2 ** (levels - 1)`` times smaller; ``shifted`` as Flux's."""
    quantized = {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1} if shifted else {}
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(WIDTH,) * levels, latent_channels=latents, norm_num_groups=4, sample_size=64,
        **(quantized | options),
    )  # fmt: skip


def flux2(latents: int = 8) -> Any:
    """Returns an ``AutoencoderKLFlux2``: 8 times smaller, and pipelines put 2 by 2 of its latents into one token."""
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(WIDTH,) * 4, layers_per_block=1, latent_channels=latents, norm_num_groups=4, sample_size=64
    )


def vq(latents: int = 4, levels: int = 4, codes: int = 32, **options: Any) -> Any:
    """Returns a ``VQModel`` with ``codes`` entries in its codebook."""
    return diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(WIDTH,) * levels, latent_channels=latents, norm_num_groups=4, num_vq_embeddings=codes,
        **options,
    )  # fmt: skip


def deep_compression(latents: int = 8, levels: int = 4) -> Any:
    """Returns an ``AutoencoderDC``: residual blocks, and linear attention in the last level as in SANA's."""
    blocks = ("ResBlock",) * (levels - 1) + ("EfficientViTBlock",)
    return diffusers.AutoencoderDC(
        latent_channels=latents, attention_head_dim=8, encoder_block_types=blocks, decoder_block_types=blocks,
        encoder_block_out_channels=(WIDTH,) * levels, decoder_block_out_channels=(WIDTH,) * levels,
        encoder_layers_per_block=(1,) * levels, decoder_layers_per_block=(1,) * levels,
        encoder_qkv_multiscales=((),) * (levels - 1) + ((5,),), decoder_qkv_multiscales=((),) * (levels - 1) + ((5,),),
        upsample_block_type="interpolate", downsample_block_type="Conv", scaling_factor=0.41407,
        decoder_act_fns="silu",
    )  # fmt: skip


def statistics(latents: int) -> dict[str, Any]:
    """Returns means and deviations of latents, no two alike."""
    return {
        "latents_mean": [0.1 * (index % 5) - 0.2 for index in range(latents)],
        "latents_std": [1.0 + 0.1 * (index % 7) for index in range(latents)],
    }


def qwen_image(latents: int = 8) -> Any:
    """Returns an ``AutoencoderKLQwenImage``, 8 times smaller."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=WIDTH, z_dim=latents, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics(latents)
    )


def wan_of_images(latents: int = 16) -> Any:
    """Returns an ``AutoencoderKLWan`` as of Wan 2.2, 16 times smaller, which FIBO has for images."""
    return diffusers.AutoencoderKLWan(
        base_dim=WIDTH, decoder_base_dim=WIDTH, z_dim=latents, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16,
        **statistics(latents),
    )  # fmt: skip


def hunyuan_image(latents: int = 8) -> Any:
    """Returns an ``AutoencoderKLHunyuanImage``, 32 times smaller; the groups of its norms are 32, so it is wider."""
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=latents, block_out_channels=(32,) * 6,
        layers_per_block=1, spatial_compression_ratio=32, sample_size=64, scaling_factor=0.75,
    )  # fmt: skip


def tiny(latents: int = 4) -> Any:
    """Returns an ``AutoencoderTiny``, 8 times smaller."""
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(WIDTH,) * 4, decoder_block_out_channels=(WIDTH,) * 4, latent_channels=latents,
        num_encoder_blocks=(1, 1, 1, 1), num_decoder_blocks=(1, 1, 1, 1),
    )  # fmt: skip
