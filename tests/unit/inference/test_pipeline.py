"""The diffusers pipeline around engines that are simple functions."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FluxTransformer2DModel,
    HeunDiscreteScheduler,
    KDPM2DiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
    TaylorSeerCacheConfig,
)

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.inference.calls import Calls
from sd_quant.inference.requests import refusing_steps
from sd_quant.inference.source_images import SourceImages
from sd_quant.inference.tiles import decode
from sd_quant.models.parts import VaePart

from .conftest import PROMPTS, SAMPLING, Function

pytestmark = pytest.mark.commit


def test_images_are_decoded_in_tiles_where_that_is_asked_for(pipeline, engines):
    """By a decoder whose pixels depend on nothing around them, so that the images stay the same."""
    whole = pipeline(PROMPTS, SAMPLING)
    assert engines["vae"].calls.pop()["z"].shape[2:] == (8, 8)
    tiled = pipeline(PROMPTS, replace(SAMPLING, vae_tile=32))
    assert engines["vae"].calls.pop()["z"].shape[2:] == (2, 2) and len(engines["vae"].calls) > 9
    assert np.abs(tiled.images[0].astype(int) - whole.images[0]).max() <= 1
    assert "vae_tile" not in SAMPLING.described() and replace(SAMPLING, vae_tile=32).described()["vae_tile"] == 32


@pytest.mark.parametrize("batch_size", [1, 2])
def test_images_take_the_sizes_in_turn(pipeline, engines, batch_size):
    batches = []
    sizes, sampling = [(64, 64), (128, 64)], replace(SAMPLING, batch_size=batch_size)
    mixed = pipeline(PROMPTS, replace(sampling, sizes=sizes), on_batch=batches.append)
    assert batches == ([[0], [2], [1]] if batch_size == 1 else [[0, 2], [1]])
    assert [image.shape for image in mixed.images] == [(64, 64, 3), (64, 128, 3), (64, 64, 3)]
    for number, (image, latents) in enumerate(zip(mixed.images, mixed.latents, strict=True)):
        alone = pipeline(PROMPTS, replace(sampling, width=sizes[number % 2][0]))
        assert (image == alone.images[number]).all()
        torch.testing.assert_close(latents, alone.latents[number])
    engines["vae"].calls.clear()
    pipeline.image_of(PROMPTS, replace(SAMPLING, sizes=[(128, 64)]))  # of one size, as the calls that are timed
    assert [tuple(call["z"].shape) for call in engines["vae"].calls] == [(2, 4, 8, 8)]


@pytest.mark.parametrize(("given", "batch_size"), [(0, 2), (1, 2), (3, 1), (3, 2)])
def test_each_image_has_noise_of_its_own_seed_or_that_is_given(pipeline, engines, given, batch_size):
    seeded = [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5 + number)) for number in range(3)]
    noise = torch.randn(given, 4, 8, 8, generator=torch.Generator().manual_seed(1)) if given else torch.cat(seeded)
    pipeline(PROMPTS, replace(SAMPLING, batch_size=batch_size, latents=noise if given else None), decode=())
    starts = [call["x"][: len(call["x"]) // 2] for call in engines["unet_xl"].calls[:: SAMPLING.steps]]
    torch.testing.assert_close(torch.cat(starts), noise.expand(3, -1, -1, -1))


def test_batches_may_be_made_in_any_order(pipeline):
    def backwards(batches, make, also):
        assert batches == [[0, 1], [2]]
        return [make(place) for place in (1, 0)][::-1]

    made = pipeline(PROMPTS, SAMPLING, by_batch=backwards)
    expected = pipeline(PROMPTS, SAMPLING)
    assert np.array_equal(made.images, expected.images) and torch.equal(made.latents, expected.latents)


@pytest.mark.parametrize("kind", [StableDiffusionImg2ImgPipeline, StableDiffusionXLImg2ImgPipeline])
def test_an_image_takes_the_steps_that_diffusers_takes(kind):
    """Also where the nearest number is the next: 0.7 of 4 steps are 2."""
    for steps, strength in ((4, 0.7), (4, 0.6), (3, 0.5), (10, 1.0)):
        sampling = replace(SAMPLING, steps=steps, source=SourceImages(np.zeros((1, 8, 8, 3)), None, strength))
        scheduler = SimpleNamespace(timesteps=list(range(steps)), order=1)
        timesteps, taken = kind.get_timesteps(SimpleNamespace(scheduler=scheduler), steps, strength, None)
        assert sampling.steps_taken == taken == len(timesteps)


def test_what_decides_the_images_is_described(pipeline):
    described = SAMPLING.described()
    assert described["seed"] == 5 and described["latents"] is None
    noise = torch.zeros(1, 4, 8, 8)
    one, other = (replace(SAMPLING, latents=latents).described() for latents in (noise, noise + 1))
    assert one | {"latents": None} == described
    assert len({one["latents"], other["latents"], None}) == 3
    json.dumps(one)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_negative_prompts_are_the_unconditional_half_in_turn(pipeline, engines, batch_size):
    negatives = ["a", "bbbbb"]  # the tokenizer here gives their lengths
    pipeline(PROMPTS, replace(SAMPLING, batch_size=batch_size, negative_prompts=negatives), decode=())
    contexts = []
    for call in engines["unet_xl"].calls[:: SAMPLING.steps]:
        images = len(call["x"]) // 2
        contexts += call["context"][:images, 0, 0].tolist()
        assert (call["y"][:images, 0] == 1).all()  # without a negative prompt it is all zeros
        assert call["context"][images:, 0, 0].tolist() == [len(prompt) for prompt in PROMPTS][: len(contexts)][-images:]
    assert contexts == [1, 5, 1]


@pytest.mark.parametrize(("scheduler", "calls"), [
    (EulerDiscreteScheduler(), [0, 1, 2]), (DPMSolverMultistepScheduler(), [0, 1, 2]),
    (HeunDiscreteScheduler(), [0, 0, 1, 1, 2]), (KDPM2DiscreteScheduler(), [0, 0, 1, 1, 2]),
    (PNDMScheduler(skip_prk_steps=True), [0, 0, 1, 2]),  # once more than it has steps
])  # fmt: skip
def test_steps_are_counted_by_the_samplers_calls(build, engines, scheduler, calls):
    counted = []
    generated = build(scheduler)(PROMPTS, SAMPLING, decode=(), on_step=counted.append)
    assert counted == calls * 2  # for the next batch from 0 again
    assert len(engines["unet_xl"].calls) == len(counted) == 2 * generated.latents.shape[1]


@pytest.mark.parametrize(
    ("numbers", "until", "named"), [(None, 700, "prompt 1 at step 1"), ([2, 0], 1000, "prompt 0 at step 0")]
)
def test_a_latent_that_is_not_finite_is_named_by_the_prompts_own_number(pipeline, engines, numbers, until, named):
    def broken(x, timesteps, context, y):
        out = 0.1 * x
        if timesteps[0] < until:
            out[-1] = torch.nan
        return {"out": out}

    engines["unet_xl"].function = broken
    with pytest.raises(SdQuantError, match=f"not finite for {named}"):
        pipeline(PROMPTS, SAMPLING, numbers=numbers)


def test_an_image_that_is_not_finite_is_named(pipeline, engines):
    whole = engines["vae"].function
    engines["vae"].function = lambda z: {"dec": whole(z)["dec"].index_fill(0, torch.tensor([len(z) - 1]), torch.inf)}
    with pytest.raises(SdQuantError, match="vae gave an image that is not finite for prompt 1, of latents that are"):
        pipeline(PROMPTS, SAMPLING)


def test_long_prompts_are_told_of(pipeline, caplog):
    pipeline.call.tokenizer.unpadded = 90
    with caplog.at_level("WARNING"):
        pipeline(["long"], SAMPLING, decode=())
    assert "1 of 1 prompts are longer than the 77 tokens that are read (the longest has 90)" in caplog.text


@pytest.mark.parametrize(("height", "width"), [(20, 12), (8, 8), (9, 30)])
def test_tiles_are_those_of_diffusers(height, width):
    torch.manual_seed(0)
    widths, kinds = (8, 8, 8, 8), ["UpDecoderBlock2D"] * 4
    vae = AutoencoderKL(
        block_out_channels=widths, norm_num_groups=4, sample_size=64, up_block_types=kinds,
        down_block_types=["DownEncoderBlock2D"] * 4,
    ).eval()  # fmt: skip
    vae.enable_tiling()
    part, sizes = VaePart(vae), []

    def decoder(z):
        sizes.append(tuple(z.shape[2:]))
        return part(z)

    z = torch.randn(2, 4, height, width)
    with torch.no_grad():
        expected = vae.decode(z).sample
        torch.testing.assert_close(decode(decoder, z, 64), expected, rtol=0, atol=1e-5)
        assert max(map(max, sizes)) == 8
        whole = decoder(z)
    assert sizes[-1] == (height, width)
    assert ((whole - expected).abs().max() > 1e-3) == (max(height, width) > 8)


# Schedules of calls, compared with diffusers' own TaylorSeer, call by call


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
    calls = Calls(f"ccc{letter}c{letter}{letter}c{letter}", lambda: len(done))
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
    calls = Calls("crc", lambda: len(done) - 1)
    for _ in range(3):
        outputs = [calls(lambda inputs, letter: {"out": torch.tensor(next(made))}, {}) for _ in range(2)]
        given.append([each["out"].item() for each in outputs])
        done.append(0)
    assert given == [[0, 1], [0, 1], [2, 3]]


def test_another_image_begins_anew(pipeline, engines):
    """No output of one batch is used in the next, and none stays when the schedule goes."""
    plain = pipeline(PROMPTS, SAMPLING).latents
    alone = [pipeline(PROMPTS, replace(SAMPLING, schedule="crc"), numbers=[number]).latents[0] for number in range(3)]
    together = pipeline(PROMPTS, replace(SAMPLING, schedule="crc", batch_size=1)).latents
    torch.testing.assert_close(together, torch.stack(alone))
    torch.testing.assert_close(pipeline(PROMPTS, SAMPLING).latents, plain)


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
    calls, step = Calls("chr", iter(range(3)).__next__), {"c": 1.0, "h": 2.0}
    outputs = [calls(lambda inputs, letter: {"out": torch.tensor(step[letter])}, {})["out"].item() for _ in "chr"]
    assert outputs == [1.0, 2.0, 2.0]
    del engines["unet_xl/h"]
    assert not torch.allclose(pipeline(PROMPTS[:1], replace(SAMPLING, steps=4)).latents, made.latents)
