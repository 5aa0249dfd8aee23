"""Whether a path is a checkpoint of a family: kinds of files and folders, told apart without torch."""

from pathlib import Path

from sd_quant.errors import ConfigError
from sd_quant.files.archive import is_gzipped, is_tar

INDEX = "model_index.json"  # of a diffusers pipeline
CONFIG = "model_config.yaml"  # of an archive of NeMo
ALSO_FILES = "sdxl"  # the family that is also read from single files, NeMo's and Stability AI's


def check_kind(path: Path, family: str) -> None:
    """Raises ConfigError when ``path``, which exists, is no kind of file or folder that ``family`` is read from."""
    if path.is_dir():
        inside = (INDEX, CONFIG) if family == ALSO_FILES else (INDEX,)
        if any((path / name).is_file() for name in inside):
            return
        found = f"a folder without {' and '.join(inside)}"
    elif not path.is_file():
        found = "a device or a pipe"
    elif family == ALSO_FILES and (
        path.suffix.lower() in (".nemo", ".safetensors") or is_gzipped(path) or is_tar(path)
    ):
        return
    else:
        found = "a file" if family != ALSO_FILES else "a file of another kind"
    takes = f"the folder of a diffusers pipeline, which has {INDEX}"
    if family == ALSO_FILES:
        takes += ", a .nemo archive or its folder, or one .safetensors file in Stability AI's layout"
    advice = "check the path"
    if (path.parent / INDEX).is_file():
        advice = f"give the folder around it, {path.parent}"
    elif path.is_file():
        advice = "make one with diffusers' from_single_file and save_pretrained"
    raise ConfigError(f"model.path is {path}, {found}, expected for {family} {takes}; {advice}")
