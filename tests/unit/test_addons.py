"""Add-ons that are missing, of another interface, or fail: one sentence, and what the run has written stays."""

import sys

import pytest

from sd_quant import addons
from sd_quant.__main__ import main
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.report.rebuild import rebuild

from .report.sweeps import write_job, write_plan

pytestmark = pytest.mark.commit


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(code, interface)``: an add-on ``votes`` of this code in front of the one that may be installed."""

    def install(code: str, interface: int = addons.INTERFACE) -> None:
        folder = tmp_path / "site"
        metadata = folder / "sd_quant_votes-9.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sd-quant-votes\nVersion: 9.0\n")
        (metadata / "entry_points.txt").write_text(
            f"[sd_quant.votes.{interface}]\ncommand = its_votes:main\npage = its_votes:page\n"
        )
        (folder / "its_votes.py").write_text(code)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "its_votes", raising=False)

    return install


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with one finished job, without plots, which take most of the time."""
    monkeypatch.setattr("sd_quant.report.rebuild.figures", lambda sweep, advice: {})
    write_job(tmp_path / "run" / "int8")
    write_plan(tmp_path / "run", {"int8": {"quantize": "int8"}})
    return tmp_path / "run"


def contents(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def call(monkeypatch, capsys, *words) -> tuple[int, str]:
    """The exit code and what the command ``sd-quant votes`` writes to stderr."""
    monkeypatch.setattr(sys, "argv", ["sd-quant", "votes", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def test_one_that_is_not_installed_says_how_to_install_it(monkeypatch, capsys, run):
    monkeypatch.setattr(addons, "entry_points", lambda **_: ())
    code, said = call(monkeypatch, capsys, run, "a.json")
    assert code == ResourceError.exit_code
    assert said == (
        "error: sd-quant votes needs the add-on votes, which is not installed; install it with: "
        "pip install 'sd-quant[votes]'\n"
    )
    assert "votes.html" not in rebuild(run).read_text()


def test_one_of_another_interface_is_refused_before_its_code_runs(installed, monkeypatch, capsys, run, caplog):
    installed("raise SystemExit('its code runs')", interface=addons.INTERFACE + 1)
    code, said = call(monkeypatch, capsys, run, "a.json")
    assert code == ResourceError.exit_code and said.count("\n") == 1
    assert "the add-on votes 9.0 with interface 1, found interface 2; install" in said
    assert "votes.html" not in rebuild(run).read_text() and "found interface 2" in caplog.text


def test_one_that_cannot_be_imported_is_one_sentence(installed, monkeypatch, capsys):
    installed("from sd_quant.gone import anything")
    code, said = call(monkeypatch, capsys)
    assert code == ResourceError.exit_code and said.count("\n") == 1
    assert "the add-on votes 9.0 cannot be imported (ModuleNotFoundError: No module named 'sd_quant.gone')" in said


def test_one_that_fails_while_it_reads_a_folder_harms_nothing(installed, monkeypatch, capsys, run, caplog):
    installed("def page(sweep):\n    raise KeyError('prompts')\ndef main():\n    [].pop()\n")
    before = contents(run)
    code, said = call(monkeypatch, capsys, run, "a.json")
    assert (code, said.count("\n")) == (SdQuantError.exit_code, 1)
    assert "the add-on votes failed (IndexError: pop from empty list), which changes nothing of the run" in said
    assert contents(run) == before

    report = rebuild(run)
    assert "votes.html" not in report.read_text() and not (run / "votes.html").exists()
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith("there is no votes.html: the add-on votes failed (KeyError: 'prompts'), which changes")
    assert before.items() <= contents(run).items()


def test_the_disk_that_is_full_is_the_machines_fault(installed, monkeypatch, capsys):
    installed("def main():\n    raise OSError(28, 'No space left on device')\n")
    assert call(monkeypatch, capsys) == (4, "error: the disk is full; free some space and rerun\n")
