"""Commands as a shell takes them: which program, values that stay what they are, and what bash completes."""

import os
import shutil
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sd_quant.commands import COMMANDS
from sd_quant.places import HOME
from sd_quant.shell import literal, pasted, program

from ..pasting import AWKWARD, words_of
from .config.composition import composed

pytestmark = pytest.mark.commit

PARSER = OverridesParser.create()


@pytest.mark.parametrize(("called", "folder", "command", "words"), [
    ("quantize.py", HOME, "export_trt", ["python", "export_trt.py"]),
    ("../infer.py", HOME / "docs", "export_trt", ["python", "../export_trt.py"]),
    (f"{HOME}/infer.py", "/", "quantize", ["python", f"{HOME}/quantize.py"]),
    ("quantize.py", HOME, "convert", ["sd-quant", "convert"]),  # which is no script
    ("sd-quant infer", HOME, "export_trt", ["sd-quant", "export_trt"]),
    ("/usr/lib/ipykernel_launcher.py", HOME, "quantize", ["sd-quant", "quantize"]),
    ("quantize.py", "/", "quantize", ["sd-quant", "quantize"]), ("", "/", "quantize", ["sd-quant", "quantize"]),
])  # fmt: skip
def test_the_program_is_the_one_that_was_called(monkeypatch, called, folder, command, words):
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.chdir(folder)
    assert program(command) == words


@given(st.text(st.sampled_from("\\${}'\" a[],=:.1/-~#\n") | st.sampled_from("nulltrue"), max_size=8))
def test_a_value_is_read_as_it_is(text):
    value = PARSER.parse_override(f"x={literal(text)}").value()
    assert OmegaConf.create({"x": value}).x == text


@pytest.mark.parametrize("text", ["null", "True", "3", "1e5", "inf", ".5", "2026-01-01", "${x}", r"a\${x}\\"])
def test_a_value_that_looks_like_another_is_a_text(text):
    assert OmegaConf.create({"x": PARSER.parse_override(f"x={literal(text)}").value()}).x == text
    for path in ("outputs/quantize/2026-01-01_10-20-30-123", "/home/a_b/c.nemo", "./x", "../y+z"):
        assert literal(path) == path, "a usual path stands without quotes"


@pytest.mark.parametrize("called", ["quantize.py", "sd-quant quantize"])
def test_a_pasted_command_is_the_job_that_was_meant(monkeypatch, tmp_path, called):
    """With a name of a folder that shells and Hydra would take apart."""
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.chdir(HOME)
    words = words_of(pasted("hand_over", f"run={literal(AWKWARD)}", "to=[gguf,onnx]"), tmp_path)
    assert words[:2] == (["python", "hand_over.py"] if called == "quantize.py" else ["sd-quant", "hand_over"])
    job = composed("hand_over", *words[2:])
    assert (job["run"], job["to"]) == (AWKWARD, ["gguf", "onnx"])


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
KNOBS = {
    "quant_l": {"quant_level="}, "quant_level=3 infer.st": {"infer.steps=", "infer.strength="},
    "model=sd3_": {"model=sd3_mini", "model=sd3_no_t5"},
}  # fmt: skip
OF_THE_PROGRAM = {"sd-quant ": {*COMMANDS}, "sd-quant expo": {"export_trt"}, "sd-quant convert no-such": set()}


@pytest.mark.slow
@pytest.mark.parametrize(("install", "expected"), [
    ("python quantize.py -sc install=bash", {f"python quantize.py {line}": KNOBS[line] for line in KNOBS}),
    ("sd-quant quantize --shell-completion install=bash", {f"sd-quant quantize {line}": KNOBS[line] for line in KNOBS}),
    ("sd-quant quantize -sc install=bash", OF_THE_PROGRAM),
])  # fmt: skip
def test_bash_completes_commands_knobs_and_presets_and_leaves_what_hydra_does_not_configure(
    tmp_path, install, expected
):
    bash = shutil.which("bash") or pytest.skip("there is no bash")
    for program_name, first in (("python", ""), ("sd-quant", "-m sd_quant")):
        (tmp_path / program_name).write_text(f'#!/bin/sh\nexec {sys.executable} {first} "$@"\n')
        (tmp_path / program_name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(HOME)}
    command = [bash, "-c", COMPLETE, "bash", install, *expected]
    done = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(expected.values())
