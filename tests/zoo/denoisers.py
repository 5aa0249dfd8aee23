"""Tiny random denoisers of the six families and of others, and the arguments of a call, for two images.

Others are those of the pipelines, called as these call them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import CASES, build, first_call
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


OTHERS = {
    "qwen_image": "QwenImagePipeline", "z_image": "ZImagePipeline", "flux2": "Flux2Pipeline",
    "chroma": "ChromaPipeline", "sana": "SanaPipeline", "lumina2": "Lumina2Pipeline", "wan": "WanPipeline",
    "ltx": "LTXPipeline", "cogvideox": "CogVideoXPipeline", "hunyuan_video": "HunyuanVideoPipeline",
    "mochi": "MochiPipeline", "auraflow": "AuraFlowPipeline", "cogview4": "CogView4Pipeline",
    "hidream": "HiDreamImagePipeline", "latte": "LattePipeline", "kandinsky5": "Kandinsky5T2VPipeline",
}  # fmt: skip
NAMES = (
    "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask", "pooled_projections",
    "cap_feats", "encoder_hidden_states_t5", "encoder_hidden_states_llama3", "pooled_embeds",
)  # fmt: skip


@cache
def watched(name: str) -> Watched:
    """A row of ``FAMILIES`` or ``OTHERS``."""
    if name in FAMILIES:
        return FAMILIES[name]
    dtype = torch.float32 if name == "kandinsky5" else torch.float64
    pipeline = build(OTHERS[name])
    denoiser = getattr(pipeline, CASES[OTHERS[name]].denoiser)
    given = first_call(pipeline, OTHERS[name], ["a cat", "two boats"])

    def cast(each: Any) -> Any:
        return each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each

    return Watched(lambda: type(denoiser).from_config(denoiser.config), tree_map(cast, given), NAMES, dtype=dtype)
