"""The subjects of a judgement: third-party checkpoints, and runs of ``quantize.py``.

A third-party checkpoint is computed as the tool that it is made for computes it, by its format's reader. A run is
computed by its assignment, which is derived again from its knobs and has to be the one that it has written down.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sd_quant.checkpoints.lora import without_loras
from sd_quant.config import BESIDE, FUSED, CacheFolder, Infer, Model, artifact, is_run, recipe_of_run
from sd_quant.config.precise_steps import with_ends
from sd_quant.devices import CPU, best_device
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ConfigError
from sd_quant.interchange import FORMATS
from sd_quant.interchange.beside import adapted_of, holds_loras, with_loras
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer, weights_alone, with_denoiser
from sd_quant.interchange.errors import plain_weight, unfolded
from sd_quant.interchange.other_parts import read_parts
from sd_quant.interchange.sampling import check_marks
from sd_quant.metrics.memory import StageTimer
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, denoiser_weights, empty_denoiser, in_place
from sd_quant.models.roles import roles_of
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import WITHOUT_WEIGHTS, LayerAssignment
from sd_quant.report.candidates import HIGH_PRECISION
from sd_quant.report.provenance import fingerprint
from sd_quant.report.record import weights_sha256
from sd_quant.stages.assign import with_loras_beside
from sd_quant.stages.hand_over import assignment_of, cuts_padding, record_of_run, sampled
from sd_quant.stages.open_parts import open_changed, open_file, open_simulated
from sd_quant.stages.session import Session

RUN = "sd_quant run"  # what stands for a reader's name
WITHOUT_LORAS = "what its own library or runtime computes is without the LoRAs, which are beside it here"
UNTRUSTED = "judge.trust_runs is false, and a run's file is executed only where it is true"
MOST_CALIBRATED = 1024 * 50  # prompts by steps: more than any source recommends
# A run's own knobs that decide its statistics, beside the recipe
OF_CALIBRATION = (
    *("calibration_prompts", "calibration_table", "calibration_image", "calibration_mask", "calibration_control"),
    *("width", "height", "sizes"),
)
OF_GUIDANCE = ("scale", "negative_prompt", "strength")
BITS = {torch.float32: 32.0, torch.float16: 16.0, torch.bfloat16: 16.0, torch.float64: 64.0}


@dataclass(frozen=True)
class OwnLibrary:
    """The library or runtime that a checkpoint is made for, where it computes on this machine."""

    name: str
    open: Callable[[], Engine]  # may raise anything: it is other people's code


@dataclass(frozen=True)
class OtherPart:
    """A part other than the denoiser that a third-party checkpoint or a run has quantized."""

    reader: str  # as of a ``Subject``
    maker: str
    stored_bytes: int  # of its network, an autoencoder's encoder included where it is a third party's
    bits: float  # per weight of these
    rows: list[dict[str, Any]]
    open: Callable[[], Engine]
    # the relative errors of quantized weights by the rows' names; none of a run
    weight_errors: Callable[[], Mapping[str, float | None]] = dict


@dataclass(frozen=True)
class Subject:
    """A third-party checkpoint or a run, opened."""

    name: str  # of the folder of its results, and in tables
    path: Path
    file: Mapping[str, Any]  # what ``provenance.fingerprint`` says of it
    reader: str  # of ``READERS``, or RUN
    maker: str  # who made it, for people
    stored_bytes: int  # of the denoiser
    rows: list[dict[str, Any]]  # of ``layers.csv``: every layer, quantized or not
    open: Callable[[], Engine]  # the denoiser that its consumer computes, in torch and fp32
    # those that are quantized, for inputs of the full-precision network; empty of a run
    layers: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    runtime: OwnLibrary | None = None
    others: Mapping[str, OtherPart] = field(default_factory=dict)  # by part; the model's own stand for all others
    no_runtime: str = "no library that opens it computes on this machine"  # why there is none, where there is none
    loras: str | None = None  # where it has those of the full-precision model: FUSED or BESIDE; None: there are none
    cuts_text: bool = False  # whether its consumer passes the text without the zeros behind it
    schedule: str | None = None  # of its steps, see ``inference.calls``
    open_precise: Callable[[], Engine] | None = None  # the denoiser of steps with unquantized inputs, if it has such


@dataclass(frozen=True)
class JudgedWith:
    """The judge's own settings for runs, which override those in a run's config."""

    model: Model
    infer: Infer
    cache: CacheFolder  # for statistics
    directory: Path  # for files in progress
    trusted: bool  # whether their ONNX files are executed
    base_sha256: str | None = None  # of the full-precision weights without the model's LoRAs


def subject_of(name: str, path: Path, session: Session, sha256: str | None, runs: JudgedWith) -> Subject:
    """The checkpoint or run at ``path``; ``sha256`` is that of the full-precision weights.

    Raises ConfigError for a run of other weights, and what the readers raise.
    """
    if is_run(path):
        return run_subject(name, path, session, sha256, runs)
    checkpoint = session.checkpoint
    parts = read_parts(path, checkpoint)
    denoiser = parts.pop(session.denoiser)
    if denoiser.marks:
        check_marks(path, denoiser.marks, sampled(checkpoint))
    rows = rows_of(denoiser, checkpoint.family.layer_roles(empty_denoiser(checkpoint)))
    layers, loras = unfolded(denoiser, checkpoint), None
    if adapted_of(checkpoint):
        loras = FUSED if holds_loras(denoiser, layers, checkpoint) else BESIDE
    if loras == BESIDE:
        denoiser = with_loras(denoiser, layers, checkpoint)
        layers = unfolded(denoiser, checkpoint)
    schedule = schedule_of(denoiser, runs.infer.recipe_steps)
    if schedule is not None:
        denoiser = replace(denoiser, maker=f"{denoiser.maker}, steps {schedule}")
    return Subject(
        name, path, fingerprint(path), denoiser.format, denoiser.maker, denoiser.stored_bytes,
        rows, partial(open_computed, checkpoint, denoiser), layers,
        runtime_of(denoiser, checkpoint),
        {part: other_part(read, in_place(checkpoint, part), part) for part, read in parts.items()},
        WITHOUT_LORAS if loras == BESIDE else Subject.no_runtime, loras,
        cuts_padding(FORMATS[denoiser.format], checkpoint),
        schedule, partial(open_computed, checkpoint, weights_alone(denoiser)) if schedule else None,
    )  # fmt: skip


def schedule_of(denoiser: QuantizedDenoiser, steps: int) -> str | None:
    """The schedule of a third-party checkpoint that makes its first and last steps precise.

    None without such, and for one step alone, with which servers warm up.
    Raises ConfigError where there are fewer ``steps`` than these.
    """
    first, last = denoiser.precise_ends
    if first + last > steps:
        raise ConfigError(
            f"{denoiser.path} multiplies unquantized inputs in its first {first} and last {last} steps, which overlap "
            f"in {steps}; set infer.steps to {first + last} at least"
        )
    return with_ends(first, last, steps) if (first or last) and steps > 1 else None


def other_part(read: QuantizedDenoiser, checkpoint: Checkpoint, part: str) -> OtherPart:
    """A part of a third-party checkpoint, which ``checkpoint`` has in the denoiser's place."""
    weights, network = denoiser_weights(checkpoint), empty_denoiser(checkpoint)
    denoises = part in checkpoint.family.DENOISERS
    rows = rows_of(read, checkpoint.family.layer_roles(network) if denoises else roles_of(network, ()))
    if adapted_of(checkpoint) and not holds_loras(read, read.layers, checkpoint):
        read = with_loras(read, read.layers, checkpoint)

    def weight_errors() -> dict[str, float | None]:
        return {
            f"{part}:{name}": relative_error(weights[f"{name}.weight"].float(), plain_weight(layer))
            for name, layer in read.layers.items()
        }

    named = [row | {"name": f"{part}:{row['name']}"} for row in rows]
    opened = partial(open_computed, checkpoint, read)
    return OtherPart(read.format, read.maker, read.stored_bytes, read.bits, named, opened, weight_errors)


