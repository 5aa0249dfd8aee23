"""Statistics from a stranger are those that were collected there, or are refused in one sentence."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from sd_quant.calibration.collected_elsewhere import differences, read_statistics
from sd_quant.calibration.store import VERSION, Entries, content_digest
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.quantization.statistics import Statistics, merge

from .some_statistics import CONTRACT, LAYERS, ORIGIN, assert_same, statistics

pytestmark = pytest.mark.commit

PROMPTS = ["a cat", "ein Kätzchen 🐈", "../../etc/passwd", "\x1b[2J", "a dog"]


def written(folder: Path, *segments: tuple[int, int], **other: object) -> Path:
    entries = Entries(folder, ORIGIN | other, PROMPTS)
    for segment in segments:
        entries.write(range(*segment), statistics(range(*segment)))
    return entries.folder


def shared(path: Path, calib_size: int = 2, layers=LAYERS, here=ORIGIN) -> Statistics:
    return read_statistics(path, layers, CONTRACT, here, calib_size)


@pytest.fixture
def folder(tmp_path) -> Path:
    return written(tmp_path, (0, 2))


@pytest.fixture
def entry(folder) -> Path:
    return next(folder.iterdir())


def forge(path: Path, tensors: dict | None = None, **metadata: str) -> None:
    """Another entry under a digest that is right."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors, metadata = tensors or load(content), header["__metadata__"] | metadata
    digest = content_digest(metadata["origin"], metadata["prompts"], tensors)
    path.write_bytes(save(tensors, metadata | {"digest": digest}))


@pytest.mark.parametrize("one", [False, True], ids=["folder", "file"])
def test_statistics_come_from_a_folder_or_a_file(folder, entry, caplog, one):
    path = entry.rename(entry.with_name("from a friend.safetensors")) if one else folder
    with caplog.at_level(logging.INFO):
        assert_same(shared(path), merge([statistics(range(2))]))
    assert caplog.messages == [f"statistics of prompts 1 to 2 come from {path}"]


def test_entries_that_cover_the_prompts_are_merged(tmp_path):
    folder = written(tmp_path, (0, 1), (0, 2), (0, 3), (1, 2), (3, 5), (4, 5))
    assert_same(shared(folder, 5), merge([statistics(range(0, 3)), statistics(range(3, 5))]))


def test_an_entry_of_other_sizes_than_the_first_holds_no_calls(tmp_path):
    """The first entry holds calls of the first size, so that the statistics of all prompts have some."""
    entries = Entries(tmp_path, ORIGIN, PROMPTS)
    first, second = statistics(range(1)), Statistics(statistics(range(1, 2)).layers, {})
    entries.write(range(1), first)
    entries.write(range(1, 2), second)
    assert_same(shared(entries.folder), merge([first, second]))
    entries.write(range(1), Statistics(first.layers, {}))
    with pytest.raises(ArtifactError, match="is of another UNet"):
        shared(entries.folder)


# What is told


def with_sampling(**changes: object) -> dict:
    return ORIGIN | {"sampling": ORIGIN["sampling"] | changes}


def test_differences_are_told_shortly_and_without_control_characters():
    for there, here, told in (
        ({}, {"negative_prompts": ["blurry"]}, "negative_prompts None (here 'blurry')"),
        ({"negative_prompts": ["blurry", "nude"]}, {"negative_prompts": None},
         "negative_prompts 'blurry, nude' (here None)"),
        ({"sizes": ["128x64", "64x64"]}, {}, "sizes '128x64, 64x64' (here None)"),
    ):  # fmt: skip
        assert differences(with_sampling(**there), with_sampling(**here)) == [f"sampling.{told}"]
    told = differences({"device": "\x1b[2J\n" + "x" * 10_000, "versions": [[]]}, ORIGIN)
    assert all(len(each) < 100 and each.isprintable() for each in told) and len(told) == 8
    assert told[-1] == "versions.torch None (here '2.13.0')"


def test_another_checkpoint_file_whose_layers_fit_is_told_and_all_else_in_one_line(folder, caplog):
    with caplog.at_level(logging.INFO):
        shared(folder, here=with_sampling(seed=7) | {"checkpoint": "b" * 64, "device": "cpu"})
    assert caplog.messages == [
        f"statistics of prompts 1 to 2 come from {folder}",
        f"these statistics were collected with another checkpoint file, of SHA-256 {'a' * 64!r}; its 2 layers fit",
        "these statistics were collected otherwise than here: sampling.seed 42 (here 7), device 'cuda' (here 'cpu')",
    ]


# What is refused


def refusal(kind: type[SdQuantError], *arguments, **options) -> str:
    with pytest.raises(kind) as refused:
        shared(*arguments, **options)
    assert type(refused.value) is kind and str(refused.value).isprintable()
    return str(refused.value)


DIVIDED = "holds {0} prompts, whose statistics cannot be divided, and calib_size is {1}; set calib_size={0}"


@pytest.mark.parametrize(("segments", "asked", "sentence"), [
    ([(0, 3)], {"calib_size": 2}, DIVIDED.format("3", 2)),
    ([(0, 2), (2, 5)], {"calib_size": 3}, DIVIDED.format("2 or 5", 3)),
    ([(0, 2), (3, 5)], {"calib_size": 5}, DIVIDED.format("2", 5)),
    ([(2, 4)], {"calib_size": 4}, "holds no statistics of the first prompt; give the folder with all entries"),
    ([(0, 2)], {"here": with_sampling(steps=20)},
     "holds statistics of 2 denoising steps and quantize.n_steps is 20; set quantize.n_steps=2"),
])  # fmt: skip
def test_entries_of_other_prompts_or_steps(tmp_path, segments, asked, sentence):
    folder = written(tmp_path, *segments)
    assert refusal(ConfigError, folder, **asked) == f"{folder} {sentence}"


