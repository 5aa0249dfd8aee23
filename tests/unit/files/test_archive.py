"""Damaged and hostile tar archives: each is refused as a whole, with its reason, and nothing is written anywhere."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from sd_quant.errors import ArtifactError
from sd_quant.files import archive
from sd_quant.files.archive import open_members

pytestmark = pytest.mark.commit


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tar_format) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def file(name: str, content: bytes = b"content", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def link(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return file(name, b"", type=kind, linkname="/etc/passwd")


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_members(path)
    return str(caught.value)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_members_of_every_tar_format(tmp_path, tar_format, pack):
    directory = file("./", b"", type=tarfile.DIRTYPE)
    path = tmp_path / "a.nemo"
    # a float mtime makes tarfile write an extended header, as it does for NeMo
    members = [directory, file("./one", b"1" * 700, mtime=1.5), file("./two", b"")]
    path.write_bytes(pack(tar_bytes(*members, tar_format=tar_format)))
    found = open_members(path)
    assert {name: bytes(member.read(0, member.size)) for name, member in found.items()} == {
        "one": b"1" * 700,
        "two": b"",
    }


WHOLE = tar_bytes(file("./one", b"1" * 2000), file("./two", b"2" * 5000))
EMPTY_HEADER = file("x", b"", type=tarfile.XHDTYPE)[0].tobuf() + bytes(1024)
TEBIBYTE = file("./model_weights.ckpt")[0]
TEBIBYTE.size = 2**40
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}


def extended(**headers: str) -> bytes:
    return tar_bytes(file("./one", pax_headers=headers))


@pytest.mark.parametrize(
    ("message", "contents"),
    [
        ("points outside the archive", [tar_bytes(file(n)) for n in ("../x", "./a/../../x", "/x", "..", "a\\..\\x")]),
        ("'../x' points outside", [extended(path="../x")]),
        ("a symbolic link", [tar_bytes(file("./good"), link("./model_weights.ckpt", tarfile.SYMTYPE))]),
        ("a hard link", [tar_bytes(file("./good"), link("./model_weights.ckpt", tarfile.LNKTYPE))]),
        ("tar type", [tar_bytes(link("./device", kind)) for kind in (tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE)]),
        ("'one' twice", [tar_bytes(file("./one"), file(second)) for second in ("one", ".//one", "././one")]),
        ("cut inside './two'", [WHOLE[: 512 + 2048 + 512 + 1000]]),
        ("without the end-of-archive mark", [WHOLE[: 512 + 2048]]),
        ("half an end-of-archive mark", [tar_bytes(file("./one", b"1" * 512))[: 512 + 512 + 512]]),
        ("ends behind an extended tar header that is for no member", [EMPTY_HEADER]),
        ("damaged or cut gzip", [gzip.compress(WHOLE)[:-20]]),
        (f"{2**40} bytes declared", [TEBIBYTE.tobuf(tarfile.GNU_FORMAT) + bytes(9728)]),
        ("sparse member", [extended(**SPARSE)]),
        ("bytes declared", [extended(size="-1"), extended(size=str(2**62))]),
        ("no valid tar header", [extended(size="x")]),
        ("extended tar header of", [extended(comment="x" * 2**17)]),
        ("more than 64 members", [tar_bytes(*(file(f"./{index}") for index in range(200)))]),
        ("tar", [b"", b"x", b"PK\x03\x04" + bytes(2000), bytes(range(256)) * 8]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_archive_is_refused_with_its_reason_and_leaves_no_file(tmp_path, message, contents):
    path = tmp_path / "some" / "a.nemo"
    path.parent.mkdir()
    for content in contents:
        path.write_bytes(content)
        assert message in refusal(path)
        assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]


def test_gzip_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "GZIP_SLACK", 0)
    (tmp_path / "a.nemo").write_bytes(gzip.compress(tar_bytes(file("./one", bytes(2**22)))))
    assert "unpacks to more than" in refusal(tmp_path / "a.nemo")
