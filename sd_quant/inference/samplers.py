"""Samplers by name: schedulers of diffusers, made with the noise levels of the checkpoint's own, and their steps.

A sampler has a class and settings for models that predict noise and for models of flow matching. The road not taken is
to offer every scheduler of diffusers by its class: which of them a model can have, with which settings, is what a user
would have to find out. DEIS is left out: diffusers' ends above a noise level of zero.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

from sd_quant.errors import ConfigError

COMPUTED, REUSED, EXTRAPOLATED = "cre"  # a step of a schedule, see ``calls``
Settings = dict[str, Any]
MULTISTEP_FLOW: Settings = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@dataclass(frozen=True)
class Sampler:
    """A scheduler's class and settings; None where there is none for that kind of model."""

    noise: str
    flow: str | None
    settings: Settings = field(default_factory=dict)
    flow_settings: Settings = field(default_factory=dict)


SAMPLERS: dict[str, Sampler] = {
    "euler": Sampler("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"),
    "euler_karras": Sampler("EulerDiscreteScheduler", None, {"use_karras_sigmas": True}),
    "ddim": Sampler("DDIMScheduler", None),
    # Lu et al. 2022, arXiv:2211.01095; Zhao et al. 2023, arXiv:2302.04867
    "dpmpp_2m": Sampler("DPMSolverMultistepScheduler", "DPMSolverMultistepScheduler", {}, MULTISTEP_FLOW),
    "dpmpp_2m_karras": Sampler("DPMSolverMultistepScheduler", None, {"use_karras_sigmas": True}),
    "unipc": Sampler("UniPCMultistepScheduler", "UniPCMultistepScheduler", {}, MULTISTEP_FLOW),
    "heun": Sampler("HeunDiscreteScheduler", None),
}
# Schedulers under which using an output again is leaving its noise level out of the schedule.
FIRST_ORDER = ("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "DDIMScheduler")
BETTER_SOLVER = "dpmpp_2m"  # that full precision with fewer steps is tried with


def most_saved(steps: int) -> int:
    """The most steps that can go without a call, none beside another, and neither the first nor the last."""
    return max(0, (steps - 1) // 2)


def is_flow(own: Any) -> bool:
    """Whether a checkpoint's ``own`` scheduler is one of flow matching."""
    return type(own).__name__.startswith("FlowMatch") or bool(own.config.get("use_flow_sigmas"))


def samplers_for(own: Any) -> list[str]:
    """The names of the samplers that a model with this scheduler can have."""
    return [name for name, sampler in SAMPLERS.items() if sampler.flow is not None or not is_flow(own)]


def sampler_for(name: str, own: Any) -> Any:
    """The sampler of this name with the noise levels of the checkpoint's ``own`` scheduler.

    Raises ConfigError for one that such a model cannot have.
    """
    import diffusers

    if name not in samplers_for(own):
        raise ConfigError(
            f"infer.sampler is {name}, which a model of {type(own).__name__} cannot have; it can have "
            f"{', '.join(samplers_for(own))}"
        )
    sampler, flow = SAMPLERS[name], is_flow(own)
    settings = sampler.flow_settings if flow else sampler.settings
    if flow and settings:
        settings = settings | {"flow_shift": own.config.get("shift") or own.config.get("flow_shift") or 1.0}
    kind = getattr(diffusers, sampler.flow if flow and sampler.flow else sampler.noise)
    known = inspect.signature(kind).parameters
    return kind(**{key: value for key, value in {**own.config, **settings}.items() if key in known})


def why_not_reused(scheduler: Any) -> str | None:
    """Why outputs cannot be used again under a scheduler, in words; None where they can."""
    config = scheduler.config
    if not {kind.__name__ for kind in type(scheduler).__mro__} & set(FIRST_ORDER) or config.get("stochastic_sampling"):
        return f"under {type(scheduler).__name__} an output that is used again is no step of the same sampler"
    if config.get("prediction_type", "epsilon") not in ("epsilon", "flow_prediction"):
        return f"the model predicts {config['prediction_type']}, of which noise is a part that changes with each step"
    return None


def noise_levels(scheduler: Any) -> list[float]:
    """The noise level sigma of each of the scheduler's steps, in the order in which they are taken.

    A scheduler that states none has those of its cumulative alphas: sqrt((1 - alpha) / alpha).
    """
    steps = len(scheduler.timesteps)
    if getattr(scheduler, "sigmas", None) is not None:
        first = scheduler.begin_index or 0
        return [float(sigma) for sigma in scheduler.sigmas[first : first + steps]]
    alphas = [float(scheduler.alphas_cumprod[int(step)]) for step in scheduler.timesteps]
    return [((1 - alpha) / alpha) ** 0.5 for alpha in alphas]
