"""Read prompt files, draw prompts from them, and write the drawn prompts.

Prompts are untrusted: text must be UTF-8, its length is limited, and it never becomes part of a path. Data sets are
read in their published layouts; the file's suffix and the names of columns or entries determine the layout:

| layout | file | text |
|---|---|---|
| PartiPrompts (github.com/google-research/parti) | `.tsv` | column `Prompt` |
| DrawBench (Saharia et al. 2022) | `.csv` | column `Prompts` |
| MLPerf's captions of COCO | `.tsv` | column `caption` |
| MJHQ-30K (playgroundai) | `.json` | `prompt` of each entry by id |
| COCO's captions | `.json` | `caption` of each of `annotations` |
| a prompt a line | any other | the line |
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import check_downloaded, refusing, write_text
from sd_quant.text import one_line

MOST_BYTES = 48 * 2**20  # COCO's captions of 2014 take 31 MiB
LONGEST_PROMPT = 2000  # characters; CLIP reads 77 tokens
KEPT = "prompts.tsv"  # the drawn prompts in the folder of a run
TEXTS = ("caption", "prompt", "prompts")  # columns and entries that hold the prompt, in lower case
SEPARATORS = {".tsv": "\t", ".csv": ","}
NAMES = {"\t": "tabs", ",": "commas"}
ADVICE = {
    "\t": "put one tab between two columns and none into a text",
    ",": "put one comma between two columns, and quotation marks around a text that has some",
}
JSON = ".json"
MOST_ROWS = 1_000_000
T = TypeVar("T")
Row = tuple[str, str]  # the place in the file, for people; text


def read_prompts(path: Path) -> list[str]:
    """Read the non-empty lines of a text file, or the prompts of a data set. A byte order mark is accepted.

    Raises ConfigError for a missing file, a file without prompts, an unknown layout, a prompt that is too long and
    bytes that are not UTF-8; ArtifactError for a file above 48 MiB.
    """
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {path}; name a text file with one prompt a line")
    check_readable(f"prompt file {path}", path, "name a text file with one prompt a line")
    prompts = []
    for place, text in rows_of(path):
        prompt = text.strip()
        if len(prompt) > LONGEST_PROMPT:
            raise ConfigError(
                f"prompt file {path} has {len(prompt)} characters in {place}, at most {LONGEST_PROMPT} work"
            )
        if prompt:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"prompt file {path} holds no prompt; write one a line")
    return prompts


def check_readable(what: str, path: Path, advice: str) -> None:
    """Raise ArtifactError for a file above 48 MiB, unreadable or not downloaded. ``what`` names it in the message."""
    if path.stat().st_size > MOST_BYTES:
        raise ArtifactError(f"{what} has {path.stat().st_size} bytes, more than the {MOST_BYTES} allowed")
    with refusing(f"{what} cannot be read", OSError, advice=advice):
        check_downloaded(path)


def draw_prompts(prompts: Sequence[T], count: int, seed: int) -> list[T]:
    """Draw ``count`` prompts at random without replacement; a smaller draw is the beginning of a larger draw.

    Prompts are ordered by the SHA-256 of seed and position, so a draw does not depend on machine or library version.
    Raises ValueError when there are fewer than ``count`` prompts.
    """
    if not 0 <= count <= len(prompts):
        raise ValueError(f"{count} prompts cannot be drawn from {len(prompts)}")
    order = sorted(range(len(prompts)), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
    return [prompts[place] for place in order[:count]]


def write_prompts(prompts: Sequence[str], path: Path) -> None:
    """Write prompts as a .tsv table for ``read_prompts``. Raises ResourceError when the disk is full.

    A tab inside of a text becomes a space, because tabs separate columns.
    """
    write_text(path, "".join(f"{row}\n" for row in ("Prompt", *map(cell, prompts))))


def cell(text: str) -> str:
    text = text.replace("\t", " ")
    return '"{}"'.format(text.replace('"', '""')) if text[:1] == text[-1:] == '"' else text


def is_data_set(path: Path) -> bool:
    """Return whether the file is a table or JSON: its prompts are drawn at random, those of a text file in order."""
    return path.suffix.lower() in (*SEPARATORS, JSON)


def rows_of(path: Path) -> Iterator[Row]:
    """Return place ("line 2") and text of each prompt in a file, in a layout of this module's table."""
    kind = path.suffix.lower()
    if kind in SEPARATORS:
        return table_rows(path, SEPARATORS[kind])
    return json_rows(path) if kind == JSON else ((f"line {number}", line) for number, line in lines(path))


