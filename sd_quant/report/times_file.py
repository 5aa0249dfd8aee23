"""Measured times of layers as a table, for the next jobs of the same machine: one row a layer and way to compute it.

Every row also has the facts on which the times depend, so that the file explains itself and is read on its own.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sd_quant.errors import ConfigError
from sd_quant.files import read_regular
from sd_quant.report.csv_files import write_csv
from sd_quant.text import one_line

AGAIN = "measure again with quantize.times=measured, or choose another file"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What decides the times of layers beside the layers; texts as they are compared."""

    processor: str  # or the GPU
    instructions: str  # for products of INT8
    engine: str
    version: str  # of the runtime
    threads: str
    precision: str  # of what is not quantized
    width: str
    height: str
    samples: str  # in one call


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, in the way in which it was timed."""

    layer: str
    computes: str  # the formats and operations, see ``quantization.arithmetic``
    weight_shape: str  # such as 64x64x3x3
    rows: int  # of the product, of all its calls


def write_times(timed: Iterable[tuple[str, Layer, float]], conditions: Conditions, path: Path) -> None:
    """Write the label, the layer and the seconds of each row, with the ``conditions``, to ``path``."""
    rows = [
        {"layer": layer.layer, "label": label, "computes": layer.computes, "microseconds": f"{1e6 * seconds:.12g}"}
        | {"rows": layer.rows, "weight_shape": layer.weight_shape} | asdict(conditions)
        for label, layer, seconds in timed
    ]  # fmt: skip
    write_csv(rows, path)


def read_times(path: Path, wanted: Iterable[Layer], conditions: Conditions | None) -> dict[Layer, float]:
    """The seconds of the ``wanted`` layers in a file of ``write_times``.

    Raises ConfigError for a file that is none, whose ``conditions`` are others (None: any), or that lacks a layer.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_regular(path).decode(), newline=""), strict=True))
        found = {layer_in(row): seconds_in(row) for row in rows}
        stated = [{name: row[name] for name in Conditions.__dataclass_fields__} for row in rows[:1]]
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"quantize.times is {path}, expected a table of times as a run leaves in times.csv ({one_line(error)}); "
            f"{AGAIN}"
        ) from error
    for row in stated if conditions is not None else ():
        for name, expected in asdict(conditions).items():
            if row[name] != str(expected):
                raise ConfigError(
                    f"quantize.times is {path}, measured with {name} {row[name] or 'unknown'}, expected "
                    f"{expected or 'unknown'}, this job's; {AGAIN}"
                )
    wanted = list(wanted)
    if lacking := [layer for layer in wanted if layer not in found]:
        first = lacking[0]
        raise ConfigError(
            f"quantize.times is {path}, which has no time of {first.layer} ({first.weight_shape}, {first.rows} rows) "
            f"computed as {first.computes}, and lacks {len(lacking)} of {len(wanted)} times, expected those of this "
            f"job's layers and formats; {AGAIN}"
        )
    return {layer: found[layer] for layer in wanted}


def layer_in(row: Mapping[str, str]) -> Layer:
    return Layer(row["layer"].removeprefix("'"), row["computes"], row["weight_shape"], int(row["rows"]))


def seconds_in(row: Mapping[str, str]) -> float:
    seconds = float(row["microseconds"]) / 1e6
    if not 0 < seconds < math.inf:
        raise ValueError(f"{row['microseconds']} microseconds")
    return seconds
