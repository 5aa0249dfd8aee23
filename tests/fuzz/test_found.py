"""What the fuzzing has found, each as the smallest file that shows it."""

import json
import time
from copy import deepcopy
from pathlib import Path

import pytest

from sd_quant.checkpoints.archive import whole_file
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.safetensors_file import read_safetensors
from sd_quant.checkpoints.torch_weights import stored_tensors
from sd_quant.config import run_model
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import LONGEST, ArtifactError, ConfigError, SdQuantError
from sd_quant.report.rebuild import rebuild
from sd_quant.report.summary import UNFINISHED, read_sweep
from sd_quant.report.table import run_table

from .mutations import YAML_PLANTS, called, constant, to_yaml, with_pickle
from .of_artifacts import graph_with
from .of_checkpoints import nemo, tar_of, tiny_config, weights_file
from .of_records import PLAN, TIMING, a_record

QUICK = 5  # seconds of the processor; without a bound it is hours
SHARED = b")q\xc8" + b"h\xc8h\xc8\x86q\xc8" * 60  # a tuple that holds the last one twice, sixty times


def quickly(refuse) -> str:
    start = time.process_time()
    with pytest.raises(SdQuantError) as refusal:
        refuse()
    assert time.process_time() - start < QUICK
    assert str(refusal.value).isprintable() and len(str(refusal.value)) <= LONGEST
    return str(refusal.value)


@pytest.mark.parametrize(
    "content",
    [
        constant("x" * 200_000)
        + b")R",  # torch searches its own message for longer than a day where there are millions
        b"}" + SHARED + b"h\xc8K\x01s",  # the hash of a key
        SHARED + b"h\xc8)R",  # the text of what is called
        b"}" + b")" + b"2\x86" * 60 + b"K\x01s",
    ],
    ids=["text", "key", "function", "duplicated"],
)
def test_a_small_pickle_does_not_stand_for_a_large_one(tmp_path, content):
    path = tmp_path / "a.ckpt"
    path.write_bytes(with_pickle(weights_file(), lambda data: b"\x80\x02" + content + b"."))
    assert "its pickle" in quickly(lambda: stored_tensors(whole_file(path)))


def test_torch_says_nothing_beside_the_refusal(tmp_path, capfd):
    path = tmp_path / "a.ckpt"
    huge = weights_file()
    path.write_bytes(with_pickle(huge, lambda data: data.replace(b"K\x03K\x04\x86", constant((2**62, 2**62)), 1)))
    quickly(lambda: stored_tensors(whole_file(path)))
    assert capfd.readouterr() == ("", "")


def test_nothing_that_a_pickle_names_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = called("os", "system", ("touch canary",), 0)
    Path("a.ckpt").write_bytes(with_pickle(weights_file(), lambda data: data[:2] + call + data[2:]))
    assert "asks for 'os.system', which was not run" in quickly(lambda: stored_tensors(whole_file(Path("a.ckpt"))))
    assert not Path("canary").exists()


@pytest.mark.parametrize("place", [("unet_config", "context_dim"), ("unet_config", "image_size"), ("scale_factor",)])
def test_lists_of_lists_in_a_checkpoints_yaml_are_not_written_out(tmp_path, place):
    config = tiny_config()
    holder = config
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = "@bomb"
    sound = nemo(tmp_path).files["a.nemo"]
    start = sound.index(b"PK\x03\x04")
    end = sound.rindex(b"PK\x05\x06") + 22
    members = {"model_config.yaml": to_yaml(config), "model_weights.ckpt": sound[start:end]}
    (tmp_path / "b.nemo").write_bytes(tar_of(members, 1))
    quickly(lambda: open_nemo(tmp_path / "b.nemo"))


@pytest.mark.parametrize("plant", ["@bomb", "@cycle", "@deep list", "@object", "@date", "@not a number"])
def test_a_runs_configuration_is_refused_in_a_line(tmp_path, plant):
    (tmp_path / "config.yaml").write_bytes(to_yaml({"model": {"path": plant, "a\n\x1b[2Jb": 1}}))
    quickly(lambda: run_model(str(tmp_path)))
    assert plant in YAML_PLANTS or plant == "@deep list"


