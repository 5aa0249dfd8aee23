"""Bad input to the real commands: one sentence, the right exit code, nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose
from PIL import Image

from sd_quant.composition import composing
from sd_quant.places import HOME

from ..pasting import words_of
from .shared import well

pytestmark = pytest.mark.commit


def listing(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


@pytest.fixture
def files(tmp_path) -> Path:
    """A whole archive that holds no checkpoint, a broken one, a file that is no autoencoder, and an image."""
    (tmp_path / "empty.nemo").write_bytes(bytes(1024))
    (tmp_path / "garbage.nemo").write_bytes(b"this is not a tar archive " * 100)
    (tmp_path / "latin1.txt").write_bytes("ein rotes Häuschen\n".encode("latin-1"))
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    return tmp_path


CHECKPOINT_GIVEN = "model.path={files}/empty.nemo"
FOLDER = "model=sd15", "model.path={files}/pipeline"
OBSERVED = "model=diffusers", "model.path=checkpoints/sd3_mini"


@pytest.mark.parametrize(("script", "arguments", "code", "words"), [
    ("quantize.py", ["quant_level"], 2, "the argument quant_level has no value, expected quant_level=<value>"),
    ("quantize.py", ["-quant_level=3"], 2, "is no option; a knob is given without dashes: quant_level=3"),
    ("quantize.py", ["alpha=0.5,0.8"], 2, "--multirun"),
    ("quantize.py", [CHECKPOINT_GIVEN, "hydra.run.dir=/proc/xyz"], 2, "because of /proc; set hydra.run.dir"),
    ("quantize.py", ["model.path={files}/garbage.nemo"], 3, "garbage.nemo has no valid tar header at byte 0"),
    ("quantize.py", ["model.vae={files}/latin1.txt"], 2, "latin1.txt, expected a folder of an AutoencoderKL"),
    ("quantize.py", [*OBSERVED, "model.vae=conf"], 2, "an autoencoder is swapped in known families alone"),
    ("quantize.py", ["model=sd3_mini", "model.pipeline=nemo"], 2, "only SDXL comes in files of NeMo's"),
    ("quantize.py", [*OBSERVED, "model.parts=[vae]"], 2, "model.parts is ['vae'], expected []"),
    ("quantize.py", ["model.path=~/no such (v1).NEMO"], 2, "model.path names ~/no such (v1).NEMO, which does"),
    ("quantize.py", ["-m", "model.path={files}/garbage.nemo", "infer.negative_prompt=häßlich,a!"], 3, "no valid tar"),
    ("quantize.py", ["model.path=my", "ordner/größe.nemo"], 2, "before it, write 'model.path=my ordner/größe.nemo'"),
    ("quantize.py", ["model.path=a, b.nemo"], 2, """write 'model.path="a, b.nemo"' or 'model.path=[a, b.nemo]'"""),
    ("quantize.py", ["-m", "model.path=größe,"], 2, """, write 'model.path="größe,"'"""),
    ("quantize.py", ["model.path=7"], 2, """model.path is 7, expected text; if it is one, write 'model.path="7"'"""),
    ("quantize.py", ["--help", "alhpa"], 2, "--help explains no knob alhpa; did you mean alpha?"),
    ("quantize.py", ["--cfg", "job", "--package", "nope"], 2, "--package is nope, expected the name of a knob"),
    ("infer.py", ["model=sd3_mini", "infer=torch", "hydra.run.dir={files}"], 2, "empty.nemo that no command has"),
    ("export_trt.py", ["model=sd3_mini", "hydra.run.dir={files}"], 2, "expected a folder that is new, empty or a"),
    ("judge.py", ["candidates=[no.gguf]"], 2, "no.gguf, which does not exist"),
    ("judge.py", ["candidates=[README.md]", "infer.engine=openvino"], 2, "infer.engine is openvino, expected torch"),
])  # fmt: skip
def test_a_refused_command_says_one_sentence_and_leaves_nothing(
    command, working_folder, files, script, arguments, code, words
):
    arguments = [argument.format(files=files) for argument in arguments]
    if not any(argument.startswith("hydra.run.dir") for argument in arguments):
        arguments += [f"hydra.run.dir={files}/run", f"hydra.sweep.dir={files}/sweep"]
    before = listing(files, working_folder / "outputs")
    result = command(script, *arguments)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr
    assert listing(files, working_folder / "outputs") == before


def test_an_interpreter_of_its_own_says_the_same_and_no_more(command, process, files):
    given = "quantize.py", f"model.path={files}/garbage.nemo", f"hydra.run.dir={files}/run"
    own, forked = ((each.returncode, each.stdout, each.stderr) for each in (run(*given) for run in (process, command)))
    assert own == forked and own[0] == 3


def test_without_addresses_for_the_libraries_a_job_is_refused_before_they_are_loaded(files):
    """Else some of them abort the process."""
    shell = ["sh", "-c", 'ulimit -v 600000; exec "$@"', "sh"]
    limited = [*shell, sys.executable, "quantize.py", f"hydra.run.dir={files}/run"]
    result = subprocess.run(limited, cwd=HOME, capture_output=True, text=True)
    assert result.returncode == 4 and result.stderr.count("\n") == 1
    assert "and the libraries alone take about 1.3 GB; raise the limit (ulimit -v unlimited)" in result.stderr
    assert not (files / "run").exists()


@pytest.mark.parametrize(("script", "arguments", "code", "sentence"), [
    ("quantize.py", [CHECKPOINT_GIVEN], 3, ".*empty.nemo holds no model_config.yaml but nothing.*"),
    ("quantize.py", [*FOLDER, "model=pixart", "infer.image={files}/image.png"], 2,
     "infer.image is .*, expected null, because only sd15, sd21, sdxl begin with images here.*"),
    ("judge.py", ["candidates=[conf]"], 2, ".*conf is of no kind that is known here.*"),
])  # fmt: skip
def test_what_a_begun_job_finds_is_one_sentence_before_calibration_and_leaves_only_its_log(
    refused, files, script, arguments, code, sentence
):
    given = script, *(argument.format(files=files) for argument in arguments), f"hydra.run.dir={files}/run"
    found = refused(*given, code=code)
    assert re.fullmatch(sentence, found)
    log = f"{script.removesuffix('.py')}.log"
    least, left = {".hydra", log, "failure.json"}, {path.name for path in (files / "run").iterdir()}
    assert least <= left <= least | {".lock", "config.yaml"}
    text = (files / "run" / log).read_text()
    assert text.count(found) == 1 and "calibrate" not in text


def test_a_folder_with_the_users_own_files_is_refused_again_and_again(refused, checkpoint, tmp_path):
    """Else the first attempt would leave its lock, and the second would take all that is there for the first one's."""
    files = [tmp_path / "run" / name for name in ("images/family.png", "onnx/model.onnx")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    for _ in range(2):
        said = refused("quantize.py", f"model.path={checkpoint}", f"hydra.run.dir={tmp_path}/run")
        assert "holds images and onnx that no job has written" in said
        assert [file.read_text() for file in files] == ["mine", "mine"]


def test_a_sweep_with_broken_jobs_fails_and_each_log_and_row_says_why(refused, files):
    arguments = [f"model.path={files}/empty.nemo", "quant_level=1,2", f"hydra.sweep.dir={files}/sweep"]
    assert refused("quantize.py", "-m", *arguments, code=1).startswith("2 of 2 jobs are not done (quant_level=1: ")
    for job in ("quant_level=1", "quant_level=2"):
        assert "holds no model_config.yaml" in (files / "sweep" / job / "quantize.log").read_text()
    table = (files / "sweep/summary.md").read_text()
    assert table.count("failed") == 2 and "holds no model" in table


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_ctrl_c_and_a_schedulers_word_end_the_job_soon_and_without_a_record(start, checkpoint, tmp_path, sent):
    process = start("quantize.py", f"model.path={checkpoint}", f"hydra.run.dir={tmp_path}/run", "cache.dir=null")
    next(line for line in process.stdout if "calibrate ..." in line)
    time.sleep(1)
    os.killpg(process.pid, sent)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1].startswith("error: cancelled") and "Traceback" not in stderr
    assert "assign ..." not in stdout  # the stage that it was in would have taken minutes
    assert not list(tmp_path.rglob("metrics.json")) and not list(tmp_path.rglob("*.part"))


