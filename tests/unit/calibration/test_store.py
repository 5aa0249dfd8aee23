"""An entry that is not exactly what this code wrote for these prompts and this origin does not exist."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from sd_quant.calibration import store
from sd_quant.calibration.store import Entries, content_digest
from sd_quant.checkpoints.tensors import bytes_of
from sd_quant.files import digest
from sd_quant.quantization.statistics import LayerStatistics, Sample, Statistics

ORIGIN = {"checkpoint": "a" * 64, "sampling": {"steps": 2, "seed": 42}}
PROMPTS = ["a cat", "a dog", "ein Kätzchen 🐈", "../../etc/passwd", "a cat"]
SEGMENT = range(0, 2)


def statistics(seed: int, rows: int = 3, layers: int = 1) -> Statistics:
    random = torch.Generator().manual_seed(seed)

    def sample(*shape: int, dtype: torch.dtype) -> Sample:
        values = torch.randn(rows, *shape, generator=random).to(dtype)
        return Sample(values, torch.rand(rows, generator=random, dtype=torch.float64).sort().values)

    found = {}
    for index in range(layers):
        linear, conv = (
            torch.rand(2, 4, generator=random),
            torch.rand(5, 2, generator=random),
        )
        found[f"down.{index}.to_q"] = LayerStatistics("linear", linear, sample(4, dtype=torch.float16))
        found[f"down.{index}.conv1"] = LayerStatistics("conv", conv, sample(9, dtype=torch.float16))
    return Statistics(found, {name: sample(2, 3, dtype=torch.float32) for name in ("x", "timesteps")})


def same(first: Statistics | None, second: Statistics) -> bool:
    """Bit for bit: NaN equals itself and -0 is not 0. The order of layers and calls does not count."""

    def content(found: Statistics) -> dict:
        tensors = {(n, s.kind): (s.amax, s.rows.values, s.rows.priority) for n, s in found.layers.items()}
        tensors |= {(name, "call"): (sample.values, sample.priority) for name, sample in found.calls.items()}
        return {k: [(t.dtype, t.shape, t.numpy().tobytes()) for t in ts] for k, ts in tensors.items()}

    return first is not None and content(first) == content(second)


@pytest.fixture
def entries(tmp_path) -> Entries:
    return Entries(tmp_path, ORIGIN, PROMPTS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Entries, bytes]:
    """A entries whose one file the property tests overwrite, and its sound content."""
    entries = Entries(tmp_path_factory.mktemp("cache"), ORIGIN, PROMPTS)
    entries.write(SEGMENT, statistics(0))
    return entries, entries.path(SEGMENT).read_bytes()


def refused(entries: Entries, caplog, segment: range = SEGMENT) -> bool:
    caplog.clear()
    return entries.read(segment) is None and f"the cached statistics {entries.path(segment)}" in caplog.text


# What is kept


def test_what_a_killed_process_was_writing_goes_with_the_next_entry(entries):
    entries.folder.mkdir(parents=True)
    (entries.folder / ".00000-00004.safetensors.17.part").write_bytes(b"half")
    entries.write(SEGMENT, statistics(0))
    assert list(entries.folder.iterdir()) == [entries.path(SEGMENT)]


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 4), layers=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_it_comes_back_bit_for_bit(kept, seed, rows, layers):
    entries, _ = kept
    written = statistics(seed, rows, layers)
    entries.write(SEGMENT, written)
    assert same(entries.read(SEGMENT), written)


def test_a_single_number_has_a_digest_whatever_its_stride():
    """As the range of a convolution has in a pass of one prompt and one step: a column of many."""
    column = torch.arange(26.0).view(1, 26)[:, 3]
    assert column.stride() == (26,)
    assert content_digest("", "", {"amax": column}) == content_digest("", "", {"amax": torch.tensor([3.0])})
    assert bytes_of(column).tobytes() == torch.tensor([3.0]).numpy().tobytes()


def test_values_that_compare_oddly_come_back_too(entries):
    written = statistics(0)
    written.layers["down.0.to_q"].amax[0] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-45])
    entries.write(SEGMENT, written)
    assert same(entries.read(SEGMENT), written)


def test_an_entry_says_what_it_is_of(entries):
    """In the header, where anybody finds it with the library alone."""
    entries.write(range(1, 4), statistics(0))
    with safe_open(entries.path(range(1, 4)), "pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"digest", "origin", "prompts"}
    assert json.loads(metadata["origin"]) == {"form": store.VERSION, **ORIGIN}
    assert json.loads(metadata["prompts"]) == {"first": 1, "last": 3, "texts": PROMPTS[1:4]}


def test_the_same_statistics_are_the_same_bytes(entries):
    written = set()
    for _ in range(5):  # the library alone would order the metadata in 6 ways
        entries.write(SEGMENT, statistics(0))
        written.add(entries.path(SEGMENT).read_bytes())
    assert len(written) == 1 and int.from_bytes(written.pop()[:8], "little") % 8 == 0


def test_it_comes_back_in_another_process(entries, tmp_path):
    """Another entries of the same origin, its keys in another order."""
    entries.write(SEGMENT, statistics(0))
    other = Entries(tmp_path, dict(reversed(ORIGIN.items())), list(PROMPTS))
    assert same(other.read(SEGMENT), statistics(0))


def test_the_longest_entry_wins(entries):
    for stop in (1, 3, 5):
        entries.write(range(0, stop), statistics(stop))
    for stop, expected in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5)):
        segment, found = entries.longest(0, stop)
        assert segment == range(0, expected) and same(found, statistics(expected))


def test_a_larger_request_goes_on_where_an_entry_ends(entries):
    entries.write(range(0, 2), statistics(2))
    entries.write(range(2, 4), statistics(4))
    assert entries.longest(2, 5)[0] == range(2, 4)
    assert entries.longest(1, 5) is None and entries.longest(4, 5) is None


def test_a_damaged_entry_gives_way_to_a_shorter_one(entries, caplog):
    entries.write(range(0, 1), statistics(1))
    entries.write(range(0, 3), statistics(3))
    entries.path(range(0, 3)).write_bytes(b"")
    segment, found = entries.longest(0, 3)
    assert segment == range(0, 1) and same(found, statistics(1))
    assert str(entries.path(range(0, 3))) in caplog.text


def test_an_empty_folder_has_nothing_to_say(entries, caplog):
    assert entries.longest(0, 5) is None and not caplog.text


def test_prompts_behind_the_entry_do_not_matter(entries, tmp_path):
    entries.write(range(0, 2), statistics(0))
    assert same(Entries(tmp_path, ORIGIN, [*PROMPTS[:2], "another"]).read(range(0, 2)), statistics(0))


def test_a_damaged_entry_is_written_anew(entries):
    entries.path(SEGMENT).parent.mkdir(parents=True)
    entries.path(SEGMENT).write_bytes(b"garbage")
    entries.write(SEGMENT, statistics(0))
    assert same(entries.read(SEGMENT), statistics(0))
    assert [path.name for path in entries.folder.iterdir()] == ["00000-00002.safetensors"]  # no temporary file is left


# What is not trusted


@given(change=st.data(), difference=st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_a_changed_byte_is_noticed(kept, change, difference):
    entries, content = kept
    position = change.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[position] ^= difference
    header = 8 + int.from_bytes(content[:8], "little")
    assume(position >= header or damaged[position] not in b" \t\n\r")  # white space at the header's end means nothing
    entries.path(SEGMENT).write_bytes(damaged)
    assert entries.read(SEGMENT) is None


@given(length=st.integers(0, 10_000))
@example(length=0)
@example(length=7)
@example(length=8)
@settings(max_examples=100, deadline=None)
def test_a_file_that_was_cut_or_grew_is_noticed(kept, length):
    entries, content = kept
    assume(length != len(content))
    entries.path(SEGMENT).write_bytes((content + bytes(10_000))[:length])
    assert entries.read(SEGMENT) is None


@given(garbage=st.binary(max_size=200), header=st.sampled_from([None, b"", b"{}", b"[]", b"null", b'{"a":1}']))
@settings(max_examples=200, deadline=None)
def test_garbage_is_noticed(kept, garbage, header):
    entries, _ = kept
    if header is not None:
        garbage = len(header).to_bytes(8, "little") + header + garbage
    entries.path(SEGMENT).write_bytes(garbage)
    assert entries.read(SEGMENT) is None


def forged(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], size: int) -> dict:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}, "__metadata__": {"digest": "0" * 64}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 64,
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (2**63 - 1).to_bytes(8, "little") + b'{"__metadata__":{}}',
        (10**8).to_bytes(8, "little") + b"{}",
        forged(b"[" * 100_000),
        forged(b'{"__metadata__":' * 50_000),
        forged(b"\xff\xfe{}"),
        forged({}),
        forged({"__metadata__": {}}),
        forged({"__metadata__": ["digest"]}),
        forged({"__metadata__": {"digest": 1}}),
        forged(tensor("F32", [2**40], 2**42)),
        forged(tensor("F32", [2**33, 2**33], 4), bytes(4)),
        forged(tensor("F32", [-1], 4), bytes(4)),
        *(forged(tensor(dtype, [], 8), bytes(8)) for dtype in ("F64", "C64", "U64", "I64")),
        *(forged(tensor(dtype, [2], 2), bytes(2)) for dtype in ("BOOL", "F8_E4M3", "F8_E8M0", "U8")),
        *(forged(tensor(dtype, [8], size), bytes(size)) for dtype, size in (("F4", 4), ("F6_E2M3", 6), ("BF16", 16))),
        save({"linear|a|rows": torch.zeros(2)}),
        save({"linear|a|rows": torch.zeros(2)}, {"digest": "0" * 64}),
    ],
    ids=lambda content: repr(content[:40]),
)
def test_what_is_no_entry_is_refused(entries, caplog, content):
    entries.folder.mkdir(parents=True)
    entries.path(SEGMENT).write_bytes(content)
    assert refused(entries, caplog)


class Malice:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_nothing_is_executed(entries, caplog, tmp_path, write):
    entries.folder.mkdir(parents=True)
    with entries.path(SEGMENT).open("wb") as file:
        write(Malice(tmp_path / "executed"), file)
    assert refused(entries, caplog)
    assert not (tmp_path / "executed").exists()


def test_an_entry_without_its_digest_is_refused(entries, caplog):
    entries.write(SEGMENT, statistics(0))
    path = entries.path(SEGMENT)
    path.write_bytes(save(load(path.read_bytes())))
    assert refused(entries, caplog)


DESCRIBED_OTHERWISE = [(b"a dog", b"a cow"), (b"a" * 64, b"b" * 64), (b'"last', b'"lost')]
READ_OTHERWISE = [(b'"F16"', b'"I16"'), (b"[3,9]", b"[9,3]"), (b"conv1|rows", b"conv2|rows")]


@pytest.mark.parametrize("other", [*DESCRIBED_OTHERWISE, *READ_OTHERWISE])
def test_an_entry_whose_header_was_altered_is_refused(entries, caplog, other):
    entries.write(SEGMENT, statistics(0))
    path = entries.path(SEGMENT)
    content = path.read_bytes()
    path.write_bytes(content.replace(*other))
    assert path.read_bytes() != content
    assert refused(entries, caplog)


def test_values_of_another_entry_under_this_digest_are_refused(entries, caplog):
    entries.write(SEGMENT, statistics(0))
    path = entries.path(SEGMENT)
    content = path.read_bytes()
    claimed = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    path.write_bytes(save(store.pack(statistics(1)), claimed))
    assert refused(entries, caplog)


@pytest.mark.parametrize(
    "change", [{"checkpoint": "b" * 64}, {"sampling": {"steps": 2, "seed": 43}}, {"device": "cpu"}]
)
def test_another_origin_has_a_folder_of_its_own(entries, caplog, tmp_path, change):
    other = Entries(tmp_path, ORIGIN | change, PROMPTS)
    other.write(SEGMENT, statistics(0))
    assert entries.longest(0, 5) is None and not caplog.text
    entries.folder.mkdir()
    entries.path(SEGMENT).write_bytes(other.path(SEGMENT).read_bytes())  # copied from the other's folder
    assert refused(entries, caplog)


@pytest.mark.parametrize("prompts", [["a cat", "a cow"], ["a dog", "a cat"], ["a cata", " dog"], ["a cat"]], ids=str)
def test_other_prompts(entries, caplog, tmp_path, prompts):
    entries.write(SEGMENT, statistics(0))
    assert refused(Entries(tmp_path, ORIGIN, prompts), caplog)


@pytest.mark.parametrize("written, read", [((0, 2), (0, 3)), ((0, 2), (0, 1)), ((0, 1), (4, 5))])
def test_an_entry_under_another_name(entries, caplog, written, read):
    """Also of the same text in another place, which starts from another noise."""
    entries.write(range(*written), statistics(0))
    entries.path(range(*written)).rename(entries.path(range(*read)))
    assert refused(entries, caplog, range(*read))
    assert entries.longest(read[0], 5) is None


@pytest.mark.parametrize("name", ["00000-", "00000-x", "00000-²", "00000-00002 (copy)", "00000--0002", "00000-2"])
def test_files_with_other_names_are_passed_by(entries, name):
    entries.folder.mkdir(parents=True)
    (entries.folder / f"{name}.safetensors").write_bytes(b"garbage")
    assert entries.longest(0, 5) is None


def test_a_folder_in_place_of_an_entry(entries, caplog):
    entries.path(SEGMENT).mkdir(parents=True)
    assert refused(entries, caplog)


# What entries are filed under


def test_texts_are_told_apart():
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", ""), digest()}) == 5
    assert digest("ab", "c") == digest("ab", "c")
