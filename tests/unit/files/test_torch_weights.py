"""Files of torch.save: tensors are found with no bytes read, and nothing in a pickle ever runs."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sd_quant.errors import ArtifactError
from sd_quant.files import torch_weights
from sd_quant.files.archive import open_members
from sd_quant.files.tensors import LazyTensor, lazy
from sd_quant.files.torch_weights import MAX_PICKLE, stored_tensors, write_tensors
from tests.networks import assert_same

pytestmark = pytest.mark.commit


def saved(value: object, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def stored(folder: Path, content: bytes):
    (folder / "weights").write_bytes(content)
    return stored_tensors(open_members(folder)["weights"])


def rewritten(content: bytes, change, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The same zip after ``change(name, data)``; what it returns replaces the data."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w", compression) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, change(entry.filename, source.read(entry)))
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reads_what_was_saved(tmp_path, dtype):
    base = torch.arange(24).reshape(2, 3, 4).to(dtype)
    state = {
        "plain": base,
        "view": base[1:, 1:],
        "transposed": base[0].t(),
        "expanded": base[:1, :1, :1].expand(1, 1, 1),
        "channels_last": torch.arange(48).reshape(1, 3, 4, 4).to(dtype).contiguous(memory_format=torch.channels_last),
        "scalar": base[1, 2, 3],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base.float(), requires_grad=False),
    }
    found = stored(tmp_path, saved(state))
    read = {name: tensor.read() for name, tensor in found.items()}
    assert_same(read, state)
    assert all(tensor.is_contiguous() for tensor in read.values())


class Runs:
    def __init__(self, function: Callable, *arguments: str):
        self.run = function, arguments

    def __reduce__(self):
        return self.run


@pytest.mark.parametrize(
    "save", [saved, pickle.dumps, lambda value: saved(value, _use_new_zipfile_serialization=False)]
)
def test_a_malicious_pickle_does_not_run(tmp_path, save):
    canary = tmp_path / "canary"
    runs = Runs(os.mkdir, str(canary))
    pickle.loads(pickle.dumps(runs))  # the canary sings where a pickle does run
    canary.rmdir()
    with pytest.raises(ArtifactError) as caught:
        stored(tmp_path, save({"a": torch.ones(2), "b": runs}))
    assert not canary.exists()
    assert "weights_only" not in str(caught.value)
    if save is saved:
        assert caught.value.__suppress_context__  # torch's own error, which gives that advice, is not shown
        assert f"asks for '{os.mkdir.__module__}.mkdir', which was not run" in str(caught.value)


def test_what_other_libraries_allow_is_not_allowed_here(tmp_path):
    """Of a module that torch does not block of its own accord, as it does ``os``."""
    canary = tmp_path / "canary"
    content = saved({"a": Runs(shutil.copyfile, __file__, str(canary))})
    with torch.serialization.safe_globals([shutil.copyfile]):
        torch.load(io.BytesIO(content), weights_only=True)
        assert canary.exists()  # so much for the protection of torch
        canary.unlink()
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(ArtifactError, match="asks for 'shutil.copyfile', which was not run"):
            stored(tmp_path, content)
        assert shutil.copyfile in before and before <= set(torch.serialization.get_safe_globals())
    assert not canary.exists()


WHOLE = saved({"a": torch.arange(5000)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "weights") for content in (b"", b"PK", b"PK\x03\x04" + bytes(5000), b"\x80\x02garbage" * 50)),
        *((WHOLE[:length], "damaged") for length in (len(WHOLE) - 10, len(WHOLE) // 2, 600)),
        (rewritten(WHOLE, lambda name, data: data[:100] if "/data/" in name else data), "claims bytes that the file"),
        (rewritten(WHOLE, lambda name, data: b"big" if name.endswith("/byteorder") else data), "big-endian"),
        (rewritten(WHOLE, lambda name, data: data, zipfile.ZIP_DEFLATED), "compressed"),
        (saved([torch.ones(2)]), "holds a list"), (saved({}), "non-empty dict"),
        (saved({"state_dict": {"a": torch.ones(2)}}), "'state_dict' is a dict"), (saved({"a": 1.0}), "'a' is a float"),
        (saved({1: torch.ones(2)}), "key of type int"), (saved({"a": torch.eye(3).to_sparse()}), "dense tensors"),
        (saved({"a": torch.ones(1).expand(10**6)}), "claims bytes"),
    ],
)  # fmt: skip
def test_files_that_are_damaged_or_hold_anything_but_dense_tensors(tmp_path, content, message):
    with pytest.raises(ArtifactError, match=message):
        stored(tmp_path, content)


def test_a_pickle_longer_than_names_and_shapes_take_is_not_read(tmp_path, monkeypatch):
    def grown(name: str, data: bytes) -> bytes:
        return data + bytes(MAX_PICKLE) if name.endswith("data.pkl") else data

    monkeypatch.setattr(torch_weights, "check_pickle", lambda data: pytest.fail(f"{len(data)} bytes were read"))
    with pytest.raises(ArtifactError, match=f"a pickle of .* bytes, at most {MAX_PICKLE} expected"):
        stored(tmp_path, rewritten(saved({"a": torch.arange(50)}), grown))
    assert MAX_PICKLE < 20 * 2**20  # of opcodes that take minutes


STATE = {
    "half": torch.arange(12).reshape(3, 4).half(), "brain": torch.linspace(-1, 1, 5).bfloat16(),
    "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "large": torch.arange(2**18).float(),
}  # fmt: skip


def write_to(path: Path, tensors: dict, before: bytes = b"") -> bytes:
    with path.open("w+b") as file:
        file.write(before)
        write_tensors(file, tensors)
        file.write(b"behind")
    content = path.read_bytes()
    assert content.startswith(before) and content.endswith(b"behind")
    return content[len(before) : -len(b"behind")]


@pytest.mark.parametrize("before", [b"", bytes(512)])
def test_torch_loads_what_was_written_one_tensor_at_a_time(tmp_path, before):
    content = write_to(tmp_path / "weights", {name: lazy(tensor) for name, tensor in STATE.items()}, before)
    assert_same(torch.load(io.BytesIO(content), weights_only=True), STATE)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None  # the checksums are those of the numbers, not of the room left for them
    assert len(content) == len(saved(STATE))


def test_a_tensor_that_is_not_what_was_announced(tmp_path):
    wrong = LazyTensor((3,), torch.float32, lambda: torch.ones(4))
    with (tmp_path / "weights").open("w+b") as file, pytest.raises(ValueError, match=r"was to be \(3,\)"):
        write_tensors(file, {"wrong": wrong})


def place_of(content: bytes, tensor: torch.Tensor) -> int:
    return content.index(tensor.numpy().tobytes())


def test_a_flipped_bit_is_noticed_when_it_is_read(tmp_path):
    whole, other = torch.arange(100.0) + 0.5, torch.arange(100.0) + 1000
    content = bytearray(saved({"whole": whole, "other": other, "view": torch.arange(2000.0, 2100)[3:]}))
    content[place_of(content, whole) + 17] ^= 1
    found = stored(tmp_path, bytes(content))
    assert torch.equal(found["other"].read(), other) and len(found["view"].read()) == 97
    with pytest.raises(ArtifactError, match=r"weights is damaged: the bytes from \d+ on do not have the checksum"):
        found["whole"].read()


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        content = bytearray(saved({"a": torch.arange(100.0)}))
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(stored(tmp_path, bytes(content))["a"].read(), torch.arange(100.0))
    content = bytearray(saved({"a": torch.arange(100.0)}))
    content[content.index(b"little")] ^= 1
    with pytest.raises(ArtifactError, match="byteorder' has another checksum than it says"):
        stored(tmp_path, bytes(content))


def test_tensors_in_one_storage_are_no_larger_together_than_the_file(tmp_path):
    storage = torch.arange(10_000.0)
    apart = {str(start): storage[start : start + 1000] for start in range(0, 10_000, 1000)}
    found = stored(tmp_path, saved(apart))
    assert all(torch.equal(found[name].read(), tensor) for name, tensor in apart.items())
    with pytest.raises(ArtifactError, match="has 120000 bytes of tensors in .* so some share what is stored"):
        stored(tmp_path, saved({str(index): storage for index in range(3)}))
