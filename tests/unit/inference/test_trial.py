"""Further arguments of a stated family's call: diffusers' images with them, or a refusal before anything is read."""

from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.files.tensors import StoredTensor
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.trial import check_arguments
from sd_quant.models.checkpoint import key_of

from ..tiny import TOKENS, tiny  # noqa: F401 a fixture

pytestmark = [pytest.mark.commit, pytest.mark.slow]

SAMPLING = Sampling(steps=3, guidance_scale=3.0, height=64, width=128, batch_size=2, seed=5)
PROMPTS = ["a red cat", "a house"]
TAKEN = {
    "original_size": ("sdxl", {"original_size": [32, 512], "target_size": [64, 64]}),
    "crops_coords_top_left": ("sdxl", {"crops_coords_top_left": [8, 16]}),
    "prompt_2": ("sdxl", {"prompt_2": "in oil", "negative_prompt_2": "in ink"}),
    "guidance_rescale": ("sd15", {"guidance_rescale": 0.7}),
    "timesteps": ("sdxl", {"timesteps": [901, 501, 1]}),
    "sigmas": ("sd3", {"sigmas": [1.0, 0.9, 0.1]}),
    "true_cfg_scale": ("flux", {"true_cfg_scale": 4.0, "negative_prompt": "a dog", "sigmas": [1.0, 0.9, 0.1]}),
    "pixart's": ("pixart", {"timesteps": [901, 501, 1]}),
}


@pytest.mark.parametrize("case", TAKEN)
def test_images_are_diffusers_own_bit_for_bit(tiny, case):  # noqa: F811
    family, arguments = TAKEN[case]
    plain = tiny(family).checkpoint
    checkpoint = replace(plain, arguments=arguments)
    check_arguments(checkpoint, [SAMPLING])
    ours, without = (pipeline_of(each, load_model(each).torch_engines())(PROMPTS, SAMPLING).images
                     for each in (checkpoint, plain))  # fmt: skip
    pipe = diffusers.DiffusionPipeline.from_pretrained(plain.path)
    pipe.set_progress_bar_config(disable=True)
    given = {name: tuple(each) if name.endswith(("size", "left")) else each for name, each in arguments.items()}
    given |= {name: [each] * len(PROMPTS) for name, each in given.items() if isinstance(each, str)}
    given |= {"use_resolution_binning": False, "clean_caption": False} if family == "pixart" else {}
    theirs = pipe(
        PROMPTS, num_inference_steps=3, guidance_scale=3.0, height=64, width=128, output_type="np",
        generator=[torch.Generator().manual_seed(5 + number) for number in range(2)],
        **given, **({"max_sequence_length": TOKENS} if "T5" in str(plain.family.NETWORKS) else {}),
    ).images  # fmt: skip
    apart = np.abs(ours.astype(int) - (theirs * 255).round())
    assert apart.max() <= (family in ("flux", "pixart"))  # sinusoids of their own, see test_families
    assert not np.array_equal(ours, without)
    assert key_of(checkpoint) != key_of(plain)


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
def test_an_argument_that_graphs_or_knobs_do_not_have_is_refused_before_a_weight_is_read(tiny, case, monkeypatch):  # noqa: F811
    family, arguments, message = REFUSED[case]
    monkeypatch.setattr(StoredTensor, "read", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError, match=f"model.arguments .*{message}") as refused:
        check_arguments(replace(tiny(family).checkpoint, arguments=arguments), [SAMPLING])
    assert "\n" not in str(refused.value)
