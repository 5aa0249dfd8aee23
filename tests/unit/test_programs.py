"""What ``make programs-check`` makes of what a program says; the programs themselves are no part of these tests."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sd_quant.interchange import TARGETS
from tests.programs import check, rows
from tests.programs.check import PROGRAMS, Case, Program, judged, opened_by, preset_names
from tests.programs.pipelines import PIPELINES
from tests.programs.rows import HERE, Row, is_worse, kept, save

pytestmark = pytest.mark.commit

ROW = Row("a program", "comfyui", "flux", "int8", of=2)
SOUND = {"opened": "a node", "missing": [], "left": [], "quantized": 2, "layers": {"exact": 0.01, "rounded": 1e-7}}
PROGRAM = Program("a_program", {"comfyui": ("flux",)})


@pytest.fixture
def case(tmp_path):
    """A call that is right where inputs are rounded, and 5 % off where they are not."""
    predicted = {"rounded": torch.ones(4), "exact": torch.full((4,), 1.05)}
    save_file({"output": torch.ones(4)}, tmp_path / "output.safetensors")
    return Case(ROW, {"name": "int8", "output": str(tmp_path / "output.safetensors")}, predicted)


@pytest.mark.parametrize("changed, verdict", [
    ({}, "ok"),
    ({"opened": "", "far": "opening: KeyError"}, "FAILED"),
    ({"missing": ["a.weight"]}, "FAILED"),
    ({"left": ["a.weight_scale"]}, "FAILED"),
    ({"quantized": 1}, "FAILED"),  # it takes a layer for one that is not quantized
    ({"layers": {"exact": 2e-5, "rounded": 2e-5}}, "FAILED"),
    ({"layers": {"exact": 1e-7, "rounded": 0.01}}, "FAILED"),  # layers as they are, and a call that is not
    ({"layers": {}, "far": "no kernels without a GPU"}, "loaded"),
    ({"layers": {}, "far": "no kernels without a GPU", "left": ["b"]}, "FAILED"),
    ({"layers": {}}, "FAILED"),
])  # fmt: skip
def test_a_verdict_needs_every_fact_and_an_output(case, changed, verdict):
    assert judged(ROW, SOUND | changed, case, PROGRAM).verdict == verdict
    output = Path(case.request["output"])
    save_file({"output": torch.ones(4), "exact": torch.ones(4)}, output)
    found = judged(ROW, SOUND, case, PROGRAM)  # its unrounded form is off
    assert found.verdict == "FAILED" and found.unrounded == pytest.approx(0.05 / 1.05)
    output.unlink()
    assert judged(ROW, SOUND, case, PROGRAM).verdict == "FAILED"


def test_a_program_without_its_checkout_and_a_script_that_dies_leave_rows_that_say_so(case, monkeypatch, tmp_path):
    monkeypatch.delenv("PROGRAMS", raising=False)
    (row,) = opened_by(replace(PROGRAM, source="Tool"), [case], tmp_path)
    assert row.verdict == "not run" and "set PROGRAMS to a folder that has a checkout Tool" in row.far
    monkeypatch.setattr(rows, "HERE", tmp_path)
    (tmp_path / "a_program.py").write_text("raise SystemExit('no luck')")
    (row,) = opened_by(PROGRAM, [case], tmp_path)
    assert row.verdict == "FAILED" and row.far == "the script ended with 1: no luck"


def test_rows_are_kept_by_program_and_a_worse_one_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RECORD", tmp_path / "programs.tsv")
    others = replace(ROW, program="another", verdict="loaded")
    right = replace(ROW, verdict="ok", layer=1.2345e-7, image=57.31)
    save([others, replace(right, preset="gone"), right])
    save([right])
    found = kept()
    assert set(found) == {others.name, right.name} and found[right.name]["layer"] == "1.2e-07"
    assert found[right.name]["image"] == "57.3"
    assert is_worse(replace(right, verdict="loaded"), found[right.name])
    assert is_worse(replace(ROW, verdict="FAILED"), None)
    assert not is_worse(replace(right, verdict="not run"), found[right.name])
    assert not is_worse(replace(others, verdict="FAILED"), found[others.name] | {"verdict": "FAILED"})


def test_a_version_that_was_never_tried_is_said_and_what_is_worse_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rows, "RECORD", tmp_path / "programs.tsv")
    save([replace(ROW, program="ComfyUI", verdict="ok", versions="ComfyUI 1")])
    for versions, verdict, code in (("ComfyUI 1", "ok", 0), ("ComfyUI 2", "ok", 0), ("ComfyUI 2", "FAILED", 1)):
        found = replace(ROW, program="ComfyUI", verdict=verdict, versions=versions)
        monkeypatch.setattr(check, "rows_of", lambda names, found=found: iter([found]))
        assert check.run(Namespace(names=["ComfyUI"], keep=False)) == code
        printed = capsys.readouterr().out
        assert ("this version was never tried: ComfyUI 2" in printed) == (versions == "ComfyUI 2")
        assert ("WORSE THAN KEPT" in printed) == (code == 1)
    monkeypatch.setattr(check, "rows_of", lambda names: iter([replace(ROW, program="ComfyUI", verdict="not run")]))
    assert check.run(Namespace(names=["ComfyUI"], keep=True)) == 0
    assert [row["verdict"] for row in kept().values()] == ["ok"]  # what was not run replaces nothing
    assert "never tried" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no program ComfyUl, expected ComfyUI, "):
        check.run(Namespace(names=["ComfyUl"], keep=False))


@pytest.mark.consumer
def test_what_is_written_is_opened_by_diffusers():
    """Those of the programs that are installed beside the project; the others need environments of their own."""
    names = [name for name, program in PROGRAMS.items() if program.script == "by_diffusers"]
    assert check.run(Namespace(names=names, keep=False)) == 0


def test_the_table_has_every_preset_of_every_target_that_a_program_opens():
    """Of one family at least; ``--keep`` writes it."""
    found = {(target, preset) for _, target, _, preset in kept()}
    for target, facts in TARGETS.items():
        wanted = preset_names(target) if facts.runtime is None else ["int8"]
        assert {(target, preset) for preset in wanted} <= found
    assert all((HERE / f"{program.script}.py").is_file() for program in PROGRAMS.values())
    drawn = {name for each in PIPELINES.values() for name in each}
    assert {row["program"] for row in kept().values()} == {*PROGRAMS, *drawn}
