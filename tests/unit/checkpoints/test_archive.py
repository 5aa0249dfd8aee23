"""Damaged and hostile tar archives: each is refused as a whole, with its reason, and nothing is written anywhere."""

import gzip
import io
import tarfile

import pytest

from sd_quant.checkpoints import archive
from sd_quant.checkpoints.archive import open_members
from sd_quant.errors import ArtifactError, ConfigError


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


@pytest.fixture
def refusal(tmp_path):
    """Opens these bytes, checks that they are refused and leave no file behind, and gives the message."""

    def refuse(content: bytes) -> str:
        path = tmp_path / "some" / "a.nemo"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        with pytest.raises(ArtifactError) as caught:
            open_members(path)
        assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]
        return str(caught.value)

    return refuse


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


def test_reads_an_extracted_directory(tmp_path):
    (tmp_path / "one").write_bytes(b"12345")
    assert bytes(open_members(tmp_path)["one"].read(1, 3)) == b"234"


def test_a_member_cannot_be_read_beyond_its_end(tmp_path):
    path = tmp_path / "a.nemo"
    path.write_bytes(tar_bytes(file("./one", b"12345"), file("./two", b"secret")))
    member = open_members(path)["one"]
    assert member.open().read() == b"12345"
    with pytest.raises(ArtifactError, match="refers to bytes 0 to 6"):
        member.read(0, 6)


def test_missing_path_is_a_wrong_knob(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        open_members(tmp_path / "absent.nemo")


@pytest.mark.parametrize("name", ["../x", "./a/../../x", "/x", "..", "a\\..\\x"])
def test_names_that_leave_the_archive(refusal, name):
    assert "points outside the archive" in refusal(tar_bytes(file(name)))


def test_name_that_leaves_the_archive_by_an_extended_header(refusal):
    info, content = file("./harmless")
    info.pax_headers = {"path": "../x"}
    assert "'../x' points outside" in refusal(tar_bytes((info, content)))


@pytest.mark.parametrize(
    "kind, message",
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "tar type"),
        (tarfile.BLKTYPE, "tar type"),
        (tarfile.FIFOTYPE, "tar type"),
        (tarfile.GNUTYPE_SPARSE, "tar type"),
        (tarfile.CONTTYPE, "tar type"),
    ],
)
def test_members_that_are_not_files(refusal, kind, message):
    assert message in refusal(tar_bytes(file("./good"), link("./model_weights.ckpt", kind)))


@pytest.mark.parametrize("second", ["./one", "one", ".//one", "././one"])
def test_duplicates(refusal, second):
    assert "'one' twice" in refusal(tar_bytes(file("./one"), file(second)))


def test_cut_inside_a_member(refusal):
    whole = tar_bytes(file("./one", b"1" * 2000), file("./two", b"2" * 5000))
    assert "cut inside './two'" in refusal(whole[: 512 + 2048 + 512 + 1000])


def test_cut_at_a_member_boundary(refusal):
    whole = tar_bytes(file("./one", b"1" * 2000), file("./two", b"2" * 5000))
    assert "without the end-of-archive mark" in refusal(whole[: 512 + 2048])


def test_cut_after_half_of_the_end_mark(refusal):
    whole = tar_bytes(file("./one", b"1" * 512))
    assert "half an end-of-archive mark" in refusal(whole[: 512 + 512 + 512])


def test_an_extended_header_belongs_to_a_member(refusal):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 0
    assert "ends behind an extended tar header that is for no member" in refusal(info.tobuf() + bytes(1024))


def test_cut_gzip(refusal):
    assert "damaged or cut gzip" in refusal(gzip.compress(tar_bytes(file("./one", bytes(range(256)) * 40)))[:-20])


def test_gzip_bomb(refusal, monkeypatch):
    monkeypatch.setattr(archive, "GZIP_SLACK", 0)
    bomb = gzip.compress(tar_bytes(file("./one", bytes(2**22))))
    assert "unpacks to more than" in refusal(bomb)


def test_a_tebibyte_declared_by_a_small_file(refusal):
    info, _ = file("./model_weights.ckpt")
    info.size = 2**40
    header = info.tobuf(tarfile.GNU_FORMAT)
    assert f"{2**40} bytes declared" in refusal(header + bytes(10240 - len(header)))


def test_a_tebibyte_of_sparse_member(refusal):
    info, content = file("./model_weights.ckpt")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}
    assert "sparse member" in refusal(tar_bytes((info, content)))


@pytest.mark.parametrize("size", ["-1", "x", str(2**62)])
def test_sizes_that_extended_headers_claim(refusal, size):
    info, content = file("./one")
    info.pax_headers = {"size": size}
    message = refusal(tar_bytes((info, content)))
    assert "no valid tar header" in message if size == "x" else "bytes declared" in message


def test_an_extended_header_of_any_size_is_not_read(refusal):
    info, content = file("./one")
    info.pax_headers = {"comment": "x" * 2**17}
    assert "extended tar header of" in refusal(tar_bytes((info, content)))


def test_too_many_members(refusal):
    assert "more than 64 members" in refusal(tar_bytes(*(file(f"./{index}") for index in range(200))))


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04" + bytes(2000), bytes(range(256)) * 8])
def test_files_that_are_no_archive(refusal, content):
    assert "tar" in refusal(content)
