"""What jobs measure together: every choice once, in entries that know what they are of."""

import pytest

from sd_quant.cache import Cache
from sd_quant.stages.shared import TOGETHER, Shared

pytestmark = pytest.mark.commit

FACTS = {"inputs": {}, "versions": {}, "machine": {"cpu": "a processor", "usable_cores": 2, "gpus": []}}
CHOICES = {f"layer{number}": [f"layer{number}"] for number in range(40)}


@pytest.fixture
def shared(tmp_path) -> Shared:
    return Shared(FACTS, tmp_path, Cache(tmp_path / "cache", 1e9))


def test_errors_are_measured_once_whoever_asks(shared, tmp_path):
    asked = []

    def error(quantized):
        asked.append(tuple(quantized))
        return 1 / (3 + len(asked))  # no round number

    first = shared.measured({"of": "one"}, CHOICES, error)
    assert asked == [(name,) for name in CHOICES] and list(first) == list(CHOICES)
    assert list(first.values()) == [1 / (4 + number) for number in range(40)], "to the bit"
    entries = len(list((tmp_path / "cache" / "sensitivities").glob("[!.]*")))
    assert TOGETHER <= entries <= 2 * TOGETHER, "enough for several processes, and not an entry each"
    assert shared.measured({"of": "one"}, CHOICES, error) == first and len(asked) == 40
    shared.measured({"of": "another"}, CHOICES, error)
    assert len(asked) == 80


def test_a_choice_is_known_by_its_layers(shared):
    """The curve of another recipe has the same names of points."""
    assert shared.measured({}, {"1": ["a", "b"]}, len) == {"1": 2}
    assert shared.measured({}, {"1": ["a"]}, len) == {"1": 1}


def test_what_is_found_is_json(shared):
    made = {"products": [[1.5, None]], "schedule": "cre"}
    assert shared.found("schedules", {"a": 1}, lambda: made) == made
    assert shared.found("schedules", {"a": 1}, lambda: pytest.fail("it is in the cache")) == made
