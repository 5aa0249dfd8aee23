import pytest
import torch
from safetensors.torch import save_file

from sd_quant.checkpoints.licence import licence_of
from sd_quant.places import HOME


@pytest.mark.parametrize(
    "card, expected",
    [
        ("---\nlicense: openrail++\ntags: [x]\n---\n# SDXL", "openrail++"),
        ("---\r\nlicense: other\r\nlicense_name: flux-dev\r\n---\r\n", "flux-dev"),
        ("---\ntags: [x]\n---\nlicense: mit", None),
        ("# A model\nlicense: mit", None),
        ("---\nlicense: [1, 2]\n---\n", None),
        ("---\n: : :\n\t-\n---\n", None),
        ("---\n- license\n---\n", None),
        ("---\nlicense: |\n  a\x1b[2J\n  b\n---\n", None),
    ],
)
def test_of_a_folder(tmp_path, card, expected):
    (tmp_path / "README.md").write_text(card, newline="")
    assert licence_of(tmp_path) == expected


def test_a_long_one_is_cut(tmp_path):
    (tmp_path / "README.md").write_text(f"---\nlicense: {'x' * 1000}\n---\n")
    assert len(licence_of(tmp_path)) == 100


def test_of_a_single_file(tmp_path):
    for metadata, expected in (({"modelspec.license": "CreativeML Open RAIL-M"}, "CreativeML Open RAIL-M"), ({}, None)):
        save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata)
        assert licence_of(tmp_path / "model.safetensors") == expected


def test_an_archive_names_none(tmp_path):
    assert licence_of(HOME / "checkpoints/sdxl_mini.nemo") is None
    assert licence_of(tmp_path) is None
