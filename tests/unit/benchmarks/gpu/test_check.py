"""``make gpu-check`` rehearsed without a GPU by an interpreter that sees what a bare machine has, and its bundle."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from benchmarks.gpu import bundle
from sd_quant.places import HOME

pytestmark = [pytest.mark.commit, pytest.mark.slow]
BARE = ("torch", "triton", "numpy", "safetensors", "transformers")


def link(names: Iterable[str], site: Path, required: bool = True) -> None:
    """Link the files of installed packages, and of those that they require, into an empty folder of packages."""
    site.mkdir(parents=True, exist_ok=True)
    todo, seen = list(names), set()
    while todo:
        name = todo.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # one that only other platforms need
            continue
        if found.name in seen:
            continue
        seen.add(found.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        needs = [Requirement(line) for line in found.requires or ()] if required else []
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The interpreter of an environment with exactly BARE and what these require."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    link(BARE, site)
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory) -> Path:
    """What a bundle's wheels hold, from the packages that are installed here, and what stands in for Pillow."""
    folder = tmp_path_factory.mktemp("bundled")
    link((name.partition("==")[0] for name in bundle.wanted_wheels()), folder, required=False)
    for name, text in bundle.STAND_IN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def check(bare, bundled, tmp_path, small_config):
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(small_config))

    def run(*arguments: str, packages: bool = True) -> subprocess.CompletedProcess:
        paths = [str(HOME), *([str(bundled)] if packages else [])]
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
        command = [bare, "-m", "benchmarks.gpu.check", "--bundle", tmp_path / "no bundle", *arguments]
        return subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, timeout=900)

    return run


SMALL = ("--size", "64", "--steps", "2", "--picture-steps", "2", "--repeats", "5", "--no-compile", "--least", "15")


@pytest.mark.release
def test_on_a_bare_machine_the_table_is_made_whatever_becomes_of_a_row(check, tmp_path):
    rows = ("a row*", "fp16 compiled at *", "fp8 level 3 at batch 1", "int8 level 3 at batch ?", "pictures*batch 1",
            "flux fp8 level 3 at *")  # fmt: skip
    result = check("--on-cpu", "--rehearse", "--model", str(tmp_path / "model.yaml"), *SMALL, "--rows", *rows)
    assert result.returncode == 1, result.stderr[-3000:]  # two rows have not ended well
    said = result.stdout.splitlines()
    assert said[0].startswith("no bundle at") and "modelopt is not installed; it is for tests of the simulation" in said
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"environment.json", "table.json", "table.md", "tests.txt"}
    table = json.loads((out / "table.json").read_text())
    ended = {row["name"]: row["ended"] for row in table["rows"]}
    assert ended == {
        "fp16 compiled at batch 1": "done", "a row that crashes": "crashed", "a row that hangs": "late",
        "fp8 level 3 at batch 1": "done", "int8 level 3 at batch 1": "done",
        "pictures by fp8 level 3 at batch 1": "done", "flux fp8 level 3 at batch 1": "done",
        "int8 level 3 at batch 4": "done", "int8 level 3 at batch 2": "done",
    }  # fmt: skip
    assert not any(row.get("doubts") for row in table["rows"])
    assert "failed" not in (out / "tests.txt").read_text() and "error" not in (out / "tests.txt").read_text().lower()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed_and_what_everything_needs_is_named_where_it_is_missing(check, tmp_path):
    result = check(packages=False)
    assert result.returncode == 4 and "diffusers is not installed; it is for everything" in result.stdout
    result = check()
    assert result.returncode == 0 and result.stdout.splitlines()[-1].startswith("there is no NVIDIA GPU")
    assert not (tmp_path / "out").exists()


def test_a_wheel_is_unpacked_with_its_hash_alone_and_by_a_python_that_is_new_enough(tmp_path, monkeypatch):
    """The list of wheels names each with its hash; Pillow has a stand-in."""
    wheel = tmp_path / "bundle" / "wheels" / "some-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/__init__.py", "answer = 42\n")
    monkeypatch.setattr(bundle, "WHEELS", tmp_path / "wheels.txt")
    bundle.WHEELS.write_text(f"some==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    front, end = bundle.unpack(tmp_path / "bundle", tmp_path / "unpacked")
    assert (front / "some" / "__init__.py").read_text() == "answer = 42\n"
    assert (end / "PIL" / "Image.py").is_file() and not (front / "PIL").exists()
    with pytest.raises(ValueError, match="this is Python 3.10, expected 3.11"):
        bundle.unpack(tmp_path / "bundle", tmp_path / "other", (3, 10))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="some-1.0-py3-none-any.whl is not in wheels.txt; make the bundle again"):
        bundle.unpack(tmp_path / "bundle", tmp_path / "other")
    assert not (tmp_path / "other" / "wheels").exists()


def test_the_wheels_are_of_the_versions_that_the_project_installs():
    lines = [line.split("==") for line in (HOME / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {name.lower().replace("_", "-"): version for name, version in lines}
    wanted = dict(name.split("==") for name in bundle.wanted_wheels())
    assert wanted == {name: pinned[name] for name in wanted} and "diffusers" in wanted
