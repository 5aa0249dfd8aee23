"""The steps of ``quantize.py`` one by one, by the same code and with the same knobs.

    import sd_quant

    model = sd_quant.open("sdxl_mini")
    statistics = model.calibrate(calib_size=8)
    recipes = [model.quantize(statistics, "int8", quant_level=level) for level in (1, 2.5, 3)]
    comparison = sd_quant.compare(recipes, ["a glossy icon of a rocket"])
    recipes[-1].export("quantized")

A keyword is a knob: those of ``open`` are of the section ``model``, those of ``calibrate`` and ``quantize`` of the
section ``quantize``, those that say how images are made of ``infer``; ``--help`` explains each. Hydra composes
and checks them as it does for a command, so a knob that is misspelt or out of range raises the same sentence, as
``ConfigError``. Nothing is written but where a folder is named. The road not taken is an interface with defaults of its
own, which would be another product after a year.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sd_quant.cache import Cache
from sd_quant.calibration.call_tables import Row
from sd_quant.composition import composing, job_of, knobs_of
from sd_quant.config import Infer, Quantize, QuantizeJob, artifact
from sd_quant.config.targets import check_consumers, check_targets
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Generated, Sampling
from sd_quant.interchange import TARGETS
from sd_quant.knobs import check, check_unused, fields_of, near, one_of
from sd_quant.metrics import SCORES
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.images import Images
from sd_quant.metrics.intervals import Interval, exactly
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.models.parts import exported
from sd_quant.places import input_path, output_path, shown
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import HALF, assigned_bytes
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.images import comparison_grid
from sd_quant.report.provenance import made_of
from sd_quant.report.record import weights_sha256
from sd_quant.report.summary import interval_columns
from sd_quant.report.table import plus_minus
from sd_quant.shell import without_interpolation
from sd_quant.simulation.modelopt import restorable, save_quantized
from sd_quant.stages.calibrate import calibrated_sha256, statistics_of
from sd_quant.stages.choose import choose, rows_of_layers
from sd_quant.stages.consumer import measured_by
from sd_quant.stages.export_onnx import delivered_files, export_parts
from sd_quant.stages.generate import generate, recipe_sampling, sampling_of
from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.run_record import count_layers
from sd_quant.stages.session import Session, open_session
from sd_quant.stages.target_folder import write_target
from sd_quant.stages.targets import check_servers, rows_of
from sd_quant.stages.variants import Assignments, torch_variant
from sd_quant.sweep import in_texts
from sd_quant.text import counted

__all__ = ["Comparison", "Model", "Quantized", "Result", "Statistics", "compare", "open"]

CALIBRATION = ("calib_size", "n_steps", "seed", "snapshots", "calibration", "accelerator", "devices")
UNUSED = {"calib_size": 1}  # where nothing is calibrated, so that a short table of calls serves


def open(
    model: str = "sdxl_mini", path: str | Path | None = None, *, cache: str | Path | None = None, **knobs: object
) -> "Model":
    """Open a checkpoint.

    Args:
        model: a preset, as for ``model=``: ``sdxl``, ``sdxl_nemo``, ``sd15``, ``flux``, ... or ``sdxl_mini``, the
            checkpoint that ships.
        path: the file or folder of the checkpoint, as for ``model.path=``.
        cache: a folder where statistics and exported files are kept for the next time; None keeps nothing.
        knobs: others of the section ``model``, such as ``width=512`` or ``loras=["style.safetensors:0.8"]``.

    Returns:
        A ``Model``, of which no weight is in memory.

    Raises:
        ConfigError: there is no such preset, knob or file.
        ArtifactError: the checkpoint is damaged, incomplete, or has a weight that is not finite.
    """
    given = {f"model.{name}": value for name, value in knobs.items()} | {"cache.dir": cache and str(cache)}
    if path is not None:
        given["model.path"] = str(path)
    job = job_with({"model": model}, {f"quantize.{name}": value for name, value in UNUSED.items()} | given)
    kept = Cache(output_path(cache) if cache else None, job.cache.limit_gb * 1e9)
    return Model(model, given, input_path(job.model.path), open_session(job.model), kept)


@dataclass(frozen=True, repr=False)
class Model:
    """A checkpoint that is open. ``sd_quant.open`` makes it."""

    preset: str
    knobs: Mapping[str, object]  # of the sections ``model`` and ``cache``, by their full names
    path: Path
    session: Session
    cache: Cache

    def __repr__(self) -> str:
        part, count = next(iter(self.parameters.items()))
        return f"Model({self.preset}, {shown(self.path)}, {count:,} parameters in {part})"

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the checkpoint's file or folder; with LoRAs, of all files and strengths."""
        return str(weights_sha256(made_of(self.job(None, UNUSED).model.inputs())))

    @property
    def parameters(self) -> dict[str, int]:
        """The number of parameters by part, the denoiser first."""
        return self.session.parameters

    def calibrate(
        self, prompts: str | Sequence[str] | None = None, preset: str | None = None, **knobs: object
    ) -> Statistics:
        """Collect what every recipe is derived from: ranges and samples of the inputs of all layers.

        Args:
            prompts: one or more texts to make calibration images of; None: the first ``calib_size`` of the preset.
            knobs: the guidance ``scale``, and of the section ``quantize`` those that statistics depend on:
                ``calib_size``, ``n_steps``, ``seed``, ``batch_size``, ``calibration``, ``snapshots``, ``accelerator``,
                ``devices``; and as for ``quantize`` ``parts``, for statistics of these parts too,
                ``hessian`` and ``loras``.
            preset: with ``hessian``, the recipe's, of whose layers it sums Hessians: ``svdquant_w4a16``, ...

        Returns:
            The statistics, which know no recipe, but for the Hessians.

        Raises:
            ConfigError: a knob does not exist, is out of range, or is used by ``quantize`` alone; ``calib_size`` or
                ``calibration`` beside ``prompts``.
            SdQuantError: an input of a layer is not finite.
            ResourceError: memory or the GPU is too small.
        """
        check_used(
            knobs,
            fields_of(Quantize).keys() - {*CALIBRATION, "batch_size", "parts", "hessian", "loras"},
            "calibrate",
            "give it to quantize",
        )
        if prompts is not None:
            expected = "None, because calibration_table has the prompts of calibration"
            check("model.calibration_table" not in self.knobs, "prompts", f"{prompts!r:.100}", expected)
            check_used(knobs, ("calib_size", "calibration"), "calibrate", "leave one of them out", " beside prompts")
        job = self.job(preset, knobs)
        rows = None if prompts is None else [Row(text, {}) for text in texts_of(prompts)]
        loaded = with_recipe(self.session, job.model, job.infer, job.quantize)
        sha256 = calibrated_sha256(job, made_of(job.model.inputs()))
        return statistics_of(loaded, job, sha256, rows)

    def quantize(self, statistics: Statistics, preset: str | None = None, **knobs: object) -> "Quantized":
        """Derive how each layer is quantized. Takes seconds, but ``keep``, ``budget`` and ``fit`` try every layer.

        Args:
            statistics: what ``calibrate`` has returned.
            preset: as for ``quantize=``: ``fp8``, ``svdquant_w4a16``, ``nvfp4``, ...; None: ``int8``, its default.
            knobs: of the section ``quantize``, such as ``quant_level=3``, ``alpha=0.8``, ``keep=10``, ``budget=0.25``;
                and ``scale``, by which ``keep`` and ``budget`` weigh what guidance leaves of an error. Prompts and
                steps are known from the statistics; only ``percentile_calibrator="modelopt"`` reads ``batch_size``,
                which is then that of ``calibrate``.

        Raises:
            ConfigError: a knob does not exist, is out of range, does not fit the others, or is used by ``calibrate``
                alone.
        """
        check_used(knobs, CALIBRATION, "quantize", "give it to calibrate")
        # where calibration begins with an image, statistics have a part of the steps
        told = {"n_steps": statistics.steps} if statistics.steps and "model.calibration_image" not in self.knobs else {}
        job = self.job(preset, {**UNUSED, **knobs, **told})
        seen: dict[str, Any] = {"calib_size": statistics.prompts}  # None where they do not say
        job.quantize = replace(job.quantize, **seen)
        loaded = with_recipe(self.session, job.model, job.infer, job.quantize)
        with TemporaryDirectory() as folder:
            chosen = choose(loaded, statistics, Path(folder), nullcontext)
        label = ", ".join([job.quantize.format, *(f"{name}={value}" for name, value in knobs.items())])
        assignment = (parts := dict(chosen.assignments)).pop(loaded.denoiser)
        return Quantized(self, label, job, loaded, assignment, knobs, parts)

    def images(self, prompts: str | Sequence[str] | None, **knobs: object) -> Images:
        """The full-precision model's images of ``prompts``, uint8 [N, H, W, 3]; knobs as for ``compare``.

        With ``sizes`` of several it is a list, of [H, W, 3] each.
        """
        return self.generate(prompts, knobs).images

    def generate(
        self,
        prompts: str | Sequence[str] | None,
        knobs: Mapping[str, object],
        assignments: Mapping[str, Mapping[str, LayerAssignment]] = {},
        sampling: Callable[[Infer], Sampling] = recipe_sampling,
    ) -> Generated:
        """Images and latents by torch, with the parts quantized that have an assignment."""
        session, infer = to_generate(self, prompts, knobs, simulated=bool(assignments))
        variant = torch_variant(session, infer, assignments)
        try:
            what = "quantized" if assignments else "full precision"
            return generate(pipeline_of(session.checkpoint, variant), infer.prompt_list(), sampling(infer), what)
        finally:
            variant.pool.close()

    def job(self, preset: str | None, recipe: Mapping[str, object], infer: Mapping[str, object] = {}) -> QuantizeJob:
        """The job of a command with these knobs, checked."""
        presets = {"model": self.preset, "export_trt": "none"} | ({"quantize": preset} if preset else {})
        of_images = {f"infer.{name}": value for name, value in infer.items()}
        of_recipe = {
            f"infer.{name}" if name == "scale" else f"quantize.{name}": value for name, value in recipe.items()
        }
        return job_with(presets, {**self.knobs, **of_images, **of_recipe})


