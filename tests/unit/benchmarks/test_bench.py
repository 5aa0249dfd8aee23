"""The bench of checkpoints: its pictures, what it refuses, how it chooses, and one checkpoint from drawing to table."""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.places import HOME

pytestmark = pytest.mark.commit


def test_pictures_are_drawn_alike_each_time_and_captions_tell_them_apart(benchmark):
    pictures = benchmark("bench_pictures")
    for kind in ("glyphs", "textures", "faces", "scenes"):
        (captions, first), (again, second) = pictures.drawn(kind, 8), pictures.drawn(kind, 8)
        assert captions == again and np.array_equal(first, second)
        assert first.shape == (8, 64, 64, 3) and first.dtype == np.uint8
        assert len(set(captions)) > 4 and all(picture.std() > 1 for picture in first)
        assert not np.array_equal(first, pictures.drawn(kind, 8, seed=1)[1])


def test_a_bench_that_is_missing_incomplete_or_of_another_hash(benchmark, tmp_path, monkeypatch):
    bench = benchmark("bench")

    def refused(name: str, said: str) -> None:
        with pytest.raises(SystemExit, match=said):
            bench.opened(name, tmp_path)

    refused("faces", "checkpoints.json is missing")
    (tmp_path / "checkpoints.json").write_text(json.dumps({"faces": {"family": "sdxl", "sha256": "0" * 64}}))
    for name in ("faces", "unknown"):
        refused(name, f"the checkpoint {name} of the bench is missing")
    (tmp_path / "faces").mkdir()
    (tmp_path / "faces/captions.txt").write_text("a face\n")
    refused("faces", "expected 000000000000: its files are incomplete or altered.*make bench-checkpoints")
    monkeypatch.setitem(bench.KNOWN, "second", ("sdxl_mini", tmp_path / "none.nemo", None, "a", "b"))
    refused("second", "none.nemo is missing")


