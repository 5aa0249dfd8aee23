"""Prompts of a text or of a table, and small files in the layouts of the published prompt sets, written for this."""

import json
from pathlib import Path

import pytest
from PIL import Image
from pyarrow import Table, parquet

from examples import shapes
from sd_quant.calibration.call_tables import files_by_row, read_rows
from sd_quant.calibration.prompts import (
    LONGEST_PROMPT,
    MOST_BYTES,
    draw_prompts,
    is_data_set,
    read_prompts,
    write_prompts,
)
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files.images import read_whole
from sd_quant.inference.requests import check_taken
from sd_quant.places import HOME
from sd_quant.stages.generate import arguments_of

pytestmark = pytest.mark.commit

HEADER = b"id\timage_id\tcaption\theight\twidth\tfile_name\tcoco_url\n"  # of MLPerf's captions.tsv
TEXT, TABLE = "prompts.txt", "captions.tsv"
LONG = "é" * LONGEST_PROMPT
UNCHANGED = ["ein Kätzchen, „süß“", "猫の写真 🐈", "../../etc/passwd; rm -rf $HOME", "${oc.env:HOME}", "a\u2028b"]


def written(folder: Path, name: str, content: bytes | str | dict | list) -> Path:
    path = folder / name
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    return path


def row(caption: str) -> bytes:
    return f"70\t227049\t{caption}\t640\t480\t227049.jpg\thttp://127.0.0.1/227049.jpg\n".encode()


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        (TEXT, b"\xef\xbb\xbf\r\n  a cat  \r\n\r\n\ta dog", ["a cat", "a dog"]),  # byte order mark
        (TEXT, "\n".join(UNCHANGED).encode(), UNCHANGED),
        (TEXT, LONG.encode(), [LONG]),
        (TEXT, HEADER, [HEADER.decode().strip()]),
        (TABLE, HEADER + row("A city at night.") + row("  a dog ") + row(""), ["A city at night.", "a dog"]),
        ("CAPTIONS.TSV", HEADER + row(LONG), [LONG]),
        (TABLE, b"id\t caption\n1\ta cat\n2\ta dog", ["a cat", "a dog"]),
        (TABLE, b"\xef\xbb\xbfcaption\tid\r\na cat\t\r\n\r\na dog\t2\r\n", ["a cat", "a dog"]),
        (TABLE, HEADER + row('"A sign that reads ""stop"" on it."'), ['A sign that reads "stop" on it.']),
        (TABLE, HEADER + row('a "cat') + row("ein „Kätzchen“") + row('"'), ['a "cat', "ein „Kätzchen“", '"']),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_prompts_are_the_lines_of_a_text_and_the_captions_of_a_table(tmp_path, name, content, prompts):
    path = written(tmp_path, name, content)
    assert is_data_set(path) == (name != TEXT) and read_prompts(path) == prompts


PARTI = (
    "Prompt\tCategory\tChallenge\tNote\n"
    'a sign that says "HELLO"\tArtifacts\tWriting & Symbols\t\n'
    '"LOVE" on a mug, "PEACE" on a wall\tArtifacts\tWriting & Symbols\ta note with "marks"\n'
    "\n"
    "two owls\tAnimals\tQuantity\tsome numbers\n"
)
DRAWBENCH = 'Prompts,Category\r\nA red car.,Colors\r\n"Two cups, a saucer.",Counting\r\nOne dog.,Gary et al. \r\n'
MJHQ = {"00a1": {"category": "food", "prompt": "a soup,\n steaming "}, "00a2": {"category": "logo", "prompt": "a fox"}}
COCO = {
    "info": {"year": 2017},
    "images": [{"id": 9, "file_name": "9.jpg"}],
    "annotations": [
        {"image_id": 9, "id": 1, "caption": "A cat on a mat.\n"},
        {"image_id": 9, "id": 2, "caption": "A grey cat."},
    ],
}


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("PartiPrompts.tsv", PARTI, ['a sign that says "HELLO"', '"LOVE" on a mug, "PEACE" on a wall', "two owls"]),
    ("drawbench.csv", DRAWBENCH, ["A red car.", "Two cups, a saucer.", "One dog."]),
    ("meta_data.json", MJHQ, ["a soup, steaming", "a fox"]),
    ("captions_val2017.json", COCO, ["A cat on a mat.", "A grey cat."]),
])  # fmt: skip
def test_published_layouts_are_read(tmp_path, name, content, expected):
    assert read_prompts(written(tmp_path, name, content)) == expected


