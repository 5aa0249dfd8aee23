"""Add-ons that are missing, of another interface, or fail: one sentence, and what the run has written stays."""

import re
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from sd_quant import addons
from sd_quant.__main__ import main
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.report.rebuild import rebuild
from sd_quant.stages import job_folder, results
from tests.presets import job
from tests.text_scores import metrics_of

from .report.sweeps import write_job, write_plan

pytestmark = pytest.mark.commit

NAMES = {"votes": {"command": "main", "page": "page"}, "scores": {"ocr": "OCR", "hps": "HPS", "mlperf": "verdict"}}
ROWS = """from sd_quant.metrics import Against, Score
OCR = Score("ocr", "text read", Against.PROMPTS, "its_code:ocr")
HPS = Score("hps", "HPSv2", Against.PROMPTS, "its_code:hps")
hps = lambda images, prompts, weights: {"value": 1.0, "reason": None}
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(code, interface)``: an add-on of this code in front of the one that may be installed."""

    def install(code: str, interface: int = addons.INTERFACE, addon: str = "votes") -> None:
        folder = tmp_path / "site"
        metadata = folder / f"sd_quant_{addon}-9.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sd-quant-{addon}\nVersion: 9.0\n")
        names = "".join(f"{name} = its_code:{what}\n" for name, what in NAMES[addon].items())
        (metadata / "entry_points.txt").write_text(f"[sd_quant.{addon}.{interface}]\n{names}")
        (folder / "its_code").mkdir()
        (folder / "its_code/__init__.py").write_text(code)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "its_code", raising=False)

    return install


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with one finished job, without plots, which take most of the time."""
    monkeypatch.setattr("sd_quant.report.rebuild.figures", lambda sweep, advice: {})
    write_job(tmp_path / "run" / "int8")
    write_plan(tmp_path / "run", {"int8": {"quantize": "int8"}})
    return tmp_path / "run"


def call(monkeypatch, capsys, *words) -> tuple[int, str]:
    """The exit code and what the command ``sd-quant votes`` writes to stderr."""
    monkeypatch.setattr(sys, "argv", ["sd-quant", "votes", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


@pytest.fixture(params=[
    (None, "", r"which is not installed; install it with: pip install 'sd-quant\[{}\]'$"),
    (7, "raise SystemExit('its code runs')", "with interface 1, found interface 7; install"),
    (1, "from sd_quant.gone import anything", r"imported \(ModuleNotFoundError: No module named 'sd_quant.gone'\);"),
])  # fmt: skip
def lacking(request, installed, monkeypatch):
    """``lacking(addon)``: what is said of one of this interface and code, or of none, that lacks something."""
    interface, code, said = request.param

    def make(addon: str) -> str:
        if interface is None:
            monkeypatch.setattr(addons, "entry_points", lambda **_: ())
        else:
            installed(code, interface, addon)
        return rf"the add-on {addon}.* {said.format(addon)}"

    return make


def test_a_command_without_its_add_on_is_one_sentence_and_the_report_is_without_its_page(
    lacking, monkeypatch, capsys, run, caplog
):
    expected = lacking("votes")
    code, said = call(monkeypatch, capsys, run, "a.json")
    assert code == ResourceError.exit_code and said.startswith("error: ") and said.count("\n") == 1
    assert re.search(expected, said.rstrip())
    assert "votes.html" not in rebuild(run).read_text()
    assert "which is not installed" in said or re.search(expected, caplog.text)


def test_one_that_fails_while_it_reads_a_folder_harms_nothing(installed, monkeypatch, capsys, run, caplog):
    installed("def page(sweep):\n    raise KeyError('prompts')\ndef main():\n    [].pop()\n")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, said = call(monkeypatch, capsys, run, "a.json")
    assert (code, said.count("\n")) == (SdQuantError.exit_code, 1)
    assert "the add-on votes failed (IndexError: pop from empty list), which changes nothing of the run" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    report = rebuild(run)
    assert "votes.html" not in report.read_text() and not (run / "votes.html").exists()
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith("there is no votes.html: the add-on votes failed (KeyError: 'prompts'), which changes")
    assert all(path.read_bytes() == content for path, content in before.items())

    (run.parent / "site/its_code/__init__.py").write_text("def main():\n    raise OSError(28, 'No space left')\n")
    sys.modules.pop("its_code")
    assert call(monkeypatch, capsys) == (4, "error: the disk is full; free some space and rerun\n"), (
        "the machine's fault"
    )


def test_a_score_without_its_add_on_is_refused_before_anything_is_computed(lacking):
    expected = lacking("scores")
    metrics_of(clip_weights=None).check_files()
    with pytest.raises(ResourceError, match=expected):
        metrics_of(ocr=True).check_files()


def test_one_that_fails_at_a_score_is_the_reason_of_that_score(installed, monkeypatch, tmp_path):
    installed(ROWS + "def ocr(images, prompts): prompts[9]\ndef verdict(entries, made): made['steps']", addon="scores")
    monkeypatch.setattr(results, "how_made", lambda *_: {})
    metrics = metrics_of(ocr=True, hps_weights=str(tmp_path))
    variants = dict.fromkeys(("full_precision", "quantized"), np.zeros((1, 64, 64, 3), np.uint8))
    found = results.text_scores(metrics, None, None, ["a"], variants)["quantized"]
    reason = "the add-on scores failed ({}), which changes nothing of the run; report it to its authors"
    assert found["ocr"] == {"value": None, "reason": reason.format("IndexError: list index out of range")}
    assert found["mlperf"] == {"passes": None, "reason": reason.format("KeyError: 'steps'")}
    assert found["hps"]["value"] == 1.0 and found["fid"]["reason"] == "metrics does not ask for it"


def test_a_run_that_uses_no_score_imports_none(run, monkeypatch):
    used, load = [], EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda point: used.append(point.group) or load(point))
    metrics_of().check_files()
    results.text_scores(metrics_of(), None, None, ["a"], {"quantized": np.zeros((1, 64, 64, 3), np.uint8)})
    rebuild(run)
    assert not [group for group in used if "scores" in group]


def test_the_code_of_an_add_on_decides_a_record_that_has_its_scores(installed, tmp_path):
    installed(ROWS, addon="scores")
    facts, plain, asking = {"inputs": {}, "versions": {}}, job(), job("metrics.ocr=true")
    before = [job_folder.fingerprint_of(each, facts) for each in (plain, asking)]
    (tmp_path / "site/its_code/__init__.py").write_text(ROWS + "# another version\n")
    after = [job_folder.fingerprint_of(each, facts) for each in (plain, asking)]
    assert before[0] == after[0] and before[1] != after[1]
