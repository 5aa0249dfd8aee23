"""Limits that several sections of knobs share."""

from contextlib import suppress
from typing import Annotated, Protocol

from sd_quant.knobs import Limit

GRAIN = 64  # pixels, of which a side of the stated families' images is a multiple
SIDE = Limit(lambda pixels: 8 <= pixels <= 4096 and pixels % 8 == 0, "a multiple of 8 from 8 to 4096")
SIZE = Limit(lambda stated: is_size(stated), f"WIDTHxHEIGHT such as 832x1216, each side {SIDE}", each=True)
SOME = Limit(lambda listed: 0 < len(listed) <= 64, "at least one, and at most 64")
Sizes = Annotated[list[str] | None, SIZE, SOME]


def size_of(stated: str) -> tuple[int, int]:
    """Return width and height of a text such as 832x1216. Raises ValueError for any other text."""
    width, height = map(int, stated.split("x"))
    return width, height


class Sized(Protocol):
    """A section with the sizes of images."""

    width: int
    height: int
    sizes: list[str] | None


def sizes_of(knobs: Sized) -> list[tuple[int, int]]:
    """Return the widths and heights in pixels that the images take in turn."""
    return [(knobs.width, knobs.height)] if knobs.sizes is None else list(map(size_of, knobs.sizes))


def is_size(stated: str) -> bool:
    """Whether a text is a size that an image may have."""
    with suppress(ValueError):
        width, height = size_of(stated)
        return stated == f"{width}x{height}" and SIDE.holds(width) and SIDE.holds(height)
    return False
