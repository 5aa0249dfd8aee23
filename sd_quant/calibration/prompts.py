"""Reads, draws and keeps prompts. Their text is hostile: it must be UTF-8 and is bounded; it never becomes part of a
path."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from sd_quant.calibration.prompt_layouts import rows_of
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import check_downloaded, refusing, write_text

MOST_BYTES = 48 * 2**20  # COCO's captions of 2014 take 31 MiB
LONGEST_PROMPT = 2000  # characters; CLIP reads 77 tokens
KEPT = "prompts.tsv"  # the drawn prompts in the folder of a run
T = TypeVar("T")


class Prompt(NamedTuple):
    text: str
    category: str | None = None


def read_prompts(path: Path) -> list[str]:
    """The texts of ``read_prompt_set``, which raises."""
    return [prompt.text for prompt in read_prompt_set(path)]


def read_prompt_set(path: Path, category: str | None = None) -> list[Prompt]:
    """The non-empty lines of a text file, or the prompts of a data set with their categories, see ``prompt_layouts``.

    ``category`` is the column or entry with the category, if it has another name than usual. A byte order mark is
    accepted. Raises ConfigError when there is no such file or no prompt in it, when a prompt is too long, and what
    ``rows_of`` raises; ArtifactError when the file is too large.
    """
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {path}; name a text file with one prompt a line")
    check_readable(f"prompt file {path}", path, "name a text file with one prompt a line")
    prompts = []
    for place, text, of in rows_of(path, category):
        prompt = text.strip()
        if len(prompt) > LONGEST_PROMPT:
            raise ConfigError(
                f"prompt file {path} has {len(prompt)} characters in {place}, at most {LONGEST_PROMPT} work"
            )
        if prompt:
            prompts.append(Prompt(prompt, of))
    if not prompts:
        raise ConfigError(f"prompt file {path} holds no prompt; write one a line")
    return prompts


def check_readable(what: str, path: Path, advice: str) -> None:
    """Raises ArtifactError for a file that is too large, or is not to be read here."""
    if path.stat().st_size > MOST_BYTES:
        raise ArtifactError(f"{what} has {path.stat().st_size} bytes, more than the {MOST_BYTES} allowed")
    with refusing(f"{what} cannot be read", OSError, advice=advice):
        check_downloaded(path)


def draw_prompts(prompts: Sequence[T], count: int, seed: int) -> list[T]:
    """``count`` prompts drawn at random without replacement; a smaller draw is the beginning of a larger one.

    They are ordered by the SHA-256 of seed and position: unlike a library's generator, that is the same everywhere and
    in every version. Raises ValueError when there are fewer prompts.
    """
    if not 0 <= count <= len(prompts):
        raise ValueError(f"{count} prompts cannot be drawn from {len(prompts)}")
    order = sorted(range(len(prompts)), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
    return [prompts[place] for place in order[:count]]


def draw_evenly(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """``count`` prompts, of every category as many or one more; a category that has fewer gives all.

    Categories are dealt in turn, each in the order of ``draw_prompts``, so a smaller draw is the beginning of a larger
    one here too. Raises ValueError when there are fewer prompts.
    """
    draw_prompts(prompts, count, seed)
    drawn, dealt = draw_prompts(prompts, len(prompts), seed), Counter[str | None]()
    turns = []
    for prompt in drawn:
        turns.append((dealt[prompt.category], hashlib.sha256(f"{seed} {prompt.category}".encode()).digest()))
        dealt[prompt.category] += 1
    return [drawn[place] for place in sorted(range(len(drawn)), key=turns.__getitem__)[:count]]


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts as a table that ``read_prompt_set`` reads as the same. Raises ResourceError when the disk is full.

    A tab inside of a text becomes a space: the table has no other mark between columns.
    """
    categorized = any(prompt.category is not None for prompt in prompts)
    rows = [("Prompt", "Category"), *((cell(prompt.text), cell(prompt.category or "")) for prompt in prompts)]
    write_text(path, "".join("\t".join(row if categorized else row[:1]) + "\n" for row in rows))


def cell(text: str) -> str:
    text = text.replace("\t", " ")
    return '"{}"'.format(text.replace('"', '""')) if text[:1] == text[-1:] == '"' else text
