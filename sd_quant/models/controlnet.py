"""ControlNets of UNets (Zhang et al. 2023, arXiv:2302.05543): networks that the pipeline calls in each denoising step.

A ControlNet is a part of its own. Its outputs (residuals) are further inputs of the denoiser, under the same names:

| part         | inputs                                                                     | outputs               |
|--------------|----------------------------------------------------------------------------|-----------------------|
| `controlnet` | sample, timestep, encoder_hidden_states and SDXL's text_embeds, time_ids   | down_0, .., mid       |
|              | as of diffusers' UNet, controlnet_cond [B,3,H,W] in 0 to 1,                |                       |
|              | conditioning_scale [1]                                                     |                       |
| the denoiser | its own, and down_0 [B,C0,H/8,W/8], .., mid [B,C,h,w]                      | its own               |

B: batch; H, W: image in pixels; C0, C: channels; h, w: the UNet's lowest resolution. A ControlNet's outputs go to the
denoiser's inputs of the same names, like the list ``control`` of NeMo's ControlledUnetModel, summed over ControlNets as
in diffusers. Any part that calls diffusers' UNet is wrapped so, whatever its inputs' names. Alternative not taken: one
graph of both networks, as in TensorRT's demo; each set of ControlNets would then need its own denoiser graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.errors import SdQuantError
from sd_quant.models.family import PipelineCall, remade
from sd_quant.models.parts import Contract, NamedForward, NamedPart, Part, as_inputs
from sd_quant.models.sdxl import TIME_IDS
from sd_quant.models.unet import EXCLUDED

KIND = "ControlNetModel"
TEXT = ("context", "encoder_hidden_states")  # NeMo's and diffusers' name of the denoiser's text input
WRAPPED = "part."  # what ``ControlledPart`` puts before the names of weights
DOWN, MID = "down_block_additional_residuals", "mid_block_additional_residual"  # diffusers' arguments of the UNet


@dataclass(frozen=True)
class ControlNet:
    """One ControlNet of a checkpoint."""

    name: str  # of the component, and of the part
    config: Mapping[str, Any]  # diffusers', complete
    scale: float  # factor of its outputs (conditioning scale)


ControlNets = Sequence[ControlNet]  # in the order in which they are called


def residuals_of(config: Mapping[str, Any]) -> dict[str, tuple]:
    """Return the shapes of the outputs of a ControlNet with this config by name (down_0, .., mid)."""
    channels, layers = config["block_out_channels"], config["layers_per_block"]
    each = [(channels[0], 0)]
    for level, width in enumerate(channels):
        each += [(width, level)] * layers + ([(width, level + 1)] if level + 1 < len(channels) else [])
    names = [*(f"down_{number}" for number in range(len(each))), "mid"]
    each.append((channels[-1], len(channels) - 1))
    return {name: ("batch", width, *halved(level)) for name, (width, level) in zip(names, each, strict=True)}


def halved(times: int) -> tuple[str, str]:
    """Return the names in ``parts.axes`` of the height and width of latents that are halved ``times`` times."""
    return (f"height_{2**times}", f"width_{2**times}") if times else ("height", "width")


class ControlNetPart(NamedPart):
    """diffusers' ControlNet with its outputs, down blocks and middle, in one tuple."""

    def called(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        down, mid = self.outputs(tensors)
        return (*down, mid)


class ControlledPart(nn.Module):
    """A denoiser's ``part`` with further inputs: the ``residuals`` of ControlNets, which its UNet adds."""

    def __init__(self, part: Part, inputs: Sequence[str], residuals: Sequence[str], network: nn.Module):
        super().__init__()
        self.part, self.residuals, self.given = part.wrap(network), list(residuals), list[Tensor]()
        unet = self.part.get_submodule(part.prefix.removesuffix("."))
        unet.register_forward_pre_hook(self.with_residuals, with_kwargs=True)
        self.forward = NamedForward(self, inputs)

    def called(self, tensors: Mapping[str, Tensor]) -> Tensor:
        self.given = [tensors[name] for name in self.residuals]
        return self.part(**{name: tensor for name, tensor in tensors.items() if name not in self.residuals})

    def with_residuals(self, unet: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        *down, mid = self.given
        return args, {**kwargs, DOWN: tuple(down), MID: mid}


def controlled_part(part: Part, residuals: Mapping[str, tuple]) -> Part:
    """Return a denoiser's ``part`` with further inputs ``residuals`` (shapes by name), in the dtype of its weights."""
    plain = part.contract
    contract = replace(
        plain, inputs={**plain.inputs, **residuals}, dtypes={**plain.dtypes, **dict.fromkeys(residuals, plain.weights)}
    )
    wrap = partial(ControlledPart, part, tuple(contract.inputs), tuple(residuals))
    arguments = partial(controlled_arguments, part, tuple(residuals))
    return replace(part, prefix=WRAPPED + part.prefix, contract=contract, wrap=wrap, arguments=arguments)


def controlled_arguments(
    part: Part, residuals: Sequence[str], contract: Contract, given: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the inputs of ``part``, and the residuals, from the arguments of the pipeline's call of its UNet."""
    own = part.arguments(part.contract, {**given, DOWN: None, MID: None})
    return own | dict(zip(residuals, (*given[DOWN], given[MID]), strict=True))


def controlnet_part(component: str, config: Mapping[str, Any], context: tuple) -> Part:
    """Return the part of a ControlNet with this ``config``; ``context`` is the shape of the denoiser's text input."""
    half, single = torch.float16, torch.float32
    shapes: dict[str, tuple] = {
        "sample": ("batch", config["in_channels"], "height", "width"),
        "timestep": (1,),
        "encoder_hidden_states": context,
        "controlnet_cond": ("batch", config["conditioning_channels"], "image_height", "image_width"),
        "conditioning_scale": (1,),
    }
    if config["addition_embed_type"] is not None:
        pooled = config["projection_class_embeddings_input_dim"] - TIME_IDS * config["addition_time_embed_dim"]
        shapes |= {"text_embeds": ("batch", pooled), "time_ids": ("batch", TIME_IDS)}
    dtypes = dict.fromkeys(shapes, half) | dict.fromkeys(("timestep", "conditioning_scale"), single)
    dtypes |= {"time_ids": single} if "time_ids" in shapes else {}
    excluded = (*EXCLUDED, "controlnet_cond_embedding", "controlnet_down_blocks", "controlnet_mid_block")
    return Part(
        component, "controlnet.", Contract(shapes, tuple(residuals_of(config)), dtypes, half),
        partial(ControlNetPart, "controlnet", tuple(shapes)),
        answer=residual_answer, arguments=unguessed, excluded=excluded, in_steps=True,
    )  # fmt: skip


def residual_answer(outputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return outputs in the form of diffusers' ControlNet: residuals of the down blocks, and of the middle block."""
    *down, mid = outputs.values()
    return down, mid


def unguessed(contract: Contract, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a ControlNet's inputs from its call's arguments, ``as_inputs``. Raises SdQuantError for ``guess_mode``."""
    if given.get("guess_mode"):
        raise SdQuantError(
            "the pipeline calls a ControlNet with guess_mode, expected false: the exported graph scales all outputs "
            "alike and serves all samples of a batch; leave guess_mode out"
        )
    return as_inputs(contract, given)


def with_controlnets(parts: dict[str, Part], denoiser: str, controlnets: ControlNets) -> dict[str, Part]:
    """Return the parts, the ``denoiser`` with ControlNet outputs as further inputs, and the ControlNets' parts last."""
    if not controlnets:
        return parts
    plain = parts[denoiser]
    context = next(shape for name, shape in plain.contract.inputs.items() if name in TEXT)
    (residuals,) = {tuple(residuals_of(each.config).items()) for each in controlnets}
    return {
        **parts, denoiser: controlled_part(plain, dict(residuals)),
        **{each.name: controlnet_part(each.name, each.config, context) for each in controlnets},
    }  # fmt: skip


def controlnet_networks(controlnets: ControlNets) -> dict[str, nn.Module]:
    """Build the ControlNets with newly initialized weights, by component."""
    from diffusers import ControlNetModel

    return {each.name: ControlNetModel.from_config(dict(each.config)) for each in controlnets}


def controlled_call(call: PipelineCall, networks: Mapping[str, Any], controlnets: ControlNets) -> PipelineCall:
    """Return the pipeline's ``call`` with ControlNets; ``networks`` has their stand-ins by component."""
    if not controlnets:
        return call
    nets, scales = [networks[each.name] for each in controlnets], [each.scale for each in controlnets]
    several = len(nets) > 1
    pipe = remade(str(call.family.CONTROLLED), call.pipe, controlnet=nets if several else nets[0])
    scale = {"controlnet_conditioning_scale": scales if several else scales[0]}
    return replace(call, pipe=pipe, arguments={**call.arguments, **scale})
