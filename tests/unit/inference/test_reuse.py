from itertools import combinations

import pytest
import torch

from sd_quant.inference.reuse import (
    Replacement,
    answers_before,
    best_replacements,
    evenly_spread,
    replacements,
    schedule_of,
)
from sd_quant.inference.samplers import most_saved

STEPS = 9


def beside(chosen):
    return any(abs(a.step - b.step) < 2 for a, b in combinations(chosen, 2))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_sets_is_found(count, seed):
    """Errors that cancel are found, which the sizes of single errors do not show."""
    known = replacements(STEPS, extrapolated=True)
    errors = torch.randn(len(known), 5, generator=torch.Generator().manual_seed(seed))
    errors[3] = -errors[0]

    def error(chosen):
        return sum(errors[known.index(each)] for each in chosen).norm().item()

    found = best_replacements(known, errors, count)
    allowed = [each for each in combinations(known, count) if not beside(each)]
    assert len(found) == count and not beside(found)
    best = min(map(error, allowed))
    assert error(found) <= 1.25 * best + 1e-6  # exchanges may end beside the best
    assert error(found) < sorted(map(error, allowed))[len(allowed) // 10 + 1]


def test_neither_ends_nor_neighbours_are_replaced():
    assert {each.step for each in replacements(STEPS, extrapolated=True)} == set(range(1, STEPS - 1))
    assert min(each.step for each in replacements(STEPS, True) if each.letter == "e") == 2
    for steps in range(3, 40):
        for count in range(1, most_saved(steps) + 1):
            spread = evenly_spread(steps, count)
            assert not beside(spread) and 1 <= spread[0].step and spread[-1].step <= steps - 2, (steps, count)
    assert schedule_of(evenly_spread(9, 2), 9) == "ccrcccrcc"
    assert schedule_of([Replacement(2, "e"), Replacement(5, "r")], 7) == "ccecccr"[:5] + "rc"


def test_calls_before_the_replaced_step_are_answered_from_a_whole_run():
    """Of two batches of four steps with two calls each; other parts' calls are the same in every run."""
    whole = {"unet": [{"out": number} for number in range(16)], "clip": [{"z": 0}, {"z": 1}]}
    answer = answers_before(whole, "unet", step=2, steps=4, batches=2)
    answers = [answer("unet", number) for number in range(12)]
    assert [each and each["out"] for each in answers] == [0, 1, 2, 3, None, None, 8, 9, 10, 11, None, None]
    assert answer("clip", 1) == {"z": 1}
