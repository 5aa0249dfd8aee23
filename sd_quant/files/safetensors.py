"""Safetensors files, read and written one tensor at a time.

A file begins with the length of its header, eight bytes, little endian. The header is JSON with dtype, shape and byte
range of each tensor; the bytes follow (https://huggingface.co/docs/safetensors). Alternative not taken: the safetensors
library. Its ``save_file`` needs every tensor in memory, and its ``safe_open`` maps the file, so that the process
is killed when the file is truncated later.
"""

import json
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path, refusing
from sd_quant.files.archive import Member
from sd_quant.files.tensors import Readable, StoredTensor, read_bytes, strides

MAX_HEADER = 16 * 2**20  # the single file of SDXL has about 0.3 MB
MAX_DIMENSIONS = 8
MAX_SIDE = 2**48  # of a shape or an offset; also bounds shapes whose product is 0
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FORMAT = {"format": "pt"}  # transformers requires this entry of metadata
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_safetensors(member: Member) -> dict[str, StoredTensor]:
    """Return every tensor by name, unread. Raises ArtifactError for a damaged header, gaps or overlaps."""
    return read_header(member)[0]


def read_header(member: Member) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors as ``read_safetensors`` does, and the file's metadata."""
    length = int.from_bytes(member.read(0, 8), "little")
    if length > MAX_HEADER:
        raise ArtifactError(
            f"{member.name} begins with a header of {length} bytes, at most {MAX_HEADER} expected; it is damaged or no "
            "safetensors file, so check the path or fetch it again"
        )
    text = member.read(8, length)
    errors = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
    with refusing(f"{member.name} is not a whole safetensors file", *errors):
        header = json.loads(bytes(text), object_pairs_hook=without_duplicates)
        metadata = dict(header.pop("__metadata__", None) or {})
        tensors = {name: _described(member, 8 + length, entry) for name, entry in header.items()}
        end = 8 + length
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, prod(tensor.shape))):
            if tensor.start != end:
                raise ValueError(f"tensors overlap or leave a gap at byte {min(end, tensor.start)}")
            end += prod(tensor.shape) * tensor.dtype.itemsize
        if end != member.size:
            raise ValueError(f"{end} bytes described, {member.size} present")
    return tensors, metadata


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Readable],
    advance: Callable[[], object] = lambda: None,
    metadata: Mapping[str, str] = FORMAT,
) -> None:
    """Write a file with one tensor in memory at a time; the same tensors give the same bytes.

    ``advance`` is called after each tensor. Raises ArtifactError for a dtype that the format does not have and
    ResourceError when the disk is full.
    """
    # Wide numbers first, like the library: in a mapped file every number is then aligned. The header keeps the order.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    ends = list(accumulate(prod(tensors[name].shape) * tensors[name].dtype.itemsize for name in names))
    ranges = dict(zip(names, zip([0, *ends], ends, strict=False), strict=True))
    header: dict[str, dict] = {"__metadata__": dict(metadata)}
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ArtifactError(
                f"{name[:200]!r} is stored as {tensor.dtype}, which a safetensors file cannot hold; remove it from the "
                "checkpoint"
            )
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ranges[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(read_bytes(name, tensors[name]))
            advance()


def read_object(what: str, text: bytes | str) -> dict:
    """Return the JSON object in ``text``. Raises ArtifactError for anything else and for duplicate names."""
    with refusing(f"{what} is not JSON", ValueError, TypeError, RecursionError):
        found = json.loads(text, object_pairs_hook=without_duplicates)
    if not isinstance(found, dict):
        raise ArtifactError(f"{what} holds a {type(found).__name__}; expected an object, so fetch it again")
    return found


def without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    """Build a JSON object from its (name, value) pairs. Raises ValueError for a duplicate name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _described(member: Member, data: int, entry: Mapping) -> StoredTensor:
    """Return the tensor of a header entry; its byte range counts from ``data``. Raises ValueError etc. if invalid."""
    dtype, shape, (start, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, start, end)
    if len(shape) > MAX_DIMENSIONS or not all(type(number) is int and 0 <= number <= MAX_SIDE for number in numbers):
        raise ValueError("a shape or a range of bytes that is none")
    if end - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for a tensor of shape {list(shape)} and {dtype}")
    return StoredTensor(member, data + start, shape, strides(shape), dtype)
