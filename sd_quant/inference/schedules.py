"""Letters of a schedule, which says how each denoising step is computed, and schedulers that allow reused outputs."""

from typing import Any

COMPUTED, REUSED, EXTRAPOLATED, WEIGHTS_ALONE, FULL = "crehf"  # a step of a schedule, see ``calls``
NOT_COMPUTED = {REUSED, EXTRAPOLATED}
# Schedulers in which reusing an output is leaving its noise level out of the schedule.
FIRST_ORDER = ("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "DDIMScheduler")


def engine_of_letter(part: str, letter: str) -> str:
    """Return the name of the engine that computes the part in steps with this letter of the schedule."""
    return part if letter == COMPUTED else f"{part}/{letter}"


def most_saved(steps: int) -> int:
    """Return how many steps can reuse an output at most: no two adjacent, and neither the first nor the last."""
    return max(0, (steps - 1) // 2)


def why_not_reused(scheduler: Any) -> str | None:
    """Return why a step cannot reuse the denoiser's last output with this scheduler, or None where it can."""
    config = scheduler.config
    if not {kind.__name__ for kind in type(scheduler).__mro__} & set(FIRST_ORDER) or config.get("stochastic_sampling"):
        return f"under {type(scheduler).__name__} an output that is used again is no step of the same sampler"
    if config.get("prediction_type", "epsilon") not in ("epsilon", "flow_prediction"):
        return f"the model predicts {config['prediction_type']}, of which noise is a part that changes with each step"
    return None
