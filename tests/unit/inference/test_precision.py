"""Which steps multiply unquantized inputs, on a sampler whose networks are functions."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from sd_quant.inference import reuse
from sd_quant.inference.precision import best_steps, predicted_gain, products_of_steps
from sd_quant.stages.precise_steps import choose_steps

from .toy import CHECKPOINT, SAMPLING, TEN, Toy, engines

pytestmark = pytest.mark.commit

WORST = (2, 8)  # steps in which the inputs' error is a hundred times as large
PROMPTS = ["a"] * 8


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(reuse, "pipeline_of", lambda checkpoint, variant: Toy(variant))
    Toy.calls = 0


def recipe(of_weights=1e-4):
    """Engines whose weights err by a little in all steps, and inputs more, most in the WORST steps."""
    full = engines()["unet"]

    def precise(at, text):
        return {"out": full(at, text)["out"] * (1 + of_weights)}

    def quantized(at, text):
        error = 0.1 if round(at.item()) in WORST else 0.001
        return {"out": precise(at, text)["out"] + error * (1 + 0.1 * text)[:, None, None]}

    return engines() | {"unet": quantized, "unet/h": precise, "unet/f": full}


def products():
    found = products_of_steps(CHECKPOINT, engines(), recipe(), PROMPTS[:4], SAMPLING)
    return torch.tensor(found, dtype=torch.float64)


def test_what_is_predicted_is_what_a_schedule_does():
    """The velocity does not depend on the latents here, so changes add up exactly."""
    for schedule in ("hcccccccch", "cchccccchc", TEN * "h"):
        precise = [step for step, letter in enumerate(schedule) if letter == "h"]
        chosen = choose_steps(CHECKPOINT, engines(), recipe(), PROMPTS, SAMPLING, [schedule], None)
        # one is over the sum of all images, the other the mean over images
        assert predicted_gain(products(), precise) == pytest.approx(chosen["candidates"][schedule], abs=0.2)
        assert chosen["reason"] is None and chosen["schedule"] == schedule and chosen["time"] is None


def test_calls_before_a_step_are_not_made_again():
    products()
    of_a_run = TEN * 2  # in two batches; the reference, all precise, and behind each step, itself included
    assert Toy.calls == 2 * of_a_run + 2 * sum(TEN - step - 1 for step in range(TEN)) + 2 * TEN


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_best_of_all_sets_is_found(seed, count):
    """Errors that cancel are found, which the sizes of single errors do not show."""
    errors = torch.randn(1 + 8, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    errors[5] = -errors[2]
    sets = {each: [0, *(1 + step for step in range(8) if step not in each)] for each in combinations(range(8), count)}
    sizes = {precise: errors[left].sum(0).norm().item() for precise, left in sets.items()}
    assert sizes[tuple(best_steps(errors @ errors.T, count))] <= sorted(sizes.values())[len(sizes) // 20]


def test_the_steps_that_err_most_are_chosen_and_gains_are_those_of_other_prompts():
    assert best_steps(products(), 2) == list(WORST)
    found = ["cchccccchc", "hcccccccch"]
    chosen = choose_steps(CHECKPOINT, engines(), recipe(), PROMPTS, SAMPLING, found, 0.05)
    assert chosen["schedule"] == chosen["tried"] == "cchccccchc" and chosen["prompts"] == 4
    assert chosen["time"] == pytest.approx(0.1) and chosen["reason"] is None
    mean, low, high = chosen["gain_db"]
    assert low <= mean <= high and mean == pytest.approx(chosen["candidates"]["cchccccchc"], rel=0.05)


@pytest.mark.parametrize(("reached", "used"), [(0.5, True), (1.0, False), (2.0, False), (None, False)])
def test_steps_that_other_ways_beat_are_not_used(reached, used):
    """A control that removes this share of what the steps remove; None is full precision in the same time."""
    best = "cchccccchc"

    def control(share):
        assert share == pytest.approx(0.1)

        def latents(numbers):
            full, plain, precise = (
                reuse.final_latents(CHECKPOINT, each, PROMPTS, numbers, replace(SAMPLING, schedule=schedule))
                for each, schedule in ((engines(), None), (recipe(), None), (recipe(), best))
            )
            left = ((precise - full).norm() / (plain - full).norm()) ** reached
            return full + left * (plain - full)

        return None if reached is None else latents

    chosen = choose_steps(CHECKPOINT, engines(), recipe(), PROMPTS, SAMPLING, [best], 0.05, {"another way": control})
    assert chosen["tried"] == best and chosen["schedule"] == (best if used else TEN * "c")
    assert (chosen["reason"] is None) == used and (used or "another way" in chosen["reason"])
    mean, low, _ = chosen["beyond_db"]["another way"]
    assert math.isfinite(mean) and (low > 0) == used
