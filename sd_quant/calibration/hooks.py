"""Forward hooks that collect statistics of the layers' inputs while the pipeline runs (``quantization.statistics``).

The rows of a sample are drawn before the pipeline runs. Each candidate row has a random priority, which depends on the
seed, the layer and the prompt only; rows of the lowest priorities are kept. So the choice depends neither on the order
of the prompts nor on the process that runs them. Alternative not taken: reservoir sampling (Vitter's algorithm R),
which depends on the order and draws a random number for every row.

The first token of a text differs from all other tokens: in SDXL it is 80 times as large (MixDQ, Zhao et al. 2024), and
a range without this token clips it in every image. So the sample of a layer that reads the text always contains the
first prompt's first token.

Each prompt adds 4 bytes per step and convolution to the statistics; collecting takes about twice their memory.
"""

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.errors import SdQuantError
from sd_quant.quantization.statistics import (
    CALLS,
    ROWS,
    LayerStatistics,
    Sample,
    Statistics,
    layer_kind,
    lowest,
    merge,
    width_of,
)

FIRST_OF_ALL = -1.0  # a priority below all that are drawn
ROWS_PER_CALL = 8  # candidates drawn for each prompt and step, so that a few prompts fill the sample
MOST_DRAWN = 8  # rows drawn per row kept, at most: suffices for a network that is called in an eighth of the steps

# By (prompt, step) and layer: rows to keep, each as (priority, position in 0..1 among all rows of the prompt)
Wanted = Mapping[tuple[int, int], Mapping[str, Sequence[tuple[float, float]]]]


