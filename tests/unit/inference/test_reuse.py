"""Reused outputs and precise steps, on a sampler whose networks are functions."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from sd_quant.inference import reuse
from sd_quant.inference.calls import Calls
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.precision import best_steps, predicted_gain, products_of_steps
from sd_quant.inference.reuse import (
    Replacement,
    best_replacements,
    candidates,
    changed_by,
    choose_schedule,
    evenly_spread,
    products_of,
    replacements,
    schedule_of,
    typical_error,
)
from sd_quant.inference.schedules import engine_of_letter, most_saved
from sd_quant.stages.precise_steps import choose_steps

pytestmark = pytest.mark.commit

STEPS, TEN = 9, 10
TEN_STEPS = Sampling(steps=TEN, guidance_scale=1, height=64, width=64, batch_size=2, seed=0)
CHECKPOINT = SimpleNamespace(family=SimpleNamespace(DENOISER="unet"))
JUMPS = (3, 7)  # the velocity changes there alone; elsewhere an output that is used again costs nothing


class Toy:
    """A pipeline of Euler steps. The text encoder is asked once a batch, the denoiser once a step."""

    calls = 0

    def __init__(self, engines):
        self.engines = engines

    def __call__(self, prompts, sampling, *, numbers, decode, on_step):
        latents = [self.image(batch, sampling, on_step) for batch in sampling.batches(list(numbers))]
        return SimpleNamespace(latents=torch.cat(latents))

    def image(self, numbers, sampling, on_step):
        text = self.engines["clip"](number=torch.tensor(numbers, dtype=torch.float))["z"]
        done, x = [], torch.zeros(len(numbers), 1, 1)
        calls = Calls(sampling.schedule or sampling.steps * "c", lambda: len(done))
        for step in range(sampling.steps):
            on_step(step)
            at = torch.tensor(step * TEN / sampling.steps)
            output = calls(
                lambda inputs, letter: self.engines[engine_of_letter("unet", letter)](**inputs),
                {"at": at, "text": text},
            )["out"]
            x = x + output / sampling.steps
            done.append(x)
        return torch.stack(done, dim=1)


def engines():
    def unet(at, text):
        Toy.calls += 1
        return {"out": (1 + sum((at >= jump).float() for jump in JUMPS) + 0.01 * text)[:, None, None]}

    return {"clip": lambda number: {"z": number}, "unet": unet}


def beside(chosen):
    return any(abs(a.step - b.step) < 2 for a, b in combinations(chosen, 2))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_sets_is_found(count, seed):
    """Errors that cancel are found, which the sizes of single errors do not show."""
    known = replacements(STEPS)
    errors = torch.randn(len(known), 5, generator=torch.Generator().manual_seed(seed))
    errors[3] = -errors[0]

    def error(chosen):
        return sum(errors[known.index(each)] for each in chosen).norm().item()

    found = best_replacements(known, (errors @ errors.T).double(), count)
    allowed = [each for each in combinations(known, count) if not beside(each)]
    assert len(found) == count and not beside(found)
    best = min(map(error, allowed))
    assert error(found) <= 1.25 * best + 1e-6  # exchanges may end beside the best
    assert error(found) < sorted(map(error, allowed))[len(allowed) // 10 + 1]


def test_neither_ends_nor_neighbours_are_replaced():
    assert {each.step for each in replacements(STEPS)} == set(range(1, STEPS - 1))
    assert min(each.step for each in replacements(STEPS) if each.letter == "e") == 2
    for steps in range(3, 40):
        for count in range(1, most_saved(steps) + 1):
            spread = evenly_spread(steps, count)
            assert not beside(spread) and 1 <= spread[0].step and spread[-1].step <= steps - 2, (steps, count)
    assert schedule_of(evenly_spread(9, 2), 9) == "ccrcccrcc"
    assert schedule_of([Replacement(2, "e"), Replacement(5, "r")], 7) == "ccecccr"[:5] + "rc"


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(reuse, "pipeline_of", lambda checkpoint, variant: Toy(variant))
    Toy.calls = 0


def chosen(unquantized, recipe, prompts, saved):
    half = prompts // 2
    errors = products_of(changed_by(CHECKPOINT, unquantized, ["a"] * half, TEN_STEPS, replacements(TEN))[1])
    found = candidates(errors, TEN, saved)
    return choose_schedule(CHECKPOINT, unquantized, recipe, ["a"] * prompts, TEN_STEPS, found, half)


def test_steps_are_replaced_where_it_costs_nothing():
    found = chosen(engines(), engines(), 8, saved=3)
    assert found["schedule"].count("c") == 7 and all(found["schedule"][jump] == "c" for jump in JUMPS)
    assert "rr" not in found["schedule"] and found["schedule"][0] == found["schedule"][-1] == "c"
    assert found["error"] < 1e-6 < found["fewer_error"] and found["prompts"] == 4
    assert found["candidates"][found["schedule"]] == min(found["candidates"].values())


def test_lines_are_drawn_unless_the_recipes_noise_speaks_against_it():
    """A velocity that rises steadily has no error on a line; noise of a recipe is held as it is, or multiplied."""
    noise = torch.Generator().manual_seed(0)

    def rising(loud):
        def unet(at, text):
            return {"out": (at + 0.01 * text + loud * torch.randn(1, generator=noise))[:, None, None]}

        return engines() | {"unet": unet}

    drawn = chosen(rising(0), rising(0), 4, saved=3)
    assert drawn["schedule"].count("e") == 3 and drawn["error"] < 1e-5 < drawn["even_error"]
    held = [chosen(rising(0), rising(20), 32, saved=3)["schedule"].count("e") for _ in range(3)]
    assert min(held) == 0


def test_fewer_steps_are_as_many_as_the_schedule_computes(monkeypatch):
    """Of a source image's steps only the last are taken."""
    asked = []
    monkeypatch.setattr(reuse, "final_latents", lambda *given: asked.append(given[-1]) or torch.ones(1, 1))
    sampling = replace(TEN_STEPS, steps=2 * TEN, source=SimpleNamespace(strength=0.5))
    choose_schedule(CHECKPOINT, {}, {}, ["a"] * 2, sampling, ["crccrccrcc"], 1)
    assert (asked[-1].steps, asked[-1].steps_taken, asked[-1].schedule) == (14, 7, None)


