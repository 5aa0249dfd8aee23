"""The one model of a table, and what makes it text for a terminal and Markdown; ``page.html`` has its HTML.

A ``Column`` says how its figures are written, so a figure reads the same in a terminal, in ``summary.md`` and on the
page. The road not taken is ``rich``: colours and boxes do not survive a log file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sd_quant.text import printable

DASH = "–"  # stands for a figure that does not exist


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    return DASH if value is None else form.format(value * scale)


def between(low: float | None, high: float | None, form: str) -> str:
    """`` (1.21 to 1.26)``, or nothing where there is no interval."""
    return "" if low is None or high is None else f" ({form.format(low)} to {form.format(high)})"


@dataclass(frozen=True)
class Column:
    title: str
    key: Any  # of its cell in a row
    form: str = "{}"  # of its figures
    scale: float = 1.0
    more_is_better: bool = False
    is_text: bool = True

    def text(self, row: Any) -> str:
        """The cell of a row; a figure stands with the further end of its interval, where it has one: ``34.8 ± 1.2``."""
        value = row[self.key]
        if self.is_text:
            return DASH if value is None else str(value)
        low, high = (row.get(f"{self.key}_{end}") for end in ("low", "high"))
        text = figure(value, self.form, self.scale)
        if value is None or low is None or high is None:
            return text
        return f"{text} ± {figure(max(high - value, value - low), self.form.rstrip('x'), self.scale)}"


@dataclass(frozen=True)
class Table:
    """Rows are dictionaries by the columns' keys, or lists of texts."""

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


def table_of_texts(titles: Sequence[str], rows: Sequence[Sequence[str]], heading: str = "", caption: str = "") -> Table:
    return Table([Column(title, place) for place, title in enumerate(titles)], rows, heading, caption)


def as_text(table: Table) -> list[str]:
    """Lines for a terminal, the first column left-aligned and the others right-aligned; none without rows."""
    if not table.rows:
        return []
    cells = [[printable(cell) for cell in row] for row in (table.titles, *table.cells)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *lines = [
        first.ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        for first, *others in cells
    ]
    notes = [printable(note) for note in table.notes]
    return [head, "-" * len(head), *(line.rstrip() for line in lines), *([""] if notes else []), *notes]


def as_markdown(table: Table) -> str:
    """``table`` as Markdown, with all markup in its texts escaped: names and reasons may quote a hostile file."""
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
