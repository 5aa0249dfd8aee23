"""An open checkpoint, which makes calibration statistics, recipes and images."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sd_quant.cache import Cache
from sd_quant.calibration.call_tables import Row
from sd_quant.composition import job_with
from sd_quant.config import Infer, Quantize, QuantizeJob
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Generated, Sampling
from sd_quant.interface.given import UNUSED, check_used, texts_of, with_prompts
from sd_quant.interface.quantized import Quantized
from sd_quant.knobs import check, check_unused, fields_of
from sd_quant.metrics.images import Images
from sd_quant.places import input_path, output_path, shown
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.provenance import made_of
from sd_quant.report.record import weights_sha256
from sd_quant.stages.calibrate import statistics_of
from sd_quant.stages.choose import choose
from sd_quant.stages.generate import generate, recipe_sampling
from sd_quant.stages.load import with_recipe
from sd_quant.stages.session import Session, open_session
from sd_quant.stages.variants import Assignments, torch_variant

CALIBRATION = ("calib_size", "n_steps", "seed", "snapshots", "calibration", "accelerator", "devices")
IN_STATISTICS = {*CALIBRATION, "batch_size", "parts"}


def open(
    model: str = "sdxl_mini", path: str | Path | None = None, *, cache: str | Path | None = None, **knobs: object
) -> "Model":
    """Open a checkpoint.

    Args:
        model: a preset, as for ``model=``: ``sdxl``, ``sdxl_nemo``, ``sd15``, ``flux``, ... or ``sdxl_mini``, the
            checkpoint that ships.
        path: the file or folder of the checkpoint, as for ``model.path=``.
        cache: a folder where statistics and exported files are kept for the next time; None keeps nothing.
        knobs: other knobs of the section ``model``, such as ``width=512`` or ``loras=["style.safetensors:0.8"]``.

    Returns:
        A ``Model``, which keeps no weights in memory.

    Raises:
        ConfigError: there is no such preset, knob or file, or a value is out of range.
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
    """An open checkpoint, made by ``sd_quant.open``."""

    preset: str
    knobs: Mapping[str, object]  # given knobs of the sections ``model`` and ``cache``, by their full names
    path: Path
    session: Session
    cache: Cache

    def __repr__(self) -> str:
        part, count = next(iter(self.parameters.items()))
        return f"Model({self.preset}, {shown(self.path)}, {count:,} parameters in {part})"

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the checkpoint's file or folder; with LoRAs, over all their files and strengths too."""
        return str(weights_sha256(made_of(self.job(None, UNUSED).model.inputs())))

    @property
    def parameters(self) -> dict[str, int]:
        """Number of parameters of each part, the denoiser first."""
        return self.session.parameters

    def calibrate(self, prompts: str | Sequence[str] | None = None, **knobs: object) -> Statistics:
        """Collect calibration statistics (ranges and samples of each layer's inputs), from which recipes are derived.

        Args:
            prompts: one or more texts for calibration images; None: ``calib_size`` of the calibration prompts.
            knobs: the guidance ``scale``, and the knobs of the section ``quantize`` on which statistics depend:
                ``calib_size``, ``n_steps``, ``seed``, ``batch_size``, ``calibration``, ``snapshots``, ``accelerator``,
                ``devices``; also ``parts``, for statistics of these parts too, and ``loras``, with the values that
                ``quantize`` gets later.

        Returns:
            The statistics. They depend on no recipe.

        Raises:
            ConfigError: a knob does not exist, is out of range, or is used by ``quantize`` alone; ``calib_size`` or
                ``calibration`` is given together with ``prompts``.
            SdQuantError: an input of a layer is not finite.
            ResourceError: memory or the GPU is too small.
        """
        check_used(knobs, fields_of(Quantize).keys() - IN_STATISTICS, "calibrate", "give it to quantize")
        if prompts is not None:
            expected = "None, because calibration_table has the prompts of calibration"
            check("model.calibration_table" not in self.knobs, "prompts", f"{prompts!r:.100}", expected)
            check_used(knobs, ("calib_size", "calibration"), "calibrate", "leave one of them out", " beside prompts")
        job = self.job(None, knobs)
        rows = None if prompts is None else [Row(text, {}) for text in texts_of(prompts)]
        loaded = with_recipe(self.session, job.model, job.infer, job.quantize)
        sha256 = str(weights_sha256(made_of(job.model.inputs())))
        return statistics_of(loaded, job, sha256, rows)

    def quantize(self, statistics: Statistics, preset: str | None = None, **knobs: object) -> "Quantized":
        """Derive how each layer is quantized. Takes seconds; with ``keep``, ``budget`` or ``fit`` it tries every layer.

        Args:
            statistics: the result of ``calibrate``.
            preset: as for ``quantize=``: ``fp8``, ``svdquant_w4a16``, ``nvfp4``, ...; None: ``int8``, its default.
            knobs: of the section ``quantize``, such as ``quant_level=3``, ``alpha=0.8``, ``keep=10``, ``budget=0.25``;
                and the guidance ``scale``: ``keep`` and ``budget`` measure errors of the network's output after
                guidance. Prompts and steps are known from the statistics; ``batch_size`` is read only with
                ``percentile_calibrator="modelopt"`` and has to be that of ``calibrate``.

        Raises:
            ConfigError: a knob does not exist, is out of range, contradicts another, or is used by ``calibrate``
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
        """Generate full-precision images of ``prompts``, uint8 [images, height, width, 3]; knobs as for ``compare``.

        If the images have several ``sizes``, the result is a list of arrays [height, width, 3].
        """
        return self.generate(prompts, knobs).images

    def generate(
        self,
        prompts: str | Sequence[str] | None,
        knobs: Mapping[str, object],
        assignments: Assignments | None = None,
        sampling: Callable[[Infer], Sampling] = recipe_sampling,
    ) -> Generated:
        """Generate images and latents in torch, parts in ``assignments`` quantized; ``sampling`` gives the settings."""
        session, infer = self.to_generate(prompts, knobs, simulated=bool(assignments))
        variant = torch_variant(session, infer, assignments or {})
        try:
            what = "quantized" if assignments else "full precision"
            return generate(pipeline_of(session.checkpoint, variant), infer.prompt_list(), sampling(infer), what)
        finally:
            variant.pool.close()

    def to_generate(
        self, prompts: str | Sequence[str] | None, knobs: Mapping[str, object], simulated: bool
    ) -> tuple[Session, Infer]:
        """Return the open checkpoint and the section ``infer``. Raises SdQuantError if such images cannot be made."""
        job = self.job(None, UNUSED, with_prompts(prompts, knobs))
        because = "quantize.py chooses the steps; its record has them, for infer.schedule"
        check_unused(job.infer, "infer.", (True, {"reuse": None}, because))
        check(
            not job.infer.chooses_precise, "infer.precise_steps", job.infer.precise_steps, f"places, because {because}"
        )
        # images from images take one part more, and its weights were read with the others
        session = open_session(job.model, finite=False) if job.model.encoder else self.session
        session.check_images(job.model, job.infer, simulated)
        return session, job.infer

    def job(self, preset: str | None, recipe: Mapping[str, object], infer: Mapping[str, object] = {}) -> QuantizeJob:
        """Return the checked job of ``quantize``; ``recipe``, ``infer``: knobs. Raises SdQuantError if invalid."""
        presets = {"model": self.preset, "export_trt": "none"} | ({"quantize": preset} if preset else {})
        of_images = {f"infer.{name}": value for name, value in infer.items()}
        of_recipe = {f"{'infer' if name == 'scale' else 'quantize'}.{name}": value for name, value in recipe.items()}
        return job_with(presets, {**self.knobs, **of_images, **of_recipe})
