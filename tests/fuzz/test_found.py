"""Faults that fuzzing has found, each as the smallest file that shows it."""

import json
import time
from copy import deepcopy

import pytest

from sd_quant.config import run_model
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import LONGEST, ArtifactError, SdQuantError
from sd_quant.files.archive import whole_file
from sd_quant.files.torch_weights import stored_tensors
from sd_quant.report.rebuild import rebuild
from sd_quant.report.run_table import run_table
from sd_quant.report.summary import read_sweep

from .mutations import constant, to_yaml, with_pickle
from .of_checkpoints import weights_file
from .of_runs import PLAN, TIMING, a_record, graph_with

pytestmark = pytest.mark.commit

QUICK = 5  # seconds of the processor; without a bound it is hours
SHARED = b")q\xc8" + b"h\xc8h\xc8\x86q\xc8" * 60  # a tuple that holds the last one twice, sixty times


def quickly(refuse) -> str:
    """The sentence of a refusal."""
    start = time.process_time()
    with pytest.raises(SdQuantError) as refusal:
        refuse()
    assert time.process_time() - start < QUICK
    assert str(refusal.value).isprintable() and len(str(refusal.value)) <= LONGEST
    return str(refusal.value)


@pytest.mark.parametrize("content", [
    constant("x" * 200_000) + b")R",  # torch searches its own message; where there are millions, for a day
    b"}" + SHARED + b"h\xc8K\x01s",  # the hash of a key
    SHARED + b"h\xc8)R",  # the text of what is called
    b"}" + b")" + b"2\x86" * 60 + b"K\x01s",
], ids=["text", "key", "function", "duplicated"])  # fmt: skip
def test_a_small_pickle_does_not_stand_for_a_large_one(tmp_path, content):
    path = tmp_path / "a.ckpt"
    path.write_bytes(with_pickle(weights_file(), lambda data: b"\x80\x02" + content + b"."))
    assert "its pickle" in quickly(lambda: stored_tensors(whole_file(path)))


def test_torch_says_nothing_beside_the_refusal(tmp_path, capfd):
    path, sides = tmp_path / "a.ckpt", constant((2**62, 2**62))
    path.write_bytes(with_pickle(weights_file(), lambda data: data.replace(b"K\x03K\x04\x86", sides, 1)))
    quickly(lambda: stored_tensors(whole_file(path)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("plant", ["@bomb", "@cycle", "@deep list", "@object", "@date", "@not a number"])
def test_a_runs_configuration_is_refused_in_a_line(tmp_path, plant):
    (tmp_path / "config.yaml").write_bytes(to_yaml({"model": {"path": plant, "a\n\x1b[2Jb": 1}}))
    quickly(lambda: run_model(str(tmp_path)))


def test_a_graph_whose_offset_is_no_number_is_refused(tmp_path):
    (tmp_path / "a.data").write_bytes(bytes(16))
    (tmp_path / "a.onnx").write_bytes(graph_with(["a.data", "a.data"]).replace(b"\x02" + b"16", b"\x02" + b"xx"))
    assert "claims more numbers" in quickly(lambda: onnx_files(tmp_path / "a.onnx"))


def test_a_stage_without_a_time_and_a_name_without_utf8_are_shown(tmp_path):
    record = a_record(30.0, 2.0) | {"status": None}
    record["knobs"]["infer"]["engine"], record["stages"]["export"] = "\ud800", {"seconds": None}
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    assert rebuild(tmp_path).is_file() and run_table(record).startswith("unfinished")


@pytest.mark.parametrize("published", [{}, {**PLAN["published"], "batches": {"1": {"framework": 0}}}, {"batches": 3}])
def test_published_figures_that_are_none_are_refused(tmp_path, published):
    jobs = [{"name": "a", "varied": {}}]
    (tmp_path / "sweep.json").write_text(json.dumps({**PLAN, "jobs": jobs, "published": published}))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.json").write_text(json.dumps(a_record(30.0, 2.0)))
    with pytest.raises(ArtifactError, match="published figures that are none"):
        rebuild(tmp_path)


@pytest.mark.parametrize("value", [None, "missing", 1e-320, [1e-320] * 5])
def test_rounds_that_are_none_are_refused(tmp_path, value):
    (tmp_path / "sweep.json").write_text(json.dumps(PLAN))
    for name in ("blocks", "jobs", "subjects", "samples_ms", "reference_ms", "rest", "image_ms"):
        timing = deepcopy(TIMING)
        for holder in (timing, timing["blocks"][0], timing["blocks"][0]["subjects"][0]):
            if name in holder:
                holder.pop(name) if value == "missing" else holder.update({name: value})
                break
        (tmp_path / "timing.json").write_text(json.dumps(timing))
        if name == "blocks" and value in (None, "missing") or name == "rest" and value == 1e-320:
            read_sweep(tmp_path)  # nothing was timed, or an image is nothing but its denoiser
            continue
        assert "timing.json holds no rounds" in quickly(lambda: read_sweep(tmp_path))