HELP = """
import runpy, sys
for arguments in (["--help"], ["nope=1"]):
    sys.argv = [{script!r}, *arguments]
    try:
        runpy.run_path({script!r}, run_name="__main__")
    except SystemExit:
        pass
print("imported", *({heavy!r} & sys.modules.keys()))
"""
HEAVY = {
    *("torch", "numpy", "scipy", "pandas", "matplotlib", "PIL", "diffusers", "transformers", "torchmetrics"),
    *("lightning", "onnx", "onnxscript", "openvino", "onnxruntime", "tensorrt_rtx", "modelopt", "pyarrow"),
}


@pytest.mark.parametrize(("script", "says", "groups", "needed", "count"), [
    ("quantize.py", "Quantize a diffusion checkpoint", "model quantize export_trt infer experiment", [], 3),
    ("infer.py", "Make images with the engines of an earlier run", "model infer", [], 3),
    ("export_trt.py", "Build TensorRT plans from the ONNX files", "model export_trt", [], 5),
    ("hand_over.py", "Export a quantized model to other tools", "none", ["run", "to"], 2),
    ("judge.py", "Compare quantized checkpoints of any tool", "model", ["candidates"], 2),
])  # fmt: skip
def test_help_imports_nothing_heavy_and_says_what_a_command_does_with_its_own_groups_and_examples_that_paste(
    process, script, says, groups, needed, count, tmp_path
):
    """Without heavy imports help takes no longer than Hydra itself."""
    printed = well(process("-c", HELP.format(script=script, heavy=HEAVY))).stdout
    printed, _, imported = printed.rstrip().rpartition("\nimported")
    assert printed.startswith(says) and not imported
    head, presets, knobs = re.split(r"\n== .* ==\n", printed)
    assert re.findall(r"^  (\w+)", presets, re.MULTILINE) == groups.split()
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100 and "--help NAME" in "\n".join(lines[:24])
    assert not [line for line in knobs.splitlines() if line and not re.match(r"[\w ]+:$|  [\w.]+=.*?  .", line)]
    assert re.findall(r"(\w+)=\?\?\? ", knobs) == needed and "${" not in knobs
    examples = [line for line in head.splitlines() if line.startswith("  python")]
    assert len(examples) == count
    for example in examples:
        program, called, *words = words_of(re.sub(r"<[^<>]*>", "some", example), tmp_path)
        assert (program, called) == ("python", "infer.py" if "its folder" in example else script)
        with composing(called.removesuffix(".py")):
            varied = "-m" in words  # which several jobs are
            compose(called.removesuffix(".py"), [word for word in words if not varied or not re.search("-m|,", word)])


def test_a_sweep_for_slurm_where_there_is_none_leaves_nothing(process, tmp_path):
    given = ["-m", "quant_level=1,2", "hydra/launcher=slurm", f"hydra.sweep.dir={tmp_path}/sweep"]
    result = process("quantize.py", *given, PATH=str(tmp_path))
    assert result.returncode == 4 and "requires sbatch, srun, squeue, which is not on the PATH" in result.stderr
    assert not (tmp_path / "sweep").exists()