def rows_of(denoiser: QuantizedDenoiser, roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The columns of ``layers.csv`` that are known before anything is computed."""
    rows = []
    for name, role in roles.items():
        layer = denoiser.layers.get(name)
        stored = layer.weight if layer is not None else denoiser.parameters[f"{name}.weight"]
        inputs = denoiser.rounded.get(name) if layer is None else layer.inputs
        rows.append({
            "name": name,
            "role": role,
            "weight_shape": "x".join(map(str, stored.shape)),
            "format": layer.format if layer is not None else HIGH_PRECISION,
            "bits": layer.bits if layer is not None else BITS[stored.dtype],
            "scales": layer.scales if layer is not None else "",
            "inputs": HIGH_PRECISION if inputs is None else str(inputs),
        })  # fmt: skip
    return rows


def open_computed(checkpoint: Checkpoint, denoiser: QuantizedDenoiser) -> TorchEngine:
    """The denoiser as its consumer computes it."""
    return open_changed(checkpoint, lambda module: with_denoiser(module, checkpoint, denoiser))


class LibraryEngine(TorchEngine):
    """A denoiser that another library has opened: its weights may be of any kind, so its dtype is asked for.

    It runs without inference mode, in which quanto fails.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, *arguments: Any):
        super().__init__(module, *arguments)
        self.inputs = {name: dtype if each.is_floating_point else each for name, each in self.inputs.items()}

    @torch.no_grad()
    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        output = self.module(**cast_inputs(self.inputs, inputs, self.device))
        outputs = output if isinstance(output, tuple) else (output,)
        return {name: each.float() for name, each in zip(self.outputs, outputs, strict=True)}

    def reopen(self) -> bool:
        return False  # weights of any kind are not to be moved


