"""Images of an observed pipeline with engines in its networks' place: diffusers' own, and nothing is computed twice."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.calibration import hooks
from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.files.images import fitted, identities, kinds
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Pipeline, Sampling, by_image
from sd_quant.inference.requests import latents_of, told_steps
from sd_quant.models.checkpoint import key_of
from sd_quant.observed.checkpoint import ObservedCheckpoint
from tests.zoo import CASES, build, from_images

pytestmark = pytest.mark.commit

PROMPTS = ["a red bicycle", "a blue door", "a cat"]
IMAGES = ["PixArtSigmaPipeline", "AuraFlowPipeline"]
NAMES = [*IMAGES, "WanPipeline", "WanPipeline, two denoisers", "AmusedPipeline", "DreamLitePipeline"]


class Counted(Engine):
    """An engine that counts its calls, and whose first output ``change`` may change."""

    def __init__(self, engine: Engine, name: str, calls: list[str], change: Callable[[Tensor], Tensor] = lambda x: x):
        self.engine, self.called, self.calls, self.change = engine, name, calls, change

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    @property
    def name(self) -> str:
        return f"{self.called} in torch"

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        self.calls.append(self.called)
        first, *others = self.engine(**inputs).items()
        return {first[0]: self.change(first[1]), **dict(others)}

    def close(self) -> None: ...


def sampling(case: str, **changes) -> Sampling:
    known = CASES[case]
    usual = {"steps": 2, "guidance_scale": 3.0, "batch_size": 1, "seed": 5}
    return Sampling(**usual | {"width": known.width, "height": known.height} | changes)


def counted(checkpoint: ObservedCheckpoint, **changes: Callable) -> tuple[Pipeline, list[str]]:
    """The pipeline with torch in its networks' place, and a list that gets the name of each network that is called."""
    calls: list[str] = []
    engines = {
        name: Counted(engine, name, calls, *(changes[name],) if name in changes else ())
        for name, engine in load_model(checkpoint).torch_engines().items()
    }
    return pipeline_of(checkpoint, engines), calls


