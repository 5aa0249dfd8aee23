"""What a part is: one network of a pipeline as it is exported, named tensors in, named tensors out.

The wrapped module is the framework baseline, the source of the exported graph and the reference of every parity check,
so the three cannot drift apart. Which parts a family has, and how each is called, stands in the family's own file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LATENT_FACTOR = 8  # pixels per latent, of every family's autoencoder


@dataclass(frozen=True, slots=True)
class Contract:
    """Names, shapes and dtypes of one part. Strings in a shape are dynamic axes, as ``axes`` has them."""

    inputs: dict[str, tuple]
    outputs: tuple[str, ...]
    dtypes: dict[str, torch.dtype]
    weights: torch.dtype

    def shapes(self, **axes: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(axes.get(axis, axis) for axis in shape) for name, shape in self.inputs.items()}


def axes(batch: int, width: int, height: int) -> dict[str, int]:
    """Sizes of all dynamic axes for pictures of so many pixels; a transformer's token is two latents wide and high."""
    rows, columns = height // LATENT_FACTOR, width // LATENT_FACTOR
    return {"batch": batch, "height": rows, "width": columns, "image_tokens": (rows // 2) * (columns // 2)}


def as_inputs(contract: Contract, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The contract's inputs among the arguments of a pipeline's call; a scalar becomes one, or one per sample."""
    tensors = {name: torch.as_tensor(given[name]) for name in contract.inputs}
    samples = len(next(iter(tensors.values())))
    for name, shape in contract.inputs.items():
        if tensors[name].ndim < len(shape):
            tensors[name] = tensors[name].reshape(1).expand(samples if shape[0] == "batch" else 1)
    return tensors


def first_output(outputs: Mapping[str, Tensor]) -> tuple[Tensor]:
    return (next(iter(outputs.values())),)


@dataclass(frozen=True)
class Part:
    """``component``: diffusers' name of the network in the pipeline; ``prefix`` stands before diffusers' names of its
    weights in the graph. ``wrap`` makes the part of the network, which it may change. ``arguments`` turns the arguments
    of a pipeline's call, by name, into inputs, and ``answer`` the outputs into what the pipeline expects.
    """

    component: str
    prefix: str
    contract: Contract
    wrap: Callable[[nn.Module], nn.Module]
    answer: Callable[[Mapping[str, Tensor]], Any] = first_output
    arguments: Callable[[Contract, Mapping[str, Any]], dict[str, Tensor]] = as_inputs


def wrapped(parts: Mapping[str, Part], networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Every part around a pipeline's networks."""
    return {name: part.wrap(networks[part.component]) for name, part in parts.items()}


class VaePart(nn.Module):
    """The decoder, of latents that are already divided by the scaling factor."""

    def __init__(self, vae: nn.Module):
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(z if self.post_quant_conv is None else self.post_quant_conv(z))


def vae_part(channels: int) -> Part:
    """z [B,C,H/8,W/8] to dec [B,3,H,W], fp32, because SDXL's overflows in fp16. ``Pipeline.decode`` calls it."""
    single = torch.float32
    contract = Contract({"z": ("batch", channels, "height", "width")}, ("dec",), {"z": single}, single)
    return Part("vae", "", contract, VaePart)


@dataclass(frozen=True, slots=True)
class SharedInput:
    """Linears that read one tensor, and the module whose first outputs are that tensor's channels.

    ``producer`` is None when nothing can take a factor per channel: a residual stream, an input of the network.
    """

    readers: tuple[str, ...]
    producer: str | None = None


@dataclass(frozen=True)
class PipelineAdapter:
    """How a family draws: ``pipe`` is its diffusers pipeline, whose networks are engines.

    ``denoiser`` is its network among them. ``encode`` turns batches of prompts into what ``pipe`` takes instead, with
    or without the half for guidance; ``pack`` and ``unpack`` (of a height and width) stand between latents [B,C,h,w]
    and what ``pipe`` calls latents. ``tokenizer`` tells how long a prompt is for the shortest of the text encoders.
    """

    pipe: Any
    denoiser: Any
    encode: Callable[[Sequence[list[str]], bool], list[dict[str, Any]]]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, int, int], Tensor]
    tokenizer: Any
