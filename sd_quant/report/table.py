"""The one model of a table, written as text for a terminal, Markdown and CSV; ``page.html`` renders it as HTML.

A ``Column`` has the format of its figures, so a figure reads the same in a terminal, in ``summary.md`` and on the page.
In CSV, text that a spreadsheet would run as a formula gets a leading apostrophe, as names come from untrusted files; to
mark all text would spoil it for pandas. Alternative not taken: ``rich``, whose colours and boxes spoil a log file.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from sd_quant.files import write_text
from sd_quant.metrics.intervals import Interval, recorded
from sd_quant.text import printable

DASH = "–"  # stands for a figure that does not exist
WIDTH = 80  # columns of a terminal
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # OWASP, "CSV Injection"
WORDS, CLAUSES = r"[^ ,/]*[ ,/]+|[^ ,/]+", r".+?(?:[,;] |$)"  # between which a line may end


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    return DASH if value is None else form.format(value * scale)


def plus_minus(interval: Interval | None, form: str, scale: float = 1.0) -> str:
    """Format ``34.8 ± 1.2``: a value and the larger distance to an end of its interval if known; a dash for None."""
    if interval is None:
        return DASH
    reach = "" if interval.reach is None else f" ± {figure(interval.reach, form.replace('+', '').rstrip('x'), scale)}"
    return figure(interval.value, form, scale) + reach


def knob_value(value: object) -> str:
    return DASH if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def between(low: float | None, high: float | None, form: str, level: float | None = None) -> str:
    """Format an interval as `` (1.21 to 1.26)`` or `` (1.21 to 1.26 at 95 %)``; empty if an end is None."""
    at_level = "" if level is None else f" at {100 * level:.3g} %"
    return "" if low is None or high is None else f" ({form.format(low)} to {form.format(high)}{at_level})"


@dataclass(frozen=True)
class Column:
    title: str
    key: Any  # of its cell in a row
    form: str = "{}"  # of its figures
    scale: float = 1.0
    more_is_better: bool = False
    is_text: bool = True

    def text(self, row: Any) -> str:
        """Format the row's cell; a figure with its interval if the row has ``<key>_low`` and ``<key>_high``."""
        value = row[self.key]
        if self.is_text:
            return DASH if value is None else str(value)
        ends = [row.get(f"{self.key}_{end}") for end in ("low", "high")]
        return plus_minus(None if value is None else recorded(value, ends), self.form, self.scale)


@dataclass(frozen=True)
class Table:
    """A table with columns, rows (dictionaries by the columns' keys, or lists of texts), heading, caption and notes."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    heading: str = ""
    caption: str = ""
    notes: Sequence[str] = ()  # sentences below it

    @property
    def titles(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        return [[column.text(row) for column in self.columns] for row in self.rows]


def table_of_texts(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    heading: str = "",
    caption: str = "",
    notes: Sequence[str] = (),
) -> Table:
    return Table([Column(title, place) for place, title in enumerate(titles)], rows, heading, caption, notes)


def as_text(table: Table) -> list[str]:
    """Return a table's lines for a terminal, the first column left-aligned, others right-aligned; [] without rows.

    In a table wider than WIDTH, titles, lists and finally names are wrapped, figures never; of two columns any text is.
    """
    if not table.rows:
        return []
    texts = [[printable(cell) for cell in row] for row in (table.titles, *table.cells)]
    ends = CLAUSES if len(table.columns) > 2 else WORDS
    parts = [[re.findall(ends if number and place else WORDS, cell) for place, cell in enumerate(row)]
             for number, row in enumerate(texts)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    least = [max(len(part.rstrip()) for cell in column for part in cell or [""]) for column in zip(*parts, strict=True)]
    if (gaps := 2 * len(widths) - 2) + sum(widths) > WIDTH:
        for place in (0, -1):  # room that is left is the names', then the last column's
            room = WIDTH - gaps - sum(least)
            least[place] = max(least[place], min(widths[place], least[place] + room))
        widths = least
    lines = []
    for row in parts:
        cells = [folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for first, *others in zip_longest(*cells, fillvalue=""):
            right = (f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
            lines.append((first.ljust(widths[0]) + "".join(right)).rstrip())
        if row is parts[0]:
            lines.append("-" * (gaps + sum(widths)))
    notes = [printable(note) for note in table.notes]
    return [*lines, *([""] if notes else []), *notes]


def folded(parts: Sequence[str], width: int = WIDTH) -> list[str]:
    """Join ``parts`` of a text into lines of at most ``width``; a longer part has a longer line of its own."""
    lines = [""]
    for part in parts:
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def as_markdown(table: Table) -> str:
    """Format ``table`` as Markdown, with markup in its texts escaped: names and reasons may quote an untrusted file."""
    lines = [table.titles, ["---"] * len(table.columns), *table.cells]
    paragraphs = [
        f"### {markdown_text(table.heading)}\n" if table.heading else "",
        "".join(f"| {' | '.join(map(markdown_text, cells))} |\n" for cells in lines),
        f"{markdown_text(table.caption)}\n" if table.caption else "",
        "".join(f"- {markdown_text(note)}\n" for note in table.notes),
    ]
    return "\n".join(filter(None, paragraphs))


def markdown_text(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\|<>[]*`_#!&" else letter for letter in printable(text))


def write_csv(rows: list[dict], path: Path) -> None:
    """Write ``rows`` atomically; None and absent cells are empty. Raises ResourceError when the disk is full."""
    text = io.StringIO()
    # It ends lines with CR LF: with LF alone it leaves a CR in a text unquoted.
    writer = csv.DictWriter(text, columns_of(rows))
    writer.writeheader()
    writer.writerows({column: cell(value) for column, value in row.items()} for row in rows)
    write_text(path, text.getvalue())


def columns_of(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of all rows in order of first appearance; rows may differ in their keys."""
    return list(dict.fromkeys(column for row in rows for column in row))


def cell(value: object) -> object:
    """Convert a value for CSV: floats get six significant digits, texts that start a formula a leading apostrophe."""
    if isinstance(value, Real) and not isinstance(value, Integral):
        return f"{float(value):.6g}"
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return "'" + value
    return value
