"""An entry that is not exactly what this code wrote for these prompts and this origin does not exist."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sd_quant.calibration.store import Entries, content_digest
from sd_quant.files import digest

from .some_statistics import assert_same, statistics

pytestmark = pytest.mark.commit

ORIGIN = {"checkpoint": "a" * 64, "sampling": {"steps": 2, "seed": 42}}
PROMPTS = ["a cat", "a dog", "ein Kätzchen 🐈", "../../etc/passwd", "a cat"]
SEGMENT = range(0, 2)


@pytest.fixture
def entries(tmp_path) -> Entries:
    return Entries(tmp_path, ORIGIN, PROMPTS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Entries, bytes]:
    """Entries whose one file the property tests overwrite, and its sound content."""
    entries = Entries(tmp_path_factory.mktemp("cache"), ORIGIN, PROMPTS)
    entries.write(SEGMENT, statistics(SEGMENT))
    return entries, entries.path(SEGMENT).read_bytes()


def refused(entries: Entries, caplog, segment: range = SEGMENT) -> bool:
    caplog.clear()
    return entries.read(segment) is None and f"the cached statistics {entries.path(segment)}" in caplog.text


@pytest.mark.parametrize("left", [".00000-00002.safetensors.17.part", "00000-00002.safetensors"])
def test_what_a_killed_process_was_writing_goes_with_the_next_entry(entries, left):
    """And a damaged entry is written anew."""
    entries.folder.mkdir(parents=True)
    (entries.folder / left).write_bytes(b"half")
    entries.write(SEGMENT, statistics(SEGMENT))
    assert list(entries.folder.iterdir()) == [entries.path(SEGMENT)]
    assert_same(entries.read(SEGMENT), statistics(SEGMENT))


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 4))
@settings(max_examples=15, deadline=None)
def test_it_comes_back_bit_for_bit(kept, seed, rows):
    entries, _ = kept
    written = statistics(SEGMENT, rows, seed)
    for layer in written.layers.values():
        layer.amax[0, :2] = torch.tensor([torch.nan, -0.0])  # which compare oddly
    entries.write(SEGMENT, written)
    assert_same(entries.read(SEGMENT), written)


def test_a_hessian_that_layers_share_is_kept_once_and_shared_again(entries):
    written = statistics(SEGMENT)
    hessian, layers = torch.rand(1, 4, 4), written.layers
    layers["down.to_q"].hessian = hessian
    layers |= {"up.to_q": replace(layers["down.to_q"]), "up.conv1": replace(layers["down.conv1"])}
    layers["down.conv1"].hessian = torch.rand(3, 4, 4)
    entries.write(SEGMENT, written)
    assert_same(found := entries.read(SEGMENT), written)
    assert torch.equal(found.layers["up.to_q"].hessian, hessian)
    assert found.layers["down.to_q"].hessian is found.layers["up.to_q"].hessian
    assert found.layers["down.conv1"].hessian.shape == (3, 4, 4) and found.layers["up.conv1"].hessian is None


def test_the_same_statistics_are_the_same_bytes(entries):
    """Also the range of a convolution in a pass of one prompt and one step, a column of many."""
    column = torch.arange(26.0).view(1, 26)[:, 3]
    assert column.stride() == (26,)
    assert content_digest("", "", {"amax": column}) == content_digest("", "", {"amax": torch.tensor([3.0])})
    written = set()
    for _ in range(3):  # the library alone would order the metadata in 6 ways
        entries.write(SEGMENT, statistics(SEGMENT))
        written.add(entries.path(SEGMENT).read_bytes())
    assert len(written) == 1 and int.from_bytes(written.pop()[:8], "little") % 8 == 0


def test_the_longest_entry_wins(entries, caplog):
    """A damaged one gives way to a shorter one."""
    for stop in (1, 3, 5):
        entries.write(range(0, stop), statistics(range(stop)))
    for stop, expected in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5)):
        segment, found = entries.longest(0, stop)
        assert segment == range(0, expected)
        assert_same(found, statistics(range(expected)))
    entries.path(range(0, 5)).write_bytes(b"")
    assert not caplog.text and entries.longest(0, 5)[0] == range(0, 3)
    assert str(entries.path(range(0, 5))) in caplog.text


@given(change=st.data(), difference=st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_a_changed_byte_is_noticed(kept, change, difference):
    entries, content = kept
    position = change.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[position] ^= difference
    header = 8 + int.from_bytes(content[:8], "little")
    assume(position >= header or damaged[position] not in b" \t\n\r")  # white space at the header's end means nothing
    entries.path(SEGMENT).write_bytes(damaged)
    assert entries.read(SEGMENT) is None


@pytest.mark.parametrize("change", [{"sampling": {"steps": 2, "seed": 43}}, {"device": "cpu"}])
def test_another_origin_has_a_folder_of_its_own(entries, caplog, tmp_path, change):
    other = Entries(tmp_path, ORIGIN | change, PROMPTS)
    other.write(SEGMENT, statistics(SEGMENT))
    assert entries.longest(0, 5) is None and not caplog.text
    entries.folder.mkdir()
    entries.path(SEGMENT).write_bytes(other.path(SEGMENT).read_bytes())  # copied from the other's folder
    assert refused(entries, caplog)
    for prompts in (["a cat", "a cow"], ["a dog", "a cat"], ["a cata", " dog"], ["a cat"]):
        assert refused(Entries(tmp_path, ORIGIN | change, prompts), caplog)


@pytest.mark.parametrize("written, read", [((0, 2), (0, 3)), ((0, 1), (4, 5))])
def test_an_entry_under_another_name(entries, caplog, written, read):
    """Also of the same text in another place, which starts from another noise."""
    entries.write(range(*written), statistics(SEGMENT))
    entries.path(range(*written)).rename(entries.path(range(*read)))
    assert refused(entries, caplog, range(*read))
    assert entries.longest(read[0], 5) is None


def test_files_with_other_names_are_passed_by_and_texts_are_told_apart(entries):
    entries.folder.mkdir(parents=True)
    for name in ("00000-", "00000-²", "00000-00002 (copy)", "00000--0002", "00000-2"):
        (entries.folder / f"{name}.safetensors").write_bytes(b"garbage")
    assert entries.longest(0, 5) is None
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", ""), digest()}) == 5
