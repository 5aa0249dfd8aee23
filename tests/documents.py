"""The commands that the documents show, with a value for each placeholder."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from sd_quant.commands import COMMANDS
from sd_quant.config import JOBS
from sd_quant.places import HOME

README = HOME / "README.md"
PAGES = [README, HOME / "SECURITY.md", *sorted((HOME / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:\w+=\S+ )*(python|make|sd-quant|pip|git show) ")


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def filled(line: str) -> str:
    """A command with a name for each placeholder: ``<file or folder>`` is file_or_folder, a second one has a 2."""
    seen: Counter[str] = Counter()

    def name(found: re.Match) -> str:
        words = found[1].strip().replace(" ", "_")
        seen[words] += 1
        return f"{words}{seen[words] if seen[words] > 1 else ''}"

    return re.sub(r"<([^<>]*)>", name, line)


def lines(pages: Iterable[Path]) -> list[str]:
    """Every command of pages or heads of configurations, in blocks or in backticks."""
    found = []
    for page in pages:
        text = text_of(page).replace("\\\n", " ")
        given = re.findall(r"^(?: {4}|# {3}) *(\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
        found += [filled(line) for line in given if COMMAND.match(line)]
    return list(dict.fromkeys(found))


def commands(pages: Iterable[Path]) -> list[list[str]]:
    """Each of ``lines`` as words, without the variables that are set before it."""
    return [as_scripts(shlex.split(COMMAND.sub(r"\1 ", line))) for line in lines(pages)]


def as_scripts(words: list[str]) -> list[str]:
    """``sd-quant infer ...`` as ``python infer.py ...``, which is the same."""
    if words[0] != "sd-quant" or words[1] not in COMMANDS:
        return words
    module = COMMANDS[words[1]][0].partition(":")[0]
    return ["python", *([f"{words[1]}.py"] if words[1] in JOBS else ["-m", f"sd_quant.{module}"]), *words[2:]]
