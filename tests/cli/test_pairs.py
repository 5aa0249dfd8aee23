"""Knobs at the ends of their ranges, in pairs; ``python -m tests.run pairs`` tries all of them."""

import dataclasses
import random
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir

from sd_quant.composition import job_of
from sd_quant.config import QuantizeJob
from sd_quant.knobs import fields_of
from sd_quant.places import CONF
from tests.pairs.ends import ELSEWHERE, ENDS
from tests.pairs.run import FIRST, arguments, every_pair, pairs_of, problem, rows

from ..zoo.families import sd15

pytestmark = pytest.mark.commit


def knobs(job: type, path: str = "") -> Iterator[str]:
    for name, (kind, _) in fields_of(job).items():
        if dataclasses.is_dataclass(kind) and name != "enable":
            yield from knobs(kind, f"{path}{name}.")
        else:
            yield path + name


def test_no_knob_is_missing():
    assert set(knobs(QuantizeJob)) <= ENDS.keys() | ELSEWHERE
    assert not ENDS.keys() & ELSEWHERE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    sd15(folder / "model")
    return folder


@pytest.mark.nightly
def test_a_row_has_a_value_of_every_knob_and_passes_the_checks(folder):
    missing = every_pair()
    drawn = rows(random.Random(1), folder, missing)
    first = next(drawn)
    missing -= pairs_of(first)
    second = next(drawn)
    drawn.close()  # and with it Hydra's configuration
    assert first.keys() == second.keys() == ENDS.keys()
    assert len(pairs_of(first)) == len(ENDS) * (len(ENDS) - 1) // 2
    assert len(pairs_of(second) & missing) > len(missing) // 20  # a row is drawn for what is left
    with initialize_config_dir(str(CONF), version_base="1.3"):
        job_of(QuantizeJob, compose("quantize", arguments(second, folder)))


@pytest.mark.parametrize("changes", [
    pytest.param({}, marks=pytest.mark.nightly),
    {"quantize": "svdquant_w4a4", "keep": "60", "trt.min_batch_size": "1"},
])  # fmt: skip
def test_a_job_at_the_ends_ends_well(folder, command, changes):
    ended = command("quantize.py", *arguments(FIRST | changes, folder), f"hydra.run.dir={folder}/run{len(changes)}")
    assert problem(ended.returncode, ended.stdout, ended.stderr) is None


def test_a_traceback_is_a_problem():
    assert problem(1, "", "Traceback (most recent call last)\nerror: x\n")
    assert problem(1, "", "error: x\nerror: y\n") and problem(139, "", "") and problem(0, "", "error: x\n")
    assert problem(2, "", "error: x\n") is None and problem(0, "done", "") is None
