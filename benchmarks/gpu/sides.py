"""The sides of the table: SDXL's UNet, and FLUX's transformer, in every way that is timed, and what each way costs.

Scales come from one real pass over random inputs. Each side is an engine as quantize.py opens it.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.engines.base import Engine
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled
from sd_quant.models.sdxl import FAMILY as family
from sd_quant.models.sdxl import unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, TextShape, build_modules, unet_config
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.simulation.native import (
    PRODUCTS,
    Products,
    aligned_scaled_mm,
    dequantized_mm,
    kernel_convolution,
    kernel_linear,
    with_native_layers,
)

from . import flux
from .network import Inputs, Network, empty, fill, inputs_of, statistics_of, with_weights
from .scales import Assignment, load

INT8, FP8 = Pair("int8", "int8"), Pair("fp8", "fp8")
OF_INT8 = Recipe(3.0, 0.8, collect_method="min-max", shift=True, enable=Enable(INT8, INT8, None))
OF_FP8 = Recipe(3.0, None, collect_method="min-max", enable=Enable(FP8, FP8, "fp8"), per_channel=False,
                smoothing="none")  # fmt: skip
RECIPES = {  # as conf/quantize has them; one step is calibrated, so its largest is its mean
    "int8 level 3": OF_INT8,
    "fp8 level 3": OF_FP8,
    "fp8 level 3, scales per row": replace(OF_FP8, per_channel=True),
    **{f"int8 level {level:g}": replace(OF_INT8, quant_level=level) for level in (2.5, 1.0)},
    **{f"fp8 level {level:g}": replace(OF_FP8, quant_level=level) for level in (2.5, 1.0, 4.0)},
}
GUIDANCE = 8.0  # of a loop
FASTEST = "max-autotune-no-cudagraphs"  # graphs are recorded by ``Replayed``, around everything


SIMULATED = {fmt: Products(dequantized_mm, None) for fmt in ("INT8", "FLOAT8E4M3FN")}
PRODUCTS_OF: dict[str, Mapping[str, Products]] = {  # beside the device's own
    "simulated": SIMULATED,
    "torch's": {"FLOAT8E4M3FN": Products(aligned_scaled_mm, None)},
    "the kernel's": {"FLOAT8E4M3FN": Products(kernel_linear, kernel_convolution)},
}


@dataclass(frozen=True)
class Side:
    """One way to compute the network; without a recipe in the baseline's precision."""

    name: str
    recipe: str | None = None  # a name in RECIPES
    network: str = "sdxl"  # a name in NETWORKS
    products: str | None = None  # a name in PRODUCTS_OF; None: the device's own
    blocks: bool = True  # compiled block by block; False: as a whole
    eager: bool = False
    mode: str | None = None  # torch.compile's


COMPILED = {"sdxl": Side("fp16 compiled"), "flux": Side("flux bf16 compiled", network="flux")}  # the baselines
EAGER = {"sdxl": Side("fp16 eager", eager=True), "flux": Side("flux bf16 eager", network="flux", eager=True)}
SIDES = {
    side.name: side
    for side in (
        *COMPILED.values(),
        *EAGER.values(),
        Side("fp16 compiled as a whole, max-autotune", blocks=False, mode=FASTEST),
        *(Side(name, name) for name in RECIPES),
        Side("flux fp8 level 3", "fp8 level 3", "flux"),
        Side("flux fp8 level 3, eager", "fp8 level 3", "flux", eager=True),
        # other ways to the numbers of level 3, to know which is fastest on this machine
        *(Side(f"{fmt} level 3, max-autotune", f"{fmt} level 3", mode=FASTEST) for fmt in ("fp8", "int8")),
        *(Side(f"fp8 level 3, {way} products", "fp8 level 3", products=way) for way in ("torch's", "the kernel's")),
    )
}


# ------------------------------------------------------------------------------------------------------- the network


@torch.no_grad()
def build(config: dict, device: torch.device, dtype: torch.dtype) -> Network:
    """The UNet of a NeMo config. Its weights are those of fp16 whatever the dtype."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**unet_config(config))
    part = unet_part(unet.config, CONTEXT_TOKENS, "nemo")
    module = part.wrap(with_weights(unet, device, dtype, torch.float16))
    return Network(module, part, family, 2, known, assignment_of, loop_of)  # two samples, for guidance


def opened(model: Path | None, device: torch.device) -> Network:
    """SDXL's own, or that of the config ``model``."""
    return build(config_of(model), device, torch.float16 if device.type == "cuda" else torch.float32)


def config_of(model: Path | None) -> dict:
    return yaml.safe_load(model.read_text("utf-8")) if model else sdxl_base_config()


