"""What is refused of images before a checkpoint is opened, and by the structure of the one that is open."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.config import QuantizeJob
from sd_quant.knobs import read
from sd_quant.models.family import Family
from sd_quant.stages import opening
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
from sd_quant.stages.session import Session, open_unchecked
from tests import presets
from tests.presets import infer_job
from tests.refusals import refused

from ...zoo.families import TINY, VARIANTS
from ..config.composition import composed

pytestmark = [pytest.mark.commit, pytest.mark.slow]

PROMPTS = "infer.prompts=[a cat, a dog]"


@cache
def job(*overrides: str):
    """Nobody changes it."""
    return infer_job(PROMPTS, *overrides)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a pipeline's index, a LoRA with embeddings of words, and noise for one to four images."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "model_index.json").touch()
    embeddings = {f"bundle_emb.{word}": torch.ones(1, 4) for word in ("dog.clip_l", "do.t5")}
    save_file(embeddings, folder / "a.safetensors")
    for path in ("edges.png", "pair/a.png", "pair/b.png", *(f"three/{name}.png" for name in "abc")):
        (folder / path).parent.mkdir(exist_ok=True)
        Image.new("RGB", (80, 60)).save(folder / path)
    (folder / "net").mkdir()
    (folder / "net/config.json").touch()
    for shape in ((1, 4), (2, 4), (3, 4), (4, 4), (1, 16)):
        torch.save(torch.zeros(*shape, 8, 8), folder / "{}x{}.pt".format(*shape))
    return folder


FLUX, RAIN = ("model=flux", "model.path={here}"), "infer.negative_prompt=rain"
LORA, NOISE, TWICE = "model.loras=[{here}/a.safetensors]", "infer.latents={here}/%dx4.pt", "infer.num_samples=2"
NET, NETS = "model.controlnets=[{here}/net:0.5]", "model.controlnets=[{here}/net,{here}/net]"
EDGES = "infer.control=[{here}/edges.png]"


@pytest.mark.parametrize(("knobs", "sentence"), [
    (FLUX, None),
    ((RAIN,), None),
    ((*FLUX, RAIN), "infer.negative_prompt is rain, expected null, because the guidance of flux is an input of its "
                    "network, which reads no second text$"),
    ((LORA, "infer.prompts=[a doggy]"), None),
    ((LORA,), "model.loras is .*a.safetensors, expected prompts without dog, because"),
    # One for each image or one for all, of their size. With one for all, the samples of a prompt would be one image
    ((NOISE % 1,), None),
    ((NOISE % 2,), None),
    ((NOISE % 4, TWICE), None),
    ((NOISE % 3,), r".*holds a tensor \[3, 4, 8, 8\], expected \[1 or 2, channels"),
    ((NOISE % 1, TWICE), r".*holds a tensor \[1, 4, 8, 8\], expected \[4, channels"),
    ((NOISE % 2, "infer.width=128"), r".*channels, 8, 16\]"),
    # A condition image, or a folder of them, for each ControlNet
    ((NET, EDGES), None),
    ((NET,), r"infer.control is \[\], expected 1 images or folders, one for each of model.controlnets"),
    ((EDGES,), r"infer.control is \[.*edges.png'\], expected no images or folders, one for each of model.contr"),
    ((NETS, EDGES), "infer.control is .*, expected 2 images"),
    ((NET, EDGES, "model.calibration_control=[{here}/pair,{here}/pair]"),
     "model.calibration_control is .*, expected 1 images"),
    ((*FLUX, NET, EDGES), "model.controlnets is .*, because only sd15, sd21, sdxl have ControlNets here"),
    ((NET, EDGES, "infer.image={here}/edges.png"), "infer.image is .*, expected null, because images with"),
    ((NETS, "infer.control=[{here}/edges.png,{here}/edges.png]", "infer.batch_size=2"),
     "infer.batch_size is 2, expected 1, because several ControlNets"),
    ((NETS, "infer.control=[{here}/edges.png,{here}/pair]"), None),
    ((NETS, "infer.control=[{here}/three,{here}/pair]"), "infer.control is .*pair with 2 images, expected 3"),
])  # fmt: skip
def test_a_request_is_refused_before_a_checkpoint_is_opened(here, knobs, sentence):
    asked = job(*(knob.format(here=here) for knob in knobs))
    with refused(sentence):
        check_request(asked.model, asked.infer)


@pytest.mark.parametrize("chooses", ["infer.reuse=0.25", "infer.precise_steps=4", "quantize.fit=300MB", None])
def test_what_is_chosen_by_images_of_calibration_needs_their_condition_images(here, checkpoint, chooses):
    """Even where statistics come from elsewhere, for which none are made."""
    knobs = PROMPTS, NET.format(here=here), EDGES.format(here=here), f"calibration={here}"
    asked = presets.job(*knobs, *([chooses] if chooses else []))
    with refused(chooses and r"model.calibration_control is \[\], expected condition images for each of"):
        Session(checkpoint).check(asked.model, asked.infer, asked.quantize)


def test_noise_of_another_autoencoder_is_refused_when_the_checkpoint_is_opened(here, checkpoint):
    """And for a pipeline that draws its own, of another number of channels or not: nobody knows how it packs them."""
    fitting, other = (job(f"infer.latents={here}/{name}.pt") for name in ("1x4", "1x16"))
    assert sampling_of(fitting.infer).latents.shape == (1, 4, 8, 8)
    check_latents(checkpoint, fitting.infer)
    check_request(other.model, other.infer)  # which does not know the checkpoint
    with refused("infer.latents: .*1x16.pt holds 16 channels, and the latents of this checkpoint have 4; make"):
        check_latents(checkpoint, other.infer)
    with refused("infer.latents is .*1x4.pt, expected null with model=diffusers, because"):
        check_latents(OBSERVED, fitting.infer)
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


@pytest.mark.parametrize(("check", "opened", "given", "sentence"), [
    (check_batch, None, ("infer.batch_size", 8), None),
    (check_batch, OBSERVED, ("infer.batch_size", 1), None),
    (check_batch, OBSERVED, ("quantize.batch_size", 8), "quantize.batch_size is 8, expected 1, because prompts "
     "differ in length and this pipeline takes one prompt at a time$"),
    (check_batch, IN_GRAPHS, ("infer.batch_size", 1), None),
    (check_batch, IN_GRAPHS, ("infer.batch_size", 8),
     "infer.batch_size is 8, expected 1, because the graph of vae serves no oth"),
    (check_batch, IN_GRAPHS, ("quantize.batch_size", 8), None),  # which torch computes
    (check_sizes, IN_GRAPHS, ("infer", of_size(64, 128)), None),
    (check_sizes, IN_GRAPHS, ("infer", of_size(128, 128)), "infer.width and infer.height is 128 x 128, expected "
     "64 x 128, with which the pipeline was observed, because the graph of transformer serves no other$"),
    (check_sizes, IN_GRAPHS, ("model", of_size(128, 128)), None),
    (check_mask, OBSERVED, ("model.calibration_", None), None),
    (check_steps, None, ("quantize.n_steps", 1000), None),
    # A sampler's tables end there: what diffusers says is an IndexError, after minutes of work
    (check_steps, None, ("quantize.n_steps", 1001),
     "quantize.n_steps is 1001, expected at most 1000, for which this check"),
    (check_tile, None, (SimpleNamespace(vae_tile=32),), None),
    (check_tile, OBSERVED, (SimpleNamespace(vae_tile=None),), None),
    (check_tile, OBSERVED, (SimpleNamespace(vae_tile=32),),
     "infer.vae_tile is 32, expected null with model=diffusers, because"),
])  # fmt: skip
def test_what_a_checkpoint_cannot_do_is_refused(checkpoint, check, opened, given, sentence):
    """None stands for the checkpoint that ships, and for no refusal."""
    with refused(sentence):
        check(opened or checkpoint, *given)


@pytest.mark.parametrize(("name", "knobs", "sentence"), [
    ("flux", ("infer.scale=3.5",), None), ("flux", ("infer.scale=0.0",), None),
    ("flux_schnell", ("infer.scale=1.0",), None), ("flux_schnell", ("infer.scale=0.0",), None),
    ("flux_schnell", ("infer.scale=3.5",), "infer.scale is 3.5, expected at most 1, because .* model=flux_schnell has"),
    ("sdxl_lcm", (), None),
    ("sdxl_lcm", (RAIN,), "infer.negative_prompt is rain, expected null, because this checkpoint was dis"),
])  # fmt: skip
def test_guidance_that_nothing_reads_is_refused(tmp_path, name, knobs, sentence):
    """By networks without an input for it, and a second text by those in which guidance is an input."""
    (TINY | VARIANTS)[name](tmp_path)
    family = name.partition("_")[0]
    with refused(sentence):
        check_guidance(open_pipeline(tmp_path, family, 32 if family == "flux" else None), job(*knobs).infer)


@pytest.mark.parametrize("stated", ["model.width=128", "infer.sizes=[64x64,64x128]"])
def test_images_beyond_the_places_that_a_checkpoint_knows_are_refused(stated):
    made, section = presets.job("model=sd3_mini", stated), stated.partition(".")[0]
    with refused(rf"{section}\.\S.* expected at most 64 pixels a side, because this checkpoint"):
        check_sizes(open_unchecked(made.model).checkpoint, section, getattr(made, section))


def test_a_pipeline_that_no_server_loads_is_refused_before_calibration(monkeypatch, answering, tmp_path):
    knobs = ("model=diffusers", "model.path=checkpoints/sd3_mini", "quantize=fp8", "hand_over=[modelopt_export]")
    family = SimpleNamespace(
        PIPELINES=("SanaPipeline",), NETWORKS={"transformer": "SanaTransformer2DModel"}, DENOISER="transformer"
    )
    parts = {"transformer": SimpleNamespace(component="transformer")}
    answering(
        opening, load=SimpleNamespace(checkpoint=SimpleNamespace(family=family, parts=lambda: parts)), limit_of=None
    )
    monkeypatch.setattr(opening, "write_observed", lambda *_: pytest.fail("it goes on"))
    with refused(".*modelopt_export is for servers, and none loads this pipeline"):
        opening.opened(read(QuantizeJob, composed("quantize", *knobs)), tmp_path)


def test_another_part_that_the_engine_cannot_execute_is_refused_before_the_first_step():
    """The denoiser is simulated instead."""
    mapping = composed("quantize", "quantize=nvfp4", "infer=openvino", "export_trt=none")
    opening.check_runtimes(read(QuantizeJob, mapping))
    mapping["quantize"]["parts"] = {"vae": "int8", "clip1": "nvfp4"}
    with refused("quantize.parts gives clip1 the preset nvfp4, which infer.engine=openvino"):
        opening.check_runtimes(read(QuantizeJob, mapping))
