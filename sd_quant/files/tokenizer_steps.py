"""Checks of the steps in a tokenizer.json, which native code executes: known kinds, bounded growth, bounded regexes.

Thirty-two steps that double a letter fill any memory, and a repeated group of repetitions takes for ever; native code
then aborts the process. Alternative not taken: a child process for tokenizing; pipelines call tokenizers themselves.
"""

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sd_quant.errors import ArtifactError
from sd_quant.files import read_regular
from sd_quant.knobs import BOUNDED

SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
KINDS = set(
    "BPEDecoder BertNormalizer BertPreTokenizer BertProcessing ByteFallback ByteLevel Digits Fuse Lowercase Metaspace "
    "NFC NFD NFKC NFKD Nmt Precompiled Prepend Punctuation Replace RobertaProcessing Sequence Split Strip "
    "StripAccents TemplateProcessing UnicodeScripts Whitespace WhitespaceSplit WordPiece".split()
)
MOST_STEPS = 64  # of one section; Llama's decoder has four
# Largest growth of a text, by repetitions in a row of a regex, each of which costs a factor of the length: two take
MOST_GROWTH = (128, 128, 3)  # 40 s for 1,000 letters, tripled. T5's charsmap makes 33 bytes of one letter.
MOST_CHOICES = 8  # in a row of a regex; each doubles its time
MOST_TEXT = 64  # characters that a step inserts
ATOM = r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]"  # of a regex: a class of characters or an escaped one


def check_file(file: Path) -> None:
    """Check a tokenizer.json, if it exists, by ``check_steps``. Raises ValueError for one that is no JSON."""
    if file.is_file():
        check_steps(file, json.loads(read_regular(file)))


def check_steps(file: Path, sections: Mapping[str, Any]) -> None:
    """Raise ArtifactError for an unknown step, a slow regex, or steps that together lengthen a text too much."""
    before: list[dict[str, Any]] = []  # the normalizer's steps, whose output the pre-tokenizer gets
    for section in SECTIONS:
        own, problem = list(steps_in(sections.get(section))), None
        steps, before = [*before, *own], own if section == "normalizer" else []
        rows = {regex_of(step): repetitions_in(regex_of(step)) for step in steps}
        if len(steps) > MOST_STEPS:
            problem = f"{len(steps)} steps, expected at most {MOST_STEPS}"
        elif unknown := [step["type"] for step in steps if step["type"] not in KINDS]:
            problem = f"the step {BOUNDED.repr(unknown[0])}, expected one of {', '.join(sorted(KINDS))}"
        elif slow := [regex for regex, row in rows.items() if row >= len(MOST_GROWTH)]:
            problem = f"the regex {BOUNDED.repr(slow[0])}, expected at most two repetitions in a row, none repeated"
        elif any(len(str(step.get(name) or "")) > MOST_TEXT for step in steps for name in ("content", "prepend")):
            problem = f"a step that inserts more than {MOST_TEXT} characters"
        elif (growth := math.prod(map(growth_of, steps))) > (most := MOST_GROWTH[int(max(rows.values(), default=0))]):
            problem = f"steps that may make a text {growth:.0e} times longer, expected at most {most} times"
        if problem:
            raise ArtifactError(f"{file}: its {section} has {problem}; start from the published folder")


def steps_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from steps_in(each)


def regex_of(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, Mapping) else ""


def growth_of(step: Mapping[str, Any]) -> float:
    """Return the largest factor by which a step may lengthen a text."""
    if step["type"] == "Precompiled":
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        trie = 4 + int.from_bytes(charsmap[:4], "little")  # the texts after it end with a zero
        return max(1, *map(len, charsmap[trie:].split(b"\0")), 1)
    if step["type"] != "Replace":
        return 2 if step["type"] == "ByteLevel" else 1
    pattern, content = step.get("pattern"), len(str(step.get("content")))
    found = len(str(pattern.get("String", ""))) if isinstance(pattern, Mapping) else 0
    return 1 if content <= found else content / found if found else content + 1  # a regex may match nothing


def repetitions_in(regex: str) -> float:
    """Return the most repetitions (``*``, ``+``) in sequence in a regex; infinity if nested or not analyzable."""
    if len(regex) > 2000 or re.search(r"\\[1-9gkKX]|\(\?(?![:!=]|i:)", regex):
        return math.inf
    text = re.sub(ATOM, "x", regex)
    while found := re.search(r"\((?:\?[i!=:]*)?([^()]*)\)([*+{])?", text):  # the innermost groups first
        row, choices = in_a_row(found[1])
        if row == math.inf or (found[2] and re.search(r"[*+{?|]", found[1])):
            return math.inf
        text = text[: found.start()] + ("x+" * int(row) + "x?" * choices or "x") + text[found.end(1) + 1 :]
    return in_a_row(text)[0]


def in_a_row(text: str) -> tuple[float, int]:
    """Return the most repetitions and ``?`` in one ``|`` alternative of a regex without groups; infinity if nested."""
    pieces = text.split("|")
    row = max(len(re.findall(r"[*+]|\{\d*,(?:\}|\d\d)", each)) for each in pieces)
    choices = max(each.count("?") for each in pieces) + (len(pieces) > 1)
    nested = re.search(r"[*+}]\s*[*{]|\}\s*\+|\{\d*,?\d{4}", text)
    return (math.inf if nested or choices > MOST_CHOICES else row), choices
