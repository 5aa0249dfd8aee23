"""Read the knobs of an earlier run of this version from the ``config.yaml`` in its folder."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sd_quant.calibration.prompts import KEPT
from sd_quant.config.assignment_file import ASSIGNMENT
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

MARKS = ("metrics.json", "config.yaml", "layers.csv")  # files that mark the folder of a finished run
DESCRIBE = ("model", "quantize", "infer")  # the sections that are read from an untrusted run
PRECISE = "_weights_alone"  # suffix of the denoiser's file for steps with unquantized inputs


def is_finished_run(path: Path) -> bool:
    """Whether ``path`` is the folder of a finished run of quantize.py."""
    return all((path / name).is_file() for name in MARKS)


def is_run(path: Path) -> bool:
    """Whether ``path`` is taken for the folder of a run of quantize.py: at most one file of ``MARKS`` is missing."""
    return sum((path / name).is_file() for name in MARKS) >= len(MARKS) - 1


def run_job(run: str) -> QuantizeJob:
    """Read all knobs of a finished run that is trusted. Raises ConfigError if unfinished, ArtifactError if damaged."""
    return read(QuantizeJob, knobs_of_run(run))


def recipe_of_run(run: str, cache: CacheFolder) -> RecipeJob:
    """Read the recipe of a finished run, even an untrusted one: knobs that choose devices, folders or plans are reset.

    ``cache`` replaces the run's own. Raises ConfigError for a folder without a finished run, ArtifactError if damaged.
    """
    knobs = knobs_of_run(run)
    described: dict[str, Any] = {name: knobs.get(name) for name in DESCRIBE}
    job = read(RecipeJob, described | {"cache": dataclasses.asdict(cache)})
    job.model = dataclasses.replace(job.model, observed=cache.dir)
    job.infer = dataclasses.replace(job.infer, out_path=None, allow_untrusted_plan=False)
    job.quantize = dataclasses.replace(job.quantize, devices=1, accelerator="auto")
    return job


def knobs_of_run(run: str) -> dict:
    """Read the knobs of a finished run. Raises ConfigError for any other folder, ArtifactError for damaged knobs."""
    folder = input_path(run)
    for name in MARKS:
        if not (folder / name).is_file():
            raise ConfigError(f"run is {run}, which has no {name}, expected the folder of a finished run of quantize")
    described = lambda knobs: knobs | {section: {**knobs[section]} for section in DESCRIBE}  # noqa: E731
    knobs = plain_knobs(folder / "config.yaml", described, "give another run")
    recipe = knobs["quantize"]
    limited = recipe.get("budget") is not None and (folder / ASSIGNMENT).is_file()
    if recipe.get("assignment") is not None or limited:
        knobs["quantize"] = recipe | {"budget": None, "assignment": str(folder / ASSIGNMENT)}  # not measured again
    if (folder / KEPT).is_file():  # the file that they were drawn from may be gone
        knobs["infer"] |= {"prompts": str(folder / KEPT), "num_prompts": None, "prompts_seed": 0}
    return knobs


def run_model(run: str) -> dict | None:
    """Read the section ``model`` of an earlier run; None without ``config.yaml``. Raises ArtifactError if damaged."""
    file = input_path(run) / "config.yaml"
    if not file.is_file():
        return None
    model = plain_knobs(file, lambda knobs: {**knobs["model"]}, "give another run, or run=null")
    return dataclasses.asdict(read(Model, model, "model."))


def plain_knobs(file: Path, select: Callable[[dict], dict], advice: str) -> dict:
    """Read a ``config.yaml`` and return ``select`` of its knobs. Raises ArtifactError, with ``advice``, if unusable."""
    try:
        knobs = load_yaml(read_regular(file, MAX_TEXT))
        if not isinstance(knobs, dict):
            raise ValueError("it holds no knobs by name")
        return select(knobs)
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{file} is not the config of a run ({one_line(error, 200)}); {advice}") from error


def artifact(run: Path, kind: str, part: str, suffix: str = "") -> Path:
    """Return a part's file of ``kind`` onnx or plan in a run; suffix PRECISE: for steps with unquantized inputs."""
    name = f"{part}{suffix}.{kind}"
    return run / "onnx" / part / name if kind == "onnx" else run / "plan" / name
