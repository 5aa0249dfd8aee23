"""A sweep's table and what is shipped, from nothing but its folder."""

import csv
import json
import shlex

import pytest

from sd_quant.cache import locked
from sd_quant.errors import ArtifactError
from sd_quant.files import write_json
from sd_quant.report import summary
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import RECORD
from sd_quant.report.shipped import last_words
from sd_quant.report.summary import LOCK, LOG, RECOMMENDATION, SWEEP, WAS_CANCELLED, read_sweep, write_summary
from sd_quant.report.table import write_csv
from sd_quant.sweep import opened

from .sweeps import change_record, write_job, write_plan

pytestmark = [pytest.mark.commit, pytest.mark.usefixtures("without_plots")]


@pytest.fixture
def folder(tmp_path):
    """Four jobs: two done, one failed, one that never ran."""
    write_job(tmp_path / "alpha=0.5", 30.0, 1.5)
    write_job(tmp_path / "alpha=auto", 35.0, 1.2)
    (tmp_path / "alpha=1.0").mkdir()
    write_json(tmp_path / "alpha=1.0" / summary.FAILURE, {"reason": "=cmd|' /C calc'!A0 <b>| broken"})
    write_plan(tmp_path, {f"alpha={alpha}": {"alpha": alpha} for alpha in (0.5, "auto", 1.0, 0.1)})
    return tmp_path


def test_a_row_has_what_its_record_says(folder):
    """The denoiser keeps its interval where an image has no figure, and a single image has no interval."""
    expected = {
        "job": "alpha=0.5", "status": "done", "reason": None, "alpha": 0.5, "psnr_db": 30.0, "psnr_worst_db": 29.95,
        "latent_sqnr_db": 21.0, "denoiser_ms": 10.0, "denoiser_speedup": 2.0, "image_ms": 40.0, "image_torch_ms": 800.0,
        "denoiser_onnx_bytes": 10.2e6, "denoiser_plan_bytes": 3e7, "quantized_layers": 5, "seconds": 12.5,
        "psnr_db_low": pytest.approx(29.365, abs=1e-3), "psnr_db_high": pytest.approx(30.635, abs=1e-3),
    }  # fmt: skip
    none = {"p50_ms": None, "reason": "a second or more is missing", "rest": None}
    unknown = dict.fromkeys(("image_ms", "image_speedup", "image_speedup_low", "psnr_db_low", "psnr_db_high"))
    image = {"latency.openvino.image.1": {"full_precision": none, "quantized": none}, "fidelity.psnr.values": [30.0]}
    for changes, also in (({}, {}), (image, unknown)):
        change_record(folder / "alpha=0.5", changes)
        first = read_sweep(folder).rows[0]
        assert {name: first[name] for name in expected | also} == expected | also
        assert first["denoiser_speedup_low"] < first["denoiser_speedup"] < first["denoiser_speedup_high"]


def test_a_job_that_left_nothing_is_running_was_killed_or_cancelled(folder):
    """The process that holds its lock may be this one: a lock belongs to the file as it was opened."""
    killed = folder / "alpha=0.1"
    killed.mkdir()
    stamp = "[2026-01-01 00:00:00,000][sd_quant]"
    (killed / LOG).write_text(f"{stamp}[INFO] - load ...\n{stamp}[INFO] - export ...\n")
    said = []
    with locked(killed / LOCK):
        said.append(read_sweep(folder).rows[3]["reason"])
    said.append(read_sweep(folder).rows[3]["reason"])
    with (killed / LOG).open("a") as log:
        log.write(f"{stamp}[WARNING] - the job {WAS_CANCELLED}\n")
    said.append(read_sweep(folder).rows[3]["reason"])
    ended = "ended in the stage export without an error message"
    endings = "is running in the stage export", ended, f"{WAS_CANCELLED} in the stage export; the same command goes on"
    for words, ending in zip(said, endings, strict=True):
        assert words.startswith(f"it left no record: it {ending}")


