"""Tiny random denoisers of the six families and of others, and the arguments of a call, for two images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from .families import redraw

BATCH, TEXT, TEXT_WIDTH, POOLED = 2, 7, 48, 24
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
TWO_LEVELS = {
    "sample_size": 8, "layers_per_block": 1, "block_out_channels": [32, 64], "cross_attention_dim": TEXT_WIDTH,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 8,
}  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def time() -> Tensor:
    return torch.tensor([500.0, 900.0], dtype=torch.float64)


TOKENS, POOL = {"encoder_hidden_states": drawn(BATCH, TEXT, TEXT_WIDTH)}, {"pooled_projections": drawn(BATCH, POOLED)}
IMAGE_IDS = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)).double()


def unet(**options: Any) -> nn.Module:
    return diffusers.UNet2DConditionModel(**TWO_LEVELS | options)


def sdxl() -> nn.Module:
    return unet(
        use_linear_projection=True, attention_head_dim=[2, 4], transformer_layers_per_block=[1, 2],
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=POOLED + 48,
    )  # fmt: skip


def sd3(**options: Any) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, caption_projection_dim=32, pos_embed_max_size=24,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=POOLED, **HEADS, **options,
    )  # fmt: skip


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, axes_dims_rope=(4, 6, 6), joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED, guidance_embeds=True, **HEADS,
    )  # fmt: skip


def pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        sample_size=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32, norm_num_groups=8,
        caption_channels=TEXT_WIDTH, use_additional_conditions=False, **HEADS,
    )  # fmt: skip


@dataclass(frozen=True)
class Watched:
    """How a denoiser is built and called."""

    build: Callable[[], nn.Module]
    arguments: Mapping[str, Any]
    text: tuple[str, ...] = ("encoder_hidden_states",)
    family: str | None = None  # whose hand-written roles are compared
    dtype: torch.dtype = torch.float64  # of a network that mixes dtypes: fp32

    def real(self) -> nn.Module:
        """The network in fp64, drawn so that every layer reaches the output."""
        torch.manual_seed(0)
        network = self.build().eval().requires_grad_(False)
        redraw(network)
        for name, parameter in network.named_parameters():
            if name.endswith(".bias") or parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
        return network.double() if self.dtype == torch.float64 else network

    def meta(self) -> nn.Module:
        with torch.device("meta"):
            network = self.build().eval().requires_grad_(False)
        return network.double() if self.dtype == torch.float64 else network


LATENTS = drawn(BATCH, 4, 8, 8)
OF_UNET = {"sample": LATENTS, "timestep": torch.tensor(500.0), **TOKENS, "return_dict": False}
ADDED = {"added_cond_kwargs": {"text_embeds": drawn(BATCH, POOLED), "time_ids": drawn(BATCH, 6).abs()}}
OF_SD3 = {"hidden_states": LATENTS, "timestep": time(), **TOKENS, **POOL, "return_dict": False}
OF_FLUX = {
    "hidden_states": drawn(BATCH, 16, 16), "timestep": time() / 1000, **TOKENS, **POOL, "guidance": time() / 200,
    "img_ids": IMAGE_IDS, "txt_ids": torch.zeros(TEXT, 3, dtype=torch.float64), "return_dict": False,
}  # fmt: skip
OF_PIXART = {
    "hidden_states": LATENTS, "timestep": time(), **TOKENS, "return_dict": False,
    "encoder_attention_mask": torch.ones(BATCH, TEXT, dtype=torch.int64),
    "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
}  # fmt: skip
OF_TEXT = ("encoder_hidden_states", "pooled_projections", "added_cond_kwargs.text_embeds", "encoder_attention_mask")

FAMILIES: dict[str, Watched] = {
    "sd15": Watched(lambda: unet(attention_head_dim=2), OF_UNET, OF_TEXT, "sd15"),
    "sd21": Watched(lambda: unet(attention_head_dim=[2, 4], use_linear_projection=True, upcast_attention=True),
                    OF_UNET, OF_TEXT, "sd21"),
    "sdxl": Watched(sdxl, OF_UNET | ADDED, OF_TEXT, "sdxl"),
    "sd3": Watched(sd3, OF_SD3, OF_TEXT, "sd3"),
    "sd35": Watched(lambda: sd3(qk_norm="rms_norm", dual_attention_layers=(0,)), OF_SD3, OF_TEXT, "sd3"),
    "flux": Watched(flux, OF_FLUX, OF_TEXT, "flux"),
    "pixart": Watched(pixart, OF_PIXART, OF_TEXT, "pixart"),
}  # fmt: skip


def ids(text_axes: int) -> dict[str, Tensor]:
    image = torch.nn.functional.pad(IMAGE_IDS, (0, text_axes - 3))
    return {"img_ids": image, "txt_ids": torch.zeros(TEXT, text_axes, dtype=torch.float64)}


def clip(*, frames: int = 3) -> Tensor:
    """Latents of a video."""
    return drawn(BATCH, 4, frames, 8, 8)


PACKED = {"hidden_states": drawn(BATCH, 16, 16), "timestep": time() / 1000, **TOKENS, "return_dict": False}
OF_VIDEO = {"hidden_states": clip(), "timestep": time(), **TOKENS, "return_dict": False}
MASK = {"encoder_attention_mask": torch.ones(BATCH, TEXT, dtype=torch.int64)}
NAMES = (
    "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask", "pooled_projections",
    "cap_feats", "encoder_hidden_states_t5", "encoder_hidden_states_llama3", "pooled_embeds",
)  # fmt: skip


def watched(kind: str, arguments: Mapping[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> Watched:
    given = {
        name: each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each
        for name, each in arguments.items()
    }
    return Watched(lambda: getattr(diffusers, kind)(**options), given, NAMES, dtype=dtype)


CHANNELS = {"in_channels": 4, "out_channels": 4, "num_layers": 2} | HEADS
TURNED = (4, 6, 6)  # channels of a head that turn by time, height and width
TEXT_MASK = torch.ones(BATCH, TEXT).bool()
OTHERS: dict[str, Watched] = {
    "qwen_image": watched(
        "QwenImageTransformer2DModel",
        PACKED | {"encoder_hidden_states_mask": MASK["encoder_attention_mask"], "img_shapes": [[(1, 4, 4)]] * BATCH},
        joint_attention_dim=TEXT_WIDTH, axes_dims_rope=TURNED, **CHANNELS | {"in_channels": 16},
    ),
    "z_image": watched(
        "ZImageTransformer2DModel",
        {
            "x": [drawn(4, 1, 8, 8), drawn(4, 1, 8, 8)], "t": time() / 1000, "return_dict": False,
            "cap_feats": [drawn(TEXT, TEXT_WIDTH), drawn(TEXT, TEXT_WIDTH)],
        },
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=TEXT_WIDTH,
        axes_dims=[*TURNED], axes_lens=[64, 16, 16],
    ),
    "flux2": watched(
        "Flux2Transformer2DModel", PACKED | {"guidance": time() / 200} | ids(4),
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT_WIDTH,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), **HEADS,
    ),
    "chroma": watched(
        "ChromaTransformer2DModel", PACKED | ids(3),
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT_WIDTH, axes_dims_rope=TURNED,
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1, **HEADS,
    ),
    "sana": watched(
        "SanaTransformer2DModel", PACKED | MASK | {"hidden_states": LATENTS},
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=TEXT_WIDTH,
        sample_size=8, **CHANNELS,
    ),
    "lumina2": watched(
        "Lumina2Transformer2DModel", PACKED | {"hidden_states": LATENTS, "encoder_attention_mask": TEXT_MASK},
        sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, axes_dim_rope=TURNED, axes_lens=(64, 16, 16), cap_feat_dim=TEXT_WIDTH,
    ),
    "wan": watched(
        "WanTransformer3DModel", OF_VIDEO,
        text_dim=TEXT_WIDTH, freq_dim=16, ffn_dim=64, rope_max_seq_len=32, **CHANNELS,
    ),
    "ltx": watched(
        "LTXVideoTransformer3DModel",
        OF_VIDEO | MASK | {"hidden_states": drawn(BATCH, 32, 8), "num_frames": 2, "height": 4, "width": 4},
        in_channels=8, out_channels=8, num_layers=2, cross_attention_dim=32, caption_channels=TEXT_WIDTH, **HEADS,
    ),
    "cogvideox": watched(
        "CogVideoXTransformer3DModel", OF_VIDEO | {"hidden_states": drawn(BATCH, 3, 4, 8, 8)},
        time_embed_dim=16, text_embed_dim=TEXT_WIDTH, sample_width=8, sample_height=8, sample_frames=9,
        max_text_seq_length=TEXT, **CHANNELS,
    ),
    "hunyuan_video": watched(
        "HunyuanVideoTransformer3DModel", OF_VIDEO | MASK | POOL | {"guidance": time() / 200},
        num_single_layers=2, num_refiner_layers=1, text_embed_dim=TEXT_WIDTH, pooled_projection_dim=POOLED,
        rope_axes_dim=TURNED, **CHANNELS,
    ),
    "mochi": watched(
        "MochiTransformer3DModel", OF_VIDEO | {"encoder_attention_mask": TEXT_MASK},
        num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=TEXT_WIDTH, time_embed_dim=16,
        max_sequence_length=TEXT, **HEADS,
    ),
    "auraflow": watched(
        "AuraFlowTransformer2DModel", PACKED | {"hidden_states": LATENTS},
        sample_size=8, num_mmdit_layers=1, num_single_dit_layers=2, joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=32, pos_embed_max_size=64, **HEADS,
    ),
    "cogview4": watched(
        "CogView4Transformer2DModel",
        PACKED
        | {"hidden_states": LATENTS}
        | {name: drawn(BATCH, 2).abs() for name in ("original_size", "target_size", "crop_coords")},
        text_embed_dim=TEXT_WIDTH, time_embed_dim=16, condition_dim=8, pos_embed_max_size=8, sample_size=8,
        rope_axes_dim=(8, 8), **CHANNELS,
    ),
    "hidream": watched(
        "HiDreamImageTransformer2DModel",
        {
            "hidden_states": LATENTS, "timesteps": time(), "pooled_embeds": drawn(BATCH, POOLED),
            "encoder_hidden_states_t5": drawn(BATCH, TEXT, TEXT_WIDTH),
            "encoder_hidden_states_llama3": drawn(4, BATCH, TEXT, TEXT_WIDTH), "return_dict": False,
        },
        patch_size=2, num_single_layers=1, caption_channels=(TEXT_WIDTH, TEXT_WIDTH), text_emb_dim=POOLED,
        axes_dims_rope=(8, 4, 4), max_resolution=(8, 8), llama_layers=(0, 1), force_inference_output=True,
        **CHANNELS | {"num_layers": 1},
    ),
    "latte": watched(
        "LatteTransformer3DModel", OF_VIDEO,
        cross_attention_dim=32, attention_bias=True, sample_size=8, patch_size=2, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False,
        caption_channels=TEXT_WIDTH, video_length=3, **CHANNELS | {"out_channels": 8},
    ),
    "kandinsky5": watched(
        "Kandinsky5Transformer3DModel",
        {
            "hidden_states": drawn(BATCH, 3, 8, 8, 4), "encoder_hidden_states": drawn(BATCH, TEXT, TEXT_WIDTH),
            "timestep": time(), "pooled_projections": drawn(BATCH, POOLED), "text_rope_pos": torch.arange(TEXT),
            "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)], "return_dict": False,
        },
        dtype=torch.float32, in_visual_dim=4, in_text_dim=TEXT_WIDTH, in_text_dim2=POOLED, time_dim=16,
        out_visual_dim=4, model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=2, axes_dims=TURNED,
    ),
}  # fmt: skip
