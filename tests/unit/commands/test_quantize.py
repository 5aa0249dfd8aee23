"""Which jobs of a sweep may leave their end to the next."""

from types import SimpleNamespace

import pytest
from hydra.types import RunMode

from sd_quant.commands import quantize
from tests.presets import job

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("mode", "launcher", "overrides", "beside"),
    [
        (RunMode.MULTIRUN, "basic", (), True),
        (RunMode.RUN, "basic", (), False),
        (RunMode.MULTIRUN, "joblib", (), False),
        (RunMode.MULTIRUN, "basic", ("search=3", "verdict.speedup=1.2"), False),
    ],
)
def test_a_job_is_left_to_the_next_in_a_sweep_of_one_process_that_is_no_search(
    monkeypatch, mode, launcher, overrides, beside
):
    runtime = SimpleNamespace(choices={"hydra/launcher": launcher})
    monkeypatch.setattr(quantize.HydraConfig, "get", lambda: SimpleNamespace(mode=mode, runtime=runtime))
    assert quantize.goes_on_beside(job(*overrides)) is beside
