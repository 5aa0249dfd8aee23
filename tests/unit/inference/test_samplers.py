import inspect
import math

import diffusers
import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.inference.samplers import DECISIVE, OF_SOLVERS, SAMPLERS, sampler_for, samplers_for, why_not_reused
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


EULER, DDIM, PNDM = diffusers.EulerDiscreteScheduler, diffusers.DDIMScheduler, diffusers.PNDMScheduler
ZERO_SNR = {**NOISE, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
WITHOUT_HEUN = sorted(SAMPLERS.keys() - {"heun"})


@pytest.mark.parametrize(
    ("own", "able", "first", "reason"),
    [
        (EULER(**ZERO_SNR), WITHOUT_HEUN, 4096, "rescale_betas_zero_snr is True"),
        (EULER(**NOISE, interpolation_type="log_linear"), ["euler", "euler_karras"], 14.6146, "interpolation_type is"),
        (DDIM(**NOISE), ["ddim", "heun"], None, "clip_sample is True"),
        (DDIM(**NOISE, clip_sample=False, thresholding=True), ["ddim", "dpmpp_2m", "dpmpp_2m_karras", "unipc"], None,
         "thresholding is True"),
        (PNDM(**NOISE, steps_offset=1), sorted(SAMPLERS), None, ""),
        (diffusers.DDPMScheduler(**NOISE, clip_sample=False, variance_type="learned"), ["dpmpp_2m", "dpmpp_2m_karras"],
         None, "variance_type is 'learned'"),
        (diffusers.HeunDiscreteScheduler(beta_schedule="exp"), ["heun"], None, "exp is not implemented"),
        (diffusers.EDMDPMSolverMultistepScheduler(sigma_max=70.0), ["dpmpp_2m", "euler"], 70, ""),
        (diffusers.EDMEulerScheduler(sigma_data=1.0), ["dpmpp_2m", "euler"], 80, ""),
        (diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction"),
         ["dpmpp_2m", "euler", "unipc"], 1, ""),
        (diffusers.FlowMatchEulerDiscreteScheduler(shift_terminal=0.1, shift=3.0), ["euler", "unipc"], 1,
         "shift_terminal is 0.1"),
        (scheduler(), sorted(SAMPLERS), 14.6146, ""),  # NeMo's
        (diffusers.SCMScheduler(prediction_type="trigflow"), [], None, "states no beta_start"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "config") else None,
)  # fmt: skip
def test_entries_that_decide_an_image_are_carried_over_or_the_sampler_is_refused(own, able, first, reason):
    assert sorted(samplers_for(own)) == able
    refused = [""]
    for name in SAMPLERS.keys() - able:
        with pytest.raises(ConfigError, match=f"^infer.sampler is {name}, which a model of {type(own).__name__}") as no:
            sampler_for(name, own)
        refused.append(str(no.value))
    assert any(reason in sentence for sentence in refused)
    for sampler in (sampler_for(name, own) for name in able):
        shared = {key for key in sampler.config.keys() & own.config.keys() - OF_SOLVERS if key[0] != "_"}
        assert all(sampler.config[key] == own.config[key] for key in shared)
        if first == 1:  # of flow matching
            shifts = [{**each.config}.get("shift", each.config.get("flow_shift")) for each in (own, sampler)]
            assert shifts[0] == shifts[1] != 1
        sampler.set_timesteps(7)
        levels = getattr(sampler, "sigmas", None)  # DDIM has none
        assert first is None or levels is None or levels[0].item() in (pytest.approx(first, rel=1e-3), math.inf)


KINDS = [getattr(diffusers, name) for name in sorted(dir(diffusers)) if name.endswith("Scheduler")]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not hasattr(kind, "_backends")])
def test_each_entry_of_each_scheduler_is_decisive_or_a_solvers(kind):
    """Or its model has no sampler but its own: entries that nobody has looked at are refused."""
    parameters, own = inspect.signature(kind).parameters.values(), kind.__new__(kind)
    own.register_to_config(**{each.name: each.default for each in parameters})
    unknown = {each.name for each in parameters} - OF_SOLVERS - set().union(*DECISIVE.values()) - {"kwargs"}
    assert not unknown or samplers_for(own) == [], unknown


def test_outputs_are_reused_where_that_is_a_step_of_the_same_sampler():
    reusing = [name for name in SAMPLERS if why_not_reused(sampler_for(name, OWN["noise"])) is None]
    assert reusing == ["euler", "euler_karras", "ddim"] and why_not_reused(scheduler()) is None
    assert "v_prediction" in why_not_reused(diffusers.EulerDiscreteScheduler(prediction_type="v_prediction"))
    assert why_not_reused(diffusers.EulerAncestralDiscreteScheduler()) is not None
    assert why_not_reused(diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)) is not None
