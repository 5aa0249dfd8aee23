"""Every family draws what diffusers' own pipeline draws from the same folder, whatever the scheduler, the autoencoder
and the batch, and is what the protocol says."""

import inspect
import json
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers.schedulers import KarrasDiffusionSchedulers
from PIL import Image

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.checkpoints.diffusers_pipeline import ABSENT, DiffusersCheckpoint, open_pipeline
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.engines.pool import Pool, Variant
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.files.tensors import StoredTensor
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Generated, Pipeline, Sampling
from sd_quant.inference.source_images import SourceImages
from sd_quant.inference.trial import check_arguments
from sd_quant.models import OBSERVED, VAE_ENCODER
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser, key_of, samples_per_image
from sd_quant.models.family import family_named
from sd_quant.models.parts import Part
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages.checks import check_mask

from ...zoo.families import TINY, VARIANTS
from ..config.composition import composed

pytestmark = [pytest.mark.commit, pytest.mark.slow]

CONF = Path(__file__).parents[3] / "conf/model"
STATED = {path.stem: yaml.safe_load(path.read_text())["family"] for path in sorted(CONF.glob("*.yaml"))}
FAMILY_OF = {name: family for name, family in STATED.items() if family != OBSERVED}  # whose parts are found out
SAMPLING = Sampling(steps=2, guidance_scale=3.0, height=64, width=128, batch_size=2, seed=5)
TOKENS = 32  # of T5, for which every letter is one: the second prompt is cut
PROMPTS = ["a red cat", "a house at the end of a long road, at night"]

# Relative to the norm of the latents, fp32 on both sides. The same modules get the same numbers. With AVX-512 only what
# has sinusoids of its own in fp32, and diffusers in fp64, differs (Flux, PixArt: 3e-7). On a processor with AVX2 alone
# sums are ordered by where their numbers lie in memory: 9e-7.
TOLERANCE = 1e-5


@pytest.fixture
def opened(folder_of) -> Callable[..., DiffusersCheckpoint]:
    def opened(name: str, io: str = "diffusers") -> DiffusersCheckpoint:
        family = name.partition("_")[0]
        has_t5 = "T5EncoderModel" in family_named(family).NETWORKS.values()
        return open_pipeline(folder_of(name), family, TOKENS if has_t5 else None, io)

    return opened


def pipeline(checkpoint: DiffusersCheckpoint) -> Pipeline:
    return pipeline_of(checkpoint, load_model(checkpoint).torch_engines())


def theirs(checkpoint: DiffusersCheckpoint) -> diffusers.DiffusionPipeline:
    absent = [name for name, described in checkpoint.index.items() if described == ABSENT]  # diffusers wants to be told
    found = diffusers.DiffusionPipeline.from_pretrained(checkpoint.path, **dict.fromkeys(absent))
    found.set_progress_bar_config(disable=True)
    return found


def drawn_by_diffusers(
    ours: Pipeline, theirs: diffusers.DiffusionPipeline, sampling: Sampling, arguments: Mapping
) -> tuple:
    """Latents after every step, and images, as ``Generated`` has them."""
    latents, noise = list[torch.Tensor](), sampling.latents

    def remember(_, step, timestep, values: dict) -> dict:
        latents.append(values["latents"].clone())
        return values

    options = {
        "max_sequence_length": TOKENS,
        "negative_prompt": sampling.negative_prompts,
        "use_resolution_binning": False,  # PixArt would draw another size than is asked for
        "clean_caption": False,  # which PixArt does where two more packages are installed
        "latents": None if noise is None else ours.call.family.pack(theirs, noise.repeat(len(PROMPTS), 1, 1, 1)),
        "callback_on_step_end": remember,
        "callback": lambda step, timestep, values: remember(None, step, timestep, {"latents": values}),
        **{name: tuple(each) if name.endswith(("size", "left")) else each for name, each in arguments.items()},
    }
    known = inspect.signature(type(theirs).__call__).parameters
    if "callback_on_step_end" in known:
        del options["callback"]
    images = theirs(
        PROMPTS, num_inference_steps=sampling.steps, guidance_scale=sampling.guidance_scale, height=sampling.height,
        width=sampling.width, output_type="np",
        generator=[torch.Generator().manual_seed(sampling.seed + number) for number in range(len(PROMPTS))],
        **{name: value for name, value in options.items() if name in known and value is not None},
    ).images  # fmt: skip
    return torch.stack(latents, dim=1), (images * 255).round().astype(np.uint8)


