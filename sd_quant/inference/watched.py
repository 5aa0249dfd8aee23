"""Engines that do something beside each call: note its inputs, its outputs, or its time."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sd_quant.engines.base import Engine


class WatchedEngine:
    """``engine`` with ``on_call`` called with its inputs before every call."""

    def __init__(self, engine: Engine, on_call: Callable[[Mapping[str, Tensor]], object] = lambda inputs: None):
        self.engine, self.on_call = engine, on_call
        self.name, self.inputs, self.device = engine.name, engine.inputs, engine.device

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        self.on_call(inputs)
        return self.engine(**inputs)

    def reopen(self) -> bool:
        return self.engine.reopen()

    def close(self) -> None:
        self.engine.close()


class WatchedVariant(Mapping[str, Engine]):
    """The engines of a variant by part, which remember the inputs of some calls of each."""

    def __init__(self, variant: Mapping[str, Engine], calls: Mapping[str, Collection[int]]):
        """``calls`` gives by part the numbers of the calls to remember, by default the first."""
        self.variant, self.wanted = variant, dict.fromkeys(variant, (0,)) | calls
        self.count = dict.fromkeys(variant, 0)  # of the calls so far
        self.samples = dict.fromkeys(variant, 0)  # in these calls
        self.seen: dict[str, dict[int, dict[str, Tensor]]] = {}  # a copy of the inputs by part, number and name

    def remember(self, part: str, inputs: Mapping[str, Tensor]) -> None:
        if self.count[part] in self.wanted[part]:
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            self.seen.setdefault(part, {})[self.count[part]] = copies
        self.count[part] += 1
        self.samples[part] += len(next(iter(inputs.values())))

    def __getitem__(self, part: str) -> Engine:
        return WatchedEngine(self.variant[part], partial(self.remember, part))

    def __iter__(self) -> Iterator[str]:
        return iter(self.variant)

    def __len__(self) -> int:
        return len(self.variant)


Outputs = Mapping[str, Sequence[Mapping[str, Tensor]]]  # of all calls, by part
Answer = Callable[[str, int], Mapping[str, Tensor] | None]  # the output of a part's n-th call; None: not known


class ReplayedVariant(dict[str, Engine]):
    """The engines of a variant by part, whose outputs are kept. What ``answer`` knows is not computed."""

    def __init__(self, variant: Mapping[str, Engine], answer: Answer = lambda part, number: None):
        super().__init__({part: ReplayedEngine(self, part) for part in variant})  # type: ignore[misc]
        self.variant, self.answer = variant, answer
        self.outputs: dict[str, list[Mapping[str, Tensor]]] = {part: [] for part in variant}


class ReplayedEngine:
    """One of a ``ReplayedVariant``; the engine itself is asked for only to compute."""

    def __init__(self, replayed: ReplayedVariant, part: str):
        self.replayed, self.part = replayed, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replayed.variant[self.part], name)

    def __call__(self, **inputs: Tensor) -> Mapping[str, Tensor]:
        kept = self.replayed.outputs[self.part]
        known = self.replayed.answer(self.part, len(kept))
        kept.append(self.replayed.variant[self.part](**inputs) if known is None else known)
        return kept[-1]
