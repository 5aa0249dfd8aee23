"""A small Stable Diffusion 3 whose attention shows every fault: large biases, uneven norms, dual attention in 3.5's."""

import copy
from dataclasses import dataclass, replace
from functools import cache

import diffusers
import torch
from torch import Tensor

from sd_quant.models.parts import Contract, axes
from sd_quant.models.sd3 import FAMILY
from sd_quant.models.transformer import TransformerPart
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import LayerStatistics

from .modulated import linear_statistics
from .pipelines import redraw

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
    redraw(made)
    for name, parameter in made.named_parameters():
        if ".attn" in name and name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif ".norm_" in name and ".attn" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2)
    return made.eval().requires_grad_(False)


@dataclass(frozen=True)
class Joint:
    network: diffusers.SD3Transformer2DModel
    contract: Contract
    statistics: dict[str, LayerStatistics]  # of all rows that ``inputs(0)``, ``inputs(1)`` and so on bring

    def part(self) -> TransformerPart:
        return TransformerPart(copy.deepcopy(self.network))

    def inputs(self, seed: int) -> dict[str, Tensor]:
        return inputs_of(self.contract, seed)

    def rows(self, fmt: str, level: float = 4.0) -> dict[str, LayerAssignment]:
        roles, parameters, pair = FAMILY.layer_roles(self.network), self.network.state_dict(), Pair(fmt, fmt)
        recipe = Recipe(level, 0.8, enable=Enable(pair, pair, fmt), per_channel=fmt == "int8")
        return derive(
            roles, lambda name: parameters[f"{name}.weight"], self.statistics, recipe, FAMILY.shared_inputs(roles),
            attentions=FAMILY.attentions(self.network), bias_of=lambda name: parameters.get(f"{name}.bias"),
            gain_of=lambda name: parameters.get(f"{name}.weight"),
        )  # fmt: skip


def inputs_of(contract: Contract, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = contract.shapes(**axes(2, 64, 64))
    found = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return found | {"timestep": torch.full((2,), 500.0)}


@cache
def calibrated(normed: bool) -> Joint:
    network = transformer(normed)
    configs = {"transformer": network.config, "vae": {"latent_channels": CHANNELS}}
    contract = FAMILY.parts(configs, None, "diffusers")["transformer"].contract
    fewer = dict(contract.inputs) | {"encoder_hidden_states": ("batch", TEXT_TOKENS, WIDTH)}
    contract = replace(contract, inputs=fewer)
    part = TransformerPart(network)
    names = [name for name, role in FAMILY.layer_roles(network).items() if role != "excluded"]
    calls = (inputs_of(contract, seed) for seed in range(CALLS))
    return Joint(network, contract, linear_statistics(network, names, lambda: [part(**inputs) for inputs in calls]))
