"""Which jobs a command means, what they are called, and that a folder has one sweep."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from sd_quant import progress, sweep
from sd_quant.cache import locked
from sd_quant.composition import job_of
from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.files import write_json
from sd_quant.places import CONF
from sd_quant.report.record import DONE, RECORD
from sd_quant.report.summary import FAILED, FAILURE, RECOMMENDATION, SWEEP, UNFINISHED, Job, Sweep, read_sweep

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # each composes jobs, a fifth of a second each


@cache
def plan(*arguments: str) -> tuple[dict, str]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return sweep.plan_of("quantize", arguments, lambda config: job_of(QuantizeJob, config))[:2]


def names(*arguments: str) -> list[str]:
    return [job["name"] for job in plan(*arguments)[0]["jobs"]]


def test_jobs_are_named_by_what_varies_in_names_of_folders():
    found, label = plan("quant_level=1,2.5", "alpha=0.5,auto", "calib_size=16", "infer.steps=choice(5)")
    expected = [f"quant_level={level},alpha={alpha}" for level in ("1", "2.5") for alpha in ("0.5", "auto")]
    assert [job["name"] for job in found["jobs"]] == expected
    assert found["varied"] == ["quant_level", "alpha"] and label.startswith("quant_level-alpha_")
    assert names("calib_size=range(8,17,8)") == ["calib_size=8", "calib_size=16"]
    assert names("infer=openvino,onnxruntime") == ["infer=openvino", "infer=onnxruntime"]
    hostile = names(f"quantize.exp_name={'x' * 300},../../etc,{'x' * 301},a/b,'a b'")
    assert len(set(hostile)) == 5
    assert all(re.fullmatch(r"[A-Za-z0-9._=,+-]+", name) and len(name) < 200 for name in hostile)


def test_the_folder_depends_on_the_jobs_alone():
    """Not on how a value is written, nor on the rule and the budget, by which the report recommends."""
    (_, folder), (other, same) = plan("alpha=0.8,1"), plan("alpha=0.80,1.0")
    assert [job["name"] for job in other["jobs"]] == ["alpha=0.8", "alpha=1"] and folder == same
    plain, changed = (plan("quant_level=1,2", *more) for more in ((), ("verdict.enough_db=35", "timing.budget_s=60")))
    assert plain[1] == changed[1] and plain[0]["identity"] == changed[0]["identity"]
    assert (changed[0]["verdict"]["enough_db"], changed[0]["timing"]["budget_s"]) == (35, 60)
    usual, same, others = (
        plan("quant_level=1,2", *given)[1]
        for given in ([], ["cache.limit_gb=1", "hydra.verbose=false"], ["infer.steps=7"])
    )
    assert usual == same and len({usual, others, plan("quant_level=1,3")[1]}) == 3


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["quant_level=1,7"], r"^job quant_level=7: quant_level is 7.0, expected one of"),
    (["alpha=0.8,0.80"], r"^two jobs of the sweep are one: alpha=0.8 and alpha=0.8; leave one of the values out$"),
    (["alpha=interval(0,1)"], r"^alpha=interval\(0,1\) is an interval, expected values such as 0.5,0.8"),
    (["infer.seed=range(0,1001)"], "^the command means more than 1000 jobs, expected at most so many; vary fewer"),
    (["infer.seed=range(0,1000)", "alpha=0.5,1"], "^the command means more than 1000 jobs"),
    (["infer.seed=range(0,1000000000000)"], "^the command means more than 1000 jobs"),
])  # fmt: skip
def test_an_impossible_job_is_refused_before_any_starts(arguments, sentence):
    with pytest.raises(Exception, match=sentence):
        plan(*arguments)


@pytest.mark.parametrize("arguments", [
    ["quant_level=1,2", "alpha=0.5,1", "calib_size=8"],
    ["infer=openvino,onnxruntime", "calib_size=range(8,17,8)", "~trackers"],
    ["alpha=0.5,1", "quant_level=3,2", "alpha=0.8,0.9,auto"],
    ["infer.prompts=[a b],[c]", "quantize.exp_name='a,b',c", "+files.x=1,2"],
])  # fmt: skip
def test_the_jobs_are_those_of_hydras_sweeper_in_its_order(arguments):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        _, jobs = sweep.expand("quantize", arguments)
        assert [jobs] == BasicSweeper.split_arguments(sweep.parse(arguments), None)


def test_a_folder_has_one_sweep(tmp_path):
    one, two = plan("quant_level=1,2", "trackers=[]")[0], plan("quant_level=1,3")[0]
    with sweep.opened(tmp_path / "sweep", one):
        with pytest.raises(ConfigError, match="another process is running a sweep in"):
            sweep.opened(tmp_path / "sweep", one).__enter__()
    stale = tmp_path / "sweep" / RECOMMENDATION  # of the jobs that were done before
    stale.touch()
    with sweep.opened(tmp_path / "sweep", one):  # again
        assert not stale.exists()
    with pytest.raises(ConfigError, match=r"holds another sweep \(quant_level=1,2 'trackers=\[\]'\); set another"):
        sweep.opened(tmp_path / "sweep", two).__enter__()
    assert json.loads((tmp_path / "sweep" / SWEEP).read_text())["jobs"] == one["jobs"]


def test_what_is_said_follows_from_the_folder(tmp_path):
    with sweep.opened(tmp_path, plan("quant_level=1,2,3")[0]):
        first, second, _ = (tmp_path / f"quant_level={level}" for level in (1, 2, 3))
        assert sweep.start_line(read_sweep(tmp_path)) == f"sweep of 3 jobs in {tmp_path}"
        assert sweep.job_line(read_sweep(tmp_path), 0) == "job 1 of 3: quant_level=1"
        for job in (first, second):
            job.mkdir()
        write_json(first / RECORD, {"seconds": 42.5})
        write_json(second / FAILURE, {"reason": "no memory"})
        found = read_sweep(tmp_path)
        assert sweep.start_line(found).endswith(": 1 done before, 1 failed before and tried again")
        said = "job 2 of 3: quant_level=2, failed before: no memory; about 85 s of work to go"
        assert sweep.job_line(found, 1) == said
        code, sentence = sweep.outcome(found)
        assert code == 1
        assert sentence.startswith("2 of 3 jobs are not done (quant_level=2: no memory; quant_level=3: it ")


def test_a_launcher_that_failed_is_told_from_a_job_that_did():
    def ended(*statuses: str) -> Sweep:
        jobs = [Job(name, Path(name), {}, each, f"why {name}") for name, each in zip("abcd", statuses, strict=False)]
        return Sweep(Path("sweep"), [], [], jobs)

    error = RuntimeError("no such\n  cluster")
    assert sweep.outcome(ended(DONE, DONE), error) == (0, "")
    told = [sweep.outcome(ended(*each), error) for each in ((DONE, FAILED), (FAILED, UNFINISHED, UNFINISHED))]
    assert told == [(1, f"{sentence}; the same command tries them again") for sentence in (
        "1 of 2 jobs is not done (b: why b)",
        "3 of 3 jobs are not done (the launcher failed with RuntimeError: no such cluster; a: why a)",
    )]  # fmt: skip
    assert "why b" in sweep.outcome(ended(DONE, UNFINISHED))[1]


def test_jobs_that_run_elsewhere_are_counted_by_what_lies_in_their_folders(tmp_path, monkeypatch):
    """One that ended before, one done since, one that failed, one tried again after a failure, one that never ran."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    jobs = [{"name": name} for name in "abcdef"] + [{"name": "g", "same_as": "a"}]
    write_json(tmp_path / SWEEP, {"jobs": jobs})
    for name in "abcde":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / RECORD).touch()
    work = sweep.Jobs(tmp_path)
    now[0] += 30
    with locked(tmp_path / "e/.lock"), locked(tmp_path / "d/.lock"):
        assert work.line() == "jobs: 1 done, 0 failed, 2 running, 3 waiting; 30 s so far"
        (tmp_path / "b" / RECORD).touch()
        for name in "cd":
            (tmp_path / name / FAILURE).touch()
        assert work.line() == "jobs: 2 done, 1 failed, 2 running, 1 waiting; about 90 s to go"
    assert work.line() == "jobs: 2 done, 2 failed, 0 running, 2 waiting; about 60 s to go"
    for name in "ab":  # of another version, done again
        (tmp_path / name / RECORD).unlink()
    assert work.line() == "jobs: 0 done, 2 failed, 0 running, 4 waiting; 30 s so far"


