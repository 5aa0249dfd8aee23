"""Which jobs of a grid a search proposes, and that its sweep is one like any other, killed and begun again too."""

import math
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from sd_quant import cli, search, sweep
from sd_quant.composition import job_of
from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.files import write_json
from sd_quant.report.record import DONE, RECORD
from sd_quant.report.summary import FAILURE, markdown, read_sweep
from sd_quant.search import Outcome, axis, propose, told_of

from .report.sweeps import record_of

pytestmark = pytest.mark.commit

LEVELS, REUSE = (0, 1, 2, 2.5, 3), (None, 0.2, 0.3, 0.4, 0.5)
GRID = [
    {"name": f"{level},{reuse},{sampler}", "varied": {"level": level, "reuse": reuse, "sampler": sampler}}
    for level, reuse, sampler in product(LEVELS, REUSE, ("a", "b"))
]


def shown(job: dict, target: float) -> Outcome:
    """Each lever costs fidelity and saves time; the sampler b is a little worse."""
    level, reuse, sampler = job["varied"].values()
    error = 0.0002 * LEVELS.index(level) ** 2 + 0.01 * (reuse or 0) ** 2 + 0.0001 * (sampler == "b") + 0.0001
    return Outcome(-10 * math.log10(error), math.log(target * (1 - 0.1 * LEVELS.index(level)) * (1 - (reuse or 0))))


@pytest.mark.slow
def test_the_best_of_a_grid_is_found_within_a_fifth_of_its_jobs():
    everything = {job["name"]: shown(job, 1.6) for job in GRID}
    best = max((each.fidelity, name) for name, each in everything.items() if each.shortfall <= 0)[1]
    known: dict[str, Outcome | None] = {}
    while len(known) < len(GRID) / 5:
        [name] = propose(GRID, known, 1)
        assert name not in known
        known[name] = everything[name]
    assert best in known


@pytest.mark.slow
def test_proposals_follow_from_what_is_known_alone_and_are_never_known():
    twins = [job | {"same_as": f"0,{job['varied']['reuse']},a"} if job["varied"]["level"] == 0 else job for job in GRID]
    first = {f"0,{reuse},a": Outcome(40.0 - 20 * (reuse or 0), (reuse or 0) - 0.25) for reuse in (None, 0.2, 0.5)}
    known = first | {"3,0.5,b": None}
    names = propose(twins, known, 3)
    assert names == propose(twins, dict(reversed(known.items())), 3) and len(set(names)) == 3
    doubles = {job["name"] for job in twins if job.get("same_as") not in (None, job["name"])}
    assert not set(names) & (known.keys() | doubles)
    left = GRID[-2:]
    assert sorted(propose(left, {}, 9)) == sorted(job["name"] for job in left)


def test_numbers_have_an_order_and_texts_have_none_and_a_job_that_failed_is_as_bad_as_the_worst():
    assert [axis([2.5, 1, 3, 1]), axis([None, 0.3, 0.2]), axis([12, 8, None])] == [
        (["1", "2.5", "3"], True), (["null", "0.2", "0.3"], True), (["8", "12", "null"], True),
    ]  # fmt: skip
    assert axis([0.5, "auto", 0.3]) == (["0.5", '"auto"', "0.3"], False)
    assert axis([False, 0, [1]]) == (["false", "0", "[1]"], False)
    told = told_of({"a": Outcome(30.0, 0.2), "b": Outcome(25.0, -0.1), "c": None})
    assert told["c"] == (25.0, {"shortfall": 0.2, "floor": 1.0})
    assert told["b"] == (25.0, {"shortfall": -0.1, "floor": -1.0})
    assert set(told_of({"a": Outcome(30.0, 0.2, passes=False)})["a"][1]) == {"shortfall"}


PLANNED = [
    {"name": f"level={level}", "varied": {"level": level}, "overrides": [f"level={level}"]} for level in range(8)
]