def theirs(checkpoint: ObservedCheckpoint, case: str, prompt: str, seed: int, sampling: Sampling):
    """diffusers' images [F, H, W, 3], its latents after each step, and the calls of its networks."""
    needs = CASES[case].needs  # of packages, without which diffusers reads no folder of this class
    pipe = build(case) if needs else diffusers.DiffusionPipeline.from_pretrained(checkpoint.path, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    CASES[case].prepare(pipe)
    for network in (each for each in pipe.components.values() if isinstance(each, nn.Module)):
        for weight in network.parameters():
            weight.data = weight.data.clone()  # sums are ordered by where numbers lie, in a file at odd places
    calls = []
    for name, part in checkpoint.observation.parts.items():
        network, method = getattr(pipe, part.component), part.rung.method
        own = getattr(network, method)

        def called(*args, own=own, name=name, **kwargs):
            calls.append(name)
            return own(*args, **kwargs)

        setattr(network, method, called)
    alone = not checkpoint.observation.style.batched
    torch.manual_seed(seed)
    given = {
        "prompt": prompt if alone else [prompt], "width": sampling.width, "height": sampling.height,
        "num_inference_steps": sampling.steps, "guidance_scale": sampling.guidance_scale, "output_type": "np",
        "generator": torch.Generator().manual_seed(seed), "max_area": sampling.width * sampling.height,
        **CASES[case].arguments, **CASES[case].drawn(sampling.width, sampling.height),
    }  # fmt: skip
    known = inspect.signature(type(pipe).__call__).parameters
    steps = []
    with told_steps(pipe, lambda result: steps.append(latents_of(result)[0])):
        result = pipe(**{name: value for name, value in given.items() if name in known})
    images = np.asarray(result[0])[0]
    return images if images.ndim == 4 else images[None], steps, calls


def differences(checkpoint: ObservedCheckpoint, case: str, made, number: int, settings: Sampling) -> tuple:
    """The largest difference of an image from diffusers', those of latents by their norms, and the calls it took."""
    frames, latents, called = theirs(checkpoint, case, PROMPTS[number], settings.seed + number, settings)
    side_by_side = np.concatenate(list((frames * 255).round()), axis=1)
    assert made.images[number].shape == side_by_side.shape and len(made.latents[number]) == len(latents)
    of_latents = []
    for ours, latent in zip(made.latents[number], latents, strict=True):
        ours = ours if ours.numel() == latent.numel() else ours[0]  # of some videos the first axis is that of frames
        of_latents.append(float((ours.reshape(latent.shape) - latent).norm() / latent.norm()))
    return np.abs(made.images[number] - side_by_side).max(), max(of_latents), Counter(called)


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_images_and_latents_are_those_of_diffusers(observe, case):
    checkpoint, settings = observe(case), sampling(case)
    pipeline, calls = counted(checkpoint)
    made = pipeline(PROMPTS[:2], settings)
    assert made.images.dtype == np.uint8
    found = [differences(checkpoint, case, made, number, settings) for number in range(2)]
    assert max(image for image, _, _ in found) <= 1, "a rounding"
    assert max(latent for _, latent, _ in found) <= 1e-5
    assert Counter(calls) == found[0][2] + found[1][2], "answers are given again, not computed again"
    assert np.abs(made.images[0].astype(int) - made.images[1]).max() > 3


# What is edited, continued and controlled most: the rest are for releases.
COMMIT = """
FluxKontext FluxFill FluxControlNet WanImageToVideo StableDiffusion3Img2Img StableDiffusion3ControlNet
""".split()
NIGHTLY = """
FluxControl QwenImageEdit QwenImageEditPlus LTXImageToVideo CogVideoXImageToVideo SanaSprintImg2Img
StableDiffusionXLImg2Img StableDiffusionXLInpaint StableDiffusionImg2Img StableDiffusionInpaint StableVideoDiffusion
""".split()
CADENCE = dict.fromkeys(COMMIT, pytest.mark.slow) | dict.fromkeys(NIGHTLY, pytest.mark.nightly)
NEARLY = {"AnimateDiffVideoToVideoPipeline"}  # latents within 1e-6 of their norm, images the same or a rounding off
UNLIKE_STEPS = {"Flux2KleinKVPipeline"}  # its first step reads the image, and others what the first has kept of it


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=CADENCE.get(case.removesuffix("Pipeline"), pytest.mark.release))
        for case in from_images.CASES
        if case not in UNLIKE_STEPS
    ],
)
def test_images_of_images_are_those_of_diffusers_bit_for_bit(observe, case):
    """With AVX-512; with AVX2 alone sums are ordered by where all of their numbers lie in memory."""
    checkpoint, settings = observe(case), sampling(case, steps=4)
    pipeline, _ = counted(checkpoint)
    made = pipeline(PROMPTS[:1], settings)
    exact = torch.backends.cpu.get_cpu_capability() == "AVX512" and case not in NEARLY
    image, latent, _ = differences(checkpoint, case, made, 0, settings)
    assert image <= (0 if exact else 1) and latent <= (0 if exact else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["PixArtSigmaPipeline", "AmusedPipeline"])
