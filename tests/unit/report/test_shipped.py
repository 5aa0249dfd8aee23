"""``recommendation.json``: what is shipped, with files that are there and a command that can be pasted."""

import csv
import json
import shlex

import pytest

from sd_quant.report.rebuild import rebuild
from sd_quant.report.shipped import last_words
from sd_quant.report.summary import RECOMMENDATION, read_sweep
from sd_quant.sweep import opened

from .sweeps import change_record, write_job

pytestmark = [pytest.mark.commit, pytest.mark.usefixtures("without_plots")]

FILES = (
    *("onnx/unet_xl/unet_xl.onnx", "onnx/vae/vae.onnx", "full_precision/onnx/unet_xl/unet_xl.onnx"),
    *("plan/unet_xl.plan", "plan/vae.plan", "hand_over/gguf/model.gguf"),
)


def recommendation(folder, job) -> dict:
    for name in FILES:
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).touch()
    rebuild(folder)
    return json.loads((folder / RECOMMENDATION).read_text())


def test_a_recipe_is_shipped_with_its_files_and_figures_until_the_sweep_goes_on(small_sweep):
    folder = small_sweep.directory
    found = recommendation(folder, folder / "level=2")
    assert (found["schema_version"], found["ship"], found["job"], found["folder"]) == (1, "recipe", *["level=2"] * 2)
    onnx, plan = ({"unet_xl": f"level=2/{FILES[at]}", "vae": f"level=2/{FILES[at + 1]}"} for at in (0, 3))
    assert found["files"] == {"onnx": onnx, "plan": plan, "exports": {"gguf": "level=2/hand_over/gguf"}}
    row = read_sweep(folder).rows[1]
    assert found["figures"]["image_speedup_low"] == row["image_speedup_low"] and found["figures"]["psnr_db"] == 39.0
    assert found["sentence"].startswith("Ship quant_level=2: 1.20x") and "worth of a recipe" in found["rule"]
    assert shlex.split(found["command"])[2:4] == [f'run="{folder}/level=2"', 'prompts=["a red apple"]']
    assert last_words(folder).splitlines()[1:] == [f"images with it: {found['command']}", found["sentence"]]
    assert (folder / "summary.md").read_text().startswith(r"**Ship quant\_level=2: 1.20x")
    with (folder / "summary.csv").open(newline="") as file:
        assert [each["recommended"] for each in csv.DictReader(file)] == ["", "yes", "", "", "", ""]
    with opened(folder, {"identity": None}):
        assert not (folder / RECOMMENDATION).exists()


def test_the_unquantized_engine_is_shipped_with_its_own_file(tmp_path):
    levers = {"knobs.infer.sampler": "dpm", "levers": {"schedule": "ccr"}}  # of the recipe's images alone
    found = recommendation(tmp_path, change_record(write_job(tmp_path, 31.0, 0.8), levers))
    assert (found["ship"], found["job"], found["best"], found["folder"]) == ("unquantized", None, tmp_path.name, ".")
    assert found["files"]["onnx"] == {"unet_xl": FILES[2], "vae": FILES[1]}  # the quantized one is not it
    assert (found["files"]["plan"], found["files"]["exports"]) == ({"vae": FILES[4]}, {})
    assert "variant=full_precision" in shlex.split(found["command"])
    assert "sampler" not in found["command"] and "schedule" not in found["command"]


def test_the_command_has_the_knobs_that_infer_does_not_take_from_the_run(tmp_path):
    infer = {"steps": 8, "scale": 5.0, "negative_prompt": "a blur; rm -rf", "sampler": "dpm", "reuse": 0.2}
    model = {"recommended": {"scale": 5.0}, "width": 64, "height": 32}
    changes = {f"knobs.infer.{name}": value for name, value in infer.items()} | {"levers": {"schedule": "ccr"}}
    change_record(write_job(tmp_path, 39.0, 1.5), changes | {"knobs.model": model})
    command = recommendation(tmp_path, tmp_path)["command"]
    assert "height=64 infer.steps=8 'infer.negative_prompt=\"a blur; rm -rf\"' infer.sampler=dpm" in command
    assert command.endswith(" infer.schedule=ccr")


@pytest.mark.parametrize(("changes", "psnr"), [({"knobs.verdict": {"speedup": 9.0}}, 39.0), ({"latency": {}}, None)])
def test_what_misses_the_target_or_has_no_figures_is_not_shipped(tmp_path, changes, psnr):
    """The best of those that miss it has figures. A damaged file says nothing."""
    found = recommendation(tmp_path, change_record(write_job(tmp_path, 39.0, 1.5), changes))
    assert (found["ship"], found["folder"], found["files"], found["command"]) == ("undecided", None, {}, None)
    assert (found["best"], found["figures"].get("psnr_db")) == (tmp_path.name if psnr else None, psnr)
    assert last_words(tmp_path).endswith("report.html\n" + found["sentence"])
    (tmp_path / RECOMMENDATION).write_text("{")
    assert last_words(tmp_path).endswith("report.html\n")
