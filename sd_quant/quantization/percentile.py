"""One range of an input from its ranges by prompt and denoising step: the percentile calibrator of ModelOpt's diffusion
example.

Calibration records a range (amax) for every prompt and denoising step. ``corrected`` reduces these ranges over the
prompts of a step, and then over the first ``int(n_steps * percentile)`` steps, the noisiest, with the two reductions of
``COLLECT_METHODS``.

``modelopt`` reproduces ``PercentileCalibrator`` of NVIDIA/Model-Optimizer's
``examples/diffusers/quantization/calib/plugin_calib.py`` (0.23 to 0.47), including two of its defects: it reduces over
UNet calls, not over prompts, so min and mean depend on the batches; and its ``min-mean`` divides the sum over calls by
n_steps: 32 calls on 20 steps give 1.6 times the mean. NeMo 2.0 to 2.4 computes the same as ``min-mean``. Two more
defects are not reproduced: the original counts calls for the wrong steps with samplers that call twice per step, and
sums in the dtype of the activations, which overflows in fp16. With ``default``, the plain maximum, ModelOpt's command
line uses another calibrator, over all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tables of this file are read before torch is loaded
    from torch import Tensor


COLLECT_METHODS = {  # torch's reductions over the prompts of a step, and over the steps
    "global_min": ("amin", "amin"),
    "min-max": ("amax", "amin"),
    "min-mean": ("mean", "amin"),
    "mean-max": ("amax", "mean"),
    "default": ("amax", "amax"),
}


def corrected_amax(amax: Tensor, percentile: float, collect_method: str, batch_size: int) -> float:
    """Reduce ranges to one by ``collect_method``: first over the prompts, then over the first steps.

    ``amax``: fp32 [prompts, steps], steps in the order of denoising. ``percentile``: the fraction of the steps that
    counts. ``batch_size`` is ignored. Raises ValueError when ``percentile`` selects no step.
    """
    n_steps = amax.shape[1]
    selected = int(n_steps * percentile)
    if not 1 <= selected <= n_steps:
        raise ValueError(
            f"percentile {percentile} selects {selected} of {n_steps} steps, expected at least one and no more than "
            f"there are; choose a percentile from {1 / n_steps:g} to 1"
        )
    over_prompts, over_steps = COLLECT_METHODS[collect_method]
    per_step = getattr(amax[:, :selected], over_prompts)(dim=0)
    return getattr(per_step, over_steps)(dim=0).item()


def modelopt_amax(amax: Tensor, percentile: float, collect_method: str, batch_size: int) -> float:
    """Compute the range that ModelOpt's example would, with a sampler that calls the UNet once per step.

    Like ``corrected_amax``, but reduced over calls of ``batch_size`` (>= 1) consecutive prompts each; the range of a
    call is the largest of its prompts. Raises ValueError when ``percentile`` selects no step.
    """
    import torch

    if collect_method == "default":
        return amax.max().item()
    per_call = torch.stack([prompts.amax(dim=0) for prompts in amax.split(batch_size)])
    result = corrected_amax(per_call, percentile, collect_method, batch_size)
    calls, n_steps = per_call.shape
    return result * calls / n_steps if collect_method == "min-mean" else result  # ModelOpt's mean divides by the steps


PERCENTILE_CALIBRATORS: dict[str, Callable[[Tensor, float, str, int], float]] = {
    "corrected": corrected_amax,
    "modelopt": modelopt_amax,
}
