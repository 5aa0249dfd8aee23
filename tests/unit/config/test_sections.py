"""Whether a folder can be written."""

import errno
import tempfile
from pathlib import Path

import pytest

from sd_quant.config import check_writable
from sd_quant.errors import ConfigError, ResourceError


def test_writable_makes_nothing(tmp_path):
    check_writable(tmp_path / "a/b/c")
    assert not list(tmp_path.iterdir())
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"because of .*broken; set hydra\.run\.dir"):
        check_writable(tmp_path / "broken/run")


def test_a_folder_that_cannot_be_made_is_refused(monkeypatch):
    """/proc has the permissions of a folder in which its owner may write."""
    with pytest.raises(ConfigError, match=r"^the output directory /proc/x/y cannot be written, because of /proc; set"):
        check_writable(Path("/proc/x/y"))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(full))
    with pytest.raises(ResourceError, match="the disk is full"):
        check_writable(Path("/tmp/x"))
