"""Statistics from a stranger are those that were collected there, or are refused in one sentence."""

import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from sd_quant.calibration.collected_elsewhere import chains, differences, read_statistics
from sd_quant.calibration.collection import calibrate, origin
from sd_quant.calibration.store import VERSION, Entries, content_digest, pack
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.inference.loading import load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import contracts_of, empty_modules
from sd_quant.models.sdxl import unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS
from sd_quant.models.unet import layer_roles
from sd_quant.places import HOME
from sd_quant.quantization.statistics import LayerStatistics, Sample, Statistics, merge

STEPS = 2
with torch.device("meta"):
    LAYERS = {"down.to_q": nn.Linear(4, 3), "down.conv1": nn.Conv2d(1, 2, 3)}
SIZES = {"in_channels": 4, "cross_attention_dim": 6, "projection_class_embeddings_input_dim": 5}
CONTRACT = unet_part(SIZES | {"addition_time_embed_dim": 0}, CONTEXT_TOKENS, "nemo").contract
ORIGIN = {
    "checkpoint": "a" * 64,
    "sampling": {"steps": STEPS, "guidance_scale": 5.0, "height": 64, "width": 128, "batch_size": 1, "seed": 42},
    "device": "cuda",
    "kept": [128, 8],
    "versions": {"torch": "2.13.0"},
}
PROMPTS = ["a cat", "ein Kätzchen 🐈", "../../etc/passwd", "\x1b[2J", "a dog"]


def statistics(segment: range, rows: int = 3) -> Statistics:
    """What calibration leaves of ``LAYERS`` and the UNet's inputs."""
    random = torch.Generator().manual_seed(segment.stop)

    def sample(count: int, *shape: int, dtype: torch.dtype) -> Sample:
        values = torch.randn(count, *shape, generator=random).to(dtype)
        return Sample(values, torch.rand(count, generator=random, dtype=torch.float64).sort().values)

    linear = LayerStatistics("linear", torch.rand(STEPS, 4, generator=random), sample(rows, 4, dtype=torch.float16))
    conv = LayerStatistics(
        "conv", torch.rand(segment.stop, STEPS, generator=random), sample(rows, 9, dtype=torch.float16)
    )
    inputs = {"x": (4, 8, 16), "timesteps": (), "context": (80, 6), "y": (5,)}
    calls = {name: sample(2, 2, *shape, dtype=torch.float32) for name, shape in inputs.items()}
    return Statistics({"down.to_q": linear, "down.conv1": conv}, calls)


def written(folder: Path, *segments: tuple[int, int], **other: object) -> Path:
    """A cache folder with entries of these prompts."""
    entries = Entries(folder, ORIGIN | other, PROMPTS)
    for segment in segments:
        entries.write(range(*segment), statistics(range(*segment)))
    return entries.folder


def shared(path: Path, calib_size: int = 2, layers=LAYERS, here=ORIGIN) -> Statistics:
    return read_statistics(path, layers, CONTRACT, here, calib_size)


def assert_same(first: Statistics, second: Statistics) -> None:
    torch.testing.assert_close(pack(first), pack(second), rtol=0, atol=0)


@pytest.fixture
def folder(tmp_path) -> Path:
    return written(tmp_path, (0, 2))


@pytest.fixture
def entry(folder) -> Path:
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, bytes]:
    """An entry that the property test overwrites, and its sound content."""
    path = next(written(tmp_path_factory.mktemp("cache"), (0, 2)).iterdir())
    return path, path.read_bytes()


def metadata_of(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def forge(path: Path, tensors: dict | None = None, **metadata: str) -> None:
    """Another entry under a digest that is right."""
    tensors, metadata = tensors or load(path.read_bytes()), metadata_of(path) | metadata
    digest = content_digest(metadata["origin"], metadata["prompts"], tensors)
    path.write_bytes(save(tensors, metadata | {"digest": digest}))


# What is found


@pytest.mark.parametrize("one", [False, True], ids=["folder", "file"])
def test_statistics_come_from_a_folder_or_a_file(folder, entry, caplog, one):
    path = entry.rename(entry.with_name("from a friend.safetensors")) if one else folder
    with caplog.at_level(logging.INFO):
        assert_same(shared(path), merge([statistics(range(2))]))
    assert caplog.messages == [f"statistics of prompts 1 to 2 come from {path}"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_entries_that_cover_the_prompts_are_merged(tmp_path, size):
    segments = {2: [(0, 2)], 3: [(0, 3)], 5: [(0, 3), (3, 5)]}
    folder = written(tmp_path, (0, 1), (0, 2), (0, 3), (1, 2), (3, 5), (4, 5))
    assert_same(shared(folder, size), merge([statistics(range(*segment)) for segment in segments[size]]))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=8))
