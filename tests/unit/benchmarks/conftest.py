import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from sd_quant.places import HOME

BENCHMARKS = HOME / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))


@pytest.fixture
def benchmark(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """A benchmark as a module. They import one another by these names, which are nobody else's afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def peers() -> list[str]:
    """Where ``make soak`` puts packages of other projects, with which this environment would be another."""
    return [str(folder) for name in ("consumers", "peers") if (folder := Path(sys.prefix, name)).is_dir()]


@pytest.fixture
def script(peers) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a benchmark in a process of its own, as documents say; skips where it lacks a package of ``needs``."""

    def run(name: str, *arguments: object, needs: Sequence[str] = ()) -> subprocess.CompletedProcess:
        given = os.environ.get("PYTHONPATH", "")
        path = [str(HOME), *(peers if needs else ()), *filter(None, given.split(os.pathsep))]
        for package in needs:
            if PathFinder.find_spec(package, [*path, *sys.path]) is None:
                pytest.skip(f"{package} is not installed: make soak does that")
        return subprocess.run(
            [sys.executable, f"benchmarks/{name}.py", *map(str, arguments)],
            cwd=HOME, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True,
        )  # fmt: skip

    return run
