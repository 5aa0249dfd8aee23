"""The program ``sd-quant``, where it is more than the command that it calls."""

import os
import shutil
import subprocess
import sys

import pytest

from sd_quant.commands import COMMANDS
from sd_quant.places import HOME

pytestmark = pytest.mark.commit

COMPLETE = """
eval "$($1)"
for line in "${@:2}"; do
    COMP_LINE="$line" COMP_POINT=${#line} words=($line x)
    COMP_CWORD=$(( ${#words[@]} - 2 ))
    [[ "$line" == *" " ]] && COMP_CWORD=$(( COMP_CWORD + 1 ))
    COMPREPLY=()
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
done
"""


@pytest.fixture
def completed(tmp_path):
    """``completed(install, *lines)``: what bash completes each line with, after ``eval "$(install)"``."""
    bash = shutil.which("bash") or pytest.skip("there is no bash")
    for program, first in (("python", ""), ("sd-quant", "-m sd_quant")):
        (tmp_path / program).write_text(f'#!/bin/sh\nexec {sys.executable} {first} "$@"\n')
        (tmp_path / program).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(HOME)}

    def completed(install: str, *lines: str) -> list[set[str]]:
        done = subprocess.run(
            [bash, "-c", COMPLETE, "bash", install, *lines], cwd=HOME, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [set(line.split()) for line in done.stdout.splitlines()]

    return completed


@pytest.mark.slow
@pytest.mark.parametrize("program", ["python quantize.py", "sd-quant quantize"])
def test_bash_completes_knobs_and_presets(completed, program):
    lines = (f"{program} {last}" for last in ("quant_l", "quant_level=3 infer.st", "model=sd3_"))
    found = completed(f"{program} --shell-completion install=bash", *lines)
    assert found == [{"quant_level="}, {"infer.steps=", "infer.strength="}, {"model=sd3_mini", "model=sd3_no_t5"}]


@pytest.mark.slow
def test_bash_completes_commands_and_leaves_those_alone_that_hydra_does_not_configure(completed):
    every, exports, none = completed(
        "sd-quant quantize -sc install=bash", "sd-quant ", "sd-quant expo", "sd-quant convert no-such"
    )
    assert every == {*COMMANDS} and exports == {"export_trt"} and none == set()