def test_every_number_that_segments_add_up_to_is_found(pairs):
    segments = [range(start, start + length) for start, length in pairs]
    ways = chains(segments)
    for size, way in ways.items():
        assert [index for segment in way for index in segment] == list(range(size)) and set(way) <= set(segments)
    ends = {segment.stop for segment in segments if segment.start in {0, *ways}}
    assert ends == set(ways)


def test_what_a_pass_collected_and_cached_is_read_elsewhere(tmp_path, caplog):
    """The shipped checkpoint: the folder that the log names, with networks that have no weights."""
    checkpoint = open_nemo(HOME / "checkpoints/sdxl_mini.nemo")
    model, sampling = load_model(checkpoint), Sampling(2, 5.0, 64, 64, 1, 3)
    names = [name for name, role in layer_roles(model.modules["unet"]).items() if role != "excluded"]
    with caplog.at_level(logging.INFO):
        collected = calibrate(
            model, names, ["a cat", "a dog"], sampling,
            checkpoint_sha256="a" * 64, snapshots=[1], cache=tmp_path, accelerator="cpu",
        )  # fmt: skip
    message, _, path = caplog.messages[-1].partition("; use them elsewhere with calibration=")
    assert message == f"statistics: {path}" and Path(path).parent == tmp_path
    empty = empty_modules(checkpoint)["unet"]
    layers = {name: empty.get_submodule(name) for name in names}
    contract, here = contracts_of(checkpoint)["unet_xl"], origin("a" * 64, names, sampling, "cpu")
    caplog.clear()
    assert_same(read_statistics(Path(path), layers, contract, here, 2), collected)
    assert not caplog.records


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


def test_sizes_are_told_of(folder, caplog):
    here = ORIGIN | {"sampling": ORIGIN["sampling"] | {"sizes": ["128x64", "64x64"]}}
    with caplog.at_level(logging.INFO):
        shared(folder, here=here)
        shared(written(folder.parent, (0, 2), **here))
    told = [message for message in caplog.messages if "otherwise" in message]
    begin = "these statistics were collected otherwise than here: sampling.sizes "
    assert told == [f"{begin}None (here '128x64, 64x64')", f"{begin}'128x64, 64x64' (here None)"]


def test_another_checkpoint_file_whose_layers_fit_is_told(folder, caplog):
    shared(folder, here=ORIGIN | {"checkpoint": "b" * 64})
    assert caplog.messages == [
        f"these statistics were collected with another checkpoint file, of SHA-256 {'a' * 64!r}; its 2 layers fit"
    ]


def test_what_else_differs_is_told_in_one_line(folder, caplog):
    here = ORIGIN | {"sampling": ORIGIN["sampling"] | {"seed": 7, "guidance_scale": 3.0}, "device": "cpu"}
    with caplog.at_level(logging.INFO):
        shared(folder, here=here)
    assert caplog.messages[1:] == [
        "these statistics were collected otherwise than here: "
        "sampling.guidance_scale 5.0 (here 3.0), sampling.seed 42 (here 7), device 'cuda' (here 'cpu')"
    ]


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        (None, ["blurry"], "None (here 'blurry')"),
        (["blurry", "nude"], None, "'blurry, nude' (here None)"),
        (None, None, ""),
    ],
)
def test_other_negative_prompts_are_told(there, here, told):
    def origin(negatives: list | None) -> dict:
        return ORIGIN | {"sampling": ORIGIN["sampling"] | {"negative_prompts": negatives}}

    assert "".join(differences(origin(there), origin(here))) == (f"sampling.negative_prompts {told}" if told else "")


def test_what_a_stranger_says_is_told_shortly_and_without_control_characters():
    told = differences({"device": "\x1b[2J\n" + "x" * 10_000, "versions": [[]]}, ORIGIN)
    assert all(len(each) < 100 and each.isprintable() for each in told) and len(told) == 8
    assert told[-1] == "versions.torch None (here '2.13.0')"


# What is refused


