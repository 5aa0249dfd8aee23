"""The jobs (knobs) of all commands except ``quantize``; these commands use an earlier run, files or a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from sd_quant.config.comparison import CacheFolder, Judge, Metrics, Timing
from sd_quant.config.earlier_runs import PRECISE, artifact, is_finished_run, recipe_of_run, run_model
from sd_quant.config.images import AUTO, LEVERS, Infer, engines
from sd_quant.config.main_job import QuantizeJob
from sd_quant.config.model import Model, parts_of
from sd_quant.config.plans import ExportShape, Trt, check_batch, check_dtype, check_plan_size, engine_of
from sd_quant.config.targets import check_consumers, check_targets
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, check_installed
from sd_quant.errors import ConfigError
from sd_quant.files import check_replaceable, check_writable
from sd_quant.inference.schedules import WEIGHTS_ALONE, engine_of_letter
from sd_quant.interchange import TARGETS
from sd_quant.knobs import Limit, Only, check, check_unused, one_of
from sd_quant.models import OBSERVED
from sd_quant.places import existing, input_path, output_path
from sd_quant.report.record import RECORD, VARIANTS, at, read_object

PART_NAMES = ("unet_xl", "vae", "clip1", "clip2")  # parts whose files can be given without a run
RUN = Annotated[str | None, "folder of an earlier run, whose files are taken"]
FILES = Annotated[dict[str, str | None], "the file of a part, instead of the run's"]


@dataclass(slots=True)
class ExportJob:
    run: RUN
    files: FILES
    model: Model
    trt: Trt
    infer: ExportShape

    def __post_init__(self):
        self.model.check_sides("infer", self.infer.width, self.infer.height, None)
        self.model.check_sides("trt", None, None, self.trt.sizes)
        check_batch(self.trt, self.infer)
        check_plan_size(self.trt, self.infer)
        check_dtype(self.model, trt=self.trt)
        expected = "a library that builds plans, because the ONNX files are there already"
        check(self.trt.library != "none" or self.unquantized(), "trt.library", self.trt.library, expected)

    def unquantized(self) -> bool:
        """Whether the checkpoint itself is exported, because neither a run nor files are given."""
        return self.run is None and not any(self.files.values())

    def check_files(self) -> None:
        if self.unquantized():
            self.model.check_files()
        else:
            check_parts(self, "onnx")
        check_out_path(self.infer.out_path, {"config.yaml": b"model:"} if self.unquantized() else {})
        if self.trt.library in PLAN_BUILDERS:
            check_installed(self.trt.library)


@dataclass(slots=True)
class InferJob:
    run: RUN
    variant: Annotated[str, one_of(VARIANTS), "a run's denoiser: quantized, or full_precision as in NeMo's script"]
    files: FILES
    model: Model
    infer: Annotated[Infer, engines(lambda runtime: runtime.unquantized)]

    def __post_init__(self):
        self.model.check_sides("infer", self.infer.width, self.infer.height, self.infer.sizes)
        because = "quantize.py chooses the steps; the record of its run has them under levers, for infer.schedule"
        check_unused(self.infer, "infer.", (True, {"reuse": None}, because))
        chosen = self.infer.precise_steps if self.infer.chooses_precise else None
        check(chosen is None, "infer.precise_steps", chosen, f"places, because {because}")
        fits = self.infer.engine == AUTO or RUNTIMES[self.infer.engine].unquantized
        expected = "another, because this one computes what quantize derives and reads no file"
        check(fits, "infer.engine", self.infer.engine, expected)
        self.model.encoder |= self.infer.image is not None
        self.model.calibration_table = self.infer.table or self.model.calibration_table  # whose columns are observed

    def check_files(self) -> None:
        """Choose the engine for ``infer=auto`` by the files. Raises SdQuantError for a missing or damaged file."""
        self.infer = self.infer.with_engine(lambda: engine_of(part_paths(self, "plan"), part_paths(self, "onnx")))
        check_dtype(self.model, self.infer.engine)
        self.infer.check_files()
        self.model.check_files()
        check_out_path(self.infer.out_path, {RECORD: rb'\{\s*"schema_version": \d+,\s*"status"'})
        check_installed(self.infer.engine)
        if kind := RUNTIMES[self.infer.engine].file:
            check_parts(self, kind)
        precise_paths(self)


@dataclass(slots=True)
class JudgeJob:
    model: Model
    infer: Annotated[Infer, Only("engine", one_of(["torch"]))]
    judge: Judge
    timing: Timing
    metrics: Metrics
    cache: CacheFolder

    def __post_init__(self):
        self.model.check_sides("infer", self.infer.width, self.infer.height, self.infer.sizes)
        self.metrics.check_sizes(self.infer.sizes)
        levers = True, dict.fromkeys(LEVERS), "candidates are compared by their bits alone"
        check_unused(self.infer, "infer.", levers)
        check(bool(self.judge.candidates), "candidates", "empty", "at least one file or folder")
        expected = (
            "torch, which computes what each checkpoint's own library does; judge.runtimes=true runs that library too"
        )
        check(self.infer.engine == "torch", "infer.engine", self.infer.engine, expected)
        self.model.encoder |= self.infer.image is not None
        self.model.calibration_table = self.infer.table or self.model.calibration_table  # whose columns are observed

    def check_files(self) -> None:
        self.model.check_files()
        self.infer.check_files()
        self.judge.check_files()
        self.metrics.check_files()
        self.cache.check_files()


@dataclass(slots=True)
class HandOverJob:
    run: Annotated[str, "folder of a finished run"]
    to: Annotated[
        list[str] | str,
        Limit(
            lambda to: bool(to) and set([to] if isinstance(to, str) else to) <= TARGETS.keys(),
            lambda: f"one of {', '.join(TARGETS)}, or a list of them",
        ),
        f"tools that the result is exported to: {', '.join(TARGETS)}",
    ]
    images: Annotated[bool, "whether images are made as each tool computes them, to measure its own fidelity"]
    cache: CacheFolder

    def targets(self) -> list[str]:
        return [self.to] if isinstance(self.to, str) else self.to

    def check_files(self) -> None:
        job = recipe_of_run(self.run, self.cache)
        check_targets("to", self.targets(), job.model, job.quantize, job.formats()["weights"])
        self.cache.check_files()
        check_consumers(self.targets())


@dataclass(slots=True)
class InspectJob:
    model: Model
    cache: CacheFolder

    def check_files(self) -> None:
        self.model.check_files()
        self.cache.check_files()


def part_names(job: ExportJob | InferJob) -> list[str]:
    """Return the model's parts, as a run or ``job.model`` states them; else PART_NAMES and those of given files."""
    model = run_model(job.run) if job.run else None
    if model and model["family"] == OBSERVED:  # its parts were found when the run recorded the pipeline
        return sorted(path.name for path in (input_path(job.run or "") / "onnx").iterdir())
    model = asdict(job.model) if isinstance(job, InferJob) else model
    if model is None:
        return list(dict.fromkeys((*PART_NAMES, *job.files)))
    return parts_of(model["parts"], model["encoder"], model["controlnets"])


