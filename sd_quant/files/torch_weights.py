"""Files of ``torch.save``, read and written one tensor at a time, without executing their pickle.

``torch.load(weights_only=True)`` under ``FakeTensorMode`` yields dtype, shape, strides and offset of each tensor, but
no bytes. The offsets are untrusted, so each is compared with the zip directory before anything is read. To write,
``torch.save`` of fake tensors under ``skip_data`` leaves room for the bytes, which are then written where the reader
locates them.
Alternative not taken: ``torch.load(mmap=True)``. It needs a file of its own, so 14 GB would have to be extracted, and
the process is killed when the mapped file is truncated later.
"""

import logging
import os
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.archive import Member, OpenFile
from sd_quant.files.tensors import Readable, StoredTensor, read_bytes, size_of, span_of

MAX_PICKLE = 8 * 2**20  # bytes; SDXL's, names and shapes alone, has about 0.4 MB
MAX_RECORDS = 100_000
MAX_NAME = 4096  # characters of a key, or of any other text in a pickle
PUTS, GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
CONTAINERS = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "EMPTY_LIST", "DICT", "EMPTY_DICT")


def stored_tensors(member: Member, inside: str | None = None) -> dict[str, StoredTensor]:
    """Return every tensor of a flat state dict by name; reads no values.

    The state dict is the whole content, or the content's entry ``inside`` if there is one.
    Raises ArtifactError when the file holds anything else or its pickle asks to run code.
    """
    records = _zip_records(member)
    try:
        with _restricted_torch(), FakeTensorMode(), member.open() as file:
            state = torch.load(file, weights_only=True)
    except ArtifactError:
        raise
    except Exception as error:  # untrusted bytes can make the unpickler and the zip reader raise anything
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        why = f"its pickle asks for {wanted[1][:200]!r}, which was not run" if wanted else "its pickle cannot be read"
        # without torch's own text, which advises to switch the protection off
        raise ArtifactError(
            f"{member.name} is not a plain file of tensors: {why}; save it again as torch.save(model.state_dict())"
        ) from None
    if isinstance(state, dict) and inside is not None:
        state = state.get(inside, state)
    if not isinstance(state, dict) or not state:
        raise ArtifactError(f"{member.name} holds a {type(state).__name__}; expected a non-empty dict of tensors")
    tensors = {name: _located(member, records, name, value) for name, value in state.items()}
    if (claimed := size_of(tensors.values())) > member.size:
        raise ArtifactError(
            f"{member.name} has {claimed} bytes of tensors in {member.size} bytes, so some share what is stored; save "
            "clones of them"
        )
    return tensors


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Readable], advance: Callable[[], object] = lambda: None
) -> None:
    """Write like ``torch.save(tensors, file)``, with one tensor in memory at a time.

    ``file`` is open for reading and writing, and is written from its position on. ``advance`` is called after each
    tensor. The same tensors give the same bytes.
    """
    start = file.tell()
    with FakeTensorMode():
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, file)
    file.flush()
    end = file.tell()
    member = Member(file.name, OpenFile(file), start, end - start)
    checksums = {}
    for name, place in stored_tensors(member).items():
        data = read_bytes(name, tensors[name])
        checksums[place.start] = zlib.crc32(data)
        file.seek(start + place.start)
        file.write(data)
        del data  # before the next one is read
        advance()
    file.flush()
    _write_checksums(file, member, checksums)
    file.seek(end)


def _write_checksums(file: BinaryIO, member: Member, checksums: Mapping[int, int]) -> None:
    """Write CRC-32s, keyed by data offset, into zip data descriptors and directory (APPNOTE.TXT 4.3.9, 4.3.12)."""
    with member.open() as stream, zipfile.ZipFile(stream) as directory:
        entries, position = directory.infolist(), directory.start_dir
    for entry in entries:
        data = _start(member, entry)
        name_length, extra_length, comment_length = struct.unpack("<HHH", member.read(position + 28, 6))
        if data in checksums:
            for place in (data + entry.file_size + 4, position + 16):
                os.pwrite(file.fileno(), struct.pack("<I", checksums[data]), member.offset + place)
        position += 46 + name_length + extra_length + comment_length


@contextmanager
def _restricted_torch() -> Iterator[None]:
    """Reset, in the block, the unpickler's list of allowed globals to torch's own, and mute its log of huge shapes."""
    added, log = torch.serialization.get_safe_globals(), logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)
        log.disabled = before


