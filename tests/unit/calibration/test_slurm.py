"""Calibration on a machine that has Slurm, by whoever did not ask for it."""

import os

import pytest
from lightning.fabric import Fabric

from sd_quant.calibration.collection import fabric_for

pytestmark = pytest.mark.slow  # the import of Lightning alone


@pytest.fixture
def srun(tmp_path, monkeypatch) -> None:
    """On the PATH, and no job of Slurm around this process."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)


def test_lightnings_hint_at_srun_is_no_error(srun):
    with pytest.warns(UserWarning, match="The `srun` command is available"):  # else nothing is shown below
        Fabric(accelerator="cpu", devices=1)
    assert fabric_for("cpu", 1).world_size == 1