TOO_LONG = f"{LONGEST_PROMPT + 1} characters in line 2, at most {LONGEST_PROMPT}"
COLUMNS = "has {} columns in line 4, expected 7 as in its header; put one tab"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((TEXT, content, "holds no prompt") for content in (b"", b"  \r\n\t\n", b"\xef\xbb\xbf")),
        (TEXT, b"a cat\n\na caf\xc3\xa9\xe9 au lait\n", "not UTF-8 at line 3, byte 8; save it"),
        (TEXT, f"a cat\n{LONG}e", TOO_LONG),
        (TABLE, HEADER + row(" "), "holds no prompt"),
        (TABLE, HEADER + row("a cat") + b"70\t22\ta caf\xe9\t\t\t\t\n", "not UTF-8 at line 3, byte 12; save it"),
        (TABLE, HEADER + row(LONG + "e"), TOO_LONG),
        (TABLE, HEADER + row("a dog") + b"\n" + b"70\ta cat\n", COLUMNS.format(2)),
        (TABLE, HEADER + row("a dog") + b"\n" + row("a\tcat"), COLUMNS.format(8)),
        ("a.csv", 'Prompts,Category\n"a cat,Animals\n', "a quotation mark in line 2 that does not end there, o"),
        ("a.csv", f"Prompts,Category\na cat,{'A' * 140_000}\n", "line 2 .* or a cell of over 131072 characters;"),
        ("a.tsv", "Prompt\n" + "\n" * 10**6, "1000001 lines, at most 1000000 work; draw some of them"),
        ("a.json", f'{{"annotations": [0{",0" * 10**6}]}}', "1000001 entries, at most 1000000 work"),
        ("a.csv", "Prompts,Category\na cat, a dog,Animals\n", "3 columns in line 2, expected 2 as in its head"),
        ("a.csv", "id,text\n1,a cat\n", r"begins with 'id,text', expected a header line .* between commas; add"),
        *((TABLE, header + b"\n" + row("a cat"), "begins with '.*', expected a header line with one column .capt")
          for header in (b"", b"id\timage_id\tcaptions", b"id,image_id,caption", b"caption\tid\tprompt")),
        ("a.json", "{", r"is not JSON \(.*; download it again"),
        ("a.json", "[" * 100_000, r"is not JSON \(.*recursion.*; download it again"),
        ("a.json", '{"a": {"prompt": "\\ud800"}}', "is not UTF-8 in entry a; save it as UTF-8"),
        ("a.json", ["a cat"], "has an unknown layout, expected MJHQ's"),
        ("a.json", {"annotations": [{"category_id": 1}]}, "has an unknown layout in entry 0, expected MJHQ's"),
        ("a.json", {"a": {"prompt": ["a cat"]}}, "has an unknown layout in entry a"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_file_that_holds_something_else_is_refused_in_a_sentence(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message) as refused:
        read_prompts(written(tmp_path, name, content))
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"prompt file {tmp_path / name} ")


def test_a_file_too_large_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / TEXT).open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ArtifactError, match=f"{MOST_BYTES + 1} bytes"):
        read_prompts(tmp_path / TEXT)
    with pytest.raises(ArtifactError, match=r"^prompt file /proc/self/mem cannot be read \(OSError: .*; name a text"):
        read_prompts(Path("/proc/self/mem"))  # a regular file, by its kind
    for name in ("nothing.txt", "."):
        with pytest.raises(ConfigError, match="there is no prompt file"):
            read_prompts(tmp_path / name)


