"""One activation range from many UNet calls: the diffusion percentile calibrator of NVIDIA's ModelOpt example.

Every denoising step has a range of its own. The calibrator first reduces over the prompts within a step, then over the
first ``int(n_steps * percentile)`` steps, which are the noisiest ones, each by the reduction that ``COLLECT_METHODS``
names.

``corrected`` is just that. ``modelopt`` is what ``PercentileCalibrator`` in NVIDIA/Model-Optimizer's
``examples/diffusers/quantization/calib/plugin_calib.py`` (0.23 to 0.47) computes instead, so that old results can be
reproduced. The two differ where the original is defective:

- its unit is the UNet call, not the prompt, so min and mean depend on the batch size and on which prompts share a call;
- ``min-mean`` divides the sum over calls by n_steps: 32 calls on 20 steps give 1.6 times the mean.

NeMo 2.0 to 2.4 offers no collect_method: it computes what ``modelopt`` does for ``min-mean``. Not imitated: samplers
with two calls a step, whose calls the original puts under the wrong steps, and the original's sums in the dtype of the
activations, which overflow in fp16.

``default`` is ModelOpt's word for the plain maximum. Its command line then takes another calibrator, so ``modelopt``
looks at every step whatever the percentile; its class, given the word, would answer with a sum that nothing divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # knobs are checked against the tables of this file without torch
    from torch import Tensor

COLLECT_METHODS = {  # the names of torch's reductions, over the prompts of a step and over the steps
    "global_min": ("amin", "amin"),
    "min-max": ("amax", "amin"),
    "min-mean": ("mean", "amin"),
    "mean-max": ("amax", "mean"),
    "default": ("amax", "amax"),
}


def first_steps(amax: Tensor, percentile: float) -> Tensor:
    """The columns of ``amax`` [prompts, steps] that count. Raises ValueError when they are none or more than exist."""
    n_steps = amax.shape[1]
    selected = int(n_steps * percentile)
    if not 1 <= selected <= n_steps:
        raise ValueError(
            f"percentile {percentile} selects {selected} of {n_steps} steps, expected at least one and no more than "
            f"there are; choose a percentile from {1 / n_steps:g} to 1"
        )
    return amax[:, :selected]


def corrected_amax(amax: Tensor, percentile: float, collect_method: str, batch_size: int) -> float:
    """The range to quantize with, by ``COLLECT_METHODS``.

    ``amax``: fp32 [prompts, steps], steps in the order of denoising. ``batch_size`` is ignored: every prompt has a
    range of its own here, however many shared a UNet call, so how calibration was batched does not matter.
    Raises ValueError when ``percentile`` selects no step.
    """
    over_prompts, over_steps = COLLECT_METHODS[collect_method]
    per_step = getattr(first_steps(amax, percentile), over_prompts)(dim=0)
    return getattr(per_step, over_steps)(dim=0).item()


def modelopt_amax(amax: Tensor, percentile: float, collect_method: str, batch_size: int) -> float:
    """The range that ModelOpt's example finds when its sampler calls the UNet once a step.

    ``amax``: fp32 [prompts, steps], as for ``corrected_amax``. Each ``batch_size`` (at least 1) consecutive prompts are
    one call at each step, the last call may have fewer, and a call has one range: the largest of its prompts.
    Raises ValueError when ``percentile`` selects no step, where the original fails with a RuntimeError.
    """
    import torch

    if collect_method == "default":
        return amax.max().item()
    per_call = torch.stack([prompts.amax(dim=0) for prompts in amax.split(batch_size)])
    result = corrected_amax(per_call, percentile, collect_method, batch_size)
    calls, n_steps = per_call.shape
    return result * calls / n_steps if collect_method == "min-mean" else result  # their mean divides by the steps


PERCENTILE_CALIBRATORS: dict[str, Callable[[Tensor, float, str, int], float]] = {
    "corrected": corrected_amax,
    "modelopt": modelopt_amax,
}
