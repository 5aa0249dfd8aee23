"""Every benchmark runs, at a size of seconds and with rows that set every knob between them.

Those of the shipped checkpoint run in this process and share one trace of its UNet; those that start commands, or need
packages of other projects, in a process of their own.
"""

import json
import sys

import pytest
import yaml

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.export.parts import trace_part
from sd_quant.export.tracing import copy_of
from sd_quant.places import HOME

from ...zoo.families import TINY
from .conftest import NAMES

pytestmark = pytest.mark.commit

UNLIKE_PRESET = "nothing excluded, branch_rounds=0 rounding=nearest scale_search=false"
TWO_IMAGES = ["--images", "2", "--calib-size", "3", "--steps", "1"]
PEERS = ["--calibration-prompts", "1", "--prompts", "2", "--steps", "1", "--peers"]
SMALL = ["calib_size=1", "quantize.n_steps=1", "infer.steps=1", "infer.prompts=[a rocket]", "infer.num_timed_runs=5",
         "timing.budget_s=1"]  # fmt: skip
IN_THIS_PROCESS = {
    "quality": ["--images", "2", "--calib-size", "1", "--steps", "3",  # a percentile of 0.4 needs three
                "--recipes", "the default", "quantize=nemo", "plain with alpha=auto observer=mse", "smoothing=none",
                "percentile=0.4", "quant_level=4", "fp8 collect_method=mean-max",
                "int8_per_tensor collect_method=default"],
    "four_bits": [*TWO_IMAGES, "--presets", "mxfp4", "svdquant_nvfp4", "--variants", "as it is", UNLIKE_PRESET],
    "four_bits, recipes": [*TWO_IMAGES, "--model", "sd3_mini", "--recipes", "int8", "mxfp4 quantize.rotation=64"],
    "budget": [*TWO_IMAGES, "--bits", "7", "--tables", "inputs"],
    "bench": ["--images", "2", "--steps", "1", "--checkpoints", "sdxl_mini",
              "--recipes", "the default", "svdquant_nvfp4 quantize.rank=8 damping=3"],
    "peers": [*PEERS, "unquantized", "ours", "ours_plain", "modelopt_max", "modelopt_smoothquant",
              "onnxruntime_percentile"],
    "parts": TWO_IMAGES,
    "fit": [*TWO_IMAGES, "--quantize", "int8", "--shares", "0.3"],
    "precision": ["--images", "2", "--calib-size", "1", "--steps", "4", "--presets", "int8"],
    "candidates, without a tool": ["--only", "comfyui-fp8-cast"],
}  # fmt: skip
TOOLS = {  # of candidates, and the packages that each takes
    "gguf": ["gguf"], "comfyui": ["comfy_kitchen"], "sdnq": ["sdnq"], "torchao": ["torchao"],
    "quanto": ["optimum", "accelerate"], "bitsandbytes": ["bitsandbytes", "accelerate"], "modelopt": [],
}  # fmt: skip
OTHER_QUANTIZERS = {  # rows of peers by the package that they take
    "nncf": ["nncf_default", "nncf_without_smoothquant", "nncf_symmetric"], "quark": ["quark_w8a8"],
}  # fmt: skip
FAMILIES = ["sd15", "pixart", "sd3", "flux"]  # of docs/results_full_size.md
IN_PROCESSES = {"any_pipeline", "any_pipeline_full_size", "families", "full_size", "full_size_parts", "sweep"}
ELSEWHERE = {"bench_pictures", "bench_train", "processors", "measurer", "common", "occasions"}


@pytest.mark.slow
def test_none_is_forgotten(benchmark):
    assert set(NAMES) == {case.partition(",")[0] for case in IN_THIS_PROCESS} | IN_PROCESSES | ELSEWHERE
    here = set(IN_THIS_PROCESS["peers"])
    assert benchmark("peers").PEERS.keys() <= here.union(*OTHER_QUANTIZERS.values())
    assert {name.partition("-")[0] for name in benchmark("candidates").MAKERS} == TOOLS.keys()


