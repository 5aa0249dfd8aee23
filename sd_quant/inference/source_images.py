"""Source images, which a pipeline starts from in place of noise.

An image and its mask, white where the image is generated anew, are turned upright, cropped about the middle to the
shape of the generated images, and resized. Alternative not taken: diffusers' resizing, which stretches some images and
refuses others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd_quant.errors import ConfigError
from sd_quant.files.images import read_fitted


@dataclass(frozen=True)
class SourceImages:
    """Source images, used for the prompts in turn."""

    images: np.ndarray  # uint8 [N, H, W, 3]
    masks: np.ndarray | None  # uint8 [N, H, W]; None: all of an image may change
    strength: float  # share of the denoising steps that is taken, starting from the image with noise of that level

    def described(self) -> dict[str, object]:
        """Return SHA-256 digests of images and masks, and the strength, for JSON."""
        masks = None if self.masks is None else hashlib.sha256(self.masks.tobytes()).hexdigest()
        return {"images": hashlib.sha256(self.images.tobytes()).hexdigest(), "masks": masks, "strength": self.strength}

    def repeated(self, times: int) -> "SourceImages":
        """Repeat each image ``times`` times, for as many samples of its prompt."""
        masks = None if self.masks is None else self.masks.repeat(times, axis=0)
        return replace(self, images=self.images.repeat(times, axis=0), masks=masks)

    def arguments_of(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return pipeline arguments (strength, images, masks) for the prompts with these ``numbers``."""
        given = {"image": self.images} | ({} if self.masks is None else {"mask_image": self.masks})
        return {"strength": self.strength} | {
            name: [Image.fromarray(each[number % len(each)]) for number in numbers] for name, each in given.items()
        }


def read_source(
    images: Sequence[Path], masks: Sequence[Path] | None, width: int, height: int, strength: float
) -> SourceImages:
    """Read images and masks, cropped and resized to ``width`` by ``height`` pixels.

    Raises ConfigError for too many pixels or a mask of another size than its image, ArtifactError for a damaged file.
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