@pytest.mark.parametrize("location", ["a\0b", "x" * 300, "y/" * 3000 + "z", "", "..", "/etc/passwd"])
def test_weights_of_a_graph_have_a_name_that_a_file_can_have(tmp_path, location):
    (tmp_path / "a.onnx").write_bytes(graph_with([location, location]))
    quickly(lambda: onnx_files(tmp_path / "a.onnx"))


def test_a_graph_whose_offset_is_no_number_is_refused(tmp_path):
    (tmp_path / "a.data").write_bytes(bytes(16))
    (tmp_path / "a.onnx").write_bytes(graph_with(["a.data", "a.data"]).replace(b"\x02" + b"16", b"\x02" + b"xx"))
    assert "claims more numbers" in quickly(lambda: onnx_files(tmp_path / "a.onnx"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("latency", "openvino"), ["a"]), (("latency", "openvino", "image", "1", "speedup"), -2.0),
        (("latency", "openvino", "image", "1", "quantized", "p50_ms"), "fast"), (("stages", "export"), 3),
        (("fidelity", "psnr", "mean"), 10**400), (("fidelity", "latent_sqnr_db"), {"value": None}),
        (("plans", "unet_xl", "targets"), [None]), (("knobs", "infer"), "openvino"), (("peak_memory_bytes",), True),
        (("environment", "machine", "memory_bytes"), "much"), (("sizes_bytes", "vae"), 7),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_an_unfinished_job(tmp_path, place, value):
    record = a_record(30.0, 2.0)
    holder = record
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = value
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    [job] = read_sweep(tmp_path).jobs
    assert job.status == UNFINISHED and f"{place[-1]} is " in job.reason


def test_a_stage_without_a_time_and_a_name_without_utf8_are_shown(tmp_path):
    record = a_record(30.0, 2.0)
    record["stages"]["export"], record["status"] = {"seconds": None}, None
    record["knobs"]["infer"]["engine"] = "\ud800"
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    assert rebuild(tmp_path).is_file() and run_table(record).startswith("unfinished")


def test_a_job_that_varies_nothing_says_so(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({**PLAN, "jobs": [{"name": "a", "varied": None}]}))
    with pytest.raises(ArtifactError, match="not the plan of a sweep"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("published", [{}, {**PLAN["published"], "batches": {"1": {"framework": 0}}}, {"batches": 3}])
def test_published_figures_that_are_none_are_refused(tmp_path, published):
    jobs = [{"name": "a", "varied": {}}]
    (tmp_path / "sweep.json").write_text(json.dumps({**PLAN, "jobs": jobs, "published": published}))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.json").write_text(json.dumps(a_record(30.0, 2.0)))
    with pytest.raises(ArtifactError, match="published figures that are none"):
        rebuild(tmp_path)


def test_every_refusal_is_a_line_that_ends_with_its_advice():
    error = ConfigError("it is " + "a\x1b[2J\n‮" * 1000 + "; fetch it again")
    assert str(error).isprintable() and len(str(error)) == LONGEST and str(error).endswith("; fetch it again")


@pytest.mark.parametrize("name", ["blocks", "jobs", "subjects", "samples_ms", "reference_ms", "rest", "image_ms"])
@pytest.mark.parametrize("value", [None, "missing", 1e-320, [1e-320] * 5])
def test_rounds_that_are_none_are_refused(tmp_path, name, value):
    timing = deepcopy(TIMING)
    for holder in (timing, timing["blocks"][0], timing["blocks"][0]["subjects"][0]):
        if name in holder:
            holder.pop(name) if value == "missing" else holder.update({name: value})
            break
    (tmp_path / "sweep.json").write_text(json.dumps(PLAN))
    (tmp_path / "timing.json").write_text(json.dumps(timing))
    if name == "blocks" and value in (None, "missing") or name == "rest" and value == 1e-320:
        read_sweep(tmp_path)  # nothing was timed, or an image is nothing but its denoiser
    else:
        assert "timing.json holds no rounds" in quickly(lambda: read_sweep(tmp_path))


def test_a_side_that_no_number_can_hold_is_refused_where_another_is_zero(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 10**400], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "not a whole safetensors file" in quickly(lambda: read_safetensors(whole_file(tmp_path / "a.safetensors")))
