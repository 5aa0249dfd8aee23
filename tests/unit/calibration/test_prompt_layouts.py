"""Small files in the layouts of the published prompt sets, written for these tests."""

import json

import pytest

from sd_quant.calibration.prompts import Prompt, read_prompt_set
from sd_quant.errors import ConfigError

pytestmark = pytest.mark.commit

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


def written(tmp_path, name: str, content):
    path = tmp_path / name
    path.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "category", "expected"),
    [
        ("PartiPrompts.tsv", PARTI, None, [
            ('a sign that says "HELLO"', "Artifacts"), ('"LOVE" on a mug, "PEACE" on a wall', "Artifacts"),
            ("two owls", "Animals"),
        ]),
        ("PartiPrompts.tsv", PARTI, "challenge", [
            ('a sign that says "HELLO"', "Writing & Symbols"),
            ('"LOVE" on a mug, "PEACE" on a wall', "Writing & Symbols"), ("two owls", "Quantity"),
        ]),
        ("drawbench.csv", DRAWBENCH, None, [
            ("A red car.", "Colors"), ("Two cups, a saucer.", "Counting"), ("One dog.", "Gary et al."),
        ]),
        ("meta_data.json", MJHQ, None, [("a soup, steaming", "food"), ("a fox", "logo")]),
        ("captions_val2017.json", COCO, None, [("A cat on a mat.", None), ("A grey cat.", None)]),
        ("captions_val2017.json", COCO | {"annotations": COCO["annotations"][:1]}, None, [("A cat on a mat.", None)]),
        ("prompts.txt", "a cat\na dog", None, [("a cat", None), ("a dog", None)]),
    ],
)  # fmt: skip
def test_published_layouts_are_read(tmp_path, name, content, category, expected):
    assert read_prompt_set(written(tmp_path, name, content), category) == [Prompt(*each) for each in expected]


@pytest.mark.parametrize(
    ("name", "content", "category", "message"),
    [
        ("a.tsv", "Prompt\tCategory\na cat\tAnimals\na dog\t \n", None, "a prompt without a category in line 3, expec"),
        ("a.json", {"1": MJHQ["00a1"], "2": {"prompt": "a dog"}}, None, "without a category in entry 2, expected one"),
        ("a.json", MJHQ | {"2": {"prompt": "a dog", "category": 7}}, None, "without a category in entry 2, expected"),
        ("a.json", COCO, "supercategory", "without a category in entry 0"),
        ("a.tsv", PARTI, "Colour", "the columns prompt, category, challenge, note, expected 'Colour' among them; n"),
        ("a.txt", "a cat", "Category", "is a text without categories, expected a .tsv, .csv or .json that has 'Categ"),
        ("a.csv", 'Prompts,Category\n"a cat,Animals\n', None, "a quotation mark in line 2 that does not end there, o"),
        ("a.csv", f"Prompts,Category\na cat,{'A' * 140_000}\n", None, "line 2 .* or a cell of over 131072 characters;"),
        ("a.tsv", "Prompt\n" + "\n" * 10**6, None, "1000001 lines, at most 1000000 work; draw some of them"),
        ("a.json", f'{{"annotations": [0{",0" * 10**6}]}}', None, "1000001 entries, at most 1000000 work"),
        ("a.csv", "Prompts,Category\na cat, a dog,Animals\n", None, "3 columns in line 2, expected 2 as in its head"),
        ("a.csv", "id,text\n1,a cat\n", None, r"begins with 'id,text', expected a header line .* between commas; add"),
        ("a.json", "{", None, r"is not JSON \(.*; download it again"),
        ("a.json", "[" * 100_000, None, r"is not JSON \(.*recursion.*; download it again"),
        ("a.json", '{"a": {"prompt": "\\ud800"}}', None, "is not UTF-8 in entry a; save it as UTF-8"),
        ("a.json", ["a cat"], None, "has an unknown layout, expected MJHQ's"),
        ("a.json", {"annotations": [{"category_id": 1}]}, None, "has an unknown layout in entry 0, expected MJHQ's"),
        ("a.json", {"a": {"prompt": ["a cat"]}}, None, "has an unknown layout in entry a"),
    ],
)
def test_another_file_is_refused_in_a_sentence(tmp_path, name, content, category, message):
    with pytest.raises(ConfigError, match=message) as refused:
        read_prompt_set(written(tmp_path, name, content), category)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"prompt file {tmp_path / name} ")
