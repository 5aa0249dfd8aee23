"""How a tiny pipeline is built and called, and how its weights become such that every layer matters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


def nothing(pipeline: Any) -> None:
    """Leaves a pipeline as it was opened."""


@dataclass(frozen=True)
class Case:
    """One pipeline: ``build`` makes it with weights as they are drawn, the rest says how a small run calls it.

    ``width``, ``height`` and ``larger``, a second size (width, height), are pixels. ``arguments`` are further arguments
    of the call. ``denoiser`` names the component that is called in each step. Where ``batched`` is false the call takes
    one prompt alone. ``needs`` are packages without which diffusers can neither load nor call this class: accelerate
    where a class keeps modules in 32 bits (``_keep_in_fp32_modules``), for one. ``steps`` is the name of the argument
    for the number of steps. ``prepare`` does to an opened pipeline what has to be done to it before its first run.
    """

    build: Callable[[], Any]
    width: int
    height: int
    larger: tuple[int, int]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    denoiser: str = "transformer"
    batched: bool = True
    needs: tuple[str, ...] = ()
    steps: str = "num_inference_steps"
    prepare: Callable[[Any], object] = nothing


def enliven(module: nn.Module) -> None:
    """Draws again, in place, what a class starts with zeros, ones or next to nothing; random weights stay.

    Diffusion models start with outputs and modulations of zero, and language models with weights of 0.02 whatever
    their width: with these most layers of a tiny network would not reach the image. Vectors that are constant get
    noise of 0.05 around the constant, and larger ones that are constant or small the scale that keeps their input's.
    """
    for parameter in module.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        spread = parameter.detach().std().item() if parameter.numel() > 1 else 0.0
        if parameter.ndim < 2:
            if spread < 1e-3:
                parameter.data.add_(0.05 * parameter.new_empty(parameter.shape).normal_())
        elif spread < 0.8 * (scale := parameter[0].numel() ** -0.5):
            nn.init.normal_(parameter, std=scale)
