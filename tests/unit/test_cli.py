import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from sd_quant import cli, sweep
from sd_quant.cli import recording_failure
from sd_quant.config import QuantizeJob
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, SdQuantError
from sd_quant.files import write_json
from sd_quant.places import CONF
from sd_quant.report.summary import FAILURE, SWEEP

pytestmark = pytest.mark.commit


@pytest.fixture
def hydra(monkeypatch, tmp_path):
    """Pretends that the second job of a sweep, or a single run, runs in ``tmp_path / "two"``."""
    monkeypatch.chdir(tmp_path)  # and back, as a job works where the command was given
    (tmp_path / "two").mkdir()
    jobs = [{"name": name, "varied": {}} for name in ("one", "two")]
    write_json(tmp_path / SWEEP, {"command": [], "varied": [], "jobs": jobs})

    def pretend(mode: RunMode) -> Path:
        runtime = SimpleNamespace(output_dir=str(tmp_path / "two"), cwd=str(tmp_path))
        job = SimpleNamespace(num=1)
        monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=mode, runtime=runtime, job=job))
        return tmp_path / "two" / FAILURE

    return pretend


@recording_failure
def failing(config: tuple[Exception, Path | None]) -> None:
    """A command's task that removes a folder, if there is one, and ends with the error."""
    error, folder = config
    if folder is not None:
        shutil.rmtree(folder)
    raise error


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("mode", [RunMode.RUN, RunMode.MULTIRUN])
def test_a_folder_that_vanishes_with_its_job_is_a_sentence_and_stays_away(hydra, capsys, tmp_path, mode):
    hydra(mode)
    with pytest.raises(SystemExit if mode is RunMode.RUN else SdQuantError) as left:
        failing((FileNotFoundError("two"), tmp_path / "two"))
    said = capsys.readouterr().err if mode is RunMode.RUN else str(left.value)
    assert "two was removed while a job was running, so files of it are missing" in said
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(("error", "kind", "words"), [
    *((kind("it is broken"), kind, "it is broken") for kind in (ArtifactError, ConfigError, SdQuantError)),
    (MemoryError(), ResourceError, "out of memory"), (FULL, ResourceError, "the disk is full"),
])  # fmt: skip
def test_a_refusal_of_a_single_run_is_recorded_and_logged(hydra, capsys, caplog, monkeypatch, error, kind, words):
    """A crash passes and leaves its reason. Where the disk is full, its own record finds no room either."""
    failure = hydra(RunMode.RUN)
    with pytest.raises(ZeroDivisionError):
        recording_failure(lambda config: 1 / config)(0)
    assert json.loads(failure.read_text())["reason"] == "it crashed: ZeroDivisionError('division by zero')"
    caplog.clear()
    with pytest.raises(SystemExit) as left, caplog.at_level(logging.ERROR):
        failing((error, None))
    [said] = caplog.messages
    assert said.startswith(words) and capsys.readouterr().err == f"error: {said}\n"
    assert left.value.code == {SdQuantError: 1, ConfigError: 2, ArtifactError: 3, ResourceError: 4}[kind]
    assert json.loads(failure.read_text()) == {"status": "failed", "reason": said, "exit_code": left.value.code}
    assert not any(record.exc_info for record in caplog.records)

    def full(*_):
        raise ResourceError("the disk is full: failure.json")

    failure.unlink()
    monkeypatch.setattr(sweep, "write_json", full)
    with pytest.raises(SystemExit) as again:
        failing((error, None))
    assert again.value.code == left.value.code and not failure.exists()
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_disk_that_is_full_before_the_job_begins_is_told_in_one_sentence(monkeypatch, capsys):
    """Hydra writes its own files first."""

    def main():
        raise OSError(28, "No space left on device", "/run/.hydra/config.yaml")

    monkeypatch.setattr(cli, "hydra_main", lambda _: main)
    monkeypatch.setattr(cli, "check_command", lambda *_: None)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.chdir(Path.cwd())  # the command changes it
    monkeypatch.setattr("sys.argv", ["quantize.py"])
    with pytest.raises(SystemExit) as left:
        cli.Command("quantize", QuantizeJob, cli.stage("quantize"))()
    assert left.value.code == 4 and not logging.raiseExceptions
    assert capsys.readouterr().err.startswith("error: the disk is full: /run/.hydra/config.yaml could not be written")


