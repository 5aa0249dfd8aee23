"""Intervals and p-values against SciPy, counted coverage and published tables."""

import math

import numpy as np
import pytest
from scipy import stats

from sd_quant.metrics import SCORES
from sd_quant.metrics.intervals import OPENING, Interval, holm, mean_interval, ratio_interval, sum_of
from sd_quant.metrics.latency import ROUNDS_OF_AN_OPENING as ROUNDS
from sd_quant.metrics.latency import Stopping, enough

pytestmark = pytest.mark.commit

RATIO, OPENED = 1.25, 0.02  # true speed-up; standard deviation of an engine's latency between openings


@pytest.mark.parametrize(("count", "level"), [(8, 0.9), (2, 1 - 1e-7), (4, 1 - 1e-9)])  # as many recipes share one
def test_a_mean_has_students_interval(count, level):
    values = np.random.default_rng(0).normal(35, 2, count)
    found = mean_interval(list(values), level)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(level)
    assert found == pytest.approx((values.mean(), low, high))


def test_of_few_rounds_a_figure_is_known_and_its_interval_is_not():
    assert mean_interval([3.0]) == mean_interval([3.0], 0.5) == (3.0, -math.inf, math.inf)
    assert ratio_interval([4.0, 4.0], [2.0, 2.0]) == (2.0, 0.0, math.inf)
    for openings in (1, 3):  # no two rounds differ, but other openings would
        reach = math.exp(1.96 * math.sqrt(2 / openings) * OPENING)
        found = ratio_interval([4.0] * 6, [2.0] * 6, [6 // openings] * openings)
        assert found == pytest.approx((2.0, 2.0 / reach, 2.0 * reach), rel=1e-4)


BEYOND = 1 + 1e-7  # by a sum in float32


@pytest.mark.parametrize(("score", "values", "ends"), [
    ("lpips", [0.001, 0.09], (0, 0.611)),
    ("ssim", [0.8, 0.99], (-0.312, 1)),
    ("ssim", [-0.99, 0.99], (-1, 1)),
    ("ssim", [BEYOND, BEYOND], (BEYOND, BEYOND)),
    ("psnr", [30.0, 40.0], (0, 98.531)),
    ("psnr", [30.0, None, 32.0], (18.294, 43.706)),
    ("lpips", [0.01, None], (-math.inf, math.inf)),
])  # fmt: skip
def test_an_interval_of_a_score_ends_where_the_score_does(score, values, ends):
    found = SCORES[score].mean(values)
    assert found.value == np.mean([value for value in values if value is not None])
    assert SCORES[score].mean([None]) is None
    assert (found.low, found.high) == pytest.approx(ends, abs=1e-3) and found.known == math.isfinite(ends[1])


def test_a_sum_takes_from_each_figure_the_side_that_counts():
    expected = 3, 3 - math.hypot(1, 3), 3 + math.hypot(4, 3)
    assert sum_of(Interval(1, 0, 5), Interval(2, -1, 5)) == pytest.approx(expected)
    assert sum_of(Interval(1, 0, 2), Interval(2, -math.inf, math.inf)) == (3, -math.inf, math.inf)


def drawn(engines: int, openings: int, rounds: int = 3) -> np.ndarray:
    """Latencies [engines, openings * rounds] whose openings differ by 3 %, and rounds by 1 %."""
    generator = np.random.default_rng(engines)
    opened = np.repeat(0.03 * generator.normal(size=(engines, openings)), rounds, axis=1)
    return np.exp(opened + 0.01 * generator.normal(size=opened.shape) + np.arange(engines)[:, None])


@pytest.mark.parametrize("openings", [10, 40])
def test_two_engines_have_students_interval_over_their_openings(openings):
    a, b = drawn(2, openings)
    medians = np.median(np.log(a / b).reshape(10, -1), axis=1)
    low, high = stats.ttest_1samp(medians, 0).confidence_interval(0.9)
    found = ratio_interval(a.tolist(), b.tolist(), [3] * openings, confidence=0.9)
    assert np.log(found) == pytest.approx((medians.mean(), low, high))


def test_engines_that_were_timed_beside_each_other_say_together_how_much_openings_differ():
    """By least squares, with a column for each engine and for each opening."""
    times, (engines, openings) = drawn(4, 4), (4, 4)
    centred = np.log(times) - np.log(times).mean(0)
    y = np.median(centred.reshape(engines, openings, 3), axis=2).ravel()
    columns = np.hstack([np.repeat(np.eye(engines), openings, 0), np.tile(np.eye(openings), (engines, 1))])
    left = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    half = stats.t(9).ppf(0.975) * math.sqrt(left @ left / 9) * math.sqrt(2 / openings)
    found = ratio_interval(times[1].tolist(), times[0].tolist(), [3] * 4, times.tolist())
    assert np.log(found.high) - np.log(found.value) == pytest.approx(half)
    with pytest.raises(ValueError):
        ratio_interval(times[1].tolist(), times[0].tolist(), [3] * 5, times.tolist())


def test_more_rounds_of_the_same_openings_do_not_make_an_interval_narrower_and_a_ratio_is_of_the_same_rounds():
    """A machine that gets three times slower half way changes no ratio."""
    few, many = (ratio_interval(*drawn(2, 10, rounds).tolist(), [rounds] * 10) for rounds in (3, 300))
    assert many.high / many.low > 1 + 0.6 * (few.high / few.low - 1)
    assert ratio_interval(*drawn(2, 60).tolist(), [3] * 60).within(0.02)  # more openings do
    drift = np.repeat([1.0, 3.0], 20)
    noisy = 2 * drift * np.exp(0.01 * np.random.default_rng(0).normal(size=40))
    assert ratio_interval(noisy, drift).within(0.04) and not ratio_interval(noisy, drift[::-1]).within(0.2)


def machine(generator: np.random.Generator, openings: int, engines: int = 2) -> np.ndarray:
    """Latencies [engines, rounds] on a machine with a neighbour; the first takes RATIO times as long as each other."""
    rounds, seconds = openings * ROUNDS, 2 * openings * ROUNDS
    timed = np.arange(seconds) % (seconds // openings) < ROUNDS  # the rest of the time engines are opened
    drift = np.exp(0.1 * np.cumsum(generator.normal(size=rounds)) / math.sqrt(rounds))
    opened = np.repeat(np.exp(OPENED * generator.normal(size=(engines, openings))), ROUNDS, axis=1)
    times = opened * drift * np.exp(0.04 * generator.normal(size=(engines, rounds)))
    # it comes and goes every ten seconds, and slows each call by up to a half
    there = np.cumsum(generator.random(seconds) < 0.1)[timed] % 2 == 1
    times *= np.where(there, 1 + generator.uniform(0, 1, (engines, rounds)), 1)
    times[0] *= RATIO
    return times


@pytest.mark.slow
def test_intervals_cover_what_they_say_although_openings_end_when_they_are_narrow():
    """93 % are within 2 of the standard errors that 150 draws have, 88.8 to 97.2."""
    generator, covered, stopping = np.random.default_rng(3), 0, Stopping(1, 0.03, 1e9, most=3 * 64)
    for _ in range(150):
        times, openings = machine(generator, 64), 4
        while enough(times[:, : 3 * openings].tolist(), stopping, 0, [3] * openings) is None:
            openings *= 2
        seen = times[:, : 3 * openings].tolist()
        covered += ratio_interval(seen[0], seen[1], [3] * openings, seen).holds(RATIO)
    assert 0.88 <= covered / 150 <= 1


@pytest.mark.parametrize(("values", "corrected"), [
    ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # Wikipedia, "Holm-Bonferroni method"
    ([0.01, 0.02, 0.03, 0.04, 0.05], [0.05, 0.08, 0.09, 0.09, 0.09]),  # as R's p.adjust
    ([0.01, 0.04, None, 0.03], [0.03, 0.06, None, 0.06]),
    ([0.6, 0.7], [1, 1]),
    ([], []),
])  # fmt: skip
def test_holms_correction(values, corrected):
    assert holm(values) == pytest.approx(corrected)


RANDOM = np.random.default_rng(0)