@pytest.fixture
def begin(tmp_path):
    """Opens the folder of a search among eight levels and does its jobs, ``at_once`` of them at a time.

    A job leaves its record at once, or fails for the reason that ``ends`` returns. Returns the batches by their levels.
    """

    def begun(jobs: int, target: float = 1.3, at_once: int | None = None, ends=lambda level: None) -> list[list[int]]:
        batches = list[list[int]]()

        def launch(overrides: list[list[str]], initial_job_idx: int) -> list:
            batches.append([int(only.removeprefix("level=")) for [only] in overrides])
            for number, level in enumerate(batches[-1], start=initial_job_idx):
                folder = tmp_path / sweep.entry(tmp_path, number)["name"]
                assert folder.name == f"level={level}"
                folder.mkdir(exist_ok=True)
                if (folder / RECORD).exists():
                    continue
                if reason := ends(level):
                    write_json(folder / FAILURE, {"reason": reason})
                else:
                    write_json(folder / RECORD, record_of(44 - 2 * level, 1 + level / 10, 0.5))
            return batches[-1]

        plan = {"command": [], "varied": ["level"], "jobs": PLANNED, "identity": "", "verdict": {"speedup": target}}
        config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}, "launcher": {"n_jobs": at_once}}})
        sweeper = SimpleNamespace(config=config, launcher=SimpleNamespace(launch=launch), max_batch_size=None)
        with sweep.opened(tmp_path, search.planned(plan, jobs)):
            search.sweep_by_proposals(sweeper, [])
        return batches

    return begun


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_as_if_it_had_not_been(begin, tmp_path):
    def killed(level: int) -> None:
        if len(list(tmp_path.glob(f"*/{RECORD}"))) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(3, ends=killed)
    found = read_sweep(tmp_path)
    assert sweep.start_line(found) == f"search for 3 of the grid's 8 jobs in {tmp_path}: 1 done before"
    assert sweep.job_line(found, 1).startswith("job 2 of 3: level=")
    before = [int(job.name[-1]) for job in found.jobs]
    assert len(before) == 2
    first, *then = begin(3)
    assert first == before and [len(batch) for batch in then] == [1]
    unbroken = [*before, *then[0]]
    assert begin(3) == [unbroken], "it has ended, and its jobs are checked like those of a sweep"
    [checked, one, other] = begin(2, target=1.5)
    assert checked == unbroken and not {*one, *other} & {*unbroken}, "another target has jobs of its own"
    shutil.rmtree(tmp_path)
    assert begin(3) == [[level] for level in unbroken]


@pytest.mark.slow
def test_a_failed_job_ends_no_search_and_what_is_not_proposed_is_not_missing(begin, tmp_path):
    def failing(level: int) -> str | None:
        return None if list(tmp_path.glob(f"*/{FAILURE}")) else "no room"

    assert [len(batch) for batch in begin(4, at_once=2, ends=failing)] == [2, 2]
    found = read_sweep(tmp_path)
    assert len(found.rows) == 4
    assert sweep.outcome(found)[1].startswith("1 of 4 jobs is not done (level=")
    assert "4 of the grid's 8 jobs, proposed by the Gaussian process of Optuna 5" in markdown(found)
    cut = replace(found, jobs=[job for job in found.jobs if job.status == DONE], search={**found.search, "jobs": 6})
    assert sweep.outcome(cut, RuntimeError("no such cluster"))[1].startswith(
        "2 of 5 jobs are not done (the search failed with RuntimeError: no such cluster)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "sentence"), [
    (["search=0"], r"search is 0.*, expected a whole number of jobs from 1, or a share below 1"),
    (["search=1.5"], "search is 1.5, expected a whole number"),
    (["search=3", "verdict.speedup=null"], "search is 3, expected verdict.speedup= or verdict.image_ms= beside it"),
    (["search=5"], r"^search is 5, expected at most the 3 jobs of the grid \(1 of its 4 give the assignment of an"),
])  # fmt: skip
def test_a_search_that_cannot_be_is_refused(arguments, sentence, monkeypatch):
    with cli.composing("quantize"), pytest.raises(ConfigError, match=sentence):
        given = ["quant_level=1,3", "alpha=0.5,0.8", "verdict.speedup=1.2", *arguments]
        plan, _, jobs = sweep.plan_of("quantize", given, partial(job_of, QuantizeJob))
        search.planned(plan, jobs[-1].search)
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"not installed; install it with: pip install 'sd-quant\[search\]'"):
        search.planned({"jobs": []}, 1)


@pytest.mark.slow
def test_a_single_run_searches_nothing(tmp_path):
    command = cli.import_module("sd_quant.commands.quantize").main
    overrides = ["search=3", "verdict.speedup=1.2", f"hydra.run.dir={tmp_path}/run"]
    said = "^search is 3 and proposes jobs of a sweep, and thi"
    with cli.composing("quantize"), pytest.raises(ConfigError, match=said):
        cli.check_command(command, overrides, sweep.plain_config("quantize", overrides))
