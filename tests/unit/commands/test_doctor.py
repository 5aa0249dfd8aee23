"""What sd-quant doctor says, and that it says it of everything that is broken or missing."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sd_quant.commands import doctor
from sd_quant.config import QuantizeJob
from sd_quant.config.recipe import own_recipe, presets
from sd_quant.engines import RUNTIMES, gpu, why_not
from sd_quant.errors import ConfigError
from sd_quant.knobs import read
from sd_quant.places import HOME
from sd_quant.report import provenance

from ..config.composition import composed

pytestmark = pytest.mark.commit

HEAVY = {"torch", "numpy", "hydra", "omegaconf", "diffusers", "transformers", "onnx", "onnxruntime", "openvino"}


def asked(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """``sd-quant doctor`` in a folder."""
    path = os.pathsep.join([environment.pop("FIRST", ""), str(HOME)]).lstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *options, "-m", "sd_quant", "doctor"], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_says_all_of_it_without_importing_what_is_heavy_and_names_nobody(tmp_path):
    home = tmp_path / "home of ada"
    home.mkdir()
    done = asked(home, "-X", "importtime", HOME=str(home), USER="ada")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and not HEAVY & imported and "sd_quant.config" in imported
    assert all(line.startswith("import time:") for line in done.stderr.splitlines())
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert lines == [*doctor.SECTIONS] and "cannot be told" not in done.stdout
    named = {line.split()[0] for line in done.stdout.splitlines()}
    assert {*provenance.PACKAGES, *RUNTIMES, *presets(), "Python", "processor", "memory"} <= named
    assert not re.search(rf"ada|{re.escape(str(HOME))}|{re.escape(str(tmp_path))}|{os.uname().nodename}", done.stdout)
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_what_is_broken_is_a_line(tmp_path):
    """Here a package that everything but this command needs, and an own package of a version that is too old."""
    (tmp_path / "yaml.py").write_text("raise ImportError(f'as {__file__} does', name='yaml')")
    old = tmp_path / "onnx-1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: onnx\nVersion: 1.0\n")
    done = asked(tmp_path, FIRST=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("  cannot be told     ImportError yaml\n") >= 1 and str(tmp_path) not in done.stdout
    assert re.search(r"^  onnx +1\.0, supported is .*>=1\.20", done.stdout, re.MULTILINE)
    assert "  address space" in done.stdout and "  torch" in done.stdout


def test_what_an_extra_lacks_is_named(monkeypatch):
    there = {"torch": "2.12", "gguf": "0.1", "rtx": None}
    of_extras = ["gguf>=0.19; extra == 'gguf'", "rtx; extra == 'rtx'", "torch; extra == 'again'"]
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.10", "absent>=1", *of_extras])
    extras = SimpleNamespace(get_all=lambda name: ["gguf", "rtx", "again"])
    monkeypatch.setattr(doctor, "metadata", lambda name: extras)
    monkeypatch.setattr(provenance, "PACKAGES", ("sd-quant", "torch"))
    monkeypatch.setattr(provenance, "versions", lambda *names: {name: there.get(name) for name in names})
    assert dict(doctor.extras()) == {
        "installed": "again",
        "not installed": "gguf (gguf 0.1, supported is >=0.19); rtx (rtx)",
    }
    assert [*doctor.packages()][3:] == [("absent", "not installed")]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(told, build)``: nvidia-smi says ``told``, or fails, and torch is of that build."""

    def machine(told: str | None, build: str = "CUDA 13.0") -> None:
        program = tmp_path / "nvidia-smi"
        (tmp_path / "told").write_text(told or "")
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/told\nexit {int(told is None)}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(doctor, "torch_build", lambda: build)
        doctor.listed_gpus.cache_clear()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield machine
    doctor.listed_gpus.cache_clear()


TWO = "NVIDIA L4, 8.9, 550.54, 23034 MiB\nNVIDIA H100 80GB HBM3, 9.0, 550.54, 81559 MiB\n"


def test_gpus_are_those_that_nvidia_smi_names(machine, monkeypatch):
    machine(TWO)
    said = dict(doctor.machine())
    assert said["GPU 1"] == "NVIDIA H100 80GB HBM3, compute capability 9.0, 81559 MiB, driver 550.54"
    for visible, found in ((None, "SM89"), ("1,0", "SM90"), ("", None), ("-1", None), ("7", None), ("GPU-1f", "SM89")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert doctor.usable_gpu() == found, visible
    assert dict(doctor.machine())["CUDA_VISIBLE_DEVICES"] == "GPU-1f"
    machine(TWO, "the processor")
    assert doctor.usable_gpu() is None
    machine(None)
    assert doctor.usable_gpu() is None and dict(doctor.machine())["GPU"] == "none that nvidia-smi lists"


def test_what_torch_was_built_for(monkeypatch, tmp_path):
    torch = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(doctor, "find_spec", lambda name: torch)
    assert doctor.torch_build() == "nothing: its files are missing"
    for line, build in (("cuda: Optional[str] = '13.0'", "CUDA 13.0"), ("cuda: Optional[str] = None", "the processor")):
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = '6'\n")
        assert doctor.torch_build() == build
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.torch_build() == "nothing: its files are missing"


def test_where_results_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    knobs = composed("quantize")
    assert doctor.FOLDERS["cache"] == knobs["cache"]["dir"]
    assert re.fullmatch(r"\d+\.\d GiB free", doctor.free_disk(tmp_path / "outputs/cache"))
    assert doctor.free_disk(Path("/proc/outputs")) == "cannot be written" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["int8", "int8_weight_only", "int4_w4a4", "mxfp4_weight_only", "svdquant_w4a16"])
def test_a_preset_is_run_by_what_a_job_of_it_takes_or_by_tools(preset, monkeypatch):
    tools = "; tools of hand_over=[diffusers_nunchaku_lite, nunchaku] execute it on their GPUs"
    said = [doctor.run_by(own_recipe(name), None) for name in ("svdquant_w4a4", "mxfp4", "int8")]
    assert tools in said[0] and not any("hand_over" in each for each in said[1:])
    mapping = composed("quantize", f"quantize={preset}", "quant_level=3")

    def takes(engine: str, found: str | None) -> bool:
        try:
            job = read(QuantizeJob, mapping | {"infer": mapping["infer"] | {"engine": engine}})
        except ConfigError:
            return False
        used = job.formats()
        return not why_not(engine, used) and not doctor.why_not_here(engine, found, set().union(*used.values()))

    for found in (None, "SM89", "SM90"):
        monkeypatch.setattr(gpu, "current_gpu", lambda found=found: found)
        said = doctor.run_by(own_recipe(preset), found)
        job = read(QuantizeJob, mapping)
        simulated = why_not(job.infer.engine, job.formats())
        assert said.startswith(f"simulated: {simulated}" if simulated else job.infer.engine), found
        able = {name for name in RUNTIMES if takes(name, found)} - {job.infer.engine}
        assert {*re.findall(r"infer=(\w+)", said)} == able, found
