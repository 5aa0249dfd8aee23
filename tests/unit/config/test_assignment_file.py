"""What a file of labels holds, and which files are refused."""

import pytest

from sd_quant.config.assignment_file import entries_in, text_of
from sd_quant.errors import ConfigError

pytestmark = pytest.mark.commit

LABELS = {
    "conv_in": "fp16",
    "down_blocks.0.resnets.0.conv1": "int8",
    "down_blocks.0.resnets.0.conv2": "nvfp4",
    "down_blocks.1.attentions.0.to_q": "int8",
}


def test_what_is_written_is_read_and_says_how_to_give_it_back(tmp_path):
    file = tmp_path / "assignment.yaml"
    alphas = {"down_blocks.0.resnets.0.conv2": "auto", "down_blocks.1.attentions.0.to_q": 0.5}
    file.write_text(text := text_of(LABELS, alphas, ["quantize=int8", "quant_level=3"]))
    assert entries_in(str(file)) == (LABELS, alphas)
    assert "python quantize.py quantize=int8 quant_level=3 assignment=<this file>" in text
    header, *blocks = text.rstrip("\n").split("\n\n")
    assert header.startswith("#") and [block.count("\n") for block in blocks] == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "assignment is .* has no layers, expected a mapping from names of layers to presets or fp16"),
        ("- conv: int8", "has no layers"),
        ("conv: 8", "assignment gives 'conv' '8', expected a mapping"),
        ("conv: [int8]", "assignment gives 'conv' "),
        ("conv: {preset: int8}", "assignment gives 'conv' .*, expected .* or to {preset: ..., alpha: ...}"),
        ("conv: {preset: int8, alpha: 2}", "the alpha of conv in .* is 2.0, expected a number from 0 to 1, or auto"),
        ("conv: int8\nconv: fp16", "cannot be read .*'conv' stands twice"),
        ("conv: !!python/object:os.system {}", "cannot be read"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_no_mapping_of_labels_is_refused(tmp_path, text, sentence):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        entries_in(str(tmp_path / "a.yaml"))


def test_a_file_that_is_missing_is_refused():
    with pytest.raises(ConfigError, match="^assignment names no/such.yaml, which does not exist"):
        entries_in("no/such.yaml")
