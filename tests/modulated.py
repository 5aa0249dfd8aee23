"""Tiny transformers whose modulations make the inputs of attention and feed-forward, and assignments of them."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from sd_quant.models import flux, sd3
from sd_quant.models.roles import MODULATIONS
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import LayerStatistics, Sample

from .zoo.families import redraw

WIDTH, TEXT, POOLED, TOKENS = 64, 48, 32, 7


def sd3_network(**options: Any) -> diffusers.SD3Transformer2DModel:
    """Two blocks, of which the last has no text behind its attention."""
    return diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=4, attention_head_dim=16,
        caption_projection_dim=WIDTH, joint_attention_dim=TEXT, pooled_projection_dim=POOLED, pos_embed_max_size=24,
        qk_norm="rms_norm", **options,
    )  # fmt: skip


def sd35_network() -> diffusers.SD3Transformer2DModel:
    """Its first block has a second attention."""
    return sd3_network(dual_attention_layers=(0,))


def flux_network() -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=4, attention_head_dim=16,
        axes_dims_rope=(4, 6, 6), joint_attention_dim=TEXT, pooled_projection_dim=POOLED,
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {  # and their families
    "sd3": (sd3_network, sd3.FAMILY),
    "sd35": (sd35_network, sd3.FAMILY),
    "flux": (flux_network, flux.FAMILY),
}


def made(name: str) -> nn.Module:
    """A network of ``NETWORKS`` whose modulations reach the outputs, and make some channels larger than others."""
    torch.manual_seed(0)
    network = NETWORKS[name][0]().eval().requires_grad_(False)
    redraw(network)
    for layer, module in network.named_modules():
        if layer.endswith(MODULATIONS):
            module.bias.normal_(std=2.0)
    return network


def run(network: nn.Module, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
    text = {"encoder_hidden_states": draw(2, TOKENS, TEXT), "pooled_projections": draw(2, POOLED)}
    time = torch.tensor([0.5, 0.9])
    if isinstance(network, diffusers.SD3Transformer2DModel):
        return network(draw(2, 4, 8, 8), timestep=1000 * time, **text, return_dict=False)[0]
    places = {"img_ids": draw(16, 3).round(), "txt_ids": torch.zeros(TOKENS, 3)}
    return network(draw(2, 16, 16), timestep=time, **text, **places, return_dict=False)[0]


def linear_statistics(network: nn.Module, names: list[str], call: Callable[[], Any]) -> dict[str, LayerStatistics]:
    """What these linears read while ``call`` runs the network: ranges, and all rows."""
    read: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        network.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: read[name].append(inputs[0].flatten(0, -2))
        )
        for name in names
    ]
    call()
    for hook in hooks:
        hook.remove()
    rows = {name: torch.cat(inputs) for name, inputs in read.items()}
    return {
        name: LayerStatistics("linear", x.abs().amax(0, keepdim=True), Sample(x.half(), torch.arange(len(x)).double()))
        for name, x in rows.items()
    }


def assigned(name: str, network: nn.Module, recipe: Recipe, **options: Any) -> Mapping[str, LayerAssignment]:
    """The network's rows by ``derive``, whose further arguments are ``options``."""
    family = NETWORKS[name][1]
    roles = family.layer_roles(network)
    linears = [layer for layer, role in roles.items() if role != "conv"]
    watched = [layer for layer in linears if roles[layer] != "excluded"]
    statistics = linear_statistics(network, watched, lambda: run(network))
    given = {"bias_of": lambda layer: network.get_submodule(layer).bias, **options}
    weight_of = lambda layer: network.get_submodule(layer).weight  # noqa: E731
    return derive(roles, weight_of, statistics, recipe, family.shared_inputs(linears), **given)
