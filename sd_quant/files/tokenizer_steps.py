"""The steps of a tokenizer's file, which native code executes: of known kinds, with bounds on growth and regexes.

Thirty-two steps that double a letter fill any memory, and a repeated group of repetitions takes for ever; native code
then aborts the process. The road not taken is a child process for tokenizing: pipelines call tokenizers themselves.
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
MOST_GROWTH = 256  # of a text, by all steps of a section together; the charsmap of T5 makes 33 bytes of one letter
MOST_TEXT = 64  # characters that a step inserts
ATOM = r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]"  # of a regex: a class of characters or an escaped one


def check_file(file: Path) -> None:
    """Raises what ``check_steps`` does for a tokenizer.json, and ValueError for one that is no JSON."""
    if file.is_file():
        check_steps(file, json.loads(read_regular(file)))


def check_steps(file: Path, sections: Mapping[str, Any]) -> None:
    """Raises ArtifactError for a step of these ``SECTIONS`` that is unknown, or that grows a text or takes too long."""
    for section in SECTIONS:
        steps, problem = list(steps_in(sections.get(section))), None
        if len(steps) > MOST_STEPS:
            problem = f"{len(steps)} steps, expected at most {MOST_STEPS}"
        elif unknown := [step["type"] for step in steps if step["type"] not in KINDS]:
            problem = f"the step {BOUNDED.repr(unknown[0])}, expected one of {', '.join(sorted(KINDS))}"
        elif slow := [regex for step in steps if not is_quick(regex := regex_of(step))]:
            problem = f"the regex {BOUNDED.repr(slow[0])}, expected one without repeated repetitions"
        elif any(len(str(step.get(name) or "")) > MOST_TEXT for step in steps for name in ("content", "prepend")):
            problem = f"a step that inserts more than {MOST_TEXT} characters"
        elif (growth := math.prod(map(growth_of, steps))) > MOST_GROWTH:
            problem = f"steps that may make a text {growth:.0e} times longer, expected at most {MOST_GROWTH} times"
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
    """Returns how many times longer a step may make a text."""
    if step["type"] == "Precompiled":
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        trie = 4 + int.from_bytes(charsmap[:4], "little")  # the texts after it end with a zero
        return max(1, *map(len, charsmap[trie:].split(b"\0")), 1)
    if step["type"] != "Replace":
        return 2 if step["type"] == "ByteLevel" else 1
    pattern, content = step.get("pattern"), len(str(step.get("content")))
    found = len(str(pattern.get("String", ""))) if isinstance(pattern, Mapping) else 0
    return 1 if content <= found else content / found if found else content + 1  # a regex may match nothing


def is_quick(regex: str) -> bool:
    """Whether a regex repeats no group that holds a repetition or a choice, and has few repetitions in a row."""
    if len(regex) > 2000 or re.search(r"\\[1-9gkKX]|\(\?(?![:!=]|i:)", regex):
        return False
    text = re.sub(ATOM, "x", regex)
    while found := re.search(r"\((?:\?[i!=:]*)?([^()]*)\)([*+{])?", text):  # the innermost groups first
        chosen = re.search(r"[*+{?|]", found[1])
        if found[2] and chosen:
            return False
        text = text[: found.start()] + ("x+" if chosen else "x") + text[found.end(1) + 1 :]
    nested = re.search(r"[*+}]\s*[*{]|\}\s*\+|\{\d*,?\d{4}", text)
    return not nested and all(len(re.findall(r"[*+]|,\}", each)) <= 4 for each in text.split("|"))