def test_shipped_prompts_differ_those_of_every_model_are_short_and_none_is_calibrated_on_and_judged_by():
    paths = list((HOME / "conf").rglob("prompts/*.txt"))
    general = HOME / "conf/model/prompts/general.txt"
    assert general in paths
    for path in paths:
        prompts = read_prompts(path)
        assert len(prompts) > 1 and len(set(prompts)) == len(prompts), path
    assert len(read_prompts(general)) == 1024
    for prompt in read_prompts(general):
        assert prompt.isascii() and len(prompt) <= 400 and 3 <= len(prompt.split()) <= 60, prompt

    def prompts(*names: str) -> set[str]:
        return set().union(*(read_prompts(HOME / f"{name}.txt") for name in names))

    mini = "conf/model/prompts/sdxl_mini"
    reported = "benchmarks/prompts/sdxl_mini", "benchmarks/prompts/sdxl_mini_report", f"{mini}_evaluation"
    assert not prompts("conf/model/prompts/general") & prompts("conf/model/prompts/sdxl_evaluation")
    assert not prompts(mini) & prompts(*reported)


PROMPTS = [*(f"prompt {number}" for number in range(39)), "prompt 0"]  # equal captions are drawn as often as they stand


def test_a_draw_depends_on_nothing_but_the_seed():
    """Another order would make every cache worthless, as statistics are kept under their prompts."""
    largest = draw_prompts(PROMPTS, len(PROMPTS), 42)
    assert largest[:5] == ["prompt 16", "prompt 20", "prompt 33", "prompt 37", "prompt 36"]
    assert sorted(largest) == sorted(PROMPTS) and draw_prompts(PROMPTS, 5, 43) != largest[:5]
    for count in range(len(PROMPTS)):
        assert draw_prompts(PROMPTS, count, 42) == largest[:count]
    for count in (-1, 41):
        with pytest.raises(ValueError, match=f"{count} prompts cannot be drawn from 40"):
            draw_prompts(PROMPTS, count, 0)


def test_kept_prompts_are_read_as_they_were(tmp_path):
    texts = ["a cat", 'a sign "stop"', '"stop"', '"a" and "b"', '"', "ein Kätzchen, 🐈", "it's '5'"]
    write_prompts(texts, tmp_path / "prompts.tsv")
    assert read_prompts(tmp_path / "prompts.tsv") == texts


# Tables of calls: what each kind of file holds, and what is refused, each in one sentence


KNOB = "infer.table"
ROWS = [
    {"prompt": "make it red", "image": "a.png", "references": "a.png;b.png", "strength": 0.5, "prompt_2": "7"},
    {"prompt": "a blue door", "image": "b.png", "references": "b.png|a.png", "strength": 1.0, "prompt_2": "8"},
]


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, mode in (("a.png", "RGB"), ("b.png", "RGBA"), ("mask.png", "L")):
        Image.new(mode, (40, 20), 200 if mode == "L" else "red").save(tmp_path / name)
    (tmp_path / "frames").mkdir()
    for number in range(3):
        Image.new("RGB", (40, 20), (number, 0, 0)).save(tmp_path / f"frames/{number}.png")
    return tmp_path


def table_of(folder: Path, kind: str, rows: list[dict]) -> Path:
    path = folder / f"table.{kind}"
    lists = [{name: value.split(";") if ";" in str(value) else value for name, value in row.items()} for row in rows]
    if kind == "parquet":
        parquet.write_table(Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, lists)) + "\n")
    else:
        separator = "\t" if kind == "tsv" else ","
        lines = [rows[0].keys(), *(map(str, row.values()) for row in rows)]
        path.write_text("\n".join(map(separator.join, lines)))
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_are_arguments_and_paths_images(folder, kind):
    first, second = read_rows(KNOB, table_of(folder, kind, ROWS))
    a, b = folder / "a.png", folder / "b.png"
    assert first == ("make it red", {"image": a, "references": [a, b], "strength": 0.5, "prompt_2": "7"})
    assert second.arguments["references"] == [b, a]
    named = files_by_row(KNOB, folder / f"table.{kind}")
    assert list(named.values()) == [folder / f"table.{kind}", a, a, b, b, b, a]


