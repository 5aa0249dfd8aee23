"""Untrusted images, decoded by Pillow within bounds: regular files of three formats, up to a number of pixels."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import open_regular
from sd_quant.files.image_files import IMAGE_FORMATS
from sd_quant.text import one_line

# Pixels before resizing: 5792 x 5792, or 8192 x 8192 of a JPEG, which can be decoded at a smaller size.
MOST_PIXELS = {"PNG": 2**25, "WEBP": 2**25, "JPEG": 2**26}
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the tag of EXIF, and its values that exchange width and height


def read_fitted(path: Path, width: int, height: int, mode: str) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns an image, cropped about its middle and resized, and its original width and height.

    ``mode`` is RGB or L. The array is uint8 [height, width, 3] or [height, width]. Raises as ``opened`` does.
    """
    side, size = 2 * max(width, height), (width, height)
    image, own = opened(path, side, mode, lambda image: ImageOps.fit(image, size, Image.Resampling.LANCZOS))
    return np.asarray(image), own


def read_whole(path: Path, pixels: int, mode: str) -> Image.Image:
    """Returns an image in its own shape, resized where it has more than so many ``pixels``. Raises as ``opened``."""

    def bounded(image: Image.Image) -> Image.Image:
        share = math.sqrt(pixels / (image.width * image.height))
        size = max(1, int(image.width * share)), max(1, int(image.height * share))
        return image if share >= 1 else image.resize(size, Image.Resampling.LANCZOS)

    return opened(path, 4 * math.isqrt(pixels), mode, bounded)[0]


def opened(
    path: Path, side: int, mode: str, resize: Callable[[Image.Image], Image.Image]
) -> tuple[Image.Image, tuple[int, int]]:
    """Returns an image in ``mode``, RGB or L, resized by ``resize``, and its original width and height.

    It is turned upright by its EXIF; transparent pixels become white. A JPEG is decoded at the smallest size of at
    least ``side`` pixels a side.
    Raises ArtifactError for a file that is no image, or a damaged one, ConfigError for one that is too large.
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
    """Returns the image in L, RGB or RGBA. Raises ValueError for numbers that have neither 8 nor 16 bits.

    Of 16 bits the upper 8 are kept, because Pillow's own conversion makes everything above 255 white.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its numbers are of Pillow's mode {image.mode}")
    transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    wanted = "RGBA" if transparent else "L" if image.mode == "L" else "RGB"
    return image if image.mode == wanted else image.convert(wanted)
