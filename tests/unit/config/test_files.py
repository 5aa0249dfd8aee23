"""Files, folders and earlier runs that a job starts from or writes to, looked at before anything is loaded."""

import errno
import importlib.util
import os
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from sd_quant.config import PART_NAMES, CacheFolder, Judge, artifact, part_paths, run_model
from sd_quant.config.earlier_runs import MARKS, is_finished_run, recipe_of_run, run_job
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.files import check_writable
from sd_quant.stages.judged_run import run_subject
from tests.refusals import refused

from .composition import TABLE, job, mapping_of

pytestmark = pytest.mark.commit

GIVEN, DRAWN = {"model.path": "{archive}"}, {"model.path": "{archive}", "infer.prompts": "{here}/set.tsv"}
STRENGTH = r"model.loras .* a file, or file:strength with a number"


@pytest.fixture
def places(archive, run, tmp_path) -> dict[str, Path]:
    """What refused jobs name: a whole archive, a run that has files and one that is finished, images, texts."""
    for name in ("metrics.json", "config.yaml", "layers.csv"):
        (tmp_path / "finished").mkdir(exist_ok=True)
        (tmp_path / "finished" / name).touch()
    (tmp_path / "users").mkdir()
    for name in ("metrics.json", "config.yaml"):
        (tmp_path / "users" / name).write_text("my: notes")
    for image in ("images/a.png", "images/b.png", "masks/a.png"):
        (tmp_path / image).parent.mkdir(exist_ok=True)
        (tmp_path / image).touch()
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\nthree\n")
    (tmp_path / "set.tsv").write_text(TABLE)
    return {"archive": archive, "run": run, "images": tmp_path / "images", "here": tmp_path}


@pytest.mark.parametrize(("primary", "knobs", "sentence"), [
    ("infer", GIVEN | {"files.unet_xl": "{run}/onnx/unet_xl/unet_xl.onnx"},
     r"no file is given for vae, clip1, clip2; set run=.* or vae=<path of its"),
    ("infer", {"run": "{run}", "variant": "full_precision"},
     "variant is full_precision, expected quantized, because run= names no folder with"),
    ("infer", {"infer.out_path": "{here}/finished"},
     "infer.out_path is .*, expected another folder than a finished run's"),
    ("infer", GIVEN | {"infer.out_path": "{here}/users"}, "the metrics.json of this command would replace .*json"),
    ("export_trt", GIVEN | {"infer.out_path": "{here}/users"},
     "the config.yaml of this command would replace .*, which is"),
    ("infer", GIVEN | {"infer.prompts": ["a"] * 101, "infer.num_samples": 10_000},
     "infer.num_samples is 10000, expected at most 9900: 1000000 images of 101 prompts"),
    ("infer", {"model.controlnets": ["unet_canny:strong"]}, "model.controlnets .* a folder, or folder:scale with"),
    *(("infer", {"model.loras": [stated]}, STRENGTH)
      for stated in ("b.safetensors:much", "b.safetensors:nan", "b.safetensors:", ":0.5", "")),
    ("export_trt", {"model.path": "missing.nemo"}, "model.path names missing.nemo, which does not exist"),
    ("export_trt", GIVEN | {"model.family": "sd15"}, "model.path is .*, a file, expected for"),
    ("export_trt", {"run": "{run}", "trt.library": "none"},
     "trt.library is none, expected a library that builds plans"),
    ("export_trt", {"run": "{run}", "infer.out_path": "{archive}/new"},
     r".* cannot be written, because of .*empty\.nemo; set infer\.out_path$"),
    ("quantize", GIVEN | {"cache.dir": "{archive}/cache"}, r"the cache .* cannot be written, .*; set cache\.dir"),
    ("quantize", {"infer.image": "missing.png"}, "infer.image names missing.png, which does not exist"),
    ("infer", {"infer.latents": "nowhere.pt"}, "infer.latents names nowhere.pt, which does not exist .*; give an"),
    ("quantize", {"infer.image": "{images}", "infer.mask": "{here}/masks"},
     "infer.mask is .* holds no mask for 1 of 2 images, such as b.png"),
    ("quantize", GIVEN | {"infer.prompts": []},
     r"infer\.prompts is an empty list, expected at least one prompt; give some, as in 'infer.prompts=\["),
    ("quantize", GIVEN | {"infer.prompts": "cat"},
     r"infer.prompts is cat, which is no file .*brackets: 'infer.prompts=\[cat\]'$"),
    ("quantize", DRAWN | {"infer.num_prompts": 4},
     r"infer.num_prompts is 4, expected at most 3, which {here}/set.tsv has$"),
    *(("quantize", {"infer.prompts": ["a", "b"], f"infer.{knob}": value},
       f"infer.{knob} is {value}, expected {idle}, because ")
      for knob, value, idle in (("num_prompts", 2, "null"), ("prompts_seed", 1, "0"))),
    ("quantize", GIVEN | {"model.calibration_prompts": "{here}/prompts.txt", "quantize.calib_size": 4},
     "calib_size is 4, expected at most the 3 prompts of the prompt file$"),
    ("quantize", GIVEN | {"model.calibration_prompts": "no/such.txt", "quantize.calibration": "no/such/cache"},
     "calibration names no/such/cache, which .*; give a statistics"),
])  # fmt: skip
def test_a_job_whose_files_do_not_suffice_is_refused(places, primary, knobs, sentence):
    named = {knob: value.format(**places) if isinstance(value, str) else value for knob, value in knobs.items()}
    with refused(sentence.replace("{here}", str(places["here"]))):
        job(primary, named).check_files()