def test_a_folder_is_a_video_and_a_mask_is_grey(folder):
    (row,) = read_rows(KNOB, table_of(folder, "csv", [{"video": "frames", "mask_image": "mask.png", "num_frames": 3}]))
    assert row.prompt is None and row.arguments["num_frames"] == 3
    (call,) = arguments_of(KNOB, [], [row])
    assert [each.getpixel((0, 0)) for each in call["video"]] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert call["mask_image"].mode == "L" and call["mask_image"].size == (40, 20)
    assert read_whole(folder / "a.png", 200, "RGB").size == (20, 10)


@pytest.mark.parametrize("change, sentence", [
    ({"image": "c.png"}, "line 2: image is .*c.png, expected an image or a folder with images"),
    ({"image": "a.gif"}, "line 2: image is .*a.gif, expected an image or a folder with images, whose names end with"),
    ({"image": ""}, "line 2 has no image for image, expected the path of a file or a folder"),
    ({"prompt": " "}, "line 2 has no prompt, expected a text of up to 2000 characters; write one"),
    ({"strength": float("nan")}, "line 2 has nan for strength, expected a number, a text, an image or a list"),
])  # fmt: skip
def test_a_row_that_cannot_be_a_call_is_refused(folder, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read_rows(KNOB, table_of(folder, "csv", [ROWS[0] | change, ROWS[1] | change]))


@pytest.mark.parametrize("name, content, sentence", [
    ("t.txt", "a", "expected a file that ends with .tsv, .csv, .jsonl, .parquet"),
    ("t.csv", "prompt,image\n", "holds no row"),
    ("t.csv", "prompt,image\na,b.png,c", "has 3 columns in line 2, expected 2 as in its header"),
    ("t.csv", "prompt,prompt\na,b", "begins with prompt, prompt, expected the names of its columns"),
    ("t.jsonl", '{"prompt": "a"}\n{"image": "a.png"}', "has image in line 2, expected prompt as before"),
    ("t.jsonl", "[1]", "has no JSON object in line 1"),
    ("t.jsonl", '{"prompt": "a", "image": {"bytes": ""}}', "for image, expected a number, a text, an image or a list"),
    ("t.parquet", "PAR1", "cannot be read as Parquet"),
])  # fmt: skip
def test_a_table_of_another_form_is_refused(folder, name, content, sentence):
    (folder / name).write_text(content)
    with pytest.raises(SdQuantError, match=sentence):
        read_rows(KNOB, folder / name)


def test_a_column_that_is_no_argument_or_that_knobs_decide_is_refused():
    class Edits:
        def __call__(self, prompt, image, width, height, strength=1.0): ...

    check_taken(Edits, KNOB, ["image", "strength"])
    with pytest.raises(ConfigError, match="infer.table has picture, which Edits does not take; it takes prompt"):
        check_taken(Edits, KNOB, ["image", "picture"])
    with pytest.raises(ConfigError, match="infer.table has width, which is not stated there: sizes, steps"):
        check_taken(Edits, KNOB, ["width"])


def test_the_shipped_tables_are_those_that_are_drawn(tmp_path):
    shapes.main(tmp_path)
    for name in ("shapes.csv", "shapes_evaluation.csv"):
        shipped = HOME / "conf/model/prompts" / name
        drawn, there = (arguments_of(KNOB, [], read_rows(KNOB, path)) for path in (tmp_path / name, shipped))
        assert drawn == there and (tmp_path / name).read_bytes() == shipped.read_bytes()
