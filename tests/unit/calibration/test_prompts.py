from pathlib import Path

import pytest

from sd_quant.calibration.prompts import LONGEST, MOST_BYTES, read_prompts
from sd_quant.errors import ArtifactError, ConfigError


def written(folder: Path, content: bytes) -> Path:
    path = folder / "prompts.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"a cat\na dog\n",
        b"a cat\na dog",
        b"\xef\xbb\xbfa cat\na dog\n",  # byte order mark
        b"a cat\r\na dog\r\n",
        b"\xef\xbb\xbf\r\n  a cat  \r\n\r\n\ta dog",
    ],
)
def test_one_prompt_a_line(tmp_path, content):
    assert read_prompts(written(tmp_path, content)) == ["a cat", "a dog"]


def test_text_is_kept_as_it_is(tmp_path):
    lines = ["ein Kätzchen, „süß“", "猫の写真 🐈", "../../etc/passwd; rm -rf $HOME", "a\u2028b"]
    assert read_prompts(written(tmp_path, "\n".join(lines).encode())) == lines


def test_what_is_not_utf8_is_named_by_line_and_byte(tmp_path):
    with pytest.raises(ConfigError, match="not UTF-8 at line 3, byte 8; save it"):
        read_prompts(written(tmp_path, b"a cat\n\na caf\xc3\xa9\xe9 au lait\n"))


def test_utf16_is_refused_at_its_first_byte(tmp_path):
    with pytest.raises(ConfigError, match="line 1, byte 1"):
        read_prompts(written(tmp_path, "a cat".encode("utf-16")))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \r\n\t\n", b"\xef\xbb\xbf"])
def test_no_prompt_at_all(tmp_path, content):
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(written(tmp_path, content))


def test_the_longest_prompt_and_one_character_more(tmp_path):
    longest = "é" * LONGEST
    assert read_prompts(written(tmp_path, longest.encode())) == [longest]
    with pytest.raises(ConfigError, match=f"{LONGEST + 1} characters in line 2, at most {LONGEST}"):
        read_prompts(written(tmp_path, f"a cat\n{longest}e".encode()))


def test_a_file_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "prompts.txt"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ArtifactError, match=f"{MOST_BYTES + 1} bytes"):
        read_prompts(path)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "prompts.txt", tmp_path):
        with pytest.raises(ConfigError, match="there is no prompt file"):
            read_prompts(path)


def test_shipped_prompts_are_readable_and_differ():
    paths = list((Path(__file__).parents[3] / "conf").rglob("prompts/*.txt"))
    assert paths
    for path in paths:
        prompts = read_prompts(path)
        assert len(prompts) > 1 and len(set(prompts)) == len(prompts), path
