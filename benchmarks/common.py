"""Shared by the benchmarks: a checkpoint with its calibration prompts, a comparison of images, options and reports."""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

import torch
import yaml
from hydra import compose
from torch import Tensor, nn

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.composition import composing, job_of
from sd_quant.config import Quantize, QuantizeJob
from sd_quant.engines.base import Engine
from sd_quant.files import write_json
from sd_quant.inference.loading import LoadedModel, load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.knobs import read
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.intervals import mean_interval
from sd_quant.models.checkpoint import denoiser_weights
from sd_quant.models.parts import Contract
from sd_quant.places import HOME, input_path
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.provenance import fingerprint, machine
from sd_quant.simulation.modelopt import quantizer_configs
from sd_quant.stages.assign import assign
from sd_quant.stages.load import with_recipe
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.session import Session

MODEL, PROMPTS = "sdxl_mini", Path(__file__).parent / "prompts"
GUIDANCE, SEED = 5.0, 42  # of the main job's calibration
IMAGE_SEED = 123  # of the main job's images
REPORTED = PROMPTS / "sdxl_mini_report.txt"  # on which results are reported
STATISTICS = HOME / "outputs/cache/statistics"  # the main job's cache
Result = TypeVar("Result")


def job_with(preset: str, *overrides: str) -> QuantizeJob:
    """The checked job of ``python quantize.py quantize=<preset> <overrides>``."""
    with composing("quantize"):
        return job_of(QuantizeJob, compose("quantize", [f"quantize={preset}", *overrides]))


def recipe_of(preset: str, *overrides: str) -> Quantize:
    """The section ``quantize`` of that job."""
    return job_with(preset, *overrides).quantize


@dataclass(frozen=True)
class Subject:
    """The model and its calibration prompts. ``names`` are the layers that recipes quantize by default."""

    model: LoadedModel
    roles: dict[str, str]
    prompts: list[str]
    size: int
    path: Path
    family: str

    @property
    def denoiser(self) -> str:
        """The part that is quantized."""
        return self.model.checkpoint.family.DENOISER

    @property
    def names(self) -> list[str]:
        return [name for name, role in self.roles.items() if role != "excluded"]

    def statistics(self, steps: int, cached: bool = True) -> Statistics:
        """The statistics of all prompts, on the CPU, from the main job's cache, which knows no fused LoRAs.

        Excluded linears are among the layers, as in the main job, because a recipe may include them.
        """
        linears = {name for name, layer in self.model.denoiser.named_modules() if isinstance(layer, nn.Linear)}
        names = [name for name in self.roles if name in self.names or name in linears]
        checkpoint = fingerprint(self.path)["sha256"] if cached else ""
        sampling = Sampling(steps, GUIDANCE, self.size, self.size, 1, SEED)
        wanted, cache = Pass(self.model, names, self.prompts, sampling), STATISTICS if cached else None
        return calibrate(wanted, fabric_for("cpu"), checkpoint_sha256=checkpoint, cache=cache)

    def assignment(
        self, statistics: Statistics, recipe: Recipe, kept: Collection[str] = (),
        recipes: Mapping[str, Recipe] = {},
    ) -> dict[str, LayerAssignment]:  # fmt: skip
        """The assignment as the main job derives it, with weights that are read from the checkpoint again."""
        checkpoint = self.model.checkpoint
        weights, family = denoiser_weights(checkpoint), checkpoint.family
        linears = [name for name, role in self.roles.items() if role != "conv"]
        return derive(
            self.roles, lambda name: weights[f"{name}.weight"], statistics.layers, recipe,
            family.shared_inputs(linears), {**recipes, **dict.fromkeys(kept, "kept")},
            family.attentions(self.model.denoiser), lambda name: weights.get(f"{name}.bias"),
        )  # fmt: skip


def simulated(subject: Subject, job_of_row: Callable[[str], QuantizeJob], steps: int) -> Callable[[str, Path], Engine]:
    """The function that quantizes the denoiser in torch by the job of a row; one calibration serves all."""
    checkpoint, statistics = subject.model.checkpoint, cache(subject.statistics)

    def denoiser_of(row: str, folder: Path) -> Engine:
        job = job_of_row(row)
        model = dataclasses.replace(job.model, family=subject.family)
        loaded = with_recipe(Session(checkpoint), model, job.infer, job.quantize)
        return open_simulated(checkpoint, assign(loaded, statistics(steps)))

    return denoiser_of


class FullPrecision:
    """Full precision's images of some prompts, which the images of other denoisers are compared with."""

    def __init__(self, subject: Subject, prompts: list[str], steps: int, batch_size: int = 8):
        self.subject, self.prompts = subject, prompts
        self.sampling = Sampling(steps, GUIDANCE, subject.size, subject.size, batch_size, IMAGE_SEED)
        self.parts = subject.model.torch_engines()
        self.made = pipeline_of(subject.model.checkpoint, self.parts)(self.prompts, self.sampling)

    def fidelity_of(self, denoiser: Engine) -> dict:
        """The fidelity of the images that the pipeline makes with this denoiser, see ``fidelity``."""
        parts = self.parts | {self.subject.denoiser: denoiser}
        made = pipeline_of(self.subject.model.checkpoint, parts)(self.prompts, self.sampling)
        return fidelity(self.made.images, made.images, self.made.latents, made.latents)

    def of_rows(
        self, rows: Mapping[str, dict], denoiser_of: Callable[[str, Path], Engine], folder: Path
    ) -> dict[str, dict]:
        """The fidelity of each row, whose denoiser is made from its name and a folder.

        Rows whose ``record.json`` is there, with their figures and what ``rows`` has of them, are not made again.
        """
        found = {}
        with progress(len(rows), "rows") as advance:
            for name, facts in rows.items():
                kept = folder / label(name) / "record.json"
                if not kept.exists() or json.loads(kept.read_text(encoding="utf-8"))["prompts"] != self.prompts:
                    figures = self.fidelity_of(denoiser_of(name, kept.parent))
                    write_json(kept, {**facts, "prompts": self.prompts, "fidelity": figures})
                found[name] = json.loads(kept.read_text(encoding="utf-8"))["fidelity"]
                advance()
        return found