def refusal(kind: type[SdQuantError], *arguments, **options) -> str:
    with pytest.raises(kind) as refused:
        shared(*arguments, **options)
    assert type(refused.value) is kind and str(refused.value).isprintable()
    return str(refused.value)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["empty", "absent"])
def test_nothing_is_there(tmp_path, make):
    path = tmp_path / "cache"
    make(path)
    assert refusal(ConfigError, path) == (
        f"calibration names {path}, where no statistics are; give an entry of a cache or its folder"
    )


@pytest.mark.parametrize(
    ("segments", "size", "sizes"),
    [([(0, 2)], 3, "2"), ([(0, 3)], 2, "3"), ([(0, 2), (2, 5)], 3, "2 or 5"), ([(0, 2), (3, 5)], 5, "2")],
)
def test_another_number_of_prompts(tmp_path, segments, size, sizes):
    folder = written(tmp_path, *segments)
    assert refusal(ConfigError, folder, size) == (
        f"{folder} holds {sizes} prompts, whose statistics cannot be divided, and calib_size is {size}; "
        f"set calib_size={sizes}"
    )


def test_the_first_prompts_are_missing(tmp_path):
    folder = written(tmp_path, (2, 4))
    assert refusal(ConfigError, folder, 4) == (
        f"{folder} holds no statistics of the first prompt; give the folder with all entries"
    )


def test_another_number_of_steps(folder):
    here = ORIGIN | {"sampling": ORIGIN["sampling"] | {"steps": 20}}
    assert refusal(ConfigError, folder, here=here) == (
        f"{folder} holds statistics of 2 denoising steps and quantize.n_steps is 20; set quantize.n_steps=2"
    )


def test_entries_of_several_origins(tmp_path, folder):
    other = written(tmp_path, (0, 2), device="cpu")
    next(other.iterdir()).rename(folder / "other.safetensors")
    assert "holds statistics of 2 origins, expected one" in refusal(ArtifactError, folder)


FLOATS = "torch.float32"


@pytest.mark.parametrize(
    ("layers", "count", "first"),
    [
        (LAYERS | {"up.to_q": nn.Linear(4, 3)}, 1, f"'linear|up.to_q|amax', nothing instead of {FLOATS} [2, 4]"),
        (LAYERS | {"down.to_q": nn.Linear(5, 3)}, 1, f"|amax', {FLOATS} [2, 4] instead of {FLOATS} [2, 5]"),
        (LAYERS | {"down.conv1": nn.Conv2d(2, 2, 3)}, 1, "'conv|down.conv1|rows', torch.float16 [3, 9] instead of "
         "torch.float16 [3, 18]"),
        (LAYERS | {"down.conv1": nn.Linear(9, 1)}, 2, f"'linear|down.conv1|amax', nothing instead of {FLOATS} [2, 9]"),
        ({"down.to_q": LAYERS["down.to_q"]}, 1, "'conv|down.conv1|priority', torch.float64 [3] instead of nothing"),
    ],
    ids=["missing", "linear width", "conv width", "kind", "unknown"],
)  # fmt: skip
def test_another_unet(folder, entry, layers, count, first):
    found = refusal(ArtifactError, folder, layers=layers)
    assert found.startswith(
        f"{entry} is of another UNet: beside the {len(layers)} layers of this checkpoint's, {count} layers or inputs "
        "are missing, unknown or of another shape, the first is "
    )
    assert found.endswith(f"{first}; give statistics that fit, or collect them with calibration=null")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("linear|down.to_q|amax", lambda amax: amax.double()),
        ("conv|down.conv1|amax", lambda amax: amax[:1]),
        ("conv|down.conv1|rows", lambda rows: rows[:0]),
        ("conv|down.conv1|rows", lambda rows: rows.repeat(43, 1)),  # 129
        ("conv|down.conv1|priority", lambda priority: priority[0]),
        ("conv|down.conv1|priority", lambda priority: priority.float()),
        ("call|x|rows", lambda rows: rows[..., :-1].contiguous()),
        ("call|y|rows", lambda rows: rows.repeat(5, 1, 1)),  # 10
        ("call|z|rows", lambda rows: torch.zeros(1)),
        ("nothing known", lambda rows: torch.zeros(1)),
    ],
)
def test_a_tensor_of_another_shape(entry, key, change):
    tensors = load(entry.read_bytes())
    changed = change(tensors.get(key))
    rows = {key.replace("rows", "priority"): torch.zeros(len(changed)).double()} if "|rows" in key else {}
    forge(entry, tensors | rows | {key: changed})
    assert "is of another UNet" in refusal(ArtifactError, entry)


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
@pytest.mark.parametrize(
    "key", ["linear|down.to_q|amax", "conv|down.conv1|amax", "conv|down.conv1|rows", "call|x|rows"]
)
def test_values_that_no_pass_finds(entry, key, value):
    tensors = load(entry.read_bytes())
    tensors[key].view(-1)[-1] = value
    forge(entry, tensors)
    if value == -1 and key.endswith("rows"):
        shared(entry)
    else:
        assert f"negative or infinite values in {key!r}" in refusal(ArtifactError, entry)


