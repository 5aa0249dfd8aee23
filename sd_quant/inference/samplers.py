"""Samplers by name: diffusers' schedulers with the noise levels of the checkpoint's own scheduler.

A sampler has a scheduler class and settings for models that predict noise, for flow matching and for EDM. Entries of
the checkpoint's scheduler config that define noise levels or the prediction type are copied (``DECISIVE``), or the
sampler is refused; entries of the solver are the sampler's own (``OF_SOLVERS``). Alternatives not taken: all schedulers
of diffusers by class name, whose settings a user would have to find out; and ``from_config``, which drops entries that
the new class does not know. DEIS is left out, because in diffusers it ends above a noise level of zero.
"""

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

from sd_quant.errors import ConfigError

COMPUTED, REUSED, EXTRAPOLATED, WEIGHTS_ALONE, FULL = "crehf"  # a step of a schedule, see ``calls``
NOT_COMPUTED = {REUSED, EXTRAPOLATED}
Settings = dict[str, Any]
MULTISTEP_FLOW: Settings = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@dataclass(frozen=True)
class Sampler:
    """Scheduler classes for noise prediction, flow matching and EDM (None: not available), and their settings."""

    noise: str
    flow: str | None = None
    edm: str | None = None
    settings: Settings = field(default_factory=dict)
    flow_settings: Settings = field(default_factory=dict)


