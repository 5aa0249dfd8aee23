"""Means and paired differences by category, against SciPy and a published table."""

import numpy as np
import pytest
from scipy import stats

from sd_quant.metrics.categories import by_category, p_value

pytestmark = pytest.mark.commit

RANDOM = np.random.default_rng(0)


def test_p_values_are_scipys():
    for count, shift in ((2, 0.1), (5, 0.0), (30, 0.4), (200, 3.0)):
        differences = list(RANDOM.normal(shift, 1, count))
        expected = stats.ttest_1samp(differences, 0).pvalue
        assert p_value(differences) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    differences = [0.5] * 5  # without a deviation they have the sign test's p
    assert p_value(differences) == stats.binomtest(0, 5).pvalue == 2**-4
    assert p_value([0.0] * 5) == 1 and p_value([0.3]) is None


PROMPTS = [f"prompt {number}" for number in range(40)]
CATEGORIES = ["text" if number % 2 else "faces" for number in range(40)]
FULL = list(RANDOM.normal(0.6, 0.2, 40))
OWN = [
    x - (0.1 if of == "text" else 0) + e for x, of, e in zip(FULL, CATEGORIES, RANDOM.normal(0, 0.1, 40), strict=True)
]


def test_a_category_has_its_mean_and_its_paired_difference():
    found = by_category(PROMPTS, CATEGORIES, {"ocr": (OWN, FULL), "psnr": (OWN, None)})
    assert list(found) == ["ocr", "psnr"] and list(found["ocr"]) == ["faces", "text"]
    assert found["psnr"]["text"].keys() == {"prompts", "mean", "interval"}
    for category, entry in found["ocr"].items():
        own, full = (np.array(each)[[of == category for of in CATEGORIES]] for each in (OWN, FULL))
        test = stats.ttest_rel(own, full)
        assert entry["prompts"] == 20 and entry["mean"] == pytest.approx(own.mean())
        assert entry["interval"] == pytest.approx(list(stats.ttest_1samp(own, 0).confidence_interval()))
        assert entry["difference"] == pytest.approx((own - full).mean())
        assert entry["difference_interval"] == pytest.approx(list(test.confidence_interval()))
        assert entry["differs"] == (category == "text")
        assert entry["p"] == pytest.approx(test.pvalue * (2 if category == "text" else 1))


def test_what_differs_alone_does_not_among_many():
    """A p of 0.02 in one of ten categories is what chance gives."""
    pair = [0.1, 0.3, -0.02, 0.2, 0.15, 0.25, -0.05, 0.1]
    assert 0.004 < (p := p_value(pair)) < 0.05
    values = {"ocr": (pair, [0.0] * 8)}
    assert by_category(PROMPTS[:8], ["x"] * 8, values)["ocr"]["x"]["differs"]
    rest = [value for _ in range(9) for value in (0.1, -0.1, 0.05, -0.05, 0.1, -0.1, 0.02, -0.02)]
    prompts = [f"prompt {number}" for number in range(80)]
    found = by_category(prompts, [f"{number // 8}" for number in range(80)], {"ocr": (pair + rest, [0.0] * 80)})["ocr"]
    assert found["0"]["p"] == pytest.approx(10 * p) and not found["0"]["differs"]
    low, high = found["0"]["difference_interval"]
    assert low > 0, "its own interval leaves out zero"


def test_images_of_one_prompt_are_one_and_those_without_a_value_none():
    found = by_category(
        ["a", "a", "b", "c", "d"], ["x", "x", "x", "x", "y"],
        {"ocr": ([0.2, 0.4, 0.7, None, None], [0.1, 0.1, None, 0.5, 0.5]), "clip_score": ([None] * 5, [None] * 5)},
    )  # fmt: skip
    assert found.keys() == {"ocr"} and found["ocr"].keys() == {"x"}
    entry = found["ocr"]["x"]
    assert entry["prompts"] == 2 and entry["mean"] == pytest.approx((0.3 + 0.7) / 2)
    assert (entry["difference"], entry["difference_interval"], entry["p"]) == (pytest.approx(0.2), None, None)
    assert "differs" not in entry
    assert by_category(["a"], None, {"ocr": ([1], [1])}) == {}
    entry = by_category(["a", "b"], ["x", "x"], {"ocr": ([0.0, 0.8], None)})["ocr"]["x"]
    assert entry == {"prompts": 2, "mean": 0.4, "interval": [0, 1]}, "it ends where the score's range does"
