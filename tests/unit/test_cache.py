"""Files that runs share: made once, never half, never damaged, never by two at a time."""

import errno
import json
import multiprocessing
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from sd_quant import cache as module
from sd_quant.cache import MANIFEST, Cache, locked
from sd_quant.errors import ConfigError

pytestmark = pytest.mark.commit


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache", 1e9)


class Maker:
    """Writes two files and counts how often it was asked to."""

    def __init__(self, text: str = "text"):
        self.text, self.calls = text, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "a.txt").write_text(self.text)
        (folder / "a.txt.data").write_bytes(b"\0" * 1000)


def test_what_depends_on_the_same_is_made_once_and_other_files_of_the_target_stay(cache, tmp_path):
    make = Maker()
    for name in ("a.txt", "mine"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("old")
    for run in ("one", "two"):
        cache.provide("thing", {"b": 2, "a": 1}, tmp_path / run, make)
    assert make.calls == 1
    one, two = (tmp_path / run / "a.txt" for run in ("one", "two"))
    assert one.read_text() == two.read_text() == "text" and one.samefile(two)
    assert sorted(os.listdir(tmp_path / "two")) == ["a.txt", "a.txt.data"]  # no manifest
    for kind, origin in (("thing", {"a": 1, "b": 3}), ("thing", {"a": [1], "b": 2}), ("other", {"a": 1, "b": 2})):
        cache.provide(kind, origin, tmp_path / "run", make)
    assert make.calls == 4
    assert [(tmp_path / "run" / name).read_text() for name in ("mine", "a.txt")] == ["old", "text"]


def instead(path: Path, put) -> None:
    """``put(path)`` in the place of a file or a folder, which lies beside the cache then."""
    path.rename(path.parents[2] / f"moved_{path.name}" if path.is_dir() else path.parents[3] / f"moved_{path.name}")
    put(path)


def link_to_what_was_moved(path: Path) -> None:
    [moved] = [found for folder in path.parents for found in folder.glob(f"moved_{path.name}")][:1]
    path.symlink_to(moved)


def with_manifest(entry: Path, **entries) -> None:
    (entry / MANIFEST).write_text(json.dumps(json.loads((entry / MANIFEST).read_text()) | entries))


@pytest.mark.parametrize("damage", [
    *(lambda entry, wrong=wrong: with_manifest(entry, **wrong) for wrong in (
        {"files": {}}, {"files": ["a.txt"]}, {"files": {"a.txt": "x"}}, {"files": {"..": {"sha256": ""}}},
        {"origin": {"of": "another"}},
    )),
    *(lambda entry, text=text: (entry / MANIFEST).write_text(text) for text in ("[" * 100_000, " " * 2**21, "[]")),
    *(lambda entry, name=name, put=put: instead(entry / name, put) for name, put in (
        (MANIFEST, os.mkfifo), (MANIFEST, link_to_what_was_moved), ("a.txt", os.mkfifo), ("a.txt", Path.mkdir),
        ("a.txt", link_to_what_was_moved), ("", link_to_what_was_moved), ("", os.mkfifo), ("", Path.touch),
    )),
    lambda entry: (entry / MANIFEST).unlink(),
    lambda entry: (entry / "a.txt.data").rename(entry / "elsewhere"),
    lambda entry: ((entry / "a.txt").chmod(0o644), (entry / "a.txt").write_text("txet")),
])  # fmt: skip
def test_a_damaged_entry_is_made_again(cache, tmp_path, damage, caplog):
    make = Maker()
    cache.provide("thing", {}, tmp_path / "one", make)
    [entry] = (tmp_path / "cache" / "thing").glob("[!.]*")
    damage(entry)
    cache.provide("thing", {}, tmp_path / "two", make)
    assert make.calls == 2 and "is damaged; it is made again" in caplog.text
    assert (tmp_path / "two" / "a.txt").read_text() == "text"


def test_names_in_a_manifest_lead_nowhere_else(tmp_path):
    """Seen from the entry, the name is that of a file of the right hash; seen from the run, of somebody else's."""
    place = tmp_path / "one" / "two"
    cache, theirs = Cache(place / "cache", 1e9), tmp_path / "a.txt"
    cache.provide("thing", {}, place / "first", Maker())
    [manifest] = (place / "cache" / "thing").glob(f"*/{MANIFEST}")
    content = json.loads(manifest.read_text())
    content["files"]["../../../a.txt"] = content["files"]["a.txt"]
    manifest.write_text(json.dumps(content))
    (place / "a.txt").write_text("text")
    theirs.write_text("theirs")
    make = Maker()
    cache.provide("thing", {}, place / "second", make)
    assert make.calls == 1  # the entry counts as damaged
    assert sorted(os.listdir(place / "second")) == ["a.txt", "a.txt.data"]
    assert theirs.read_text() == "theirs"


def test_a_failure_leaves_nothing_and_an_error_of_other_files_is_the_jobs_own(cache, tmp_path, caplog):
    def fails(folder: Path) -> None:
        (folder / "a.txt").write_text("half")
        (tmp_path / "theirs").read_bytes()

    with pytest.raises(FileNotFoundError, match="theirs"):
        cache.provide("thing", {}, tmp_path / "run", fails)
    assert not os.listdir(tmp_path / "run") and not caplog.messages
    assert [path.suffix for path in (cache.directory / "thing").iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOENT], ids=["read-only", "full", "vanished"])
