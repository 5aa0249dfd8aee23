"""Rows are measured once each: a broken run goes on, what the kernel killed is a result, another failure is not."""

import json
import subprocess
import sys

import pytest

from sd_quant.places import HOME

pytestmark = pytest.mark.commit

SCRIPT = """
import argparse, os, signal
from measurer import Rows, add_row, serve
from pathlib import Path

def work(options, name, number):
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fails" and not Path("mended").exists():
        raise RuntimeError("so it is")
    return {"number": int(number), "process": os.getpid()}

parser = argparse.ArgumentParser()
parser.add_argument("--subject", default="this")
add_row(parser)
options = parser.parse_args()
if options.row:
    serve({"work": work}, options)
else:
    rows = Rows(Path("."), {"of": options.subject})
    for name in ("works", "killed", "fails"):
        rows.measure(f"work:{name}:3", note=name)
"""


@pytest.mark.slow
def test_a_row_that_has_its_figures_is_not_measured_again(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*arguments: str) -> tuple[str, dict]:
        ended = subprocess.run([sys.executable, "script.py", *arguments], cwd=tmp_path, capture_output=True, text=True,
                               env={"PYTHONPATH": f"{HOME}:{HOME / 'benchmarks'}"})  # fmt: skip
        return ended.stderr, json.loads((tmp_path / "rows.json").read_text())

    _, first = run()
    works, killed, fails = (first[f"work:{name}:3"] for name in ("works", "killed", "fails"))
    assert works["number"] == 3 and works["note"] == "works" and works["peak_memory_bytes"] > works["seconds"] > 0
    assert killed["failed"] == "killed" and fails["failed"] == "RuntimeError: so it is"
    (tmp_path / "mended").touch()
    said, second = run()
    mended = second["work:fails:3"]
    assert not said and mended["number"] == 3 and second == first | {"work:fails:3": mended}
    assert "rows.json has figures of another subject; delete it" in run("--subject", "another")[0]
