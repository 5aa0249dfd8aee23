"""SDXL: what a NeMo ``model_config.yaml`` means in diffusers' terms.

The architecture is read from the checkpoint: sizes of the UNet and the VAE from its config, sizes of the text encoders
from their weights, because NeMo's config names those encoders instead of describing them. Nothing in the config is
imported or instantiated: ``_target_`` and ``target`` strings are data.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sd_quant.quantization.smoothing import SharedInput

CLIP_HEAD_WIDTH = 64  # of CLIP-L (768/12), OpenCLIP bigG (1280/20) and every other CLIP text model


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of one CLIP text encoder. ``projection`` is 0 when it has no pooled output."""

    vocab_size: int
    width: int
    layers: int
    context: int
    mlp_width: int
    projection: int = 0


def embedder(model_config: Mapping, index: int) -> Mapping:
    return model_config["conditioner_config"]["emb_models"][index]["emb_model"]


def unet_config(model_config: Mapping) -> dict:
    """Keyword arguments of ``diffusers.UNet2DConditionModel`` for NeMo's ``unet_config`` (openaimodel.UNetModel)."""
    unet = model_config["unet_config"]
    channels = [unet["model_channels"] * factor for factor in unet["channel_mult"]]
    attends = [2**level in unet["attention_resolutions"] for level in range(len(channels))]
    return {
        "sample_size": unet["image_size"],
        "in_channels": unet["in_channels"],
        "out_channels": unet["out_channels"],
        "block_out_channels": channels,
        "layers_per_block": unet["num_res_blocks"],
        "down_block_types": ["CrossAttnDownBlock2D" if attend else "DownBlock2D" for attend in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)],
        "transformer_layers_per_block": list(unet["transformer_depth"]),
        "attention_head_dim": [width // unet["num_head_channels"] for width in channels],  # diffusers: number of heads
        "cross_attention_dim": unet["context_dim"],
        "use_linear_projection": unet["use_linear_in_transformer"],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": embedder(model_config, 2)["outdim"],
        "projection_class_embeddings_input_dim": unet["adm_in_channels"],
    }


def vae_config(model_config: Mapping) -> dict:
    """Keyword arguments of ``diffusers.AutoencoderKL`` for NeMo's ``first_stage_config``."""
    vae = model_config["first_stage_config"]["ddconfig"]
    levels = len(vae["ch_mult"])
    return {
        "in_channels": vae["in_channels"],
        "out_channels": vae["out_ch"],
        "latent_channels": vae["z_channels"],
        "block_out_channels": [vae["ch"] * factor for factor in vae["ch_mult"]],
        "layers_per_block": vae["num_res_blocks"],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "sample_size": vae["resolution"],
        "scaling_factor": model_config["scale_factor"],
    }


def text_config(shape: TextShape, activation: str) -> dict:
    """Keyword arguments of ``transformers.CLIPTextConfig``; ids of the markers follow from the vocabulary's size."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.width // CLIP_HEAD_WIDTH,
        "max_position_embeddings": shape.context,
        "projection_dim": shape.projection or shape.width,
        "hidden_act": activation,
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
        "pad_token_id": shape.vocab_size - 1,
    }


def build_modules(model_config: Mapping, clip1: TextShape, clip2: TextShape) -> dict:
    """The four networks with fresh weights, under the names of ``StableDiffusionXLPipeline``'s components.

    Build inside ``torch.device("meta")`` for the structure alone.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    return {
        "unet": UNet2DConditionModel(**unet_config(model_config)),
        "vae": AutoencoderKL(**vae_config(model_config)),
        "text_encoder": CLIPTextModel(CLIPTextConfig(**text_config(clip1, "quick_gelu"))),
        "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(**text_config(clip2, "gelu"))),
    }