def test_parts_come_from_a_run_from_single_paths_or_from_the_checkpoint(archive, run, tmp_path):
    """Images by the original denoiser take it from beside the run's; NeMo's inference loads it first."""
    unquantized = job("export_trt", {"model.path": archive})
    assert unquantized.unquantized()
    unquantized.check_files()
    job("export_trt", {"trt.library": "none"})  # its ONNX files alone
    own, missing = tmp_path / "own.onnx", artifact(run, "onnx", "clip1")
    beside = artifact(run / "full_precision", "onnx", "unet_xl")
    beside.parent.mkdir(parents=True)
    for file in (own, beside):
        file.touch()
    quantized = {part: run / f"onnx/{part}/{part}.onnx" for part in PART_NAMES}
    original = {"run": run, "variant": "full_precision"}
    given = original | {"files.unet_xl": quantized["unet_xl"]}
    export = job("export_trt", {"run": run, "files.vae": own})
    export.check_files()
    assert list(part_paths(export, "onnx").items()) == list((quantized | {"vae": own}).items())
    assert part_paths(job("infer", {"run": run}), "onnx") == quantized == part_paths(job("infer", given), "onnx")
    assert part_paths(job("infer", original), "onnx") == quantized | {"unet_xl": beside}
    assert artifact(run, "plan", "unet_xl") == run / "plan/unet_xl.plan"
    job("export_trt", {"files.unet_xl": quantized["unet_xl"]}).check_files()  # images need all
    missing.unlink()
    with refused(f"clip1 should be at {missing}, which does not exist"):
        export.check_files()


def test_folders_to_write_to_are_made_later_and_refused_now(run, tmp_path, monkeypatch):
    """/proc has the permissions of a folder in which its owner may write."""
    job("export_trt", {"run": run, "infer.out_path": run / "new"}).check_files()
    check_writable(tmp_path / "a/b/c")
    assert not (run / "new").exists() and not (tmp_path / "a").exists()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"because of .*broken; set hydra\.run\.dir"):
        check_writable(tmp_path / "broken/run")
    with pytest.raises(ConfigError, match=r"^the output directory /proc/x/y cannot be written, because of /proc; set"):
        check_writable(Path("/proc/x/y"))
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ResourceError, match="the disk is full"):
        check_writable(Path("/tmp/x"))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here")
@pytest.mark.parametrize("knob", ["infer.engine", "trt.library"])
def test_a_missing_runtime_is_refused_with_its_extra(archive, knob):
    told = r"the package tensorrt is not installed.* pip install 'sd-quant\[tensorrt\]'"
    with refused(told, ResourceError):
        job("quantize", {knob: "tensorrt", "model.path": archive}).check_files()


@pytest.mark.parametrize(("paths", "names"), [
    (["a.gguf", "b/c.safetensors"], ["a.gguf", "c.safetensors"]),
    (["x/unet", "y/unet"], ["x-unet", "y-unet"]),
    (["1/x/unet", "2/x/unet", "a.gguf"], ["1-x-unet", "2-x-unet", "3-..a.gguf"]),
    (["a b;c.gguf"], ["a-b-c.gguf"]),
    (["x/y/.."], ["x"]),
    (["report.html", "x/sweep.json"], ["report-html", "sweep-json"]),
    (["a;b", "a b"], ["1-..a-b", "2-..a-b"]),
])  # fmt: skip
def test_each_candidate_has_a_name_of_its_own(paths, names, tmp_path, monkeypatch):
    """Which is that of a folder too."""
    monkeypatch.chdir(tmp_path)
    found = (judge := Judge(paths, 20, True, False, 0.95)).named()
    expected = [name.replace("..", f"{tmp_path.name}-") for name in names]
    assert list(found) == expected and [path.relative_to(tmp_path) for path in found.values()] == list(map(Path, paths))
    assert judge.planned() == [{"name": name, "varied": {"candidate": name}} for name in expected]


