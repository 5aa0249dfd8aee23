"""Results in other tools' formats, by the commands; and those tools, which draw by the code that a card prints."""

import json
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
from .shared import record_of, well

pytestmark = pytest.mark.commit

SMALL = (
    "quant_level=3", "alpha=0.8", "calib_size=4", "quantize.n_steps=4", "infer.steps=4", "timing.budget_s=0",
    "memory_of_parts=false", "export_trt=none",
)  # fmt: skip
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
    figures = json.loads((folder / "hand_over.json").read_text())
    assert entry.items() <= figures.items() and Path(entry["folder"]).name == folder.name
    assert entry["quantized"] == entry["of"] == 150 and entry["lost"] == {} and entry["inputs"].keys() == {"int8"}
    assert len(entry["fidelity"]["psnr"]["values"]) == 2 and 20 < entry["fidelity"]["psnr"]["mean"] < 60
    assert {"unet/modelopt_state.pth", "unet/diffusion_pytorch_model.safetensors"} <= entry["bytes"].keys()
    card = (folder / "README.md").read_text()
    assert f"| psnr | {entry['fidelity']['psnr']['mean']:.4g} |" in card and "95 % interval" in card
    assert "zeros behind a text's 77 tokens" in card and "which names none" in card and "    sd-quant quantize " in card


@pytest.mark.nightly
def test_a_run_that_is_done_is_handed_over_the_same(run, command, done, main_job, tmp_path):
    """The assignment that is derived again gives the same files, and a second time they are replaced."""
    name, cache = "unet/diffusion_pytorch_model.safetensors", main_job.cache
    ours, theirs = tmp_path / "diffusers_modelopt", run / "hand_over/diffusers_modelopt"
    given = "hand_over.py", f"run={run}", "to=diffusers_modelopt", f"cache.dir={cache}", f"hydra.run.dir={tmp_path}"
    for images in ("true", "false"):
        done(*given, f"images={images}")
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        found, expected = (json.loads((folder / "hand_over.json").read_text())["fidelity"] for folder in (ours, theirs))
        if images == "false":
            assert found is None
            continue
        for score, near in (("psnr", 0.5), ("ssim", 0.01)):  # sums over other numbers of threads flip some codes
            assert found[score]["values"] == pytest.approx(expected[score]["values"], abs=near)
    (ours / "unet/thesis.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in ours.rglob("*")}
    message = refused(command, 2, *given[1:], "images=false")
    assert "holds unet/thesis.txt, which was not handed over by us; move it" in message
    assert before == {path: path.stat().st_mtime_ns for path in ours.rglob("*")}


def refused(command, code: int, *arguments: object) -> str:
    result = command("hand_over.py", *map(str, arguments))
    assert result.returncode == code, result.stdout + result.stderr
    return result.stderr.splitlines()[-1]


def test_another_assignment_is_refused(run, command, tmp_path):
    changed = tmp_path / "run"
    shutil.copytree(run, changed, ignore=shutil.ignore_patterns("hand_over", "onnx", "full_precision"))
    table = (changed / "layers.csv").read_text()
    (changed / "layers.csv").write_text(table.replace("int8", "fp8", 1))
    message = refused(command, 3, f"run={changed}", "to=diffusers_modelopt", f"hydra.run.dir={tmp_path / 'out'}")
    assert "layers.csv is not what the run's knobs give" in message
    assert not (tmp_path / "out/diffusers_modelopt").exists()


# --------------------------------------------------------------------------------------------- opened by others


@pytest.fixture(scope="module")
def handed_over(process, tmp_path_factory) -> Path:
    """A run that has handed over to what diffusers opens."""
    for package in ("accelerate", "sdnq", "torchao"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("consumers")
    well(process(
        "quantize.py", *SMALL, f"infer.prompts={PROMPTS}", f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/run",
        f"hand_over=[{','.join(LEAST)}]",
    ))  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def derived(handed_over):
    job = run_job(str(handed_over))
    return chosen_again(job, handed_over, StageTimer(), open_unchecked(job.model), handed_over)


@pytest.mark.nightly
@pytest.mark.consumer
@pytest.mark.parametrize("target", LEAST)
def test_it_draws_what_the_simulation_draws(handed_over, derived, tmp_path, target):
    """By the printed code, and with fp32 in place of its dtype."""
    (loaded, assignments), folder = derived, handed_over / "hand_over" / target
    rows = rows_of([target], assignments, loaded.checkpoint)[target][loaded.denoiser]
    simulated = in_torch(loaded.checkpoint, folder, TARGETS[target].pads, rows, target)
    code = printed_code(folder)
    single = code.replace("torch.bfloat16", "torch.float32").replace("torch.float16", "torch.float32")
    assert single != code
    exact, _ = by_consumer(sys.executable, single, folder, tmp_path)
    assert min(decibels(simulated, exact)) >= LEAST[target]
    printed, facts = by_consumer(sys.executable, code, folder, tmp_path)
    assert facts["class"] == "StableDiffusionXLPipeline" and min(decibels(simulated, printed)) > AS_PRINTED