@pytest.mark.parametrize(
    "other", [(b"a cat", b"a cow"), (b"a" * 64, b"b" * 64), (b"cuda", b"tpus"), (b'seed\\": 42', b'seed\\": 43')]
)
def test_an_altered_description(entry, other):
    content = entry.read_bytes()
    entry.write_bytes(content.replace(*other))
    assert entry.read_bytes() != content
    assert "is damaged or was altered" in refusal(ArtifactError, entry)


@given(change=st.data(), difference=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_changes_nothing_unnoticed(kept, change, difference):
    path, content = kept
    damaged = bytearray(content)
    header = 8 + int.from_bytes(damaged[:8], "little")
    damaged[change.draw(st.integers(0, header - 1) | st.integers(0, len(damaged) - 1))] ^= difference
    path.write_bytes(damaged)
    try:
        assert_same(shared(path), merge([statistics(range(2))]))
    except (ArtifactError, ConfigError) as refused:
        assert str(refused).isprintable()


DEEP = "[" * 100_000
SAMPLING = ORIGIN["sampling"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"origin": DEEP},
        {"origin": "{"},
        {"origin": "[]"},
        {"origin": json.dumps({"form": VERSION})},
        *({"origin": json.dumps({"form": VERSION, **ORIGIN, "checkpoint": value})} for value in (None, 3, [[]])),
        *(
            {"origin": json.dumps({"form": VERSION, **ORIGIN, "sampling": value})}
            for value in (None, 3, [], {"steps": 2})
        ),
        *(
            {"origin": json.dumps({"form": VERSION, **ORIGIN, "sampling": SAMPLING | {name: value}})}
            for name, value in [
                ("steps", "2"), ("steps", 2.0), ("guidance_scale", torch.nan), ("guidance_scale", "5"),
                ("height", "64"), ("height", 8), ("height", 2**40), ("width", None), ("width", torch.inf),
            ]
        ),
        {"prompts": DEEP},
        {"prompts": "null"},
        {"prompts": '{"first": 0, "last": 1}'},
        {"prompts": '{"first": 0, "last": 1, "texts": ["a cat"]}'},
        {"prompts": '{"first": 0, "last": -1, "texts": []}'},
        {"prompts": '{"first": 1, "last": -1, "texts": []}'},
        {"prompts": '{"first": 0.0, "last": 1, "texts": ["a cat", "a dog"]}'},
        {"prompts": '{"first": 0, "last": 1e3, "texts": ["a cat", "a dog"]}'},
        {"prompts": '{"first": 0, "last": 100000000000000000000000, "texts": ["a cat", "a dog"]}'},
    ],
    ids=lambda metadata: str(metadata)[:60],
)  # fmt: skip
def test_a_description_that_is_none(entry, metadata):
    forge(entry, **metadata)
    assert f"{entry} does not describe statistics (" in refusal(ArtifactError, entry)


def test_another_form(entry):
    forge(entry, origin=json.dumps({"form": "\n", **ORIGIN}))
    assert f"{entry} has form '\\n', expected {VERSION}; collect it again" in refusal(ArtifactError, entry)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04" + bytes(100),
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (100_000).to_bytes(8, "little") + DEEP.encode(),
        save({"a": torch.zeros(2)}),
        save({"a": torch.zeros(2)}, {"format": "pt"}),
        save({"linear|a|rows": torch.zeros(2)}, {"digest": "0" * 64}),  # as form 1 was
    ],
    ids=lambda content: repr(content[:30]),
)
def test_what_is_no_entry(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    refusal(ArtifactError, tmp_path)


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


def test_a_file_that_may_not_be_read(entry, monkeypatch):
    def forbidden(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert f"{entry} cannot be read (Permission denied)" in refusal(ConfigError, entry)
