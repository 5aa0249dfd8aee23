"""The real commands, and two runs that most tests of their results share: of the main job, and of a tiny pipeline.

A command of most tests is a fork of a process that has imported everything (``command``). What only a new interpreter
shows is tested with one: that a whole job runs, what is imported, signals, launchers (``process``, ``start``).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from sd_quant.places import HOME

from ..zoo.families import sd15_of_one_level
from .browsing import chromium
from .forking import forked
from .shared import PROMPTS, QUICK, SAMPLING, link_cache, prompts_knob, well, without_times
from .sweeping import Launcher, Sweep, killed

LEVEL_3 = ("quant_level=3", "alpha=0.8", "quantize.snapshots=[1]")  # of the tiny pipeline's run
WATCHED = Path(__file__).with_name("watched")
Command = Callable[..., subprocess.CompletedProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the two files that make what others share, one by each worker, else one would wait for the other's; then
    the longest of `make soak`."""
    names = ("main_job", "recipes", "families", "installed", "faults", "launchers", "deployed")
    first = [f"test_{name}.py" for name in names]
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The one that ships with the project."""
    return HOME / "checkpoints/sdxl_mini.nemo"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def own_interpreter(script: str, arguments: Iterable, environment: dict[str, str]) -> dict:
    """Keyword arguments of ``subprocess`` to run a script of the repository."""
    own = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    return {"args": [sys.executable, script, *map(str, arguments)], "cwd": HOME, "env": own, "text": True}


@pytest.fixture(scope="session")
def process() -> Command:
    """``process(script, *arguments, **environment)`` runs it to its end in an interpreter of its own."""
    return lambda script, *arguments, **environment: subprocess.run(
        **own_interpreter(script, arguments, environment), capture_output=True, timeout=3600
    )


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a script in a process group of its own; the whole group is killed when the test ends."""
    pipes, started = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, []

    def begin(script: str, *arguments: str | Path, **environment: str) -> subprocess.Popen:
        given = own_interpreter(script, arguments, environment)
        started.append(subprocess.Popen(**given, **pipes, start_new_session=True))
        return started[-1]

    yield begin
    for each in started:
        killed(each)


@pytest.fixture(scope="session")
def working_folder(tmp_path_factory) -> Path:
    """Where ``command`` runs what it is given: no other process runs anything there."""
    return tmp_path_factory.mktemp("working_folder")


@pytest.fixture(scope="session")
def command(working_folder) -> Iterator[Command]:
    """Runs a script to its end by a process that has imported everything; says also the most ``memory`` that it had."""
    with forked(working_folder) as run:
        yield run


@pytest.fixture(scope="session")
def done(command) -> Command:
    """Runs a script, which ends well."""
    return lambda *words: well(command(*words))


