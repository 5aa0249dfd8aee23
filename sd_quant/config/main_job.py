"""The job of ``quantize``, and the checks of its sections against each other."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from sd_quant.calibration.call_tables import Row
from sd_quant.calibration.prompts import draw_prompts, is_data_set
from sd_quant.config.comparison import CacheFolder, Metrics, Timing
from sd_quant.config.images import Infer, engines
from sd_quant.config.model import CALIBRATION_TABLE, Model, prompts_of
from sd_quant.config.plans import NO_FP32, Trt, check_batch, check_dtype, check_plan_size, engine_for, targets_for
from sd_quant.config.recipe import Quantize, check_recipe, part_recipe, with_attention, with_own_name
from sd_quant.config.targets import check_consumers, check_targets
from sd_quant.engines import COMPILED, PLAN_BUILDERS, RUNTIMES, check_installed, why_not
from sd_quant.errors import ConfigError
from sd_quant.inference.schedules import WEIGHTS_ALONE
from sd_quant.interchange import TARGETS
from sd_quant.knobs import check, check_unused, one_of
from sd_quant.places import existing, existing_file, input_path
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, formats_used, unheeded_knobs
from sd_quant.report.rule import Rule
from sd_quant.trackers import TRACKERS

# Sections, and single knobs of other sections, that change no result of a job.
SHOWN_ALONE = ("cache", "overwrite", "published", "timing", "trackers", "verdict")
DECIDE_NOTHING = (("infer", "chosen_because"), ("model", "observed"), ("trt", "timing_cache"))


@dataclass(slots=True)
class RecipeJob:
    """The sections of knobs that decide how each layer is quantized, and the cache of calibration statistics."""

    model: Model
    quantize: Quantize
    infer: Infer
    cache: CacheFolder

    def __post_init__(self):
        self.model.check_sides("infer", self.infer.width, self.infer.height, self.infer.sizes)
        self.quantize = with_own_name(self.quantize)
        check_recipe(self.quantize)
        self.quantize = with_attention(self.quantize)
        if self.model.calibration_image is not None:
            self.infer.check_strength(self.model.calibration_mask, self.quantize.n_steps, "quantize.n_steps")
        for part, preset in self.quantize.quantized_parts.items() if self.quantize.calibration is not None else ():
            expected = (
                f"a preset of weights alone such as int8_weight_only, because calibration={self.quantize.calibration} "
                "has statistics of the denoiser alone; or leave calibration out"
            )
            check(not part_recipe(preset).needs_inputs, f"quantize.parts.{part}", preset, expected)  # type: ignore[union-attr]

    def formats(self) -> dict[str, set[str]]:
        """Return the number formats of all quantized parts together, for ``weights``, ``inputs`` and ``attention``."""
        level, parts = self.quantize.quant_level, map(part_recipe, self.quantize.quantized_parts.values())
        found = [formats_used(recipe.enable, level) for recipe in self.quantize.offered().values()]
        found += [formats_used(recipe.enable, 3.0) for recipe in parts if recipe is not None]
        attention = formats_used(self.quantize.enable, level)["attention"]
        used = {where: set().union(*(each[where] for each in found)) for where in ("weights", "inputs")}
        return used | {"attention": attention}

    def calibration_rows(self) -> list[Row]:
        """Return ``calib_size`` calls to calibrate on, the first or a random draw. Raises ConfigError if too few."""
        rows, size, table = self.model.calibration_rows(), self.quantize.calib_size, self.model.calibration_table
        found = "prompts of the prompt file" if table is None else f"rows of {CALIBRATION_TABLE}"
        check(size <= len(rows), "calib_size", size, f"at most the {len(rows)} {found}")
        drawn = table is None and is_data_set(input_path(self.model.calibration_prompts))
        return draw_prompts(rows, size, self.quantize.seed) if drawn else rows[:size]

    def choosing_rows(self, count: int) -> list[Row]:
        """Return up to ``count`` calibration calls to choose steps by; those that statistics do not use come first."""
        seen, rows = self.calibration_rows(), self.model.calibration_rows()
        if self.model.calibration_table is not None:
            return [*rows[len(seen) :], *seen][:count]
        others = set(prompts_of(rows)) - set(prompts_of(seen))
        return [*(Row(prompt, {}) for prompt in sorted(others)), *seen][:count]


@dataclass(slots=True)
class QuantizeJob(RecipeJob):
    infer: Annotated[Infer, engines(lambda runtime: runtime.quantized)]
    trt: Trt
    timing: Timing
    verdict: Rule
    metrics: Metrics
    trackers: Annotated[
        list[str], one_of(TRACKERS, each=True), "trackers that a finished run is logged to, beside its own record"
    ]
    overwrite: Annotated[
        bool, "whether another finished run in `hydra.run.dir` is removed, instead of refusing the folder"
    ]
    published: Annotated[str | None, "file of published latencies to show beside a sweep's"]
    compiled_baseline: Annotated[bool, "whether torch.compile's unquantized denoiser is timed in the engines' rounds"]
    hand_over: Annotated[list[str], one_of(TARGETS, each=True), "tools that the result is exported to, as by hand_over"]

    def __post_init__(self):
        RecipeJob.__post_init__(self)
        if refused := self.why_no_plans():
            expected = f"another, such as infer=openvino, because {refused}"
            check(self.infer.engine not in PLAN_BUILDERS, "infer.engine", self.infer.engine, expected)
            check(self.trt.library in ("auto", "none"), "trt.library", self.trt.library, f"none, because {refused}")
            self.trt = replace(self.trt, library="none")
        self.infer = self.infer.with_engine(lambda: engine_for(self.trt, self.formats()))
        if knob := "reuse" if self.infer.reuse is not None else self.infer.chooses_precise and "precise_steps":
            expected = (
                f"at least 2, because infer.{knob} chooses steps on one half of these prompts and checks on the other"
            )
            check(self.quantize.calib_size > 1, "calib_size", self.quantize.calib_size, expected)
        self.check_precise()
        check_targets("hand_over", self.hand_over, self.model, self.quantize, self.formats()["weights"])
        self.model.check_sides("trt", None, None, self.trt.sizes)
        check_dtype(self.model, self.infer.engine, self.trt)
        check_batch(self.trt, self.infer)
        check_plan_size(self.trt, self.infer)
        self.metrics.check_sizes(self.infer.sizes)
        targets_for(self.trt, set().union(*self.formats().values()))
        expected = (
            "newer ones, because TensorRT for RTX multiplies no fp32 matrices on SM75, and every decoder of images has "
            "some; build plans of the other parts with export_trt"
        )
        check(NO_FP32 not in (self.trt.targets or ()), "trt.targets", self.trt.targets, expected)
        check_engine(self.infer.engine, self.quantize, self.trt)
        because = f"with infer.engine={COMPILED} the unquantized engine is that baseline"
        check_unused(self, "", (self.infer.engine == COMPILED, {"compiled_baseline": False}, because))
        check_unused(self.infer, "infer.", (True, {"out_path": None}, "a run keeps everything in hydra.run.dir"))
        self.model.encoder |= self.infer.image is not None

    def check_precise(self) -> None:
        """Raise ConfigError for steps h if no input is quantized."""
        infer, formats = self.infer, self.formats()
        knob = "schedule" if infer.schedule is not None else "precise_steps"
        if WEIGHTS_ALONE in infer.precise_letters:
            expected = f"no step h, because quantize={self.quantize.format} quantizes no inputs: all steps are such"
            check(bool(formats["inputs"] | formats["attention"]), f"infer.{knob}", getattr(infer, knob), expected)

    def why_no_plans(self) -> str | None:
        """Return why no TensorRT library builds plans with the recipe's input formats; None if one does."""
        reasons = [why_not(name, {"inputs": self.formats()["inputs"]}) for name in PLAN_BUILDERS]
        return reasons[0] if all(reasons) else None

    def check_files(self) -> None:
        """Raise SdQuantError for files and packages that are missing or unusable, without loading any."""
        self.model.check_files()
        if makes_calibration_images(self.quantize, self.infer):
            self.calibration_rows()
        if self.quantize.calibration is not None:
            expected = "a statistics file or a folder of them, as a run logs"  # the job checks whether they fit
            existing("calibration", self.quantize.calibration, expected)
        self.infer.check_files()
        self.metrics.check_files()
        if self.published is not None:
            existing_file("published", self.published)
        self.cache.check_files()
        check_installed(self.infer.engine)
        if self.trt.library in PLAN_BUILDERS:
            check_installed(self.trt.library)
        check_consumers(self.hand_over)


