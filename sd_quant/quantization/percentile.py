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

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tables of this file are read before torch is loaded
    from torch import Tensor

    from sd_quant.quantization.assignment import LayerAssignment
    from sd_quant.quantization.statistics import LayerStatistics

COLLECT_METHODS = {  # torch's reductions over the prompts of a step, and over the steps
    "global_min": ("amin", "amin"),
    "min-max": ("amax", "amin"),
    "min-mean": ("mean", "amin"),
    "mean-max": ("amax", "mean"),
    "default": ("amax", "amax"),
}
QUARTILES = {"least": 0.0, "first_quartile": 0.25, "median": 0.5, "third_quartile": 0.75, "largest": 1.0}


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


def ranges_by_step(
    assignment: Mapping[str, LayerAssignment], statistics: Mapping[str, LayerStatistics]
) -> list[dict[str, object]]:
    """Return quartiles of input ranges: a row for each denoising step of each layer with a quantized input.

    Quartiles are over a linear's channels (maxima over all prompts), or over a convolution's prompts. ``kept`` is the
    largest magnitude that is not clipped; None for an input that is smoothed, rotated or scaled at run time.
    """
    rows: list[dict[str, object]] = []
    for name, layer in assignment.items():
        if layer.activation_format is None or name not in statistics:
            continue
        seen = statistics[name].amax if statistics[name].kind == "linear" else statistics[name].amax.T
        levels = seen.float().new_tensor(list(QUARTILES.values()))
        as_it_is = layer.pre_quant_scale is None and layer.activation_scale and not (layer.per_token or layer.rotation)
        kept = layer.activation_amax + abs(layer.shift) if as_it_is else None  # type: ignore[operator]
        for step, numbers in enumerate(seen.float().quantile(levels, dim=1).T.tolist(), start=1):
            rows.append({"name": name, "step": step, **dict(zip(QUARTILES, numbers, strict=True)), "kept": kept})
    return rows