def test_the_two_files_agree(folder):
    write_summary(read_sweep(folder))
    with (folder / "summary.csv").open(newline="") as file:
        text = list(csv.DictReader(file))
    assert [row["alpha"] for row in text] == ["0.5", "auto", "1", "0.1"]
    assert [float(row["psnr_db"]) for row in text[:2]] == [30.0, 35.0]
    assert text[2]["reason"].startswith("'=cmd")  # no spreadsheet runs it
    lines = (folder / "summary.md").read_text().splitlines()
    assert lines[2].startswith("| 0.5 | done | 30.00 ± 0.64 | 29.95 | 0.9800 | 0.0100 | 21.0 | 10.0 | 2.00x")
    assert r"\<b\>\| broken" in lines[-2] and all(line.count(" | ") == lines[0].count(" | ") for line in lines[:6])


@pytest.mark.parametrize(
    ("text", "why"),
    [("\udcff", ""), ("[" * 10**5, ""), ('{"status": "done", "sizes_bytes": {"vae": 7}}', "sizes_bytes.vae is 7")],
)
def test_a_damaged_record_is_an_unfinished_job(folder, text, why):
    (folder / "alpha=0.5" / RECORD).write_text(text, errors="surrogateescape")
    job = read_sweep(folder).jobs[0]
    assert job.status == "unfinished" and job.reason.startswith("its record cannot be read") and why in job.reason


def test_a_plan_that_is_none_is_refused(tmp_path):
    for jobs in (None, 3, *([{"name": name, "varied": varied}] for name, varied in (("../a", {}), ("", {}), ("a", 0)))):
        with pytest.raises(ArtifactError, match="is not the plan of a sweep"):
            write_plan(tmp_path, {}, jobs=jobs)
    write_json(tmp_path / SWEEP, {"varied": []})
    with pytest.raises(ArtifactError, match="is not the plan of a sweep"):
        read_sweep(tmp_path)


def test_a_table_has_the_columns_of_all_its_rows_and_text_that_starts_a_formula_is_disarmed(tmp_path):
    """Columns are in order of first appearance."""
    formulas = [f"{start}cmd|' /C calc'!A0" for start in "=+-@\t\r"]
    write_csv([{"name": formula} for formula in formulas], tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="", encoding="utf-8") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [f"'{formula}" for formula in formulas]
    rows = [{"name": "a", "int8": 8, "seed": 7}, {"name": "b", "int4": 4, "int8": 8, "seed": 2**63 - 1}]
    write_csv(rows, tmp_path / "a.csv")
    lines = [b"name,int8,seed,int4", b"a,8,7,", b"b,8,9223372036854775807,4", b""]
    assert (tmp_path / "a.csv").read_bytes() == b"\r\n".join(lines)


# recommendation.json: what is shipped, with files that are there and a command that can be pasted

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
    levers = {"levers": {"schedule": "ccr"}}  # of the recipe's images alone
    found = recommendation(tmp_path, change_record(write_job(tmp_path, 31.0, 0.8), levers))
    assert (found["ship"], found["job"], found["best"], found["folder"]) == ("unquantized", None, tmp_path.name, ".")
    onnx = {"unet_xl": FILES[2], "vae": FILES[1]}  # the quantized one is not it
    assert found["files"] == {"onnx": onnx, "plan": {"vae": FILES[4]}, "exports": {}}
    assert "variant=full_precision" in shlex.split(found["command"])
    assert "schedule" not in found["command"]


def test_the_command_has_the_knobs_that_infer_does_not_take_from_the_run(tmp_path):
    infer = {"steps": 8, "scale": 5.0, "negative_prompt": "a blur; rm -rf", "reuse": 0.2}
    model = {"recommended": {"scale": 5.0}, "width": 64, "height": 32}
    changes = {f"knobs.infer.{name}": value for name, value in infer.items()} | {"levers": {"schedule": "ccr"}}
    change_record(write_job(tmp_path, 39.0, 1.5), changes | {"knobs.model": model})
    command = recommendation(tmp_path, tmp_path)["command"]
    assert "height=64 infer.steps=8 'infer.negative_prompt=\"a blur; rm -rf\"'" in command
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
