"""Wrappers of engines that record inputs, outputs or time of calls, or replay known outputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sd_quant.engines.base import Engine
from sd_quant.engines.pool import OnDemand

Tensors = Mapping[str, Tensor]
Outputs = Mapping[str, Sequence[Tensors]]  # of all calls, by part
Answer = Callable[[str, int], Tensors | None]  # the output of a part's n-th call, if it is known


class WatchedEngine:
    """An engine that returns ``call(inputs)`` unless that is None; then it computes by the wrapped ``engine``."""

    name: str
    inputs: dict[str, torch.dtype]
    device: torch.device
    reopen: Callable[[], bool]
    close: Callable[[], None]

    def __init__(self, engine: Engine, call: Callable[[dict[str, Tensor]], Any]):
        self.engine, self.call = engine, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        outputs = self.call(inputs)
        return self.engine(**inputs) if outputs is None else outputs


class WatchedVariant(OnDemand[Engine]):
    """The engines of one variant (precision) of the model, by part; ``seen`` keeps the inputs of selected calls."""

    def __init__(self, variant: Mapping[str, Engine], calls: Mapping[str, Collection[int]]):
        """``calls`` has, by part, the numbers of the calls whose inputs are kept, from 0; by default the first."""
        super().__init__(variant, lambda part: WatchedEngine(variant[part], partial(self.remember, part)))
        self.wanted = dict.fromkeys(variant, (0,)) | calls
        self.count = dict.fromkeys(variant, 0)  # of the calls so far
        self.seen: dict[str, dict[int, dict[str, Tensor]]] = {}  # a copy of the inputs by part, number and name

    def remember(self, part: str, inputs: dict[str, Tensor]) -> None:
        if self.count[part] in self.wanted[part]:
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            self.seen.setdefault(part, {})[self.count[part]] = copies
        self.count[part] += 1


class ReplayedVariant(dict[str, Engine]):
    """A variant's engines by part; ``outputs`` keeps all outputs, and those that ``answer`` knows are not computed."""

    def __init__(self, variant: Mapping[str, Engine], answer: Answer = lambda part, number: None):
        super().__init__({part: ReplayedEngine(self, part) for part in variant})
        self.variant, self.answer = variant, answer
        self.outputs: dict[str, list[Tensors]] = {part: [] for part in variant}


class ReplayedEngine(WatchedEngine):
    def __init__(self, replayed: ReplayedVariant, part: str):
        self.replayed, self.part = replayed, part

    @property
    def engine(self) -> Engine:  # type: ignore[override]  # opened to compute only
        return self.replayed.variant[self.part]

    def call(self, inputs: dict[str, Tensor]) -> Tensors:
        kept = self.replayed.outputs[self.part]
        known = self.replayed.answer(self.part, len(kept))
        kept.append(self.engine(**inputs) if known is None else known)
        return kept[-1]
