"""Checkpoints and prompts from strangers, given to the real command: what is said, with which code, and what is left.

Each case lies in a folder of its own, with a canary in reach of whatever it may start or write. What readers of
archives and of pickles refuse by themselves is in tests/unit/files. SECURITY.md names what is tried elsewhere.
"""

import gzip
import io
import json
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
from sd_quant.places import HOME

pytestmark = pytest.mark.commit

FIRST = nemo_keys.PREFIX["unet"] + "input_blocks.0.0.weight"
MINI = HOME / "checkpoints/sdxl_mini.nemo"


@dataclass(frozen=True)
class Place:
    """Where a file is written, with a canary in reach of whatever it may start, and a checkpoint that is sound."""

    path: Path
    canary: Path
    whole: NemoCheckpoint

    def archive(self, config: str = "", weights: bytes | None = None) -> None:
        """A ``.nemo`` archive; config and weights default to those of the sound checkpoint."""
        member = open_members(self.whole.path)["model_weights.ckpt"]
        config = config or json.dumps(self.whole.model_config)  # JSON is YAML
        weights = weights or bytes(member.read(0, member.size))
        self.path.write_bytes(tar({"./model_config.yaml": config.encode(), "./model_weights.ckpt": weights}))

    def state(self, change: Callable[[dict], object], config: dict | None = None) -> None:
        """An archive of the sound checkpoint's weights, changed."""
        state = self.whole.state()
        change(state)
        write_archive(self.path, config or self.whole.model_config, state)


class Malicious:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def weights_of(canary: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": Malicious(canary)}, buffer)
    return buffer.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def bomb() -> bytes:
    """A GiB of zeros in five MB."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream:
        info = tarfile.TarInfo("./model_weights.ckpt")
        info.size = 2**30
        stream.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(64):
            stream.write(bytes(2**24))
    return packed.getvalue()


def with_nan(state: dict) -> None:
    tensor = state[FIRST].read().float()
    tensor.view(-1)[5] = float("nan")
    state[FIRST] = lazy(tensor)


def overflowing(state: dict) -> None:
    state[FIRST] = lazy(state[FIRST].read().float() * 1e38)


def weights_elsewhere(at: Place) -> None:
    """An ONNX file whose weights lie in another folder."""
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../canary")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [output], [weight])
    at.path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


ONE_CALL = ("quantize.py", "calib_size=1", "quantize.n_steps=1", "cache.dir=null", "export_trt=none")
CHECKPOINTS: dict[str, tuple[Callable[[Place], object], str]] = {  # what writes it, and words of the refusal
    "cut in a member": (lambda at: at.path.write_bytes(MINI.read_bytes()[:1_000_000]), "model_weights.ckpt"),
    "a gzip bomb": (lambda at: at.path.write_bytes(bomb()), "16 times its size"),
    "a pickle that runs": (lambda at: at.archive(weights=weights_of(at.canary)), "was not run"),
    "a config that runs": (lambda at: at.archive(f"a: !!python/object/apply:os.mkdir [{at.canary}]"), "not plain YAML"),
    "a config of nothing but a target": (
        lambda at: at.archive(f"_target_: os.mkdir\npath: {at.canary}\ntarget: os.mkdir"), "does not describe an SDXL",
    ),
    "a weight that is NaN": (lambda at: at.state(with_nan), f"{FIRST!r} of the unet holds 1 NaN"),
    "an activation that is not finite": (lambda at: at.state(overflowing), "not finite"),
}  # fmt: skip
BEHIND_THE_READERS = ("a weight that is NaN", "a gzip bomb")  # refused in seconds
OF_MINI = ("quantize.py", f"model.path={MINI}", "cache.dir=null")
OTHERS: dict[str, tuple[Callable[[Place], object], str, tuple[str, ...], int]] = {  # and the command, and its exit code
    "weights elsewhere": (weights_elsewhere, "outside its own folder", ("export_trt.py", "unet_xl="), 3),
    "a graph of text": (lambda at: at.path.write_bytes(b"hello"), "not an ONNX file", ("export_trt.py", "vae="), 3),
    "statistics in a pickle": (
        lambda at: at.path.write_bytes(weights_of(at.canary)), "no safetensors file", (*OF_MINI, "calibration="), 3,
    ),
    "prompts in a pickle": (
        lambda at: at.path.write_bytes(pickle.dumps(Malicious(at.canary))), "is not UTF-8 at line 1, byte 1",
        (*OF_MINI, "infer.prompts="), 2,
    ),
}  # fmt: skip
LEFT = {".hydra", ".lock", "quantize.log", "export_trt.log", "config.yaml", "failure.json"}  # by a job that began
MOST_MEMORY = 3 * 2**29  # bytes; what is imported takes half of it


@pytest.fixture(scope="module")
def whole() -> NemoCheckpoint:
    return open_nemo(MINI)


@pytest.mark.parametrize("name", [
    *(pytest.param(name, marks=pytest.mark.nightly if name in BEHIND_THE_READERS else ()) for name in CHECKPOINTS),
    *OTHERS,
])  # fmt: skip
def test_a_file_from_a_stranger_is_refused_and_runs_and_writes_nothing(command, whole, tmp_path, name):
    """A job that began leaves nothing but its own log and the like."""
    ends = ".nemo" if name in CHECKPOINTS else ".safetensors"
    place = Place(tmp_path / f"hostile/a{ends}", tmp_path / "canary", whole)
    place.path.parent.mkdir()
    if name in CHECKPOINTS:
        make, words = CHECKPOINTS[name]
        given, code = (*ONE_CALL, "model.path="), 1 if name == "an activation that is not finite" else 3  # a job fails
    else:
        make, words, given, code = OTHERS[name]
    make(place)
    ended = command(*given[:-1], f"{given[-1]}{place.path}", f"hydra.run.dir={tmp_path}/run")
    assert ended.returncode == code, ended.stderr[-2000:]
    refusals = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(refusals) == 1 and words in refusals[0], ended.stderr[-2000:]
    said = ended.stdout + ended.stderr
    assert not [each for each in ("Traceback", "weights_only", "\x1b") if each in said] and ended.memory < MOST_MEMORY
    assert {entry.name for entry in (tmp_path / "run").glob("*")} <= LEFT
    assert {entry.name for entry in tmp_path.iterdir()} - {"run"} == {"hostile"}  # no canary
    assert list(place.path.parent.iterdir()) == [place.path]


def test_the_canary_sings_where_something_runs(tmp_path):
    """Else the cases above show nothing."""
    pickle.loads(pickle.dumps(Malicious(tmp_path / "canary")))
    assert (tmp_path / "canary").is_dir()
