"""The choice of each layer's format: by the recipe alone, with sensitive layers kept, by a file, or by a size limit."""

import csv
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sd_quant.config import RecipeJob
from sd_quant.config.assignment_file import ASSIGNMENT, FP16, text_of
from sd_quant.errors import ArtifactError
from sd_quant.files import read_regular, temporary_folder, write_text
from sd_quant.metrics.memory import StageTimer
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.record import Record, parsed, read_record, weights_sha256, why
from sd_quant.report.table import write_csv
from sd_quant.stages.assign import assign, assign_parts, most_sensitive
from sd_quant.stages.calibrate import statistics_of
from sd_quant.stages.fit import Fitted, assign_chosen, fit, limit_of, measure_presets
from sd_quant.stages.load import Loaded, units_of, with_recipe
from sd_quant.stages.session import Session
from sd_quant.stages.shared import Shared

Assignments = dict[str, dict[str, LayerAssignment]]  # by part, the denoiser first, then other denoisers


@dataclass(frozen=True)
class Chosen:
    """The assignments of a run, and the measurements by which they were chosen."""

    assignments: Assignments
    fitted: Fitted | None = None  # with quantize.budget or quantize.fit
    given: bool = False  # with the knob ``assignment``: a file gave every layer's preset


def rows_of_layers(assignments: Mapping[str, Mapping[str, LayerAssignment]]) -> list[dict[str, object]]:
    """Return the rows of ``layers.csv``; layers of parts after the first are named ``part:layer``."""
    first = next(iter(assignments))
    return [
        layer.row() | ({} if part == first else {"name": f"{part}:{name}"})
        for part, own in assignments.items()
        for name, layer in own.items()
    ]


def choose(
    loaded: Loaded,
    statistics: Statistics,
    directory: Path,
    step: Callable[[str], AbstractContextManager],
    shared: Shared | None = None,
) -> Chosen:
    """Choose how each layer of all quantized parts is quantized. Raises ConfigError for a size limit too small to meet.

    ``step`` times a named stage. Writes ``assignment.yaml``, ``layers.csv`` and the measurements.
    """
    denoiser, fitted = loaded.denoiser, None
    if loaded.labels is not None:
        with step("assign"):
            assignments = {denoiser: assign_chosen(loaded, statistics, loaded.labels)}
            assignments |= assign_parts(loaded, statistics.parts)
        return written(loaded, Chosen(assignments, given=True), directory)
    with step("assign" if loaded.recipe.fit is None else "fit"):
        if (limited := limit_of(loaded)) is not None:
            measured = measure_presets(loaded, statistics, limited.offers, shared)
            fitted = fit(loaded, statistics, limited, measured, directory)
        assignments = dict(fitted.assignments) if fitted else {denoiser: assign(loaded, statistics)}
        assignments |= assign_parts(loaded, statistics.parts)
    if loaded.kept:
        with step("sensitivity"):
            for part, own in {denoiser: loaded, **loaded.others}.items():
                seen, end = (statistics, "") if own is loaded else (statistics.parts[part], f"_{part}")
                kept = most_sensitive(own, seen, assignments[part], directory, shared, end)
                assignments[part] = assign(own, seen, kept)
    return written(loaded, Chosen(assignments, fitted), directory)


def labels_of(loaded: Loaded, chosen: Chosen) -> dict[str, str]:
    """Return the preset, or fp16, of each denoiser layer that may be quantized, in the network's order."""
    mixed, own = chosen.fitted.labels if chosen.fitted else loaded.labels, chosen.assignments[loaded.denoiser]
    found = {name for unit in units_of(loaded) for name in unit}
    labels = {name: (mixed or {}).get(name, loaded.recipe.format) for name in loaded.roles if name in found}
    return {name: label if own[name].format is not None else FP16 for name, label in labels.items()}


def written(loaded: Loaded, chosen: Chosen, directory: Path) -> Chosen:
    """Write ``assignment.yaml`` and ``layers.csv`` to ``directory``, and return ``chosen``."""
    knobs = [f"quantize={loaded.recipe.format}", f"quant_level={loaded.recipe.quant_level:g}"]
    write_text(directory / ASSIGNMENT, text_of(labels_of(loaded, chosen), knobs))
    write_csv(rows_of_layers(chosen.assignments), directory / "layers.csv")
    return chosen


def chosen_again(
    job: RecipeJob, run: Path, step: StageTimer, session: Session, directory: Path
) -> tuple[Loaded, Assignments]:
    """Derive the assignments of a finished ``run`` again from its knobs, and check them against its ``layers.csv``.

    Temporary files are in ``directory``. Raises ArtifactError if the run's files are damaged or the tables differ.
    """
    with step("load"):
        loaded = with_recipe(session, job.model, job.infer, job.quantize)
    with step("calibrate"):
        statistics = statistics_of(loaded, job, str(weights_sha256(record_of_run(run))))
    with temporary_folder(directory) as folder:
        chosen = choose(loaded, statistics, Path(folder), step)
        if decided(Path(folder) / "layers.csv") != decided(run / "layers.csv"):
            raise ArtifactError(
                f"{run / 'layers.csv'} is not what the run's knobs give with this version and checkpoint; "
                "make the run again, and hand that over"
            )
    return loaded, chosen.assignments


def record_of_run(run: Path) -> Record:
    """Read the record of a finished run. Raises ArtifactError for a damaged one."""
    try:
        return read_record(run) or parsed(None)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{run} has no record that can be read ({why(error)}); give another run") from error


def decided(table: Path) -> list[dict[str, str]]:
    """Read a ``layers.csv`` without error columns (their last digits vary). Raises ArtifactError if unreadable."""
    try:
        lines = read_regular(table).decode("utf-8").splitlines()
        return [{name: value for name, value in row.items() if "error" not in name} for row in csv.DictReader(lines)]
    except (OSError, ValueError, AttributeError, csv.Error) as error:
        raise ArtifactError(f"{table} is not a run's table of layers ({why(error)}); give another run") from error
