"""Engines that are opened on first use; where memory is short, one is closed before the next is opened.

The full-size model in three variants takes 45 GB at once, its largest part 15 GB. Alternative not taken: a process per
engine, because variants share the engines of parts that are not quantized.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from sd_quant.engines.base import Engine

Value = TypeVar("Value")


class OnDemand(Mapping[str, Value], Generic[Value]):
    """A mapping whose values are computed by ``make(name)`` on every access; listing its names computes nothing."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Value]):
        self.names, self.make = list(names), make

    def __getitem__(self, name: str) -> Value:
        if name not in self.names:
            raise KeyError(name)
        return self.make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Pool:
    """Engines by key, each opened by ``open_engine(key)`` on first use."""

    def __init__(self, open_engine: Callable[[Any], Engine], most: int | None = None):
        """At most ``most`` engines are open at a time; None means no limit."""
        self.open_engine, self.most, self.engines = open_engine, most, dict[Hashable, Engine]()

    def __getitem__(self, key: Hashable) -> Engine:
        if key not in self.engines:
            while self.most is not None and len(self.engines) >= self.most:
                self.engines.pop(next(iter(self.engines))).close()
            self.engines[key] = self.open_engine(key)
        return self.engines[key]

    def close(self) -> None:
        """Close all engines; they are opened again on their next use."""
        while self.engines:
            self.engines.popitem()[1].close()


class Variant(OnDemand[Engine]):
    """The model's engines in one runtime and precision, by part, from a pool; "part/h" is for more precise steps."""

    def __init__(self, pool: Pool, keys: Mapping[str, Hashable]):
        """``keys`` maps each part to its engine's key in the ``pool``."""
        super().__init__(keys, lambda part: pool[keys[part]])
        self.pool = pool
