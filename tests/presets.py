"""The recipe and the model of a preset and the job of knobs, as the command line composes them."""

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sd_quant.composition import job_of
from sd_quant.config import InferJob, Quantize, QuantizeJob
from sd_quant.knobs import read
from sd_quant.places import CONF


def job(*overrides: str) -> QuantizeJob:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return job_of(QuantizeJob, compose("quantize", [*overrides]))


def infer_job(*overrides: str) -> InferJob:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return job_of(InferJob, compose("infer", ["infer=torch", *overrides]))


def recipe_of(preset: str, *overrides: str) -> Quantize:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("quantize", [f"quantize={preset}", *overrides])
    return read(Quantize, OmegaConf.to_container(config, resolve=True)["quantize"], "quantize.")


def model_of(preset: str) -> dict:
    """The section ``model`` of a preset whose checkpoint is nowhere."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("infer", [f"model={preset}", "model.path=nowhere"])
    return OmegaConf.to_container(config.model, resolve=True)