def test_nothing_is_there_or_may_not_be_read(tmp_path, folder, entry, monkeypatch):
    for path in (folder.parent, tmp_path / "cache"):
        reason = f"calibration names {path}, where no statistics are; give an entry of a cache or its folder"
        assert refusal(ConfigError, path) == reason

    def forbidden(path, flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", forbidden)
    assert f"{entry} cannot be read (Permission denied)" in refusal(ConfigError, entry)


def test_entries_of_several_origins(tmp_path, folder):
    other = written(tmp_path, (0, 2), device="cpu")
    next(other.iterdir()).rename(folder / "other.safetensors")
    assert "holds statistics of 2 origins, expected one" in refusal(ArtifactError, folder)


@pytest.mark.parametrize(
    ("layers", "count", "first"),
    [
        (LAYERS | {"down.to_q": nn.Linear(5, 3)}, 1, "'linear|down.to_q|amax', {0} [2, 4] instead of {0} [2, 5]"),
        (LAYERS | {"down.conv1": nn.Linear(9, 1)}, 2, "'linear|down.conv1|amax', nothing instead of {0} [2, 9]"),
        ({"down.to_q": LAYERS["down.to_q"]}, 1, "'conv|down.conv1|priority', torch.float64 [3] instead of nothing"),
    ],
    ids=["width", "kind", "unknown"],
)
def test_another_unet(folder, entry, layers, count, first):
    found, first = refusal(ArtifactError, folder, layers=layers), first.format(torch.float32)
    assert found.startswith(
        f"{entry} is of another UNet: beside the {len(layers)} layers of this checkpoint's, {count} layers or inputs "
        "are missing, unknown or of another shape, the first is "
    )
    assert found.endswith(f"{first}; give statistics that fit, or collect them with calibration=null")


def ending_with(value: float):
    return lambda tensor: torch.cat([tensor.flatten()[:-1], torch.tensor([value])]).to(tensor.dtype).view(tensor.shape)


IMPOSSIBLE = {
    "linear|down.to_q|amax": -1.0, "conv|down.conv1|amax": torch.inf, "conv|down.conv1|rows": torch.nan,
    "call|x|rows": -torch.inf,
}  # fmt: skip


@pytest.mark.parametrize(("key", "change", "words"), [
    *((key, change, "is of another UNet") for key, change in (
        ("linear|down.to_q|amax", lambda amax: amax.double()),
        ("conv|down.conv1|rows", lambda rows: rows[:0]),
        ("conv|down.conv1|rows", lambda rows: rows.repeat(43, 1)),  # 129
        ("call|x|rows", lambda rows: rows[..., :-1].contiguous()),
        ("call|y|rows", lambda rows: rows.repeat(5, 1, 1)),  # 10
    )),
    *((key, ending_with(value), f"negative or infinite values in {key!r}") for key, value in IMPOSSIBLE.items()),
])  # fmt: skip
def test_tensors_that_no_pass_leaves(entry, key, change, words):
    tensors = load(entry.read_bytes())
    changed = change(tensors.get(key))
    of_rows = key.endswith("|rows")  # which have a priority each
    priority = {key.replace("rows", "priority"): torch.zeros(len(changed)).double()} if of_rows else {}
    forge(entry, tensors | priority | {key: changed})
    assert words in refusal(ArtifactError, entry)


def test_an_altered_description(entry):
    content = entry.read_bytes()
    entry.write_bytes(content.replace(b'seed\\": 42', b'seed\\": 43'))
    assert "is damaged or was altered" in refusal(ArtifactError, entry)
    forge(entry, origin=json.dumps({"form": "\n", **ORIGIN}))
    assert f"{entry} has form '\\n', expected {VERSION}; collect it again" in refusal(ArtifactError, entry)


@pytest.mark.parametrize("metadata", [
    {"origin": "[" * 100_000},
    *({"origin": json.dumps({"form": VERSION, **with_sampling(**change)})} for change in (
        {"steps": 2.0}, {"guidance_scale": torch.nan}, {"height": 8}, {"width": torch.inf},
    )),
    *({"prompts": json.dumps({"first": 0, "last": last, "texts": ["a cat"]})} for last in (1, 10**23)),
])  # fmt: skip
def test_a_description_that_is_none(entry, metadata):
    """Whatever else it can be is tried by the fuzzing of this reader."""
    forge(entry, **metadata)
    assert f"{entry} does not describe statistics (" in refusal(ArtifactError, entry)


def test_a_claim_of_much_is_refused_before_it_is_read(entry):
    """Sparse: a terabyte in its name only."""
    content = entry.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    end = max(place["data_offsets"][1] for name, place in header.items() if name != "__metadata__")
    header["linear|huge|rows"] = {"dtype": "F16", "shape": [2**39], "data_offsets": [end, end + 2**40]}
    text = json.dumps(header).encode()
    with entry.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end + 2**40)
    assert "torch.float16 [549755813888] instead of nothing" in refusal(ArtifactError, entry)