@pytest.mark.parametrize("where", ["open_lock", "write_json", "link"])
def test_where_its_own_files_fail_everything_is_made_without_it(tmp_path, monkeypatch, caplog, where, number):
    def fails(path: Path, *_) -> None:
        if number == errno.ENOENT:
            shutil.rmtree(cache.directory, ignore_errors=True)
        raise OSError(number, os.strerror(number), str(path))

    cache = Cache(tmp_path / "cache", 10)
    cache.provide("thing", {"of": "a"}, tmp_path / "first", Maker())
    monkeypatch.setattr(module, where, fails)
    cache.provide("thing", {"of": "b"}, tmp_path / "one", Maker())
    cache.provide_all("thing", {"a": {"of": "a"}, "c": {"of": "c"}}, tmp_path, lambda _, folder: Maker()(folder))
    assert all((tmp_path / name / "a.txt").read_text() == "text" for name in ("one", "a", "c"))
    assert [f"{cache.directory} cannot be used (" in each for each in caplog.messages] == [True, True]


def test_clocks_that_differ_cost_no_entry_in_use(tmp_path):
    cache, make = Cache(tmp_path / "cache", 3000), Maker()
    for of in "aabbccaa":
        cache.provide("thing", {"of": of}, tmp_path / "run", make)
        for manifest in cache.directory.glob(f"*/*/{MANIFEST}"):
            os.utime(manifest, (2**33, 2**33))
    assert make.calls <= 4 and len(list(cache.directory.glob("*/*/a.txt"))) == 2


def test_what_a_killed_process_left_is_no_entry_and_goes_with_the_next(cache, tmp_path):
    make = Maker()
    cache.provide("thing", {}, tmp_path / "one", make)
    [entry] = (cache.directory / "thing").glob("[!.]*")
    abandoned, at_work = (cache.directory / "other" / f".{name}.part" for name in ("abandoned", "at_work"))
    for folder in (abandoned, at_work):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"0")
    entry.rename(entry.with_name(f".{entry.name}.part"))
    with locked(at_work.with_suffix(".lock")):
        cache.provide("thing", {}, tmp_path / "two", make)
    assert make.calls == 2 and len(os.listdir(cache.directory / "thing")) == 2  # the entry and its lock
    assert not abandoned.exists() and at_work.exists()


def test_the_longest_unused_goes_first_and_what_a_run_has_linked_stays(tmp_path):
    cache, make = Cache(tmp_path / "cache", 4600), Maker()
    for names in ("1", "2", "3", "1", "4", "15", "2"):  # each has 1004 bytes and a manifest of some hundred
        cache.provide_all("thing", {name: {"n": name} for name in names}, tmp_path, lambda name, folder: make(folder))
        time.sleep(0.01)
    left = sorted(json.loads(path.read_text())["origin"]["n"] for path in cache.directory.glob(f"*/*/{MANIFEST}"))
    assert make.calls == 6 and left == ["1", "2", "5"]  # 4 pushed out 2, 5 beside 1 pushed out 3, and 2 then 4
    assert (tmp_path / "3" / "a.txt").read_text() == "text"


def test_one_entry_larger_than_the_limit_still_serves_its_run(tmp_path):
    cache = Cache(tmp_path / "cache", 10)
    make = Maker()
    for run in ("run", "next"):
        cache.provide("thing", {}, tmp_path / run, make)
        assert (tmp_path / run / "a.txt").read_text() == "text"
    assert make.calls == 1  # what has just been used does not go


def share_slowly(folder: Path, number: int, dies: bool = False) -> None:
    def make(name: str, entry: Path) -> None:
        if dies and name == "0":
            (folder / "died").touch()
            os._exit(1)
        (folder / f"{name} by {number}").touch()
        time.sleep(0.3)
        (entry / "a").write_text(f"{name} is whole")

    origins = {name: {"of": name} for name in "012"}
    Cache(folder / "cache", 1e9).provide_all("things", origins, folder / f"run{number}", make)


def test_what_processes_all_want_is_made_once_and_one_that_dies_costs_what_it_made(tmp_path):
    fork = multiprocessing.get_context("fork")
    first = fork.Process(target=share_slowly, args=(tmp_path, 0, True))
    first.start()
    first.join(30)
    assert first.exitcode == 1 and (tmp_path / "died").exists()
    processes = [fork.Process(target=share_slowly, args=(tmp_path, number)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert sorted(path.name[0] for path in tmp_path.glob("* by *")) == list("012"), "each once"
    for run in ("run1", "run2"):
        assert [(tmp_path / run / name / "a").read_text() for name in "012"] == [f"{n} is whole" for n in "012"]


def test_without_a_cache_all_is_made_in_order(tmp_path):
    made: list = []
    Cache(None).provide_all("things", {"b": {}, "a": {}}, tmp_path, lambda name, folder: made.append((name, folder)))
    assert made == [("b", tmp_path / "b"), ("a", tmp_path / "a")]


def test_the_log_says_for_whom_and_how_long_a_process_has_waited(tmp_path, caplog):
    def second() -> None:
        with locked(tmp_path / "lock", "waiting for the first"):
            pass

    caplog.set_level("INFO")
    waiting = threading.Thread(target=second)
    with locked(tmp_path / "lock"):
        waiting.start()
        for _ in range(1000):
            waiting.join(0 if caplog.messages else 0.01)
        assert caplog.messages == ["waiting for the first"]
    waiting.join()
    (waited,) = caplog.messages[1:]
    assert re.fullmatch(r"waited \d+ s for it", waited)


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.parent / "elsewhere")])
def test_what_stands_in_the_place_of_a_lock_is_neither_waited_for_nor_followed(cache, tmp_path, put):
    cache.provide("thing", {}, tmp_path / "first", Maker())
    [lock] = (cache.directory / "thing").glob(".*.lock")
    lock.unlink()
    put(lock)
    with pytest.raises(ConfigError, match=r"\.lock is no file, expected one by which processes wait for each other; r"):
        cache.provide("thing", {}, tmp_path / "second", Maker())
    assert not (lock.parent / "elsewhere").exists()
