"""Intervals against scipy's t test, against counted coverage, and where nothing can be known."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks import coverage
from sd_quant.metrics.intervals import OPENING, Interval, mean_interval, ratio_interval, sum_of
from sd_quant.metrics.latency import Stopping, enough


def test_a_mean_has_students_interval():
    values = np.random.default_rng(0).normal(35, 2, 8)
    found = mean_interval(list(values), 0.9)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert found == pytest.approx((values.mean(), low, high))


def test_of_few_rounds_a_figure_is_known_and_its_interval_is_not():
    assert mean_interval([3.0]) == mean_interval([3.0], 0.5) == (3.0, -math.inf, math.inf)
    assert ratio_interval([4.0, 4.0], [2.0, 2.0]) == (2.0, 0.0, math.inf)
    reach = math.exp(1.96 * math.sqrt(2) * OPENING)  # no two rounds differ, but another opening would
    assert ratio_interval([4.0] * 5, [2.0] * 5) == pytest.approx((2.0, 2.0 / reach, 2.0 * reach), rel=1e-4)


def test_a_ratio_is_of_the_same_rounds():
    """A machine that gets three times slower half way changes no ratio."""
    drift = np.repeat([1.0, 3.0], 20)
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=40))
    assert ratio_interval(2 * drift * noise, drift).within(0.02)
    assert not ratio_interval(2 * drift * noise, drift[::-1]).within(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quiet", "hiccups", "neighbour"])
def test_intervals_cover_what_they_say_although_rounds_end_when_they_are_narrow(kind):
    """95 % are within 2 of the standard errors that 150 draws have, 91.4 to 98.6; the benchmark has 1,000."""
    generator, covered, stopping = np.random.default_rng(3), 0, Stopping(20, 0.02, 1e9, most=640)
    for _ in range(150):
        a, b = coverage.machine(generator, 640, kind)
        rounds = 20
        while enough([a[:rounds], b[:rounds]], stopping, 0) is None:
            rounds *= 2
        covered += ratio_interval(a[:rounds], b[:rounds]).holds(coverage.RATIO)
    assert 0.91 <= covered / 150 <= 0.99


def test_a_sum_takes_from_each_figure_the_side_that_counts():
    assert sum_of(Interval(1, 0, 5), Interval(2, -1, 5)) == pytest.approx(
        (3, 3 - math.hypot(1, 3), 3 + math.hypot(4, 3))
    )
    value, low, high = sum_of(Interval(1, 0, 2), Interval(2, -math.inf, math.inf))
    assert (value, low, high) == (3, -math.inf, math.inf)