def scheduler():
    """diffusers' Euler sampler with what NeMo's EulerEDMSampler on LegacyDDPMDiscretization does differently.

    Its timesteps are truncated, where diffusers' trailing spacing rounds, which moves some by one for most numbers of
    steps; and its first noise is sqrt(1 + sigma^2) strong instead of sigma, 0.23 % more.
    """
    import numpy as np
    from diffusers import EulerDiscreteScheduler

    class NemoEulerScheduler(EulerDiscreteScheduler):
        @property
        def init_noise_sigma(self):
            return (self.sigmas.max() ** 2 + 1) ** 0.5

        def set_timesteps(self, num_inference_steps: int, device=None, **_):
            timesteps = np.linspace(999, 0, num_inference_steps, endpoint=False).astype(int)
            super().set_timesteps(device=device, timesteps=timesteps)

    return NemoEulerScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="trailing"
    )


# The layers that ModelOpt's diffusion recipes leave alone, in diffusers' names: embeddings of time and size, the first
# and last convolution, and the skip convolutions. NeMo's names for the same are emb_layers.1, time_embed, label_emb,
# input_blocks.0.0, out.1 and skip_connection.
EXCLUDED = ("time_emb_proj", "time_embedding", "add_embedding", "conv_in", "conv_out", "conv_shortcut")


def layer_role(name: str, is_conv: bool) -> str:
    """Role of a UNet layer by its diffusers name: excluded, conv, ffn, qkv or linear."""
    words = name.split(".")
    if any(word in EXCLUDED for word in words):
        return "excluded"
    if is_conv:
        return "conv"
    if "ff" in words:
        return "ffn"
    return "qkv" if words[-1] in ("to_q", "to_k", "to_v") else "linear"


def layer_roles(unet) -> dict[str, str]:
    """Name to role of every Linear and Conv2d of the UNet, in the order of the network."""
    from torch.nn import Conv2d, Linear

    layers = {name: module for name, module in unet.named_modules() if isinstance(module, Linear | Conv2d)}
    return {name: layer_role(name, isinstance(module, Conv2d)) for name, module in layers.items()}


def attentions(unet) -> dict[str, int]:
    """Name of every attention to the width of its heads."""
    from diffusers.models.attention_processor import Attention

    found = {name: module for name, module in unet.named_modules() if isinstance(module, Attention)}
    return {name: module.to_q.out_features // module.heads for name, module in found.items()}


def shared_inputs(roles: Iterable[str]) -> list[SharedInput]:
    """Which linears of the UNet read one tensor, and what makes it, by their diffusers names.

    Query, key and value of self-attention read a LayerNorm, and so does the gated feed-forward's first linear; its
    second reads value * gelu(gate), so a factor moves into the value half, the first rows of the first linear. An
    attention's output is a mean of value rows, so a factor moves into to_v. proj_in reads the GroupNorm. The text that
    cross-attention's key and value read is an input of the network, and proj_out reads a residual stream: neither has
    anything in front that could take a factor.
    """
    inputs = []
    for name in roles:
        block, _, layer = name.rpartition(".")
        if layer == "proj_in":
            inputs.append(SharedInput((name,), f"{block}.norm"))
        elif layer == "proj_out":
            inputs.append(SharedInput((name,)))
        elif name.endswith(".attn1.to_q"):
            block = name.removesuffix(".attn1.to_q")
            attention, cross = f"{block}.attn1", f"{block}.attn2"
            inputs += [
                SharedInput((f"{attention}.to_q", f"{attention}.to_k", f"{attention}.to_v"), f"{block}.norm1"),
                SharedInput((f"{attention}.to_out.0",), f"{attention}.to_v"),
                SharedInput((f"{cross}.to_q",), f"{block}.norm2"),
                SharedInput((f"{cross}.to_k", f"{cross}.to_v")),
                SharedInput((f"{cross}.to_out.0",), f"{cross}.to_v"),
                SharedInput((f"{block}.ff.net.0.proj",), f"{block}.norm3"),
                SharedInput((f"{block}.ff.net.2",), f"{block}.ff.net.0.proj"),
            ]
    return inputs
