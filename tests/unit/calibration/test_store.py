"""An entry that is not exactly what this code wrote for these prompts and this origin does not exist."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import T5Config, T5EncoderModel

from sd_quant.calibration.collected_elsewhere import expected_tensors
from sd_quant.calibration.overflow import too_large, watch
from sd_quant.calibration.store import Entries, content_digest, pack, unpack
from sd_quant.files import digest
from sd_quant.models.parts import network_in
from sd_quant.models.text_encoders import t5_part
from sd_quant.quantization.statistics import Peak, Statistics, highest, merge

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


# Activations that fp16 would not hold are found and named


PART = t5_part("text_encoder", 4)
HALF = {"t5": dataclasses.replace(PART.contract, weights=torch.float16)}


def encoder(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    network = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).eval().requires_grad_(False)
    network.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(scale)
    return PART.wrap(network)


def peaks_of(module: nn.Module) -> dict[str, Peak]:
    with watch({"t5": network_in(PART, module)}) as peaks:
        module(input_ids=torch.tensor([[1, 2, 3, 4]]))
    return peaks


def test_a_part_that_overflows_fp16_is_named_with_its_layer_and_the_knob():
    """The residual stream behind the layer is as large, but it comes later; fp32 holds all of it."""
    assert too_large(peaks_of(encoder()), HALF) is None
    found = peaks_of(encoder(1e9))
    assert found["t5"].largest > 40_000 and found["t5"].place in (
        "output of encoder.block.1.layer.1.DenseReluDense.wo",
        "input of encoder.final_layer_norm",
    )
    message = too_large(found, HALF)
    assert message.startswith("activations are larger than 32,752, half of the largest number of fp16")
    assert f"(t5, {found['t5'].place}: " in message and "set export.dtype={t5: fp32}" in message
    assert too_large(found, {"t5": PART.contract}) is None


class Residual(nn.Module):
    """Every module's output is small, and their sum is not."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Identity(), nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(x + self.one(x))


def test_a_residual_stream_is_seen_by_the_norm_that_reads_it():
    for value in (-30_000.0, 1.0):
        network = Residual()
        with watch({"part": network}) as peaks:
            network(torch.tensor([[value, 0.0]]))
        assert peaks == {"part": Peak("input of norm", 2 * abs(value))}
        assert not network.norm._forward_hooks and not network.norm._forward_pre_hooks


def test_peaks_are_kept_with_the_statistics(tmp_path: Path):
    """The larger peak of disjoint prompts is kept. A file from elsewhere has at most one peak for each part."""
    first = Statistics({}, {}, {"unet": Peak("output of mid", 3.5), "vae": Peak("output of up", 1.0)})
    second = Statistics({}, {}, {"unet": Peak("output of down", 2.0)})
    assert unpack(pack(first)).peaks == merge([second, first]).peaks == first.peaks
    assert highest([]) == {}
    entries = Entries(tmp_path, {}, ["a cat"])
    entries.write(range(1), first)
    assert entries.read(range(1)).peaks == first.peaks
    stored = {f"peak|{number}|x": (torch.float64, ()) for number in range(99)}
    assert len(expected_tensors({}, {}, 1, 1, stored)) == 16