@pytest.mark.parametrize("experiment", [
    pytest.param(path.stem, marks=pytest.mark.nightly if path.stem == "nemo_docs_grid" else ())
    for path in (CONF / "experiment").glob("*.yaml")
])  # fmt: skip
def test_every_job_of_a_shipped_experiment_has_its_prompts(experiment):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        *_, jobs = sweep.plan_of("quantize", [f"experiment={experiment}"], lambda config: job_of(QuantizeJob, config))
    assert jobs and [len(job.calibration_rows()) for job in jobs] == [job.quantize.calib_size for job in jobs]
    others = {"nvidia_article": ["nemo", "nemo", "fp8", "fp8"], "quark_guide": ["int8_weight_only", "int8_per_tensor"]}
    formats = [job.quantize.format for job in jobs]
    assert formats == others.get(experiment, ["nemo"] * len(jobs))
    for job in jobs:
        assert job.quantize.attention is None or job.quantize.quant_level == 4.0, "with attention and without"


def test_jobs_of_the_same_assignment_are_done_once():
    """At level 1 nothing is smoothed, so alpha says nothing; at level 2 it does."""
    jobs = {job["name"]: job.get("same_as") for job in plan("quant_level=1,2", "alpha=0.5,auto")[0]["jobs"]}
    first, twin = "quant_level=1,alpha=0.5", "quant_level=1,alpha=auto"
    assert jobs.pop(twin) == first and set(jobs.values()) == {None}
    jobs = {job["name"]: job.get("same_as") for job in plan("quant_level=4", "attention=null,int8,fp8")[0]["jobs"]}
    assert jobs == {"attention=null": None, "attention=int8": "attention=null", "attention=fp8": None}
    for heeded in ("calib_size=8,16", "infer.steps=5,6", "quantize.observer=min_max,mse", "percentile=0.5,1"):
        assert not any(job.get("same_as") for job in plan("quant_level=1", heeded)[0]["jobs"]), heeded


def test_a_sweep_goes_on_in_the_newest_folder_of_the_same_jobs(tmp_path):
    assert sweep.begun(tmp_path, "alpha_1a") is None
    others = "2026-01-02_03-04-05_alpha_1a", "2026-01-04_03-04-05_alpha_2b", "alpha_1a"
    for name in ("2026-01-03_03-04-05_alpha_1a", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").touch()
    (tmp_path / "2026-01-05_03-04-05_alpha_1a").mkdir()  # not begun
    assert sweep.begun(tmp_path, "alpha_1a") == tmp_path / "2026-01-03_03-04-05_alpha_1a"
    assert sweep.begun(tmp_path, sweep.dated("alpha_1a")) is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_alpha_1a", sweep.dated("alpha_1a"))
