"""When a job is done before, what of an earlier attempt goes, and the last lines that a run prints."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.report.record import RECORD, base_sha256, parsed
from sd_quant.report.summary import RECOMMENDATION, REPORT
from sd_quant.stages import job_folder
from tests import presets

pytestmark = pytest.mark.commit

FACTS = {
    "inputs": {"checkpoint": {"path": "here.nemo", "sha256": "ab", "bytes": 2}},
    "versions": {"torch": "2.10"}, "machine": {"cpu": "one"}, "started": "today",
}  # fmt: skip
OURS = (
    "onnx/unet_xl/unet_xl.onnx", "onnx/unet_xl/unet_xl.onnx.data", "plan/vae.plan", "plan/vae.plan.json", "budget.csv",
    "full_precision/onnx/unet_xl/unet_xl.onnx", "images/quantized/0000.png", "images/grid.png", "metrics.json",
    ".unfinished-1/part", "onnx/unet_xl/.unet_xl.onnx.7.part", "full_precision/onnx/.unet_xl.7.part/unet_xl.onnx",
    ".a.csv.some_host-12.part", "hand_over/gguf/model.gguf", "hand_over/gguf/hand_over.json",
    "hand_over/.gguf.host-3.part/a",
)  # fmt: skip
THEIRS = (
    "images/family.png", "images/quantized/grandmother.png", "onnx/model.onnx", "onnx/mine/weights.bin", "plan/b.txt",
    "images.txt", "notes/onnx", "full_precision/x", ".secret.part", "notes/.unfinished-thesis",
    "hand_over/gguf/card.md", "hand_over/comfyui/lora.safetensors",
)  # fmt: skip


@pytest.fixture
def job(tmp_path) -> QuantizeJob:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n")
    return presets.job(f"infer.prompts={prompts}")


def test_only_knobs_prompts_files_and_versions_make_another_job(job, tmp_path, monkeypatch):
    before = job_folder.fingerprint_of(job, FACTS)
    job.cache.dir, job.trackers, job.trt.timing_cache = None, ["mlflow"], "elsewhere"
    facts = deepcopy(FACTS) | {"machine": {"cpu": "another"}, "started": "tomorrow"}
    facts["inputs"]["checkpoint"]["path"] = "there.nemo"
    assert job_folder.fingerprint_of(job, facts) == before

    known = {before}
    (tmp_path / "prompts.txt").write_text("a cat\na bird\n")  # under the same name
    known.add(job_folder.fingerprint_of(job, facts))
    monkeypatch.chdir(tmp_path)
    for section, knob in ("quantize", "assignment"), ("infer", "latents"):  # files that are edited
        assert knob not in job_folder.inputs_of(job)
        setattr(job, section, replace(getattr(job, section), **{knob: f"{knob}.yaml"}))
        for text in ("conv: nvfp4", "conv: int8"):
            (tmp_path / f"{knob}.yaml").write_text(text)
            inputs = job_folder.inputs_of(job)
            assert inputs[knob].absolute() == tmp_path / f"{knob}.yaml"
            known.add(job_folder.fingerprint_of(job, FACTS | {"inputs": job_folder.made_of(inputs)["inputs"]}))
    job.model.prompts = "prompts.txt"
    kept = job_folder.kept_knobs(job)
    assert kept["quantize"]["assignment"] == str(tmp_path / "assignment.yaml"), "found from elsewhere too"
    assert kept["model"]["prompts"] == str(tmp_path / "prompts.txt")
    assert kept["model"]["path"] == job.model.path == "checkpoints/sdxl_mini.nemo", "which ships"
    job.quantize = replace(job.quantize, alpha=0.3)
    known.add(job_folder.fingerprint_of(job, facts))
    facts["inputs"]["checkpoint"]["sha256"] = "cd"
    known.add(job_folder.fingerprint_of(job, facts))
    facts["versions"]["torch"] = "2.11"
    known.add(job_folder.fingerprint_of(job, facts))
    assert len(known) == 9


def test_controlnets_and_their_images_are_inputs_of_a_job_and_its_weights(tmp_path):
    net, edges = tmp_path / "net", tmp_path / "edges.png"
    net.mkdir()
    for file in (edges, net / "config.json"):
        file.touch()
    images = f"infer.control=[{edges}]", f"model.calibration_control=[{edges}]"
    job = presets.job("infer.prompts=[a]", f"model.controlnets=[{net}:0.5]", *images)
    of_controls = {"controlnet 1 at 0.5": net, "control 1": edges, "calibration_control 1": edges}
    assert of_controls.items() <= job_folder.inputs_of(job).items()
    assert job_folder.kept_model(job.model)["controlnets"] == [f"{net}:0.5"]
    digests = [base_sha256(FACTS)]
    for name, sha256 in (("controlnet 1 at 0.5", "ef"), ("controlnet 1 at 0.5", "01"), ("controlnet 1 at 0.6", "ef")):
        digests.append(base_sha256({"inputs": FACTS["inputs"] | {name: {"sha256": sha256}, "control 1": {}}}))
    assert len(set(digests)) == 4 and digests[0] == "ab"


def test_another_finished_run_is_overwritten_only_on_request(job, tmp_path):
    record = {"fingerprint": "this", "fidelity": {}}
    for text, found in (
        (None, None), ("", None), ("[]", None), ("{}", None), ('{"fingerprint": "another"}', None),
        (json.dumps(record), record),
    ):  # fmt: skip
        if text is not None:
            (tmp_path / "metrics.json").write_text(text)
        assert job_folder.finished(tmp_path, "this") == found
        if text in (None, "", json.dumps(record)):  # the folder is free
            job_folder.check_no_other_run(job, tmp_path, "this")
    record = {"fingerprint": "that", "fidelity": {}, "overrides": ["quant_level=3"]}
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="holds a finished run, of quant_level=3, whose .* add overwrite=true"):
        job_folder.check_no_other_run(job, tmp_path, "this")
    fingerprint = job_folder.fingerprint_of(job, FACTS)
    job.overwrite = True
    job_folder.check_no_other_run(job, tmp_path, "this")
    assert job_folder.fingerprint_of(job, FACTS) == fingerprint


@pytest.mark.slow
def test_a_job_is_known_to_be_done_without_what_would_do_it(job, tmp_path):
    assert job_folder.done_before(job, tmp_path) is None
    record = {"fingerprint": job_folder.fingerprint_of(job, job_folder.facts_of(job, tmp_path)), "fidelity": {}}
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    assert job_folder.done_before(job, tmp_path) == record
    job.infer.seed += 1
    assert job_folder.done_before(job, tmp_path) is None
    code = "import sys, sd_quant.commands.quantize; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_what_a_job_does_not_write_stays_wherever_it_lies(tmp_path):
    put(tmp_path, *OURS, *THEIRS)
    (tmp_path / "hand_over/gguf/hand_over.json").write_text('{"files": ["model.gguf", "hand_over.json"]}')
    elsewhere = tmp_path / "notes"
    (tmp_path / "images/quantized/0007.png").symlink_to(elsewhere)
    job_folder.remove_leftovers(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(THEIRS)
    assert not any((tmp_path / empty).exists() for empty in (".unfinished-1", "full_precision/onnx"))


def test_nothing_behind_a_link_is_removed(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    put(mine, "quantized/0000.png", "unet_xl/unet_xl.onnx", "gguf/hand_over.json", ".x.12.part")
    (mine / "gguf/hand_over.json").write_text('{"files": ["hand_over.json"]}')
    before = sorted(mine.rglob("*"))
    run.mkdir()
    for name in ("images", "onnx", "hand_over"):
        (run / name).symlink_to(mine)
    job_folder.remove_leftovers(run)
    assert sorted(mine.rglob("*")) == before


def test_a_folder_with_other_peoples_files_is_refused(tmp_path):
    put(tmp_path, ".hydra/config.yaml", "quantize.log", "failure.json")
    job_folder.check_own(tmp_path)
    put(tmp_path, "images/family.png", "notes.txt", "thesis.tex")
    with pytest.raises(ConfigError, match="^hydra.run.dir is .*, which holds images and notes.txt and more that no"):
        job_folder.check_own(tmp_path)
    put(tmp_path, ".lock")
    job_folder.check_own(tmp_path)


def test_a_folder_that_was_removed_while_its_job_ran_is_noticed(tmp_path):
    """Though a later stage may have made it again."""
    put(tmp_path, ".lock", "onnx/vae/vae.onnx")
    job_folder.check_still_there(tmp_path)
    (tmp_path / ".lock").unlink()
    with pytest.raises(SdQuantError, match="was removed while its job was running, so files of it are missing; start"):
        job_folder.check_still_there(tmp_path)


def test_a_report_is_drawn_once_for_a_record(tmp_path, monkeypatch, capsys):
    drawn = []

    def rebuild(directory):
        drawn.append(directory)
        (directory / REPORT).write_text("page")
        (directory / RECOMMENDATION).write_text('{"command": "infer run=here", "sentence": "Ship it: it is fast."}')

    monkeypatch.setattr(job_folder, "run_table", lambda record: "the table")
    monkeypatch.setattr("sd_quant.report.rebuild.rebuild", rebuild)
    (tmp_path / RECORD).write_text("{}")
    for _ in range(2):
        job_folder.closing_words(parsed(None), tmp_path)
        assert drawn == [tmp_path] and capsys.readouterr().out.splitlines()[-3:] == [
            f"report: file://{tmp_path}/report.html", "images with it: infer run=here", "Ship it: it is fast."
        ]  # fmt: skip
    later = (tmp_path / REPORT).stat().st_mtime_ns + 1
    os.utime(tmp_path / RECORD, ns=(later, later))  # such as by a hand-over
    job_folder.closing_words(parsed(None), tmp_path)
    for name in (REPORT, RECOMMENDATION):
        (tmp_path / name).unlink()
        job_folder.closing_words(parsed(None), tmp_path)
    assert len(drawn) == 4
