"""Networks that a pipeline calls in each step for the inputs of its denoiser, as ControlNets: found by what they do."""

import inspect
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sd_quant.cache import Cache
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.timed_calls import image_of_parts, samples_per_call
from sd_quant.observed import observing
from sd_quant.observed.part import Rung
from sd_quant.observed.watching import Asked, Log, denoisers_of, memory_of
from tests.zoo import images
from tests.zoo.cases import enliven

pytestmark = [pytest.mark.commit, pytest.mark.slow]

WIDTH, HEIGHT, SCALE = 96, 64, {"controlnet_conditioning_scale": 0.8, "max_sequence_length": 32}
KINDS = {
    "Flux": (images.flux, diffusers.FluxControlNetModel, diffusers.FluxControlNetPipeline, {"num_single_layers": 1}),
    "SD3": (
        images.stable_diffusion_3, diffusers.SD3ControlNetModel, diffusers.StableDiffusion3ControlNetPipeline, {}
    ),
}  # fmt: skip


def built(name: str) -> Any:
    base, kind, pipeline, options = KINDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {key: each for key, each in base().components.items() if each is not None}
        known = inspect.signature(kind.__init__).parameters
        config = {key: value for key, value in parts["transformer"].config.items() if key in known}
        made = pipeline(**parts, controlnet=kind(**config | {"num_layers": 1} | options))
        for component in made.components.values():
            if isinstance(component, nn.Module):
                enliven(component.eval().requires_grad_(False))
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers' own code
@pytest.mark.parametrize("name", KINDS)
def test_a_controlnet_is_a_part_that_is_called_in_each_step_and_denoises_nothing(name, tmp_path, monkeypatch):
    refused = lambda *_, method="forward", **__: Rung("refused", method=method, cause="not tried")  # noqa: E731
    monkeypatch.setattr(observing, "climb", refused)
    pipe, drawn = built(name), np.random.default_rng(3).integers(0, 256, (2, HEIGHT, WIDTH, 3), np.uint8)
    pipe.save_pretrained(tmp_path)
    given = list(map(Image.fromarray, drawn))
    asked = Asked(WIDTH, HEIGHT, 3.0, SCALE, {"control_image": given[0]})
    checkpoint = observing.open_observed(tmp_path, asked, (), None, Cache(None))
    observed, parts = checkpoint.observation, checkpoint.parts()
    assert (observed.denoisers, observed.conditioners) == (("transformer",), ("controlnet",))
    assert [each for each, part in parts.items() if part.in_steps] == ["controlnet"]
    residuals = [each for each in parts["transformer"].contract.inputs if "control" in each]
    assert len(residuals) == len(parts["controlnet"].contract.outputs) > 0
    engines = load_model(checkpoint).torch_engines()
    sampling = Sampling(2, 3.0, HEIGHT, WIDTH, 1, 5, arguments=[{"control_image": each} for each in given])
    made = pipeline_of(checkpoint, engines)(["a cat", "a dog"], sampling)
    for number, (prompt, image) in enumerate(zip(["a cat", "a dog"], given, strict=True)):
        generator, arguments = [torch.Generator().manual_seed(5 + number)], {"prompt": [prompt], "control_image": image}
        torch.manual_seed(5 + number)
        theirs = pipe(
            **arguments, width=WIDTH, height=HEIGHT, num_inference_steps=2, guidance_scale=3.0, output_type="np",
            generator=generator, **SCALE,
        ).images[0]  # fmt: skip
        assert np.array_equal((theirs * 255).round().astype(np.uint8), made.images[number])
    per_image = observed.samples_per_image
    assert samples_per_call(checkpoint, "controlnet", sampling) == per_image == (1 if name == "Flux" else 2)
    times = image_of_parts(checkpoint, dict.fromkeys(parts, 1.0), {checkpoint.family.DENOISER: 7})
    assert times.totals == [7 + 7 + len(parts) - 2], "both are called in each step"


def test_a_network_conditions_where_another_takes_its_output_in_one_step():
    log, first, second = Log("base"), torch.ones(2), torch.ones(2)
    for _ in range(2):
        log.events += [("net.forward", None), ("own.forward", None)]
        log.takes("net.forward", ((), {}))
        log.made.append(("net.forward", [first]))
        log.takes("own.forward", ((first.view(1, 2),), {"other": second}))
        log.made.append(("own.forward", [second]))
        log.next_step(None)
    assert log.conditioning == {"net.forward"} and denoisers_of(log) == ["own.forward"]
    assert memory_of(torch.empty(0)) == set()
