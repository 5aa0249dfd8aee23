"""What is refused of images before a checkpoint is opened, and by the structure of the one that is open."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.errors import ConfigError
from sd_quant.models.family import Family
from sd_quant.stages.checks import (
    check_batch,
    check_guidance,
    check_latents,
    check_mask,
    check_request,
    check_sizes,
    check_steps,
    check_tile,
)
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.session import open_unchecked
from tests import presets
from tests.presets import infer_job

from ...zoo.families import TINY, VARIANTS

pytestmark = [pytest.mark.commit, pytest.mark.slow]

PROMPTS = "infer.prompts=[a cat, a dog]"


@cache
def job(*overrides: str):
    """Nobody changes it."""
    return infer_job(PROMPTS, *overrides)


def test_a_family_without_an_unconditional_half_takes_no_negative_prompt(tmp_path):
    (tmp_path / "model_index.json").touch()
    flux = ["model=flux", f"model.path={tmp_path}"]
    refused = job(*flux, "infer.negative_prompt=rain")
    sentence = (
        "^infer.negative_prompt is rain, expected null, because the guidance of flux is an input of its network, which "
        "reads no second text$"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_request(refused.model, refused.infer)
    for taken in (job(*flux), job("infer.negative_prompt=rain")):
        check_request(taken.model, taken.infer)


def test_a_prompt_with_a_word_whose_embedding_a_lora_brings_is_refused(tmp_path):
    save_file(
        {"bundle_emb.dog.clip_l": torch.ones(1, 4), "bundle_emb.do.t5": torch.ones(1, 4)}, tmp_path / "a.safetensors"
    )
    lora = f"model.loras=[{tmp_path / 'a.safetensors'}]"
    refused, taken = job(lora), infer_job("infer.prompts=[a doggy]", lora)
    with pytest.raises(ConfigError, match=r"^model.loras is .*a.safetensors, expected prompts without dog, because"):
        check_request(refused.model, refused.infer)
    check_request(taken.model, taken.infer)


@pytest.fixture
def noise(tmp_path):
    """Writes noise of a shape and returns the knob that names it."""

    def written(*shape: int) -> str:
        torch.save(torch.zeros(shape), tmp_path / "noise.pt")
        return f"infer.latents={tmp_path / 'noise.pt'}"

    return written


@pytest.mark.parametrize(
    ("number", "samples", "taken"), [(1, 1, True), (2, 1, True), (3, 1, False), (4, 2, True), (1, 2, False)]
)
def test_there_is_one_noise_for_each_image_or_one_for_all(noise, number, samples, taken):
    """With one for all, the samples of a prompt would be one image. It has the size of the images."""
    asked = job(noise(number, 4, 8, 8), f"infer.num_samples={samples}")
    if taken:
        check_request(asked.model, asked.infer)
        assert sampling_of(asked.infer).latents.shape == (number, 4, 8, 8)
        wide = replace(asked.infer, width=128)
        with pytest.raises(ConfigError, match=r"channels, 8, 16\]"):
            check_request(asked.model, wide)
        return
    expected = "4" if samples == 2 else "1 or 2"
    with pytest.raises(ConfigError, match=rf"holds a tensor \[{number}, 4, 8, 8\], expected \[{expected}, channels"):
        check_request(asked.model, asked.infer)


def test_noise_of_another_autoencoder_is_refused_when_the_checkpoint_is_opened(noise, checkpoint):
    """And for a pipeline that draws its own, of another number of channels or not: nobody knows how it packs them."""
    asked = job(noise(1, 16, 8, 8))
    check_request(asked.model, asked.infer)  # which does not know the checkpoint
    sentence = "noise.pt holds 16 channels, and the latents of this checkpoint have 4; make"
    with pytest.raises(ConfigError, match=sentence):
        check_latents(checkpoint, asked.infer)
    asked = job(noise(1, 4, 8, 8))
    check_latents(checkpoint, asked.infer)
    with pytest.raises(ConfigError, match="^infer.latents is .*noise.pt, expected null with model=diffusers, because"):
        check_latents(OBSERVED, asked.infer)
    for opened in (checkpoint, OBSERVED):
        check_latents(opened, job().infer)


class Alone(Family):
    UNEQUAL, OWN_NOISE = "this pipeline takes one prompt at a time", True


OBSERVED = SimpleNamespace(family=Alone())
# A pipeline whose graph of one part serves one batch, and that of another one size
IN_GRAPHS = SimpleNamespace(
    family=SimpleNamespace(UNEQUAL=None, ONE_BATCH="vae", ONE_SIZE=("transformer", 64, 128), DENOISER="transformer"),
    parts=lambda: {"transformer": SimpleNamespace(contract=SimpleNamespace(latents=None))},
)


def of_size(width: int, height: int) -> SimpleNamespace:
    return SimpleNamespace(width=width, height=height, sizes=None)


TILED, WHOLE = (SimpleNamespace(vae_tile=tile) for tile in (32, None))


@pytest.mark.parametrize(
    ("check", "opened", "given"),
    [
        (check_batch, None, ("infer.batch_size", 8)),
        (check_batch, OBSERVED, ("infer.batch_size", 1)),
        (check_batch, IN_GRAPHS, ("infer.batch_size", 1)),
        (check_batch, IN_GRAPHS, ("quantize.batch_size", 8)),  # which torch computes
        (check_sizes, IN_GRAPHS, ("infer", of_size(64, 128))),
        (check_sizes, IN_GRAPHS, ("model", of_size(128, 128))),
        (check_mask, OBSERVED, ("model.calibration_", None)),
        (check_steps, None, ("quantize.n_steps", 1000)),
        (check_tile, None, (TILED,)),
        (check_tile, OBSERVED, (WHOLE,)),
    ],
)
def test_what_a_checkpoint_can_do_is_taken(checkpoint, check, opened, given):
    """None stands for the checkpoint that ships."""
    check(opened or checkpoint, *given)


@pytest.mark.parametrize(
    ("check", "opened", "given", "sentence"),
    [
        (check_batch, OBSERVED, ("quantize.batch_size", 8), "quantize.batch_size is 8, expected 1, because prompts "
         "differ in length and this pipeline takes one prompt at a time$"),
        (check_batch, IN_GRAPHS, ("infer.batch_size", 8),
         "infer.batch_size is 8, expected 1, because the graph of vae serves no oth"),
        (check_sizes, IN_GRAPHS, ("infer", of_size(128, 128)), "infer.width and infer.height is 128 x 128, expected "
         "64 x 128, with which the pipeline was observed, because the graph of transformer serves no other$"),
        # A sampler's tables end there: what diffusers says is an IndexError, after minutes of work
        (check_steps, None, ("quantize.n_steps", 1001),
         "quantize.n_steps is 1001, expected at most 1000, for which this check"),
        (check_tile, OBSERVED, (TILED,), "infer.vae_tile is 32, expected null with model=diffusers, because"),
    ],
)  # fmt: skip
def test_what_a_checkpoint_cannot_do_is_refused(checkpoint, check, opened, given, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        check(opened or checkpoint, *given)


def test_guidance_that_nothing_reads_is_refused(tmp_path):
    asked = [job(f"infer.scale={scale}") for scale in (3.5, 1.0, 0.0)]
    for name in ("flux", "flux_schnell"):
        (TINY | VARIANTS)[name](tmp_path / name)
    dev, schnell = (open_pipeline(tmp_path / name, "flux", 32) for name in ("flux", "flux_schnell"))
    for each in asked:
        check_guidance(dev, each.infer)
    for each in asked[1:]:
        check_guidance(schnell, each.infer)
    sentence = "^infer.scale is 3.5, expected at most 1, because .* model=flux_schnell has"
    with pytest.raises(ConfigError, match=sentence):
        check_guidance(schnell, asked[0].infer)


def test_a_second_text_is_refused_where_guidance_is_an_input_of_the_network(tmp_path):
    VARIANTS["sdxl_lcm"](tmp_path)
    checkpoint = open_pipeline(tmp_path, "sdxl")
    check_guidance(checkpoint, job().infer)
    with pytest.raises(
        ConfigError, match="^infer.negative_prompt is rain, expected null, because this checkpoint was dis"
    ):
        check_guidance(checkpoint, job("infer.negative_prompt=rain").infer)


def test_noise_that_is_not_there_is_refused_with_the_knobs():
    with pytest.raises(ConfigError, match="^infer.latents names nowhere.pt, which does not exist .*; give an existing"):
        job("infer.latents=nowhere.pt")


@pytest.mark.parametrize("stated", ["model.width=128", "infer.sizes=[64x64,64x128]"])
def test_images_beyond_the_places_that_a_checkpoint_knows_are_refused(stated):
    made, section = presets.job("model=sd3_mini", stated), stated.partition(".")[0]
    sentence = rf"^{section}\.\S.* expected at most 64 pixels a side, because this checkpoint"
    with pytest.raises(ConfigError, match=sentence):
        check_sizes(open_unchecked(made.model).checkpoint, section, getattr(made, section))
