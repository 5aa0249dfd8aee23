import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture
def script() -> Callable[..., subprocess.CompletedProcess]:
    """Runs a benchmark in a process of its own, as documents say."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess:
        path = [str(HOME), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return subprocess.run(
            [sys.executable, f"benchmarks/{name}.py", *map(str, arguments)],
            cwd=HOME, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True,
        )  # fmt: skip

    return run
