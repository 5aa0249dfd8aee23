"""The one way to open a model: every command and the Python interface begin here.

A session is an opened checkpoint that has passed all checks: of the knobs against its structure, of its weights, and of
this machine's memory and disk. It also makes the pool that opens the model's engines.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sd_quant.cache import Cache
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.config import Infer, Model, Quantize, makes_calibration_images
from sd_quant.config.model import check_parts_named
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool
from sd_quant.files import write_json
from sd_quant.files.checks import check_finite
from sd_quant.inference.trial import check_arguments
from sd_quant.knobs import check
from sd_quant.models import OBSERVED
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, part_parameters
from sd_quant.models.parts import Part
from sd_quant.observed.checkpoint import OBSERVED_JSON, ObservedCheckpoint
from sd_quant.observed.loras import with_loras
from sd_quant.observed.observing import open_observed
from sd_quant.observed.watching import Asked
from sd_quant.places import input_path, output_path
from sd_quant.stages import checks, resources
from sd_quant.stages.generate import calibration_sampling, pixels_of, recipe_sampling, sampling_of
from sd_quant.stages.resources import PipelineCall, fits, memory_of_variant

SCALE = 5.0  # guidance scale of the recorded run of a pipeline without a recommended scale


@dataclass(frozen=True)
class Session:
    """An open checkpoint. Its weights are not in memory."""

    checkpoint: Checkpoint

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The model's parts by name, the denoiser first."""
        return self.checkpoint.parts()

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of weights by part."""
        return part_parameters(self.checkpoint)

    @property
    def denoiser(self) -> str:
        """The name of the part that is quantized."""
        return self.checkpoint.family.DENOISER

    @property
    def component(self) -> str:
        """The diffusers component that holds the denoiser, such as ``unet``."""
        return denoiser_part(self.checkpoint).component

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes of each part's unquantized weights in the dtype of its export."""
        return {part: self.parts[part].contract.weights.itemsize * count for part, count in self.parameters.items()}

    def check(self, model: Model, infer: Infer, quantize: Quantize | None = None) -> None:
        """Check image and calibration settings against the checkpoint's structure. Raises ConfigError."""
        checks.check_mask(self.checkpoint, "infer.", infer.mask)
        checks.check_latents(self.checkpoint, infer)
        checks.check_tile(self.checkpoint, infer)
        checks.check_guidance(self.checkpoint, infer)
        checks.check_steps(self.checkpoint, "infer.steps", infer.steps)
        checks.check_sizes(self.checkpoint, "infer", infer)
        checks.check_batch(self.checkpoint, "infer.batch_size", infer.batch_size)
        if quantize is not None:
            if makes_calibration_images(quantize, infer):
                lacking = len(model.controlnets) - len(model.calibration_control)
                expected = "condition images for each of model.controlnets, because calibration sees what they compute"
                check(not lacking, "model.calibration_control", model.calibration_control, expected)
                checks.check_mask(self.checkpoint, "model.calibration_", model.calibration_mask)
            checks.check_steps(self.checkpoint, "quantize.n_steps", quantize.n_steps)
            checks.check_batch(self.checkpoint, "quantize.batch_size", quantize.batch_size)
            checks.check_sizes(self.checkpoint, "model", model)
        if model.arguments and model.family != OBSERVED:
            own = [] if quantize is None or quantize.calibration else [calibration_sampling(model, infer, quantize)]
            recipes = [recipe_sampling(infer)] if infer.pulls_levers else []
            check_arguments(self.checkpoint, [sampling_of(infer), *recipes, *own])

    def check_images(self, model: Model, infer: Infer, simulated: bool) -> None:
        """Check settings and memory for images by torch, ``simulated`` or full precision. Raises SdQuantError."""
        checks.check_request(model, infer)
        self.check(model, infer)
        work = resources.by_torch(resources.workload_of(infer))
        needs = (
            resources.simulation_needs(self.parameters, infer)
            if simulated
            else resources.part_needs(self.parameters, work)
        )
        resources.check_machine(needs)

    def together(
        self, work: PipelineCall, beside: resources.Needs = resources.NOTHING, what: str = "all parts of the model"
    ) -> bool:
        """Return whether memory and GPU hold all parts at once, with ``beside`` in addition; log if they do not."""
        memory, gpu = memory_of_variant(self.parameters, work)
        return fits({**memory, **beside.memory}, what, {**gpu, **beside.gpu})

    def engines(self, open_engine: Callable[[Any], Engine], together: bool) -> Pool:
        """Pool engines by key; each is opened by ``open_engine`` at first use, one at a time if not ``together``."""
        return Pool(open_engine, most=None if together else 1)


