"""A wheel in an environment of its own, used from a folder far from the checkout."""

import getpass
import html
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_quant.composition import LAUNCHERS
from sd_quant.places import HOME
from sd_quant.report.gpu_report import read_report
from sd_quant.shell import literal

from ..pasting import AWKWARD
from .shared import QUICK, json_of, well

pytestmark = [pytest.mark.nightly, pytest.mark.needs(memory_gb=3)]

MINE = """format: mine
enable:
  conv: {weight: int8, activation: int8}
  linear: {weight: int8, activation: int8}
  attention: null
"""
TYPED = """import sd_quant

model = sd_quant.open("sdxl_mini")
statistics: sd_quant.Statistics = model.calibrate(["a cat"])
rows: list[dict[str, object]] = sd_quant.compare([model.quantize(statistics)], ["a cat"]).rows()
model.quantize("no statistics")
"""


def clean() -> dict[str, str]:
    """The variables of the environment without the tests' own path, on which this checkout may be."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """With wheels of the package and its add-ons, and all else that the tests' environment has not from a checkout."""
    folder = tmp_path_factory.mktemp("environment")
    source, wheels = folder / "source", folder / "wheels"
    for name in ("sd_quant", "conf", "checkpoints", "examples/published", "addons"):
        shutil.copytree(HOME / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(HOME / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source, *source.glob("addons/*")]
    subprocess.run([*pip, *wheel], check=True, env=clean())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv/lib").glob("*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["--python", folder / "venv", "install", "--no-deps", "--no-index", *wheels.iterdir()]
    subprocess.run([*pip, *install], check=True, env=clean())
    return folder / "venv"


@pytest.fixture(scope="module")
def user(environment, tmp_path_factory, with_graphs) -> Callable[..., subprocess.CompletedProcess]:
    """``user(*command)`` in the folder ``user.folder``, which has a cache with the checkpoint's graphs.
    ``user.paste(command)`` gives it to a shell there."""
    folder = tmp_path_factory.mktemp("user")
    with_graphs(folder / "outputs/cache")

    path = {"PATH": f"{environment}/bin:{os.environ['PATH']}"}
    options = {"cwd": folder, "env": clean() | path, "capture_output": True, "text": True}

    def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess:
        return subprocess.run([environment / "bin" / program, *arguments], **options)

    run.folder, run.paste = folder, lambda command: subprocess.run(["sh", "-c", command], **options)
    return run


def test_it_is_the_wheel_whose_program_refuses_what_is_no_command_and_has_a_doctor(user, environment):
    where = "import sd_quant; from sd_quant.places import HOME, CONF; print(sd_quant.__file__, HOME, CONF.is_dir())"
    *paths, found = user("python", "-c", where).stdout.split()
    assert found == "True" and all(path.startswith(str(environment)) for path in paths)

    assert "quantize" in user("sd-quant").stdout
    sentence = "error: there is no command quantise; did you mean quantize?\n"
    for program in (("sd-quant",), ("python", "-m", "sd_quant")):
        refused = user(*program, "quantise")
        assert (refused.returncode, refused.stderr) == (2, sentence)
    doctor = user("sd-quant", "doctor")
    assert (doctor.returncode, doctor.stderr) == (0, "") and "  int8_weight_only" in doctor.stdout
    assert "cannot be told" not in doctor.stdout and str(environment.parent) not in doctor.stdout


def test_the_main_job_a_sweep_images_and_the_report(user):
    done = well(user("sd-quant", "quantize", "quant_level=3", "alpha=0.8", *QUICK))
    (run,) = (user.folder / "outputs/quantize").iterdir()
    shipped = json_of(run / "recommendation.json")["sentence"]
    assert f"report: {(run / 'report.html').as_uri()}\n" in done.stdout and done.stdout.splitlines()[-1] == shipped
    well(user("python", "-m", "sd_quant", "quantize", "-m", "quant_level=1,3", *QUICK))
    (folder,) = (user.folder / "outputs/sweeps").iterdir()
    assert (folder / "summary.csv").read_text().count("\n") == 3
    again = user.paste(command_of(folder))
    assert again.returncode == 0 and "these jobs were begun before" in again.stdout, again.stderr[-2000:]
    well(user("sd-quant", "infer", f"run=outputs/quantize/{run.name}", "prompts=[a key]", "steps=2"))
    again = user("sd-quant", "report", str(run))
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, shipped)


def command_of(folder: Path) -> str:
    """The command that the report of a run or a sweep shows."""
    return html.unescape(re.search("<dt>command</dt><dd>(.*?)</dd>", (folder / "report.html").read_text())[1])