def known(size: int) -> Inputs:
    return {"timesteps": torch.full((2,), 500.0)}


NETWORKS = {"sdxl": opened, "flux": flux.opened}  # as sides name them


# ------------------------------------------------------------------------------------------------------ assignments


def assignment_of(network: Network, statistics: Statistics, recipe: Recipe) -> Assignment:
    """Derived on the processor, as everywhere."""
    unet = network.inner
    roles = family.layer_roles(unet)

    def bias_of(name: str) -> Tensor | None:
        bias = unet.get_submodule(name).bias
        return None if bias is None else bias.cpu().float()

    derived = derive(
        roles, lambda name: unet.get_parameter(f"{name}.weight").cpu().float(), statistics.layers, recipe,
        family.shared_inputs(roles), (), family.attentions(unet) if recipe.quant_level >= 4 else {}, bias_of=bias_of,
    )  # fmt: skip
    return moved(derived, network.device)


def moved(assignment: Mapping[str, LayerAssignment], device: torch.device) -> Assignment:
    """To where the weights are."""

    def layer_there(layer: LayerAssignment) -> LayerAssignment:
        found = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(layer, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})

    return {name: layer_there(layer) for name, layer in assignment.items()}


class Assignments:
    """The assignments of a network by the names of recipes: from a file, or derived when one is first asked for."""

    def __init__(self, network: Network, size: int, path: Path | None):
        self.network, self.size, self.path = network, size, path
        self.found: dict[str, Assignment] = {}
        self.statistics: Statistics | None = None
        self.derived: list[str] = []  # because the file has them not

    def __getitem__(self, name: str) -> Assignment:
        if name not in self.found:
            recipe = RECIPES[name]
            kept = load(self.path, name, recipe, self.network.inner) if self.path else None
            if kept is None:
                self.derived.append(name)
                self.statistics = self.statistics or statistics_of(self.network, inputs_of(self.network, 1, self.size))
                kept = self.network.assign(self.network, self.statistics, recipe)
            self.found[name] = kept
        return self.found[name]


# ------------------------------------------------------------------------------------------------------------- sides


def network_of(network: Network, side: Side, assignments: Mapping[str, Assignment]) -> nn.Module:
    """The module of a side, not yet compiled."""
    device, inner = network.device, copy.deepcopy(network.inner)
    if side.recipe is not None:
        products = PRODUCTS_OF[side.products] if side.products else PRODUCTS[device.type]
        inner = with_native_layers(inner, assignments[side.recipe], device, products)
    return network.part.wrap(inner)


def compiled_as(side: Side, module: nn.Module) -> nn.Module:
    """``module`` as its side is compiled, in place."""
    if not side.eager and side.blocks:
        compiled(module, side.mode)
    elif not side.eager:
        module.compile(dynamic=False, mode=side.mode)
    return module


def fast(engine: TorchEngine) -> Engine:
    """Replayed where there is a GPU."""
    return Replayed(engine) if engine.device.type == "cuda" else engine


# ---------------------------------------------------------------------------------------------------------- pictures


def loop_of(engine: Engine, inputs: Inputs, steps: int) -> Callable[[], Tensor]:
    """Guidance and Euler's steps around the calls, which end with the latents."""
    from diffusers import EulerDiscreteScheduler

    scheduler, x = EulerDiscreteScheduler(), inputs["x"]

    def run() -> Tensor:
        scheduler.set_timesteps(steps, device=x.device)
        latents = torch.randn_like(x[: len(x) // 2]) * scheduler.init_noise_sigma
        for timestep in scheduler.timesteps:
            given = {
                "x": scheduler.scale_model_input(torch.cat([latents, latents]), timestep),
                "timesteps": timestep.expand(len(x)),
            }
            unconditional, conditional = engine(**inputs | given)["out"].to(x).chunk(2)
            latents = scheduler.step(torch.lerp(unconditional, conditional, GUIDANCE), timestep, latents)[0].to(x)
        return latents

    return run


def others_of(config: dict, clip1: TextShape, clip2: TextShape, device: torch.device, dtype: torch.dtype):
    """The two text encoders and the VAE, which a picture takes beside the UNet."""
    with torch.device("meta"):
        modules = build_modules(config, clip1, clip2)
    del modules["unet"]
    with torch.no_grad():
        return {name: fill(with_buffers(empty(module, device, dtype))) for name, module in modules.items()}


def with_buffers(module: nn.Module) -> nn.Module:
    """Restore the numbers of positions, which a module of the meta device has lost."""
    for name, buffer in module.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
    return module