def open_session(
    model: Model,
    infer: Infer | None = None,
    needs: Callable[[Session], resources.Needs] | None = None,
    directory: Path | None = None,
    finite: bool = True,
) -> Session:
    """Open and check the model's checkpoint, for jobs without a recipe (with a recipe: ``load``).

    ``needs``: the memory and disk that the job takes, by default those of images; ``directory``: the folder written to.
    ``finite=False`` does not read the weights, for engines from files. Raises ConfigError for knobs that do not fit the
    checkpoint, ArtifactError for an unreadable file or weights that are not finite, ResourceError for a small machine.
    """
    if infer is None:
        session = open_unchecked(model)
    else:
        session = begin(model, infer, {"infer": infer})
        session.check(model, infer)
        needs = needs or (lambda session: resources.images_need(session.parameters, infer))
    finish(session, needs, directory, finite)
    return session


def begin(model: Model, infer: Infer, sized: Mapping[str, Infer | Model]) -> Session:
    """Check image settings, open the checkpoint. ``sized``: settings whose image sizes are checked, by section."""
    checks.check_request(model, infer)
    checks.warn_of_size(model, sized)
    return open_unchecked(model)


def finish(
    session: Session, needs: Callable[[Session], resources.Needs] | None, directory: Path | None, finite: bool
) -> None:
    """Check memory and disk, then that all weights are finite (last, as this reads all). Raises SdQuantError."""
    if needs is not None:
        resources.check_machine(needs(session), directory)
    if finite:
        for weights in session.checkpoint.components.values():
            check_finite(weights)  # type: ignore[arg-type]


def open_unchecked(model: Model) -> Session:
    """Open the checkpoint without checks: to read only its structure, or to continue a job that was checked."""
    if model.family == OBSERVED:
        return Session(observed_checkpoint(model))
    return Session(open_checkpoint(
        input_path(model.path), model.family, io=model.io, max_sequence_length=model.max_sequence_length,
        parts=model.parts, loras=model.adapters(), encodes=model.encoder, dtypes=model.dtype,
        pipeline=model.pipeline, vae=input_path(model.vae) if model.vae else None, arguments=model.arguments,
        controlnets=model.opened_controlnets(),
    ))  # fmt: skip


def observed_checkpoint(model: Model) -> ObservedCheckpoint:
    """Open any diffusers pipeline in the model's folder; its structure is recorded by watching one run."""
    path, given, example = input_path(model.path), model.given_arguments(), dict[str, Any]()
    if model.calibration_table is not None:
        row = model.calibration_rows()[0]
        checks.check_table(path, given, row)
        example = row.arguments
    scale = float(model.recommended.get("scale", SCALE))
    asked = Asked(model.width, model.height, scale, pixels_of(given), pixels_of(example))
    cache = Cache(output_path(model.observed) if model.observed else None, math.inf)
    opened = open_observed(path, asked, tuple(model.excluded), model.denoiser, cache, dtypes=model.dtype)
    check_parts_named(model.dtype, opened.parts())
    return with_loras(opened, model.adapters())


def write_observed(session: Session, directory: Path) -> None:
    """Write the recorded structure of the pipeline, if it has one, to ``observed.json`` in ``directory``."""
    if isinstance(session.checkpoint, ObservedCheckpoint):
        write_json(directory / OBSERVED_JSON, session.checkpoint.observation.to_json())