def test_what_is_printed_and_written_runs_as_it_is_pasted(user, environment):
    """For folders with names that shells and Hydra would take apart."""
    checkpoint = next((environment / "lib").glob("*/site-packages/sd_quant/shipped/checkpoints/sdxl_mini.nemo"))
    model = AWKWARD.replace("${x}", "model")  # with which neither Hydra can write a run's folder, nor we read one
    run = user.folder / f"{model} run"
    commands = []
    for source, target in ((checkpoint, model), (model, "back.nemo")):
        converted = user("sd-quant", "convert", source, target)
        assert converted.returncode == 0, converted.stderr
        commands.append(converted.stdout.strip().partition("; next: ")[2])
        shown = user.paste(f"{commands[-1]} --cfg job --resolve --package infer")
        assert "width: 64" in shown.stdout, shown.stderr
    well(user.paste(f"{commands[0]} {shlex.join([*QUICK, f'hydra.run.dir={literal(run.name)}'])}"))
    shown = user.paste(f"{command_of(run)} --cfg job --package model.path")
    assert shown.stdout.strip() == model, shown.stderr
    well(user("sd-quant", "hand_over", f"run={literal(run.name)}", "to=[diffusers_modelopt]", "images=false"))
    cards = list((user.folder / "outputs/hand_over").glob("*/diffusers_modelopt/README.md"))
    well(user.paste(re.search("^    (sd-quant .*)$", cards[0].read_text(), re.MULTILINE)[1]))
    assert len(list((user.folder / "outputs/hand_over").glob("*/diffusers_modelopt/README.md"))) == len(cards) + 1
    done = user.paste(f"python -m {LAUNCHERS['joblib']} --dry-run --no-index")  # it is installed
    assert done.returncode == 0, done.stderr


def test_groups_of_ones_own(user):
    mine = user.folder / "mine/quantize"
    mine.mkdir(parents=True)
    (mine / "mine.yaml").write_text(MINE)
    refused = user("sd-quant", "quantize", "--config-dir", "mine", "quantize=mine", "quant_level=7")
    assert refused.stderr == "error: quant_level is 7.0, expected one of 0, 1, 2, 2.5, 3, 4\n"
    shown = user("sd-quant", "quantize", *"--config-dir mine quantize=mine --cfg job --package quantize".split())
    assert shown.stdout.splitlines()[-1] == "  attention: null" and "format: mine" in shown.stdout
    (mine / "bad.yaml").write_text("format: bad\nenable: {conv: 3}\n")
    refused = user("sd-quant", "quantize", "hydra.searchpath=[file://mine]", "quantize=bad")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    (mine / "int8.yaml").write_text(MINE)
    refused = user("sd-quant", "quantize", "--config-dir", "mine")
    assert refused.returncode == 2 and refused.stderr.startswith("error: quantize/int8.yaml is in ")


def test_a_users_types_are_checked(user, environment):
    (user.folder / "typed.py").write_text(TYPED)
    command = ["-m", "mypy", "--python-executable", environment / "bin/python", "typed.py"]
    found = user("python", *command).stdout
    assert 'typed.py:6: error: Argument 1 to "quantize" of "Model" has incompatible type "str"' in found, found
    assert found.splitlines()[-1].startswith("Found 1 error in 1 file")


def test_a_folder_that_cannot_be_written_and_data_that_is_missing(user, environment, tmp_path):
    (site,) = (environment / "lib").glob("*/site-packages")
    missing = tmp_path / "site"
    missing.mkdir()
    subprocess.run(["cp", "-r", site / "sd_quant", missing], check=True)
    subprocess.run(["rm", "-r", missing / "sd_quant/shipped/conf"], check=True)
    code = f"import sys; sys.path.insert(0, {str(missing)!r}); from sd_quant.__main__ import main; main()"
    refused = user("python", "-c", code, "quantize")
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1), refused.stderr
    assert "was installed without its configuration; install it again" in refused.stderr
    command, options = [environment / "bin/sd-quant", "quantize"], {"capture_output": True, "text": True}
    refused = subprocess.run(command, cwd="/proc", env=clean(), **options)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "cannot be written, because of /proc" in refused.stderr


def test_a_rehearsed_report_of_a_gpu_is_whole_and_names_nobody(user, tmp_path):
    """OpenVINO on the CPU stands in for the GPU's engines."""
    words = "--rehearse --checkpoints mini --formats int8 nvfp4 --out".split()
    well(user("sd-quant", "gpu-report", *words, tmp_path))
    content = (tmp_path / "gpu_report.json").read_bytes()
    row, refused = read_report(content, "it").rows
    assert (row.ended, row.engine, row.executed, row.layers) == ("done", "openvino", 150, 150) and row.psnr_db > 30
    assert {each.what for each in row.parity} >= {"unet_xl with torch", "unet_xl with ONNX Runtime", "vae with torch"}
    assert all(each.relative_error <= each.tolerance for each in row.parity)
    assert refused.ended == "not run" and "OpenVINO" in refused.reason
    names = {platform.node(), str(HOME), str(user.folder), str(tmp_path), getpass.getuser()} - {"root"}
    assert not [name for name in names if name.encode() in content]
