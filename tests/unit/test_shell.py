import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sd_quant.places import HOME
from sd_quant.shell import literal, pasted, program

from ..pasting import AWKWARD, words_of
from .config.composition import composed

pytestmark = pytest.mark.commit

PARSER = OverridesParser.create()


@pytest.mark.parametrize(
    ("called", "folder", "command", "words"),
    [
        ("quantize.py", HOME, "export_trt", ["python", "export_trt.py"]),
        ("../infer.py", HOME / "docs", "export_trt", ["python", "../export_trt.py"]),
        (f"{HOME}/infer.py", "/", "quantize", ["python", f"{HOME}/quantize.py"]),
        ("quantize.py", HOME, "convert", ["sd-quant", "convert"]),  # which is no script
        ("sd-quant infer", HOME, "export_trt", ["sd-quant", "export_trt"]),
        ("/usr/lib/ipykernel_launcher.py", HOME, "quantize", ["sd-quant", "quantize"]),
        ("quantize.py", "/", "quantize", ["sd-quant", "quantize"]),
        ("", "/", "quantize", ["sd-quant", "quantize"]),
    ],
)
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


def test_a_usual_path_stands_without_quotes():
    for path in ("outputs/quantize/2026-01-01_10-20-30-123", "/home/a_b/c.nemo", "./x", "../y+z"):
        assert literal(path) == path


@pytest.mark.parametrize("called", ["quantize.py", "sd-quant quantize"])
def test_a_pasted_command_is_the_job_that_was_meant(monkeypatch, tmp_path, called):
    """With a name of a folder that shells and Hydra would take apart."""
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.chdir(HOME)
    words = words_of(pasted("hand_over", f"run={literal(AWKWARD)}", "to=[gguf,onnx]"), tmp_path)
    assert words[:2] == (["python", "hand_over.py"] if called == "quantize.py" else ["sd-quant", "hand_over"])
    job = composed("hand_over", *words[2:])
    assert (job["run"], job["to"]) == (AWKWARD, ["gguf", "onnx"])
