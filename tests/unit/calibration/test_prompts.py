from pathlib import Path

import pytest

from sd_quant.calibration.prompts import LONGEST, MOST_BYTES, draw_prompts, is_table, read_prompts
from sd_quant.errors import ArtifactError, ConfigError

HEADER = b"id\timage_id\tcaption\theight\twidth\tfile_name\tcoco_url\n"  # of MLPerf's captions.tsv
SHIPPED = Path(__file__).parents[3] / "conf" / "model" / "prompts"


def written(folder: Path, content: bytes, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def table(folder: Path, content: bytes) -> Path:
    return written(folder, content, "captions.tsv")


def row(caption: str) -> bytes:
    return f"70\t227049\t{caption}\t640\t480\t227049.jpg\thttp://127.0.0.1/227049.jpg\n".encode()


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
    lines = ["ein Kätzchen, „süß“", "猫の写真 🐈", "../../etc/passwd; rm -rf $HOME", "${oc.env:HOME}", "a\u2028b"]
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


def test_the_prompts_of_every_model_are_many_and_short():
    prompts = read_prompts(SHIPPED / "general.txt")
    assert len(prompts) == 1024
    for prompt in prompts:
        assert prompt.isascii() and len(prompt) <= 400 and 3 <= len(prompt.split()) <= 60, prompt


def test_no_prompt_is_both_calibrated_on_and_judged_by():
    calibrated = read_prompts(SHIPPED / "general.txt") + read_prompts(SHIPPED / "sdxl.txt")
    assert not set(calibrated) & set(read_prompts(SHIPPED / "sdxl_evaluation.txt"))


@pytest.mark.parametrize("name", ["captions.tsv", "captions_source.tsv", "CAPTIONS.TSV"])
def test_captions_of_a_table(tmp_path, name):
    path = written(tmp_path, HEADER + row("A city at night.") + row("  a dog ") + row(""), name)
    assert is_table(path) and read_prompts(path) == ["A city at night.", "a dog"]


@pytest.mark.parametrize(
    "content",
    [
        b"caption\na cat\na dog\n",
        b"id\tcaption\n1\ta cat\n2\ta dog",
        b"caption\tid\na cat\t1\n\na dog\t2\n\n",
        b"\xef\xbb\xbfcaption\tid\r\na cat\t\r\n\r\na dog\t2\r\n",  # byte order mark, an empty last column
        b"id\t caption\n1\ta cat\n2\ta dog\n",
    ],
)
def test_any_table_with_the_column_works(tmp_path, content):
    assert read_prompts(table(tmp_path, content)) == ["a cat", "a dog"]


def test_quotation_marks_are_taken_off_around_a_caption_alone(tmp_path):
    given = ['"A sign that reads ""stop"" on it."', 'a "cat', "ein „Kätzchen“", '"']
    expected = ['A sign that reads "stop" on it.', *given[1:]]
    assert read_prompts(table(tmp_path, HEADER + b"".join(map(row, given)))) == expected


@pytest.mark.parametrize(
    "header", [b"", b"a cat", b"id\timage_id\tcaptions", b"id,image_id,caption", b"caption\tid\tcaption"]
)
def test_a_table_needs_one_column_of_captions(tmp_path, header):
    with pytest.raises(ConfigError) as refused:
        read_prompts(table(tmp_path, header + b"\n" + row("a cat")))
    assert str(refused.value) == (
        f"prompt file {tmp_path / 'captions.tsv'} begins with {header.decode()!r}, expected a header line with one "
        "column 'caption' between tabs; add that line, or name the file .txt when it holds one prompt a line"
    )


def test_a_hostile_header_is_not_repeated_in_full(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_prompts(table(tmp_path, b"\x1b[2J" * 100_000))
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("content", "columns"), [(b"70\ta cat\n", 2), (row("a\tcat"), 8), (b"a cat\n", 1), (b" \n", 1)]
)
def test_a_row_with_other_columns_is_named_by_line(tmp_path, content, columns):
    with pytest.raises(ConfigError, match=f"has {columns} columns in line 4, expected 7 as in its header; put one tab"):
        read_prompts(table(tmp_path, HEADER + row("a dog") + b"\n" + content))


def test_a_table_is_bounded_as_a_text_is(tmp_path):
    longest = "é" * LONGEST
    assert read_prompts(table(tmp_path, HEADER + row(longest))) == [longest]
    with pytest.raises(ConfigError, match=f"{LONGEST + 1} characters in line 2, at most {LONGEST}"):
        read_prompts(table(tmp_path, HEADER + row(longest + "e")))
    with pytest.raises(ConfigError, match="not UTF-8 at line 3, byte 12; save it"):
        read_prompts(table(tmp_path, HEADER + row("a cat") + b"70\t22\ta caf\xe9\t\t\t\t\n"))
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(table(tmp_path, HEADER + row(" ")))
    with table(tmp_path, HEADER).open("ab") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ArtifactError, match=f"{MOST_BYTES + 1} bytes"):
        read_prompts(tmp_path / "captions.tsv")


def test_a_text_file_knows_no_columns(tmp_path):
    path = written(tmp_path, HEADER)
    assert not is_table(path) and read_prompts(path) == [HEADER.decode().strip()]


PROMPTS = [f"prompt {number}" for number in range(40)]


def test_a_draw_is_the_beginning_of_a_larger_one():
    largest = draw_prompts(PROMPTS, len(PROMPTS), 42)
    assert largest != PROMPTS and sorted(largest) == sorted(PROMPTS)
    for count in range(len(PROMPTS)):
        assert draw_prompts(PROMPTS, count, 42) == largest[:count]


def test_a_draw_depends_on_nothing_but_the_seed():
    """Statistics are kept under their prompts: another order here would make every cache worthless."""
    assert draw_prompts(PROMPTS, 5, 42) == ["prompt 16", "prompt 20", "prompt 33", "prompt 37", "prompt 36"]
    assert draw_prompts(PROMPTS, 5, 43) != draw_prompts(PROMPTS, 5, 42)


def test_equal_captions_are_drawn_as_often_as_they_are_there():
    assert sorted(draw_prompts(["a cat", "a cat", "a dog"], 3, 0)) == ["a cat", "a cat", "a dog"]


@pytest.mark.parametrize("count", [-1, 4])
def test_more_than_there_are_cannot_be_drawn(count):
    with pytest.raises(ValueError, match=f"{count} prompts cannot be drawn from 3"):
        draw_prompts(["a", "b", "c"], count, 0)