def runtime_of(denoiser: QuantizedDenoiser, checkpoint: Checkpoint) -> OwnLibrary | None:
    if denoiser.runtime is None:
        return None
    opened, part = denoiser.runtime, denoiser_part(checkpoint)

    def open_library() -> Engine:
        network, device = opened().eval().requires_grad_(False), best_device()
        network = network if device == CPU else network.to(device)  # which some libraries refuse, even where it is
        return LibraryEngine(part.wrap(network), cast(torch.dtype, network.dtype), part.contract)

    return OwnLibrary(denoiser.maker, open_library)


def run_subject(name: str, run: Path, session: Session, sha256: str | None, runs: JudgedWith) -> Subject:
    """A run of anybody: a recipe for the judge's own model, which is derived again.

    One of the model without its LoRAs gets these beside its weights.
    """
    job, record = recipe_of_run(str(run), runs.cache), record_of_run(run)
    of_run = weights_sha256(record)
    without = of_run != sha256 and bool(runs.model.loras) and of_run == runs.base_sha256
    if of_run != sha256 and not without:
        raise ConfigError(
            f"the candidate {run} quantizes {job.model.path}, which has other weights than model.path; "
            "give runs of the full-precision model that the others are compared with"
        )
    engine = job.infer.engine
    if job.quantize.calibration is None and job.quantize.calib_size * job.quantize.n_steps > MOST_CALIBRATED:
        raise ConfigError(
            f"the candidate {run} was calibrated on {job.quantize.calib_size} prompts in {job.quantize.n_steps} steps, "
            f"expected at most {MOST_CALIBRATED} of these together; give its statistics with the run"
        )
    job.model = replace(runs.model, **{name: getattr(job.model, name) for name in (*OF_CALIBRATION, "denoiser")})
    if without:
        job.model = replace(job.model, loras=[])
    guided = {name: getattr(job.infer, name) for name in OF_GUIDANCE}
    job.infer = copy.copy(runs.infer)
    for knob, value in guided.items():
        setattr(job.infer, knob, value)
    of_the_run = Session(without_loras(session.checkpoint)) if without else session
    loaded, assignments = assignment_of(job, run, StageTimer(), of_the_run, runs.directory)
    if without:
        assignments = {part: with_loras_beside(session.checkpoint, part, rows) for part, rows in assignments.items()}
    loras = (BESIDE if without else job.quantize.loras) if runs.model.loras else None
    path, others = artifact(run, "onnx", session.denoiser), dict(assignments)
    assignment = others.pop(session.denoiser)
    return Subject(
        name, run, fingerprint(run), RUN, f"sd-quant {job.quantize.format}", onnx_bytes(run, session.denoiser),
        rows_of_run(assignment), partial(open_simulated, session.checkpoint, assignment),
        runtime=None if without else run_runtime(path, engine, record, runs),
        others={
            part: OtherPart(
                RUN, f"sd-quant {loaded.part_presets.get(part, 'fit')}", onnx_bytes(run, part),
                8 * onnx_bytes(run, part) / session.parameters[part],
                [row | {"name": f"{part}:{row['name']}"} for row in rows_of_run(own)],
                partial(open_simulated, session.checkpoint, own, part),
            )
            for part, own in others.items()
        },
        no_runtime=WITHOUT_LORAS if without else Subject.no_runtime if runs.trusted else UNTRUSTED,
        loras=loras,
    )  # fmt: skip


def onnx_bytes(run: Path, part: str) -> int:
    return sum(file.stat().st_size for file in onnx_files(artifact(run, "onnx", part)))


def rows_of_run(assignment: Mapping[str, LayerAssignment]) -> list[dict[str, Any]]:
    """The rows of an assignment as those of a third-party checkpoint."""
    return [
        {
            "name": layer.name,
            "role": layer.role,
            "weight_shape": "x".join(map(str, layer.weight_shape)),
            "format": layer.format or HIGH_PRECISION,
            "bits": None,
            "scales": "",
            "inputs": layer.activation_format or HIGH_PRECISION,
            "output_error": layer.output_error,
        }
        for layer in assignment.values()
        if layer.role not in WITHOUT_WEIGHTS
    ]


def run_runtime(path: Path, engine: str, record: Mapping[str, Any], runs: JudgedWith) -> OwnLibrary | None:
    """The run's ``engine`` for its file at ``path``, where it is trusted, installed and computes on a processor."""
    row = RUNTIMES[engine]
    here = row.file == "onnx" and row.device == "cpu" and find_spec(row.package) is not None
    if not runs.trusted or record.get("simulated") or not here:
        return None
    return OwnLibrary(engine, partial(open_file, path, replace(runs.infer, engine=engine)))
