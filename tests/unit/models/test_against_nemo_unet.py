"""What the project makes of a NeMo state dict, against ``nemo_unet``, which reads the same keys by itself.

The tensors are random, and norms and biases far from 1 and 0: neighbours of one shape exchanged, unless they are added
to each other anyway, move the output by 6e-3 or more. A wrong eps in a GroupNorm moves it by 8e-7 only, which fp32
could hide. So the networks run in fp64, where both sides agree to 1e-14, and 1e-10 leaves room for another order of
operations and for nothing else. Between the steps latents are fp32, and diffusers' sigmas, summed up in fp32, are off
by 4e-6: there it is 1e-5.
"""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import yaml
from torch import Tensor

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.nemo_networks import to_nemo
from sd_quant.inference.loading import LoadedModel, load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.sdxl import vector_condition
from sd_quant.models.sdxl_nemo import TextShape, build_modules
from tests import small_nemo
from tests.small_nemo import SIZE_FEATURES

from .nemo_unet import ddpm_sigmas, nemo_euler, nemo_unet, pad, vector

pytestmark = pytest.mark.nightly  # whole images
UNET = "model.model.diffusion_model."
POOLED, CONTEXT = 32, 128
CLIP1 = TextShape(vocab_size=600, width=64, layers=3, context=77, mlp_width=96)
CLIP2 = TextShape(vocab_size=600, width=64, layers=2, context=77, mlp_width=96, projection=POOLED)
SDXL, OTHER = "as in SDXL", "a level without attention in between"
LAYOUTS = {
    SDXL: {"attention_resolutions": [4, 2], "transformer_depth": [1, 1, 2], "num_res_blocks": 2},
    OTHER: {"attention_resolutions": [4, 1], "transformer_depth": [2, 1, 1], "num_res_blocks": 1},
}
NETWORK, LATENTS = 1e-10, 1e-5  # relative tolerances
SAMPLING = Sampling(steps=4, guidance_scale=5.0, height=64, width=96, batch_size=2, seed=5)
PROMPTS = ["a red square", "two blue circles on green"]


@dataclass(frozen=True)
class Given:
    """``model`` as the project loads it, then made fp64, and the UNet's part of the same file under NeMo's keys."""

    model: LoadedModel
    unet_config: dict
    state: dict[str, Tensor]

    def nemo_unet(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor) -> Tensor:
        return nemo_unet(self.unet_config, self.state, x.double(), timesteps, context.double(), y.double())


def draw(key: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=random)
    if len(shape) > 1:
        return normal / math.sqrt(normal[0].numel())
    return key.endswith(".weight") + 0.5 * normal  # of a norm; or a bias


def random_state(config: dict) -> dict[str, Tensor]:
    """NeMo's keys and shapes, which a test of the key map compares with those seen in NeMo, and tensors of our own."""
    with torch.device("meta"):
        modules = build_modules(config, CLIP1, CLIP2)
    random = torch.Generator().manual_seed(0)
    state = {"model.denoiser.sigmas": ddpm_sigmas()}
    for component, module in modules.items():
        written = to_nemo(component, dict(module.named_parameters()))
        state |= {key: draw(key, tuple(tensor.shape), random) for key, tensor in written.items()}
    return state


@pytest.fixture(scope="module", params=[SDXL, OTHER])
def given(request, tmp_path_factory) -> Given:
    config = small_nemo.config(
        POOLED, num_head_channels=16, channel_mult=[1, 1, 2], context_dim=CONTEXT, **LAYOUTS[request.param]
    )
    config["first_stage_config"]["ddconfig"]["ch_mult"] = [1, 1, 1, 1]  # unused: no more of it than has to be there
    state, extracted = random_state(config), tmp_path_factory.mktemp("archive")
    (extracted / "model_config.yaml").write_text(yaml.safe_dump(config))
    torch.save(state, extracted / "model_weights.ckpt")
    model = load_model(open_nemo(extracted))
    for part in model.parts.values():
        part.double()
    unet = {key.removeprefix(UNET): tensor.double() for key, tensor in state.items() if key.startswith(UNET)}
    return Given(model, config["unet_config"], unet)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "x": normal(2, 4, 8, 12),
        "timesteps": torch.tensor([999.0, 37]),
        "context": pad(normal(2, 77, CONTEXT)),
        "y": normal(2, POOLED + 6 * SIZE_FEATURES),
    }


def difference(ours: Tensor, nemos: Tensor) -> float:
    return float((ours - nemos).abs().max() / nemos.abs().max())


def test_the_unet_is_nemos(given, inputs):
    ours = given.model.parts["unet_xl"](**inputs)
    assert difference(ours, given.nemo_unet(**inputs)) < NETWORK
    unpadded = inputs | {"context": inputs["context"][:, :77]}
    assert difference(ours, given.nemo_unet(**unpadded)) > 1e6 * NETWORK  # NeMo attends to the 3 zeros too


@pytest.mark.parametrize("width", [SIZE_FEATURES, 256])
def test_y_is_nemos(width):
    pooled = torch.randn(2, POOLED)
    original, crop, target = (768, 1024), (12, 345), (1216, 832)
    time_ids = torch.tensor([[*original, *crop, *target]] * 2)
    assert torch.equal(vector_condition(pooled, time_ids, width), vector(pooled, original, crop, target, width))


@pytest.mark.parametrize("given", [SDXL], indirect=True)
def test_images_are_nemos(given):
    pipeline = pipeline_of(given.model.checkpoint, given.model.torch_engines())
    ours, size = pipeline(PROMPTS, SAMPLING, decode=()).latents, (SAMPLING.height, SAMPLING.width)
    seeded = [torch.Generator().manual_seed(SAMPLING.seed + number) for number in range(len(PROMPTS))]
    noise = torch.stack([torch.randn(4, size[0] // 8, size[1] // 8, generator=each) for each in seeded])
    again = pipeline_of(given.model.checkpoint, given.model.torch_engines())
    context, _, pooled, _ = again.call.pipe.encode_prompt(PROMPTS)
    nemos = nemo_euler(
        given.nemo_unet, noise, context[:, :77], pooled, (size, (0, 0), size), SIZE_FEATURES,
        SAMPLING.steps, SAMPLING.guidance_scale,
    )  # fmt: skip
    assert max(difference(ours[:, step], nemos[:, step]) for step in range(SAMPLING.steps)) < LATENTS
