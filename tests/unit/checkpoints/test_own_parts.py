"""Which parts a folder's index says that it has."""

import json

import pytest

from sd_quant.checkpoints.own_parts import own_parts

USUAL = ["transformer", "vae", "text_encoder_3"]
WHOLE = {"_class_name": "Some", **{name: ["some", "Kind"] for name in USUAL}}


@pytest.mark.parametrize(
    ("index", "left"),
    [
        (WHOLE, USUAL),
        (WHOLE | {"text_encoder_3": [None, None]}, USUAL[:2]),
        (WHOLE | {"text_encoder_3": None}, USUAL[:2]),
        ({name: WHOLE[name] for name in USUAL[:2]}, USUAL[:2]),
        ([], USUAL),
        ("text_encoder_3", USUAL),
    ],
    ids=str,
)
def test_what_the_index_has_not_is_left_out(tmp_path, index, left):
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert own_parts(tmp_path, USUAL) == left


@pytest.mark.parametrize("text", [None, "{", "[" * 100_000, "\x00"])
def test_what_says_nothing_changes_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "model_index.json").write_text(text)
    assert own_parts(tmp_path, USUAL) == own_parts(tmp_path / "nowhere", USUAL) == USUAL