def test_what_another_process_denoised_is_decoded_here(observe, case, tmp_path):
    """From a file, and nothing is denoised again. The second's images come of no decoder."""
    checkpoint, settings = observe(case), sampling(case)

    def elsewhere(batches, make, also) -> list[dict]:
        for place in range(len(batches)):
            save_file({name: x.clone().contiguous() for name, x in make(place).items()}, tmp_path / str(place))
        return [load_file(tmp_path / str(place)) for place in range(len(batches))]

    expected = counted(checkpoint)[0](PROMPTS[:2], settings, by_batch=elsewhere)
    pipeline, calls = counted(checkpoint)
    files = [load_file(tmp_path / str(place)) for place in range(2)]
    made = pipeline(PROMPTS[:2], settings, by_batch=lambda batches, make, also: files)
    assert np.array_equal(made.images, expected.images) and not set(calls) & set(pipeline.call.denoisers)
    assert np.array_equal(made.images, counted(checkpoint)[0](PROMPTS[:2], settings).images)
    assert all(torch.equal(*pair) for pair in zip(made.latents, expected.latents, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", IMAGES)
def test_the_size_of_a_batch_changes_nothing(observe, case):
    checkpoint = observe(case)
    pipeline, calls = counted(checkpoint)
    alone = pipeline(PROMPTS, sampling(case))
    calls_alone = Counter(calls)
    calls.clear()
    together = pipeline(PROMPTS, sampling(case, batch_size=2))
    assert np.abs(alone.images.astype(int) - together.images).max() <= 1
    assert (alone.latents - together.latents).norm() <= 1e-5 * alone.latents.norm()
    assert calls_alone["transformer"] == 3 * 2 and Counter(calls)["transformer"] == 2 * 2
    assert Counter(calls)["vae"] == 2, "once for each batch"


def test_images_that_nobody_wants_are_not_decoded(observe):
    pipeline, calls = counted(observe("PixArtSigmaPipeline"))
    whole = pipeline(PROMPTS[:2], sampling("PixArtSigmaPipeline"))
    calls.clear()
    latents = pipeline(PROMPTS[:2], sampling("PixArtSigmaPipeline"), decode=())
    assert latents.images is None and "vae" not in calls and calls
    assert torch.equal(latents.latents, whole.latents)
    backwards = pipeline(PROMPTS[:2], sampling("PixArtSigmaPipeline"), numbers=[1, 0])
    assert np.array_equal(backwards.images, whole.images[::-1])
    assert torch.equal(backwards.latents, whole.latents.flip(0))


def test_a_network_answers_what_a_pipeline_asks_and_no_other_call_than_was_observed(observe):
    """Never with a graph of another call."""
    checkpoint = observe("PixArtSigmaPipeline")
    pipeline, _ = counted(checkpoint)
    vae = pipeline.call.pipe.vae
    assert vae.config.scaling_factor == checkpoint.configs["vae"]["scaling_factor"]
    assert vae.dtype == torch.float32 and pipeline.decoders == ["vae"]
    with pytest.raises(AttributeError):
        vae.nothing  # noqa: B018
    with pytest.raises(SdQuantError, match="observe|observed"):
        pipeline.call.pipe.transformer(
            torch.ones(2, 4, 6, 8), encoder_hidden_states=torch.ones(2, 32, 32), timestep=None
        )


def test_latents_are_given_to_each_image_of_a_batch():
    steps = [torch.full((2, 3), float(step)) for step in range(4)]
    assert by_image(steps, 2).shape == (2, 4, 3)
    assert by_image([torch.ones(1, 3), torch.ones(1, 6)], 1).shape == (1, 1, 6), "some begin with smaller latents"
    packed = by_image([torch.ones(7, 5)], 2)
    assert packed.shape == (2, 1, 7, 5), "where no axis counts images, as a whole"
    assert by_image([], 2).shape[0] == 2


WIDTH, HEIGHT = 96, 64
TOGETHER = {  # whether two prompts may share a batch
    "FluxKontextPipeline": False, "FluxFillPipeline": True, "StableDiffusion3Img2ImgPipeline": True,
    "WanImageToVideoPipeline": False,
}  # fmt: skip


def pictures(count: int, width: int = WIDTH, height: int = HEIGHT) -> list[Image.Image]:
    drawn = np.random.default_rng(3).integers(0, 256, (count, height, width, 3), np.uint8)
    return list(map(Image.fromarray, drawn))


@pytest.mark.parametrize("case", TOGETHER)
def test_each_prompt_has_the_image_of_its_own_row(observe, case):
    """Of one row they are diffusers', as above."""
    checkpoint, known = observe(case), CASES[case]
    rows = [{"image": each} for each in pictures(2, known.width, known.height)]
    settings = Sampling(4, 3.0, known.height, known.width, 1, 5, arguments=rows)
    pipeline = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())
    made = pipeline(PROMPTS[:2], settings)
    for number, prompt in enumerate(PROMPTS[:2]):
        alone = pipeline([prompt], replace(settings, seed=5 + number, arguments=[rows[number]]))
        assert np.array_equal(alone.images[0], made.images[number])
    exchanged = pipeline(PROMPTS[:2], replace(settings, arguments=rows[::-1]))
    assert not np.array_equal(made.images[0], exchanged.images[0]), "the image is read"
    observed = checkpoint.observation
    assert observed.parts["vae_encoder"].component == "vae" and observed.parts["vae_encoder"].rung.method == "encode"
    assert observed.style.keeps == (("image",) if case == "FluxKontextPipeline" else ())
    assert (observed.unequal is None) == TOGETHER[case]
    if TOGETHER[case]:
        of_both = pipeline(PROMPTS[:2], replace(settings, batch_size=2))
        assert np.abs(of_both.images.astype(int) - made.images).max() <= 1


@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_a_share_of_the_steps_has_as_many_rows_and_its_own_ranges(observe, monkeypatch, strength):
    monkeypatch.setattr(hooks, "ROWS", 8)
    checkpoint = observe("StableDiffusion3Img2ImgPipeline")
    rows = [{"image": each, "strength": strength} for each in pictures(2)]
    sampling, layer = Sampling(8, 3.0, HEIGHT, WIDTH, 1, 5, arguments=rows), "transformer_blocks.0.attn.to_q"
    wanted = Pass(load_model(checkpoint), [layer], PROMPTS[:2], sampling)
    found = calibrate(wanted, fabric_for("cpu"), checkpoint_sha256="")
    assert len(found.layers[layer].rows.priority) == 8
    assert len(found.layers[layer].amax) == 8 * strength and found.layers[layer].amax.amax(1).all()
    assert not observe("FluxKontextPipeline").family.SOME_STEPS, "it takes all of them"


def test_images_of_an_own_shape_are_cropped_and_known_by_what_they_show(observe):
    (wide,) = pictures(1, 40, 20)
    assert fitted([wide, 3, "a"], 16, 16)[0].size == (16, 16) and fitted([wide, 3, "a"], 16, 16)[1:] == [3, "a"]
    assert fitted(wide, 40, 20) is wide
    given = {"image": wide, "images": [wide, wide], "count": 3}
    assert kinds(given) == {"image": "image RGB", "images": ["image RGB"] * 2, "count": 3}
    assert identities(given) != identities(given | {"image": fitted(wide, 40, 40)})
    checkpoint = observe("StableDiffusion3Img2ImgPipeline")
    first, second = (replace(checkpoint, arguments={"image": each}) for each in pictures(2))
    assert key_of(first) != key_of(second) and "0x" not in key_of(first)


def test_batches_share_numbers_and_lists_of_images_come_alone():
    one, two, three = pictures(3)
    rows = [{"image": one, "strength": 0.5}, {"image": two, "strength": 0.5}, {"image": three, "strength": 0.7}]
    settings = Sampling(2, 3.0, HEIGHT, WIDTH, 4, 5, arguments=rows)
    assert settings.batches(range(4)) == [[0, 1, 3], [2]]
    assert settings.arguments_of([0, 1, 3]) == {"image": [one, two, one], "strength": 0.5}
    assert settings.arguments_of([2]) == rows[2]
    named = replace(settings, arguments=[{"prompt_2": "a", "mode": "x"}, {"prompt_2": "b", "mode": "x"}])
    assert named.arguments_of([0, 1]) == {"prompt_2": ["a", "b"], "mode": "x"}, "no pipeline takes a list of options"
    modes = replace(settings, arguments=[{"mode": "x"}, {"mode": "y"}])
    assert modes.batches(range(4)) == [[0, 2], [1, 3]]
    listed = replace(settings, arguments=[{"image": [one, two]}])
    assert listed.batches(range(2)) == [[0], [1]]
    assert settings.described() != replace(settings, arguments=rows[::-1]).described()
    assert "arguments" not in replace(settings, arguments=None).described()
    assert settings.texts_of(["a", "a"])[0] != settings.texts_of(["a", "a"])[1], "statistics of both are kept apart"