def test_a_candidate_is_a_file_or_a_folder(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="^candidates is .*a.gguf, expected files and folders, and no pipe or device"):
        Judge([str(tmp_path / "a.gguf")], 20, True, False, 0.95).check_files()


# Earlier runs


@pytest.fixture
def earlier(run) -> Callable[..., str]:
    """``earlier(quantize={...})``: the folder of a finished run with these changes of sections, without knobs."""
    for name in ("metrics.json", "layers.csv"):
        (run / name).touch()

    def written(**changes: object) -> str:
        knobs = deepcopy(mapping_of("quantize"))
        for section, change in changes.items():
            knobs[section] = knobs[section] | change if isinstance(change, dict) else change
        (run / "config.yaml").write_text(yaml.safe_dump(knobs))
        return str(run)

    return written


@pytest.mark.parametrize("given", [{"assignment": "edited and removed.yaml"}, {"budget": 0.2}])
def test_a_run_with_a_file_of_presets_a_budget_or_drawn_prompts_has_its_copy(earlier, run, given):
    """The copies in the run's folder replace the user's files, which may be gone, and a choice by budget."""
    drawn = {"prompts": "gone.json", "num_prompts": 64, "prompts_seed": 3}
    folder = earlier(quantize=given, infer=drawn)
    (run / "assignment.yaml").write_text("conv: nvfp4")
    (run / "prompts.tsv").write_text("Prompt\na cat\n")
    for found in (run_job(folder), recipe_of_run(folder, CacheFolder(None, 1.0))):
        assert found.quantize.assignment == str(run / "assignment.yaml") and found.formats()["inputs"] == {"nvfp4"}
        assert not found.quantize.chooses_bits
        assert found.infer.prompt_list() == ["a cat"]


@pytest.mark.parametrize("missing", MARKS)
def test_a_run_without_one_of_its_files_is_named_as_that(earlier, run, missing):
    """A run is not opened as a third-party checkpoint, whose first file would be the report's web page."""
    earlier()
    assert is_finished_run(run)
    (run / missing).unlink()
    assert not is_finished_run(run)
    with pytest.raises(ConfigError, match=f"which has no {missing}, expected the folder of a finished run"):
        run_subject("run", run, SimpleNamespace(cache=CacheFolder(None, 1.0), session=None))


def test_a_strangers_run_describes_its_recipe_and_decides_nothing_else(earlier, run):
    mine = CacheFolder("mine", 1.0)
    theirs = {
        "cache": {"dir": "elsewhere"}, "trt": {"timing_cache": "elsewhere"}, "infer": {"allow_untrusted_plan": True},
        "quantize": {"devices": 64, "accelerator": "cuda", "alpha": 0.3},
        "hand_over": "no list", "trackers": 3, "verdict": None, "unknown": 1,
    }  # fmt: skip
    found = recipe_of_run(earlier(**theirs), mine)
    assert (found.cache, found.quantize.alpha) == (mine, 0.3)
    assert (found.quantize.devices, found.quantize.accelerator) == (1, "auto")
    assert not found.infer.allow_untrusted_plan and not hasattr(found, "trt") and not hasattr(found, "trackers")
    with pytest.raises(ConfigError, match=r"^model.parts is \.\./\.\./victim, expected names of letters"):
        recipe_of_run(earlier(**theirs, model={"parts": ["../../victim", "vae"]}), mine)
    (run / "config.yaml").write_text("a: " + "x" * 2**20)
    with pytest.raises(ArtifactError, match="is not the config of a run .*no regular file of at most"):
        recipe_of_run(str(run), mine)


@pytest.mark.slow
def test_the_model_of_a_run_is_read_from_its_configuration(run):
    assert run_model(str(run)) is None
    model = mapping_of("infer")["model"] | {"path": "some.nemo", "width": 128}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert run_model(str(run)) == model
    numbers, lists = "model: " + "1:" * 100_000 + "1", "model: " + "[" * 9999
    for broken in ("a: [", "just text", "other: 1", numbers, lists):
        (run / "config.yaml").write_text(broken)
        with pytest.raises(ArtifactError, match=r"config\.yaml is not the config of a run"):
            run_model(str(run))
