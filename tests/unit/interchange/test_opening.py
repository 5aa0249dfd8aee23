"""Which reader opens a candidate, and what is refused before any is asked."""

from types import SimpleNamespace

import pytest

from sd_quant import candidates
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.interchange import READERS, Reader
from sd_quant.interchange.opening import reader_of


@pytest.fixture
def readers(monkeypatch):
    """``readers(name=whether it recognizes everything)``: in place of the usual ones."""

    def use(package=None, **recognizing):
        for name in list(READERS):
            monkeypatch.delitem(READERS, name)
        modules = {}
        for name, known in recognizing.items():
            monkeypatch.setitem(READERS, name, Reader(name, f"files of {name}", package))
            modules[f"{candidates.__name__}.{name}"] = SimpleNamespace(recognizes=lambda path, known=known: known)
        monkeypatch.setattr(candidates, "import_module", modules.__getitem__)

    return use


def test_each_reader_has_its_module_with_both_functions():
    for name, reader in READERS.items():
        assert reader.name == name and callable(reader.module.read) and callable(reader.recognizes)


@pytest.mark.parametrize(
    "known, name, error, words",
    [
        ({"gguf": False, "sdnq": False}, "a.bin", ConfigError,
         "a.bin is of no kind .* files of gguf; files of sdnq; or a run of quantize"),
        ({"gguf": False}, "b.bin", ConfigError, "the candidate .*b.bin does not exist"),
        ({"gguf": True, "package": "no_such_package"}, "a.bin", ResourceError,
         "no_such_package, which is not installed"),
    ],
    ids=["unknown", "absent", "package"],
)  # fmt: skip
def test_what_cannot_be_opened_is_refused(readers, tmp_path, known, name, error, words):
    readers(**known)
    (tmp_path / "a.bin").write_bytes(b"?")
    with pytest.raises(error, match=words):
        reader_of(tmp_path / name)


def test_a_file_with_two_meanings_is_refused(readers, tmp_path):
    readers(gguf=True, sdnq=True)
    with pytest.raises(ArtifactError, match=r"can be read in 2 ways \(gguf, sdnq\), expected one"):
        reader_of(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"GGUF", b"\x00" * 64, "é".encode() * 9], ids=len)
def test_no_reader_takes_what_is_none_of_theirs(tmp_path, content):
    """A glance never raises, and a folder's config may be anything."""
    for suffix in (".gguf", ".safetensors", ".bin"):
        (tmp_path / f"a{suffix}").write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_bytes(content)
    for path in (*tmp_path.iterdir(), tmp_path / "folder/config.json"):
        known = {name for name, reader in READERS.items() if reader.recognizes(path)}
        assert known <= {"gguf", "comfyui"}, path
