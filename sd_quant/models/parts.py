"""Parts: the networks of a pipeline as they are exported, each with named input and output tensors.

The same wrapped module is the baseline, the source of the exported graph and the reference of every parity check, so
that the three cannot drift apart. Each family's module says which parts it has and how they are called.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.errors import SdQuantError
from sd_quant.models import EXPORTED, LATENT_FACTOR, STORED, VAE_ENCODER, Dtypes

ADDED = ("text_embeds", "time_ids", "resolution", "aspect_ratio")  # inputs that networks take in added_cond_kwargs


@dataclass(frozen=True, slots=True)
class Contract:
    """Names, shapes and dtypes of the tensors that one part takes and returns."""

    inputs: dict[str, tuple]  # shape of each input; a string is a dynamic axis, named as in ``axes``
    outputs: tuple[str, ...]
    dtypes: dict[str, torch.dtype]  # of the inputs
    weights: torch.dtype
    latents: int | None = None  # most rows and columns of latents; None: any number
    example: Mapping[str, int] | None = None  # sizes of the dynamic axes to trace with; None: those of an image
    axes: tuple[tuple[str, "Axis"], ...] = ()  # formulas of dynamic axes beside those of the function ``axes``

    @property
    def batched(self) -> list[str]:
        """Names of the inputs whose first axis is the batch."""
        return [name for name, shape in self.inputs.items() if shape[:1] == ("batch",)]

    def in_dtype(self, weights: torch.dtype) -> "Contract":
        """Return the contract with weights in this dtype; inputs in the old weights' dtype change to it, too."""
        own = {name: weights if dtype == self.weights else dtype for name, dtype in self.dtypes.items()}
        return replace(self, weights=weights, dtypes=own)

    def shapes(self, **axes: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs with these sizes for the dynamic axes."""
        return {name: tuple(axes.get(axis, axis) for axis in shape) for name, shape in self.inputs.items()}

    def shapes_for(self, batch: int, width: int, height: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs for ``batch`` samples of images of ``width`` by ``height`` pixels."""
        own = {name: axis.size(batch, width, height) for name, axis in self.axes}
        return self.shapes(**axes(batch, width, height) | own)


@dataclass(frozen=True, slots=True)
class Axis:
    """Formula of the size of a dynamic axis: ``numerator / denominator * of + offset``."""

    of: str  # a product of ``batch``, ``width`` and ``height``, such as "batch*width*height"; "" for 1
    numerator: int
    denominator: int
    offset: int

    def size(self, batch: int, width: int, height: int) -> int:
        """Return the size for ``batch`` samples of images of ``width`` by ``height`` pixels."""
        known = {"batch": batch, "width": width, "height": height}
        factors = [known[name] for name in self.of.split("*") if name]
        return self.numerator * math.prod(factors) // self.denominator + self.offset


def filled(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a valid input for a call whose result does not matter: ones, or zeros for integers that index a table."""
    is_place = not dtype.is_floating_point and dtype != torch.bool and "mask" not in name
    return torch.zeros(shape, dtype=dtype) if is_place else torch.ones(shape, dtype=dtype)


def half_contract(
    inputs: dict[str, tuple], output: str, single: Collection[str] = (), latents: int | None = None
) -> Contract:
    """Return the contract of a denoiser with fp16 weights and inputs, except the inputs ``single`` in fp32."""
    dtypes = {name: torch.float32 if name in single else torch.float16 for name in inputs}
    return Contract(inputs, (output,), dtypes, torch.float16, latents)


def axes(batch: int, width: int, height: int) -> dict[str, int]:
    """Return the sizes of all dynamic axes for images of ``width`` by ``height`` pixels.

    ``height`` and ``width`` are in latents; ``height_2``, ``width_2`` and so on are divided by 2, 4, 8 and 16, for a
    UNet's lower levels; ``image_height`` and ``image_width`` are in pixels; an image token is two by two latents.
    """
    rows, columns = height // LATENT_FACTOR, width // LATENT_FACTOR
    latents = {"batch": batch, "height": rows, "width": columns, "image_tokens": (rows // 2) * (columns // 2)}
    halved = {
        f"{name}_{by}": -(-size // by) for name, size in (("height", rows), ("width", columns)) for by in (2, 4, 8, 16)
    }
    return latents | halved | {"image_height": height, "image_width": width}


def taken(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Select ``names`` from ``given``, the arguments with which a pipeline calls a network.

    Includes ``added_cond_kwargs``. Raises SdQuantError for other arguments that are tensors, or neither True nor falsy.
    """
    flat = {**given, **(given.get("added_cond_kwargs") or {}), "added_cond_kwargs": None}
    for name in flat.keys() - set(names):
        value = flat[name]
        if isinstance(value, Tensor) or (value and value is not True):
            shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise SdQuantError(
                f"the pipeline calls a network with {name} ({shown}), expected {', '.join(names)} alone: the exported "
                "graph has no such input; open the folder with model=diffusers, which observes all inputs"
            )
    return {name: flat[name] for name in names}


def as_inputs(contract: Contract, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the contract's inputs from the arguments of a pipeline's call of its network.

    A scalar becomes [B], or [1] for an input without batch axis. Raises SdQuantError for arguments that are no input.
    """
    tensors = {name: torch.as_tensor(value) for name, value in taken(given, contract.inputs).items()}
    samples = len(next(iter(tensors.values())))
    for name, shape in contract.inputs.items():
        if tensors[name].ndim < len(shape):
            tensors[name] = tensors[name].reshape(1).expand(samples if shape[0] == "batch" else 1)
    return tensors


def first_output(outputs: Mapping[str, Tensor]) -> tuple[Tensor]:
    """Return the first output as a tuple, which pipelines expect of a call with ``return_dict=False``."""
    return (next(iter(outputs.values())),)


@dataclass(frozen=True)
class Part:
    """Export of one network: its inputs and outputs, and the conversion of a pipeline's call to a call of the graph."""

    component: str  # diffusers' name of the network in the pipeline
    prefix: str  # of the weights' names in the graph, before diffusers' names
    contract: Contract
    wrap: Callable[[nn.Module], nn.Module]  # network -> the module that is traced; it may change the network
    answer: Callable[[Mapping[str, Tensor]], Any] = first_output  # outputs by name -> what the pipeline expects
    # (contract, arguments of the pipeline's call by name) -> inputs by name
    arguments: Callable[[Contract, Mapping[str, Any]], dict[str, Tensor]] = as_inputs
    identity: str = ""  # further text for the graph's cache key, where the contract does not determine the graph
    refused: str | None = None  # why it is not exported, so that torch computes it; None: it is exported
    excluded: tuple[str, ...] = ()  # layers that stay as they are where its weights are quantized, see ``layer_role``
    method: str = "forward"  # of the network, which the pipeline calls
    in_steps: bool = False  # whether it runs in each denoising step, on the denoiser's batch, for the denoiser


def exported(parts: Mapping[str, Part]) -> list[str]:
    """Return the names of the parts that are exported; the others are computed by torch."""
    return [name for name, part in parts.items() if part.refused is None]


def with_dtypes(parts: dict[str, Part], dtypes: Dtypes, components: Mapping[str, Any]) -> dict[str, Part]:
    """Return the parts with weights in ``dtypes``; ``components`` are the checkpoint's weights (``files.tensors``).

    A family's own dtype is fp16, or fp32 where fp16 overflows. This dtype stays unless another is stated, also where
    the checkpoint stores bf16: not every runtime supports bf16, and bf16 graphs are less exact.
    """
    found = {}
    for name, part in parts.items():
        stated, dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes, part.contract.weights
        if stated == STORED:
            stored = components[part.component].parameters.values()
            bf16 = sum(math.prod(each.shape) for each in stored if each.dtype == torch.bfloat16)
            dtype = torch.bfloat16 if 2 * bf16 > sum(math.prod(each.shape) for each in stored) else dtype
        elif stated is not None:
            dtype = getattr(torch, EXPORTED[stated])
        found[name] = part if dtype == part.contract.weights else replace(part, contract=part.contract.in_dtype(dtype))
    return found


def network_in(part: Part, module: nn.Module) -> nn.Module:
    """Return the network inside the part's wrapped ``module``; layer names in assignments are relative to it."""
    return module.get_submodule(part.prefix.removesuffix("."))


def wrapped(parts: Mapping[str, Part], networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the module that each part exports, by part name; ``networks`` are by component."""
    return {name: part.wrap(networks[part.component]) for name, part in parts.items()}


class NamedForward:
    """A forward with parameters called ``names`` in its signature; it passes them to ``module.called`` as a mapping."""

    def __init__(self, module: Any, names: Collection[str]):
        self.module = module
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    @property
    def __code__(self) -> Any:  # torch.export asks where a forward is defined
        return type(self.module).called.__code__

    def __call__(self, *arguments: Tensor, **named: Tensor) -> Any:
        return self.module.called(self.__signature__.bind(*arguments, **named).arguments)


class NamedPart(nn.Module):
    """A network of diffusers as submodule ``name``, whose forward takes ``inputs`` by diffusers' names."""

    def __init__(self, name: str, inputs: Collection[str], network: nn.Module):
        super().__init__()
        self.add_module(name, network)
        self.name, self.forward = name, NamedForward(self, inputs)

    def outputs(self, tensors: Mapping[str, Tensor]) -> tuple:
        added = {name: tensors[name] for name in ADDED if name in tensors}
        if "time_ids" in added:  # diffusers concatenates the two, so they need one dtype
            added["text_embeds"] = added["text_embeds"].to(added["time_ids"].dtype)
        own = {name: tensor for name, tensor in tensors.items() if name not in added}
        if "conditioning_scale" in own:  # multiplies what a ControlNet computes
            own["conditioning_scale"] = own["conditioning_scale"].to(own["sample"].dtype)
        return self.get_submodule(self.name)(**own, added_cond_kwargs=added or None, return_dict=False)

    def called(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.outputs(tensors)[0]


class VaePart(nn.Module):
    """The autoencoder's decoder, whose latents are already divided by the scaling factor."""

    def __init__(self, vae: nn.Module):
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(z if self.post_quant_conv is None else self.post_quant_conv(z))


def vae_part(channels: int) -> Part:
    """Return the decoder's part, z [B, channels, H/8, W/8] -> dec [B, 3, H, W], in fp32: SDXL's overflows in fp16."""
    single = torch.float32
    contract = Contract({"z": ("batch", channels, "height", "width")}, ("dec",), {"z": single}, single)
    excluded = ("conv_in", "conv_out", "post_quant_conv")
    return Part("vae", "", contract, VaePart, method="decode", excluded=excluded)


class VaeEncoderPart(nn.Module):
    """The autoencoder's encoder, which returns mean and logarithm of the variance of each latent, unscaled."""

    def __init__(self, vae: nn.Module):
        super().__init__()
        self.encoder, self.quant_conv = vae.encoder, vae.quant_conv

    def forward(self, x: Tensor) -> Tensor:
        moments = self.encoder(x)
        return moments if self.quant_conv is None else self.quant_conv(moments)


def encoded(outputs: Mapping[str, Tensor]) -> Any:
    """Return ``moments`` in the form of diffusers' autoencoder: the distribution of the latents of an image."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(outputs["moments"]))


def with_encoder(parts: dict[str, Part], wanted: bool) -> dict[str, Part]:
    """Add the autoencoder's encoder to the parts as the last part if ``wanted``.

    x [B, 3, H, W] from -1 to 1 -> moments [B, 2 C, H/8, W/8] of C latent channels, in fp32 like the decoder.
    """
    single = torch.float32
    contract = Contract({"x": ("batch", 3, "image_height", "image_width")}, ("moments",), {"x": single}, single)
    encoder = Part("vae", "", contract, VaeEncoderPart, encoded, method="encode")
    return parts | {VAE_ENCODER: encoder} if wanted else parts


@dataclass(frozen=True, slots=True)
class SharedInput:
    """A tensor that one or more linears read."""

    readers: tuple[str, ...]  # names of these linears
    # The module that can absorb a factor for each channel: its first outputs are the tensor's channels, or it modulates
    # the tensor. None without such a module: the tensor is a residual stream or an input of the network.
    producer: str | None = None
    text: bool = False  # whether it is computed from the prompt alone; then its first token differs from all the rest
    # If the tensor is ``norm * (1 + scale) + shift`` and the producer is a linear that computes both: the indices (of
    # the shift, of the scale) among the producer's output chunks, each as wide as the tensor. None: no modulation.
    modulation: tuple[int, int] | None = None
    one_row: bool = False  # whether it is one row an image, such as the input of a modulation, instead of tokens

    def rows(self, width: int) -> tuple[slice, ...]:
        """Return slices of the producer's output channels that factors of this tensor's ``width`` channels multiply."""
        return tuple(slice(chunk * width, (chunk + 1) * width) for chunk in self.modulation or (0,))


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention whose matrix products can be quantized."""

    width: int  # channels of one head
    rotary: bool = False  # whether a token's position rotates neighbouring pairs of channels of query and key
    normed: bool = False  # whether an RMSNorm of each head follows the linears of query and key


def text_readers(inputs: Iterable[SharedInput]) -> set[str]:
    """Return the linears whose input is computed from the prompt alone."""
    return {name for shared in inputs if shared.text for name in shared.readers}
