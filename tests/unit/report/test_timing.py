"""Rounds of engines that were timed together, as a sweep's folder holds them."""

import html
import math
import re

import pytest

from sd_quant.errors import ArtifactError
from sd_quant.report.summary import write_summary
from sd_quant.report.timing import log_speedup_over
from tests.pasting import words_of

from .sweeps import QUIET, report_of, timing, write_plan

pytestmark = pytest.mark.commit


def test_figures_of_engines_that_were_timed_together_replace_the_jobs_own(timed):
    """The compiled framework's call takes 25 ms, the unquantized engine's 20, with the same 10 ms of rest."""
    compiled = [25.0 * (1 + 0.001 * (index % 7 - 3)) for index in range(40)]
    first, second, third, *_ = timed({"level=1": 2.0, "level=2": 1.25}, compiled_ms=compiled).rows
    expected = {
        "denoiser_speedup": 2.0, "image_speedup": 60 / 40, "denoiser_ms": 10, "image_ms": 40,
        "image_over_compiled": 35 / 20, "image_compiled_ms": 70,
    }  # fmt: skip
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    for name in ("image_speedup", "image_over_compiled"):
        assert first[f"{name}_low"] <= expected[name] <= first[f"{name}_high"]
    assert first["timed_on"] == second["timed_on"] == "this one"
    assert third["image_speedup"] == 1.3 and third["timed_on"].startswith("a processor")
    without, *_ = timed({"level=1": 2.0}, compiled_ms=None).rows
    assert without["image_compiled_ms"] is None is without["image_over_compiled"]


def test_what_other_parts_and_calls_save_is_counted_for_the_job_that_saves_it(timed, without_plots):
    """One file of the denoiser, twice as fast: 20 ms in 60 are beside its calls, of which one job saves 8."""
    subjects = timing({"level=1": 2.0})["blocks"][0]["subjects"]
    shared = [{**subjects[0], "jobs": ["level=1", "level=2"], "saved": {"level=2": 0.2}}]
    sweep = timed({}, subjects=shared)
    assert [row["image_speedup"] for row in sweep.rows[:2]] == pytest.approx([60 / 40, 60 / 32], rel=1e-3)
    assert sweep.rows[1]["denoiser_speedup"] == pytest.approx(2.0, rel=1e-3)
    assert "ONE ENGINE: quant_level=1, quant_level=2: their graphs" in report_of(sweep).read_text()
    ratio = log_speedup_over(sweep.jobs[1].timed, sweep.jobs[0].timed, 0.95)
    assert math.exp(ratio.value) == pytest.approx(40 / 32, rel=1e-3)
    more = timed({}, subjects=[{**shared[0], "saved": {"level=2": 0.7}}])  # than there is, by a noisy job
    assert more.rows[1]["image_speedup"] == pytest.approx(60 / 20, rel=1e-3)
    fewer = timed({}, subjects=[{**subjects[0], "jobs": ["level=1", "level=2"], "shares": {"level=2": 0.5}}])  # calls
    assert [row["image_speedup"] for row in fewer.rows[:2]] == pytest.approx([1.5 / 1.0, 1.5 / 0.75], rel=1e-3)


def test_the_openings_of_a_block_are_its_intervals(timed):
    """Forty rounds whose engines differ by 5 % in every second opening: of four, of eight, or of one."""
    slow = [10.5 if index // 5 % 2 else 10.0 for index in range(40)]
    samples = {"level=1": slow, "level=2": slow[::-1]}
    subjects = [{"sha256": name, "jobs": [name], "samples_ms": each} for name, each in samples.items()]
    widths = []
    for openings in ([5] * 8, [10] * 4, []):
        row, *_ = timed({}, subjects=subjects, rounds=QUIET | {"openings": openings}).rows
        widths.append(row["denoiser_speedup_high"] - row["denoiser_speedup_low"])
    assert widths[0] > 2 * widths[1] and widths[0] != widths[2]


def test_the_page_says_that_the_machine_was_busy_and_who_was_left_out(timed, without_plots, tmp_path):
    left_out = [{"job": "level=3", "reason": "it ran on another machine <b>"}]
    sweep = timed({"level=1": 2.0, "level=2": 1.25}, rounds=QUIET | {"others": 0.48}, left_out=left_out)
    text = report_of(sweep).read_text()
    told = "BUSY: while the engines were timed together, other processes took 48% of the processors&#39; time"
    assert text.count(told) == 1
    (again,) = re.findall("time again when the machine is quiet: (.*?)</li>", text)
    words = ["python", "-m", "sd_quant.stages.time_sweep", str(sweep.directory)]
    assert words_of(html.unescape(again), tmp_path / "bin") == words
    assert "TIMED ALONE: quant_level=3: it ran on another machine &lt;b&gt;." in text
    assert "BUSY" not in report_of(timed({"level=1": 2.0})).read_text()


def test_a_job_that_is_another_has_no_row_and_is_named(small_sweep):
    jobs = [{"name": f"level={level}", "varied": {}, "same_as": "level=2" * (level == 6)} for level in range(1, 7)]
    sweep = write_plan(small_sweep.directory, {}, jobs=jobs)
    assert [row["job"] for row in sweep.rows] == [f"level={level}" for level in "12345"]
    assert {row["job"]: row["same_as"] for row in sweep.rows if row["same_as"]} == {"level=2": "level=6"}
    write_summary(sweep)
    assert "level=6: the same assignment as level=2, not done again" in (sweep.directory / "summary.md").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"reference_ms": [20.0]},
        {"image_ms": 0},
        {"rest": -1.0},
        {"subjects": [{"sha256": "a", "jobs": ["level=1"], "samples_ms": [0.0] * 40}]},
        {"subjects": {"level=1": 3}},
        {"compiled_ms": [25.0]},
        *({"rounds": QUIET | {"openings": wrong}} for wrong in ([5] * 9, [41, -1], [0, 40])),
        *(
            {"rounds": QUIET | {"between": {"call": {"deviation": 0.1, "degrees": 3, "occasions": 4} | hostile}}}
            for hostile in ({"deviation": -1.0}, {"degrees": 0}, {"degrees": 10**9}, {"deviation": "wide"})
        ),
    ],
)
def test_rounds_that_are_none_are_refused(timed, changes):
    with pytest.raises(ArtifactError, match=r"timing.json holds no rounds .*remove it"):
        timed({"level=1": 2.0}, **changes)