@dataclass(frozen=True, repr=False)
class Quantized:
    """A model with an assignment: the quantization of each layer of its denoiser. ``Model.quantize`` makes it."""

    model: Model
    label: str  # the preset and the knobs that were given
    job: QuantizeJob
    loaded: Loaded
    assignment: dict[str, LayerAssignment]
    knobs: Mapping[str, object] = field(default_factory=dict)  # those that were given to ``quantize``
    parts: dict[str, dict[str, LayerAssignment]] = field(default_factory=dict)  # of other parts than the denoiser

    def __repr__(self) -> str:
        count = count_layers(self.assignment)
        of = count["quantized"] + count["high_precision"]
        return f"Quantized({self.label}: {count['quantized']} of {of} layers of {self.model.preset})"

    @property
    def assignments(self) -> Assignments:
        """Those of all quantized parts, by part."""
        return {self.loaded.denoiser: self.assignment, **self.parts}

    def layers(self) -> list[dict[str, object]]:
        """A row for each layer, as in ``layers.csv``: role, format, scales, alpha, errors, why it is not quantized."""
        return rows_of_layers(self.assignments)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the denoisers' weights with their scales, where weights that are not quantized count in fp16."""
        parameters, assignments = self.loaded.parameters, self.assignments
        return sum(assigned_bytes(parameters[part], assignments[part]) for part in self.loaded.denoisers)

    @property
    def share(self) -> float:
        """``weight_bytes`` as a share of the bytes of all weights in fp16."""
        return self.weight_bytes / (HALF * sum(self.loaded.parameters[part] for part in self.loaded.denoisers))

    def images(self, prompts: str | Sequence[str] | None, **knobs: object) -> Images:
        """The quantized model's images of ``prompts``, uint8 [N, H, W, 3], simulated in torch; see ``compare``."""
        return self.model.generate(prompts, knobs, self.assignments).images

    def export(self, folder: str | Path) -> dict[str, Path]:
        """Write an ONNX file for each part, the denoiser quantized.

        Args:
            folder: gets ``onnx/<part>/<part>.onnx``, from which ``export_trt`` builds plans.

        Returns:
            The files by part.

        Raises:
            ResourceError: the disk is full.
        """
        directory, checkpoint = output_path(folder), self.loaded.checkpoint
        directory.mkdir(parents=True, exist_ok=True)
        export_parts(
            checkpoint, self.model.sha256, delivered_files(checkpoint, self.assignments, directory), self.model.cache
        )
        return {part: artifact(directory, "onnx", part) for part in exported(checkpoint.parts())}

    def hand_over(
        self, target: str, folder: str | Path, prompts: str | Sequence[str] | None = None, **knobs: object
    ) -> Path:
        """Write the model in another tool's own format; ``docs/hand_over.md`` says what each holds and how to open it.

        The folder has the same README as the command writes: what it is, what of the recipe it lost, how to open it.

        Args:
            target: ``comfyui``, ``diffusers_modelopt``, ``diffusers_torchao``, ``diffusers_sdnq``,
                ``diffusers_autoround``, ``diffusers_bfl``, ``diffusers_nunchaku_lite``, ``nunchaku``, ``gguf``,
                ``openvino``, ``onnx``, ``modelopt_export``, ``vllm_int8`` or ``sglang_fp8``.
            folder: a new one, or an empty one.
            prompts: one or more texts; the README then says how far images of what the tool computes are from full
                precision. None: no images are made.
            knobs: with ``prompts``, as for ``compare``.

        Returns:
            The folder.

        Raises:
            ConfigError: there is no such target, it cannot hold the recipe or the family, the folder is not empty, or
                a knob is given without prompts.
            ResourceError: a package that writes it is missing, or the disk is full.
        """
        one_of(TARGETS).check("target", target)
        check_targets("target", [target], self.job.model, self.job.quantize, self.job.formats()["weights"])
        check_consumers([target])
        check_servers([target], self.loaded.checkpoint)
        checkpoint, directory = self.loaded.checkpoint, output_path(folder)
        held = rows_of([target], self.assignments, checkpoint)[target]
        check(not directory.exists() or not any(directory.iterdir()), "folder", folder, "a new one, or an empty one")
        measure = None
        if prompts is None:
            check_used(knobs, knobs, "hand_over", "give prompts", " without prompts")
        else:
            session, infer = to_generate(self.model, prompts, knobs, simulated=True)
            loaded = replace(self.loaded, checkpoint=session.checkpoint)
            reference = self.model.generate(prompts, knobs, sampling=sampling_of).images
            measure = measured_by(loaded, infer, reference)
        opened = {name.partition(".")[2]: value for name, value in self.model.knobs.items() if name != "cache.dir"}
        code = [
            f"model = sd_quant.open({called(self.model.preset, **opened)})",
            f"quantized = model.quantize(statistics, {called(self.job.quantize.format, **self.knobs)})"
            "  # statistics: of model.calibrate",
            f"quantized.hand_over({called(target, str(folder))})",
        ]
        write_target(TARGETS[target], self.loaded, self.assignments, held, directory, "\n".join(code), measure)
        return directory

    def save_modelopt(self, path: str | Path) -> Path:
        """Write a file from which ModelOpt restores the quantized denoiser in a diffusers pipeline of fp32 or fp16.

            import modelopt.torch.opt as mto
            import torch
            from diffusers import StableDiffusionXLPipeline

            pipeline = StableDiffusionXLPipeline.from_pretrained("sdxl", torch_dtype=torch.float16)
            mto.restore(pipeline.unet, "quantized_unet.pt")  # which holds fp32
            pipeline.unet.to(torch.float16)

        A run leaves the same file as ``quantized_unet.pt``. ``pipeline`` is that of the checkpoint; ``sd-quant
        convert`` makes a folder of a ``.nemo``.

        Raises:
            ConfigError: ModelOpt cannot hold the recipe; it holds INT8 and FP8 up to level 3.
        """
        if not restorable(self.assignment):
            raise ConfigError(f"ModelOpt cannot hold {self.label}, expected INT8 or FP8 up to level 3")
        file, engine = output_path(path), open_simulated(self.loaded.checkpoint, self.assignment)
        save_quantized(denoiser_of(self.loaded.checkpoint, engine.module).cpu(), file)
        return file


