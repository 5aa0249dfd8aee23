"""Files and folders that a job starts from or writes to, which are looked at before anything is loaded."""

import errno
import importlib.util
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from sd_quant.config import PART_NAMES, artifact, lora_of, part_paths, prompts_of
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.files import check_writable

pytestmark = pytest.mark.commit


TABLE = "Prompt\tCategory\na cat\tAnimals\na dog\tAnimals\n'OPEN' on a door\tText\n"


@pytest.fixture
def places(archive, run, images, tmp_path) -> dict[str, Path]:
    """What refused jobs name: a whole archive, a run that has files and one that is finished, images, texts."""
    for name in ("metrics.json", "config.yaml", "layers.csv"):
        (tmp_path / "finished").mkdir(exist_ok=True)
        (tmp_path / "finished" / name).touch()
    (tmp_path / "users").mkdir()
    for name in ("metrics.json", "config.yaml"):
        (tmp_path / "users" / name).write_text("my: notes")
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks/a.png").touch()
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\nthree\n")
    (tmp_path / "set.tsv").write_text(TABLE)
    return {"archive": archive, "run": run, "images": images, "here": tmp_path}


GIVEN, DRAWN = {"model.path": "{archive}"}, {"model.path": "{archive}", "infer.prompts": "{here}/set.tsv"}
STRENGTH = r"model.loras .* a file, or file:strength with a number"


@pytest.mark.parametrize(
    ("primary", "knobs", "sentence"),
    [
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
        ("quantize", {"infer.image": "{images}", "infer.mask": "{here}/masks"},
         "infer.mask is .* holds no mask for 1 of 2 images, such as b.png"),
        ("quantize", GIVEN | {"infer.prompts": []},
         r"infer\.prompts is an empty list, expected at least one prompt; give some, as in 'infer.prompts=\["),
        ("quantize", GIVEN | {"infer.prompts": "cat"},
         r"infer.prompts is cat, which is no file .*brackets: 'infer.prompts=\[cat\]'$"),
        ("quantize", DRAWN | {"infer.num_prompts": 4},
         r"infer.num_prompts is 4, expected at most 3, which {here}/set.tsv has$"),
        ("quantize", DRAWN | {"infer.prompts_category": "Colour"}, ".*expected 'Colour' among them; name another with"),
        *(("quantize", {"infer.prompts": ["a", "b"], f"infer.{knob}": value},
           f"infer.{knob} is {value}, expected {idle}, because ")
          for knob, value, idle in (("num_prompts", 2, "null"), ("prompts_category", "a", "null"),
                                    ("prompts_seed", 1, "0"))),
        ("quantize", GIVEN | {"model.calibration_prompts": "{here}/prompts.txt", "quantize.calib_size": 4},
         "calib_size is 4, expected at most the 3 prompts of the prompt file$"),
        ("quantize", GIVEN | {"model.calibration_prompts": "no/such.txt", "quantize.calibration": "no/such/cache"},
         "calibration names no/such/cache, which .*; give a statistics"),
    ],
)  # fmt: skip
def test_a_job_whose_files_do_not_suffice_is_refused(refused, places, primary, knobs, sentence):
    named = {knob: value.format(**places) if isinstance(value, str) else value for knob, value in knobs.items()}
    refused(primary, named, "^" + sentence.replace("{here}", str(places["here"])))


def test_parts_come_from_the_run_and_single_paths_go_before(job, refused, run, tmp_path):
    own, missing = tmp_path / "own.onnx", artifact(run, "onnx", "clip1")
    own.touch()
    export = job("export_trt", {"run": run, "files.vae": own})
    export.check_files()
    paths = part_paths(export, "onnx")
    assert list(paths) == list(PART_NAMES)
    assert (paths["vae"], paths["unet_xl"]) == (own, run / "onnx/unet_xl/unet_xl.onnx")
    assert artifact(run, "plan", "unet_xl") == run / "plan/unet_xl.plan"
    job("export_trt", {"files.unet_xl": artifact(run, "onnx", "unet_xl")}).check_files()  # images need all
    missing.unlink()
    refused("export_trt", {"run": run}, f"^clip1 should be at {missing}, which does not exist")


def test_without_files_an_export_is_of_the_checkpoint(job, archive):
    export = job("export_trt", {"model.path": archive})
    assert export.unquantized()
    export.check_files()
    job("export_trt", {"trt.library": "none"})  # its ONNX files alone


def test_folders_to_write_to_are_made_later_and_refused_now(job, run, tmp_path):
    job("export_trt", {"run": run, "infer.out_path": run / "new"}).check_files()
    check_writable(tmp_path / "a/b/c")
    assert not (run / "new").exists() and not (tmp_path / "a").exists()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"because of .*broken; set hydra\.run\.dir"):
        check_writable(tmp_path / "broken/run")


