"""What a job leaves to the next: its end, which fails alone, and engines."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from sd_quant.background import done
from sd_quant.stages.relay import Relay, Waiting

pytestmark = pytest.mark.commit


@pytest.fixture
def relay():
    """A relay that notes failures in ``failures``."""
    failures = []
    made = Relay(lambda directory, error: failures.append((directory, str(error))))
    made.failures = failures
    return made


def test_a_job_waits_until_its_end_is_asked_for_and_that_once(relay):
    ended = []
    relay.waiting = Waiting(Path("a"), Future(), lambda: ended.append("a"))
    assert relay.busy() and not ended
    relay.settle()
    relay.settle()
    assert ended == ["a"] and not relay.busy() and relay.failures == []
    relay.waiting = Waiting(Path("b"), done({}), lambda: ended.append("b"))
    assert not relay.busy()  # nothing is built


def test_an_end_that_fails_is_the_failure_of_its_job(relay):
    def end():
        raise ValueError("no plan")

    relay.waiting = Waiting(Path("a"), done({}), end)
    relay.settle()
    assert relay.failures == [(Path("a"), "no plan")] and relay.waiting is None


def test_of_a_job_of_another_model_nothing_stays(relay):
    happened = []
    relay.start("sdxl")
    relay.waiting = Waiting(Path("a"), done({}), lambda: happened.append("end"))
    relay.engines["vae"] = SimpleNamespace(close=lambda: happened.append("close"))
    relay.start("sdxl")
    assert happened == [] and relay.engines
    relay.start("sd15")
    assert happened == ["end", "close"] and not relay.engines and relay.waiting is None
