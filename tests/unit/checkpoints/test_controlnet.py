"""ControlNets of UNets: their images are diffusers' own, their residuals inputs of the denoiser, others are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sd_quant.calibration.collection import Pass, collect_segment, fabric_for
from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import Checkpoint, empty_call
from sd_quant.models.controlnet import unguessed
from sd_quant.places import HOME
from tests.zoo.families import TINY, controlnet, sd15_of_one_level

pytestmark = [pytest.mark.commit, pytest.mark.slow]

SHIPPED = HOME / "checkpoints/sdxl_mini.nemo"
WIDTH, HEIGHT, PROMPTS = 128, 64, ["a red cat", "a blue door"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By family a pipeline's folder ``base``, and those of two ControlNets for it."""
    place = tmp_path_factory.mktemp("controlled")
    for family, make in {"sd15": sd15_of_one_level, "sdxl": TINY["sdxl"]}.items():
        make(place / family / "base")
        for number in (1, 2):
            controlnet(place / family / f"net{number}", place / family / "base/unet", number)
    return place


@pytest.fixture(scope="module")
def opened(folders) -> Callable[..., Checkpoint]:
    def opened(family: str, *scales: float, io: str | None = None) -> Checkpoint:
        nets = [(folders / family / f"net{number}", scale) for number, scale in enumerate(scales, 1)]
        return open_checkpoint(folders / family / "base", family, io=io, controlnets=nets)

    return opened


def pictures(count: int) -> list[Image.Image]:
    return list(map(Image.fromarray, np.random.default_rng(3).integers(0, 256, (count, HEIGHT, WIDTH, 3), np.uint8)))


def sampling(*images, **others) -> Sampling:
    return Sampling(
        2, 5.0, HEIGHT, WIDTH, arguments=[{"image": each} for each in images], **{"batch_size": 1, "seed": 7} | others
    )


def made_by(checkpoint: Checkpoint, given: Sampling, prompts=PROMPTS) -> np.ndarray:
    return pipeline_of(checkpoint, load_model(checkpoint).torch_engines())(prompts, given).images


def theirs(folders, family: str, scales, prompt: str, image, seed: int) -> np.ndarray:
    nets = [diffusers.ControlNetModel.from_pretrained(folders / family / f"net{n}") for n in range(1, len(scales) + 1)]
    kind = {"sd15": diffusers.StableDiffusionControlNetPipeline, "sdxl": diffusers.StableDiffusionXLControlNetPipeline}
    several = len(nets) > 1
    pipe = kind[family].from_pretrained(folders / family / "base", controlnet=nets if several else nets[0])
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        [prompt], image=image, controlnet_conditioning_scale=list(scales) if several else scales[0], width=WIDTH,
        height=HEIGHT, num_inference_steps=2, guidance_scale=5.0, output_type="np",
        generator=[torch.Generator().manual_seed(seed)],
    )  # fmt: skip
    return (made.images[0] * 255).round().astype(np.uint8)


@pytest.mark.parametrize(("family", "scales", "io"), [("sd15", (0.8,), None), ("sdxl", (0.8, 0.5), "nemo")])
def test_images_are_those_of_diffusers_bit_for_bit(folders, opened, family, scales, io):
    drawn = pictures(2 * len(scales))
    each = drawn if len(scales) == 1 else [drawn[:2], drawn[2:]]
    checkpoint, given = opened(family, *scales, io=io), sampling(*each)
    made = made_by(checkpoint, given)
    for number, prompt in enumerate(PROMPTS):
        expected = theirs(folders, family, scales, prompt, each[number], 7 + number)
        assert np.array_equal(made[number], expected)
    assert not np.array_equal(made_by(checkpoint, sampling(*each[::-1])), made), "images are read"
    assert not np.array_equal(made_by(opened(family, *(0.1 for _ in scales), io=io), given), made), "scales are"
    if len(scales) == 1:
        together = made_by(checkpoint, replace(given, batch_size=2))
        assert np.abs(together.astype(int) - made).max() <= 1


