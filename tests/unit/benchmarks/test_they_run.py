"""Every benchmark of the shipped checkpoint at a size of seconds, so that the tables can be made again at any time.

They run in this process and share one trace of the UNet. Those of full-size networks, of other projects' pipelines and
of the command line's own sweeps take minutes at any size and are left out.
"""

import importlib
import sys

import pytest

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.export.parts import trace_part
from sd_quant.export.tracing import copy_of
from sd_quant.places import HOME

pytestmark = pytest.mark.slow
BENCHMARKS = HOME / "benchmarks"
ONE_STEP = ["--prompts", "1", "--steps", "1"]
RUNS = {
    "quality": ["--images", "2", "--calib-size", "1", "--steps", "1", "--recipes", "the default", "NeMo's with shift"],
    "four_bits": ["--images", "2", "--calib-size", "3", "--steps", "1", "--presets", "nvfp4",
                  "--variants", "as it is", "branch_rounds=0 rounding=nearest"],
    "budget": ["--prompts", "1", "--steps", "1", "--images", "2", "--bits", "7"],
    "keep": [*ONE_STEP, "--images", "1", "--keep", "1", "--repeats", "2"],
    "folding": [*ONE_STEP, "--repeats", "2"],
    "peers": ["--calibration-prompts", "1", "--prompts", "2", "--steps", "1",
              "--peers", "unquantized", "ours", "modelopt_max", "onnxruntime_percentile"],
    "overhead": [*ONE_STEP, "--batches", "1"],
    "recipes": [*ONE_STEP, "--references", "1", "--levels", "3", "--alphas", "0.8"],
    "shapes": [*ONE_STEP, "--pictures", "1", "--repeats", "2"],
    "saturation": [*ONE_STEP, "--repeats", "2"],
    "shift": ["--sizes", "1", "--seconds", "0"],
    "convolutions": ["--repeats", "1", "--sizes", "1"],
    "coverage": ["--draws", "2"],
    "candidates": ["--only", "comfyui-fp8-cast"],  # the one that takes no tool
}  # fmt: skip
WITHOUT_FILES = {"convolutions", "coverage"}
LEFT_OUT = {"against_diffusers", "families", "full_size", "quickstart", "sweep", "verdict", "common", "processors"}


def test_none_is_forgotten():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == RUNS.keys() | LEFT_OUT


@pytest.fixture(scope="module")
def traced():
    return trace_part(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"), "unet_xl")


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name, traced, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for other in RUNS.keys() | LEFT_OUT:  # which import one another by these names
        monkeypatch.delitem(sys.modules, other, raising=False)
    module = importlib.import_module(name)
    for made in (sys.modules[other] for other in RUNS if other in sys.modules):
        if hasattr(made, "trace_part"):
            monkeypatch.setattr(made, "trace_part", lambda checkpoint, part: copy_of(traced))
    files = [] if name in WITHOUT_FILES else ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [name, *RUNS[name], *files])
    module.main()
    printed = capsys.readouterr().out
    assert printed.strip() and "not installed" not in printed and "nan" not in printed
    assert bool(list(tmp_path.iterdir())) == bool(files)