def draw(
    names: Iterable[str],
    prompts: Sequence[int],
    steps: int,
    seed: int,
    text: Collection[str] = (),
    whole: Sequence[int] | None = None,
    *,
    some_steps: bool = False,
) -> Wanted:
    """Draw which rows of each layer's input to keep, and under the name "" which calls of the whole network.

    Layers in ``text`` read the text. Calls are only drawn from the prompts in ``whole`` (default: all), whose inputs
    must have one shape. If the network may be called in some of the steps only (``some_steps``), more rows are drawn.
    """
    times = min(steps, MOST_DRAWN) if some_steps else 1
    wanted: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    calls = ("", CALLS, 1, prompts if whole is None else whole)
    for name, limit, candidates, among in (calls, *((name, ROWS, ROWS_PER_CALL, prompts) for name in names)):
        key, size = zlib.crc32(name.encode()), (steps * candidates, 2)
        drawn = [np.random.default_rng([seed, key, prompt]).random(size) for prompt in among]
        priority, place = np.reshape(drawn, (-1, 2)).T
        if name in text and 0 in among:  # its first row in the first step
            first = list(among).index(0) * steps * candidates
            firsts = slice(first, first + candidates * (steps if some_steps else 1), candidates)
            priority[firsts], place[firsts] = FIRST_OF_ALL, 0.0
        for index in priority.argsort()[: times * limit]:
            prompt, step = divmod(int(index) // candidates, steps)
            kept = wanted.setdefault((among[prompt], step), {}).setdefault(name, [])
            kept.append((float(priority[index]), float(place[index])))
    return wanted


def take_row(layer: nn.Module, x: Tensor, place: float, index: int = 0, batch: int = 1) -> Tensor:
    """Return one row [width] of the matrix that ``layer`` multiplies: a token, or a padded patch for a convolution.

    ``x`` [samples * batch, ...] is the layer's input; ``place`` in 0..1 is the relative position among all rows of the
    prompt at ``index`` of the batch. The row may be a view.
    """
    if not isinstance(layer, nn.Conv2d):
        tokens = math.prod(x.shape[1:-1])
        if len(x) % batch:  # no axis of samples
            all_rows = x.flatten(0, -2)
            return all_rows[int(place * len(all_rows))]
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
    """Collect the statistics of ``layers`` while the ``with`` block runs ``module`` on ``prompts``.

    The yielded statistics are empty until the block ends. ``position()`` returns the current denoising step and the
    prompts in the batch. With guidance the batch is the unconditional half followed by the conditional half, and both
    count for their prompt. If a sampler calls ``module`` several times in a step, ranges cover all
    calls, and sampled rows come from the first. Keyword inputs of ``module`` are sampled too (see ``draw``, which makes
    ``wanted``); ``batched`` names the inputs with a batch axis, by default all.
    Raises SdQuantError naming layer, prompt and step when an input is not finite.
    """
    kinds = {name: layer_kind(layer) for name, layer in layers.items()}
    devices = {name: layer.get_parameter("weight").device for name, layer in layers.items()}
    rows = {  # filled as far as there are priorities; on the layer's device, so that nothing waits for a copy
        name: torch.empty(ROWS, width_of(layer), dtype=torch.float16, device=devices[name])
        for name, layer in layers.items()
    }
    priorities: dict[str, list[float]] = {name: [] for name in layers}
    calls: list[Statistics] = []
    seen: dict[str, Tensor] = {}  # ranges of each layer's input in this call of the module, [samples, width]
    ranges: dict[tuple[str, ...], Tensor] = {}  # layers of one kind, reached in one call -> their ranges side by side
    folds: dict[tuple[str, ...], Tensor] = {}  # of linears, likewise: those of even and of odd prompts
    last: list[Any] = [None, None, None]  # an input, its ranges and their kind: query, key and value read one tensor
    drawn: dict[str, list[tuple[int, Sequence[tuple[float, float]]]]] = {}  # in this call: layer -> (index, rows)
    remaining = dict(wanted)
    steps_called: set[int] = set()

    def begin(module: nn.Module, arguments: tuple, inputs: dict[str, Tensor]) -> None:
        step, batch = position()
        steps_called.add(step)
        drawn.clear()
        for index, prompt in enumerate(batch):
            for name, places in remaining.pop((prompt, step), {}).items():
                drawn.setdefault(name, []).append((index, places))
        for index, [(priority, _)] in drawn.get("", ()):
            call = Statistics({}, {})
            for name, value in inputs.items():
                mine = value[index :: len(batch)] if batched is None or name in batched else value
                sample = mine[None].float().cpu().clone()  # the caller may reuse the buffer
                call.calls[name] = Sample(sample, torch.tensor([priority], dtype=torch.float64))
            calls.append(call)

    def observe(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        x = inputs[0] if inputs else named["input"]
        if not x.numel():  # an expert to which no token was sent
            return
        if x is not last[0] or kinds[name] != last[2]:
            width = 1 if kinds[name] == "conv" else x.shape[-1]
            last[:] = x, x.abs().reshape(len(x), -1, width).amax(1), kinds[name]
        range_of_call, prompts_of_call = last[1], len(position()[1])
        alike = name not in seen or len(seen[name]) == len(range_of_call)
        if len(range_of_call) % prompts_of_call or not alike:  # no axis of samples: the range counts for all prompts
            range_of_call = range_of_call.amax(0, keepdim=True).expand(prompts_of_call, -1)
        if name in seen and not alike:
            seen[name] = seen[name].amax(0, keepdim=True).expand(prompts_of_call, -1)
        seen[name] = torch.maximum(seen[name], range_of_call) if name in seen else range_of_call
        if name in drawn:
            x, batch = x.detach(), len(position()[1])
            for index, places in drawn.pop(name):
                for priority, place in places:
                    if (slot := slot_for(priority, priorities[name])) is not None:
                        rows[name][slot].copy_(take_row(layer, x, place, index, batch))
                        priorities[name][slot : slot + 1] = [priority]

    def settle(*_: object) -> None:
        """Check and merge this call's ranges, concatenated over layers, because layer by layer is slow."""
        step, batch = position()
        of_one_kind: dict[tuple[str, int], list[str]] = {}
        for name, by_sample in seen.items():
            of_one_kind.setdefault((kinds[name], len(by_sample)), []).append(name)
        for (kind, _count), reached in of_one_kind.items():
            names = tuple(reached)
            amax_of_call = torch.cat([seen[name] for name in names], dim=1).detach().float()
            if not torch.isfinite(amax_of_call).all():
                raise not_finite(seen, step, batch)
            by_prompt = amax_of_call.view(-1, len(batch), amax_of_call.shape[1]).amax(0)
            linear = kind == "linear"
            if names not in ranges:
                ranges[names] = by_prompt.new_zeros(*(() if linear else (max(prompts) + 1,)), steps, by_prompt.shape[1])
            place, own = (step, by_prompt.amax(0)) if linear else ((batch, step), by_prompt)
            ranges[names][place] = torch.maximum(ranges[names][place], own)
            for fold in {prompt % 2 for prompt in batch} if linear else ():
                mine = [index for index, prompt in enumerate(batch) if prompt % 2 == fold]
                of_folds = folds.setdefault(names, by_prompt.new_zeros(2, by_prompt.shape[1]))
                of_folds[fold] = torch.maximum(of_folds[fold], by_prompt[mine].amax(0))
        seen.clear()
        last[:] = None, None, None

    statistics = Statistics({}, {})
    with ExitStack() as hooks:
        hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
        hooks.enter_context(module.register_forward_hook(settle))
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(observe, name), with_kwargs=True))
        yield statistics
    called = sorted(steps_called)  # a denoiser may be one of several, each called in some of the steps
    folds_of_layers = by_layer(folds, layers)
    for name, layer_amax in by_layer(ranges, layers).items():
        layer_amax = layer_amax[..., called, :] if len(called) < steps else layer_amax
        layer_amax = layer_amax[..., 0] if kinds[name] == "conv" else layer_amax
        values = rows.pop(name)[: len(priorities[name])].clamp_(-65504, 65504)  # fp16 made larger ones infinite
        sample = Sample(values.cpu(), torch.tensor(priorities[name], dtype=torch.float64))
        statistics.layers[name] = LayerStatistics(
            kinds[name], layer_amax, lowest([sample], ROWS), folds_of_layers.get(name)
        )
    statistics.calls |= merge(calls).calls


