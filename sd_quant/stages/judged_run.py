"""A run of ``quantize.py`` as a candidate of ``judge``.

Its layer assignments are derived again from its settings, have to equal its ``layers.csv``, and are simulated.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_quant.checkpoints.lora import adapted_in, factors_of, without_loras
from sd_quant.config import artifact, recipe_of_run
from sd_quant.engines import RUNTIMES
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.interchange.beside import BESIDE, FUSED, NAMED
from sd_quant.metrics.memory import StageTimer
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.quantization.assignment import WITHOUT_WEIGHTS, LayerAssignment
from sd_quant.quantization.low_rank import with_adapter
from sd_quant.report.candidates import HIGH_PRECISION
from sd_quant.report.provenance import fingerprint
from sd_quant.report.record import Record, base_sha256, weights_sha256
from sd_quant.stages.baseline import Baseline
from sd_quant.stages.choose import chosen_again, record_of_run
from sd_quant.stages.open_parts import open_file, open_simulated
from sd_quant.stages.session import Session
from sd_quant.stages.third_party import WITHOUT_LORAS, OwnLibrary, Subject, SubjectPart

RUN = "sd_quant run"  # in place of a reader's name
UNTRUSTED = "judge.trust_runs is false, and a run's file is executed only where it is true"
MOST_CALIBRATED = 1024 * 50  # prompts by steps: more than any source recommends
# Knobs of a run, beside its recipe, that decide its statistics
OF_CALIBRATION = (
    *("calibration_prompts", "calibration_table", "calibration_image", "calibration_mask", "calibration_control"),
    *("width", "height", "sizes"),
)
OF_GUIDANCE = ("scale", "negative_prompt", "strength")


def run_subject(name: str, run: Path, baseline: Baseline) -> Subject:
    """Open a finished run as a candidate: apply its recipe again to the judge's own model.

    LoRAs of the model that the run lacks are added as branches. Raises ConfigError for a run of other weights.
    """
    job, record, session = recipe_of_run(str(run), baseline.cache), record_of_run(run), baseline.session
    of_run, sha256, loras = weights_sha256(record), weights_sha256(baseline.facts), baseline.model.loras
    without = of_run != sha256 and bool(loras) and of_run == base_sha256(baseline.facts)
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
    job.model = replace(baseline.model, **{name: getattr(job.model, name) for name in (*OF_CALIBRATION, "denoiser")})
    guided = {name: getattr(job.infer, name) for name in OF_GUIDANCE}
    job.infer = copy.copy(baseline.infer)
    for knob, value in guided.items():
        setattr(job.infer, knob, value)
    of_the_run = session
    if without:
        job.model, of_the_run = replace(job.model, loras=[]), Session(without_loras(session.checkpoint))
    loaded, assignments = chosen_again(job, run, StageTimer(), of_the_run, baseline.directory)
    if without:
        assignments = {part: with_loras_beside(session.checkpoint, part, rows) for part, rows in assignments.items()}
    presets = {part: loaded.part_presets.get(part, "fit") for part in assignments} | {
        session.denoiser: job.quantize.format
    }
    parts = {
        part: SubjectPart(
            RUN, f"sd-quant {presets[part]}", stored := onnx_bytes(run, part), 8 * stored / session.parameters[part],
            rows_of_run(rows, "" if part == session.denoiser else f"{part}:"),
            partial(open_simulated, session.checkpoint, rows, part),
        )
        for part, rows in assignments.items()
    }  # fmt: skip
    return Subject(
        name, run, fingerprint(run), parts,
        runtime=None if without else run_runtime(artifact(run, "onnx", session.denoiser), engine, record, baseline),
        no_runtime=WITHOUT_LORAS if without else Subject.no_runtime if baseline.judge.trust_runs else UNTRUSTED,
        loras=(BESIDE if without else FUSED) if loras else None,
    )  # fmt: skip


def onnx_bytes(run: Path, part: str) -> int:
    return sum(file.stat().st_size for file in onnx_files(artifact(run, "onnx", part)))


def rows_of_run(assignment: Mapping[str, LayerAssignment], prefix: str) -> list[dict[str, Any]]:
    """Return rows of ``layers.csv`` for an assignment, with ``third_party.rows_of``'s columns; ``prefix``: of names."""
    return [
        {
            "name": f"{prefix}{layer.name}",
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


def run_runtime(path: Path, engine: str, record: Record, baseline: Baseline) -> OwnLibrary | None:
    """Return the run's CPU engine on its ONNX file; None unless runs are trusted and the engine is installed."""
    row = RUNTIMES[engine]
    here = row.file == "onnx" and row.device == "cpu" and find_spec(row.package) is not None
    if not baseline.judge.trust_runs or record["simulated"] or not here:
        return None
    return OwnLibrary(engine, partial(open_file, path, replace(baseline.infer, engine=engine)))


def with_loras_beside(
    checkpoint: Checkpoint, part: str, assignment: Mapping[str, LayerAssignment]
) -> dict[str, LayerAssignment]:
    """Add the LoRAs of ``checkpoint`` to a part's ``assignment``, as low-rank branches of its quantized linears.

    Raises ConfigError for a LoRA of a quantized convolution, which cannot have such a branch.
    """
    adapted = adapted_in(checkpoint, checkpoint.parts()[part].component)
    beside = [name for name in adapted if name in assignment and assignment[name].format is not None]
    if convolutions := [name for name in beside if len(assignment[name].weight_shape) != 2]:
        raise ConfigError(
            f"model.loras change {len(convolutions)} quantized convolutions of {part} "
            f"({listing(convolutions, NAMED)}); beside its weights only a linear can have a LoRA, so give a run that "
            "keeps these in high precision, with quantize.exclude, or one of a model with the LoRAs"
        )
    return dict(assignment) | {name: with_adapter(assignment[name], *factors_of(adapted[name])) for name in beside}
