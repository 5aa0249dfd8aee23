"""What calibration remembers of a layer's inputs, collected by hooks while the real pipeline runs.

Nothing here knows a recipe: per-channel ranges of linear inputs by step, and per-tensor ranges of convolution inputs by
prompt and step, are enough to derive every quant_level, alpha, percentile and collect_method.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sd_quant.errors import SdQuantError


@dataclass(slots=True)
class LayerStatistics:
    """``amax`` is fp32: [steps, in_features] for a ``linear``, [prompts, steps] for a ``conv``."""

    kind: str
    amax: Tensor


def kind_of(module: nn.Module) -> str:
    return "conv" if isinstance(module, nn.Conv2d) else "linear"


@contextmanager
def collect(
    module: nn.Module,
    names: Mapping[str, str],
    prompts: int,
    steps: int,
    position: Callable[[], tuple[int, list[int]]],
) -> Iterator[dict[str, LayerStatistics]]:
    """Fill statistics of the layers in ``names`` while the block runs ``module``.

    ``position()`` says where the pipeline stands: the denoising step, and the prompts in the batch. With guidance the
    UNet sees the unconditional half first, then the conditional one; both halves count for their prompt.
    Raises SdQuantError naming layer, prompt and step when an input is not finite.
    """
    statistics: dict[str, LayerStatistics] = {}

    def observe(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        magnitude = inputs[0].detach().float().abs()
        step, batch = position()
        by_sample = magnitude.flatten(1).amax(dim=1).view(-1, len(batch)).amax(dim=0)
        if not torch.isfinite(by_sample).all():
            prompt = batch[int((~torch.isfinite(by_sample)).nonzero()[0])]
            raise SdQuantError(f"the input of layer {name} is not finite at prompt {prompt}, step {step}")
        kind = kind_of(layer)
        if name not in statistics:
            shape = (prompts, steps) if kind == "conv" else (steps, magnitude.shape[-1])
            statistics[name] = LayerStatistics(kind, torch.zeros(shape))
        amax = statistics[name].amax
        if kind == "conv":
            amax[batch, step] = torch.maximum(amax[batch, step], by_sample.cpu())
        else:
            amax[step] = torch.maximum(amax[step], magnitude.flatten(0, -2).amax(dim=0).cpu())

    hooks = []
    for name in names:
        layer = module.get_submodule(name)
        hooks.append(layer.register_forward_pre_hook(lambda layer, inputs, name=name: observe(name, layer, inputs)))
    try:
        yield statistics
    finally:
        for hook in hooks:
            hook.remove()
