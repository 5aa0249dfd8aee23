"""What damages safetensors files, and what tells tensors apart."""

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from sd_quant.checkpoints.tensors import Readable

from .mutations import VALUES, YAML_PLANTS, byte_edits, changed, document_edits, edited, to_json

Files = dict[str, bytes]
YAML_VALUES = [*VALUES, *YAML_PLANTS]


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """What tells two tensors apart, of any dtype, NaN included."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content).hexdigest()


def digests(tensors: Mapping[str, Readable]) -> dict[str, tuple]:
    return {name: digest(tensor.read()) for name, tensor in tensors.items()}


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: Any, content: bytes) -> bytes:
    text = to_json(header)
    return struct.pack("<Q", len(text)) + text + content


def decisive_header(data: bytes) -> list[tuple[int, int]]:
    return [(0, 8), (8, 8 + int.from_bytes(data[:8], "little"))]


described = st.one_of(st.tuples(st.just("bytes"), byte_edits), st.tuples(st.just("header"), document_edits))


def damaged_safetensors(data: bytes, recipe: tuple) -> bytes:
    kind, edits = recipe
    if kind == "bytes":
        return edited(data, edits, decisive_header(data))
    header, content = header_of(data)
    return with_header(changed(header, edits), content)
