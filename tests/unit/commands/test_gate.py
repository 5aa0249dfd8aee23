"""The command of the gate: its knobs, its refusals and its exit codes."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from sd_quant.commands import gate
from sd_quant.errors import ConfigError
from sd_quant.knobs import fields_of
from sd_quant.metrics import SCORES, Against
from sd_quant.places import HOME

from ..report.sweeps import record_of

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(("words", "said"), [
    ("", "the knob run is missing"),
    ("run=x", "no criterion is given"),
    ("run=x min_psnr", "the argument min_psnr has no value"),
    ("run=x min_psrn=3", "did you mean min_psnr"),
    ("run=x min_psnr=abc", "min_psnr is 'abc', expected a number"),
    ("run=x min_psnr=nan", "expected a finite number"),
    ("run=x max_lpips=-1", "expected from 0 to 100000"),
    ("run=x worst_share=1e-300", "worst_share is 1e-300, expected from 0.0001 to 0.9999"),
    ("run=x confidence=0.9999999999999999", "expected a number from 0.5 to 0.9999"),
    ("run=x min_psnr=1 output=gate.JSON confidence=2", "confidence is 2.0, expected a number from 0.5"),
    ("run=x psnr_margin=1", "baseline is null, expected a folder"),
    ("run=x baseline=y min_psnr=1", "expected null, because none of psnr_margin"),
    ("run=x min_psnr=1 output=gate.txt", "ends with .json"),
])  # fmt: skip
def test_what_no_gate_can_be_made_of_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        gate.job_of(words.split())


def test_every_score_of_images_has_its_bars():
    keys = [key for key, score in SCORES.items() if score.against is Against.IMAGES]
    job = gate.job_of(["run=a=b", *(f"worst_{key}=1" for key in keys), "baseline=c", *(f"{k}_margin=0" for k in keys)])
    assert job.run == "a=b" and len(job.bars()) == 2 * len(keys)
    assert gate.job_of(["run=a", "min_psnr=1e1", "min_ssim=0", "max_lpips=1", "worst_psnr=null"]).min_psnr == 10.0


def test_the_page_names_every_knob_and_its_commands_are_gates():
    page = (HOME / "docs/gate.md").read_text(encoding="utf-8")
    assert fields_of(gate.GateJob).keys() <= {*re.findall(r"\w+", page)}
    given = re.findall(r"sd-quant gate (.*)", page)
    assert len(given) == 4 and all(gate.job_of(shlex.split(line.replace("<folder>", "x"))) for line in given)


def write_record(folder, count: int) -> None:
    """Of as many prompts, whose images have 37 dB, give or take 1.5."""
    record = record_of(37.0, 1.3, 0.6, [f"prompt {index}" for index in range(count)]) | {"degenerate": []}
    record["fidelity"]["psnr"]["values"] = [37 + 1.5 * (-1) ** index for index in range(count)]
    (folder / "metrics.json").write_text(json.dumps(record))


@pytest.mark.parametrize(("bar", "count", "code"), [(36, 64, 0), (38, 64, 1), (36, 4, 5)])
def test_the_exit_code_is_the_outcome(bar, count, code, tmp_path, monkeypatch, capsys):
    write_record(tmp_path, count)
    monkeypatch.setattr(sys, "argv", ["gate", f"run={tmp_path}", f"min_psnr={bar}", f"output={tmp_path}/gate.json"])
    for _ in range(2):  # it replaces its own
        with pytest.raises(SystemExit) as ended:
            gate.main()
    assert ended.value.code == code == json.loads((tmp_path / "gate.json").read_text())["exit_code"]
    assert "min_psnr" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["metrics.json", "folder.json", "/proc/o.json", f"{300 * 'x'}.json", "users.json"])
def test_verdicts_replace_verdicts_alone(output, tmp_path, monkeypatch):
    write_record(tmp_path, 64)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "users.json").write_text('{"mine": 1}')

    def files() -> dict:  # without the time of reading
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}

    before = files()
    monkeypatch.setattr(sys, "argv", ["gate", f"run={tmp_path}", "min_psnr=36", f"output={tmp_path / output}"])
    said = "verdicts of a gate .*(would replace|cannot be written).*(change|set) output"
    with pytest.raises(ConfigError, match=said):
        gate.main()
    assert before == files()


def test_the_program_exits_with_it_too(tmp_path):
    write_record(tmp_path, 4)
    command = [sys.executable, "-c", "import sys; from sd_quant.__main__ import main; main(); assert 0", "gate"]
    done = subprocess.run([*command, f"run={tmp_path}", "min_psnr=36"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (5, "") and "cannot be told: min_psnr; about" in done.stdout
