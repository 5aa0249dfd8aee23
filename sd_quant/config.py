"""Every knob, typed and checked before anything heavy is imported (no torch here).

Hydra composes YAML into a plain mapping; ``sd_quant.knobs.read`` turns that into these dataclasses. They refuse what
they do not know, so a knob added with ``+`` is never misspelt in silence. Relative paths are taken from the repository.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from sd_quant.calibration.prompts import draw_prompts, is_table, read_prompts
from sd_quant.checkpoints.archive import is_gzipped, open_members
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, check_installed
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.knobs import check, check_at_least, check_choice, read
from sd_quant.models import FAMILIES
from sd_quant.quantization.formats import FORMATS, min_compute_capability
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.percentile import COLLECT_METHODS, PERCENTILE_CALIBRATORS
from sd_quant.quantization.recipe import QUANT_LEVELS, Enable, formats_used
from sd_quant.quantization.smoothing import SMOOTHINGS
from sd_quant.trackers import TRACKERS

REPOSITORY = Path(__file__).resolve().parents[1]
RTX_TARGETS = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")  # of TensorRT for RTX 1.7
PRECISION_NAMES = ("auto", "fp32", "fp16", "bf16")
USUAL_TARGETS = ("SM89", "SM120")
PART_NAMES = ("unet_xl", "vae", "clip1", "clip2")  # of files that no run tells of


def check_seed(knob: str, seed: int) -> None:
    check(0 <= seed < 2**32, knob, seed, "a whole number from 0 to 2^32 - 1")


def check_picture(group: str, width: int, height: int) -> None:
    for axis, size in (("width", width), ("height", height)):
        check(64 <= size <= 4096 and size % 64 == 0, f"{group}.{axis}", size, "a multiple of 64 from 64 to 4096")


def anchored(path: str | Path) -> Path:
    """``path``, taken from the repository when it is relative."""
    return REPOSITORY / Path(path).expanduser()


@dataclass(slots=True)
class Model:
    """The checkpoint and what belongs to it.

    ``parts`` are the networks that are exported, ``io`` whose names the denoiser's inputs have, null for those of the
    checkpoint's kind, ``max_sequence_length`` the longest text that a T5 reads, null for the family's own, and
    ``recommended`` what other knobs are by default.
    """

    family: str
    path: str
    parts: list[str]
    io: str | None
    max_sequence_length: int | None
    calibration_prompts: str
    prompts: str
    width: int
    height: int
    recommended: dict[str, float | int]

    def __post_init__(self):
        check_choice("model.family", self.family, sorted(FAMILIES))
        if self.io is not None:
            check_choice("export.io", self.io, ("nemo", "diffusers"))
            fits = self.io == "diffusers" or self.family == "sdxl"
            check(fits, "export.io", self.io, f"diffusers or null, because NeMo has no names for {self.family}")
        if self.max_sequence_length is not None:
            check_at_least("model.max_sequence_length", self.max_sequence_length, 1)
        check_picture("model", self.width, self.height)


def preset_names() -> list[str]:
    return sorted(path.stem for path in (REPOSITORY / "conf" / "quantize").glob("*.yaml"))


def check_format(name: str, enable: Enable) -> None:
    """``name`` is what tables call the recipe, so it is that of the preset which quantizes this."""
    check_choice("quantize.format", name, preset_names())
    preset = yaml.safe_load((REPOSITORY / "conf" / "quantize" / f"{name}.yaml").read_text(encoding="utf-8"))
    expected = "the name of the preset that enables what is enabled; choose it with quantize=<preset>, or write one"
    check(dataclasses.asdict(enable) == preset["enable"], "quantize.format", name, expected)


def check_enabled(quantize: "Quantize") -> None:
    """What is enabled fits together, and no knob is given that it ignores."""
    enable, label = quantize.enable, quantize.format
    static = [name for name, fmt in FORMATS.items() if fmt.static_scale]
    for kind, pair in (("conv", enable.conv), ("linear", enable.linear)):
        check_choice(f"quantize.enable.{kind}.weight", pair.weight, FORMATS)
        if pair.activation is not None:
            choices = static if kind == "conv" else list(FORMATS)  # blocks lie along a linear's input
            check_choice(f"quantize.enable.{kind}.activation", pair.activation, choices)
    if enable.attention is not None:
        check_choice("quantize.enable.attention", enable.attention, [n for n, fmt in FORMATS.items() if fmt.attention])
    expected = f"at most 3, because {label} has no format for attention's matrix products; quantize=fp8 has"
    check(quantize.quant_level < 4 or enable.attention is not None, "quant_level", quantize.quant_level, expected)
    per_range = any(pair.weight in static for pair in (enable.conv, enable.linear))
    expected = f"false, because {label} has scales per block"
    check(per_range or not quantize.per_channel, "quantize.per_channel", True, expected)
    expected = "0, a number of singular directions, or a fraction below 1 of a layer's shorter side"
    fits = quantize.rank >= 0 if isinstance(quantize.rank, int) else 0 < quantize.rank < 1
    check(fits, "quantize.rank", quantize.rank, expected)
    check_choice("quantize.observer", quantize.observer, OBSERVERS)
    observer = OBSERVERS[quantize.observer]
    inputs = [FORMATS[pair.activation] for pair in (enable.conv, enable.linear) if pair.activation is not None]
    judged = not observer.equal_levels or all(fmt.equal_levels for fmt in inputs)
    judged = judged and not (observer.one_scale and any(fmt.needs_amax and not fmt.static_scale for fmt in inputs))
    expected = f"min_max or percentile, because {label} has no equal levels for it to judge by"
    check(judged, "quantize.observer", quantize.observer, expected)
    if enable.conv.activation is None:
        because, method = f"because {label} leaves the inputs of convolutions alone", quantize.collect_method
        check(quantize.percentile == 1, "percentile", quantize.percentile, f"1, {because}")
        check(method == "mean-max", "collect_method", method, f"mean-max, {because}")
        if enable.linear.activation is None or not FORMATS[enable.linear.activation].needs_amax:
            expected = f"min_max, because no input that {label} quantizes has a range"
            check(quantize.observer == "min_max", "quantize.observer", quantize.observer, expected)


@dataclass(slots=True)
class Quantize:
    """NeMo's ``quantize`` section, with its names and defaults, and what NeMo does not have."""

    exp_name: str
    n_steps: int
    format: str
    percentile: float
    collect_method: str
    batch_size: int
    calib_size: int
    calibration: str | None
    quant_level: float
    seed: int
    enable: Enable
    exclude: dict[str, list[str]]
    per_channel: bool
    smoothing: str
    alpha: float | str | None
    rank: int | float
    observer: str
    observer_percentile: float
    percentile_calibrator: str
    keep: int | float
    snapshots: list[int]
    accelerator: str
    devices: int

    def __post_init__(self):
        check_format(self.format, self.enable)
        check_choice("quant_level", self.quant_level, QUANT_LEVELS)
        check_enabled(self)
        check(0 < self.percentile <= 1, "percentile", self.percentile, "a number above 0 and up to 1")
        check_choice("collect_method", self.collect_method, COLLECT_METHODS)
        for knob in ("n_steps", "batch_size", "calib_size", "devices"):
            check_at_least(f"quantize.{knob}", getattr(self, knob), 1)
        expected = f"at least {1 / self.n_steps:g}, one of the {self.n_steps} steps, because it selects no step"
        check(int(self.n_steps * self.percentile) > 0, "percentile", self.percentile, expected)
        check_seed("quantize.seed", self.seed)
        check_choice("smoothing", self.smoothing, SMOOTHINGS)
        if self.smoothing == "none":
            check(self.alpha is None, "alpha", self.alpha, f"null, because {self.format} smooths nothing")
        else:
            fits = self.alpha == "auto" or (isinstance(self.alpha, float) and 0 <= self.alpha <= 1)
            check(fits, "alpha", self.alpha, "a number from 0 to 1, or auto")
        check_choice("quantize.observer", self.observer, OBSERVERS)
        check(0 < self.observer_percentile <= 100, "quantize.observer_percentile", self.observer_percentile,
              "above 0 and up to 100")  # fmt: skip
        expected = "99.99, because only quantize.observer=percentile heeds it"
        heeded = self.observer == "percentile" or self.observer_percentile == 99.99
        check(heeded, "quantize.observer_percentile", self.observer_percentile, expected)
        check_choice("quantize.percentile_calibrator", self.percentile_calibrator, PERCENTILE_CALIBRATORS)
        ignored = self.observer != "min_max" and self.percentile != 1
        expected = f"1 with quantize.observer={self.observer}, which takes no range from the steps"
        check(not ignored, "percentile", self.percentile, expected)
        fits = self.keep >= 0 if isinstance(self.keep, int) else 0 <= self.keep < 1
        check(fits, "keep", self.keep, "a number of layers or a fraction below 1: keeping all would quantize nothing")
        check(all(size > 0 for size in self.snapshots), "quantize.snapshots", self.snapshots, "numbers of prompts")
        check_choice("quantize.accelerator", self.accelerator, ("auto", "cpu", "cuda"))