def label(name: str) -> str:
    """The name of a row as that of a folder."""
    return "".join(letter if letter.isalnum() or letter in "=._-" else "_" for letter in name)


def open_subject(path: Path | None, prompts: Path | None, count: int, model: str = MODEL) -> Subject:
    """A checkpoint of the kind of ``model``, a file of conf/model, and the first ``count`` prompts of a file.

    Where no path is given, both are those of ``model``.
    """
    known = yaml.safe_load(input_path(f"conf/model/{model}.yaml").read_text(encoding="utf-8"))
    path, prompts = path or input_path(known["path"]), prompts or input_path(known["calibration_prompts"])
    given, tokens = read_prompts(prompts), known["max_sequence_length"]
    checkpoint = open_checkpoint(
        path, known["family"], io=None, max_sequence_length=tokens, parts=known["parts"], loras=()
    )
    opened = load_model(checkpoint)
    if count > len(given):
        raise SystemExit(f"{count} prompts are more than the {len(given)} of {prompts}; ask for fewer")
    roles = checkpoint.family.layer_roles(opened.denoiser)
    return Subject(opened, roles, given[:count], known["width"], path, known["family"])


def image_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options of benchmarks that compare images; ``description`` is the script's docstring."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=MODEL, help="a shipped checkpoint, as in model= (%(default)s)")
    made.add_argument("--prompts", type=Path, default=REPORTED, help="of the images (%(default)s)")
    made.add_argument("--images", type=int, default=64, help="(%(default)s)")
    made.add_argument("--calib-size", type=int, default=32, help="prompts to calibrate on (%(default)s)")
    made.add_argument("--steps", type=int, default=20, help="of denoising (%(default)s)")
    made.add_argument("--batch", type=int, default=8, help="images at a time (%(default)s)")
    made.add_argument("--out", type=Path, help="for the figures (%(default)s)")
    made.set_defaults(**defaults)
    return made


def recipe_parser(description: str, name: str) -> argparse.ArgumentParser:
    """The options of benchmarks of a checkpoint's recipes, whose rows are kept in a folder of this ``name``."""
    made = image_parser(description, prompts=PROMPTS / "sdxl_mini.txt", out=HOME / f"outputs/benchmarks/{name}/choice")
    made.add_argument("--checkpoint", type=Path, help="another one of its kind")
    made.add_argument("--calibration", type=Path, help="prompts to calibrate on, of the other one")
    return made


def subject_of(options: argparse.Namespace) -> Subject:
    """The subject of the options of ``recipe_parser``."""
    return open_subject(options.checkpoint, options.calibration, options.calib_size, options.model)


def reference_of(subject: Subject, options: argparse.Namespace) -> FullPrecision:
    """Full precision's images for the options of ``image_parser``."""
    return FullPrecision(subject, read_prompts(options.prompts)[: options.images], options.steps, options.batch)


def paired(values: Sequence[float], others: Sequence[float]) -> str:
    """The mean difference of two recipes over the same images, with its standard error."""
    differences = [value - other for value, other in zip(values, others, strict=True)]
    return f"{fmean(differences):+.2f} ± {stdev(differences) / math.sqrt(len(differences)):.2f}"


def with_interval(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The mean of values, with its interval at 95 %."""
    interval = mean_interval(list(values))
    return f"{form.format(interval.value)} ± {interval.high - interval.value:.2f}"


def cells_of(found: Mapping[str, Any]) -> list[str]:
    """A fidelity's PSNR with its interval, its worst and its LPIPS."""
    return [with_interval(found["psnr"]["values"]), f"{found['psnr']['min']:.2f}", f"{found['lpips']['mean']:.4f}"]


def job_of_run(folder: Path) -> QuantizeJob:
    """The job that left its results in ``folder``."""
    return read(QuantizeJob, yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))


def modelopt_config(assignment: Mapping[str, LayerAssignment]) -> dict:
    """ModelOpt's configuration of an assignment, as ``mtq.quantize`` reads it; no calibration."""
    rules = [
        {"quantizer_name": f"{layer.name}.{name}", "cfg": config}
        for layer in assignment.values()
        for name, config in quantizer_configs(layer).items()
    ]
    return {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *rules], "algorithm": None}


def drawn_inputs(contract: Contract, batch: int, latent: int) -> dict[str, Tensor]:
    """Random inputs of one call with latents of this size, the same in every process."""
    shapes = contract.shapes(batch=batch, height=latent, width=latent)
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}


def calls_of(engines: Mapping[str, Engine], inputs: Mapping[str, Tensor]) -> dict[str, Callable[[], dict]]:
    """A call of each engine with the same inputs."""
    return {name: partial(engine, **inputs) for name, engine in engines.items()}


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def report(options: argparse.Namespace, figures: dict) -> None:
    """Write ``--out``, with the options and the machine beside the figures."""
    if options.out:
        chosen = {name: str(value) if name == "prompts" else value for name, value in vars(options).items()}
        del chosen["out"]
        write_json(options.out, {"options": chosen, **figures, "machine": machine()})
        print(f"written: {options.out}")
