"""The layer report as CSV, one row per layer, for a spreadsheet or pandas.

Layer names come from a checkpoint, which is hostile input, and a spreadsheet runs a cell that begins like a formula:
such text gets a leading apostrophe. The road not taken is to mark every text: it would spoil the file for pandas.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path

from sd_quant.files import write_text

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # OWASP, "CSV Injection"


def write_csv(rows: list[dict], path: Path) -> None:
    """Write ``rows`` atomically; None and absent cells are empty. Raises ResourceError when the disk is full."""
    text = io.StringIO()
    # It ends lines with CR LF: with LF alone it leaves a CR in a text unquoted.
    writer = csv.DictWriter(text, columns_of(rows))
    writer.writeheader()
    writer.writerows({column: cell(value) for column, value in row.items()} for row in rows)
    write_text(path, text.getvalue())


def columns_of(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """The columns of all rows, in the order in which they first appear: rows of different parts have different ones."""
    return list(dict.fromkeys(column for row in rows for column in row))


def cell(value: object) -> object:
    """A cell: floats with six significant digits, texts that start no formula, integers as they are."""
    if isinstance(value, Real) and not isinstance(value, Integral):
        return f"{float(value):.6g}"
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return "'" + value
    return value
