"""Images among the arguments of a pipeline's call: one, or a list of them, such as a video's frames, as PIL images.

An image has the size that it was read with until a call is made of it, which crops it about its middle to the shape of
the images that are made, and resizes it. Classes that read images of their own sizes, as editing ones do, get them as
they are (``Style.keeps``). The road not taken is diffusers' own resizing, which stretches some images.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps

PROMPT = re.compile(r"(negative_)?prompt(_\d)?")  # names of arguments that are one text an image
DRAWN = 64  # pixels of a side of the images with which a pipeline is observed, before they are resized


def with_images(value: Any, change: Callable[[Image.Image], Any]) -> Any:
    """Return the value of an argument with its image, or the images of its list, changed."""
    if isinstance(value, Image.Image):
        return change(value)
    return [with_images(each, change) for each in value] if isinstance(value, list) else value


def has_images(value: Any) -> bool:
    """Whether the value of an argument is an image, or a list with one."""
    return any(map(has_images, value)) if isinstance(value, list) else isinstance(value, Image.Image)


def is_of_each(name: str, value: Any) -> bool:
    """Whether the value of an argument is an image or a prompt, of which a call of several images takes a list."""
    return isinstance(value, Image.Image) or (isinstance(value, str) and bool(PROMPT.fullmatch(name)))


def fitted(value: Any, width: int, height: int) -> Any:
    """Return the value of an argument with its images cropped about their middle and resized."""

    def fit(image: Image.Image) -> Image.Image:
        same = image.size == (width, height)
        return image if same else ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)

    return with_images(value, fit)


def identities(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for JSON, images by mode, size and digest."""

    def digest(image: Image.Image) -> str:
        return f"{kind(image)} {image.width}x{image.height} {hashlib.sha256(image.tobytes()).hexdigest()}"

    return {name: with_images(value, digest) for name, value in sorted(arguments.items())}


def kinds(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for JSON, images by their mode: all that an observation knows of them."""
    return {name: with_images(value, kind) for name, value in sorted(arguments.items())}


def kind(image: Image.Image) -> str:
    return f"image {image.mode}"


def drawn(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with images of noise of the same modes, which are the same whatever the user's show."""
    generator = np.random.default_rng(0)

    def draw(image: Image.Image) -> Image.Image:
        numbers = generator.integers(0, 256, (DRAWN, DRAWN, 3), np.uint8)
        return Image.fromarray(numbers).convert(image.mode)

    return {name: with_images(value, draw) for name, value in arguments.items()}
