import base64
from pathlib import Path

import pytest

from sd_quant.errors import ArtifactError
from sd_quant.files.tokenizer_steps import check_steps, repetitions_in

pytestmark = pytest.mark.commit

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+"


@pytest.mark.parametrize("regex", [LLAMA, GPT_2, CLIP, O200K, " {2,}", r"\s+", "", r"(\w+)[*+]\(", "(?:[a-z])+"])
def test_regexes_of_published_tokenizers_are_quick(regex):
    assert repetitions_in(regex) <= 2


@pytest.mark.parametrize(
    "regex",
    ["(a+)+$", "(a|a)*$", "(?:x(?:a*)b)*", "(a{1,3})+", "a{1,3}+$", "a**", "((a+))+", "(a)\\1", "(?<=a)b", "a{99999}",
     "a*a*a*b", "a" * 2001, "((((a*)*", "(?:(?:a|b)c?)+", "(aa?)+$", "(a*a*a*b)", "(?!a*)a*a*", "(a+{2,9})b",
     "a{,}a{0,99}a{9,99}b", "a?" * 9, "(?:aa?|a)" * 9],
)  # fmt: skip
def test_regexes_that_may_take_for_ever_are_not(regex):
    assert repetitions_in(regex) > 2


def replace(content: str, **pattern: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


CHARSMAP = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"a" * 300 + b"\0").decode()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([replace("aa", String="a")] * 32, "steps that may make a text 4e+09 times longer"),
        ([replace("a", Regex="b*")] * 9, "steps that may make a text 5e+02 times longer"),
        ([{"type": "ByteLevel"}] * 9, "steps that may make a text 5e+02 times longer"),
        ([{"type": "Precompiled", "precompiled_charsmap": CHARSMAP}], "steps that may make a text 3e+02 times longer"),
        ([{"type": "Prepend", "prepend": "a" * 65}], "a step that inserts more than 64 characters"),
        ([replace("b", Regex="(a+)+$")], "the regex '(a+)+$', expected at most two repetitions in a row, none"),
        ([replace("bbbb", Regex="a*a*b")], "steps that may make a text 5e+00 times longer, expected at most 3 times"),
        ([{"type": "Python"}], "the step 'Python', expected one of BPEDecoder"),
        ([{"type": "NFC"}] * 64, "65 steps, expected at most 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_steps_without_a_bound_are_refused(steps, said):
    for section in ("normalizer", "decoder"):
        with pytest.raises(ArtifactError) as caught:
            check_steps(Path("tokenizer.json"), {section: {"type": "Sequence", "steps": steps}})
        assert f"tokenizer.json: its {section} has {said}" in str(caught.value)


def test_a_published_normalizer_passes():
    check_steps(Path("t"), {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}, replace("▁", String=" "),
        replace(" ", Regex=" {2,}"),
    ]}, "decoder": None})  # fmt: skip
