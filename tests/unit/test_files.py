import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.files import (
    HOST,
    atomic_path,
    check_room,
    open_regular,
    read_regular,
    temporary_folder,
    write_json,
    write_text,
)

pytestmark = pytest.mark.commit


def test_the_name_is_replaced_when_the_block_ends_well(tmp_path):
    path = tmp_path / "new/folder/file.txt"
    write_text(path, "old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent  # a rename must stay on one file system
    assert path.read_text() == "new"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]


def test_what_a_name_points_at_is_on_the_disk_before_it_does(tmp_path, monkeypatch):
    """Else a machine that loses its power leaves an empty file under a final name."""
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append((os.fstat(file).st_ino, path.exists())))
    path = tmp_path / "file.txt"
    write_text(path, "new")
    assert flushed == [(path.stat().st_ino, False)]


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.EIO, "no")])
def test_a_failed_block_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(failure)), atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        raise failure
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_killed_process_was_writing_goes_when_it_is_written_again(tmp_path, dead):
    """What another writes at this moment stays, and so does what belongs to another machine, or to a user."""
    stays = [
        f".a.txt.{HOST}-{os.getppid()}.part", f".a.txt.elsewhere-{dead}.part", ".a.txt.secret.part",
        f".unfinished-{HOST}-{os.getppid()}-x", f".unfinished-elsewhere-{dead}-x", ".unfinished-thesis",
    ]  # fmt: skip
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / f".unfinished-{HOST}-{dead}-x/deep").mkdir(parents=True)
        for name in (*stays, f".a.txt.{HOST}-{dead}.part", f".b.txt.{HOST}-{dead}.part"):
            (folder / name).write_text("half")
    write_text(tmp_path / "a/a.txt", "whole")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {*stays, "a.txt"}
    with temporary_folder(tmp_path / "b") as made:
        assert {path.name for path in (tmp_path / "b").iterdir()} == {*stays, Path(made).name}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_a_regular_file_is_read_and_nothing_is_waited_for(tmp_path, make):
    """An open pipe without a writer would wait for ever, and /dev/zero never ends."""
    make(tmp_path / "a")
    with pytest.raises(OSError, match="no regular file|Is a directory"):
        open_regular(tmp_path / "a")


def test_a_file_is_read_up_to_a_size(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link", 4) == b"1234"
    with pytest.raises(OSError, match="no regular file of at most 3 bytes"):
        read_regular(tmp_path / "a", 3)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_resource_error_that_names_the_file(tmp_path, code):
    path = tmp_path / "file.txt"
    with pytest.raises(ResourceError, match=r"the disk is full: .*file\.txt could not be written"):
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise OSError(code, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_put_in_place_whole_or_not_at_all(tmp_path):
    with pytest.raises(ValueError), atomic_path(tmp_path / "folder") as temporary:
        write_text(temporary / "inner/a.txt", "half")
        raise ValueError
    assert not list(tmp_path.iterdir())
    with atomic_path(tmp_path / "folder") as temporary:
        write_text(temporary / "inner/a.txt", "whole")
    assert (tmp_path / "folder/inner/a.txt").read_text() == "whole" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_refuses_numbers_that_are_none(tmp_path, value):
    with pytest.raises(SdQuantError, match=rf"^record.json cannot be written, because psnr.values.1 \({value}\) in it"):
        write_json(tmp_path / "record.json", {"ssim": {}, "psnr": {"values": [1.0, value]}})
    assert not list(tmp_path.iterdir())


def test_room_is_asked_of_the_disk_that_a_path_will_be_on(tmp_path):
    check_room(tmp_path / "not/there/yet", 1)
    with pytest.raises(ResourceError, match=r"yet needs up to 1000000000.00 GB \(why\) and the disk has"):
        check_room(tmp_path / "not/there/yet", 1e18, " (why)")
