"""Reads and draws prompts. Their text is hostile: it must be UTF-8 and is bounded; it never becomes part of a path."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from sd_quant.errors import ArtifactError, ConfigError

MOST_BYTES = 16 * 2**20
LONGEST_PROMPT = 2000  # characters; CLIP reads 77 tokens
COLUMN = "caption"  # in MLPerf's tables of COCO's captions: captions.tsv, captions_source.tsv


def read_prompts(path: Path) -> list[str]:
    """The non-empty lines of a text file, or the captions of a table. A byte order mark is accepted.

    Raises ConfigError when there is no such file or no prompt in it, when a prompt is too long, a line is not UTF-8
    (line and byte are named), a table has no captions, or a row has more or fewer columns than the header;
    ArtifactError when the file is too large.
    """
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {path}; name a text file with one prompt a line")
    if path.stat().st_size > MOST_BYTES:
        raise ArtifactError(f"prompt file {path} has {path.stat().st_size} bytes, more than the {MOST_BYTES} allowed")
    prompts = []
    for number, text in captions(path) if is_table(path) else lines(path):
        prompt = text.strip()
        if len(prompt) > LONGEST_PROMPT:
            raise ConfigError(
                f"prompt file {path} has {len(prompt)} characters in line {number}, at most {LONGEST_PROMPT} work"
            )
        if prompt:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"prompt file {path} holds no prompt; write one a line")
    return prompts


def is_table(path: Path) -> bool:
    """Whether the file is a table of captions, in a data set's order, to be drawn from at random; the order of a text
    file is kept."""
    return path.suffix.lower() == ".tsv"


def draw_prompts(prompts: list[str], count: int, seed: int) -> list[str]:
    """``count`` prompts drawn at random without replacement; a smaller draw is the beginning of a larger one.

    They are ordered by the SHA-256 of seed and position: unlike a library's generator, that is the same everywhere and
    in every version. Raises ValueError when there are fewer prompts.
    """
    if not 0 <= count <= len(prompts):
        raise ValueError(f"{count} prompts cannot be drawn from {len(prompts)}")
    order = sorted(range(len(prompts)), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
    return [prompts[place] for place in order[:count]]


def captions(path: Path) -> Iterator[tuple[int, str]]:
    """The captions of a table with the numbers of their lines, without surrounding quotation marks.

    Nothing else of CSV is parsed, so an unclosed quotation mark cannot swallow the lines after it.
    """
    rows = ((number, line.rstrip("\r")) for number, line in lines(path))
    _, header = next(rows)
    names = [name.strip() for name in header.split("\t")]
    if names.count(COLUMN) != 1:
        raise ConfigError(
            f"prompt file {path} begins with {header[:100]!r}, expected a header line with one column {COLUMN!r} "
            "between tabs; add that line, or name the file .txt when it holds one prompt a line"
        )
    for number, row in rows:
        if not row:
            continue
        columns = row.split("\t")
        if len(columns) != len(names):
            raise ConfigError(
                f"prompt file {path} has {len(columns)} columns in line {number}, expected {len(names)} as in its "
                "header; put one tab between two columns and none into a caption"
            )
        caption = columns[names.index(COLUMN)].strip()
        if len(caption) > 1 and caption[0] == caption[-1] == '"':  # MLPerf's file quotes captions with quotation marks
            caption = caption[1:-1].replace('""', '"')
        yield number, caption


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1. Raises ConfigError naming the line and byte that are not UTF-8."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"prompt file {path} is not UTF-8 at line {number}, byte {error.start + 1}; save it as UTF-8"
            ) from error