def test_images_of_nemo_have_its_text_and_a_condition(tmp_path):
    convert(SHIPPED, tmp_path / "folder")
    controlnet(tmp_path / "net", tmp_path / "folder/unet")
    nets = [(tmp_path / "net", 1.0)]
    checkpoint = open_checkpoint(SHIPPED, "sdxl", controlnets=nets)
    assert checkpoint.parts()["controlnet"].contract.inputs["encoder_hidden_states"][1] == 80
    one, other = (made_by(checkpoint, sampling(image), PROMPTS[:1]) for image in pictures(2))
    assert not np.array_equal(one, other)


def test_residuals_have_the_shapes_that_the_contracts_state(opened):
    parts, size = opened("sdxl", 1.0).parts(), (192, 320)
    own, denoiser = (parts[name].contract for name in ("controlnet", "unet_xl"))
    module, inputs = empty_call(opened("sdxl", 1.0), "controlnet", own.shapes_for(2, *size))
    with torch.device("meta"):
        outputs = dict(zip(own.outputs, module(**inputs), strict=True))
    stated = denoiser.shapes_for(2, *size)
    assert own.outputs == ("down_0", "down_1", "down_2", "down_3", "mid")
    assert {name: tuple(each.shape) for name, each in outputs.items()} == {name: stated[name] for name in own.outputs}


def test_calibration_sees_the_residuals(opened):
    model = load_model(opened("sd15", 0.8))
    layer = "up_blocks.0.attentions.0.proj_in"  # behind the first residual
    found = []
    for image in pictures(2):
        statistics = collect_segment(fabric_for("cpu"), Pass(model, [layer], PROMPTS[:1], sampling(image)), range(1))
        found.append(statistics.layers[layer].amax)
        assert {"down_0", "mid"} <= statistics.calls.keys()
    assert not torch.equal(*found)


def test_a_written_pipeline_has_no_controlnet(opened, folders, tmp_path):
    write_pipeline_without(opened("sdxl", 1.0, 1.0), ["vae"], tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {path.name for path in (folders / "sdxl/base").iterdir()}


def test_a_guess_without_the_prompt_is_refused(opened):
    contract = opened("sd15", 1.0).parts()["controlnet"].contract
    with pytest.raises(SdQuantError, match="guess_mode, expected false"):
        unguessed(contract, {"guess_mode": True})


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda folder: folder / "base/vae", "is of AutoencoderKL, expected ControlNetModel"),
    ({"cross_attention_dim": 32}, "cross_attention_dim is 32, expected 64, as of the unet"),
    ({"block_out_channels": [32]}, r"block_out_channels is \[32\], expected \[64\]"),
    ({"in_channels": 9}, "in_channels is 9, expected 4"),
    ({"global_pool_conditions": True}, "global_pool_conditions is True, expected False"),
    ({"conditioning_channels": 1}, "conditioning_channels is 1, expected a number|expected 3"),
    ({"invented": 3}, "invented is 3, neither used by ControlNetModel"),
    ("controlnet_mid_block.bias", "controlnet_mid_block.bias"),
])  # fmt: skip
def test_another_network_is_refused(folders, tmp_path, change, sentence):
    base, net = folders / "sd15/base", tmp_path / "net"
    if callable(change):
        net = change(folders / "sd15")
    elif isinstance(change, str):
        shutil.copytree(folders / "sd15/net1", net)
        file = net / "diffusion_pytorch_model.safetensors"
        save_file({name: each for name, each in load_file(file).items() if name != change}, file)
    elif change.keys() <= {"cross_attention_dim", "block_out_channels", "in_channels"}:
        controlnet(net, base / "unet", **change)
    else:
        shutil.copytree(folders / "sd15/net1", net)
        config = json.loads((net / "config.json").read_text())
        (net / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((ConfigError, ArtifactError), match=sentence):
        open_checkpoint(base, "sd15", controlnets=[(net, 1.0)])