@pytest.fixture(scope="module")
def traced():
    return trace_part(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"), "unet_xl")


@pytest.mark.release
def test_all_rows_of_full_size_run_on_the_shipped_checkpoint(script, tmp_path):
    """First, as it takes longer than any other."""
    small = ["--checkpoint", "checkpoints/sdxl_mini.nemo", "--size", "64", "--repeats", "1", "--steps", "1"]
    sides = ["--levels", "4", "--twice", "--bf16", "--presets", "fp8"]
    printed = ended(script("full_size", *small, *sides, "--work", tmp_path, "--out", tmp_path / "table.md"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert not {name: row["failed"] for name, row in rows.items() if "failed" in row}
    assert {"export:3", "reference", "parts", "plan", "operations", "image"} <= rows.keys()
    assert {"pass:torch, again", "pass:4, bf16", "profile:4", "preset:fp8", "handed_over:openvino"} <= rows.keys()
    assert (tmp_path / "table.md").read_text() in printed


@pytest.mark.release
@pytest.mark.parametrize("case", IN_THIS_PROCESS)
def test_it_runs(case, benchmark, request, monkeypatch, tmp_path, capsys):
    script = case.partition(",")[0]
    module = benchmark(script)
    tracing = [sys.modules[name] for name in NAMES if hasattr(sys.modules.get(name), "trace_part")]
    graph = request.getfixturevalue("traced") if tracing else None
    for made in tracing:
        monkeypatch.setattr(made, "trace_part", lambda checkpoint, part: copy_of(graph))
    monkeypatch.setattr("sys.argv", [script, *IN_THIS_PROCESS[case], "--out", str(tmp_path / "out")])
    module.main()
    printed = capsys.readouterr().out
    assert printed.strip() and "not installed" not in printed and "nan" not in printed
    assert list(tmp_path.iterdir())


def ended(result, *codes: int) -> str:
    assert result.returncode in (codes or (0,)), result.stdout + result.stderr
    return result.stdout


@pytest.mark.release
@pytest.mark.parametrize("package", OTHER_QUANTIZERS)
def test_other_projects_quantizers_run(package, script, tmp_path):
    names = OTHER_QUANTIZERS[package]
    ended(script("peers", *PEERS, *names, "--out", tmp_path, needs=[package]))
    rows = json.loads((tmp_path / "peers.json").read_text())["checkpoints"]["sdxl_mini"]
    assert [row["peer"] for row in rows] == names
    for row in rows:
        assert "reason" not in row and row["layers"] == 150 and row["layers_missing"] == row["layers_beyond"] == []


@pytest.mark.release
@pytest.mark.parametrize("tool", TOOLS)
def test_other_projects_tools_write_candidates(tool, benchmark, script, tmp_path):
    names = [name for name in benchmark("candidates").MAKERS if name.startswith(f"{tool}-")]
    printed = ended(script("candidates", "--only", f"{tool}-", "--out", tmp_path, needs=TOOLS[tool]))
    assert [line.partition(":")[0] for line in printed.splitlines() if line.startswith(f"{tool}-")] == names
    assert "left out" not in printed and all(list(tmp_path.glob(f"{name}*")) for name in names)


@pytest.mark.release
def test_families_are_exported_and_planned(script, tmp_path):
    """Of small networks of their classes."""
    networks = {}
    for name in (*FAMILIES, "sdxl"):
        TINY[name](tmp_path / name)
        config = next((tmp_path / name).glob("unet/config.json"), tmp_path / name / "transformer/config.json")
        known = yaml.safe_load((HOME / "benchmarks/denoisers.yaml").read_text())[name]
        networks[name] = known | {"width": 64, "height": 64, "config": json.loads(config.read_text())}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(networks))
    families = ["--families", ",".join(FAMILIES), "--denoisers", tmp_path / "tiny.yaml"]
    ended(script("families", *families, "--plans", "--work", tmp_path / "work"))
    rows = json.loads((tmp_path / "work/rows.json").read_text())
    assert len(rows) == 2 * len(FAMILIES) and not [row for row in rows.values() if "failed" in row]
    sdxl = ["--families", "sdxl", "--denoisers", tmp_path / "tiny.yaml", "--work", tmp_path / "two"]
    ended(script("families", *sdxl, "--hand-over", "diffusers_torchao:int8_dynamic,diffusers_sdnq:int8_weight_only"))
    rows = json.loads((tmp_path / "two/rows.json").read_text())
    assert len(rows) == 2 and all(0 < row["bytes"] < 2 * row["parameters"] for row in rows.values()), rows


@pytest.mark.release
def test_a_tiny_pipeline_goes_all_the_way(script, tmp_path):
    printed = ended(script("any_pipeline", "PixArtSigmaPipeline", "--rows", tmp_path, "--out", tmp_path / "table.md"))
    row = json.loads((tmp_path / "PixArtSigmaPipeline.json").read_text())
    assert "PixArtSigmaPipeline" in printed and row["observed"]["works"] and row["int8"]["works"]
    assert "| of 1 | " in (tmp_path / "table.md").read_text()


@pytest.mark.release
def test_one_block_of_a_full_size_denoiser_is_written_and_called(script, tmp_path):
    work = tmp_path / "sana"
    ended(script("any_pipeline_full_size", "--layers", "1", "--work", work))
    rows = json.loads((work / "rows.json").read_text())
    parameters = rows["step:write"]["parameters"]
    assert parameters < rows["step:export"]["bytes"] < 2 * parameters


@pytest.mark.release
def test_one_layer_of_full_size_text_encoders_is_written_and_called(script, tmp_path):
    ended(script("full_size_parts", "--layers", "1", "--call", "--work", tmp_path))
    rows = json.loads((tmp_path / "rows.json").read_text())
    exports = {name: row for name, row in rows.items() if name.startswith("export:")}
    t5, full = (exports[f"export:sd3:text_encoder_3:{preset}"] for preset in ("int8_weight_only", "unquantized"))
    assert len(exports) == 5 and t5["layers"] == 6 and t5["bytes"] < 0.7 * full["bytes"]
    assert max(row["peak_memory_bytes"] for row in exports.values()) < 3e9
    calls = [row["errors"] for name, row in rows.items() if name.startswith("call:")]
    assert len(calls) == 3 and all(error < 0.1 for errors in calls for error in errors.values())


@pytest.mark.release
def test_a_killed_sweep_ends_with_the_same_table(script, tmp_path):
    knobs = ["quant_level=1,3", "alpha=0.8", *SMALL, "export_trt=none"]
    assert "the same table" in ended(script("sweep", "--work", tmp_path, "--knobs", *knobs))
