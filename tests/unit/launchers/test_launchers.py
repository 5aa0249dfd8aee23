"""Messages about launchers that are not installed or that fail."""

from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from sd_quant import sweep
from sd_quant.composition import LAUNCHERS, refusal
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.report.record import DONE
from sd_quant.report.summary import FAILED, UNFINISHED, Job, Sweep

pytestmark = pytest.mark.commit


def test_a_launcher_that_is_not_installed_or_not_known_is_told_with_what_helps():
    for plugin, installs in LAUNCHERS.items():
        complaint = (
            f"In 'hydra/launcher/ours': Could not load 'hydra/launcher/{plugin}'.\n\nConfig search path:\n\tmore"
        )
        refused = refusal(MissingConfigException(complaint), "quantize")
        assert isinstance(refused, ResourceError)
        assert str(refused) == f"the launcher {plugin} is not installed; install it with: {installs}"
    refused = refusal(MissingConfigException("Could not find 'hydra/launcher/one_hots'"), "quantize")
    assert isinstance(refused, ConfigError)
    assert str(refused) == "there is no preset hydra/launcher=one_hots; did you mean one_host?"


def ended(*statuses: str) -> Sweep:
    jobs = [Job(name, Path(name), {}, status, f"why {name}") for name, status in zip("abcd", statuses, strict=False)]
    return Sweep(Path("sweep"), [], [], jobs)


def test_a_launcher_that_failed_is_told_from_a_job_that_did():
    error = RuntimeError("no such\n  cluster")
    assert sweep.outcome(ended(DONE, DONE), error) == (0, "")
    for statuses, told in {
        (DONE, FAILED): "1 of 2 jobs is not done (b: why b)",
        (FAILED, UNFINISHED, UNFINISHED): (
            "3 of 3 jobs are not done (the launcher failed with RuntimeError: no such cluster; a: why a)"
        ),
    }.items():
        assert sweep.outcome(ended(*statuses), error) == (1, f"{told}; the same command tries them again")
    assert "why b" in sweep.outcome(ended(DONE, UNFINISHED))[1]
