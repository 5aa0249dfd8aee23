"""Further arguments of a stated family's call that are refused before anything is read."""

from dataclasses import replace

import pytest

from sd_quant.errors import ConfigError
from sd_quant.files.tensors import StoredTensor
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.trial import check_arguments

from ..tiny import tiny  # noqa: F401 a fixture

pytestmark = [pytest.mark.commit, pytest.mark.slow]

SAMPLING = Sampling(steps=3, guidance_scale=3.0, height=64, width=128, batch_size=2, seed=5)
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
