"""Sizes of tiny autoencoders: few channels and layers, and as much smaller latents as the published ones make.

Pixels along a side, and frames behind the first, that make one latent stand beside each.
"""

from typing import Any

Sizes = dict[str, Any]
WIDTH, WIDTHS = 16, (8, 8, 16, 16)


def levels(count: int) -> Sizes:
    """Returns the sizes of so many levels of an ``AutoencoderKL`` or a ``VQModel``."""
    return dict(
        down_block_types=("DownEncoderBlock2D",) * count, up_block_types=("UpDecoderBlock2D",) * count,
        block_out_channels=(WIDTH,) * count,
    )  # fmt: skip


def statistics(latents: int) -> Sizes:
    """Returns means and deviations of latents, no two alike."""
    return {
        "latents_mean": [0.1 * (index % 5) - 0.2 for index in range(latents)],
        "latents_std": [1.0 + 0.1 * (index % 7) for index in range(latents)],
    }


# Images
KL = levels(4) | dict(latent_channels=4, norm_num_groups=4, sample_size=64)  # 8
SHIFTED = KL | dict(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1)  # as Flux's
FLUX2 = dict(  # 8, and pipelines put 2 x 2 of its latents into one token
    block_out_channels=(WIDTH,) * 4, layers_per_block=1, latent_channels=8, norm_num_groups=4, sample_size=64
)
VQ = levels(4) | dict(latent_channels=4, norm_num_groups=4, num_vq_embeddings=32)  # 8
DEEP_COMPRESSION = dict(  # residual blocks, and linear attention in the last level, as SANA's
    latent_channels=8, attention_head_dim=8, encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",),
    decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",), encoder_block_out_channels=(WIDTH,) * 4,
    decoder_block_out_channels=(WIDTH,) * 4, encoder_layers_per_block=(1,) * 4, decoder_layers_per_block=(1,) * 4,
    encoder_qkv_multiscales=((),) * 3 + ((5,),), decoder_qkv_multiscales=((),) * 3 + ((5,),),
    upsample_block_type="interpolate", downsample_block_type="Conv", scaling_factor=0.41407, decoder_act_fns="silu",
)  # fmt: skip
QWEN_IMAGE = dict(base_dim=WIDTH, z_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics(8))  # 8
WAN_OF_IMAGES = dict(  # 16, as Wan 2.2's, which FIBO has for images
    base_dim=WIDTH, decoder_base_dim=WIDTH, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, is_residual=True,
    in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16, **statistics(16),
)  # fmt: skip
HUNYUAN_IMAGE = dict(  # 32; the groups of its norms are 32, so it is wider
    in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(32,) * 6, layers_per_block=1,
    spatial_compression_ratio=32, sample_size=64, scaling_factor=0.75,
)  # fmt: skip
TINY = dict(  # 8
    encoder_block_out_channels=(WIDTH,) * 4, decoder_block_out_channels=(WIDTH,) * 4, latent_channels=4,
    num_encoder_blocks=(1, 1, 1, 1), num_decoder_blocks=(1, 1, 1, 1),
)  # fmt: skip

# Videos
WAN = dict(base_dim=8, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1)  # 8 and 4
HUNYUAN = dict(latent_channels=16, block_out_channels=WIDTHS, layers_per_block=1, norm_num_groups=4)  # 8 and 4
HUNYUAN_15 = dict(latent_channels=16, block_out_channels=(8, 8, 8, 16, 16), layers_per_block=1)  # 16 and 4
# 8 and 4. It decodes in tiles only, of 24 frames and ``sample_size`` pixels that overlap by 120: what is smaller than a
# tile decodes to zeros.
ALLEGRO = dict(block_out_channels=WIDTHS, layers_per_block=1, norm_num_groups=4, sample_size=128)
COGVIDEOX = MAGVIT = HUNYUAN
LTX = dict(  # 32 and 8
    latent_channels=16, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
    layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
)  # fmt: skip
MOCHI = dict(  # 8 and 6; its norms have 32 groups, so no width is less
    encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
)
FRAME_BY_FRAME = KL | dict(block_out_channels=WIDTHS, sample_size=32)  # 8, each frame as an image