@dataclass(slots=True)
class Trt:
    """How plans are built. ``library`` none builds no plan, auto takes tensorrt on a GPU and tensorrt_rtx elsewhere.

    ``timing_cache`` is the folder in which TensorRT's measurements of this GPU are kept for the next build.
    """

    library: str
    targets: list[str] | None
    static_batch: bool
    min_batch_size: int
    max_batch_size: int
    optimization_level: int | None
    workspace_gib: float | None
    timing_cache: str | None

    def __post_init__(self):
        check_choice("trt.library", self.library, ("auto", *PLAN_BUILDERS, "none"))
        for target in self.targets or []:
            check_choice("trt.targets", target, RTX_TARGETS)
        check_at_least("trt.min_batch_size", self.min_batch_size, 1)
        check_at_least("trt.max_batch_size", self.max_batch_size, self.min_batch_size)
        if self.optimization_level is not None:
            check_choice("trt.optimization_level", self.optimization_level, range(6))
        if self.workspace_gib is not None:
            check(self.workspace_gib > 0, "trt.workspace_gib", self.workspace_gib, "more than 0")


def targets_for(trt: Trt, formats: set[str]) -> list[str]:
    """The compute capabilities to build for; by default those of USUAL_TARGETS that have these formats.

    Raises ConfigError when one that was asked for has not.
    """
    least = min_compute_capability(formats)
    able = [target for target in RTX_TARGETS if int(target.removeprefix("SM")) >= least]
    for target in trt.targets or []:
        expected = f"one of {', '.join(able)}, because older ones have no {' or '.join(sorted(formats))}"
        check(target in able, "trt.targets", target, expected)
    return [target for target in USUAL_TARGETS if target in able] if trt.targets is None else trt.targets


