"""Engines that do something beside each call: note its inputs, or its time."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

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
        self.seen: dict[str, dict[int, dict[str, Tensor]]] = {}  # a copy of the inputs by part, number and name

    def remember(self, part: str, inputs: Mapping[str, Tensor]) -> None:
        if self.count[part] in self.wanted[part]:
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            self.seen.setdefault(part, {})[self.count[part]] = copies
        self.count[part] += 1

    def __getitem__(self, part: str) -> Engine:
        return WatchedEngine(self.variant[part], partial(self.remember, part))

    def __iter__(self) -> Iterator[str]:
        return iter(self.variant)

    def __len__(self) -> int:
        return len(self.variant)