def makes_calibration_images(quantize: Quantize, infer: Infer) -> bool:
    """Whether a job makes images of the calibration prompts: for statistics, or to choose formats or steps."""
    chooses = quantize.fit is not None or infer.reuse is not None or infer.chooses_precise
    return chooses or quantize.calibration is None


def check_heeded(job: QuantizeJob, given: Iterable[str]) -> None:
    """Raise ConfigError for a ``given`` knob without effect in a single run. (In a sweep, equal jobs run once.)"""
    linear = {f"{prefix}{name}" for name in unheeded_knobs(job.quantize) for prefix in ("", "quantize.")}
    for name in given:
        if name in linear:
            level = job.quantize.quant_level
            because = f"quant_level={level:g} quantizes {'no linear, which alone it is for' if level else 'nothing'}"
        elif name.startswith("trt.") and job.trt.library == "none":
            because = "export_trt=none builds no plan"
        elif name in ("infer.prompts", "model.prompts") and job.infer.table is not None:
            because = "infer.table has the prompts of the images"
        elif name == "model.calibration_prompts" and job.model.calibration_table is not None:
            because = "model.calibration_table has the prompts of calibration"
        else:
            continue
        raise ConfigError(f"{name} was given and changes nothing, because {because}; leave it out")


def deciding(job: Any) -> dict[str, Any]:
    """Return the knobs that decide a job's results, without knobs for where results are kept or how they are shown."""
    knobs = {name: value for name, value in asdict(job).items() if name not in SHOWN_ALONE}
    for section, name in DECIDE_NOTHING:
        knobs.get(section, {}).pop(name, None)
    return knobs


