"""The sides of the table: SDXL's UNet at its full size in every way that is timed, and what each way costs.

Its weights are random, because latency does not depend on them, and the same on every machine, so that an assignment
derived on one holds on another. Scales come from one real pass over random inputs. Each side is an engine as
quantize.py opens it.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, placed
from sd_quant.models.parts import Contract, axes
from sd_quant.models.roles import attention_widths
from sd_quant.models.sdxl import NemoUnetPart, unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, TextShape, build_modules, unet_config
from sd_quant.models.unet import layer_roles, shared_inputs
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.simulation.joined import join_projections
from sd_quant.simulation.native import (
    PRODUCTS,
    NativeLayer,
    Products,
    aligned_scaled_mm,
    int_mm,
    kernel_convolution,
    kernel_linear,
    unfolded_int_mm,
    with_bias,
    with_native_layers,
)

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
TEXT = (".attn2.to_k", ".attn2.to_v")  # the layers that read the text
FASTEST = "max-autotune-no-cudagraphs"  # graphs are recorded by ``Replayed``, around everything


def dequantized(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """The product of the numbers that codes stand for, in fp32: what a recipe means, at no gain."""
    return with_bias((codes.float() @ layer.codes.float().T) * layer.scale, layer).to(dtype)


SIMULATED = {fmt: Products(dequantized, None) for fmt in ("INT8", "FLOAT8E4M3FN")}
PRODUCTS_OF: dict[str, Mapping[str, Products]] = {  # beside the device's own
    "simulated": SIMULATED,
    "torch's": {"INT8": Products(int_mm, unfolded_int_mm), "FLOAT8E4M3FN": Products(aligned_scaled_mm, None)},
    "the kernel's": {fmt: Products(kernel_linear, kernel_convolution) for fmt in ("INT8", "FLOAT8E4M3FN")},
}


@dataclass(frozen=True)
class Side:
    """One way to compute the network; without a recipe in the baseline's precision."""

    name: str
    recipe: str | None = None  # a name in RECIPES
    products: str | None = None  # a name in PRODUCTS_OF; None: the device's own
    rounded_convolutions: bool = False  # convolve dequantized numbers in the baseline's precision
    blocks: bool = True  # compiled block by block; False: as a whole
    eager: bool = False
    mode: str | None = None  # torch.compile's
    channels_last: bool = True
    joined: bool = False  # query, key and value as one product
    text: bool = True  # whether the layers that read the text are quantized
    attention: str | None = None  # the kernel of torch's SDPBackend that is tried first


def variants_of(fmt: str) -> list[Side]:
    """Other ways to the numbers of level 3, to know which is fastest on this machine."""
    recipe = f"{fmt} level 3"
    return [
        Side(f"{recipe}, joined projections", recipe, joined=True),
        Side(f"{recipe}, text in fp16", recipe, text=False),
        Side(f"{recipe}, convolutions rounded", recipe, rounded_convolutions=True),
        Side(f"{recipe}, cuDNN's attention", recipe, attention="CUDNN_ATTENTION"),
        Side(f"{recipe}, max-autotune", recipe, mode=FASTEST),
        Side(f"{recipe}, all of these", recipe, joined=True, text=False, attention="CUDNN_ATTENTION", mode=FASTEST),
        Side(f"{recipe}, torch's products", recipe, products="torch's"),
        Side(f"{recipe}, the kernel's products", recipe, products="the kernel's"),
    ]


BASELINE, EAGER = Side("fp16 compiled"), Side("fp16 eager", eager=True)
SIDES = {
    side.name: side
    for side in (
        BASELINE,
        EAGER,
        Side("fp16 eager, channels first", eager=True, channels_last=False),
        Side("fp16 compiled, cuDNN's attention", attention="CUDNN_ATTENTION"),
        Side("fp16 compiled as a whole, max-autotune", blocks=False, mode=FASTEST),
        *(Side(name, name) for name in RECIPES),
        *variants_of("fp8"),
        *variants_of("int8"),
    )
}


# ------------------------------------------------------------------------------------------------------- the network