def assert_drawn_alike(
    ours: Pipeline, theirs: diffusers.DiffusionPipeline, sampling: Sampling, arguments: Mapping = MappingProxyType({})
) -> torch.Tensor:
    generated = ours(PROMPTS, sampling)
    latents, images = drawn_by_diffusers(ours, theirs, sampling, arguments)
    assert generated.latents.shape == latents.shape
    for step in range(latents.shape[1]):
        difference = generated.latents[:, step] - latents[:, step]
        assert difference.norm() <= TOLERANCE * latents[:, step].norm(), step
    assert generated.images.shape == images.shape == (len(PROMPTS), sampling.height, sampling.width, 3)
    apart = np.abs(generated.images.astype(int) - images)
    assert apart.max() <= 1 and apart.mean() < 0.01  # of 255: a few numbers are rounded to the other side
    assert images.std() > 10, "an image of one colour would show nothing"
    return generated.latents


@pytest.mark.parametrize(("name", "io"), [*((name, "diffusers") for name in (*TINY, *VARIANTS)), ("sdxl", "nemo")])
def test_an_image_is_diffusers_own(opened, name, io):
    """With guidance and without; and with negative prompts, from a noise that is given, as ``latents`` of diffusers.

    By NeMo's names up to the size ids, whose sinusoids are then computed outside of the network.
    """
    checkpoint, samples = opened(name, io), []
    ours, diffusers_own, denoiser = pipeline(checkpoint), theirs(checkpoint), checkpoint.family.DENOISER
    engines = ours.parts[denoiser].engines
    engine = engines[denoiser]
    engines[denoiser] = lambda **inputs: samples.append(len(next(iter(inputs.values())))) or engine(**inputs)
    strong = assert_drawn_alike(ours, diffusers_own, SAMPLING)
    assert set(samples) == {len(PROMPTS) * samples_per_image(checkpoint, SAMPLING.guidance_scale)}
    noise = torch.randn(1, checkpoint.parts()["vae"].contract.inputs["z"][1], 8, 16)
    given = replace(SAMPLING, latents=noise)
    if not checkpoint.family.GUIDES:
        assert_drawn_alike(ours, diffusers_own, given)
        return
    samples.clear()
    plain = assert_drawn_alike(ours, diffusers_own, replace(SAMPLING, guidance_scale=1.0))
    assert set(samples) == {len(PROMPTS)} and samples_per_image(checkpoint, 1.0) == 1
    assert (strong - plain).norm() > 1e-2 * plain.norm(), "guidance would show nothing"
    if samples_per_image(checkpoint, 2) == 1:  # guidance is an input of the network
        return
    negative = replace(given, negative_prompts=["blurry, nude", "rain"])
    led_away = assert_drawn_alike(ours, diffusers_own, negative)
    without = ours(PROMPTS, given, decode=()).latents
    assert (led_away - without).norm() > 1e-3 * without.norm(), "the negative prompts would show nothing"


TAKEN = [  # further arguments of a call
    ("sdxl", {"original_size": [32, 512], "target_size": [64, 64], "crops_coords_top_left": [8, 16]}),
    ("sdxl", {"prompt_2": "in oil", "negative_prompt_2": "in ink", "timesteps": [901, 501, 1]}),
    ("sd15", {"guidance_rescale": 0.7}),
    ("sd3", {"sigmas": [1.0, 0.9, 0.1]}),
    ("flux", {"true_cfg_scale": 4.0, "negative_prompt": "a dog", "sigmas": [1.0, 0.9, 0.1]}),
    ("pixart", {"timesteps": [901, 501, 1]}),
]


