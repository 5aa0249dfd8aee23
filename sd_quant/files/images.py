"""Images: untrusted files, decoded by Pillow within bounds, and images among the arguments of a pipeline's call.

Files are regular, of three formats, and have a bounded number of pixels. An argument is one image or a list of them,
such as a video's frames, as PIL images. An image keeps the size of its file until the call, which crops it about its
center to the aspect ratio of the generated images, and resizes it. Pipeline classes that read images of any size, as
editing ones do, get them unchanged (``Style.keeps``). Alternative not taken: diffusers' resizing may stretch images.
"""

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import open_regular
from sd_quant.files.image_files import IMAGE_FORMATS
from sd_quant.text import one_line

# Pixels before resizing: 5792 x 5792, or 8192 x 8192 of a JPEG, which can be decoded at a smaller size.
MOST_PIXELS = {"PNG": 2**25, "WEBP": 2**25, "JPEG": 2**26}
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that swap width and height


def read_fitted(path: Path, width: int, height: int, mode: str) -> tuple[np.ndarray, tuple[int, int]]:
    """Return an image, cropped about its center and resized, and its original (width, height).

    ``mode`` is RGB or L. The array is uint8 [height, width, 3] or [height, width]. Raises as ``opened`` does.
    """
    side, size = 2 * max(width, height), (width, height)
    image, own = opened(path, side, mode, lambda image: ImageOps.fit(image, size, Image.Resampling.LANCZOS))
    return np.asarray(image), own


def read_whole(path: Path, pixels: int, mode: str) -> Image.Image:
    """Return an image in its own aspect ratio, downsized if it has more than ``pixels``. Raises as ``opened`` does."""

    def bounded(image: Image.Image) -> Image.Image:
        share = math.sqrt(pixels / (image.width * image.height))
        size = max(1, int(image.width * share)), max(1, int(image.height * share))
        return image if share >= 1 else image.resize(size, Image.Resampling.LANCZOS)

    return opened(path, 4 * math.isqrt(pixels), mode, bounded)[0]


def opened(
    path: Path, side: int, mode: str, resize: Callable[[Image.Image], Image.Image]
) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image, upright, over white, in ``mode`` (RGB or L), after ``resize``; and its original (width, height).

    A JPEG may be decoded at a smaller size, of at least ``side`` pixels a side.
    Raises ArtifactError for a file that is no image or is damaged, ConfigError for too many pixels.
    """
    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its limit is above MOST_PIXELS
            fmt = IMAGE_FORMATS[path.suffix.lower()]
            image = Image.open(file, formats=[fmt])
            own, most = image.size, MOST_PIXELS[fmt]
            if own[0] * own[1] > most:
                raise ConfigError(
                    f"{path} has {own[0]} x {own[1]} pixels, expected at most {most // 10**6} million in a {fmt}; make "
                    "it smaller, as it is resized anyway"
                )
            turned = image.getexif().get(ORIENTATION) in TURNED
            image.draft(None, (side,) * 2)
            ImageOps.exif_transpose(image, in_place=True)
            small = resize(in_8_bits(image))
    except ConfigError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, which is higher
        raise ConfigError(f"{path} is too large to be read ({one_line(error, 100)}); make it smaller") from None
    except Exception as error:  # untrusted bytes can make the decoders raise anything
        raise ArtifactError(
            f"{path} cannot be read as an image ({one_line(error, 100)}); save it again as a PNG"
        ) from None
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    return small.convert("RGB").convert(mode), (own[1], own[0]) if turned else own


def in_8_bits(image: Image.Image) -> Image.Image:
    """Return the image in mode L, RGB or RGBA. Raises ValueError for pixel values of neither 8 nor 16 bits.

    Of 16 bits the upper 8 are kept, because Pillow's own conversion makes everything above 255 white.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its numbers are of Pillow's mode {image.mode}")
    transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    wanted = "RGBA" if transparent else "L" if image.mode == "L" else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


# Images among the arguments of a call

PROMPT = re.compile(r"(negative_)?prompt(_\d)?")  # names of arguments with one text for each image
DRAWN = 64  # side, in pixels, of the noise images with which a pipeline is recorded, before resizing


def with_images(value: Any, change: Callable[[Image.Image], Any]) -> Any:
    """Return an argument's value with ``change`` applied to its image, or to the images in its list."""
    if isinstance(value, Image.Image):
        return change(value)
    return [with_images(each, change) for each in value] if isinstance(value, list) else value


def has_images(value: Any) -> bool:
    """Return whether the value of an argument is an image, or a list with at least one."""
    return any(map(has_images, value)) if isinstance(value, list) else isinstance(value, Image.Image)


def is_of_each(name: str, value: Any) -> bool:
    """Return whether an argument is an image or a prompt: a call that generates several images takes a list of them."""
    return isinstance(value, Image.Image) or (isinstance(value, str) and bool(PROMPT.fullmatch(name)))


def fitted(value: Any, width: int, height: int) -> Any:
    """Return an argument's value with its images cropped about their center and resized."""

    def fit(image: Image.Image) -> Image.Image:
        same = image.size == (width, height)
        return image if same else ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)

    return with_images(value, fit)


def identities(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as JSON values, images by mode, size and SHA-256 digest."""

    def digest(image: Image.Image) -> str:
        return f"{kind(image)} {image.width}x{image.height} {hashlib.sha256(image.tobytes()).hexdigest()}"

    return {name: with_images(value, digest) for name, value in sorted(arguments.items())}


def kinds(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as JSON values, images by mode alone: a pipeline's recorded structure depends on no more."""
    return {name: with_images(value, kind) for name, value in sorted(arguments.items())}


def kind(image: Image.Image) -> str:
    return f"image {image.mode}"


def drawn(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with images replaced by fixed noise of the same modes, independent of the user's images."""
    generator = np.random.default_rng(0)

    def draw(image: Image.Image) -> Image.Image:
        numbers = generator.integers(0, 256, (DRAWN, DRAWN, 3), np.uint8)
        return Image.fromarray(numbers).convert(image.mode)

    return {name: with_images(value, draw) for name, value in arguments.items()}
