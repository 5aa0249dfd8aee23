"""The licence that a checkpoint names, in a folder's model card or in the metadata of a single file.

A card is a README.md that begins with YAML between lines of dashes, as Hugging Face reads it. Metadata follow ModelSpec
(``modelspec.license``). NeMo's archives name none.
"""

import re
from pathlib import Path

import yaml

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.files.safetensors import read_header
from sd_quant.text import one_line

CARD = "README.md"
LARGEST_CARD = 100_000  # bytes that are read
LONGEST = 100  # characters that are shown


def licence_of(path: Path) -> str | None:
    """Returns the licence that the checkpoint at ``path`` names, or None where it names none that can be read."""
    if (path / CARD).is_file():
        card_file = whole_file(path / CARD)
        try:
            start = bytes(card_file.read(0, min(card_file.size, LARGEST_CARD)))
            head = re.match(rb"---\r?\n(.*?)\r?\n---", start, re.DOTALL)
            card = load_yaml(head[1]) if head else None
        except (ArtifactError, yaml.YAMLError, ValueError, RecursionError):
            return None
        named = card.get("license_name") or card.get("license") if isinstance(card, dict) else None
    else:
        metadata = read_header(whole_file(path))[1] if path.suffix.lower() == ".safetensors" else {}
        named = metadata.get("modelspec.license")
    return one_line(named, LONGEST) if isinstance(named, str) else None
