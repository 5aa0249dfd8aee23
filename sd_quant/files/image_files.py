"""Files of source images and masks, chosen by name. Opens nothing, and imports no decoder."""

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

OF_IMAGES = re.compile("image|mask|video|frames")  # names of arguments of a pipeline's call that are images
NUMBERS = re.compile("num_|.*_per_")  # though these are none
MOST_OF_ONE = 1000  # images in the list of one argument, such as a video's frames


def files_of(where: str, name: str, value: Any, resolve: Callable[[str], Path]) -> Any:
    """Returns the value of a pipeline's argument, with files for the images that it names; ``resolve`` finds a path.

    An argument is images if its name says so, or if its value is a path that ends as one; that is a file, and for
    several a list, paths between ``;`` or ``|``, or a folder. Raises ConfigError, beginning with ``where``, for a file
    that is missing or none of an image, and for what is neither None, a number, a text, nor a list of these.
    """
    given = value if isinstance(value, list) else [value]
    texts = [text for text in given if isinstance(text, str)]
    if isinstance(value, str) and "prompt" not in name:
        texts = [text.strip() for text in re.split("[;|]", value)]
    says_so = OF_IMAGES.search(name) is not None and not NUMBERS.match(name)
    if texts and "prompt" not in name and (says_so or all(is_image(text) for text in texts)):
        if "" in texts:
            raise ConfigError(f"{where} has no image for {name}, expected the path of a file or a folder; name one")
        found = [file for text in texts for file in one_or_all(where, name, resolve(text))]
        if len(found) > MOST_OF_ONE:
            raise ConfigError(f"{where} has {len(found)} images for {name}, expected at most {MOST_OF_ONE}")
        alone = isinstance(value, str) and len(texts) == 1 and not resolve(texts[0]).is_dir()
        return found[0] if alone else found
    plain = [each for each in given if each is None or isinstance(each, bool | str | int) or is_finite(each)]
    if len(plain) < len(given):
        raise ConfigError(f"{where} has {value!r:.80} for {name}, expected a number, a text, an image or a list")
    return value


def named_files(what: str, arguments: Mapping[str, Any]) -> dict[str, Path]:
    """Returns the files among the values of ``files_of`` by names that begin with ``what``."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in arguments.items()}
    return {
        f"{what} {name}" + (f" {number}" if number else ""): each
        for name, of_one in lists.items()
        for number, each in enumerate(of_one)
        if isinstance(each, Path)
    }


def is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def is_image(text: str) -> bool:
    return Path(text).suffix.lower() in IMAGE_FORMATS


def one_or_all(where: str, name: str, path: Path) -> list[Path]:
    """Returns the file, or the images of a folder by name. Raises ConfigError when there is none."""
    files = image_files(name, path) if path.is_dir() else [path]
    if not (is_image(files[0].name) and files[0].is_file()):
        raise ConfigError(
            f"{where} names {path} for {name}, which is no file of an image, expected one that ends with "
            f"{', '.join(IMAGE_FORMATS)}, or a folder of them, as of a video's frames"
        )
    return files


def image_files(knob: str, path: Path) -> list[Path]:
    """Returns the file, or the images of a folder by name. Raises ConfigError, naming ``knob``, when there is none."""
    if not path.is_dir():
        files = [path]
    else:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_FORMATS and file.is_file())
    if not files or files[0].suffix.lower() not in IMAGE_FORMATS or not files[0].is_file():
        raise ConfigError(
            f"{knob} is {path}, expected an image or a folder with images, whose names end with "
            f"{', '.join(IMAGE_FORMATS)}"
        )
    return files


def mask_files(knob: str, path: Path, images: Sequence[Path]) -> list[Path]:
    """Returns the mask of each image: one file for all, or the file of a folder with the image's name and any suffix.

    Raises ConfigError for an image without one.
    """
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
