"""A checkpoint of any kind from what the configuration says of it."""

from dataclasses import replace

from sd_quant.checkpoints.diffusers_folder import INDEX
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.pipeline_folder import open_pipeline
from sd_quant.checkpoints.sgm import open_sgm
from sd_quant.checkpoints.synthetic import sdxl_base_config
from sd_quant.config import Model, anchored
from sd_quant.errors import ConfigError
from sd_quant.models import family_named
from sd_quant.models.checkpoint import Checkpoint


def open_checkpoint(model: Model) -> Checkpoint:
    """The folder of any family's diffusers pipeline; of SDXL a ``.nemo`` too, the folder that it was extracted to, or
    a single file in Stability AI's layout, which is SDXL base and drawn as NeMo draws it.

    Raises what the readers raise, and ConfigError for another kind of file.
    """
    path, tokens = anchored(model.path), model.max_sequence_length
    if tokens is not None and family_named(model.family).TOKENS is None:
        raise ConfigError(
            f"model.max_sequence_length is {tokens}, expected null, because {model.family} has no T5 to read that much"
        )
    if (path / INDEX).is_file() or (path.is_dir() and model.family != "sdxl"):
        return open_pipeline(path, model.family, tokens, model.io or "diffusers")
    if model.family != "sdxl":
        raise ConfigError(
            f"{path} is a file, and of {model.family} a diffusers folder is expected; make one with "
            "diffusers' from_single_file and save_pretrained"
        )
    opened = open_sgm(path, sdxl_base_config()) if path.suffix == ".safetensors" else open_nemo(path)
    return replace(opened, io=model.io or "nemo")
