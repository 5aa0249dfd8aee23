import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sd_quant.engines.onnx_input import onnx_files
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
from sd_quant.files.archive import whole_file
from sd_quant.inference.latents import read_latents
from sd_quant.interchange import gguf
from sd_quant.report.published import read_published
from sd_quant.report.summary import last_text, read_sweep
from sd_quant.stages.choose import decided
from sd_quant.stages.compare import images_of_run

pytestmark = pytest.mark.commit


def test_the_name_is_replaced_when_the_block_ends_well(tmp_path):
    path = tmp_path / "new/folder/file.txt"
    write_text(path, "old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent  # a rename must stay on one file system
    with atomic_path(path.parent / "whole") as temporary:
        write_text(temporary / "inner/a.txt", "whole")
    found = {file.relative_to(path.parent).as_posix() for file in path.parent.rglob("*") if file.is_file()}
    assert path.read_text() == "new" and found == {"file.txt", "whole/inner/a.txt"}


def test_what_a_name_points_at_is_on_the_disk_before_it_does(tmp_path, monkeypatch):
    """Else a machine that loses its power leaves an empty file under a final name."""
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append((os.fstat(file).st_ino, path.exists())))
    path = tmp_path / "file.txt"
    write_text(path, "new")
    assert flushed == [(path.stat().st_ino, False)]


@pytest.mark.parametrize("failure", [
    RuntimeError("no"), KeyboardInterrupt(), OSError(errno.EIO, "no"),
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "no"),
])  # fmt: skip
def test_a_failed_block_leaves_the_old_file_and_nothing_else_and_a_full_disk_names_the_file(tmp_path, failure):
    path = tmp_path / "file.txt"
    path.write_text("old")
    full = isinstance(failure, OSError) and failure.errno != errno.EIO
    said = r"the disk is full: .*file\.txt could not be written" if full else None
    raised = ResourceError if full else type(failure)
    with pytest.raises(raised, match=said), atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        raise failure
    with pytest.raises(raised), atomic_path(tmp_path / "folder") as temporary:
        (temporary / "inner").mkdir(parents=True)
        raise failure
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]


def test_what_a_killed_process_was_writing_goes_when_it_is_written_again(tmp_path):
    """What another writes at this moment stays, and so does what belongs to another machine, or to a user."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = process.pid
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_refuses_numbers_that_are_none(tmp_path, value):
    with pytest.raises(SdQuantError, match=rf"^record.json cannot be written, because psnr.values.1 \({value}\) in it"):
        write_json(tmp_path / "record.json", {"ssim": {}, "psnr": {"values": [1.0, value]}})
    assert not list(tmp_path.iterdir())


def test_room_is_asked_of_the_disk_that_a_path_will_be_on(tmp_path):
    check_room(tmp_path / "not/there/yet", 1)
    with pytest.raises(ResourceError, match=r"yet needs up to 1000000000.00 GB \(why\) and the disk has"):
        check_room(tmp_path / "not/there/yet", 1e18, " (why)")


READERS = {
    "a.npy": lambda path: read_latents(path, {1}, 8, 8),
    "a.pt": lambda path: read_latents(path, {1}, 8, 8),
    "a.onnx": onnx_files,
    "a.nemo": whole_file,
    "published.yaml": lambda path: read_published(path, "published.yaml"),
    "layers.csv": decided,
    "sweep.json": lambda path: read_sweep(path.parent),
    "images/full_precision/0000.png": lambda path: images_of_run(path.parents[2], ["a prompt"]),
}


class Waited(BaseException):
    """No reader catches it."""


@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe_in_place_of_a_file_of_somebody_else(tmp_path, name):
    def ring(*_):
        raise Waited

    before = signal.signal(signal.SIGALRM, ring)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    signal.alarm(5)
    try:
        with pytest.raises(SdQuantError):
            READERS[name](path)
        assert not gguf.recognizes(path) and last_text(path) == ""  # what only looks finds nothing
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
