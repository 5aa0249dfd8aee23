"""Tables of calls: what each kind of file holds, and what is refused, each in one sentence."""

import json
from pathlib import Path

import pytest
from PIL import Image
from pyarrow import Table, parquet

from examples import shapes
from sd_quant.calibration.call_tables import files_by_row, read_rows
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.files.images import read_whole
from sd_quant.inference.requests import check_taken
from sd_quant.places import HOME
from sd_quant.stages.generate import arguments_of

pytestmark = pytest.mark.commit

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


def written(folder: Path, kind: str, rows: list[dict]) -> Path:
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
    first, second = read_rows(KNOB, written(folder, kind, ROWS))
    a, b = folder / "a.png", folder / "b.png"
    assert first == ("make it red", {"image": a, "references": [a, b], "strength": 0.5, "prompt_2": "7"})
    assert second.arguments["references"] == [b, a]
    named = files_by_row(KNOB, folder / f"table.{kind}")
    assert list(named.values()) == [folder / f"table.{kind}", a, a, b, b, b, a]


def test_a_folder_is_a_video_and_a_mask_is_grey(folder):
    (row,) = read_rows(KNOB, written(folder, "csv", [{"video": "frames", "mask_image": "mask.png", "num_frames": 3}]))
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
        read_rows(KNOB, written(folder, "csv", [ROWS[0] | change, ROWS[1] | change]))


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