def test_the_recipe_for_a_checkpoint_is_chosen_on_the_others(benchmark):
    """On a and b the second is better when choosing, on c the first, by much: c alone decides for a and b."""

    def of(first: float, second: float) -> dict:
        return {"x": {"choice": [first] * 2, "report": [30.0, 31.0]},
                "y": {"choice": [second] * 2, "report": [32.0, 32.5]}}  # fmt: skip

    found = {"a": of(30, 31), "b": of(30, 31), "c": of(40, 30)}
    *rows, means = [line.split(" | ") for line in benchmark("bench").tables(found, ["x", "y"]).splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["a", "b", "c"] and "30.50, 30.00" in rows[0][1]
    assert [row[3] for row in rows] == ["x", "x", "y"] and "+1.75 ± 0.25" in rows[2][4]
    assert "+1.75 ± 0.00, least +1.75" in means[2] and "+0.58 ± 2.51, least +0.00" in means[4]  # of 0, 0 and 1.75


def test_damping_is_that_of_the_row_alone(benchmark):
    """It is no knob; the row after it has GPTQ's own again."""
    bench = benchmark("bench")
    for row, damping in (("nvfp4 damping=3", 3.0), ("nvfp4", 1.0)):
        assert bench.job_of(row).quantize.format == "nvfp4" and bench.rounding.DAMPING == damping


def test_a_peer_is_compared_on_images_that_both_have(benchmark):
    """Neither where it is not installed nor where its images are those of full precision, whose PSNR is None."""
    values = {"ours": [30.0, 33.0], "alike": [None, 40.0], "worse": [29.0, 31.0]}
    rows = [{"peer": name, "fidelity": {"psnr": {"values": each}}} for name, each in values.items()]
    text = benchmark("peers").gains({"faces": [*rows, {"peer": "absent", "reason": "not installed"}]})
    assert text.splitlines()[-1] == "| faces | 31.50 | – | +1.50 ± 0.50 | – |"


@pytest.mark.nightly
def test_a_checkpoint_is_made_noted_and_opened(benchmark, tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    train, bench = benchmark("bench_train"), benchmark("bench")
    monkeypatch.setattr(train, "PICTURES", 260)
    monkeypatch.setitem(train.BENCH, "sketches", dataclasses.replace(train.BENCH["sketches"], steps=3))
    monkeypatch.setattr(train, "SHIPPED", tmp_path)
    train.make("sketches", tmp_path)
    subject, chosen, reported = bench.opened("sketches", tmp_path)
    assert subject.denoiser == "transformer" and len(subject.names) > 20
    assert not set(subject.prompts) & set(chosen) and not {*subject.prompts, *chosen} & set(reported)
    shutil.rmtree(tmp_path / "sketches/transformer")
    with pytest.raises(SystemExit, match="incomplete or altered"):
        bench.opened("sketches", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["scenes", "sketches"])
def test_the_default_gains_over_a_fixed_alpha_on_a_shipped_checkpoint(name, benchmark, tmp_path):
    """2.2 to 2.6 dB when last measured, see benchmarks/results/bench.md."""
    train, bench = benchmark("bench_train"), benchmark("bench")
    train.make(name, tmp_path)
    options = argparse.Namespace(bench=tmp_path, out=tmp_path / "rows", images=8, steps=20)
    options.recipes = ["the default", "alpha=0.5"]
    found = bench.measured(name, options)
    default, fixed = (np.array(found[recipe]["report"]) for recipe in options.recipes)
    assert (default - fixed).mean() > 1 and default.mean() > 39


SCRIPT = """
import argparse, os, signal
from measurer import Rows, add_row, serve
from pathlib import Path

def work(options, name, number):
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fails" and not Path("mended").exists():
        raise RuntimeError("so it is")
    return {"number": int(number), "process": os.getpid()}

parser = argparse.ArgumentParser()
parser.add_argument("--subject", default="this")
add_row(parser)
options = parser.parse_args()
if options.row:
    serve({"work": work}, options)
else:
    rows = Rows(Path("."), {"of": options.subject})
    for name in ("works", "killed", "fails"):
        rows.measure(f"work:{name}:3", note=name)
"""


@pytest.mark.slow
def test_a_row_that_has_its_figures_is_not_measured_again(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*arguments: str) -> tuple[str, dict]:
        ended = subprocess.run([sys.executable, "script.py", *arguments], cwd=tmp_path, capture_output=True, text=True,
                               env={"PYTHONPATH": f"{HOME}:{HOME / 'benchmarks'}"})  # fmt: skip
        return ended.stderr, json.loads((tmp_path / "rows.json").read_text())

    _, first = run()
    works, killed, fails = (first[f"work:{name}:3"] for name in ("works", "killed", "fails"))
    assert works["number"] == 3 and works["note"] == "works" and works["peak_memory_bytes"] > works["seconds"] > 0
    assert killed["failed"] == "killed" and fails["failed"] == "RuntimeError: so it is"
    (tmp_path / "mended").touch()
    said, second = run()
    mended = second["work:fails:3"]
    assert not said and mended["number"] == 3 and second == first | {"work:fails:3": mended}
    assert "rows.json has figures of another subject; delete it" in run("--subject", "another")[0]


TRUE = {"said": {}, "quantized_layers": 150, "int8_layers": 150, "own_speedup": 1.2, "speedup": 1.21}
SAID = {
    "FLOAT": "FLOAT: openvino computes 150 of 150 quantized layers in floating point; metrics.json names them.",
    "SLOWER": "SLOWER: unet_xl at batch 2 on openvino takes 1.75 times as long quantized as unquantized.",
}
OLD = {"said": SAID, "int8_layers": 0, "own_speedup": 0.57, "speedup": 0.58}


@pytest.mark.parametrize("changed, found", [
    ({}, []),
    (OLD, []),
    ({"int8_layers": 0}, ["says that 150 of 150 layers are INT8, and OpenVINO executes 0"]),
    (OLD | {"int8_layers": 150}, ["says that 0 of 150 layers are INT8, and OpenVINO executes 150"]),
    ({"own_speedup": 0.9}, ["does not say SLOWER, and its own rounds give 0.90x"]),
    ({"speedup": 0.8}, ["does not say SLOWER, and timed again give 0.80x"]),
    ({"own_speedup": 0.98, "speedup": 0.95}, []),  # within what a latency varies by
    (OLD | {"own_speedup": 1.2}, ["says SLOWER, and its own rounds give 1.20x"]),
])  # fmt: skip
def test_what_is_said_is_held_against_what_is_executed_and_timed(benchmark, changed, found):
    assert benchmark("processors").falsehoods(TRUE | changed) == found


def test_times_without_a_median_leave_the_ratio_of_the_rounds_and_a_class_that_is_none_is_refused(
    benchmark, tmp_path, monkeypatch
):
    processors = benchmark("processors")
    monkeypatch.setattr("sys.argv", ["processors", "--classes", "AVX2", "AVX3"])
    expected = "--classes has AVX3, expected some of AVX2, AVX2_VNNI, AVX512_CORE, AVX512_CORE_VNNI, AVX512_CORE_AMX"
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        processors.main()
    times = {name: {"p50_ms": None, "reason": "disturbed"} for name in ("full_precision", "quantized")}
    parity = {name: {"relative_error": 0.1, "tolerance": 0.2} for name in ("quantized_layers", "unet_xl_quantized")}
    job = {"parity": parity, "executed": {"of": 150}, "fidelity": {"psnr": {"mean": 15.0}}}
    job["latency"] = {"openvino": {"unet_xl": {"2": {**times, "speedup": 1.2}}}}
    graph = processors.artifact(tmp_path / "run", "onnx", "unet_xl")
    graph.parent.mkdir(parents=True)
    onnx.save(onnx.ModelProto(), graph)
    (tmp_path / "run/metrics.json").write_text(json.dumps(job))
    (tmp_path / "run/layers.csv").write_text("name,format\nconv_in,int8\n")
    torch.save({"int8": torch.ones(1)}, tmp_path / "outputs.pt")
    record = processors.record_of("AVX2", tmp_path, "", {"int8_layers": 150, "speedup": 1.2}, None)
    assert record["own_speedup"] == 1.2 and not record["falsehoods"]


@pytest.mark.release
def test_two_classes_run(benchmark, script, tmp_path):
    processors = benchmark("processors")
    here = [name for name in processors.CLASSES if not processors.lacking(name, processors.flags_here())]
    if not here:
        pytest.skip("this processor is older than AVX2, or no x86")
    result = script("processors", "--classes", *dict.fromkeys((here[0], here[-1])), "--quick", "--out", tmp_path)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode in (0, 1), result.stdout + result.stderr  # 1 where a busy machine's latencies contradict
    records = json.loads((tmp_path / "processors.json").read_text())
    for each in records:
        assert "failed" not in each and not [found for found in each["falsehoods"] if "OpenVINO executes" in found]
        assert each["int8_layers"] == (0 if each["saturates"] else each["quantized_layers"])
    assert (tmp_path / "processors.md").read_text() in result.stdout and (tmp_path / "processors.csv").is_file()
