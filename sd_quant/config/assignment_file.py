"""The file ``assignment.yaml``: the preset of each layer, which a run writes and ``assignment=`` reads.

    down_blocks.1.attentions.0.proj_in: fp16
    down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q: int8

The file maps a layer's name to a preset or ``fp16``, so a change edits one line. Alternative not taken: to list layers
by preset, where a change moves a line.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import yaml

from sd_quant.errors import ConfigError
from sd_quant.files import read_regular
from sd_quant.files.archive import MAX_TEXT
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.places import existing_file
from sd_quant.text import one_line

ASSIGNMENT = "assignment.yaml"  # in the folder of a run
FP16 = "fp16"  # the label of a layer that is not quantized
BLOCK = re.compile(r"[^.]+(?:\.\d+)?")  # the part of a layer's name that a paragraph has in common


def labels_in(path: str) -> dict[str, str]:
    """Read an assignment file: return each layer's label, a preset or fp16.

    Raises ConfigError for a file that cannot be read, and for an entry of another form.
    """
    file = existing_file("assignment", path)
    expected = "a mapping from names of layers to presets or fp16"
    try:
        content = load_yaml(read_regular(file, MAX_TEXT))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"assignment is {path}, which cannot be read ({one_line(error, 200)}), expected {expected}"
        ) from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"assignment is {path}, which has no layers, expected {expected}")
    for name, label in content.items():
        if not isinstance(name, str) or not isinstance(label, str):
            raise ConfigError(f"assignment gives {str(name)[:80]!r} {str(label)[:80]!r}, expected {expected}")
    return content


def text_of(labels: Mapping[str, str], knobs: Iterable[str]) -> str:
    """Return an assignment file's text: comments with the command (arguments ``knobs``) that reads it, and layers."""
    return "\n".join([
        "# The preset of each layer of the denoiser, or fp16. Edit it and give it back: nothing is measured then.",
        f"#   python quantize.py {' '.join(knobs)} assignment=<this file>",
        "# with the run's other knobs but keep, quantize.budget and fit. Layers without a line stay in fp16, and those",
        "# that read one input have one preset.",
        *paragraphs(labels),
        "",
    ])  # fmt: skip


def paragraphs(labels: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each layer, and an empty line before each block of the network."""
    for _, names in groupby(labels, lambda name: found[0] if (found := BLOCK.match(name)) else name):
        yield ""
        yield from (f"{name}: {labels[name]}" for name in names)
