"""How a tiny pipeline is built and called, and how its weights become such that every layer matters."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import diffusers
import numpy as np
from PIL import Image
from torch import nn


def nothing(pipeline: Any) -> None:
    """Leaves a pipeline as it was opened."""


@dataclass(frozen=True)
class Case:
    """One pipeline: ``build`` makes it with weights as they are drawn, the rest says how a small run calls it.

    ``width``, ``height`` and ``larger``, a second size (width, height), are pixels. ``arguments`` are further arguments
    of the call, ``images`` those that are images, with how many: the image itself for one, else a list, or a video's
    frames. ``denoiser`` names the component that is called in each step. Where ``batched`` is false the call takes
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
    images: Mapping[str, int] = field(default_factory=dict)

    def drawn(self, width: int, height: int) -> dict[str, Any]:
        """Returns the arguments of the call that are images, of this size."""
        return {
            name: draw(name, 0, width, height) if count == 1 else [draw(name, n, width, height) for n in range(count)]
            for name, count in self.images.items()
        }


def assembled(kind: str, **parts: Any) -> Any:
    """Returns a pipeline of the class ``kind`` with these components and arguments, which are built in their order.

    A mapping has the sizes of a network of the class in the pipeline's signature, a function is called. An encoder
    comes with what reads its texts or images, which is the component beside it.
    """
    own = getattr(diffusers, kind)
    classes, made = own._get_signature_types(), dict[str, Any]()
    parameters = inspect.signature(own.__init__).parameters
    known = parameters.keys()
    for name, part in parts.items():
        made[name] = classes[name][0](**part) if isinstance(part, Mapping) else part() if callable(part) else part
        if callable(part) and isinstance(made[name], tuple):
            made[name], reader = made[name]
            beside = name.replace("text_encoder", "tokenizer"), name.replace("image_encoder", "image_processor")
            made[next(each for each in (*beside, "feature_extractor", "processor") if each in known - {name})] = reader
    missing = [name for name, each in parameters.items() if each.default is each.empty and name != "self"]
    return own(**{**dict.fromkeys(missing), **made})


FIELDS = {each.name for each in fields(Case)}


def row(kind: str, size: tuple[int, int], larger: tuple[int, int], given: dict[str, Any]) -> tuple[str, Case]:
    """Returns the name and the case of the class ``kind`` without its "Pipeline", with a variant after a comma.

    ``given`` are fields of ``Case``, and what ``assembled`` takes.
    """
    name, *variant = kind.split(",")
    own = {each: given.pop(each) for each in FIELDS & given.keys()}
    denoiser = {"denoiser": "unet" if "unet" in given else "transformer"}
    build = partial(assembled, f"{name}Pipeline", **given)
    return ",".join([f"{name}Pipeline", *variant]), Case(build, *size, larger, **denoiser | own)


def draw(argument: str, number: int, width: int, height: int) -> Image.Image:
    """Returns an image of coloured squares, one for each argument and number, or a mask whose right half is white."""
    if "mask" in argument:
        return Image.fromarray(np.tile(np.where(np.arange(width) < width // 2, 0, 255).astype(np.uint8), (height, 1)))
    random = np.random.default_rng([number, *argument.encode()])
    squares = random.integers(0, 255, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1))


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
