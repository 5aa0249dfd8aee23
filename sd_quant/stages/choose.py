"""The choice of the assignment: by the recipe, a file, a limit, or the recipe with the most sensitive layers kept."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sd_quant.config.assignment_file import ASSIGNMENT, FP16, text_of
from sd_quant.files import write_text
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.percentile import ranges_by_step
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.record import AutoCompared
from sd_quant.report.table import write_csv
from sd_quant.simulation.sensitivity import Sensitivity
from sd_quant.stages.assign import assign, assign_parts, auto_compared, most_sensitive
from sd_quant.stages.fit import Fitted, assign_chosen, fit, limit_of, measure_presets
from sd_quant.stages.load import Loaded, units_of
from sd_quant.stages.shared import Shared


@dataclass(frozen=True)
class Chosen:
    """The assignment, and the measurements that it was chosen by."""

    assignment: dict[str, LayerAssignment]
    parts: dict[str, dict[str, LayerAssignment]]  # of other parts than the denoiser, other denoisers first
    sensitivity: Sensitivity | None  # with quantize.keep
    fitted: Fitted | None  # with quantize.budget or quantize.fit
    given: bool = False  # with assignment: a file has decided
    auto: AutoCompared | None = None


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
    shared: Shared | None = None,
) -> Chosen:
    """Choose the assignment, in stages that ``step`` times.

    Writes ``assignment.yaml``, ``layers.csv``, ``ranges.csv`` and the measurements.

    ``shared`` as for ``measure_sensitivity``. Raises ConfigError for a budget that cannot be met.
    """
    sensitivity = None
    if loaded.labels is not None:
        with step("assign"):
            assignment = assign_chosen(loaded, statistics, loaded.labels)
            parts = assign_parts(loaded, statistics.parts)
        return written(loaded, Chosen(assignment, parts, None, None, given=True), statistics, directory)
    with step("assign" if loaded.recipe.fit is None else "fit"):
        limited, fitted = limit_of(loaded), None
        if limited is not None:
            measured = measure_presets(loaded, statistics, limited.offers, shared)
            fitted = fit(loaded, statistics, limited, measured, directory)
        assignment = fitted.assignment if fitted else assign(loaded, statistics)
        parts = (fitted.parts if fitted else {}) | assign_parts(loaded, statistics.parts)
    if loaded.kept:
        with step("sensitivity"):
            sensitivity, kept = most_sensitive(loaded, statistics, assignment, directory, shared)
            assignment = assign(loaded, statistics, kept)
            for part, other in loaded.others.items():
                seen = statistics.parts[part]
                parts[part] = assign(other, seen, most_sensitive(other, seen, parts[part], directory, shared, part)[1])
    auto = None if fitted else auto_compared(loaded, statistics, assignment)
    return written(loaded, Chosen(assignment, parts, sensitivity, fitted, auto=auto), statistics, directory)


def labels_of(loaded: Loaded, chosen: Chosen) -> dict[str, str]:
    """The preset of each layer of the denoiser that may be quantized, or fp16, in the network's order."""
    mixed = chosen.fitted.labels if chosen.fitted else loaded.labels
    found = {name for unit in units_of(loaded) for name in unit}
    labels = {name: (mixed or {}).get(name, loaded.recipe.format) for name in loaded.roles if name in found}
    return {name: label if chosen.assignment[name].format is not None else FP16 for name, label in labels.items()}


def written(loaded: Loaded, chosen: Chosen, statistics: Statistics, directory: Path) -> Chosen:
    """Write the choice's labels and its tables of layers and ranges to ``directory``, and return it."""
    knobs = [f"quantize={loaded.recipe.format}", f"quant_level={loaded.recipe.quant_level:g}"]
    write_text(directory / ASSIGNMENT, text_of(labels_of(loaded, chosen), loaded.alphas, knobs))
    write_csv(rows_of_layers(chosen.assignment, chosen.parts), directory / "layers.csv")
    write_csv(ranges_by_step(chosen.assignment, statistics.layers), directory / "ranges.csv")
    return chosen
