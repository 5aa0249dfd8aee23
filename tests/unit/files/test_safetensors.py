"""Safetensors files against the library of that name, and headers that lie."""

import json

import pytest
import safetensors.torch
import torch

from sd_quant.errors import ArtifactError
from sd_quant.files import safetensors as safetensors_file
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_safetensors, write_safetensors
from sd_quant.files.tensors import lazy
from tests.networks import assert_same

pytestmark = pytest.mark.commit

TENSORS = {
    "half": torch.arange(3).to(torch.float16),  # 6 bytes: what is behind it must not start there
    "wide": torch.linspace(0, 1, 24).reshape(2, 3, 4),
    "brain": torch.arange(5).to(torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "ids": torch.arange(7)[None],
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.empty(0, 4),
}


def read(path) -> dict[str, torch.Tensor]:
    return {name: tensor.read() for name, tensor in read_safetensors(whole_file(path)).items()}


def test_the_library_reads_what_we_write(tmp_path):
    path = tmp_path / "a.safetensors"
    done = []
    write_safetensors(path, {name: lazy(tensor) for name, tensor in TENSORS.items()}, lambda: done.append(1))
    assert len(done) == len(TENSORS) and list(tmp_path.iterdir()) == [path]
    assert_same(safetensors.torch.load_file(path), TENSORS)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_same(read(path), TENSORS)
    places = read_safetensors(whole_file(path))
    assert list(places) == list(TENSORS)
    assert not any(place.start % place.dtype.itemsize for place in places.values())  # aligned when mapped


def test_a_dtype_without_a_name(tmp_path):
    with pytest.raises(ArtifactError, match="'a' is stored as torch.complex64"):
        write_safetensors(tmp_path / "a", {"a": lazy(torch.ones(2, dtype=torch.complex64))})
    assert not list(tmp_path.iterdir())


def packed(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), data_offsets=(0, 8)) -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "has 0 bytes"), (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        (packed(entry())[:40], "refers to bytes 8 to"), (packed(entry()) + b"\0", "bytes described"),
        (packed(b"garbage"), "JSONDecodeError"), (packed(b"[" * 100_000), "RecursionError"),
        (packed(b"\xff"), "UnicodeDecodeError"), (packed([1]), "TypeError|AttributeError"),
        (packed({"a": 1}), "TypeError"), (packed(entry("Q4")), "KeyError: 'Q4'"),
        (packed(json.dumps(entry()).encode().replace(b'{"a"', b'{"a": {}, "a"', 1)), "a name stands twice"),
        (packed(entry(shape=(3,))), "8 bytes for a tensor of shape"), (packed(entry(shape=(2.0,))), "that is none"),
        (packed(entry(shape=(True, 2))), "that is none"), (packed(entry(shape=[1] * 70 + [2])), "that is none"),
        (packed(entry(shape=(0, 2**62, 2**62), data_offsets=(4, 4))), "that is none"),
        (packed(entry(shape=(0, 10**400), data_offsets=(0, 0)), b""), "that is none"),
        (packed(entry(data_offsets=(-8, 0))), "that is none"),
        (packed(entry(data_offsets=(0, 4, 8))), "too many values"), (packed(entry() | {"b": entry()["a"]}), "overlap"),
        (packed(entry() | {"b": entry(data_offsets=(12, 20))["a"]}, bytes(20)), "gap at byte"),
        (packed(entry(shape=(2**40,), data_offsets=(0, 2**42))), "bytes described"),
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path, content, message):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        read_safetensors(whole_file(tmp_path / "a.safetensors"))


def test_a_header_of_any_size_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_HEADER", 10)
    (tmp_path / "a").write_bytes(packed(entry()))
    with pytest.raises(ArtifactError, match="at most 10 expected"):
        read_safetensors(whole_file(tmp_path / "a"))


def test_what_the_library_refuses_is_refused_here(tmp_path):
    """Every byte of a header changed: nothing is accepted that the judge refuses, and then with the judge's numbers."""
    path = tmp_path / "a.safetensors"
    whole = safetensors.torch.save({"a": torch.arange(2.0), "b": torch.arange(3).to(torch.float16)})
    accepted = 0
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        for value in b'0}"':
            content = whole[:position] + bytes([value]) + whole[position + 1 :]
            path.write_bytes(content)
            try:
                found = read(path)
            except ArtifactError:
                continue
            accepted += 1
            assert_same(found, safetensors.torch.load(content))
    assert accepted