@dataclass(frozen=True, repr=False)
class Result:
    """The images of one recipe and their scores against full precision."""

    quantized: Quantized
    images: Images  # uint8 [N, H, W, 3], or a list where their sizes differ
    scores: Mapping[str, Any]  # against full precision, as ``fidelity`` in metrics.json: psnr, ssim, lpips, ...

    def __repr__(self) -> str:
        return f"Result({self.quantized.label}: {self.psnr.value:.2f} dB)"

    @property
    def psnr(self) -> Interval:
        """Mean over the images in dB with its 95 % interval, Student's t over prompts; identical images are left out.

        It is infinite when all images are identical, and its ends are infinite when there is a single image.
        """
        return SCORES["psnr"].mean(self.scores["psnr"]["values"]) or exactly(float("inf"))

    def row(self) -> dict[str, object]:
        """Label, megabytes of the denoiser's weights, their share of fp16, and the scores, with PSNR's interval.

        The ends of the interval are None where they are not known, as of one image.
        """
        return {
            "recipe": self.quantized.label,
            "megabytes": self.quantized.weight_bytes / 1e6,
            "share_of_fp16": self.quantized.share,
            "psnr_db": self.psnr.value,
            **interval_columns("psnr_db", self.psnr),
            "ssim": self.scores["ssim"]["mean"],
            "lpips": self.scores["lpips"]["mean"],
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Recipes on the same prompts and seeds. ``sd_quant.compare`` makes it."""

    prompts: list[str]
    full_precision: Images  # images, uint8 [N, H, W, 3], or a list where their sizes differ
    results: list[Result]

    def __repr__(self) -> str:
        recipes = "; ".join(result.quantized.label for result in self.results)
        return f"Comparison({recipes}; {counted(len(self.prompts), 'prompt')})"

    def rows(self) -> list[dict[str, object]]:
        """A row for each recipe, as pandas or a CSV writer takes it."""
        return [result.row() for result in self.results]

    def grid(self, path: str | Path, number: int = -1) -> Path:
        """Draw the images of the ``number``-th recipe below those in full precision, as a run's ``images/grid.png``."""
        result = self.results[number]
        return comparison_grid(
            self.full_precision, result.images, output_path(path), self.prompts, result.quantized.label
        )

    def __str__(self) -> str:
        head = f"{'recipe':40} {'MB':>9} {'of fp16':>8} {'PSNR, dB':>15} {'SSIM':>7} {'LPIPS':>7}"
        return "\n".join([head, *map(line, self.results)])


def line(result: Result) -> str:
    """The result as a line of the printed table."""
    row, psnr = result.row(), plus_minus(result.psnr, "{:.2f}")
    return (
        f"{row['recipe']:40} {row['megabytes']:9.2f} {row['share_of_fp16']:8.3f} {psnr:>15} "
        f"{row['ssim']:7.4f} {row['lpips']:7.4f}"
    )


def compare(quantized: Sequence[Quantized], prompts: str | Sequence[str] | None, **knobs: object) -> Comparison:
    """Make the images of several recipes of one model, and of full precision, and say how far apart they are.

    Args:
        quantized: recipes of one ``Model``.
        prompts: one or more texts that say what the images show; for an interval that is of use, some dozens. None with
            the knob ``table``, which has a pipeline's calls.
        knobs: of the section ``infer``: ``steps``, ``scale``, ``seed``, ``batch_size``, ``width``, ``height``,
            ``sizes``, ``negative_prompt``, ``latents``.

    Raises:
        ConfigError: nothing to compare, recipes of several models, a knob that does not exist, or images that the
            checkpoint cannot make.
        ResourceError: memory or the GPU is too small.
    """
    models = {id(each.model): each.model for each in quantized}
    if len(models) != 1:
        raise ConfigError(f"recipes of {len(models)} models were given, expected some of one model")
    (model,) = models.values()
    full = model.generate(prompts, knobs, sampling=sampling_of)
    results = []
    for each in quantized:
        made = model.generate(prompts, knobs, each.assignments)
        results.append(Result(each, made.images, fidelity(full.images, made.images, full.latents, made.latents)))
    texts = model.job(None, UNUSED, with_prompts(prompts, knobs)).infer.prompt_list()  # one for each image
    return Comparison(texts, full.images, results)


def to_generate(
    model: Model, prompts: str | Sequence[str] | None, knobs: Mapping[str, object], simulated: bool
) -> tuple[Session, Infer]:
    """The session and the section ``infer`` by which images are made, checked. Raises SdQuantError."""
    job = model.job(None, UNUSED, with_prompts(prompts, knobs))
    because = "quantize.py chooses the steps; its record has them, for infer.schedule"
    check_unused(job.infer, "infer.", [("reuse", None, because)])
    check(not job.infer.chooses_precise, "infer.precise_steps", job.infer.precise_steps, f"places, because {because}")
    # images from images take one part more, and its weights were read with the others
    session = open_session(job.model, finite=False) if job.model.encoder else model.session
    session.check_images(job.model, job.infer, simulated)
    return session, job.infer


def with_prompts(prompts: str | Sequence[str] | None, knobs: Mapping[str, object]) -> Mapping[str, object]:
    """The ``knobs`` with the prompts, unless ``table`` has them. Raises ConfigError for both, or neither."""
    if "table" not in knobs:
        return {"prompts": texts_of([] if prompts is None else prompts), **knobs}
    check(prompts is None, "prompts", f"{prompts!r:.100}", "None, because table has the prompts of the images")
    return knobs


def texts_of(prompts: str | Sequence[str]) -> list[str]:
    """The prompts as a list, a single text as a list of one. Raises ConfigError for none, and for what is no text."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Iterable) else []
    fits = bool(texts) and all(isinstance(text, str) for text in texts)
    expected = "a text or a list of at least one; give what the images show, such as ['a red bicycle']"
    check(fits, "prompts", f"{prompts!r:.100}", expected)
    return texts


def check_used(knobs: Iterable[str], unused: Collection[str], method: str, remedy: str, when: str = "") -> None:
    """Raises ConfigError for a knob that was given to a ``method`` and is ``unused`` there."""
    for name in knobs:
        if name.partition(".")[0] in unused:
            raise ConfigError(f"{method} does not use {name}{when}; {remedy}")


def called(*positional: object, **named: object) -> str:
    """The arguments of a call in Python."""
    return ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])


def job_with(presets: Mapping[str, str], knobs: Mapping[str, object]) -> QuantizeJob:
    """The job that a command with these presets and knobs means, checked. Another Hydra may be at work around it.

    Raises ConfigError.
    """
    outside = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with composing("quantize"):
            config = compose(
                "quantize", [f"{group}={name}" for group, name in presets.items()], return_hydra_config=True
            )
            for name, value in knobs.items():
                try:
                    OmegaConf.update(config, name, in_texts(without_interpolation, value))
                except OmegaConfBaseException as error:
                    raise ConfigError(f"there is no knob {name}; {near(name, knobs_of(config))}") from error
            return job_of(QuantizeJob, config)
    finally:
        GlobalHydra.instance().hydra = outside
