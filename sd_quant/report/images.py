"""Save images as files, and as one sheet with full precision above quantized, which people look at first.

Small images are enlarged and large ones reduced so that pairs are comparable on a screen. Alternative not taken: a
difference image; at 20 dB everything differs somewhere, and people ask whether it is still the same image.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sd_quant.files import atomic_path
from sd_quant.metrics.images import Images, check_rgb
from sd_quant.text import printable

LONGEST_EDGE = 256  # of an image in the grid
SCALE, COLUMNS = 2, 8
MOST_PAIRS = 64  # a grid of thousands is a file that nothing opens
FRAME_MS = 125  # of an animation
GAP, BLOCK_GAP, MARGIN = 4, 16, 16
CAPTION_LINES = 2
INK, SOFT_INK, PAPER = "#202124", "#5f6368", "#f1f3f4"  # paper is not white: many images are


def save_images(images: Images, folder: Path, names: Sequence[str]) -> list[Path]:
    """Write uint8 images as ``folder/<name>.png``, each atomically.

    Raises ArtifactError for images other than uint8 RGB (a pipeline without colours), ResourceError for a full disk.
    """
    check_rgb(images)
    paths = [folder / f"{name}.png" for name in names]
    for image, path in zip(images, paths, strict=True):
        _save(Image.fromarray(image), path)
    return paths


def save_animations(strips: Images, width: int, folder: Path, names: Sequence[str]) -> list[Path]:
    """Write strips, rows of frames ``width`` wide, as lossless ``<name>.webp``. Raises ResourceError on a full disk."""
    paths = [folder / f"{name}.webp" for name in names]
    for strip, path in zip(strips, paths, strict=True):
        first, *others = (Image.fromarray(strip[:, start : start + width]) for start in range(0, strip.shape[1], width))
        options = {"save_all": True, "append_images": others, "duration": FRAME_MS, "loop": 0, "lossless": True}
        with atomic_path(path) as temporary:
            first.save(temporary, format="WEBP", **options)
    return paths


def comparison_grid(
    reference: Images, quantized: Images, path: Path, captions: Sequence[str], label: str = "quantized"
) -> Path:
    """Draw ``reference`` images above ``quantized`` images of equal sizes into the PNG ``path``; return ``path``.

    ``label`` names the lower row. Images are enlarged twice, at most to 256 pixels. ``captions`` (prompts: untrusted,
    only drawn) are shortened to fit. Of more than 64 pairs the first 64 are drawn.
    """
    count = min(len(reference), MOST_PAIRS)
    columns, labels = min(COLUMNS, count), ("full precision", label)
    drawn = [[_scaled(image) for image in images[:count]] for images in (reference, quantized)]
    width, height = (max(image.size[axis] for image in drawn[0]) for axis in (0, 1))
    font = ImageFont.load_default(size=15)
    caption_font: Any = ImageFont.load_default(size=12)
    line = sum(caption_font.getmetrics())
    gutter = max(round(font.getlength(name)) for name in labels) + 12
    block, blocks = 2 * height + GAP + CAPTION_LINES * line + 4, -(-count // columns)
    note = f"the first {count} of {len(reference)}" if len(reference) > count else ""
    whole_width = 2 * MARGIN + gutter + columns * (width + 2 * GAP) - 2 * GAP
    whole_height = 2 * MARGIN + blocks * (block + BLOCK_GAP) - BLOCK_GAP + (line + GAP if note else 0)
    canvas = Image.new("RGB", (whole_width, whole_height), PAPER)
    draw = ImageDraw.Draw(canvas)
    for index in range(count):
        row, column = divmod(index, columns)
        left, top = MARGIN + gutter + column * (width + 2 * GAP), MARGIN + row * (block + BLOCK_GAP)
        for place, (name, images) in enumerate(zip(labels, drawn, strict=True)):
            image, y = images[index], top + place * (height + GAP)
            canvas.paste(image, (left + (width - image.width) // 2, y + (height - image.height) // 2))
            if column == 0:
                draw.text((MARGIN + gutter - 12, y + height // 2), name, INK, font, anchor="rm")
        for number, text in enumerate(_wrap(captions[index], caption_font, width)):
            y = top + 2 * height + GAP + 4 + number * line
            draw.text((left + width // 2, y), text, SOFT_INK, caption_font, anchor="ma")
    if note:
        draw.text((MARGIN + gutter, canvas.height - MARGIN), note, SOFT_INK, caption_font, anchor="ls")
    _save(canvas, path)
    return path


def _scaled(image: np.ndarray) -> Image.Image:
    """Resize an image by SCALE, or by less so that no edge exceeds LONGEST_EDGE."""
    height, width = image.shape[:2]
    factor = min(SCALE, LONGEST_EDGE / max(height, width))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    return Image.fromarray(image).resize(size, Image.Resampling.LANCZOS)


def _save(image: Image.Image, path: Path) -> None:
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG")


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Wrap ``text`` into at most two lines of ``width`` pixels, cut with an ellipsis, without control characters."""
    line = " ".join(printable(text[:400]).split())
    for letters in range(width // 3, 3, -1):
        lines = wrap(line, letters, max_lines=CAPTION_LINES, placeholder="...")
        if all(font.getlength(each) <= width for each in lines):
            return lines
    return []
