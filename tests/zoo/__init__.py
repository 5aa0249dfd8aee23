"""A tiny random pipeline of each class of diffusers that makes images, or video, of a prompt, and of images.

They stand for checkpoints of any family in tests and measurements: classes, tokenizers and wiring are the published
ones, sizes are small. Configurations are written from the constructors' signatures. The road not taken is to build
them as diffusers' own tests do: those are not installed with it, and some are degenerate (one head, a width of 2, NaN).
Here a network has two blocks and two heads or more, heads of 8 or more, and no weight that keeps a layer from reaching
the output (see `enliven`).

`build` makes one by the name of its class, and after a comma of a variant where a class is here more than once.
`write` saves one as a folder, `CASES` says how to call it. `takes_a_prompt_alone` and `takes_images` find such classes,
so that a test can count what is not here: what is deprecated, one of several stages, makes sound, text or depth, has
only another guidance or another class's control network, or needs a size or a package that no test can have.
"""

import contextlib
import inspect
import re
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch

from . import from_images, images, videos
from .cases import Case, enliven

__all__ = [
    "CASES", "Case", "build", "call", "first_call", "makes_video", "takes_a_prompt_alone",
    "takes_images", "write",
]  # fmt: skip

CASES: dict[str, Case] = images.CASES | videos.CASES | from_images.CASES
MEDIUM = re.compile(r"(^|_)(image|images|video|audio|waveforms|pose|frame_size|keyframes_latents)(_|$)")
IMAGE = re.compile(r"(^|_)(images?|video)(_reference)?$")
NO_MEDIUM = re.compile(r"num_|(negative_)?ip_adapter_|video_length$")
VIDEO_SIZES = {"num_frames", "frames", "video_length"}


def build(name: str, seed: int = 0) -> Any:
    """Returns the pipeline of the class ``name`` with the weights of this ``seed``, in evaluation.

    Raises KeyError where there is no such case. The random state of the process stays as it was. Some classes leave
    parameters uninitialized, whose numbers would decide what `enliven` draws: here they start as zeros.
    """
    empty = torch.empty

    def zeroed(*shape: Any, **options: Any) -> torch.Tensor:
        return empty(*shape, **options).zero_()

    with torch.random.fork_rng(devices=[]), mock.patch.object(torch, "empty", zeroed):
        torch.manual_seed(seed)
        pipeline = CASES[name].build()
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                enliven(component.eval().requires_grad_(False))
    return pipeline


def write(name: str, folder: Path, seed: int = 0) -> None:
    """Saves the pipeline of the class ``name`` as a folder of safetensors, as `from_pretrained` opens it."""
    build(name, seed).save_pretrained(folder, safe_serialization=True)


def call(name: str, prompt: str | list[str], steps: int = 2, larger: bool = False) -> dict[str, Any]:
    """Returns the arguments of a small run of this pipeline, with noise of its own and arrays as output."""
    case = CASES[name]
    width, height = case.larger if larger else (case.width, case.height)
    own = prompt if isinstance(prompt, str) else list(prompt)  # Z-Image writes its template into the list it is given
    given = {"prompt": own, "width": width, "height": height, "max_area": width * height, case.steps: steps}
    given |= {"generator": torch.Generator().manual_seed(0)} | case.arguments | case.drawn(width, height)
    known = inspect.signature(getattr(diffusers, name.split(",")[0]).__call__).parameters
    return {argument: value for argument, value in given.items() if argument in known}


class Seen(Exception):
    """Ends a run of a pipeline at its first call of the denoiser."""


def first_call(pipeline: Any, name: str, prompt: str | list[str]) -> dict[str, Any]:
    """Returns the arguments with which a small run of the pipeline first calls its denoiser, by their names."""
    pipeline.set_progress_bar_config(disable=True)
    denoiser, seen = getattr(pipeline, CASES[name].denoiser), []

    def see(_: Any, arguments: tuple, named: dict[str, Any]) -> None:
        seen.append(inspect.signature(denoiser.forward).bind(*arguments, **named).arguments)
        raise Seen

    hook = denoiser.register_forward_pre_hook(see, with_kwargs=True)
    with contextlib.suppress(Seen), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline(**call(name, prompt))
    hook.remove()
    return seen[0]


def takes_a_prompt_alone(kind: Any) -> bool:
    """Tells whether a class's call has a prompt and no argument for an image, a video or a sound.

    Optional ones count too: that is how classes for editing look. So some pipelines that can do without an image, as
    Flux 2, are in `CASES` though they are not found here.
    """
    names = inspect.signature(kind.__call__).parameters
    return "prompt" in names and not any(MEDIUM.search(name) and not NO_MEDIUM.match(name) for name in names)


def takes_images(kind: Any) -> bool:
    """Tells whether a class's call has an argument for images, or frames of a video, that users have in files."""
    names = inspect.signature(kind.__call__).parameters
    return any(IMAGE.search(name) and not NO_MEDIUM.match(name) for name in names)


def makes_video(kind: Any) -> bool:
    """Tells whether a class's call has an argument for the number of frames."""
    return not VIDEO_SIZES.isdisjoint(inspect.signature(kind.__call__).parameters)
