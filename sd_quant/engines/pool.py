"""Engines that are opened when they are asked for; where memory is short, one is closed before the next is opened.

The full-size model in three versions, framework, unquantized and quantized engine, takes 45 GB at once, and its largest
part 15. The road not taken is a process per engine: images of one version are made by parts of another.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from sd_quant.engines.base import Engine


class Pool:
    """``open_engine(key)`` makes an engine; at most ``most`` are open, all that were asked for when it is None."""

    def __init__(self, open_engine: Callable[[Any], Engine], most: int | None = None):
        self.open_engine, self.most, self.engines = open_engine, most, dict[Hashable, Engine]()

    def __getitem__(self, key: Hashable) -> Engine:
        if key not in self.engines:
            while self.most is not None and len(self.engines) >= self.most:
                self.engines.pop(next(iter(self.engines))).close()
            self.engines[key] = self.open_engine(key)
        return self.engines[key]

    def close(self) -> None:
        while self.engines:
            self.engines.popitem()[1].close()


class Variant(Mapping[str, Engine]):
    """The parts of one version of the model, by name, from a pool in which they have these ``keys``."""

    def __init__(self, pool: Pool, keys: Mapping[str, Hashable]):
        self.pool, self.keys_of = pool, keys

    def __getitem__(self, part: str) -> Engine:
        return self.pool[self.keys_of[part]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)
