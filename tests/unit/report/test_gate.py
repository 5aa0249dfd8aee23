"""The gate: intervals decide, errors are bounded, and what cannot be told says how much is missing."""

import json
import math
import random
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sd_quant.commands.gate import EXIT_CODES
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.metrics.intervals import Interval, mean_interval
from sd_quant.report.gate import (
    FAILED,
    PASSED,
    UNTOLD,
    Estimate,
    Run,
    decide,
    levels_of,
    mean_of_skewed,
    read_run,
    untransformed,
)  # fmt: skip
from sd_quant.report.gate_output import json_of, text_of, write_gate, xml_of
from sd_quant.report.record import parsed
from tests.nested import with_values

from .sweeps import record_of

pytestmark = pytest.mark.commit

NUMBERS = random.Random(0)


def spread(mean: float, count: int, deviation: float) -> list[float]:
    """Values with this mean, symmetric about it."""
    return [mean + deviation * (1 if index % 2 else -1) for index in range(count)]


def run_of(count: int = 64, decibels: float = 37.0, lpips: float = 0.004, speedup: float = 1.3, **changes) -> Run:
    """A run of as many prompts, without degenerate images; ``changes`` by the names in its record, __ for a dot."""
    record = record_of(decibels, speedup, 0.6, [f"prompt {index}" for index in range(count)])
    record["degenerate"] = []
    record["fidelity"]["psnr"]["values"] = spread(decibels, count, 1.5)
    record["fidelity"]["lpips"]["values"] = spread(lpips, count, 0.001)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return Run(Path("run"), parsed(with_values(record, changes)))


def outcomes(gate) -> dict[str, str]:
    return {each.criterion: each.verdict for each in gate.verdicts}


BARS = {"min_psnr": 36.0, "max_lpips": 0.005, "min_speedup": 1.2}


@pytest.mark.parametrize(
    ("run", "outcome", "verdicts"),
    [
        (run_of(), PASSED, (PASSED, PASSED, PASSED)),
        (run_of(decibels=34.0, lpips=0.009), FAILED, (FAILED, FAILED, PASSED)),  # a broken layer
        (run_of(4), UNTOLD, (UNTOLD, UNTOLD, PASSED)),
        (run_of(4, decibels=20.0), FAILED, (FAILED, UNTOLD, PASSED)),  # one that fails decides
        (run_of(speedup=1.2), UNTOLD, (PASSED, PASSED, UNTOLD)),
        (run_of(speedup=1.0), FAILED, (PASSED, PASSED, FAILED)),
    ],
)
def test_an_interval_passes_fails_or_cannot_be_told(run, outcome, verdicts):
    gate = decide(run, None, BARS)
    assert (gate.outcome, outcomes(gate)) == (outcome, dict(zip(BARS, verdicts, strict=True)) | {"degenerate": PASSED})


