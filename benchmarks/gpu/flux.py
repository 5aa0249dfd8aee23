"""FLUX.1's transformer in the table: dev's size and guidance, in bf16 as its makers publish it.

Its scales are no part of a bundle. They are the largest magnitudes, found on the GPU in a second.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_quant.models.flux import FAMILY as family
from sd_quant.models.roles import MODULATIONS
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.statistics import Statistics

from .network import Inputs, Network, with_weights
from .scales import Assignment

DEV: dict[str, Any] = {"guidance_embeds": True}  # all else is diffusers' own default
SMALL = DEV | {
    "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
    "axes_dims_rope": (4, 6, 6), "joint_attention_dim": 48, "pooled_projection_dim": 32,
}  # fmt: skip
TIME, GUIDANCE = 0.5, 3.5


def structure(config: Mapping[str, Any]) -> nn.Module:
    """The transformer on the meta device."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        return FluxTransformer2DModel(**config)


@torch.no_grad()
def build(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Network:
    """Its weights are those of bf16 whatever the dtype. Its gates are 1: else what a block computes hardly counted."""
    transformer = with_weights(structure(config), device, dtype, torch.bfloat16)
    for name, modulation in transformer.named_modules():
        if name.endswith(MODULATIONS):  # shift, scale and gate, twice where there is a feed-forward apart
            modulation.bias.view(-1, 3, modulation.in_features)[:, 2] = 1.0
    configs: dict[str, Any] = {"transformer": transformer.config, "vae": {"latent_channels": 16}}
    part = family.parts(configs, None, "")[family.DENOISER]
    return Network(part.wrap(transformer), part, family, 1, known, by_maxima)


def opened(model: Path | None, device: torch.device) -> Network:
    """FLUX at its full size, or a small one where ``model`` names a UNet of another size too."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return build(SMALL if model else DEV, device, dtype)


def known(size: int) -> Inputs:
    """Time, guidance, and where the tokens are: a token is 16 by 16 pixels."""
    places = torch.arange(size // 16, dtype=torch.float32)
    return {
        "timestep": torch.tensor([TIME]),
        "guidance": torch.tensor([GUIDANCE]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), places, places),
        "txt_ids": torch.zeros(family.TOKENS, 3),
    }


def by_maxima(network: Network, statistics: Statistics, recipe: Recipe) -> Assignment:
    """Every range the largest magnitude, found where the weights are, for a recipe that asks for no more.

    ``derive`` says the same and rates every layer on the processor besides: 10 s for 12288 by 3072 weights on one
    core, of which there are 230 times as many.
    """
    assert recipe.smoothing == "none" and recipe.observer == "min_max" and not recipe.per_channel, recipe
    found = {}
    for name, role in network.family.layer_roles(network.inner).items():
        weight, reason = network.inner.get_parameter(f"{name}.weight"), reason_kept(role, recipe.quant_level)
        found[name] = LayerAssignment(name, role, tuple(weight.shape), reason=reason)
        if reason is None:
            formats = recipe.formats_of(role)
            found[name] = replace(
                found[name],
                format=formats.weight,
                activation_format=formats.activation,
                weight_amax=weight.abs().amax().float().view(1),
                activation_amax=statistics.layers[name].amax.max().item(),
            )
    return found
