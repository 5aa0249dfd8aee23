"""Read tables of arguments for a pipeline's calls: one row per generated image, one column per argument.

| file | a cell with an image | with several, or a video |
|---|---|---|
| `.csv`, `.tsv` | a path | paths separated by `;` or `|`, or a folder, whose images are sorted by name |
| `.jsonl` (one object per line), `.parquet` | a path | a list of paths, or a folder |

Paths are relative to the table's folder. Column names and values decide which arguments are images, see
``files.image_files.files_of``: diffusers annotates many image arguments as tensors. Rows keep their order.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sd_quant.calibration.prompts import LONGEST_PROMPT, MOST_BYTES, SEPARATORS, cells_of, check_readable, lines, split
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import refusing
from sd_quant.files.image_files import files_of, named_files
from sd_quant.text import one_line

KINDS = (*SEPARATORS, ".jsonl", ".parquet")
MOST_ROWS, MOST_COLUMNS = 10_000, 100
PROMPT = "prompt"


class Row(NamedTuple):
    prompt: str | None  # None if the table has no column ``prompt``, for a pipeline without prompts
    arguments: dict[str, Any]  # the call's further arguments: numbers, texts, image files and lists of these


def read_rows(knob: str, path: Path) -> list[Row]:
    """Read the rows of the table ``path``, the value of the setting ``knob``. Images are not opened.

    Raises ConfigError for an unknown file type, an invalid prompt, a missing image, differing columns, no rows, and a
    cell that is no valid argument; ArtifactError for a table that is too large or damaged.
    """
    where = f"{knob}: {path}"
    if path.suffix.lower() not in KINDS or not path.is_file():
        raise ConfigError(f"{knob} is {path}, expected a file that ends with {', '.join(KINDS)}")
    check_readable(where, path, "name a table with a row an image")
    rows, columns = list[Row](), None
    for place, cells in rows_in(where, path):
        if len(rows) == MOST_ROWS:
            raise ConfigError(f"{where} has more than {MOST_ROWS} rows, which is the most; draw some of them")
        if columns is not None and cells.keys() != columns:
            raise ConfigError(
                f"{where} has {listed(cells)} in {place}, expected {listed(columns)} as before; give every row the same"
            )
        columns = cells.keys()
        rows.append(row_of(f"{where}, {place}", cells, path.parent))
    if not rows:
        raise ConfigError(f"{where} holds no row; write one an image")
    return rows


def listed(columns: Iterable[str]) -> str:
    return one_line(", ".join(columns), 200) or "nothing"


def row_of(where: str, cells: Mapping[str, Any], folder: Path) -> Row:
    """Build a row from ``cells`` by column, with paths relative to ``folder``. Raises ConfigError if one is invalid."""
    given = dict(cells)
    prompt = given.pop(PROMPT, None)
    if PROMPT in cells and not (isinstance(prompt, str) and 0 < len(prompt.strip()) <= LONGEST_PROMPT):
        raise ConfigError(f"{where} has no prompt, expected a text of up to {LONGEST_PROMPT} characters; write one")
    arguments = {name: files_of(where, name, value, folder.joinpath) for name, value in given.items()}
    return Row(prompt and prompt.strip(), arguments)


def files_by_row(knob: str, path: Path) -> dict[str, Path]:
    """Return the paths of the table and of all image files in it, by a label for each. Raises as ``read_rows``."""
    files = {knob: path}
    for number, row in enumerate(read_rows(knob, path), start=1):
        files |= named_files(f"{knob} {number}", row.arguments)
    return files


def rows_in(where: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row in the file, such as "line 2", and its cells by column. Raises as ``read_rows``."""
    kind = path.suffix.lower()
    if kind in SEPARATORS:
        yield from of_text(where, path, SEPARATORS[kind])
    elif kind == ".jsonl":
        for number, line in lines(path):
            if line.strip():
                with refusing(f"{where} has no JSON object in line {number}", advice="write one a line"):
                    cells = dict(json.loads(line).items())
                yield f"line {number}", cells
    else:
        for number, cells in enumerate(of_parquet(where, path), start=1):
            yield f"row {number}", cells


def of_text(where: str, path: Path, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and cells of each row of a text table. A column becomes numbers if all of its cells are numeric."""
    (_, header), *rows = [(number, line.rstrip("\r")) for number, line in lines(path) if line.strip()] or [(1, "")]
    names = [name.strip() for name in split(header, separator) or [""]]
    if len(set(names)) != len(names) or not all(map(str.isidentifier, names)):
        raise ConfigError(
            f"{where} begins with {listed(names)}, expected the names of its columns, such as prompt and image; write "
            "them into its first line"
        )
    cells = [cells_of(where, number, row, separator, len(names)) for number, row in rows]
    columns = [numbers(name, [row[place] for row in cells]) for place, name in enumerate(names)]
    for (number, _), *values in zip(rows, *columns, strict=True):
        yield f"line {number}", dict(zip(names, values, strict=True))


def numbers(name: str, cells: list[str]) -> list[Any]:
    """Convert a column's cells to numbers if all are numeric, unless its name contains "prompt"."""
    if PROMPT in name:
        return cells
    try:
        return [json.loads(cell) if cell.strip().lstrip("-").isdecimal() else float(cell) for cell in cells]
    except ValueError:
        return cells


def of_parquet(where: str, path: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    with refusing(f"{where} cannot be read as Parquet"):
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        size, rows = sum(group.total_byte_size for group in groups), file.metadata.num_rows
        if size > MOST_BYTES or rows > MOST_ROWS or file.metadata.num_columns > MOST_COLUMNS:
            raise ArtifactError(
                f"{where} has {rows} rows of {file.metadata.num_columns} columns in {size} bytes, expected at most "
                f"{MOST_ROWS}, {MOST_COLUMNS} and {MOST_BYTES}: files of images stand beside the table"
            )
        return file.read().to_pylist()