def test_a_short_run_says_how_many_more_prompts_would_tell():
    short = decide(run_of(6), None, {"min_psnr": 36.0})
    more = short.verdicts[0].more
    assert short.sentence == f"cannot be told: min_psnr; about {more} more prompts would tell (infer.prompts)"
    told, too_few = (decide(run_of(6 + count), None, {"min_psnr": 36.0}).outcome for count in (more + 2, more // 2))
    assert (told, too_few) == (PASSED, UNTOLD)
    [at_the_bar, _] = decide(run_of(6), None, {"min_psnr": 37.0}).verdicts
    assert at_the_bar.more is None and "too near the bar" in at_the_bar.reason


def test_what_fails_alone_does_not_read_as_if_it_could_pass():
    """The interval that is shown is the one that decides, and the run is neither passed nor failed."""
    values = [31.05, 31.83, 32.34, 32.76, 33.16, 33.55, 33.98, 34.47, 35.11, 36.25]
    run = run_of(10, fidelity__psnr__values=values)
    alone = decide(run, None, {"min_psnr": 35.0})
    assert alone.outcome == FAILED and alone.verdicts[0].value == "33.45 dB (32.39 to 34.65 at 95 %)"
    gate = decide(run, None, BARS | {"min_psnr": 35.0})
    psnr, *others = gate.verdicts
    assert psnr.value == "33.45 dB (32.10 to 35.04 at 98.3 %)" and psnr.figures["level"] == pytest.approx(1 - 0.05 / 3)
    assert psnr.reason.startswith("alone it fails (32.39 to 34.65 at 95 %); about 1 more prompts would tell")
    assert gate.outcome == psnr.verdict == "likely failed" and EXIT_CODES[gate.outcome] == 5
    assert gate.sentence == "likely failed: min_psnr; about 1 more prompts would tell (infer.prompts)"
    assert "cannot be told" not in text_of(gate) and 'type="likely failed"' in xml_of(gate)
    assert all(each.verdict == PASSED and each.figures.get("level", 0.95) == 0.95 for each in others)


def test_what_fails_leaves_its_share_of_the_error_to_the_others():
    """R's p.adjust(c(.005, .011, .02, .04), "holm") has .02, .033, .04, .04: all fail, by Bonferroni the first two."""
    estimates = [
        Estimate(str(p), "", 0.0, True, lambda c, p=p: Interval(-1, -2, -1 if p < 1 - c else 1), 9, "prompts", "{}")
        for p in (0.04, 0.005, 0.02, 0.011)
    ]
    levels = levels_of(estimates, 0.95)
    assert all(each.bad(each.at(levels[each.knob])) for each in estimates) and levels["0.005"] == 1 - 0.05 / 4


def test_the_unit_is_the_prompt_and_one_prompt_tells_nothing():
    prompts = [f"prompt {index // 16}" for index in range(64)]
    run = run_of(prompts=prompts)
    assert decide(run, None, {"min_psnr": 36.0}).verdicts[0].figures["count"] == 4
    one = decide(run_of(prompts=["the same"] * 64), None, {"min_psnr": 10.0})
    assert one.outcome == UNTOLD and one.verdicts[0].reason == "at least 1 more prompts would tell"


def test_no_error_of_several_criteria_is_more_likely_than_stated():
    """At the bars themselves, where errors are likeliest; without Holm 9.6 % of the runs would fail."""
    draws, criteria, count, wrongly_failed, wrongly_passed = 600, 4, 16, 0, 0
    for _ in range(draws):
        samples = [[NUMBERS.gauss(0, 1) for _ in range(count)] for _ in range(criteria)]
        estimates = [
            Estimate(str(index), "", 0.0, True, partial(mean_of_skewed, sample), count, "prompts", "{}")
            for index, sample in enumerate(samples)
        ]
        levels = levels_of(estimates, 0.95)
        wrongly_failed += any(each.bad(each.at(levels[each.knob])) for each in estimates)
        wrongly_passed += estimates[0].good(estimates[0].at(0.95))  # as if all others were met for sure
    assert wrongly_failed / draws <= 0.05 and wrongly_passed / draws <= 0.05


def test_the_interval_of_skewed_values_reaches_further_to_the_long_side():
    even = spread(37.0, 20, 1.5)
    assert mean_of_skewed(even, 0.95) == pytest.approx(mean_interval(even))
    above = {mean_of_skewed: 0, mean_interval: 0}  # draws in which the true mean lies above the interval
    for _ in range(400):
        sample = [math.exp(NUMBERS.gauss(0, 1)) for _ in range(32)]
        for interval in above:
            above[interval] += interval(sample, 0.95).high < math.exp(0.5)
    assert above[mean_of_skewed] < 0.7 * above[mean_interval]
    assert mean_of_skewed([2.0, 2.0], 0.95) == (2, 2, 2)
    for t, a in ((2.0, 0.3), (-2.0, 0.3), (2.0, -0.3)):  # the inverse of Hall's transformation, as published
        g = untransformed(t, a)
        assert g + a * g**2 / 3 + a**2 * g**3 / 27 + a / 6 == pytest.approx(t)
    [bounded, _] = decide(run_of(2, fidelity__lpips__values=[0.0, 0.002]), None, {"max_lpips": 1.0}).verdicts
    assert bounded.figures["low"] == 0


@pytest.mark.parametrize(("count", "outcome", "more"), [(36, PASSED, None), (35, UNTOLD, 1), (4, UNTOLD, 32)])
def test_the_worst_image_fails_where_it_is_and_passes_by_the_number_of_prompts(count, outcome, more):
    [worst, _] = decide(run_of(count), None, {"worst_psnr": 35.0}).verdicts
    assert (worst.verdict, worst.more) == (outcome, more)
    [worst, _] = decide(run_of(count), None, {"worst_psnr": 36.0}).verdicts
    assert worst.verdict == FAILED and [each.index for each in worst.worst][:2] == [0, 2]
    assert decide(run_of(count), None, {"worst_lpips": 0.004}).outcome == FAILED


def test_a_degenerate_image_fails_whatever_the_mean():
    stated = decide(run_of(degenerate=[{"index": 3, "reason": "black"}]), None, BARS)
    assert stated.sentence == "failed: degenerate" and stated.verdicts[-1].reason == "image 3 is black"
    assert decide(run_of(2, degenerate=None), None, {"min_speedup": 1.2}).outcome == UNTOLD  # nobody knows
    with pytest.raises(ArtifactError, match="degenerate names image 2"):
        decide(run_of(2, degenerate=[{"index": 2}]), None, BARS)


def test_identical_images_pass_and_an_image_without_a_score_fails():
    same = run_of(8, fidelity__psnr__values=[None] * 8, fidelity__ssim__values=[1.0] * 8)
    gate = decide(same, None, {"min_psnr": 60.0})
    assert gate.outcome == PASSED and "8 of 8 images are identical" in gate.verdicts[0].reason
    broken = run_of(8, fidelity__psnr__values=[None, *[40.0] * 7])
    assert decide(broken, None, {"min_psnr": 30.0}).verdicts[0].reason == "1 of 8 images have no PSNR: 0"


MARGINS = {"psnr_margin": 0.5, "lpips_margin": 0.001, "speedup_margin": 0.05}


@pytest.mark.parametrize(
    ("run", "verdicts"),
    [
        (run_of(), (PASSED, PASSED, PASSED)),  # the control: nothing has changed
        (run_of(decibels=36.8), (PASSED, PASSED, PASSED)),
        (run_of(decibels=36.0, speedup=1.1), (FAILED, PASSED, FAILED)),
        (run_of(lpips=0.006), (PASSED, FAILED, PASSED)),
    ],
)
def test_a_run_is_not_worse_than_its_baseline_by_more_than_a_margin(run, verdicts):
    assert outcomes(decide(run, run_of(), MARGINS)) == {
        **dict(zip(MARGINS, verdicts, strict=True)), "degenerate": PASSED
    }  # fmt: skip


def test_a_run_is_paired_with_its_baseline_by_prompt():
    """Prompts differ by 3 dB, the runs by 0.2 in each: unpaired intervals would hold the margin."""
    gate = decide(run_of(8, decibels=36.8), run_of(8), {"psnr_margin": 0.5})
    assert gate.outcome == PASSED and gate.verdicts[0].figures["value"] == pytest.approx(-0.2)
    control = decide(run_of(), run_of(), dict.fromkeys(("psnr_margin", "lpips_margin"), 0.0) | {"speedup_margin": 0.01})
    assert control.outcome == PASSED


@pytest.mark.parametrize(
    ("baseline", "bar", "said"),
    [
        ({"prompts": ["another"] * 64}, "psnr_margin", "prompts"),
        *(({f"knobs__infer__{name}": 7}, "psnr_margin", f"infer.{name}") for name in (
            "width", "height", "steps", "scale", "seed", "num_samples", "negative_prompt", "strength", "precision",
        )),
        ({"inputs": {"checkpoint": {"sha256": "a"}}}, "psnr_margin", "weights"),
        ({"inputs": {"latents": {"sha256": "a"}}}, "psnr_margin", "infer.latents"),
        ({"inputs": {"infer.table 1 image": {"sha256": "a"}}}, "psnr_margin", "infer.table 1 image"),
        ({"environment__machine__cpu": "another"}, "speedup_margin", "the baseline on another"),
        (None, "max_lpips", "has no LPIPS of images.*infer.prompts"),
        (None, "min_speedup", "has no speed-up of an image.*infer="),
    ],
)  # fmt: skip
def test_a_baseline_of_other_images_and_a_bar_on_what_a_run_has_not_are_refused(baseline, bar, said):
    run = run_of(fidelity__lpips=None, latency={}) if baseline is None else run_of()
    with pytest.raises(ConfigError, match=said):
        decide(run, None if baseline is None else run_of(**baseline), {bar: 0.1})


def test_a_speed_up_that_a_busy_machine_has_spoilt_cannot_be_told():
    busy = {"speedup": {"value": None, "reason": "time again when the machine is quiet"}}
    gate = decide(
        run_of(latency={"openvino": {"image": {"1": busy}}}), run_of(), {"min_speedup": 1, "speedup_margin": 0.1}
    )
    assert gate.sentence == "cannot be told: min_speedup, speedup_margin"
    assert gate.verdicts[0].reason == gate.verdicts[1].reason == "time again when the machine is quiet"


def test_a_folder_without_a_run_and_a_damaged_record_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no metrics.json"):
        read_run("run", tmp_path)
    for damaged in ("{", json.dumps(run_of(3, fidelity__psnr__values=[1.0]).record)):
        (tmp_path / "metrics.json").write_text(damaged)
        with pytest.raises(ArtifactError, match="damaged"):
            read_run("run", tmp_path)


def test_the_verdicts_as_text_as_json_and_as_junit(tmp_path):
    hostile = run_of(4, prompts=["\x1b[31m<&\x00\ud800", *"abc"], decibels=34.0)
    gate = decide(hostile, None, BARS | {"worst_psnr": 34.0})
    write_gate(gate, 1, tmp_path / "gate.json")
    assert json.loads((tmp_path / "gate.json").read_text())["criteria"][1]["more"] == gate.verdicts[1].more > 0
    assert json_of(gate, 1)["criteria"][0]["worst"][0]["prompt"] == hostile.record["prompts"][0]
    write_gate(gate, 1, tmp_path / "gate.xml")
    [suite] = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "2")
    children = {case.get("name"): case[0].tag for case in suite}
    assert children == {
        "min_psnr": "error", "max_lpips": "error", "min_speedup": "system-out", "worst_psnr": "failure",
        "degenerate": "system-out",
    }  # fmt: skip
    text = text_of(gate)
    assert text.splitlines()[-1] == "failed: worst_psnr" and "\x1b" not in text + xml_of(gate)
    assert "min_psnr: 0," in text and "no file" in text
