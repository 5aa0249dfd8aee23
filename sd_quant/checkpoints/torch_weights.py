"""The tensors of a ``torch.save`` file, found without executing its pickle and read one at a time.

``torch.load(weights_only=True)`` under ``FakeTensorMode`` yields each tensor's dtype, shape, strides and the offset of
its bytes, but no bytes. The offsets come from data that the file's author controls, so each is compared with the zip
directory before anything is read. The road not taken is ``torch.load(mmap=True)``: it wants a file of its own, which
would mean extracting 14 GB, and it leaves mapped pages where a file cut later kills the process.
"""

import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_quant.checkpoints.archive import Member
from sd_quant.errors import ArtifactError

MAX_PICKLE = 64 * 2**20  # SDXL's has about 0.4 MB: names and shapes, no numbers
MAX_RECORDS = 100_000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its member. ``start`` is the byte of its first element; ``stride`` counts elements."""

    member: Member
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """A contiguous copy on the CPU."""
        span = _span(self.shape, self.stride)
        if span == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self.member.read(self.start, span * self.dtype.itemsize), dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


def stored_tensors(member: Member) -> dict[str, StoredTensor]:
    """Every tensor of a flat state dict. Raises ArtifactError when the file is anything else or asks to run code."""
    records = _zip_records(member)
    try:
        with _torch_safe_globals_only(), FakeTensorMode(), member.open() as file:
            state = torch.load(file, weights_only=True)
    except ArtifactError:
        raise
    except Exception as error:  # the unpickler and the zip reader raise whatever the bytes lead them to
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        found = f"its pickle asks for {wanted[1][:200]!r}, which was not run" if wanted else "its pickle cannot be read"
        # without torch's own text, which advises to switch the protection off
        raise ArtifactError(
            f"{member.name} is not a plain file of tensors: {found}; save it again as torch.save(model.state_dict())"
        ) from None
    if not isinstance(state, dict) or not state:
        raise ArtifactError(f"{member.name} holds a {type(state).__name__}; expected a non-empty dict of tensors")
    return {name: _located(member, records, name, value) for name, value in state.items()}


@contextmanager
def _torch_safe_globals_only() -> Iterator[None]:
    """Libraries widen the list of what an unpickler may call; here only torch's own list counts."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)


def _zip_records(member: Member) -> dict[int, int]:
    """Size of each uncompressed zip entry by the offset of its data."""
    if member.size < 4 or member.read(0, 4) != b"PK\x03\x04":
        raise ArtifactError(
            f"{member.name} is empty, damaged or of a torch version before 1.6; expected the zip format of torch.save"
        )
    records = {}
    try:
        with member.open() as file, zipfile.ZipFile(file) as directory:
            entries = directory.infolist()
            if len(entries) > MAX_RECORDS:
                raise ValueError(f"{len(entries)} entries, at most {MAX_RECORDS} expected")
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise ValueError(f"entry {entry.filename!r} is compressed or encrypted")
                if entry.filename.endswith("/data.pkl") and entry.file_size > MAX_PICKLE:
                    raise ValueError(f"a pickle of {entry.file_size} bytes, at most {MAX_PICKLE} expected")
                if entry.filename.endswith("/byteorder") and directory.read(entry) != b"little":
                    raise ValueError("big-endian numbers")
                # the name and the extra field are as long as the local header says, not as the directory says
                name_length, extra_length = struct.unpack("<HH", member.read(entry.header_offset + 26, 4))
                start = entry.header_offset + 30 + name_length + extra_length
                if start + entry.file_size > member.size:
                    raise ValueError(f"entry {entry.filename!r} reaches beyond the end")
                records[start] = entry.file_size
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError, struct.error) as error:
        raise ArtifactError(
            f"{member.name} is not a file of torch.save, or is damaged ({error}); fetch it again"
        ) from error
    return records


def _located(member: Member, records: dict[int, int], name: object, value: object) -> StoredTensor:
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
    span = (value.storage_offset() + _span(value.shape, value.stride())) * size
    # numel beside the span: a stride of 0 would let a few bytes claim any shape
    if span > records.get(start, -1) or value.numel() * size > records[start]:
        raise ArtifactError(
            f"{member.name}: tensor {name[:200]!r} claims bytes that the file does not hold; fetch it again"
        )
    first = start + value.storage_offset() * size
    return StoredTensor(member, first, tuple(value.shape), tuple(value.stride()), value.dtype)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