def table_rows(path: Path, separator: str) -> Iterator[Row]:
    """Yield the rows of a table, one per line, so that an unclosed quotation mark cannot swallow further lines."""
    rows = ((number, line.rstrip("\r")) for number, line in lines(path))
    _, header = next(rows)
    names = [name.strip().lower() for name in split(header, separator) or [header]]
    if len(found := [name for name in names if name in TEXTS]) != 1:
        raise ConfigError(
            f"prompt file {path} begins with {header[:100]!r}, expected a header line with one column "
            f"{' or '.join(map(repr, TEXTS))} between {NAMES[separator]}; add that line, or name the file .txt when it "
            "holds one prompt a line"
        )
    for number, row in rows:
        if row:
            columns = cells_of(f"prompt file {path}", number, row, separator, len(names))
            yield f"line {number}", columns[names.index(found[0])]


def cells_of(where: str, number: int, row: str, separator: str, count: int) -> list[str]:
    """Split a line of a table into cells. Raises ConfigError unless there are ``count``, as in the header."""
    columns = split(row, separator)
    if columns is None:
        raise ConfigError(
            f"{where} has a quotation mark in line {number} that does not end there, or a cell of over "
            f"{csv.field_size_limit()} characters; double quotation marks inside of a text, and keep a row on one line"
        )
    if len(columns) != count:
        raise ConfigError(
            f"{where} has {len(columns)} columns in line {number}, expected {count} as in its header; "
            f"{ADVICE[separator]}"
        )
    return columns


def split(row: str, separator: str) -> list[str] | None:
    """Split a row into cells, without the quotation marks around them; None for an unclosed quotation mark.

    In tab-separated tables only quotes around a whole cell count: some texts of PartiPrompts end with a quote.
    """
    if separator == "\t":
        return [unquoted(column) for column in row.split("\t")]
    try:
        return next(csv.reader([row], strict=True), [])
    except csv.Error:
        return None


def unquoted(column: str) -> str:
    """Remove CSV quotes around a whole cell, which MLPerf's file has around captions with quotation marks."""
    column = column.strip()
    if len(column) > 1 and column[0] == column[-1] == '"':
        return column[1:-1].replace('""', '"')
    return column


def json_rows(path: Path) -> Iterator[Row]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"prompt file {path} is not JSON ({one_line(error, 200)}); download it again") from error
    entries = content if isinstance(content, Mapping) else {}
    listed = entries.get("annotations")
    entries = dict(enumerate(listed)) if isinstance(listed, list) else entries
    check_number(path, len(entries), "entries")
    if not entries or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise unknown_layout(path)
    for name, entry in entries.items():
        place = f"entry {one_line(name, 50)}"
        texts = [entry[key] for key in entry if key in TEXTS]
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise unknown_layout(path, f" in {place}")
        yield place, plain(path, place, texts[0])


def check_number(path: Path, number: int, what: str) -> None:
    """Raise ConfigError if the ``number`` of rows exceeds ``MOST_ROWS``; COCO's captions of 2014 are 414,113."""
    if number > MOST_ROWS:
        raise ConfigError(f"prompt file {path} has {number} {what}, at most {MOST_ROWS} work; draw some of them")


def unknown_layout(path: Path, where: str = "") -> ConfigError:
    return ConfigError(
        f"prompt file {path} has an unknown layout{where}, expected MJHQ's {{id: {{prompt}}}} or COCO's "
        "{annotations: [{caption}]}; write prompts into a text, one a line"
    )


def plain(path: Path, place: str, text: str) -> str:
    """Join a text to one line. Raises ConfigError for a lone surrogate, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt file {path} is not UTF-8 in {place}; save it as UTF-8") from error
    return " ".join(text.split())


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, numbered from 1. Raises ConfigError naming the line and byte that are not UTF-8."""
    content = path.read_bytes()
    check_number(path, content.count(b"\n"), "lines")
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"prompt file {path} is not UTF-8 at line {number}, byte {error.start + 1}; save it as UTF-8"
            ) from error
