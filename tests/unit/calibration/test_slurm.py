"""What Lightning advises where calibration starts is not shown to users."""

import logging
import os
import warnings

import pytest
from lightning.fabric import Fabric

from sd_quant.calibration.collection import fabric_for

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # the import of Lightning alone


@pytest.fixture
def srun(tmp_path, monkeypatch) -> None:
    """On the PATH, and no job of Slurm around this process."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)


def test_advice_to_use_srun_is_not_shown(srun):
    with pytest.warns(UserWarning, match="The `srun` command is available"):  # else nothing is shown below
        Fabric(accelerator="cpu", devices=1)
    with warnings.catch_warnings(record=True) as shown:
        assert fabric_for("cpu", 1).world_size == 1
    assert not shown


def test_advice_to_multiply_in_tf32_is_not_shown(caplog):
    """Seen on an H100. ``_check_cuda_matmul_precision`` of Lightning's accelerators logs it as ``rank_zero_info``."""
    from lightning.fabric.utilities.rank_zero import rank_zero_info

    fabric_for("cpu", 1)
    with caplog.at_level(logging.DEBUG):
        rank_zero_info("You are using a CUDA device that has Tensor Cores.")
    assert not caplog.records
