"""Networks that a pipeline calls in each step for the inputs of its denoiser, as ControlNets: found by what they do."""

import pytest
import torch

from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.timed_calls import image_of_parts, samples_per_call
from sd_quant.observed.watching import Log, denoisers_of, memory_of
from tests.zoo import CASES

pytestmark = [pytest.mark.commit, pytest.mark.slow]


@pytest.mark.parametrize(
    ("case", "per_image"), [("FluxControlNetPipeline", 1), ("StableDiffusion3ControlNetPipeline", 2)]
)
def test_a_controlnet_is_a_part_that_is_called_in_each_step_and_denoises_nothing(observe, case, per_image):
    """Its images are diffusers', as `test_pipeline` finds."""
    checkpoint, known = observe(case), CASES[case]
    observed, parts = checkpoint.observation, checkpoint.parts()
    assert (observed.denoisers, observed.conditioners) == (("transformer",), ("controlnet",))
    assert [each for each, part in parts.items() if part.in_steps] == ["controlnet"]
    residuals = [each for each in parts["transformer"].contract.inputs if "control" in each]
    assert len(residuals) == len(parts["controlnet"].contract.outputs) > 0
    sampling = Sampling(2, 3.0, known.height, known.width, 1, 5)
    assert samples_per_call(checkpoint, "controlnet", sampling) == observed.samples_per_image == per_image
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
