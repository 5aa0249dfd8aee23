"""Checkpoints and prompts from strangers, given to the real command: what is said, with which code, and what is left.

Each case lies in a folder of its own, with a canary in reach of whatever it may start or write. SECURITY.md names what
is tried elsewhere.
"""

import copy
import gzip
import io
import json
import math
import os
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch

from sd_quant.checkpoints.nemo import open_nemo, write_archive
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.files.archive import open_members
from sd_quant.files.tensors import lazy
from sd_quant.names import nemo as nemo_keys

pytestmark = pytest.mark.commit

FIRST = nemo_keys.PREFIX["unet"] + "input_blocks.0.0.weight"
LEFT = {".hydra", ".lock", "quantize.log", "export_trt.log", "config.yaml", "failure.json"}  # by a job that began
MOST_MEMORY = 3 * 2**29  # bytes; what is imported takes half of it


@pytest.fixture(scope="module")
def whole(checkpoint) -> NemoCheckpoint:
    return open_nemo(checkpoint)


@dataclass(frozen=True)
class Case:
    """``make`` writes the file; ``code`` and ``words`` are how the command refuses it, before or after it began."""

    make: Callable[[Path, Path, NemoCheckpoint], object]  # the file, the canary, a checkpoint that is sound
    code: int
    words: str


def bytes_of(member: Callable[[Path, Path, NemoCheckpoint], bytes]) -> Callable[[Path, Path, NemoCheckpoint], object]:
    return lambda path, canary, whole: path.write_bytes(member(path, canary, whole))


