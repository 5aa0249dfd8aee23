"""The recipe of a preset, as the command line composes it."""

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sd_quant.config import Quantize
from sd_quant.knobs import read
from sd_quant.places import CONF


def recipe_of(preset: str, *overrides: str) -> Quantize:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("quantize", [f"quantize={preset}", *overrides])
    return read(Quantize, OmegaConf.to_container(config, resolve=True)["quantize"], "quantize.")
