"""What calibration remembers of a layer's inputs, collected by hooks while the real pipeline runs.

Nothing here knows a recipe. Ranges are kept per denoising step: per channel for a linear, per prompt for a convolution,
which is enough for every quant_level, alpha, percentile and collect_method. Beside them stands a small sample of real
inputs to measure errors on: each row is what one output element multiplies, a token of a linear or a padded patch of a
convolution.

Which rows are kept is drawn before the pass: a position has a random priority that depends on the seed, the layer and
the prompt alone, and the lowest priorities win. So statistics of different prompts merge exactly, by a maximum and by
keeping the lowest priorities, whatever ran where and in which order. The road not taken is reservoir sampling proper
(Vitter's algorithm R), which depends on the order of what it sees and costs a random number per row.

What is kept is bounded by ``bytes_bound``, where a prompt adds only 4 bytes per step and convolution; while it is put
together, a process needs about twice that.
"""

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.errors import SdQuantError
from sd_quant.quantization.statistics import CALLS, ROWS, LayerStatistics, Sample, Statistics, kind_of, lowest, width_of

ROWS_A_CALL = 8  # candidates per prompt and step, so that few prompts fill the sample too

# (prompt, step) to layer to the rows to keep: (priority, place among all there are in 0..1)
Wanted = Mapping[tuple[int, int], Mapping[str, Sequence[tuple[float, float]]]]