def test_a_job_that_succeeds_has_not_failed_and_works_where_the_command_was_given(hydra, tmp_path, monkeypatch):
    """A launcher may have started its process anywhere."""
    failure = hydra(RunMode.MULTIRUN)
    write_json(failure, {"reason": "before"})
    monkeypatch.chdir("/")
    assert recording_failure(lambda config: (config + 1, Path.cwd()))(1) == (2, tmp_path) and not failure.exists()


def test_a_machine_that_does_not_share_the_sweeps_folder_does_no_job(hydra, tmp_path):
    """Its results would be lost."""
    failure = hydra(RunMode.MULTIRUN)
    assert sweep.folder_of(tmp_path, 1) == "two"
    (tmp_path / SWEEP).unlink()
    assert sweep.folder_of(tmp_path, 1) == "1"
    with pytest.raises(ResourceError, match=r"no sweep\.json on \S+, which was to do a job, .* let this machine share"):
        recording_failure(lambda config: 0)(None)
    assert not failure.exists()


def test_the_garbage_of_one_job_does_not_outlive_the_next():
    """In a process of its own, because the tests' own has frozen what it imported."""
    code = """if True:
        import gc, weakref
        from sd_quant.cli import importing

        class Cyclic:
            def __init__(self):
                self.itself = self

        with importing():
            pass
        assert gc.isenabled() and gc.get_freeze_count()
        left = weakref.ref(Cyclic())
        with importing():
            pass
        gc.collect()
        assert left() is None
    """
    subprocess.run([sys.executable, "-c", code], cwd=CONF.parent, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [("done", 3), ("failed", 1)])
def test_engines_that_cannot_be_timed_together_take_no_report_with_them(tmp_path, monkeypatch, capsys, status, code):
    """The jobs are what took the hours. A job that failed weighs more, and its sentence is the one that is said.

    The same command goes on in the same folder and says so.
    """
    monkeypatch.chdir(tmp_path)

    def jobs() -> None:
        folder = Path(sys.argv[-1].removeprefix("hydra.sweep.dir="))
        folder.joinpath("report.html").unlink(missing_ok=True)
        for alpha in ("0.5", "0.8"):
            (folder / f"alpha={alpha}").mkdir(exist_ok=True)
            file = "metrics.json" if status == "done" else "failure.json"
            (folder / f"alpha={alpha}" / file).write_text(json.dumps({"status": status, "reason": "the disk is full"}))

    def time_together(directory: Path) -> None:
        raise ArtifactError("no engine")

    for again in (False, True):
        monkeypatch.setattr(sys, "argv", ["quantize.py", "-m", "prompts=[a b]"])
        command = cli.Command("quantize", QuantizeJob, cli.stage("quantize"), after_sweep=time_together)
        assert cli.run_sweep(command, jobs, ["quant_level=3", "alpha=0.5,0.8"]) == code
        (folder,) = (tmp_path / "outputs/sweeps").iterdir()
        assert "<dd>sd-quant quantize -m &#39;prompts=[a b]&#39;</dd>" in (folder / "report.html").read_text()
        out, error = capsys.readouterr()
        assert ("could not be compared together: no engine" in error) == (status == "done")
        assert ("the disk is full" in error) == (status == "failed")
        assert (f"these jobs were begun before, in outputs/sweeps/{folder.name}, and go on;" in out) == again


def test_groups_of_ones_own_are_named_once(tmp_path):
    given = lambda folder, *overrides: cli.search_path(SimpleNamespace(config_dir=folder, overrides=overrides))  # noqa: E731
    assert given(None) == [] and given(str(tmp_path)) == [f'hydra.searchpath=["file://{tmp_path}"]']
    with pytest.raises(ConfigError, match="^--config-dir is nowhere, which is no folder"):
        given("nowhere")
    with pytest.raises(ConfigError, match="^--config-dir and hydra.searchpath are both given"):
        given(str(tmp_path), "hydra.searchpath=[file://x]")