@dataclass(slots=True)
class ExportShape:
    """NeMo's ``infer`` section of an export: where the plans go and the pictures that they are tuned for."""

    out_path: str | None
    width: int
    height: int
    batch_size: int

    def __post_init__(self):
        check_picture("infer", self.width, self.height)
        check_at_least("infer.batch_size", self.batch_size, 1)


@dataclass(slots=True)
class Infer:
    """How pictures are made and timed. ``prompts`` is a list or the path of a text file.

    ``precision`` is what torch computes in wherever it computes, auto is fp32 on a processor and fp16 on a GPU;
    ``cuda_graph`` replays the engine's calls.
    """

    engine: str
    out_path: str | None
    width: int
    height: int
    batch_size: int
    prompts: list[str] | str
    num_samples: int
    steps: int
    scale: float
    seed: int
    num_warmup_runs: int
    num_timed_runs: int
    precision: str
    cuda_graph: bool
    allow_untrusted_plan: bool

    def __post_init__(self):
        check_choice("infer.engine", self.engine, RUNTIMES)
        check_picture("infer", self.width, self.height)
        for knob in ("batch_size", "num_samples", "steps", "num_timed_runs"):
            check_at_least(f"infer.{knob}", getattr(self, knob), 1)
        check_at_least("infer.num_warmup_runs", self.num_warmup_runs, 0)
        check_at_least("infer.scale", self.scale, 0)
        check_seed("infer.seed", self.seed)
        check_choice("infer.precision", self.precision, PRECISION_NAMES)
        expected = f"false, because infer.engine={self.engine} runs on the processor"
        check(
            not self.cuda_graph or RUNTIMES[self.engine].device != "cpu", "infer.cuda_graph", self.cuda_graph, expected
        )

    def prompt_list(self) -> list[str]:
        """Every prompt, repeated ``num_samples`` times. Raises ConfigError when there is none."""
        prompts = read_prompts(anchored(self.prompts)) if isinstance(self.prompts, str) else self.prompts
        check(bool(prompts), "infer.prompts", "empty", "at least one prompt")
        return [prompt for prompt in prompts for _ in range(self.num_samples)]