def test_a_folder_that_cannot_be_made_is_refused(monkeypatch):
    """/proc has the permissions of a folder in which its owner may write."""
    with pytest.raises(ConfigError, match=r"^the output directory /proc/x/y cannot be written, because of /proc; set"):
        check_writable(Path("/proc/x/y"))
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ResourceError, match="the disk is full"):
        check_writable(Path("/tmp/x"))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("style.safetensors", ("style.safetensors", 1.0)),
        ("a/b.safetensors:0.8", ("a/b.safetensors", 0.8)),
        ("b.safetensors:-1", ("b.safetensors", -1.0)),
        ("v1:0.8.SafeTensors", ("v1:0.8.SafeTensors", 1.0)),
        ("v1:0.8.safetensors:2", ("v1:0.8.safetensors", 2.0)),
    ],
)
def test_a_lora_has_a_strength(job, stated, expected):
    model = job("infer", {"model.loras": [stated]}).model
    assert lora_of(model.loras[0]) == (*expected, None)
    with pytest.raises(ConfigError, match="^model.loras names .*, which does not exist"):
        model.check_files()


def test_prompts_come_from_a_list_or_a_file(job, tmp_path):
    listed = job("quantize", {"infer.prompts": ["a", "b"], "infer.num_samples": 2})
    assert listed.infer.prompt_list() == ["a", "a", "b", "b"]
    (tmp_path / "prompts.txt").write_text("c\nd\n")
    assert job("quantize", {"infer.prompts": tmp_path / "prompts.txt"}).infer.prompt_list() == ["c", "d"]


def test_prompts_are_drawn_from_a_data_set_with_their_categories(job, tmp_path):
    """One of each category first; samples of a prompt have its category."""
    (tmp_path / "set.tsv").write_text(TABLE)
    knobs = {"infer.prompts": tmp_path / "set.tsv", "infer.num_prompts": 2, "infer.num_samples": 2}
    infer = job("quantize", knobs).infer
    prompts, categories = infer.prompt_list(), infer.categories()
    assert len(set(prompts)) == 2 and prompts[::2] == prompts[1::2] and "'OPEN' on a door" in prompts
    assert [prompt == "'OPEN' on a door" for prompt in prompts] == [category == "Text" for category in categories]
    whole = job("quantize", {"infer.prompts": tmp_path / "set.tsv"}).infer
    assert whole.categories() == ["Animals", "Animals", "Text"]
    drawn = {tuple(job("quantize", knobs | {"infer.prompts_seed": seed}).infer.prompt_list()) for seed in range(9)}
    assert len(drawn) > 1
    assert job("quantize", {}).infer.categories() is None


def test_negative_prompts_are_repeated_as_the_prompts_are(job):
    infer = job("quantize", {"infer.negative_prompt": ["rain", "nude"], "infer.num_samples": 2}).infer
    assert infer.negative_prompts(2) == ["rain", "rain", "nude", "nude"]
    assert infer.negative_prompts() == ["rain", "nude"]
    assert job("quantize", {"infer.negative_prompt": "rain"}).infer.negative_prompts(3) == ["rain"] * 3
    assert job("quantize", {}).infer.negative_prompts(2) is None


def test_calibration_takes_the_first_prompts_and_none_where_statistics_come_from_elsewhere(job, archive, places):
    knobs = {"model.path": archive, "model.calibration_prompts": places["here"] / "prompts.txt"}
    assert prompts_of(job("quantize", knobs | {"quantize.calib_size": 2}).calibration_rows()) == ["one", "two"]
    elsewhere = {"model.calibration_prompts": "no/such.txt", "quantize.calibration": places["here"]}
    job("quantize", knobs | elsewhere).check_files()
    with pytest.raises(ConfigError, match="no/such.txt"):  # by whose images steps are chosen
        job("quantize", knobs | elsewhere | {"infer.reuse": 0.25}).check_files()


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here")
@pytest.mark.parametrize("knob", ["infer.engine", "trt.library"])
def test_a_missing_runtime_is_refused_with_its_extra(refused, archive, knob):
    told = r"the package tensorrt is not installed.* pip install 'sd-quant\[tensorrt\]'"
    refused("quantize", {knob: "tensorrt", "model.path": archive}, told, ResourceError)


def test_either_denoiser_of_a_run_can_be_opened(job, run):
    """NeMo's inference loads the original first."""
    original = {"run": run, "variant": "full_precision"}
    beside = artifact(run / "full_precision", "onnx", "unet_xl")
    beside.parent.mkdir(parents=True)
    beside.touch()
    quantized = {part: artifact(run, "onnx", part) for part in PART_NAMES}
    assert part_paths(job("infer", {"run": run}), "onnx") == quantized
    assert part_paths(job("infer", original), "onnx") == quantized | {"unet_xl": beside}
    given = job("infer", original | {"files.unet_xl": quantized["unet_xl"]})
    assert part_paths(given, "onnx") == quantized
