"""Images that a pipeline changes, in place of the noise that it begins with.

An image is turned as its camera says, cropped to the shape of the images that are made, about its middle, and resized
to them; so is its mask. From there on diffusers' own pipelines do what they do with a PIL image: a mask is white where
the image is made anew.
The road not taken is to leave the resizing to diffusers, which stretches some images and refuses others.
"""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import open_regular
from sd_quant.inference.image_files import FORMATS
from sd_quant.text import one_line

# Of an image before it is resized: 5792 x 5792, of a JPEG, which is decoded smaller where that suffices, 8192 x 8192.
MOST_PIXELS = {"PNG": 2**25, "WEBP": 2**25, "JPEG": 2**26}
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the tag of EXIF, and where it says that width and height change places


@dataclass(frozen=True)
class SourceImages:
    """Images for the prompts, in turn."""

    images: np.ndarray  # uint8 [N, H, W, 3]
    masks: np.ndarray | None  # uint8 [N, H, W], of the images in their order; None: the whole of an image may change
    strength: float  # the share of the denoising steps that is taken, from a noise of that level over the image

    def described(self) -> dict[str, object]:
        """What decides the images that are made, as JSON has it."""
        masks = None if self.masks is None else hashlib.sha256(self.masks.tobytes()).hexdigest()
        return {"images": hashlib.sha256(self.images.tobytes()).hexdigest(), "masks": masks, "strength": self.strength}

    def repeated(self, times: int) -> "SourceImages":
        """Each image so many times, for the samples of its prompt."""
        masks = None if self.masks is None else self.masks.repeat(times, axis=0)
        return replace(self, images=self.images.repeat(times, axis=0), masks=masks)

    def images_of(self, numbers: Sequence[int]) -> list[Image.Image]:
        """The images for the prompts with these ``numbers``."""
        return [Image.fromarray(self.images[number % len(self.images)]) for number in numbers]

    def masks_of(self, numbers: Sequence[int]) -> list[Image.Image]:
        """The masks of the same. Raises TypeError where there are none."""
        assert self.masks is not None
        return [Image.fromarray(self.masks[number % len(self.masks)]) for number in numbers]


def read_source(
    images: Sequence[Path], masks: Sequence[Path] | None, width: int, height: int, strength: float
) -> SourceImages:
    """The images, and their masks, for images of ``width`` by ``height`` pixels.

    Raises ArtifactError for a file that is no image, or a damaged one; ConfigError for one that is too large, and for a
    mask of another size than its image.
    """
    fit, fit_masks = list[np.ndarray](), list[np.ndarray]()
    for path, of_mask in zip(images, masks or [None] * len(images), strict=True):
        pixels, (own_width, own_height) = read_fitted(path, width, height, "RGB")
        fit.append(pixels)
        if of_mask is not None:
            mask, (mask_width, mask_height) = read_fitted(of_mask, width, height, "L")
            if (mask_width, mask_height) != (own_width, own_height):
                raise ConfigError(
                    f"{of_mask} is a mask of {mask_width} x {mask_height} pixels, and its image {path} has "
                    f"{own_width} x {own_height}; expected the same, so make the mask again for this image"
                )
            fit_masks.append(mask)
    return SourceImages(np.stack(fit), np.stack(fit_masks) if fit_masks else None, strength)


def read_fitted(path: Path, width: int, height: int, mode: str) -> tuple[np.ndarray, tuple[int, int]]:
    """An image in ``mode``, RGB or L, cropped about its middle and resized, and its own width and height.

    The array is uint8 [height, width] and its channels. The image is turned upright; what is transparent becomes white.
    A JPEG is decoded at a size that suffices, and everything else resized first, so that its pixels are in memory once.
    Raises as ``read_source`` does.
    """
    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # which begins at more than we take
            fmt = FORMATS[path.suffix.lower()]
            image = Image.open(file, formats=[fmt])
            own, most = image.size, MOST_PIXELS[fmt]
            if own[0] * own[1] > most:
                raise ConfigError(
                    f"{path} has {own[0]} x {own[1]} pixels, expected at most {most // 10**6} million in a {fmt}; make "
                    "it smaller, as it is resized anyway"
                )
            turned = image.getexif().get(ORIENTATION) in TURNED
            image.draft(None, (2 * max(width, height),) * 2)
            ImageOps.exif_transpose(image, in_place=True)
            small = ImageOps.fit(in_8_bits(image), (width, height), Image.Resampling.LANCZOS)
    except ConfigError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, which is higher
        raise ConfigError(f"{path} is too large to be read ({one_line(error, 100)}); make it smaller") from None
    except Exception as error:  # whatever the bytes lead the decoders to
        raise ArtifactError(
            f"{path} cannot be read as an image ({one_line(error, 100)}); save it again as a PNG"
        ) from None
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    return np.asarray(small.convert("RGB").convert(mode)), (own[1], own[0]) if turned else own


def in_8_bits(image: Image.Image) -> Image.Image:
    """The image in L, RGB or RGBA. Raises ValueError for numbers that are neither 8 nor 16 bits.

    Of 16 bits the upper 8 are taken: Pillow's own conversion makes everything beyond 255 white.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its numbers are of Pillow's mode {image.mode}")
    transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    wanted = "RGBA" if transparent else "L" if image.mode == "L" else "RGB"
    return image if image.mode == wanted else image.convert(wanted)
