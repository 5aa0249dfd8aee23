"""Small transformers whose attention or modulations show every fault: large biases, uneven norms, dual attention in
3.5's, positions far apart in Flux and half of the text masked in PixArt."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.models import flux, pixart, sd3
from sd_quant.models.family import Family
from sd_quant.models.parts import Contract, axes
from sd_quant.models.roles import MODULATIONS
from sd_quant.models.transformer import TransformerPart
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import LayerStatistics

from .layers import sample_of
from .zoo.families import redraw

CHANNELS, WIDTH, TEXT_TOKENS, CALLS = 16, 64, 20, 2


def transformer(normed: bool) -> diffusers.SD3Transformer2DModel:
    """Two blocks of two heads, the second without an output of the text; ``normed``: as 3.5 has it."""
    torch.manual_seed(0)
    made = diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2, num_attention_heads=2,
        attention_head_dim=WIDTH // 2, caption_projection_dim=WIDTH, joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH, pos_embed_max_size=24, qk_norm="rms_norm" if normed else None,
        dual_attention_layers=(0,) if normed else (),
    )  # fmt: skip
    return uneven(made)


def uneven(network: nn.Module) -> Any:
    """The network with other weights, large biases in its attentions and gains of their norms from 0.5 to 2."""
    redraw(network)
    for name, parameter in network.named_parameters():
        if ".attn" in name and name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif ".norm_" in name and ".attn" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2)
    return network.eval().requires_grad_(False)


def flux_transformer() -> diffusers.FluxTransformer2DModel:
    """A block of two streams and one of one, each of two heads."""
    torch.manual_seed(0)
    return uneven(diffusers.FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=WIDTH // 2,
        axes_dims_rope=(8, 12, 12), joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
    ))  # fmt: skip


def pixart_transformer() -> diffusers.PixArtTransformer2DModel:
    torch.manual_seed(0)
    return uneven(diffusers.PixArtTransformer2DModel(
        sample_size=8, in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2, num_attention_heads=2,
        attention_head_dim=WIDTH // 2, cross_attention_dim=WIDTH, caption_channels=WIDTH, norm_num_groups=8,
    ))  # fmt: skip


@dataclass(frozen=True)
class Joint:
    network: nn.Module
    family: Family
    wrap: Callable[[nn.Module], nn.Module]
    contract: Contract
    statistics: dict[str, LayerStatistics]  # of all rows that ``inputs(0)``, ``inputs(1)`` and so on bring

    def part(self) -> nn.Module:
        return self.wrap(copy.deepcopy(self.network))

    def inputs(self, seed: int) -> dict[str, Tensor]:
        return inputs_of(self.contract, seed)

    def rows(self, fmt: str, level: float = 4.0) -> dict[str, LayerAssignment]:
        pair = Pair(fmt, fmt)
        return self.derived(Recipe(level, 0.8, enable=Enable(pair, pair, fmt), per_channel=fmt == "int8"))

    def derived(self, recipe: Recipe, **options: Any) -> dict[str, LayerAssignment]:
        """By ``derive``, whose further arguments are ``options``."""
        family, parameters = self.family, self.network.state_dict()
        roles = family.layer_roles(self.network)
        given = {
            "attentions": family.attentions(self.network), "bias_of": lambda name: parameters.get(f"{name}.bias"),
        }  # fmt: skip
        inputs = family.shared_inputs([name for name, role in roles.items() if role != "conv"])
        weight_of = lambda name: parameters[f"{name}.weight"]  # noqa: E731
        return derive(roles, weight_of, self.statistics, recipe, inputs, **given | options)


def inputs_of(contract: Contract, seed: int) -> dict[str, Tensor]:
    """Random ones. Tokens of Flux's images are anywhere in 64 x 64, and PixArt reads half of the second text."""
    random = torch.Generator().manual_seed(seed)
    shapes = contract.shapes(**axes(2, 64, 64))
    found = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    found["timestep"] = torch.full((2,), 500.0)
    if "img_ids" in found:
        places = torch.randint(64, (len(found["img_ids"]), 2), generator=random).float()
        found |= {"img_ids": F.pad(places, (1, 0)), "txt_ids": torch.zeros_like(found["txt_ids"])}
        found |= {"timestep": torch.full((2,), 0.5)}
    if "encoder_attention_mask" in found:
        found["encoder_attention_mask"] = torch.ones(2, TEXT_TOKENS)
        found["encoder_attention_mask"][1, TEXT_TOKENS // 2 :] = 0
    return found


PIXART_INPUTS = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "timestep")
MADE: dict[str, tuple[Callable[[], nn.Module], Family, Callable[[nn.Module], nn.Module]]] = {
    "sd3": (lambda: transformer(False), sd3.FAMILY, TransformerPart),
    "sd35": (lambda: transformer(True), sd3.FAMILY, TransformerPart),
    "flux": (flux_transformer, flux.FAMILY, flux.with_rotary),
    "pixart": (pixart_transformer, pixart.FAMILY, partial(pixart.with_positions, PIXART_INPUTS)),
}


@cache
def calibrated(name: str, modulated: bool = False) -> Joint:
    """A network of ``MADE``; ``modulated``: its modulations make some channels larger than others."""
    make, family, wrap = MADE[name]
    network = make()
    for layer, module in network.named_modules():
        if modulated and layer.endswith(MODULATIONS):
            module.bias.normal_(std=2.0)
    configs = {"transformer": network.config, "vae": {"latent_channels": CHANNELS}}
    contract = family.parts(configs, TEXT_TOKENS, "diffusers")["transformer"].contract
    fewer = dict(contract.inputs) | {"encoder_hidden_states": ("batch", TEXT_TOKENS, WIDTH)}
    contract = replace(contract, inputs=fewer)
    part = wrap(copy.deepcopy(network))
    names = [name for name, role in family.layer_roles(network).items() if role != "excluded"]
    calls = (inputs_of(contract, seed) for seed in range(CALLS))
    run = lambda: [part(**inputs) for inputs in calls]  # noqa: E731
    return Joint(network, family, wrap, contract, linear_statistics(part.transformer, names, run))


def linear_statistics(network: nn.Module, names: list[str], call: Callable[[], Any]) -> dict[str, LayerStatistics]:
    """Collect the input ranges of these linears, and all rows, while ``call`` runs the network."""
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
        name: LayerStatistics("linear", x.abs().amax(0, keepdim=True), sample_of(x.half())) for name, x in rows.items()
    }
