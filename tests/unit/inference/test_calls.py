"""Schedules of calls, compared with diffusers' own TaylorSeer, call by call."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxTransformer2DModel, PNDMScheduler, TaylorSeerCacheConfig

from sd_quant.errors import ArtifactError
from sd_quant.inference.calls import Calls
from sd_quant.inference.requests import refusing_steps

from .conftest import PROMPTS, SAMPLING, Function

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(("order", "letter"), [(0, "r"), (1, "e")])
def test_taylorseer_on_the_output_is_the_same(order, letter):
    """diffusers' own, on a network of Flux, at an interval of 3: the outputs of all calls."""
    torch.manual_seed(0)
    flux = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    text, pooled, ids = torch.randn(1, 3, 32, generator=draw), torch.randn(1, 32, generator=draw), torch.zeros(4, 3)

    def compute(inputs, letter="c"):
        output, *_ = flux(inputs["x"], text, pooled, inputs["time"], ids, torch.zeros(3, 3), return_dict=False)
        return {"out": output}

    given = [{"x": torch.randn(1, 4, 4, generator=draw), "time": torch.tensor([1 - n / 9])} for n in range(9)]
    done, ours = [], []
    calls = Calls(f"ccc{letter}c{letter}{letter}c{letter}", lambda: len(done), lambda step: True, ())
    with torch.no_grad():
        for inputs in given:
            ours.append(calls(compute, inputs)["out"])
            done.append(inputs)
        flux.enable_cache(TaylorSeerCacheConfig(
            cache_interval=3, disable_cache_before_step=3, max_order=order, use_lite_mode=True,
            taylor_factors_dtype=torch.float32,
        ))  # fmt: skip
        with flux.cache_context("one"):
            theirs = [compute(inputs)["out"] for inputs in given]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(theirs[3], theirs[2]) or order == 0


def test_calls_of_one_step_are_told_apart():
    """Pipelines that are observed may call their network once for each half: each uses its own last output."""
    done, made, given = [0], iter(range(100)), []
    calls = Calls("crc", lambda: len(done) - 1, lambda step: True, ())
    for _ in range(3):
        outputs = [calls(lambda inputs, letter: {"out": torch.tensor(next(made))}, {}) for _ in range(2)]
        given.append([each["out"].item() for each in outputs])
        done.append(0)
    assert given == [[0, 1], [0, 1], [2, 3]]


def test_an_image_that_is_guided_to_a_noise_level_has_half_calls_below_it(pipeline, engines):
    """The conditional half alone is computed, and what the sampler gets is what guidance by 1 gives."""
    guided = pipeline(PROMPTS[:1], replace(SAMPLING, steps=4))
    levels = pipeline.call.pipe.scheduler.sigmas.tolist()
    engines["unet_xl"].calls.clear()
    half = pipeline(PROMPTS[:1], replace(SAMPLING, steps=4, guidance_until=(levels[1] + levels[2]) / 2))
    calls = engines["unet_xl"].calls
    assert [len(call["x"]) for call in calls] == [2, 2, 1, 1]
    assert (calls[2]["context"] == calls[1]["context"][1]).all() and (calls[0]["context"][0] == 0).all()
    torch.testing.assert_close(half.latents[:, :2], guided.latents[:, :2])
    assert not torch.allclose(half.latents[:, 2], guided.latents[:, 2])
    engines["unet_xl"].calls.clear()
    pipeline(PROMPTS, replace(SAMPLING, steps=4, guidance_until=levels[1], schedule="crcc"))
    assert [len(call["x"]) for call in engines["unet_xl"].calls] == [4, 2, 2, 2, 1, 1]  # two batches, of 2 and of 1


def test_another_image_begins_anew(pipeline, engines):
    """No output of one batch is used in the next, and none stays when the schedule goes."""
    plain = pipeline(PROMPTS, SAMPLING).latents
    alone = [pipeline(PROMPTS, replace(SAMPLING, schedule="crc"), numbers=[number]).latents[0] for number in range(3)]
    together = pipeline(PROMPTS, replace(SAMPLING, schedule="crc", batch_size=1)).latents
    torch.testing.assert_close(together, torch.stack(alone))
    torch.testing.assert_close(pipeline(PROMPTS, SAMPLING).latents, plain)


def test_another_sampler_is_taken_and_put_back(pipeline):
    own = pipeline(PROMPTS, SAMPLING).latents
    other = pipeline(PROMPTS, replace(SAMPLING, sampler="dpmpp_2m", steps=5)).latents
    assert other.shape[1] == 5 and type(pipeline.call.pipe.scheduler).__name__ == "DPMSolverMultistepScheduler"
    torch.testing.assert_close(pipeline(PROMPTS, SAMPLING).latents, own)
    described = replace(SAMPLING, sampler="euler", schedule="crc").described()
    assert described.items() >= {"sampler": "euler", "schedule": "crc"}.items()
    assert not {"sampler", "schedule", "guidance_until"} & SAMPLING.described().keys()


def test_a_scheduler_whose_entries_allow_no_such_steps_is_refused():
    for call in (lambda made: made.set_timesteps(2), lambda made: made.step(None, 0, None)):
        made = PNDMScheduler(skip_prk_steps=False)
        sentence = "^PNDMScheduler fails .*; mend the folder's scheduler, or take"
        with refusing_steps(SimpleNamespace(scheduler=made)), pytest.raises(ArtifactError, match=sentence):
            call(made)


def test_steps_of_another_precision_have_an_engine_of_their_own(pipeline, engines):
    """A part without such an engine has one for all letters. Reused is the last output, whoever computed it."""
    own, precise = engines["unet_xl"], Function("unet_xl/h", lambda x, **_: {"out": 0.2 * x})
    engines["unet_xl/h"] = precise
    made = pipeline(PROMPTS[:1], replace(SAMPLING, steps=4, schedule="chrf"))
    assert len(own.calls) == 2 and len(precise.calls) == 1
    calls, step = Calls("chr", iter(range(3)).__next__, lambda step: True, ()), {"c": 1.0, "h": 2.0}
    outputs = [calls(lambda inputs, letter: {"out": torch.tensor(step[letter])}, {})["out"].item() for _ in "chr"]
    assert outputs == [1.0, 2.0, 2.0]
    levels = pipeline.call.pipe.scheduler.sigmas.tolist()
    pipeline(PROMPTS[:1], replace(SAMPLING, steps=4, schedule="cchh", guidance_until=levels[3]))
    assert [len(call["x"]) for call in precise.calls[1:]] == [2, 1], "the last step computes one half"
    del engines["unet_xl/h"]
    assert not torch.allclose(pipeline(PROMPTS[:1], replace(SAMPLING, steps=4)).latents, made.latents)
