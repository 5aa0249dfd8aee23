"""Files of source images and masks, chosen by name. Opens nothing, and imports no decoder."""

from collections.abc import Sequence
from pathlib import Path

from sd_quant.errors import ConfigError

IMAGE_FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
}  # Pillow's readers, none of which runs code


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