def part_paths(job: ExportJob | InferJob, kind: str) -> dict[str, Path]:
    """Return each part's file, given or of ``kind`` (onnx, plan) in the run. Raises ConfigError for an unknown part."""
    run = existing("run", job.run, "the folder of an earlier run") if job.run else None
    names = part_names(job)
    paths = {}
    for part, given in job.files.items():
        check(given is None or part in names, "files", part, f"a part of the model: {', '.join(names)}")
    for part in names:
        if given := job.files.get(part):
            paths[part] = input_path(given)
        elif run is not None:
            paths[part] = artifact(run / "full_precision" if part in unquantized_parts(job) else run, kind, part)
    return paths


def precise_paths(job: InferJob) -> dict[str, Path]:
    """Return a run's denoisers for steps of higher precision (h, f), by engine name. Raises ConfigError if missing."""
    run, kind = input_path(job.run or ""), RUNTIMES[job.infer.engine].file
    denoiser = at(read_object(run / RECORD), "denoiser", "part") if job.run and job.variant == "quantized" else None
    paths = {}
    for letter in sorted(job.infer.precise_letters):
        expected = f"no step {letter}, unless run= names a run with such steps whose {letter}-file this engine loads"
        folder, suffix = (run, PRECISE) if letter == WEIGHTS_ALONE else (run / "full_precision", "")
        path = artifact(folder, kind, str(denoiser), suffix) if kind and denoiser else None
        check(path is not None and path.is_file(), "infer.schedule", job.infer.given_schedule, expected)
        paths[engine_of_letter(str(denoiser), letter)] = path
    return paths


def unquantized_parts(job: ExportJob | InferJob) -> set[str]:
    """Return the parts that variant=full_precision reads unquantized. Raises ConfigError if a run has no such files."""
    if not isinstance(job, InferJob) or job.variant == "quantized":
        return set()
    folder = input_path(job.run or "") / "full_precision" / "onnx"
    expected = "quantized, because run= names no folder with full_precision/onnx, as one of quantize has"
    check(job.run is not None and folder.is_dir(), "variant", job.variant, expected)
    return {path.name for path in folder.iterdir()}


def check_parts(job: ExportJob | InferJob, kind: str) -> None:
    """Raise ConfigError for missing files of ``kind``: infer needs a file of each part, export_trt of any part."""
    paths = part_paths(job, kind)
    missing = [part for part in part_names(job) if part not in paths]
    if missing and (isinstance(job, InferJob) or not paths):
        raise ConfigError(
            f"no file is given for {', '.join(missing)}; set run=<directory of an earlier run>, "
            f"or {given_as(missing[0])}=<path of its .{kind}>"
        )
    for part, path in paths.items():
        if not path.is_file():
            raise ConfigError(
                f"{part} should be at {path}, which does not exist; check run= or set {given_as(part)}=<path>"
            )


def given_as(part: str) -> str:
    """Return the name of the knob for a part's file, such as ``vae`` or ``+files.transformer``."""
    return part if part in PART_NAMES else f"+files.{part}"


def check_out_path(path: str | None, written: Mapping[str, bytes]) -> None:
    """Raise ConfigError for an unwritable folder, or a file there that is in ``written`` and begins otherwise."""
    if path is None:
        return
    check_writable(output_path(path), "infer.out_path")
    expected = "another folder than a finished run's, whose record would be replaced"
    check(not written or not is_finished_run(output_path(path)), "infer.out_path", path, expected)
    for name, begins in written.items():
        check_replaceable(output_path(path) / name, "infer.out_path", begins, f"the {name} of this command")


JOBS: dict[str, type] = {  # by the commands that Hydra configures
    "quantize": QuantizeJob, "export_trt": ExportJob, "infer": InferJob, "hand_over": HandOverJob, "judge": JudgeJob,
    "inspect": InspectJob,
}  # fmt: skip
