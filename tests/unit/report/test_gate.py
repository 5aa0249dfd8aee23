"""The gate: intervals decide, errors are bounded, and what cannot be told says how much is missing."""

import json
import math
import random
from pathlib import Path

import pytest

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.metrics.intervals import mean_interval
from sd_quant.report import gate as gates
from sd_quant.report.gate import FAILED, PASSED, UNTOLD, Run, decide, mean_of_skewed, read_run
from sd_quant.report.gate_output import json_of, text_of
from sd_quant.report.record import parsed
from tests.nested import with_values

from .sweeps import record_of

pytestmark = pytest.mark.commit


def spread(mean: float, count: int, deviation: float) -> list[float]:
    """Values with this mean, symmetric about it."""
    return [mean + deviation * (1 if index % 2 else -1) for index in range(count)]


def run_of(count: int = 64, decibels: float = 37.0, lpips: float = 0.004, speedup: float = 1.3, **changes) -> Run:
    """A run of as many prompts, without degenerate images; ``changes`` by the names in its record, __ for a dot."""
    record = record_of(decibels, speedup, 0.6, [f"prompt {index}" for index in range(count)]) | {"degenerate": []}
    scores = {"psnr": spread(decibels, count, 1.5), "lpips": spread(lpips, count, 0.001)}
    values = {f"fidelity.{name}.values": each for name, each in scores.items()}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return Run(Path("run"), parsed(with_values(record, values)))


BARS = {"min_psnr": 36.0, "max_lpips": 0.005, "min_speedup": 1.2}
MARGINS = {"psnr_margin": 0.5, "lpips_margin": 0.001, "speedup_margin": 0.05}


@pytest.mark.parametrize(
    ("run", "baseline", "bars", "outcome", "verdicts"),
    [
        (run_of(), None, BARS, PASSED, (PASSED, PASSED, PASSED)),
        (run_of(decibels=34.0, lpips=0.009), None, BARS, FAILED, (FAILED, FAILED, PASSED)),  # a broken layer
        (run_of(4), None, BARS, UNTOLD, (UNTOLD, UNTOLD, PASSED)),
        (run_of(4, decibels=20.0), None, BARS, FAILED, (FAILED, UNTOLD, PASSED)),  # one that fails decides
        (run_of(speedup=1.2), None, BARS, UNTOLD, (PASSED, PASSED, UNTOLD)),
        (run_of(speedup=1.0), None, BARS, FAILED, (PASSED, PASSED, FAILED)),
        (run_of(), run_of(), {"psnr_margin": 0, "lpips_margin": 0, "speedup_margin": 0.01}, PASSED, (PASSED,) * 3),
        (run_of(decibels=36.0, speedup=1.1), run_of(), MARGINS, FAILED, (FAILED, PASSED, FAILED)),
        (run_of(lpips=0.006), run_of(), MARGINS, FAILED, (PASSED, FAILED, PASSED)),
        # paired by prompt: prompts differ by 3 dB, which unpaired intervals would hold against the margin
        (run_of(8, decibels=36.8), run_of(8), {"psnr_margin": 0.5}, PASSED, (PASSED,)),
    ],
)
def test_an_interval_passes_fails_or_cannot_be_told(run, baseline, bars, outcome, verdicts):
    gate = decide(run, baseline, bars)
    assert [each.criterion for each in gate.verdicts] == [*bars, "degenerate"]
    assert (gate.outcome, [each.verdict for each in gate.verdicts]) == (outcome, [*verdicts, PASSED])


