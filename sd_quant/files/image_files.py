"""Choose the files of source images and masks by name, without opening them or importing a decoder."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_quant.errors import ConfigError

IMAGE_FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
}  # Pillow's readers, none of which runs code

OF_IMAGES = re.compile("image|mask|video|frames")  # in names of a pipeline's arguments that are images
NUMBERS = re.compile("num_|.*_per_")  # in names of arguments that are numbers even so
PLAIN = (bool, int, str, type(None))  # and finite floats: values that are no images
MOST_OF_ONE = 1000  # images in the list of one argument, such as a video's frames


def files_of(where: str, name: str, value: Any, resolve: Callable[[str], Path]) -> Any:
    """Return a pipeline argument's ``value`` with image paths replaced by files; ``resolve`` locates a path.

    The value is images if the name says so (``OF_IMAGES``), or if it is a path that ends like an image: one file, or
    for several a list, paths separated by ``;`` or ``|``, or a folder. Raises ConfigError, beginning with ``where``,
    for a missing file or no image, and for a value other than None, a number, a text, or a list of these.
    """
    given = value if isinstance(value, list) else [value]
    texts = [text for text in given if isinstance(text, str)]
    if isinstance(value, str) and "prompt" not in name:
        texts = [text.strip() for text in re.split("[;|]", value)]
    says_so = OF_IMAGES.search(name) is not None and not NUMBERS.match(name)
    if texts and "prompt" not in name and (says_so or all(is_image(text) for text in texts)):
        if "" in texts:
            raise ConfigError(f"{where} has no image for {name}, expected the path of a file or a folder; name one")
        found = [file for text in texts for file in image_files(f"{where}: {name}", resolve(text))]
        if len(found) > MOST_OF_ONE:
            raise ConfigError(f"{where} has {len(found)} images for {name}, expected at most {MOST_OF_ONE}")
        alone = isinstance(value, str) and len(texts) == 1 and not resolve(texts[0]).is_dir()
        return found[0] if alone else found
    if any(not math.isfinite(each) if isinstance(each, float) else not isinstance(each, PLAIN) for each in given):
        raise ConfigError(f"{where} has {value!r:.80} for {name}, expected a number, a text, an image or a list")
    return value


def named_files(what: str, arguments: Mapping[str, Any]) -> dict[str, Path]:
    """Return the image files among ``arguments``, values of ``files_of``, keyed ``<what> <argument> <number>``."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in arguments.items()}
    return {
        f"{what} {name}" + (f" {number}" if number else ""): each
        for name, of_one in lists.items()
        for number, each in enumerate(of_one)
        if isinstance(each, Path)
    }


def is_image(path: str | Path) -> bool:
    return Path(path).suffix.lower() in IMAGE_FORMATS


def image_files(knob: str, path: Path) -> list[Path]:
    """Return the file, or a folder's images in order of name. Raises ConfigError, naming ``knob``, if there is none."""
    files = sorted(each for each in (path.iterdir() if path.is_dir() else [path]) if is_image(each) and each.is_file())
    if not files:
        raise ConfigError(
            f"{knob} is {path}, expected an image or a folder with images, whose names end with "
            f"{', '.join(IMAGE_FORMATS)}"
        )
    return files


def mask_files(knob: str, path: Path, images: Sequence[Path]) -> list[Path]:
    """Return each image's mask: one file for all, or a folder's file of that stem. Raises ConfigError if missing."""
    files = image_files(knob, path)
    if not path.is_dir():
        return files * len(images)
    by_stem = {file.stem: file for file in files}
    lacking = [image.name for image in images if image.stem not in by_stem]
    if lacking:
        raise ConfigError(
            f"{knob} is {path}, which holds no mask for {len(lacking)} of {len(images)} images, such as {lacking[0]}; "
            "expected one of the same name for each, or a single file for all"
        )
    return [by_stem[image.stem] for image in images]