@dataclass(slots=True)
class Shared:
    """Where what runs share is kept; ``dir`` None keeps nothing."""

    dir: str | None
    limit_gb: float

    def __post_init__(self):
        check_at_least("cache.limit_gb", self.limit_gb, 0)


@dataclass(slots=True)
class Metrics:
    """Files of networks and references that no package brings; what is not named is not computed."""

    clip_weights: str | None
    fid_weights: str | None
    fid_references: str | None

    def __post_init__(self):
        both = (self.fid_weights is None) == (self.fid_references is None)
        expected = "given with metrics.fid_weights, because FID takes both, or null with it"
        check(both, "metrics.fid_references", self.fid_references, expected)

    def check_files(self) -> None:
        for knob, path in dataclasses.asdict(self).items():
            if path is not None and not anchored(path).exists():
                raise ConfigError(f"metrics.{knob} names {path}, which does not exist; give an existing path, or null")


@dataclass(slots=True)
class QuantizeJob:
    model: Model
    quantize: Quantize
    trt: Trt
    infer: Infer
    cache: Shared
    metrics: Metrics
    trackers: list[str]
    published: str | None

    def __post_init__(self):
        check_batch(self.trt, self.infer)
        targets_for(self.trt, set().union(*self.formats().values()))
        for tracker in self.trackers:
            check_choice("trackers", tracker, TRACKERS)
        runtime = RUNTIMES[self.infer.engine]
        expected = "an engine for the quantized model, such as infer=openvino, because torch is every job's baseline"
        check(runtime.quantized, "infer.engine", self.infer.engine, expected)
        if runtime.file is None:
            pairs = [self.quantize.enable.conv, self.quantize.enable.linear]
            fits = all(
                FORMATS[pair.weight].torch_compute_capability and pair.activation == pair.weight for pair in pairs
            )
            expected = f"another, such as infer=openvino, because torch itself multiplies no {self.quantize.format}"
            check(fits, "infer.engine", self.infer.engine, expected)
            expected = f"0, because infer.engine={self.infer.engine} computes no low-rank branch"
            check(self.quantize.rank == 0, "quantize.rank", self.quantize.rank, expected)
        expected = "null, because a run keeps everything in hydra.run.dir"
        check(self.infer.out_path is None, "infer.out_path", self.infer.out_path, expected)
        if runtime.file == "plan":
            fits = self.trt.library in ("auto", self.infer.engine)
            expected = (
                f"auto or {self.infer.engine}, because infer.engine={self.infer.engine} runs the plans that it builds"
            )
            check(fits, "trt.library", self.trt.library, expected)

    def formats(self) -> dict[str, set[str]]:
        return formats_used(self.quantize.enable, self.quantize.quant_level)

    def calibration_prompts(self) -> list[str]:
        """The first ``calib_size`` prompts of a text file, or as many drawn with ``seed`` from a table of captions.

        Raises ConfigError when the file holds fewer.
        """
        path = anchored(self.model.calibration_prompts)
        prompts, size = read_prompts(path), self.quantize.calib_size
        check(size <= len(prompts), "calib_size", size, f"at most the {len(prompts)} prompts of the prompt file")
        return draw_prompts(prompts, size, self.quantize.seed) if is_table(path) else prompts[:size]

    def check_files(self) -> None:
        """Everything that can be refused without loading anything."""
        check_checkpoint(self.model.path)
        if self.quantize.calibration is None:
            self.calibration_prompts()
        else:
            check_calibration(self.quantize.calibration)
        self.infer.prompt_list()
        self.metrics.check_files()
        if self.published is not None and not anchored(self.published).is_file():
            raise ConfigError(f"published names {self.published}, which does not exist; give an existing file, or null")
        if self.cache.dir is not None:
            check_writable(anchored(self.cache.dir), "cache.dir", "the cache")
        check_installed(self.infer.engine)
        if self.trt.library in PLAN_BUILDERS:
            check_installed(self.trt.library)


