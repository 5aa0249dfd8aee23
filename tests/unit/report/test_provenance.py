import shutil
import subprocess
from pathlib import Path

import pytest

from sd_quant.report.provenance import fingerprint, git_state

pytestmark = pytest.mark.commit


def test_a_folder_is_known_by_its_files_names_and_contents_and_an_absent_input_has_a_reason(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "unet").mkdir(parents=True)
        (tmp_path / folder / "unet" / "weights").write_bytes(b"123")
    first, second = fingerprint(tmp_path / "a"), fingerprint(tmp_path / "b")
    assert first["sha256"] == second["sha256"] and first["bytes"] == 3
    (tmp_path / "b" / "unet" / "weights").rename(tmp_path / "b" / "unet" / "other")
    assert fingerprint(tmp_path / "b")["sha256"] != first["sha256"]
    absent = {"path": "no/such/file", "sha256": None, "bytes": None, "reason": "no such file or folder"}
    assert fingerprint(Path("no/such/file")) == absent


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_state_of_a_clean_a_changed_and_a_foreign_repository(tmp_path, monkeypatch):
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set when a git hook runs the tests
        monkeypatch.delenv(variable, raising=False)
    nothing = {"commit": None, "dirty": None}
    assert git_state(tmp_path) == nothing

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath="]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    assert git_state(tmp_path) == nothing  # no commit yet
    git("commit", "--allow-empty", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "site-packages").mkdir()
    assert git_state(tmp_path / "site-packages") == nothing
    (tmp_path / "new.py").write_text("")
    assert git_state(tmp_path)["dirty"] is True
    monkeypatch.setenv("PATH", str(tmp_path))  # where git is not
    assert git_state(tmp_path) == nothing
