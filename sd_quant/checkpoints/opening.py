"""A checkpoint of any kind from what the configuration says of it."""

from sd_quant.checkpoints.diffusers_folder import INDEX
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.pipeline_folder import open_pipeline
from sd_quant.config import Model, anchored
from sd_quant.errors import ConfigError
from sd_quant.models.loading import Checkpoint


def open_checkpoint(model: Model) -> Checkpoint:
    """A ``.nemo`` or the folder it was extracted to, of SDXL, or the folder of any family's diffusers pipeline.

    Raises what the readers raise, and ConfigError for another kind of file.
    """
    path = anchored(model.path)
    if (path / INDEX).is_file():
        return open_pipeline(
            path, model.family, model.max_sequence_length, "diffusers" if model.io is None else model.io
        )
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"{path} is a single file of weights; for SDXL make a folder of it with python -m "
            f"sd_quant.checkpoints.convert {path} <folder>, for others with diffusers' from_single_file and "
            "save_pretrained"
        )
    if model.family != "sdxl":
        return open_pipeline(path, model.family)  # which says what is missing
    return open_nemo(path, "nemo" if model.io is None else model.io)