def draw(names: Iterable[str], prompts: Sequence[int], steps: int, seed: int) -> Wanted:
    """What to keep of each layer, and under the name "" of the whole network: the lowest of random priorities."""
    wanted: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    for name, limit, candidates in (("", CALLS, 1), *((name, ROWS, ROWS_A_CALL) for name in names)):
        key, size = zlib.crc32(name.encode()), (steps * candidates, 2)
        drawn = np.stack([np.random.default_rng([seed, key, prompt]).random(size) for prompt in prompts])
        priority, place = drawn.reshape(-1, 2).T
        for index in priority.argsort()[:limit]:
            prompt, step = divmod(int(index) // candidates, steps)
            kept = wanted.setdefault((prompts[prompt], step), {}).setdefault(name, [])
            kept.append((float(priority[index]), float(place[index])))
    return wanted


def take_row(layer: nn.Module, x: Tensor, place: float, index: int = 0, batch: int = 1) -> Tensor:
    """[width]: what one output element of ``layer`` multiplies, zeros around a patch included; may be a view.

    ``place`` is 0..1 of all there are of the prompt at ``index`` of a ``batch``; ``x`` [samples * batch, ...].
    """
    if not isinstance(layer, nn.Conv2d):
        tokens = math.prod(x.shape[1:-1])
        sample, token = divmod(int(place * (len(x) // batch) * tokens), tokens)
        return x.flatten(0, -2)[(sample * batch + index) * tokens + token]
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    left, right, above, below = padding = layer._reversed_padding_repeated_twice
    spans = dilation[0] * (kernel[0] - 1) + 1, dilation[1] * (kernel[1] - 1) + 1
    rows = (x.shape[2] + above + below - spans[0]) // stride[0] + 1
    columns = (x.shape[3] + left + right - spans[1]) // stride[1] + 1
    sample, position = divmod(int(place * (len(x) // batch) * rows * columns), rows * columns)
    top, left = position // columns * stride[0], position % columns * stride[1]
    padded = F.pad(x[sample * batch + index], padding)
    return padded[:, top : top + spans[0] : dilation[0], left : left + spans[1] : dilation[1]].flatten()


@contextmanager
def collect(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    prompts: Sequence[int],
    steps: int,
    position: Callable[[], tuple[int, Sequence[int]]],
    wanted: Wanted,
    batched: Collection[str] | None = None,
) -> Iterator[Statistics]:
    """Statistics of ``layers``, filled when the block, which runs ``module`` on ``prompts``, has ended.

    ``position()`` says where the pipeline stands: the denoising step, and the prompts in the batch. With guidance the
    UNet sees the unconditional half first, then the conditional one; both halves count for their prompt. Several calls
    in one step, as of samplers of second order, widen the same ranges; rows are taken from the first of them.
    Inputs that ``module`` is given by name are sampled too; ``batched`` are those with a row per sample,
    by default all.
    Raises SdQuantError naming layer, prompt and step when an input is not finite.
    """
    kinds = {name: kind_of(layer) for name, layer in layers.items()}
    rows = {}  # filled as far as there are priorities; on the layer's device, so that taking one waits for nothing
    for name, layer in layers.items():
        device = layer.get_parameter("weight").device
        rows[name] = torch.empty(ROWS, width_of(layer), dtype=torch.float16, device=device)
    priorities: dict[str, list[float]] = {name: [] for name in layers}
    calls: dict[str, list[Sample]] = {}
    seen: dict[str, Tensor] = {}  # by this call of the module: the ranges of each layer's input, [samples, width]
    ranges: dict[tuple[str, ...], Tensor] = {}  # layers of one kind, reached in one call, to their ranges side by side
    last: list[Tensor | None] = [None, None]  # query, key and value read one tensor
    drawn: dict[str, list[tuple[int, Sequence[tuple[float, float]]]]] = {}  # for this call: layer to (index, rows)
    remaining = dict(wanted)

    def begin(module: nn.Module, arguments: tuple, inputs: dict[str, Tensor]) -> None:
        step, batch = position()
        drawn.clear()
        for index, prompt in enumerate(batch):
            for name, places in remaining.pop((prompt, step), {}).items():
                drawn.setdefault(name, []).append((index, places))
        for index, [(priority, _)] in drawn.get("", ()):
            for name, value in inputs.items():
                mine = value[index :: len(batch)] if batched is None or name in batched else value
                sample = mine[None].float().cpu().clone()  # who calls may use the buffer again
                calls.setdefault(name, []).append(Sample(sample, torch.tensor([priority], dtype=torch.float64)))

    def observe(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if x is not last[0]:
            magnitude = x.abs()
            conv = kinds[name] == "conv"
            last[:] = (
                x,
                magnitude.flatten(1).amax(1, keepdim=True) if conv else magnitude.view(len(x), -1, x.shape[-1]).amax(1),
            )
        seen[name] = torch.maximum(seen[name], last[1]) if name in seen else last[1]
        if name in drawn:
            x, batch = x.detach(), len(position()[1])
            for index, places in drawn.pop(name):
                for priority, place in places:
                    rows[name][len(priorities[name])].copy_(take_row(layer, x, place, index, batch))
                    priorities[name].append(priority)

    def settle(*_: object) -> None:
        """One look at all that this call of the module has seen: per layer it would cost more than the ranges."""
        step, batch = position()
        for kind in ("linear", "conv"):
            names = tuple(name for name in seen if kinds[name] == kind)
            if not names:
                continue
            found = torch.cat([seen[name] for name in names], dim=1).detach().float()
            if not torch.isfinite(found).all():
                raise not_finite(seen, step, batch)
            if kind == "linear":
                if names not in ranges:
                    ranges[names] = found.new_zeros(steps, found.shape[1])
                ranges[names][step] = torch.maximum(ranges[names][step], found.amax(0))
            else:
                if names not in ranges:
                    ranges[names] = found.new_zeros(max(prompts) + 1, steps, len(names))
                by_prompt = found.view(-1, len(batch), len(names)).amax(0)
                ranges[names][batch, step] = torch.maximum(ranges[names][batch, step], by_prompt)
        seen.clear()
        last[:] = None, None

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(settle)]
    for name, layer in layers.items():
        hooks.append(layer.register_forward_pre_hook(partial(observe, name)))
    statistics = Statistics({}, {})
    try:
        yield statistics
    finally:
        for hook in hooks:
            hook.remove()
    amax: dict[str, Tensor] = {}
    for names, found in ranges.items():
        widths = [1 if kinds[name] == "conv" else width_of(layers[name]) for name in names]
        for name, part in zip(names, found.cpu().split(widths, dim=-1), strict=True):
            part = part[..., 0] if kinds[name] == "conv" else part
            amax[name] = torch.maximum(amax[name], part) if name in amax else part.clone()
    for name, found in amax.items():
        values = rows.pop(name)[: len(priorities[name])].clamp_(-65504, 65504)  # infinite where fp16 ended
        sample = Sample(values.cpu(), torch.tensor(priorities[name], dtype=torch.float64))
        statistics.layers[name] = LayerStatistics(kinds[name], found, lowest([sample], ROWS))
    statistics.calls |= {name: lowest(samples, CALLS) for name, samples in calls.items()}


def not_finite(seen: Mapping[str, Tensor], step: int, batch: Sequence[int]) -> SdQuantError:
    """``seen``: layer to ranges [samples, width], in the order of the network; the first that is broken is named."""
    broken = {name: ~torch.isfinite(by_sample).all(dim=1) for name, by_sample in seen.items()}
    name = next(name for name, samples in broken.items() if samples.any())
    prompt = batch[int(broken[name].nonzero()[0]) % len(batch)]
    return SdQuantError(f"the input of layer {name} is not finite at prompt {prompt}, step {step}")
