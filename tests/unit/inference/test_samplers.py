import diffusers
import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.inference.samplers import SAMPLERS, noise_levels, sampler_for, samplers_for, why_not_reused
from sd_quant.models.sdxl_nemo import scheduler

pytestmark = pytest.mark.commit

NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
OWN = {
    "noise": diffusers.EulerDiscreteScheduler(**NOISE, timestep_spacing="trailing"),
    "flow": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
}


def solved(sampler, steps):
    """The end of a trajectory whose network knows the answer 0.5: it predicts the noise, or the velocity, from x."""
    torch.manual_seed(0)
    sampler.set_timesteps(steps)
    noise, flow = torch.randn(1, 4, 4, 4), sampler.config.get("prediction_type", "flow_prediction") == "flow_prediction"
    x = noise * getattr(sampler, "init_noise_sigma", 1)
    for time in sampler.timesteps:
        given = sampler.scale_model_input(x, time) if hasattr(sampler, "scale_model_input") else x
        if flow:
            sigma = time / 1000
            output = (given - 0.5) / sigma  # x = (1 - sigma) 0.5 + sigma noise; velocity = noise - 0.5
        else:
            at = torch.as_tensor(time).round().long().clamp(0, 999)
            alpha = diffusers.DDPMScheduler(**NOISE).alphas_cumprod[at]
            output = (given - alpha**0.5 * 0.5) / (1 - alpha) ** 0.5
        x = sampler.step(output, time, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, own in OWN.items() for name in samplers_for(own)])
def test_each_sampler_ends_where_the_model_says(kind, name):
    """All have the checkpoint's noise levels: with another model's they would end elsewhere."""
    end = solved(sampler_for(name, OWN[kind]), 12)
    torch.testing.assert_close(end, torch.full_like(end, 0.5), atol=0.05, rtol=0)


def test_a_model_of_flow_matching_has_those_that_know_its_shift():
    assert "heun" not in samplers_for(OWN["flow"]) and set(samplers_for(OWN["noise"])) == set(SAMPLERS)
    assert sampler_for("dpmpp_2m", OWN["flow"]).config["flow_shift"] == 3.0
    with pytest.raises(ConfigError, match="^infer.sampler is heun, which a model of FlowMatch.* can have euler, dpmpp"):
        sampler_for("heun", OWN["flow"])


def test_outputs_are_reused_where_that_is_a_step_of_the_same_sampler():
    reusing = [name for name in SAMPLERS if why_not_reused(sampler_for(name, OWN["noise"])) is None]
    assert reusing == ["euler", "euler_karras", "ddim"] and why_not_reused(scheduler()) is None
    assert "v_prediction" in why_not_reused(diffusers.EulerDiscreteScheduler(prediction_type="v_prediction"))
    assert why_not_reused(diffusers.EulerAncestralDiscreteScheduler()) is not None
    assert why_not_reused(diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)) is not None


def test_noise_levels_are_those_of_the_steps():
    own = OWN["noise"]
    own.set_timesteps(5)
    ddim = sampler_for("ddim", own)
    ddim.set_timesteps(5)
    assert noise_levels(own) == own.sigmas[:-1].tolist()
    assert noise_levels(ddim) == pytest.approx(noise_levels(own), rel=0.02)  # both trail
