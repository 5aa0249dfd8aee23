"""Damages to files of weights, digests of tensors, and readers whose input is damaged in several ways."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from sd_quant.files.tensors import Readable

from .mutations import byte_edits, changed, document_edits, edited, pickle_edits, repickled, to_json, with_pickle

Files = dict[str, bytes]


def ways(*given: tuple[st.SearchStrategy, Callable[[Any], Files]]) -> dict[str, Any]:
    """A reader's ``recipes`` and ``mutate`` of strategies, each with what makes files of its values.

    One that stands here twice is taken twice as often.
    """
    recipes = st.one_of(*(st.tuples(st.just(number), strategy) for number, (strategy, _) in enumerate(given)))
    return {"recipes": recipes, "mutate": lambda recipe: given[recipe[0]][1](recipe[1])}


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Returns a digest of a tensor of any dtype, NaN included."""
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


def with_numbers(data: bytes, name: str, edits: list) -> bytes:
    """With other bytes in a tensor, as many."""
    header, content = header_of(data)
    first = len(data) - len(content)
    start, stop = (first + each for each in header[name]["data_offsets"])
    piece = edited(data[start:stop], edits)[: stop - start].ljust(stop - start, b"\xff")
    return data[:start] + piece + data[stop:]


def decisive_header(data: bytes) -> list[tuple[int, int]]:
    return [(0, 8), (8, 8 + int.from_bytes(data[:8], "little"))]


described = st.one_of(st.tuples(st.just("bytes"), byte_edits), st.tuples(st.just("header"), document_edits))


def damaged_safetensors(data: bytes, recipe: tuple) -> bytes:
    kind, edits = recipe
    if kind == "bytes":
        return edited(data, edits, decisive_header(data))
    header, content = header_of(data)
    return with_header(changed(header, edits), content)


def damaged_metadata(data: bytes, key: str, edits: list) -> bytes:
    """With another document, or text that is none, in one entry of the header's metadata."""
    header, content = header_of(data)
    known = header["__metadata__"]
    document = json.loads(known[key]) if known[key].startswith(("{", "[")) else known[key]
    known[key] = to_json(changed(document, edits)).decode("utf-8", "replace")
    return with_header(header, content)


def decisive(archive: bytes) -> list[tuple[int, int]]:
    """Where a zip file of torch.save has its pickle, and its directory."""
    start = archive.index(b"\x80\x02")
    directory = archive.index(b"PK\x01\x02")
    return [(0, 64), (start, archive.index(b"PK", start)), (directory, len(archive))]


either = st.one_of(st.tuples(st.just("bytes"), byte_edits), st.tuples(st.just("pickle"), pickle_edits))


def damaged_weights(archive: bytes, recipe: tuple) -> bytes:
    kind, edits = recipe
    if kind == "bytes":
        return edited(archive, edits, decisive(archive))
    return with_pickle(archive, partial(repickled, edits=edits))
