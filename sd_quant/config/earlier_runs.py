"""What earlier runs have left of their knobs, whichever version they are of."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from sd_quant.config.comparison import CacheFolder
from sd_quant.config.main_job import QuantizeJob, RecipeJob
from sd_quant.config.model import Model
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import read_regular
from sd_quant.files.archive import MAX_TEXT
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.knobs import read
from sd_quant.places import input_path
from sd_quant.text import one_line

INTERPOLATION = "${"  # begins what OmegaConf resolves
# What runs did before these knobs were there, so that their configs can still be read.
BEFORE: dict[str, dict[str, object]] = {
    "model": {"loras": [], "encoder": False, "calibration_image": None, "calibration_mask": None, "sizes": None},
    "infer": dict.fromkeys(("image", "mask", "strength", "sizes", "chosen_because")),
    "quantize": {"include": {}, "weights_alone": {}, "per_token": False, "rotation": 0, "weight_observer": "min_max"},
    "trt": {"sizes": None},
    "judge": {"candidates": [], "layers": 20, "runtimes": True, "trust_runs": False, "confidence": 0.95},
}
FILES = ("metrics.json", "config.yaml", "layers.csv")  # by which a folder is known as that of a finished run
DESCRIBE = ("model", "quantize", "infer")  # the sections of a stranger's config that are read


def completed(knobs: dict) -> dict:
    """The knobs of a run's ``config.yaml``, with those that its version did not have."""
    sections = {section: before | knobs.get(section, {}) for section, before in BEFORE.items()}
    return {"compiled_baseline": False, "overwrite": False} | knobs | sections


def is_run(path: Path) -> bool:
    """Whether ``path`` is the folder of a finished run of quantize.py."""
    return all((path / name).is_file() for name in FILES)


def run_job(run: str) -> QuantizeJob:
    """The job of a finished run of our own. Raises what ``knobs_of`` raises."""
    return read(QuantizeJob, knobs_of(run))


def recipe_of_run(run: str, cache: CacheFolder) -> RecipeJob:
    """The job of a finished run of anybody, as far as it describes the recipe; statistics are kept in our ``cache``.

    Where else it says what to run or where to write, nothing is obeyed. Raises what ``knobs_of`` raises.
    """
    knobs = knobs_of(run)
    described: dict[str, Any] = {name: knobs.get(name) for name in DESCRIBE}
    job = read(RecipeJob, described | {"cache": dataclasses.asdict(cache)})
    job.infer = dataclasses.replace(job.infer, out_path=None, allow_untrusted_plan=False)
    job.quantize = dataclasses.replace(job.quantize, devices=1, accelerator="auto")
    return job


def knobs_of(run: str) -> dict:
    """The knobs of a finished run, with those that its version did not have.

    Raises ConfigError when it is none, ArtifactError when its configuration is damaged.
    """
    folder = input_path(run)
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"run is {run}, which has no {name}, expected the folder of a finished run of quantize")
    try:
        knobs = load_yaml(read_regular(folder / "config.yaml", MAX_TEXT))
        if not isinstance(knobs, dict) or INTERPOLATION in str(knobs):
            raise ValueError("it holds no plain knobs")
        return completed(knobs)
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"{folder / 'config.yaml'} is not the config of a run ({one_line(error, 200)}); give another run"
        ) from error


def run_model(run: str) -> dict | None:
    """The ``model`` section of an earlier run, or None where it left no configuration.

    Raises ArtifactError when its configuration is damaged.
    """
    resolved = input_path(run) / "config.yaml"
    if not resolved.is_file():
        return None
    try:
        model = BEFORE["model"] | load_yaml(read_regular(resolved, MAX_TEXT))["model"]  # type: ignore[index,operator]
        if INTERPOLATION in str(model):
            raise ValueError("Hydra would read variables of the environment for it")
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"{resolved} is not the config of a run ({one_line(error, 200)}); give another run, or run=null"
        ) from error
    return dataclasses.asdict(read(Model, model, "model."))


def artifact(run: Path, kind: str, part: str) -> Path:
    """Where a run keeps a part: ``onnx/<part>/<part>.onnx`` or ``plan/<part>.plan``."""
    return run / "onnx" / part / f"{part}.onnx" if kind == "onnx" else run / "plan" / f"{part}.plan"
