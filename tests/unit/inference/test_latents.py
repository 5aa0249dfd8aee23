"""Noise from a file: the three kinds say the same, and what is no noise for these images is refused in a sentence."""

import hashlib
import re
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.inference.latents import FILE_READERS, digest_of, read_latents

pytestmark = pytest.mark.commit

NOISE = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0))


class Code:
    def __reduce__(self):
        return pytest.fail, ("a pickle was executed",)


def write(path, held):
    """A file of its kind with a tensor, or with what else it can hold."""
    if path.suffix == ".pt":
        torch.save(held, path)
    elif path.suffix == ".npy":
        np.save(path, held)
    else:
        save_file(held if isinstance(held, dict) else {"latents": held}, path)
    return path


@pytest.mark.parametrize(("kind", "held"), [
    (".pt", NOISE.half()), (".npy", NOISE.double()), (".safetensors", NOISE), (".SafeTensors", NOISE.half()),
    (".pt", torch.nn.Parameter(NOISE)),
])  # fmt: skip
def test_every_kind_of_file_holds_the_same_noise(tmp_path, kind, held):
    found = read_latents(write(tmp_path / f"noise{kind}", held), {1, 2}, 8, 16)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert torch.equal(found, held.float())
    assert digest_of(found) == hashlib.sha256(held.detach().float().numpy().tobytes()).hexdigest()


def with_one(number: float) -> torch.Tensor:
    noise = NOISE.clone()
    noise[1, 2, 3, 4] = number
    return noise


SIXTEEN_TB = torch.zeros(1).as_strided((2, 4, 2**20, 2**19), (0, 0, 0, 0))  # by the strides of four bytes


@pytest.mark.parametrize(("kind", "held", "numbers", "error", "sentence"), [
    *((kind, torch.zeros(shape), numbers, ConfigError,
       re.escape(f"{kind} holds a tensor {list(shape)}, expected [{expected}, channels, 8, 16]"))
      for kind, shape, numbers, expected in (
          (".pt", (2, 4, 8, 16), {1, 3}, "1 or 3"), (".npy", (1, 4, 8, 16), {3}, "3"),
          (".safetensors", (2, 4, 16, 8), {1, 2}, "1 or 2"), (".npy", (4, 8, 16), {1, 2}, "1 or 2"))),
    (".pt", SIXTEEN_TB, {2}, ConfigError, "holds a tensor"),  # before it is computed with
    *((".npy", with_one(number), {2}, ArtifactError, "holds NaN or infinity; make the noise again$")
      for number in (torch.nan, torch.inf)),
    *((kind, torch.ones(2, 4, 8, 16, dtype=torch.int64), {2}, ArtifactError,
       "holds numbers of torch.int64, expected one tensor of fp32 or fp16") for kind in FILE_READERS),
    (".pt", {"latents": NOISE}, {2}, ArtifactError, "holds a dict, expected one tensor"),
    (".safetensors", {"a": NOISE, "b": NOISE.clone()}, {2}, ArtifactError, "cannot be read as one tensor"),
    (".npz", NOISE, {2}, ConfigError, "expected a name that ends with .pt, .npy, .safetensors$"),
])  # fmt: skip
def test_what_is_not_one_tensor_of_finite_numbers_for_these_images_is_refused(
    tmp_path, kind, held, numbers, error, sentence
):
    with pytest.raises(error, match=sentence):
        read_latents(write(tmp_path / f"noise{kind}", held), numbers, 8, 16)


@pytest.mark.parametrize("kind", FILE_READERS)
@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b""], ids=["cut", "empty"])
def test_a_damaged_file_is_refused(tmp_path, kind, damage):
    path = write(tmp_path / f"noise{kind}", NOISE)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtifactError, match="cannot be read as one tensor"):
        read_latents(path, {2}, 8, 16)


def test_gigabytes_that_are_not_in_the_file_are_refused(tmp_path):
    """Compressed records, records that overlap, and a header of numpy's that claims 400 GB."""
    torch.save(torch.zeros(2, 4, 64, 128), tmp_path / "whole.pt")
    with ZipFile(tmp_path / "whole.pt") as whole, ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for record in whole.infolist():
            packed.writestr(record.filename, whole.read(record))
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000, 1000, 1000), }"
    header += b" " * (127 - 10 - len(header)) + b"\n"
    (tmp_path / "claimed.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(64))
    with ZipFile(tmp_path / "overlapping.pt", "w") as archive:
        archive.writestr("a/data.pkl", bytes(10_000))
        archive.filelist *= 10
    for name in ("packed.pt", "claimed.npy", "overlapping.pt"):
        with pytest.raises(ArtifactError, match=rf"{name} cannot be read as one tensor \(ValueError\)"):
            read_latents(tmp_path / name, {2}, 64, 128)
    assert (tmp_path / "packed.pt").stat().st_size < 20_000


LONG_TEXT = b"X" + (50_000).to_bytes(4, "little") + b"x" * 50_000 + b"0"
LISTS_OF_LISTS = b"]q\xc8" + b"]q\xc9(h\xc8h\xc8eh\xc9q\xc8" * 45  # each holds the one before it twice
SHORT_LISTS = b"]q\xc8" + b"]q\xc9h\xc8ah\xc80"


@pytest.mark.parametrize("added", [LONG_TEXT, LISTS_OF_LISTS, SHORT_LISTS])
def test_a_pickle_that_keeps_torch_busy_is_not_unpickled(tmp_path, monkeypatch, added):
    """With a file of 50 kB or of 4, for minutes and for ever; learnt fuzzing found both."""
    torch.save(NOISE, tmp_path / "noise.pt")
    with ZipFile(tmp_path / "noise.pt") as whole, ZipFile(tmp_path / "busy.pt", "w") as busy:
        for record in whole.infolist():
            content = whole.read(record)
            if record.filename.endswith("data.pkl"):
                content = content[:2] + added + content[2:]
            busy.writestr(record.filename, content)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was given the pickle"))
    with pytest.raises(ArtifactError, match=r"busy.pt cannot be read as one tensor \(ValueError\)"):
        read_latents(tmp_path / "busy.pt", {2}, 8, 16)


def test_nothing_is_executed(tmp_path):
    torch.save(Code(), tmp_path / "code.pt")
    np.save(tmp_path / "code.npy", np.array([Code()], dtype=object), allow_pickle=True)
    for name in ("code.pt", "code.npy"):
        with pytest.raises(ArtifactError) as refused:
            read_latents(tmp_path / name, {2}, 8, 16)
        assert "unsafe" not in str(refused.value) and "weights_only" not in str(refused.value)