KARRAS = {"use_karras_sigmas": True}
MULTISTEP, UNIPC = "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"
SAMPLERS: dict[str, Sampler] = {
    "euler": Sampler("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "EDMEulerScheduler"),
    "euler_karras": Sampler("EulerDiscreteScheduler", settings=KARRAS),
    "ddim": Sampler("DDIMScheduler"),
    # Lu et al. 2022, arXiv:2211.01095; Zhao et al. 2023, arXiv:2302.04867
    "dpmpp_2m": Sampler(MULTISTEP, MULTISTEP, "EDMDPMSolverMultistepScheduler", flow_settings=MULTISTEP_FLOW),
    "dpmpp_2m_karras": Sampler(MULTISTEP, settings=KARRAS),
    "unipc": Sampler(UNIPC, UNIPC, flow_settings=MULTISTEP_FLOW),
    "heun": Sampler("HeunDiscreteScheduler"),
}

NEEDED, EITHER = object(), object()
COMMON = {
    "num_train_timesteps": NEEDED, "thresholding": False, "dynamic_thresholding_ratio": EITHER,
    "sample_max_value": EITHER,
}  # fmt: skip
# Entries that decide noise levels or the prediction, by kind of model, with the value at which a scheduler computes as
# without the entry. NEEDED: there is none. EITHER: the entry has an effect only beside another, or at a schedule's end.
DECISIVE: dict[str, dict[str, Any]] = {
    "noise": COMMON | {
        "beta_start": NEEDED, "beta_end": NEEDED, "beta_schedule": NEEDED, "trained_betas": None,
        "prediction_type": "epsilon", "rescale_betas_zero_snr": False, "snr_shift_scale": 1.0,
        "timestep_spacing": "linspace", "timestep_type": "discrete", "steps_offset": 0, "interpolation_type": "linear",
        "sigma_min": None, "sigma_max": None, "lambda_min_clipped": -math.inf, "variance_type": None,
        "clip_sample": False, "clip_sample_range": EITHER, "set_alpha_to_one": EITHER,
    },
    "flow": COMMON | {
        "shift": NEEDED, "prediction_type": "flow_prediction", "use_dynamic_shifting": False,
        "time_shift_type": "exponential", "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
        "max_image_seq_len": 4096, "shift_terminal": None, "invert_sigmas": False, "sigma_min": None, "sigma_max": None,
        "scale_factors": None,
    },
    "edm": COMMON | dict.fromkeys(
        ("sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "rho", "prediction_type"), NEEDED
    ),
}  # fmt: skip
OF_SOLVERS = set(
    "algorithm_type corrector_order disable_corrector eta euler_at_final final_sigmas_type lower_order_final "
    "original_inference_steps predict_x0 predictor_order s_churn s_max s_min s_noise skip_prk_steps solver_order "
    "solver_p solver_type stochastic_sampling tau_func timestep_scaling upscale_mode use_beta_sigmas "
    "use_exponential_sigmas use_karras_sigmas use_lu_lambdas use_flow_sigmas flow_shift".split()
)  # the last two are read as the kind of model and as its shift
# Schedulers in which reusing an output is leaving its noise level out of the schedule.
FIRST_ORDER = ("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "DDIMScheduler")
BETTER_SOLVER = "dpmpp_2m"  # for full precision with fewer steps


def engine_of_letter(part: str, letter: str) -> str:
    """Return the name of the engine that computes the part in steps with this letter of the schedule."""
    return part if letter == COMPUTED else f"{part}/{letter}"


def most_saved(steps: int) -> int:
    """Return how many steps can reuse an output at most: no two adjacent, and neither the first nor the last."""
    return max(0, (steps - 1) // 2)


def model_of(own: Any) -> str:
    """Return what the model with the scheduler ``own`` is trained for: "noise", "flow" (matching) or "edm"."""
    names = [kind.__name__ for kind in type(own).__mro__]
    if any(name.startswith("FlowMatch") for name in names) or own.config.get("use_flow_sigmas"):
        return "flow"
    return "edm" if any(name.startswith("EDM") for name in names) else "noise"


def samplers_for(own: Any) -> list[str]:
    """Return the names of the samplers that fit a model with this scheduler."""
    return [name for name in SAMPLERS if carried(name, own)[1] is None]


def sampler_for(name: str, own: Any) -> Any:
    """Build the sampler with the noise levels of the scheduler ``own``. Raises ConfigError if it does not fit."""
    import diffusers

    entries, reason = carried(name, own)
    if reason is not None:
        raise ConfigError(
            f"infer.sampler is {name}, which a model of {type(own).__name__} cannot have{reason}; it can have "
            f"{', '.join(samplers_for(own)) or 'its own alone, infer.sampler=null'}"
        )
    return getattr(diffusers, getattr(SAMPLERS[name], model_of(own)))(**entries)


def carried(name: str, own: Any) -> tuple[Settings, str | None]:
    """Return the sampler's config for a model with the scheduler ``own``, and why it does not fit, or None."""
    import diffusers

    sampler, model = SAMPLERS[name], model_of(own)
    class_name = getattr(sampler, model)
    if class_name is None:
        return {}, ""
    kind = getattr(diffusers, class_name)
    known = inspect.signature(kind).parameters
    stated = {entry: own.config[entry] for entry in inspect.signature(type(own)).parameters if entry in own.config}
    if model == "flow":
        stated["shift"] = stated.get("shift") or stated.get("flow_shift") or 1.0
    if not str(stated.get("variance_type")).startswith("learned"):
        stated.pop("variance_type", None)  # of the noise that a solver adds
    entries = dict(sampler.flow_settings if model == "flow" else sampler.settings)
    for entry in stated.keys() - OF_SOLVERS - set().union(*DECISIVE.values()):
        return {}, f", because {entry} is {stated[entry]!r} in its scheduler, which no sampler reads"
    for entry, plain in DECISIVE[model].items():
        value, place = stated.get(entry, plain), "flow_shift" if entry == "shift" and entry not in known else entry
        if place in known and value is NEEDED:
            return {}, f", because its scheduler states no {entry}"
        if place in known and value is not EITHER:
            entries[place] = value
        elif entry in stated and plain is not EITHER and value != plain:
            return {}, f", because {entry} is {value!r} in its scheduler, and {class_name} has no such entry"
    try:
        kind(**entries)
    except (NotImplementedError, ValueError) as error:
        return {}, f", because {class_name} cannot be made with its entries ({error})"
    return entries, None


def why_not_reused(scheduler: Any) -> str | None:
    """Return why a step cannot reuse the denoiser's last output with this scheduler, or None where it can."""
    config = scheduler.config
    if not {kind.__name__ for kind in type(scheduler).__mro__} & set(FIRST_ORDER) or config.get("stochastic_sampling"):
        return f"under {type(scheduler).__name__} an output that is used again is no step of the same sampler"
    if config.get("prediction_type", "epsilon") not in ("epsilon", "flow_prediction"):
        return f"the model predicts {config['prediction_type']}, of which noise is a part that changes with each step"
    return None