def fill(module: nn.Module) -> nn.Module:
    """Give a module that was built on the meta device weights of a device, the same on every device and machine.

    The number of a weight in its tensor, mixed by multiplications and shifts (Mueller's 32-bit hash), is uniform
    between -1 and 1 over the square root of what a row adds up, as torch's own first weights are.
    """
    for salt, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.ndim == 1:
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            parameter.fill_(1.0 if "Norm" in owner and name.endswith("weight") else 0.0)
            continue
        bound, rows = parameter[0].numel() ** -0.5, parameter.view(-1, parameter[0].numel())
        for start in range(0, len(rows), 1024):
            row = torch.arange(start, min(start + 1024, len(rows)), device=parameter.device)
            number = row[:, None] * rows.shape[1] + torch.arange(rows.shape[1], device=parameter.device)
            number = (number + 1_000_003 * salt) & 0xFFFFFFFF
            for _ in range(2):
                number = ((number ^ (number >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
            number = (number ^ (number >> 16)) >> 8  # 24 bits, which fp32 holds exactly
            rows[start : start + 1024] = (number.float() * 2.0**-23 - 1.0) * bound
    return module


def empty(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module of the meta device with room on another, and parameters of this dtype."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.eval().requires_grad_(False).to_empty(device=device)


@torch.no_grad()
def build(config: dict, device: torch.device, dtype: torch.dtype) -> NemoUnetPart:
    """The UNet of a NeMo config. Its weights are those of fp16 whatever the dtype."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**unet_config(config))
    unet = fill(empty(unet, device, dtype))
    for parameter in unet.parameters():
        parameter.copy_(parameter.half())
    return placed(wrapped(unet), device, dtype)


def wrapped(unet) -> NemoUnetPart:
    config = unet.config
    return NemoUnetPart(unet, config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)


def contract_of(part: NemoUnetPart) -> Contract:
    return unet_part(part.unet.config, CONTEXT_TOKENS, "nemo").contract


def inputs_of(part: NemoUnetPart, pictures: int, size: int) -> dict[str, Tensor]:
    """Of one call with guidance, where the network is: the same two samples for each picture, which are calibrated."""
    engine, random = TorchEngine(part, contract_of(part)), torch.Generator().manual_seed(1)
    shapes = contract_of(part).shapes(**axes(2, size, size))
    inputs = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    inputs["timesteps"].fill_(500)
    repeated = {name: torch.cat([tensor] * pictures) for name, tensor in inputs.items()}
    return cast_inputs(engine.inputs, repeated, engine.device)


# ------------------------------------------------------------------------------------------------------ assignments


def statistics_of(part: NemoUnetPart, inputs: dict[str, Tensor]) -> Statistics:
    """Of one picture and one step, both halves of guidance."""
    layers = {
        name: part.unet.get_submodule(name) for name, role in layer_roles(part.unet).items() if role != "excluded"
    }
    with collect(part, layers, range(1), 1, lambda: (0, [0]), draw(layers, range(1), 1, seed=0)) as statistics:
        part(**inputs)
    return statistics


def assignment_of(part: NemoUnetPart, statistics: Statistics, recipe: Recipe) -> Assignment:
    """Derived on the processor, as everywhere."""
    roles = layer_roles(part.unet)

    def bias_of(name: str) -> Tensor | None:
        bias = part.unet.get_submodule(name).bias
        return None if bias is None else bias.cpu().float()

    return derive(
        roles, lambda name: part.unet.get_parameter(f"{name}.weight").cpu().float(), statistics.layers, recipe,
        shared_inputs(roles), (), attention_widths(part.unet) if recipe.quant_level >= 4 else {}, bias_of=bias_of,
    )  # fmt: skip


def moved(assignment: Mapping[str, LayerAssignment], device: torch.device) -> Assignment:
    """To where the weights are."""

    def layer_there(layer: LayerAssignment) -> LayerAssignment:
        found = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(layer, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})

    return {name: layer_there(layer) for name, layer in assignment.items()}


class Assignments:
    """The assignments of a network by the names of recipes: from a file, or derived when one is first asked for."""

    def __init__(self, part: NemoUnetPart, size: int, path: Path | None):
        self.part, self.size, self.path = part, size, path
        self.found: dict[str, Assignment] = {}
        self.statistics: Statistics | None = None
        self.derived: list[str] = []  # because the file has them not

    def __getitem__(self, name: str) -> Assignment:
        if name not in self.found:
            device, recipe = next(self.part.parameters()).device, RECIPES[name]
            kept = load(self.path, name, recipe, self.part.unet) if self.path else None
            if kept is None:
                self.derived.append(name)
                self.statistics = self.statistics or statistics_of(self.part, inputs_of(self.part, 1, self.size))
                kept = moved(assignment_of(self.part, self.statistics, recipe), device)
            self.found[name] = kept
        return self.found[name]


# ------------------------------------------------------------------------------------------------------------- sides


def network_of(part: NemoUnetPart, side: Side, assignments: Mapping[str, Assignment]) -> NemoUnetPart:
    """The network of a side, not yet compiled."""
    device, unet = next(part.parameters()).device, copy.deepcopy(part.unet)
    if side.recipe is not None:
        rows = dict(assignments[side.recipe])
        if not side.text:
            rows = {name: unquantized(row) if name.endswith(TEXT) else row for name, row in rows.items()}
        if side.joined:
            rows = join_projections(unet, rows)
        products = PRODUCTS_OF[side.products] if side.products else PRODUCTS[device.type]
        if side.rounded_convolutions:
            products = {fmt: Products(each.linear, None) for fmt, each in products.items()}
        unet = with_native_layers(unet, rows, device, products)
    if not side.channels_last:
        unet = unet.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return wrapped(unet)


def unquantized(row: LayerAssignment) -> LayerAssignment:
    """The row of a layer that stays in high precision; what it absorbs of the smoothing of others it keeps."""
    return replace(row, format=None, activation_format=None, pre_quant_scale=None, weight_amax=None)


def engine_of(part: NemoUnetPart) -> TorchEngine:
    return TorchEngine(part, contract_of(part))


def compiled_as(side: Side, part: NemoUnetPart) -> NemoUnetPart:
    """``part`` as its side is compiled, in place."""
    if not side.eager and side.blocks:
        compiled(part, side.mode)
    elif not side.eager:
        part.compile(dynamic=False, mode=side.mode)
    return part


def fast(engine: TorchEngine) -> Engine:
    """Replayed where there is a GPU."""
    return Replayed(engine) if engine.device.type == "cuda" else engine


@contextmanager
def attention_of(side: Side) -> Iterator[None]:
    """Within this, torch takes the side's kernel of attention wherever it can."""
    if side.attention is None:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([SDPBackend.__members__[side.attention], *others], set_priority=True):
        yield


# ---------------------------------------------------------------------------------------------------------- pictures


def others_of(config: dict, clip1: TextShape, clip2: TextShape, device: torch.device, dtype: torch.dtype):
    """The two text encoders and the VAE, which a picture takes beside the UNet."""
    with torch.device("meta"):
        modules = build_modules(config, clip1, clip2)
    del modules["unet"]
    with torch.no_grad():
        return {name: fill(with_buffers(empty(module, device, dtype))) for name, module in modules.items()}


def with_buffers(module: nn.Module) -> nn.Module:
    """What a module of the meta device has lost: the numbers of its positions."""
    for name, buffer in module.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
    return module