def test_a_short_run_says_how_many_more_prompts_would_tell():
    short, bars = decide(run_of(6), None, {"min_psnr": 36.0}), {"min_psnr": 36.0}
    more = short.verdicts[0].more
    assert short.sentence == f"cannot be told: min_psnr; about {more} more prompts would tell (infer.prompts)"
    assert [decide(run_of(6 + count), None, bars).outcome for count in (more + 2, more // 2)] == [PASSED, UNTOLD]
    grouped = run_of(prompts=[f"prompt {index // 16}" for index in range(64)])  # the prompt is the unit, not the image
    assert decide(grouped, None, bars).verdicts[0].figures["count"] == 4
    [at_the_bar, _] = decide(run_of(6), None, {"min_psnr": 37.0}).verdicts
    assert at_the_bar.more is None and "too near the bar" in at_the_bar.reason


def test_the_interval_of_skewed_values_reaches_further_to_the_long_side():
    even = spread(37.0, 20, 1.5)
    assert mean_of_skewed(even, 0.95) == pytest.approx(mean_interval(even))
    above, numbers = {mean_of_skewed: 0, mean_interval: 0}, random.Random(0)  # draws with the true mean above
    for _ in range(400):
        sample = [math.exp(numbers.gauss(0, 1)) for _ in range(32)]
        for interval in above:
            above[interval] += interval(sample, 0.95).high < math.exp(0.5)
    assert above[mean_of_skewed] < 0.7 * above[mean_interval]
    assert mean_of_skewed([2.0, 2.0], 0.95) == (2, 2, 2)
    for t, a in ((2.0, 0.3), (-2.0, 0.3), (2.0, -0.3)):  # the inverse of Hall's transformation, as published
        g = gates.untransformed(t, a)
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


BUSY = {"openvino": {"image": {"1": {"speedup": {"value": None, "reason": "the machine was busy"}}}}}


@pytest.mark.parametrize(
    ("run", "bars", "sentence", "reasons"),
    [
        (run_of(degenerate=[{"index": 3, "reason": "black"}]), BARS, "failed: degenerate", ["image 3 is black"]),
        (run_of(2, degenerate=None), {"min_speedup": 1.2}, "cannot be told: degenerate",
         ["the record does not say; make the run again"]),
        (run_of(8, fidelity__psnr__values=[None] * 8, fidelity__ssim__values=[1.0] * 8), {"min_psnr": 60.0},
         "passed", ["8 of 8 images are identical to full precision and count as 60.00 dB"]),
        (run_of(8, fidelity__psnr__values=[None, *[40.0] * 7]), {"min_psnr": 30.0}, "failed: min_psnr",
         ["1 of 8 images have no PSNR: 0"]),
        (run_of(latency=BUSY), {"min_speedup": 1, "speedup_margin": 0.1},
         "cannot be told: min_speedup, speedup_margin", ["the machine was busy"] * 2),
        (run_of(prompts=["the same"] * 64), {"min_psnr": 10.0}, "cannot be told: min_psnr; about 1 more prompts",
         ["at least 1 more prompts would tell"]),
    ],
)  # fmt: skip
def test_what_no_interval_decides_is_said(run, bars, sentence, reasons):
    gate = decide(run, run, bars)
    assert gate.sentence.startswith(sentence) and [each.reason for each in gate.verdicts if each.reason] == reasons


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


def test_a_folder_without_a_run_and_a_damaged_record_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no metrics.json"):
        read_run("run", tmp_path)
    with pytest.raises(ArtifactError, match="degenerate names image 2"):
        decide(run_of(2, degenerate=[{"index": 2}]), None, BARS)
    for damaged in ("{", json.dumps(run_of(3, fidelity__psnr__values=[1.0]).record)):
        (tmp_path / "metrics.json").write_text(damaged)
        with pytest.raises(ArtifactError, match="damaged"):
            read_run("run", tmp_path)


def test_the_verdicts_as_text_and_as_json():
    hostile = run_of(4, prompts=["\x1b[31m<&\x00\ud800", *"abc"], decibels=34.0)
    gate = decide(hostile, None, BARS | {"worst_psnr": 34.0})
    found = json_of(gate, 1)["criteria"]
    assert found[1]["more"] == gate.verdicts[1].more > 0
    assert found[0]["worst"][0]["prompt"] == hostile.record["prompts"][0]
    text = text_of(gate)
    assert text.splitlines()[-1] == "failed: worst_psnr" and "\x1b" not in text
    assert "min_psnr: 0," in text and "no file" in text