def _zip_records(member: Member) -> dict[int, zipfile.ZipInfo]:
    """Return the entries of the zip by offset of their data. Raises ArtifactError for a damaged or hostile file."""
    if member.size < 4 or member.read(0, 4) != b"PK\x03\x04":
        raise ArtifactError(
            f"{member.name} is empty, damaged or of a torch version before 1.6; expected the zip format of torch.save"
        )
    records = {}
    errors = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, struct.error)
    damaged = refusing(f"{member.name} is not a file of torch.save, or is damaged", *errors)
    with damaged, member.open() as file, zipfile.ZipFile(file) as directory:
        entries = directory.infolist()
        if len(entries) > MAX_RECORDS:
            raise ValueError(f"{len(entries)} entries, at most {MAX_RECORDS} expected")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"entry {entry.filename!r} is compressed or encrypted")
            start = _start(member, entry)
            if start + entry.file_size > member.size:
                raise ValueError(f"entry {entry.filename!r} reaches beyond the end")
            if entry.filename.lower().endswith("/data.pkl"):  # torch looks for names in either case
                if entry.file_size > MAX_PICKLE:
                    raise ValueError(f"a pickle of {entry.file_size} bytes, at most {MAX_PICKLE} expected")
                check_pickle(_content(member, start, entry))
            if entry.filename.endswith("/byteorder") and _content(member, start, entry) != b"little":
                raise ValueError("big-endian numbers")
            records[start] = entry
    return records


def _content(member: Member, start: int, entry: zipfile.ZipInfo) -> bytes:
    """Return the bytes of an uncompressed entry. Raises ValueError if its checksum differs."""
    content = bytes(member.read(start, entry.file_size))
    if entry.CRC and zlib.crc32(content) != entry.CRC:  # torch can be told to compute none, which leaves 0
        raise ValueError(f"entry {entry.filename!r} has another checksum than it says")
    return content


def _start(member: Member, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's data, behind its local header, whose lengths may differ from the directory's."""
    name_length, extra_length = struct.unpack("<HH", member.read(entry.header_offset + 26, 4))
    return entry.header_offset + 30 + name_length + extra_length


def check_pickle(data: bytes) -> None:
    """Raise ValueError for a small pickle that would keep torch busy for hours.

    torch searches messages with refused texts in quadratic time. It hashes and prints nested containers, and a few
    tuples that contain each other twice make a billion. Refused are long texts, and containers referred to twice.
    """
    containers: set[int] = set()
    last, stored = "", 0
    for opcode, argument, _ in pickletools.genops(data):
        if isinstance(argument, str | bytes) and len(argument) > MAX_NAME:
            raise ValueError(f"a text of {len(argument)} characters in its pickle, at most {MAX_NAME} expected")
        if opcode.name in PUTS:
            if last in CONTAINERS:
                containers.add(stored if argument is None else argument)
            stored += 1
        if opcode.name == "DUP" or (opcode.name in GETS and argument in containers):
            raise ValueError("a tuple, list or dict in its pickle that is referred to twice")
        last = opcode.name


def _located(member: Member, records: Mapping[int, zipfile.ZipInfo], name: object, value: object) -> StoredTensor:
    """Return the ``StoredTensor`` of the fake tensor ``value``. Raises ArtifactError if the file lacks its bytes."""
    if not isinstance(name, str):
        raise ArtifactError(
            f"{member.name} has a key of type {type(name).__name__}; expected a flat dict of tensors by name"
        )
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        raise ArtifactError(
            f"{member.name}: {name[:200]!r} is a {type(value).__name__}; expected a flat dict of dense tensors by name"
        )
    start = getattr(value.untyped_storage(), "_checkpoint_offset", None)
    size = value.dtype.itemsize
    span = (value.storage_offset() + span_of(value.shape, value.stride())) * size
    # numel beside the span: a stride of 0 would let a few bytes claim any shape
    if start not in records or max(span, value.numel() * size) > records[start].file_size:
        raise ArtifactError(
            f"{member.name}: tensor {name[:200]!r} claims bytes that the file does not hold; fetch it again"
        )
    first, shape, stride = start + value.storage_offset() * size, tuple(value.shape), tuple(value.stride())
    whole = first == start and span == records[start].file_size
    crc32 = records[start].CRC or None  # 0: saved without checksums
    return StoredTensor(member, first, shape, stride, value.dtype, crc32 if whole else None)
