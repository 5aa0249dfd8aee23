"""The diffusers pipeline around engines that are simple functions, and folders of tiny pipelines."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from sd_quant.inference.pipeline import Pipeline, Sampling
from sd_quant.inference.stand_ins import AnsweredPart, EngineNetwork
from sd_quant.models import sdxl
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, TextShape, build_modules, called, scheduler, unet_config

SAMPLING = Sampling(steps=3, guidance_scale=2.0, height=64, width=64, batch_size=2, seed=5)
PROMPTS = ["one", "four", "three"]  # of different lengths, which is all that the tokenizer here sees
SHAPE = TextShape(vocab_size=600, width=64, layers=1, context=77, mlp_width=96, projection=32)


class Function:
    def __init__(self, name, function):
        self.name, self.function, self.calls = name, function, []

    def __call__(self, **inputs):
        self.calls.append(inputs)
        return self.function(**inputs)


class Tokenizer:
    model_max_length, unpadded = 77, 3

    def __call__(self, prompts, **options):
        ids = [[len(prompt)] * (77 if options.get("padding") else self.unpadded) for prompt in prompts]
        return {"input_ids": ids}


@pytest.fixture
def engines(small_config):
    unet = unet_config(small_config)
    pooled = unet["projection_class_embeddings_input_dim"] - 6 * unet["addition_time_embed_dim"]
    half = unet["cross_attention_dim"] // 2

    def clip(input_ids, width, **_):
        return torch.ones(len(input_ids), 80, width) * input_ids[:, :1, None]

    def unet_xl(x, timesteps, context, y):
        return {"out": 0.1 * x + 0.01 * context.mean(dim=(1, 2)).view(-1, 1, 1, 1)}

    functions = {
        "unet_xl": unet_xl,
        "vae": lambda z: {"dec": torch.nn.functional.interpolate(z[:, :3], scale_factor=8)},
        "clip1": lambda input_ids: {"z": clip(input_ids, half)},
        "clip2": lambda input_ids: {"z": clip(input_ids, half), "z_pooled": torch.ones(len(input_ids), pooled)},
    }
    return {name: Function(name, function) for name, function in functions.items()}


@pytest.fixture(scope="module")
def modules(small_config):
    with torch.device("meta"):
        return build_modules(small_config, SHAPE, SHAPE)


@pytest.fixture
def build(engines, modules):
    parts = sdxl.FAMILY.parts({name: modules[name].config for name in ("unet", "vae")}, CONTEXT_TOKENS, "nemo")

    def built(scheduler):
        answered = {name: AnsweredPart(engines, name, part) for name, part in parts.items()}
        networks = {
            part.component: EngineNetwork(modules[part.component], {part.method: answered[name]})
            for name, part in parts.items()
        }
        return Pipeline(called(networks, (Tokenizer(), Tokenizer()), scheduler), answered)

    return built


@pytest.fixture
def pipeline(build):
    return build(scheduler())


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[..., Path]:
    from ...zoo.families import TINY, VARIANTS, for_inpainting  # seconds, which most tests here need not wait

    root = tmp_path_factory.mktemp("families")

    @cache
    def folder_of(name: str, inpainting: bool = False) -> Path:
        make, folder = {**TINY, **VARIANTS}[name], root / f"{name}_{inpainting}"
        for_inpainting(make, folder) if inpainting else make(folder)
        return folder

    return folder_of
