"""Every family draws what diffusers' own pipeline draws from the same folder, and is what the protocol says."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml

from sd_quant.calibration.collection import calibrate
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Pipeline, Sampling
from sd_quant.models import FAMILIES, Family, family_named
from sd_quant.models.checkpoint import denoiser_part, empty_denoiser, samples_per_image
from sd_quant.models.parts import Part

from ...pipelines import TINY, redraw

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[3] / "conf/model"
SAMPLING = Sampling(steps=2, guidance_scale=3.0, height=64, width=128, batch_size=2, seed=5)
TOKENS = 32  # of T5, for which every letter is one: the second prompt is cut
PROMPTS = ["a red cat", "a house at the end of a long road, at night"]

# Relative to the norm of the latents, fp32 on both sides. The same modules get the same numbers, so nothing differs but
# where a part has sinusoids of its own in fp32, which diffusers has in fp64: rotary angles of Flux, places of PixArt.
# Seen: 3e-7.
TOLERANCE = {"flux": 1e-5, "flux_schnell": 1e-5, "pixart": 1e-5, "pixart_alpha": 1e-5}


def flux_schnell(folder: Path) -> None:
    """The one that is told no guidance."""
    TINY["flux"](folder)
    pipeline = diffusers.FluxPipeline.from_pretrained(folder)
    pipeline.transformer = diffusers.FluxTransformer2DModel.from_config(
        pipeline.transformer.config, guidance_embeds=False
    )
    redraw(pipeline.transformer)
    pipeline.save_pretrained(folder)


def pixart_alpha(folder: Path) -> None:
    """The one that is told the size, which diffusers sees by the number of latents."""
    TINY["pixart"](folder)
    sigma = diffusers.PixArtSigmaPipeline.from_pretrained(folder)
    sizes = {"num_attention_heads": 6, "cross_attention_dim": 192}  # the features of three numbers fill the width
    transformer = diffusers.PixArtTransformer2DModel.from_config(sigma.transformer.config, sample_size=128, **sizes)
    redraw(transformer)
    diffusers.PixArtAlphaPipeline(**{**sigma.components, "transformer": transformer}).save_pretrained(folder)


VARIANTS = {"flux_schnell": flux_schnell, "pixart_alpha": pixart_alpha}


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Callable[..., DiffusersCheckpoint]:
    folder = tmp_path_factory.mktemp("families")
    written = cache(lambda name: ({**TINY, **VARIANTS}[name](folder / name), folder / name)[1])

    def opened(name: str, io: str = "diffusers") -> DiffusersCheckpoint:
        family, path = name.partition("_")[0], written(name)
        has_t5 = "T5EncoderModel" in family_named(family).NETWORKS.values()
        return open_pipeline(path, family, TOKENS if has_t5 else None, io)

    return opened


def pipeline(checkpoint: DiffusersCheckpoint) -> Pipeline:
    return pipeline_of(checkpoint, load_model(checkpoint).torch_engines())


def drawn_by_diffusers(
    checkpoint: DiffusersCheckpoint, sampling: Sampling, noise: torch.Tensor
) -> tuple[torch.Tensor, np.ndarray]:
    """Latents after every step, and pictures, as ``Generated`` has them."""
    theirs = diffusers.DiffusionPipeline.from_pretrained(checkpoint.path)
    theirs.set_progress_bar_config(disable=True)
    latents: list[torch.Tensor] = []

    def remember(_, step, timestep, values: dict) -> dict:
        latents.append(values["latents"].clone())
        return values

    options = {
        "max_sequence_length": TOKENS,
        "negative_prompt": sampling.negative_prompts,
        "use_resolution_binning": False,  # PixArt would draw another size than is asked for
        "clean_caption": False,  # which PixArt does where two more packages are installed
        "callback_on_step_end": remember,
        "callback": lambda step, timestep, values: remember(None, step, timestep, {"latents": values}),
    }
    known = inspect.signature(type(theirs).__call__).parameters
    if "callback_on_step_end" in known:
        del options["callback"]
    images = theirs(
        PROMPTS,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        latents=noise,
        output_type="np",
        **{name: value for name, value in options.items() if name in known and value is not None},
    ).images
    return torch.stack(latents, dim=1), (images * 255).round().astype(np.uint8)


def assert_drawn_alike(checkpoint: DiffusersCheckpoint, sampling: Sampling, tolerance: float) -> torch.Tensor:
    ours = pipeline(checkpoint)
    generated = ours(PROMPTS, sampling)
    latents, images = drawn_by_diffusers(checkpoint, sampling, ours.noise(range(len(PROMPTS)), sampling))
    assert generated.latents.shape == latents.shape
    for step in range(latents.shape[1]):
        difference = generated.latents[:, step] - latents[:, step]
        assert difference.norm() <= tolerance * latents[:, step].norm(), step
    assert generated.images.shape == images.shape == (len(PROMPTS), sampling.height, sampling.width, 3)
    apart = np.abs(generated.images.astype(int) - images)
    assert apart.max() <= (1 if tolerance else 0)  # of 255, where a number is rounded to the other side
    assert images.std() > 10, "a picture of one colour would show nothing"
    return generated.latents


@pytest.mark.parametrize("name", [*TINY, *VARIANTS])
def test_a_picture_is_diffusers_own(opened, name):
    checkpoint, tolerance = opened(name), TOLERANCE.get(name, 0)
    strong = assert_drawn_alike(checkpoint, SAMPLING, tolerance)
    if checkpoint.family.GUIDES:
        plain = assert_drawn_alike(checkpoint, replace(SAMPLING, guidance_scale=1.0), tolerance)
        assert (strong - plain).norm() > 1e-2 * plain.norm(), "guidance would show nothing"


@pytest.mark.parametrize("name", [name for name in [*TINY, *VARIANTS] if family_named(name.split("_")[0]).GUIDES])
def test_a_negative_prompt_is_diffusers_own(opened, name):
    checkpoint, tolerance = opened(name), TOLERANCE.get(name, 0)
    plain = pipeline(checkpoint)(PROMPTS, SAMPLING, decode=False).latents
    negative = replace(SAMPLING, negative_prompts=["blurry, nude", "rain"])
    led_away = assert_drawn_alike(checkpoint, negative, tolerance)
    assert (led_away - plain).norm() > 1e-3 * plain.norm(), "the negative prompts would show nothing"


@pytest.mark.parametrize("name", TINY)
def test_given_noise_is_what_diffusers_calls_latents(opened, name):
    checkpoint = opened(name)
    noise = torch.randn(1, checkpoint.parts()["vae"].contract.inputs["z"][1], 8, 16)
    ours = pipeline(checkpoint)
    packed = ours.adapter.pack(noise.expand(len(PROMPTS), -1, -1, -1))
    given = replace(SAMPLING, latents=noise)
    assert torch.equal(ours.noise(range(len(PROMPTS)), given), packed)
    theirs, _ = drawn_by_diffusers(checkpoint, given, packed)
    latents = ours(PROMPTS, given, decode=False).latents
    assert (latents - theirs).norm() <= TOLERANCE.get(name, 0) * theirs.norm()


def test_sdxl_by_nemos_names_draws_the_same(opened):
    """Up to the size ids, whose sinusoids are then computed outside of the network."""
    assert_drawn_alike(opened("sdxl", io="nemo"), SAMPLING, 0)


@pytest.mark.parametrize("name", TINY)
def test_guidance_doubles_the_samples_of_those_that_guide(opened, name):
    checkpoint, calls = opened(name), []
    ours = pipeline(checkpoint)
    engine = ours.engines[checkpoint.family.DENOISER]
    ours.engines[checkpoint.family.DENOISER] = lambda **inputs: calls.append(inputs) or engine(**inputs)
    for scale in (3.0, 1.0):
        calls.clear()
        ours(PROMPTS, replace(SAMPLING, guidance_scale=scale), decode=False)
        batch = {len(next(iter(call.values()))) for call in calls}
        assert batch == {len(PROMPTS) * samples_per_image(checkpoint, scale)}


def test_statistics_are_of_the_inputs_that_a_checkpoint_is_read_with(opened, tmp_path):
    """The same file by other names, or with shorter texts, is calibrated anew, though the cache is the same."""

    def calls(checkpoint: DiffusersCheckpoint) -> dict[str, tuple]:
        model, names = load_model(checkpoint), list(checkpoint.family.layer_roles(empty_denoiser(checkpoint)))
        found = calibrate(
            model, names, PROMPTS[:1], SAMPLING, checkpoint_sha256="", cache=tmp_path, accelerator="cpu"
        ).calls
        return {name: tuple(sample.values.shape) for name, sample in found.items()}

    for io in ("diffusers", "nemo"):
        checkpoint = opened("sdxl", io)
        assert calls(checkpoint).keys() == denoiser_part(checkpoint).contract.inputs.keys()
    long = opened("pixart")
    short = open_pipeline(long.path, "pixart", TOKENS // 2)
    assert [calls(each)["encoder_attention_mask"][-1] for each in (long, short)] == [TOKENS, TOKENS // 2]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_all_that_the_protocol_asks_for(name):
    family = family_named(name)
    kinds = {"PIPELINES": tuple, "NETWORKS": dict, "DENOISER": str, "GUIDES": bool, "TOKENS": int | None}
    for constant, kind in kinds.items():
        assert isinstance(getattr(family, constant), kind)
    assert set(Family.__annotations__) == set(kinds)
    functions = {each: found.__func__ for each, found in vars(Family).items() if isinstance(found, staticmethod)}
    assert len(functions) == 7
    for each, asked in functions.items():
        given = inspect.signature(getattr(family, each)).parameters
        assert len(given) == len(inspect.signature(asked).parameters), each
    for pipe in family.PIPELINES:
        components = inspect.signature(getattr(diffusers, pipe).__init__).parameters
        assert family.NETWORKS.keys() <= components.keys()


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_parts_of_a_configuration_are_its_familys(opened, path):
    config = yaml.safe_load(path.read_text())
    parts = opened(config["family"]).parts()
    assert config["parts"] == list(parts)
    assert all(isinstance(part, Part) for part in parts.values())
    assert {part.component for part in parts.values()} == set(family_named(config["family"]).NETWORKS)


def test_every_family_has_a_configuration_of_its_own():
    families = {path.stem: yaml.safe_load(path.read_text())["family"] for path in CONF.glob("*.yaml")}
    assert {name: families.get(name) for name in FAMILIES} == {name: name for name in FAMILIES}
    assert set(families.values()) == set(FAMILIES) == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_the_denoiser_comes_first_and_each_of_its_layers_has_a_role_and_an_input(opened, name):
    checkpoint = opened(name)
    family, parts = checkpoint.family, checkpoint.parts()
    assert next(iter(parts)) == family.DENOISER
    network = empty_denoiser(checkpoint)
    roles = family.layer_roles(network)
    layers = [each for each, module in network.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    assert list(roles) == layers and {"excluded", "ffn", "qkv", "linear"} <= set(roles.values())
    linears = [each for each, role in roles.items() if role not in ("conv", "excluded")]
    readers = [linear for shared in family.shared_inputs(linears) for linear in shared.readers]
    assert sorted(readers) == sorted(linears)
    widths = family.attentions(network)
    assert all(network.get_submodule(attention).to_q.out_features % width == 0 for attention, width in widths.items())
