"""Results in other tools' formats, by the commands; and those tools, which draw by the code that a card prints."""

import shutil
import sys
from pathlib import Path

import pytest

from sd_quant.config import run_job
from sd_quant.interchange import TARGETS
from sd_quant.metrics.memory import StageTimer
from sd_quant.stages.choose import chosen_again
from sd_quant.stages.session import open_unchecked
from sd_quant.stages.targets import rows_of

from ..programs.pictures import PROMPTS, by_consumer, decibels, in_torch, printed_code
from .shared import QUICK, json_of, record_of, well

pytestmark = pytest.mark.commit

# Decibels of a picture in fp32 against the simulation: ModelOpt computes it bit for bit. SDNQ adds in another order.
# torchao divides an input by its scale as we do, in another order of multiplications, so that some get the other code.
LEAST = {"diffusers_modelopt": float("inf"), "diffusers_torchao": 33.0, "diffusers_sdnq": 60.0}
AS_PRINTED = 30.0  # in 16 bits, in which most inputs are near the next code


@pytest.fixture(scope="module")
def run(main_job) -> Path:
    """A run that has handed over to ModelOpt, which is installed with the project."""
    assert "handed over" in main_job.stdout and "diffusers_modelopt  150 of 150" in main_job.stdout
    return main_job.directory


def test_the_record_and_the_card_say_what_it_is(run):
    (entry,) = record_of(run)["hand_over"].values()
    folder = run / "hand_over/diffusers_modelopt"
    figures = json_of(folder / "hand_over.json")
    assert entry.items() <= figures.items() and Path(entry["folder"]).name == folder.name
    assert entry["quantized"] == entry["of"] == 150 and entry["lost"] == {} and entry["inputs"].keys() == {"int8"}
    assert len(entry["fidelity"]["psnr"]["values"]) == 2 and 20 < entry["fidelity"]["psnr"]["mean"] < 60
    assert {"unet/modelopt_state.pth", "unet/diffusion_pytorch_model.safetensors"} <= entry["bytes"].keys()
    card = (folder / "README.md").read_text()
    assert f"| psnr | {entry['fidelity']['psnr']['mean']:.4g} |" in card and "95 % interval" in card
    assert "zeros behind a text's 77 tokens" in card and "which names none" in card and "    sd-quant quantize " in card


@pytest.mark.nightly
def test_a_run_that_is_done_is_handed_over_the_same(run, refused, done, main_job, tmp_path):
    """The assignment that is derived again gives the same files, and a second time they are replaced."""
    name, given = "unet/diffusion_pytorch_model.safetensors", ("hand_over.py", f"run={run}", "to=diffusers_modelopt")
    given = *given, f"cache.dir={main_job.cache}", f"hydra.run.dir={tmp_path}"
    ours, theirs = tmp_path / "diffusers_modelopt", run / "hand_over/diffusers_modelopt"
    done(*given, "images=true")
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    found, expected = (json_of(folder / "hand_over.json")["fidelity"] for folder in (ours, theirs))
    for score, near in (("psnr", 0.5), ("ssim", 0.01)):  # sums over other numbers of threads flip some codes
        assert found[score]["values"] == pytest.approx(expected[score]["values"], abs=near)
    done(*given, "images=false")
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert json_of(ours / "hand_over.json")["fidelity"] is None
    (ours / "unet/thesis.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in ours.rglob("*")}
    assert "holds unet/thesis.txt, which was not handed over by us; move it" in refused(*given, "images=false")
    assert before == {path: path.stat().st_mtime_ns for path in ours.rglob("*")}


def test_another_assignment_is_refused(run, refused, tmp_path):
    changed = tmp_path / "run"
    shutil.copytree(run, changed, ignore=shutil.ignore_patterns("hand_over", "onnx", "full_precision"))
    table = (changed / "layers.csv").read_text()
    (changed / "layers.csv").write_text(table.replace("int8", "fp8", 1))
    given = "hand_over.py", f"run={changed}", "to=diffusers_modelopt", f"hydra.run.dir={tmp_path / 'out'}"
    assert "layers.csv is not what the run's knobs give" in refused(*given, code=3)
    assert not (tmp_path / "out/diffusers_modelopt").exists()


# --------------------------------------------------------------------------------------------- opened by others


@pytest.fixture(scope="module")
def handed_over(process, tmp_path_factory) -> tuple:
    """A folder with what a run has handed over to what diffusers opens, the model, and what the run assigned."""
    for package in ("accelerate", "sdnq", "torchao"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("consumers")
    small = "quant_level=3", "alpha=0.8", *QUICK, "calib_size=4", "quantize.n_steps=4", "infer.steps=4"
    where = f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/run"
    well(process("quantize.py", *small, f"infer.prompts={PROMPTS}", *where, f"hand_over=[{','.join(LEAST)}]"))
    job, run = run_job(str(folder / "run")), folder / "run"
    return run / "hand_over", *chosen_again(job, run, StageTimer(), open_unchecked(job.model), run)


@pytest.mark.nightly
@pytest.mark.consumer
@pytest.mark.parametrize("target", LEAST)
def test_it_draws_what_the_simulation_draws(handed_over, tmp_path, target):
    """By the printed code, and with fp32 in place of its dtype."""
    home, loaded, assignments = handed_over
    folder = home / target
    rows = rows_of([target], assignments, loaded.checkpoint)[target][loaded.denoiser]
    simulated = in_torch(loaded.checkpoint, folder, TARGETS[target].pads, rows, target)
    code = printed_code(folder)
    single = code.replace("torch.bfloat16", "torch.float32").replace("torch.float16", "torch.float32")
    assert single != code
    exact, _ = by_consumer(sys.executable, single, folder, tmp_path)
    assert min(decibels(simulated, exact)) >= LEAST[target]
    printed, facts = by_consumer(sys.executable, code, folder, tmp_path)
    assert facts["class"] == "StableDiffusionXLPipeline" and min(decibels(simulated, printed)) > AS_PRINTED