def tar(*members: tuple[str, bytes], **fields) -> bytes:
    """The last member has the ``fields``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if (name, content) == members[-1]:
                for field, value in fields.items():
                    setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header_that_claims(size: int) -> bytes:
    info = tarfile.TarInfo("./model_weights.ckpt")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)


def sparse(_path: Path, _canary: Path, _whole: NemoCheckpoint) -> bytes:
    """GNU's old form of 8 GiB, of which nothing is stored."""
    info = tarfile.TarInfo("./model_weights.ckpt")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0" % (2**33 - 1) + b"%011o\0" % 0  # one piece, and it is empty
    header[483:495] = b"%011o\0" % (2**33 - 1)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def bomb(_path: Path, _canary: Path, _whole: NemoCheckpoint) -> bytes:
    """A GiB of zeros in five MB."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream:
        stream.write(header_that_claims(2**30))
        for _ in range(64):
            stream.write(bytes(2**24))
    return packed.getvalue()


class Malicious:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def pickled(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def archive_with(weights: Callable[[Path], bytes]) -> Callable[[Path, Path, NemoCheckpoint], object]:
    """The mini checkpoint's config beside other weights."""

    def make(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
        config = json.dumps(whole.model_config).encode()  # JSON is YAML
        path.write_bytes(tar(("./model_config.yaml", config), ("./model_weights.ckpt", weights(canary))))

    return make


def config_with(text: str) -> Callable[[Path, Path, NemoCheckpoint], object]:
    """Beside the mini checkpoint's weights."""

    def make(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
        weights = open_members(whole.path)["model_weights.ckpt"]
        config = ("./model_config.yaml", text.format(canary=canary).encode())
        path.write_bytes(tar(config, ("./model_weights.ckpt", bytes(weights.read(0, weights.size)))))

    return make


def entries_with(change: Callable[[dict], object], text: Callable[[str], str] = str):
    """The mini checkpoint's config with other entries, and its weights."""

    def make(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
        config = copy.deepcopy(whole.model_config)
        change(config)
        config_with(text(json.dumps(config)).replace("{", "{{").replace("}", "}}"))(path, canary, whole)

    return make


def wide_without_end(config: dict) -> None:
    config["unet_config"] |= {"model_channels": "x", "channel_mult": [4_000_000_000] * 2}


MERGES = "\n".join(
    f"a{level}: &a{level} {{{{" + (f"<<: [{', '.join([f'*a{level - 1}'] * 9)}]" if level else "k: 1") + "}}"
    for level in range(9)
)


def flipped(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
    """One bit of the last weights."""
    content = bytearray(whole.path.read_bytes())
    content[int(0.9 * len(content))] ^= 1
    path.write_bytes(content)


def one_storage(state: dict) -> None:
    """Every weight of the UNet is the first numbers of one tensor."""
    keys = [key for key in state if key.startswith(nemo_keys.PREFIX["unet"])]
    numbers = torch.zeros(max(math.prod(state[key].shape) for key in keys))
    views = {key: numbers[: math.prod(state[key].shape)].view(state[key].shape) for key in keys}
    state |= views


def saved_as_they_are(change: Callable[[dict], object]) -> Callable[[Path, Path, NemoCheckpoint], object]:
    """By torch itself, which stores a shared storage once."""

    def make(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
        state = {key: tensor for key, tensor in whole.state().items()}
        change(state)
        tensors = {key: tensor if isinstance(tensor, torch.Tensor) else tensor.read() for key, tensor in state.items()}
        archive_with(lambda _: pickled(tensors))(path, canary, whole)

    return make


def targets_everywhere(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
    """A sound config in which every section says what to call; the weights end the job after all was built."""

    def spread(node: object) -> object:
        if not isinstance(node, dict):
            return node
        calls = {"_target_": "os.mkdir", "target": "os.mkdir", "path": str(canary)}
        return {key: spread(value) for key, value in node.items()} | calls

    state = whole.state()
    first_weight(float("nan"))(state)
    write_archive(path, spread(whole.model_config), state)


def changed(change: Callable[[dict], object]) -> Callable[[Path, Path, NemoCheckpoint], object]:
    def make(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
        state = whole.state()
        change(state)
        write_archive(path, whole.model_config, state)

    return make


def first_weight(value: float | None = None, factor: float = 1.0) -> Callable[[dict], object]:
    def change(state: dict) -> None:
        tensor = state[FIRST].read().float() * factor
        if value is not None:
            tensor.view(-1)[5] = value
        state[FIRST] = lazy(tensor)

    return change


def without_a_block(state: dict) -> None:
    for key in [key for key in state if ".input_blocks.4." in key]:
        del state[key]
    state["model.stranger\x1b[2J"] = lazy(torch.ones(1))
    state[FIRST] = lazy(torch.ones(3, 3))


HARMLESS = ("./model_config.yaml", b"{}")
CASES = {
    "cut in a member": Case(
        bytes_of(lambda path, canary, whole: whole.path.read_bytes()[:1_000_000]), 3, "model_weights.ckpt"
    ),
    "cut between members": Case(bytes_of(lambda *_: tar(HARMLESS)[:1024]), 3, "end-of-archive"),
    "a name that leads out": Case(bytes_of(lambda *_: tar(HARMLESS, ("../canary", b"1"))), 3, "points outside"),
    "a symbolic link": Case(
        bytes_of(lambda *_: tar(HARMLESS, ("./x", b""), type=tarfile.SYMTYPE, linkname="/etc")), 3, "symbolic link"
    ),
    "a pipe": Case(bytes_of(lambda *_: tar(HARMLESS, ("./x", b""), type=tarfile.FIFOTYPE)), 3, "tar type"),
    "a member twice": Case(bytes_of(lambda *_: tar(HARMLESS, HARMLESS)), 3, "twice"),
    "a tebibyte that is claimed": Case(bytes_of(lambda *_: header_that_claims(2**40)), 3, "1099511627776"),
    "gigabytes of holes": Case(bytes_of(sparse), 3, "tar type"),
    "a gzip bomb": Case(bytes_of(bomb), 3, "16 times its size"),
    "a pickle that runs": Case(archive_with(lambda canary: pickled({"a": Malicious(canary)})), 3, "was not run"),
    "a pickle alone that runs": Case(
        archive_with(lambda canary: pickle.dumps({"a": Malicious(canary)})), 3, "torch.save"
    ),
    "garbage for weights": Case(archive_with(lambda canary: b"\x00garbage" * 1000), 3, "model_weights.ckpt"),
    "no weights at all": Case(archive_with(lambda canary: b""), 3, "model_weights.ckpt"),
    "a config that runs": Case(config_with("a: !!python/object/apply:os.mkdir [{canary}]"), 3, "not plain YAML"),
    "a config of nothing but a target": Case(
        config_with("_target_: os.mkdir\npath: {canary}\ntarget: os.mkdir"), 3, "does not describe an SDXL"
    ),
    "numbers of base sixty": Case(
        entries_with(lambda config: config.update(scale_factor=17),
                     lambda text: text.replace('"scale_factor": 17', '"scale_factor": ' + "1:" * 400_000 + "1")),
        3, "scale_factor is '1:1:1",
    ),
    "merge keys that multiply": Case(config_with(MERGES), 3, "entries"),
    "a width that is text, times billions": Case(
        entries_with(wide_without_end), 3, "unet_config.model_channels is 'x', expected a whole number"
    ),
    "weights that share one storage": Case(saved_as_they_are(one_storage), 3, "share what is stored"),
    "a flipped bit": Case(flipped, 3, "checksum"),
    "targets in every section": Case(targets_everywhere, 3, f"{FIRST!r} of the unet holds 1 NaN"),
    "keys that are missing, unknown and misshapen": Case(changed(without_a_block), 3, " missing: "),
    "weights in int8": Case(changed(lambda state: state.update({FIRST: lazy(state[FIRST].read().to(torch.int8))})), 3,
                            "torch.int8"),
    "a weight that is NaN": Case(changed(first_weight(float("nan"))), 3, f"{FIRST!r} of the unet holds 1 NaN"),
    "an activation that is not finite": Case(changed(first_weight(factor=1e38)), 1, "not finite"),
}  # fmt: skip


BEHIND_THE_READERS = (  # refused once the checkpoint is opened, in seconds: one of their like is in make test
    "a flipped bit", "keys that are missing, unknown and misshapen", "weights in int8", "a weight that is NaN",
    "targets in every section", "weights that share one storage", "a gzip bomb",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in BEHIND_THE_READERS else ()) for name in CASES]
)
def test_a_checkpoint_from_a_stranger(forked, whole, tmp_path, name):
    case, canary, path = CASES[name], tmp_path / "canary", tmp_path / "hostile" / "a.nemo"
    path.parent.mkdir()
    case.make(path, canary, whole)
    result, memory = forked(
        "quantize.py", f"model.path={path}", "calib_size=1", "quantize.n_steps=1", "cache.dir=null",
        "export_trt=none", f"hydra.run.dir={tmp_path}/run",
    )  # fmt: skip
    assert result.returncode == case.code, result.stderr[-2000:]
    refusals = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(refusals) == 1 and case.words in refusals[0], result.stderr[-2000:]
    assert "Traceback" not in result.stdout + result.stderr and "weights_only" not in result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr and memory < MOST_MEMORY

    check_untouched(tmp_path, path)


def check_untouched(tmp_path: Path, path: Path) -> None:
    """Nothing ran and nothing was written but what a job that began says of itself."""
    assert not (tmp_path / "canary").exists()
    left = {entry.name for entry in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    assert left <= LEFT
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name != "run") == ["hostile"]
    assert list(path.parent.iterdir()) == [path]


def outside(path: Path, canary: Path, whole: NemoCheckpoint) -> None:
    """An ONNX file whose weights lie elsewhere."""
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../canary")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    path.write_bytes(
        onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [output], [weight])).SerializeToString()
    )


OTHERS = {
    "a graph with weights elsewhere": ("export_trt.py", "unet_xl=", Case(outside, 3, "outside its own folder")),
    "a graph that is text": ("export_trt.py", "vae=", Case(bytes_of(lambda *_: b"hello"), 3, "not an ONNX file")),
    "statistics that are a pickle": (
        "quantize.py",
        "calibration=",
        Case(bytes_of(lambda path, canary, whole: pickled({"a": Malicious(canary)})), 3, "no safetensors file"),
    ),
    "prompts that are a pickle": (
        "quantize.py",
        "infer.prompts=",
        Case(
            bytes_of(lambda path, canary, whole: pickle.dumps(Malicious(canary))), 2, "is not UTF-8 at line 1, byte 1"
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_file_from_a_stranger(forked, whole, tmp_path, name):
    script, knob, case = OTHERS[name]
    path = tmp_path / "hostile" / "file.safetensors"
    path.parent.mkdir()
    case.make(path, tmp_path / "canary", whole)
    rest = (f"model.path={whole.path}", "cache.dir=null") if script == "quantize.py" else ()
    result, memory = forked(script, f"{knob}{path}", *rest, f"hydra.run.dir={tmp_path}/run")
    assert (result.returncode, result.stderr.count("error: ")) == (case.code, 1), result.stderr[-2000:]
    assert case.words in result.stderr and "Traceback" not in result.stdout + result.stderr and memory < MOST_MEMORY
    check_untouched(tmp_path, path)


def test_the_canary_sings_where_something_runs(tmp_path):
    """Else the cases above show nothing."""
    pickle.loads(pickle.dumps(Malicious(tmp_path / "canary")))
    assert (tmp_path / "canary").is_dir()
