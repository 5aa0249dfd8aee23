"""The choice of the assignment: by the recipe, by a budget, or by the recipe with the most sensitive layers kept."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.ranges_by_step import ranges_by_step
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.csv_files import write_csv
from sd_quant.simulation.sensitivity import Sensitivity
from sd_quant.stages.assign import assign, assign_parts, most_sensitive
from sd_quant.stages.fit_budget import Fitted, bytes_to_share, fit_budget, recipes_of, units_of
from sd_quant.stages.fit_pipeline import FittedPipeline, fit_pipeline
from sd_quant.stages.layer_times import Times, times_of_job
from sd_quant.stages.load import Loaded


@dataclass(frozen=True)
class Chosen:
    """The assignment, and the measurements that it was chosen by."""

    assignment: dict[str, LayerAssignment]
    parts: dict[str, dict[str, LayerAssignment]]  # of other parts than the denoiser
    sensitivity: Sensitivity | None  # with quantize.keep
    fitted: Fitted | None  # with quantize.budget
    pipeline: FittedPipeline | None = None  # with quantize.fit


def rows_of_layers(
    assignment: Mapping[str, LayerAssignment], parts: Mapping[str, Mapping[str, LayerAssignment]]
) -> list[dict[str, object]]:
    """The rows of ``layers.csv``: the denoiser's, then those of other parts, whose names begin with the part's."""
    others = [layer.row() | {"name": f"{part}:{name}"} for part in parts for name, layer in parts[part].items()]
    return [*(layer.row() for layer in assignment.values()), *others]


def choose(
    loaded: Loaded,
    statistics: Statistics,
    directory: Path,
    step: Callable[[str], AbstractContextManager],
    times: Times | None = None,
) -> Chosen:
    """Choose the assignment, in stages that ``step`` times. Writes ``layers.csv``, ``ranges.csv`` and the measurements.

    ``times`` are those of ``quantize.budget_ms``, where they are known already. Raises ConfigError for a budget that
    cannot be met.
    """
    sensitivity = None
    if loaded.recipe.budget_ms is not None:  # SEAM: fit_budget with the costs time_costs(times, units)
        # and the limit budget_ms / 1000 seconds; nothing that is never quantized counts
        times = times or times_of_job(loaded, recipes_of(loaded), units_of(loaded), directory)
        raise NotImplementedError("the choice of formats by times of layers")
    if loaded.recipe.fit is not None:
        with step("fit"):
            whole = fit_pipeline(loaded, statistics, directory)
        return written(Chosen(whole.assignment, whole.parts, None, None, whole), statistics, directory)
    with step("assign"):
        limit = bytes_to_share(loaded)
        fitted = None if limit is None else fit_budget(loaded, statistics, limit, directory)
        assignment = fitted.assignment if fitted else assign(loaded, statistics)
        parts = assign_parts(loaded, statistics.parts)
    if loaded.kept:
        with step("sensitivity"):
            sensitivity, kept = most_sensitive(loaded, statistics, assignment, directory)
            assignment = assign(loaded, statistics, kept)
    return written(Chosen(assignment, parts, sensitivity, fitted), statistics, directory)


def written(chosen: Chosen, statistics: Statistics, directory: Path) -> Chosen:
    """Write the choice's tables of layers and ranges to ``directory``, and return it."""
    write_csv(rows_of_layers(chosen.assignment, chosen.parts), directory / "layers.csv")
    write_csv(ranges_by_step(chosen.assignment, statistics.layers), directory / "ranges.csv")
    return chosen