@pytest.fixture(scope="session")
def refused(command) -> Callable[..., str]:
    """``refused(*words, code=2)``: the one sentence with which a script refuses, its last line, without a traceback."""

    def end(*words: str | Path, code: int = 2) -> str:
        ended = command(*words)
        lines = ended.stderr.splitlines()
        assert ended.returncode == code and "Traceback" not in ended.stdout + ended.stderr, ended.stderr[-3000:]
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], ended.stderr[-3000:]
        return lines[-1].removeprefix("error: ")

    return end


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """``made_once(name, make)``: the folder that ``make(folder)`` fills, once for all processes that run the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def provide(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return provide


@dataclass(frozen=True)
class MainJob:
    directory: Path
    cache: Path
    stdout: str


@pytest.fixture(scope="session")
def main_job(process, checkpoint, made_once) -> MainJob:
    """``quantize.py quant_level=3 alpha=0.8`` in an interpreter of its own, with fewer prompts, steps and repeats."""

    def make(folder: Path) -> None:
        result = process(
            "quantize.py", "quant_level=3", "alpha=0.8", "calib_size=4", "quantize.n_steps=5",
            f"model.path={checkpoint}", f"cache.dir={folder}/cache", "hand_over=[diffusers_modelopt]",
            prompts_knob(PROMPTS), f"hydra.run.dir={folder}/run", *SAMPLING, "timing.budget_s=0",
            "trt.optimization_level=0", PYTHONPATH=str(WATCHED), WATCHED=str(folder / "watched"),
        )  # fmt: skip
        (folder / "stdout").write_text(well(result).stdout)

    folder = made_once("main_job", make)
    return MainJob(folder / "run", folder / "cache", (folder / "stdout").read_text())


@dataclass(frozen=True)
class Tiny:
    """The smallest pipeline: what every command on it is told, a run at level 3, and the cache of that run."""

    folder: Path
    knobs: tuple[str, ...]
    run: Path
    cache: Path


@pytest.fixture(scope="session")
def tiny(done, made_once) -> Tiny:
    """A job of it takes a third of one of the shipped checkpoint, and a sixth where its graphs are in the cache."""

    def knobs(folder: Path) -> tuple[str, ...]:
        return ("model=sd15", f"model.path={folder}/model", "model.width=64", "model.height=64", *QUICK)

    def make(folder: Path) -> None:
        sd15_of_one_level(folder / "model")
        done("quantize.py", *knobs(folder), *LEVEL_3, f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/run")

    folder = made_once("tiny", make)
    return Tiny(folder / "model", knobs(folder), folder / "run", folder / "cache")


@pytest.fixture(scope="session")
def with_graphs(tiny) -> Callable[[Path], Path]:
    """``with_graphs(cache)``: a new cache that has the tiny pipeline's graphs, which depend on no knob of a recipe."""
    return lambda cache: link_cache(tiny.cache / "graph", cache / "graph").parent


@pytest.fixture(scope="session")
def job(done, tiny, tmp_path_factory) -> Callable[..., Path]:
    """``job(*knobs)``: the folder of a job that ends well, with the cache of the tiny pipeline's run."""

    def end(*knobs: str, name: str = "run") -> Path:
        run = tmp_path_factory.mktemp("job") / name
        done("quantize.py", *tiny.knobs, f"cache.dir={tiny.cache}", *knobs, f"hydra.run.dir={run}")
        return run

    return end


@pytest.fixture(scope="session")
def sweep_arguments(tiny) -> Callable[..., list[str]]:
    """``sweep_arguments(folder)``: a command for three jobs in ``folder/sweep``, with their cache beside it."""

    def arguments(folder: Path, *more: str) -> list[str]:
        where = f"cache.dir={folder}/cache", f"hydra.sweep.dir={folder}/sweep"
        return ["quantize.py", "-m", *tiny.knobs, "quant_level=1,2,3", *where, *more]

    return arguments


@pytest.fixture(scope="session")
def unbroken_sweep(done, sweep_arguments, with_graphs, made_once) -> Path:
    """The folder of that command, undisturbed; ``table.csv`` and ``kept`` are the sweep's as it was then."""

    def make(folder: Path) -> None:
        with_graphs(folder / "cache")
        (folder / "stdout").write_text(done(*sweep_arguments(folder)).stdout)
        shutil.copy(folder / "sweep/summary.csv", folder / "table.csv")
        shutil.copytree(folder / "sweep", folder / "kept")

    return made_once("unbroken", make)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    """None; a file that tests one has its own."""
    return Launcher()


@pytest.fixture
def sweep(launcher, start, sweep_arguments, unbroken_sweep, tmp_path) -> Sweep:
    """A sweep of two jobs in the test's folder; its cache has what the undisturbed sweep left."""
    link_cache(unbroken_sweep / "cache", tmp_path / "cache")
    two = partial(sweep_arguments, tmp_path, "quant_level=1,2")
    return Sweep(tmp_path / "sweep", launcher, start, two, without_times(unbroken_sweep / "table.csv")[:2])