@pytest.mark.parametrize(("name", "arguments"), TAKEN, ids=str)
def test_an_image_by_further_arguments_is_diffusers_own(opened, name, arguments):
    plain, sampling = opened(name), replace(SAMPLING, steps=3)
    checkpoint = replace(plain, arguments=arguments)
    check_arguments(checkpoint, [sampling])
    of_each = {name: [each] * len(PROMPTS) if isinstance(each, str) else each for name, each in arguments.items()}
    latents = assert_drawn_alike(pipeline(checkpoint), theirs(checkpoint), sampling, of_each)
    assert not torch.equal(latents, pipeline(plain)(PROMPTS, sampling, decode=()).latents)
    assert key_of(checkpoint) != key_of(plain)


def statistics(checkpoint: DiffusersCheckpoint, cache: Path) -> Statistics:
    names = [name for name, role in checkpoint.family.layer_roles(empty_denoiser(checkpoint)).items() if role == "ffn"]
    sampling, model = replace(SAMPLING, steps=1), load_model(checkpoint)
    return calibrate(Pass(model, names, PROMPTS[:1], sampling), fabric_for("cpu"), checkpoint_sha256="", cache=cache)


def test_statistics_are_of_the_inputs_that_a_checkpoint_is_read_with(opened, tmp_path):
    """The same file by other names or with shorter texts is calibrated anew, though the cache is one."""
    for io in ("diffusers", "nemo"):
        checkpoint = opened("sdxl", io)
        assert statistics(checkpoint, tmp_path).calls.keys() == denoiser_part(checkpoint).contract.inputs.keys()
    long = opened("pixart")
    short = open_pipeline(long.path, "pixart", TOKENS // 2)
    masks = [statistics(each, tmp_path).calls["encoder_attention_mask"].values for each in (long, short)]
    assert [mask.shape[-1] for mask in masks] == [TOKENS, TOKENS // 2]


def test_t5_can_be_left_out_of_a_folder_that_has_it(opened):
    whole = opened("sd3")
    lean = open_pipeline(whole.path, "sd3", TOKENS, parts=list(opened("sd3_no_t5").parts()))
    latents = pipeline(lean)(PROMPTS, SAMPLING, decode=()).latents
    assert torch.equal(latents, pipeline(opened("sd3_no_t5"))(PROMPTS, SAMPLING, decode=()).latents)
    with_t5 = pipeline(whole)(PROMPTS, SAMPLING, decode=()).latents
    assert (latents - with_t5).norm() > 1e-2 * with_t5.norm(), "T5 would show nothing"
    again = pickle.loads(pickle.dumps(lean))
    assert again.parts().keys() == lean.parts().keys() and "text_encoder_3" not in again.parts()


@pytest.mark.parametrize("name", FAMILY_OF)
def test_the_parts_of_a_configuration_are_its_familys(opened, name):
    family = FAMILY_OF[name]
    path = opened(family).path
    stated = composed("infer", f"model={name}", f"model.path={path}")["model"]["parts"]
    parts = open_pipeline(path, family, parts=stated).parts()
    assert stated == list(parts)
    assert next(iter(parts)) == family_named(family).DENOISER
    assert all(isinstance(part, Part) for part in parts.values())
    left_out = family_named(family).NETWORKS.keys() - {part.component for part in parts.values()}
    assert left_out == ({"text_encoder_3"} if name in ("sd3_no_t5", "sd3_mini") else set())


REFUSED = {
    "a knob's": ("sdxl", {"guidance_scale": 3.0}, "has guidance_scale, expected arguments of StableDiffusionXLPipel"),
    "a ControlNet's": ("sd15", {"controlnet_conditioning_scale": 0.5}, "has controlnet_conditioning_scale, expected"),
    "a text's": ("sd15", {"negative_prompt": "a dog"}, "has negative_prompt, expected arguments"),
    "unknown": ("sd15", {"num_frames": 2}, "has num_frames, which StableDiffusionPipeline does not take"),
    "of another kind": ("sd15", {"guidance_rescale": "much"}, "'guidance_rescale': 'much'}, with which "),
    "another state": ("sdxl", {"clip_skip": 1}, "cannot be called as its graphs are .tuple index out of range"),
    "layers left out": (
        "sd3", {"skip_guidance_layers": [0], "skip_layer_guidance_stop": 1.0}, "calls a network with skip_layers",
    ),
    "fewer steps": ("sdxl", {"denoising_end": 0.5}, r"denoises in \d steps, and by the knobs of steps in 3"),
    "more sigmas": ("sd3", {"sigmas": [1.0, 0.9, 0.5, 0.1]}, "denoises in 4 steps, and by the knobs of steps in 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_argument_that_graphs_or_knobs_do_not_have_is_refused_before_a_weight_is_read(opened, case, monkeypatch):
    family, arguments, message = REFUSED[case]
    checkpoint = replace(opened(family), arguments=arguments)
    monkeypatch.setattr(StoredTensor, "read", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError, match=f"model.arguments .*{message}") as refused:
        check_arguments(checkpoint, [replace(SAMPLING, steps=3)])
    assert "\n" not in str(refused.value)


# Drawn folders and settings

DRAWN_FOR = [*PROMPTS, "a lamp"]
NOISE = [kind.name for kind in KarrasDiffusionSchedulers] + ["LCMScheduler", "TCDScheduler", "EDMEulerScheduler"]
NOISE = [name for name in NOISE if not hasattr(getattr(diffusers, name), "_backends")]  # of packages that are not here
FLOW = ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"]
SAMPLERS = {"sd15": NOISE, "sd21": NOISE, "sdxl": NOISE, "pixart": NOISE, "sd3": FLOW, "flux": [FLOW[0], FLOW[2]]}
DRAWING = {"sdxl": "EulerAncestralDiscreteScheduler", "sd3": "FlowMatchLCMScheduler"}  # noise in each step
ENTRIES = {  # of a scheduler's config, and what is drawn for those that a class has
    "prediction_type": ["epsilon", "v_prediction", "sample"],
    "timestep_spacing": ["linspace", "leading", "trailing"],
    "beta_schedule": ["scaled_linear", "linear"],
    "rescale_betas_zero_snr": [False, True],
    "use_karras_sigmas": [False, True],
    "algorithm_type": ["dpmsolver++", "sde-dpmsolver++"],
    "final_sigmas_type": ["zero"],
    "stochastic_sampling": [False, True],
    "steps_offset": [0, 1],
    "shift": [1.0, 3.0],
}


def drawn_folder(of: random.Random, kind: type, sound: Path, folder: Path) -> dict[str, Any]:
    shutil.copytree(sound, folder)
    known = inspect.signature(kind).parameters
    entries = {name: of.choice(values) for name, values in ENTRIES.items() if name in known}
    if kind.__name__ == "DPMSolverSinglestepScheduler":
        entries["algorithm_type"] = "dpmsolver++"
    scheduler = kind(**entries, **({"beta_start": 0.00085, "beta_end": 0.012} if "beta_start" in known else {}))
    scheduler.save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", kind.__name__]}))
    vae = json.loads((folder / "vae/config.json").read_text())
    channels = range(vae["latent_channels"])
    changed = of.choice([
        {}, {"scaling_factor": 0.5},
        {"latents_mean": [of.uniform(-2, 2) for _ in channels], "latents_std": [of.uniform(4, 9) for _ in channels]},
    ])  # fmt: skip
    (folder / "vae/config.json").write_text(json.dumps(vae | changed))
    return {"scheduler": kind.__name__, **entries, **changed}


def by_diffusers(folder: Path, sampling: Sampling) -> np.ndarray:
    """Each image alone, as somebody makes it who wants this seed."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    known, made = inspect.signature(type(pipe).__call__).parameters, []
    for number, prompt in enumerate(DRAWN_FOR):
        given = {
            "max_sequence_length": TOKENS, "use_resolution_binning": False, "clean_caption": False,
            "negative_prompt": (sampling.negative_prompts or [None])[0], "height": sampling.height,
            "width": sampling.width, "guidance_scale": sampling.guidance_scale, "num_inference_steps": sampling.steps,
            "output_type": "np",
        }  # fmt: skip
        taken = {name: value for name, value in given.items() if name in known and value is not None}
        torch.manual_seed(sampling.seed + number)
        made.append(pipe(prompt, generator=torch.Generator().manual_seed(sampling.seed + number), **taken).images)
    return (np.concatenate(made) * 255).round()


def compare(family: str, scheduler: str, sound: Path, root: Path) -> None:
    for attempt in range(50):
        of, folder = random.Random(f"{family} {scheduler} {attempt}"), root / str(attempt)
        sampling = Sampling(
            of.randint(2, 5), of.choice([1.0, 3.0, 7.5]), 64, of.choice([64, 128]), of.choice([2, 3]), seed=attempt,
            negative_prompts=of.choice([None, ["rain"]]) if family != "flux" else None,
        )  # fmt: skip
        try:
            drawn = drawn_folder(of, getattr(diffusers, scheduler), sound, folder)
            expected = by_diffusers(folder, sampling)
        except (ValueError, NotImplementedError):  # the scheduler does not go with one of the entries
            continue
        break
    else:
        pytest.fail(f"diffusers refuses all that is drawn for {scheduler} in {family}")
    checkpoint = open_pipeline(folder, family, TOKENS if family in ("sd3", "flux", "pixart") else None)
    ours = pipeline(checkpoint)
    if not np.isfinite(expected).all():  # such as noise that is predicted where there is nothing but noise
        with pytest.raises(SdQuantError, match="not finite"):
            ours(DRAWN_FOR, sampling)
        return
    apart = np.abs(ours(DRAWN_FOR, sampling).images.astype(int) - expected)
    assert apart.max() <= 1 and apart.mean() < 0.01, (drawn, sampling)
    print(f"{family} {drawn}: {'equal' if not apart.any() else f'{np.count_nonzero(apart)} of {apart.size} by one'}")


@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_images_of_a_scheduler_that_draws_are_diffusers_own(family, folder_of, tmp_path):
    compare(family, DRAWING[family], folder_of(family), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "scheduler"), [(family, scheduler) for family, each in SAMPLERS.items() for scheduler in each]
)
def test_images_are_diffusers_own(family, scheduler, folder_of, tmp_path):
    compare(family, scheduler, folder_of(family), tmp_path)


# Images from images are those of diffusers' own pipelines for them, from the same folder, bit for bit


WIDTH, HEIGHT, STEPS = 128, 64, 4
CHANGED_FOR = ["a red cat", "a house at the end of a long road", "a lamp"]
CLASSES = {  # of diffusers, which change an image and a part of one
    **dict.fromkeys(
        ("sd15", "sd21"), (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline)
    ),
    "sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
}


def source(masked: bool, strength: float) -> SourceImages:
    """Two images, so that the third prompt begins with the first again, and their masks."""
    random = np.random.default_rng(0)
    smooth = [np.kron(random.integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3)), np.ones((8, 8, 1))) for _ in range(2)]
    masks = np.zeros((2, HEIGHT, WIDTH), np.uint8)
    masks[0, :32], masks[1, :, 40:100] = 255, 200
    return SourceImages(np.stack(smooth).astype(np.uint8), masks if masked else None, strength)


def to_encode(folder: Path, family: str) -> Checkpoint:
    return open_checkpoint(folder, family, encodes=True)


def sampling_of(given: SourceImages | None, batch_size: int = 1) -> Sampling:
    return Sampling(STEPS, 3.0, HEIGHT, WIDTH, batch_size, seed=5, source=given)


def ours(checkpoint: Checkpoint, sampling: Sampling) -> Generated:
    return pipeline_of(checkpoint, load_model(checkpoint).torch_engines())(CHANGED_FOR, sampling)


def changed_by_diffusers(folder: Path, kind: type, given: SourceImages) -> tuple[torch.Tensor, np.ndarray]:
    """The latents after the last step and the images, a prompt at a time, each from its own seed.

    Images are given in the order of memory that engines take: another one is summed up in another order.
    """
    pipe = kind.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    latents, images = [], []

    def remember(pipe, step: int, timestep, values: dict) -> dict:
        latents[-1] = values["latents"]
        return values

    for number, prompt in enumerate(CHANGED_FOR):
        masks = {} if given.masks is None else {
            "mask_image": Image.fromarray(given.masks[number % 2]), "height": HEIGHT, "width": WIDTH,
        }  # fmt: skip
        image = pipe.image_processor.preprocess(Image.fromarray(given.images[number % 2])).contiguous()
        latents.append(None)
        made = pipe(
            prompt, image=image, strength=given.strength, num_inference_steps=STEPS, guidance_scale=3.0,
            output_type="np", generator=[torch.Generator().manual_seed(5 + number)], callback_on_step_end=remember,
            **masks,
        )  # fmt: skip
        images.append(made[0])
    return torch.cat(latents), (np.concatenate(images) * 255).round()


def assert_equal(folder: Path, family: str, kind: type, given: SourceImages) -> Generated:
    generated = ours(to_encode(folder, family), sampling_of(given))
    latents, images = changed_by_diffusers(folder, kind, given)
    assert generated.latents.shape[1] >= int(STEPS * given.strength)
    # bit for bit with AVX-512; with AVX2 alone sums are ordered by where their numbers lie in memory: 1e-6 of the norm
    assert (generated.latents[:, -1] - latents).norm() <= 1e-5 * latents.norm()
    assert np.abs(generated.images.astype(int) - images).max() <= 1
    return generated


@pytest.mark.parametrize(("family", "strength"), [("sd15", 1.0), ("sd21", 0.6), ("sdxl", 0.6)])
def test_an_image_is_changed_and_a_part_of_one_made_anew(folder_of, family, strength):
    assert_equal(folder_of(family), family, CLASSES[family][0], source(False, 0.5))
    assert_equal(folder_of(family), family, CLASSES[family][1], source(True, strength))


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_checkpoint_for_inpainting(folder_of, family):
    given = source(True, 1.0)
    single = assert_equal(folder_of(family, True), family, CLASSES[family][1], given)
    double = ours(to_encode(folder_of(family, True), family), sampling_of(given, batch_size=2))
    assert torch.allclose(double.latents, single.latents, rtol=0, atol=1e-3 * single.latents.abs().max())
    check_mask(to_encode(folder_of(family), family), "infer.", None)
    check_mask(to_encode(folder_of(family, True), family), "infer.", "mask.png")
    with pytest.raises(ConfigError, match=r"^infer.image and infer.mask are not given, .*: it reads 9 channels, 4 of"):
        check_mask(to_encode(folder_of(family, True), family), "infer.", None)


def test_the_encoder_is_open_before_the_denoiser_and_each_call_encodes_its_images_again(folder_of):
    """Where one part is open at a time, each is opened once for all images of both batches; an image's time has all."""
    checkpoint, opened_parts, calls = to_encode(folder_of("sd15"), "sd15"), [], []
    engines = load_model(checkpoint).torch_engines()

    def open_part(part: str):
        opened_parts.append(part)
        engine = engines[part]
        engine.close = lambda: None
        return engine

    variant = Variant(Pool(open_part, most=1), {part: part for part in engines})
    pipeline_of(checkpoint, variant)(CHANGED_FOR, sampling_of(source(True, 0.6), batch_size=2))
    assert opened_parts == ["text_encoder", VAE_ENCODER, "unet", "vae"]
    encode = engines[VAE_ENCODER]
    engines[VAE_ENCODER] = lambda **inputs: calls.append(inputs) or encode(**inputs)
    pipeline = pipeline_of(checkpoint, engines)
    for _ in range(2):
        pipeline(CHANGED_FOR[:1], sampling_of(source(False, 0.5)))
    assert len(calls) == 2


def test_what_decides_images_is_described():
    plain, image, mask = (sampling_of(given).described() for given in (None, source(False, 0.6), source(True, 0.6)))
    assert "source" not in plain and plain["steps"] == STEPS
    assert image["steps"] == 2 and image["source"] != mask["source"]
    assert image["source"] | {"strength": 0.4} == sampling_of(source(False, 0.4)).described()["source"]