@dataclass(slots=True)
class ExportJob:
    """``run`` is an earlier run's directory; one of ``files``, given for a part, goes before it."""

    run: str | None
    files: dict[str, str | None]
    trt: Trt
    infer: ExportShape

    def __post_init__(self):
        check_batch(self.trt, self.infer)

    def check_files(self) -> None:
        check_parts(self, "onnx")
        check_out_path(self.infer.out_path)
        if self.trt.library in PLAN_BUILDERS:
            check_installed(self.trt.library)


@dataclass(slots=True)
class InferJob:
    run: str | None
    files: dict[str, str | None]
    model: Model
    infer: Infer

    def __post_init__(self):
        fits = RUNTIMES[self.infer.engine].unquantized
        expected = "another, because this one computes what quantize.py derives and reads no file"
        check(fits, "infer.engine", self.infer.engine, expected)

    def check_files(self) -> None:
        self.infer.prompt_list()
        check_checkpoint(self.model.path)
        check_out_path(self.infer.out_path)
        check_installed(self.infer.engine)
        if kind := RUNTIMES[self.infer.engine].file:
            check_parts(self, kind)


def run_model(run: str) -> dict | None:
    """The ``model`` section of an earlier run, or None where it left no configuration.

    Raises ArtifactError when its configuration is damaged.
    """
    resolved = anchored(run) / "config.yaml"
    if not resolved.is_file():
        return None
    try:
        model = yaml.safe_load(resolved.read_text(encoding="utf-8"))["model"] | {}
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{resolved} is not the config of a run; give another run, or run=null") from error
    return dataclasses.asdict(read(Model, model, "model."))


def check_batch(trt: Trt, infer: Infer | ExportShape) -> None:
    fits = trt.library == "none" or trt.min_batch_size <= infer.batch_size <= trt.max_batch_size
    expected = f"from trt.min_batch_size={trt.min_batch_size} to trt.max_batch_size={trt.max_batch_size}"
    check(fits, "infer.batch_size", infer.batch_size, expected)


def check_checkpoint(path: str) -> None:
    """It is there and its archive is whole; its weights are the job's to check, and so is a gzipped archive."""
    if not anchored(path).exists():
        raise ConfigError(
            f"model.path names {path}, which does not exist; give the path of an existing file or folder: nothing is "
            "fetched from a hub, so download a model first"
        )
    if anchored(path).suffix != ".safetensors" and not is_gzipped(anchored(path)):
        open_members(anchored(path))


def check_calibration(path: str) -> None:
    """Something is there; whether its statistics fit is the job's to check."""
    if not anchored(path).exists():
        raise ConfigError(
            f"calibration names {path}, which does not exist; give a statistics file or a folder of them, as a run logs"
        )


def artifact(run: Path, kind: str, part: str) -> Path:
    """Where a run keeps a part: ``onnx/<part>/<part>.onnx`` or ``plan/<part>.plan``."""
    return run / "onnx" / part / f"{part}.onnx" if kind == "onnx" else run / "plan" / f"{part}.plan"


def part_names(job: ExportJob | InferJob) -> list[str]:
    """Those of the model, of the run's model, or of the files that are given."""
    if isinstance(job, InferJob):
        return job.model.parts
    model = run_model(job.run) if job.run else None
    return model["parts"] if model else list(dict.fromkeys((*PART_NAMES, *job.files)))


def part_paths(job: ExportJob | InferJob, kind: str) -> dict[str, Path]:
    """The file of each part that the job names, in the model's order. Raises ConfigError for files of other parts."""
    run, names = anchored(job.run) if job.run else None, part_names(job)
    paths = {}
    for part, given in job.files.items():
        check(given is None or part in names, "files", part, f"a part of the model: {', '.join(names)}")
    for part in names:
        if given := job.files.get(part):
            paths[part] = anchored(given)
        elif run is not None:
            paths[part] = artifact(run, kind, part)
    return paths


def check_parts(job: ExportJob | InferJob, kind: str) -> None:
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
    """How a part's file is named on the command line."""
    return part if part in PART_NAMES else f"+files.{part}"


def check_out_path(path: str | None) -> None:
    if path is not None:
        check_writable(anchored(path), "infer.out_path")


def check_writable(directory: Path, knob: str = "hydra.run.dir", what: str = "the output directory") -> None:
    """The directory that ``knob`` names can be made. Raises ConfigError otherwise; makes nothing."""
    parent = directory.absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {directory} cannot be written, because of {parent}; set {knob}")
