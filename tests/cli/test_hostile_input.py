"""Checkpoints and prompts from strangers, given to the real command: what is said, with which code, and what is left.

Each case lies in a folder of its own, with a canary in reach of whatever it may start or write. SECURITY.md names what
is tried elsewhere.
"""

import pickle
from pathlib import Path

import onnx
import pytest

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint

from .hostile import CASES, MINI, ONE_CALL, Malicious, Place, code_of, pickled

pytestmark = pytest.mark.commit

LEFT = {".hydra", ".lock", "quantize.log", "export_trt.log", "config.yaml", "failure.json"}  # by a job that began
MOST_MEMORY = 3 * 2**29  # bytes; what is imported takes half of it
BEHIND_THE_READERS = (  # refused once the checkpoint is opened, in seconds: one of their like is in make test
    "a flipped bit", "keys that are missing, unknown and misshapen", "weights in int8", "a weight that is NaN",
    "targets in every section", "weights that share one storage", "a gzip bomb",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> NemoCheckpoint:
    return open_nemo(MINI)


@pytest.fixture
def place(tmp_path, whole) -> Place:
    (tmp_path / "hostile").mkdir()
    return Place(tmp_path / "hostile/a.nemo", tmp_path / "canary", whole)


@pytest.fixture
def refused(forked, place, tmp_path):
    """Runs a command on the file and asserts how it is refused, and that it ran and wrote nothing but what a job that
    began says of itself."""

    def run(code: int, words: str, script: str, *knobs: str) -> None:
        given = list(place.path.parent.iterdir())
        result, memory = forked(script, *knobs, f"hydra.run.dir={tmp_path}/run")
        said = result.stdout + result.stderr
        assert result.returncode == code, result.stderr[-2000:]
        refusals = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(refusals) == 1 and words in refusals[0], result.stderr[-2000:]
        assert not [each for each in ("Traceback", "weights_only", "\x1b") if each in said] and memory < MOST_MEMORY
        assert not place.canary.exists()
        assert {entry.name for entry in (tmp_path / "run").glob("*")} <= LEFT
        assert [entry.name for entry in tmp_path.iterdir() if entry.name != "run"] == ["hostile"]
        assert list(place.path.parent.iterdir()) == given

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in BEHIND_THE_READERS else ()) for name in CASES]
)
def test_a_checkpoint_from_a_stranger(refused, place, name):
    make, words = CASES[name]
    make(place)
    refused(code_of(name), words, "quantize.py", f"model.path={place.path}", *ONE_CALL)


def outside(canary: Path) -> bytes:
    """An ONNX file whose weights lie elsewhere."""
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../canary")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [output], [weight])
    return onnx.helper.make_model(graph).SerializeToString()


@pytest.mark.parametrize(("content", "script", "knob", "code", "words"), [
    (outside, "export_trt.py", "unet_xl", 3, "outside its own folder"),
    (lambda canary: b"hello", "export_trt.py", "vae", 3, "not an ONNX file"),
    (lambda canary: pickled({"a": Malicious(canary)}), "quantize.py", "calibration", 3, "no safetensors file"),
    (lambda canary: pickle.dumps(Malicious(canary)), "quantize.py", "infer.prompts", 2,
     "is not UTF-8 at line 1, byte 1"),
], ids=["weights elsewhere", "a graph of text", "statistics in a pickle", "prompts in a pickle"])  # fmt: skip
def test_another_file_from_a_stranger(refused, place, content, script, knob, code, words):
    path = place.path.with_name("file.safetensors")
    path.write_bytes(content(place.canary))
    rest = (f"model.path={MINI}", "cache.dir=null") if script == "quantize.py" else ()
    refused(code, words, script, f"{knob}={path}", *rest)


def test_the_canary_sings_where_something_runs(tmp_path):
    """Else the cases above show nothing."""
    pickle.loads(pickle.dumps(Malicious(tmp_path / "canary")))
    assert (tmp_path / "canary").is_dir()
