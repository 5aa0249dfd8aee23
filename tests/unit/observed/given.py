"""Four tiny pipelines that take an image: to edit it, to fill a part of it, to begin with it, and to make a video."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from tests.zoo import autoencoders, images, text, video_autoencoders, videos
from tests.zoo.cases import enliven


def flux(kind: type, channels: int) -> Any:
    """Returns a pipeline of Flux; ``channels`` are those of a token that its denoiser reads; it writes 16."""
    denoiser = diffusers.FluxTransformer2DModel(
        in_channels=channels, out_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=32,
        pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=images.AXES, **images.HEADS,
    )  # fmt: skip
    return kind(images.dynamic_flow(), autoencoders.kl(shifted=True), *text.clip(), *text.t5(), denoiser)


def image_to_image() -> Any:
    made = images.stable_diffusion_3()
    return diffusers.StableDiffusion3Img2ImgPipeline(**made.components)


def wan() -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=16
    )
    encoder, tokenizer = text.umt5(videos.TEXT)
    denoiser = diffusers.WanTransformer3DModel(**videos.WAN | {"in_channels": 36, "out_channels": 16}, image_dim=32)
    return diffusers.WanImageToVideoPipeline(
        tokenizer, encoder, video_autoencoders.wan(), videos.flow_unipc(),
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32),
        transformers.CLIPVisionModel(config), denoiser,
    )  # fmt: skip


SHORT = {"max_sequence_length": 32}
BUILT: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "kontext": (lambda: flux(diffusers.FluxKontextPipeline, 16), SHORT | {"_auto_resize": False}),
    "fill": (lambda: flux(diffusers.FluxFillPipeline, 16 + 16 + 4 * 64), SHORT),  # with a masked image, and its mask
    "image to image": (image_to_image, SHORT | {"strength": 0.5}),
    "wan": (wan, SHORT | {"num_frames": 5}),
}


def built(name: str) -> Any:
    """Returns the pipeline with random weights, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = BUILT[name][0]()
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                enliven(component.eval().requires_grad_(False))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