def slot_for(priority: float, priorities: Sequence[float]) -> int | None:
    """Return where to store a row of this priority: a free index, that of the highest priority, or None (nowhere)."""
    if priority == FIRST_OF_ALL and priority in priorities:  # a text's first token is the same in all steps
        return None
    if len(priorities) < ROWS:
        return len(priorities)
    last = max(range(ROWS), key=priorities.__getitem__)
    return last if priority < priorities[last] else None


def by_layer(ranges: Mapping[tuple[str, ...], Tensor], layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Split ``ranges``, each of several layers concatenated along the last axis, by layer; merge by maximum."""
    found: dict[str, Tensor] = {}
    for names, side_by_side in ranges.items():
        widths = [1 if layer_kind(layers[name]) == "conv" else width_of(layers[name]) for name in names]
        for name, part in zip(names, side_by_side.cpu().split(widths, dim=-1), strict=True):
            found[name] = torch.maximum(found[name], part) if name in found else part.clone()
    return found


def not_finite(seen: Mapping[str, Tensor], step: int, batch: Sequence[int]) -> SdQuantError:
    """Build the error for the first layer of ``seen`` with ranges [samples, width] that are not finite."""
    broken = {name: ~torch.isfinite(by_sample).all(dim=1) for name, by_sample in seen.items()}
    name = next(name for name, samples in broken.items() if samples.any())
    prompt = batch[int(broken[name].nonzero()[0]) % len(batch)]
    return SdQuantError(f"the input of layer {name} is not finite at prompt {prompt}, step {step}")