def test_an_image_of_another_composition_does_not_decide_the_error():
    reference = torch.ones(4, 2)
    assert typical_error(reference, reference * torch.tensor([[1.1], [1.1], [1.1], [3.0]])) == pytest.approx(
        (0.1**3 * 2) ** 0.25, rel=1e-4
    )
    assert typical_error(reference, reference) < 1e-9


WORST = (2, 8)  # steps in which the inputs' error is a hundred times as large
PROMPTS = ["a"] * 8


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
    found = products_of_steps(CHECKPOINT, engines(), recipe(), PROMPTS[:4], TEN_STEPS)
    return torch.tensor(found, dtype=torch.float64)


def test_what_is_predicted_is_what_a_schedule_does():
    """The velocity does not depend on the latents here, so changes add up exactly."""
    for schedule in ("hcccccccch", "cchccccchc", TEN * "h"):
        precise = [step for step, letter in enumerate(schedule) if letter == "h"]
        chosen = choose_steps(CHECKPOINT, engines(), recipe(), PROMPTS, TEN_STEPS, [schedule])
        # one is over the sum of all images, the other the mean over images
        assert predicted_gain(products(), precise) == pytest.approx(chosen["candidates"][schedule], abs=0.2)
        assert chosen["schedule"] == schedule


def test_calls_before_a_step_are_not_made_again():
    products()
    of_a_run = TEN * 2  # in two batches; the reference, all precise, and behind each step, itself included
    assert Toy.calls == 2 * of_a_run + 2 * sum(range(TEN)) + 2 * TEN


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_best_steps_of_all_sets_are_found(seed, count):
    """Errors that cancel are found, which the sizes of single errors do not show."""
    errors = torch.randn(1 + 8, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    errors[5] = -errors[2]
    sets = {each: [0, *(1 + step for step in range(8) if step not in each)] for each in combinations(range(8), count)}
    sizes = {precise: errors[left].sum(0).norm().item() for precise, left in sets.items()}
    assert sizes[tuple(best_steps(errors @ errors.T, count))] <= sorted(sizes.values())[len(sizes) // 20]


def test_the_steps_that_err_most_are_chosen_and_gains_are_those_of_other_prompts():
    assert best_steps(products(), 2) == list(WORST)
    found = ["cchccccchc", "hcccccccch"]
    chosen = choose_steps(CHECKPOINT, engines(), recipe(), PROMPTS, TEN_STEPS, found)
    assert chosen["schedule"] == "cchccccchc" and chosen["prompts"] == 4
    mean, low, high = chosen["gain_db"]
    assert low <= mean <= high and mean == pytest.approx(chosen["candidates"]["cchccccchc"], rel=0.05)