def check_engine(engine: str, quantize: Quantize, trt: Trt) -> None:
    """Raise ConfigError if ``engine`` cannot execute the recipe, or runs plans that ``trt`` does not build."""
    runtime = RUNTIMES[engine]
    expected = "an engine for the quantized model, such as infer=openvino, because torch is every job's baseline"
    check(runtime.quantized, "infer.engine", engine, expected)
    if runtime.file is None:
        expected = f"another, such as infer=openvino, because torch itself multiplies no {quantize.format}"
        check(torch_multiplies(quantize.enable), "infer.engine", engine, expected)
        able = lambda recipe: torch_multiplies(recipe.enable) and recipe.rank == 0  # noqa: E731
        such = f"that infer.engine={engine} multiplies, such as int8 or int8_weight_only"
        knob = "quantize.choices" if quantize.assignment is None else "a label of assignment"
        for label, recipe in quantize.offered().items():
            check(label == quantize.format or able(recipe), knob, label, f"presets {such}")
        for part, preset in quantize.quantized_parts.items():
            check(able(part_recipe(preset)), f"quantize.parts.{part}", preset, f"a preset {such}")
        codes = f"infer.engine={engine} multiplies codes with codes, and fit leaves inputs of other parts in fp16"
        branch = f"infer.engine={engine} computes no low-rank branch"
        check_unused(quantize, "quantize.", (True, {"fit": None}, codes), (True, {"rank": 0}, branch))
    if runtime.file == "plan":
        expected = f"auto or {engine}, because infer.engine={engine} runs the plans that it builds"
        check(trt.library in ("auto", engine), "trt.library", trt.library, expected)


def torch_multiplies(enable: Enable) -> bool:
    """Whether torch can multiply quantized weights and inputs directly, and decode weights of unquantized inputs."""
    return all(
        (pair.activation is None and FORMATS[pair.weight].onnx_type != "")
        or (FORMATS[pair.weight].torch_compute_capability is not None and pair.weight == pair.activation)
        for pair in (enable.conv, enable.linear)
    )
