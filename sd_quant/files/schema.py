"""Checks of untrusted configurations: a dataclass states type and limits of every entry that is read.

Limits are stated as in ``sd_quant.knobs``. So a wrong value, such as a text or a billion as a number of channels, is
refused by name before anything is computed. Entries that nothing reads may have any value.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import cast

from sd_quant.errors import ConfigError
from sd_quant.knobs import BOUNDED, Limit, fields_of, read_value

MOST = 10**9  # of a number in a config: no network is as wide, and no sampler has as many steps


def check_schema(schema: type, config: object, path: str = "", whole: bool = True) -> None:
    """Raise ConfigError for an entry that does not fit its field of ``schema``, or, if ``whole``, is missing."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path.rstrip('.') or 'it'} is {BOUNDED.repr(config)}, expected a mapping")
    for name, (kind, stated) in fields_of(schema).items():
        if name not in config:
            if whole:
                raise ConfigError(f"{path}{name} is missing")
            continue
        if dataclasses.is_dataclass(kind):
            check_schema(cast(type, kind), config[name], f"{path}{name}.")
            continue
        value = read_value(kind, config[name], path + name)
        for limit in stated:
            if isinstance(limit, Limit) and value is not None:
                limit.check(path + name, value)


def check_like(usual: Mapping[str, object], config: Mapping) -> None:
    """Raise ConfigError for an entry whose kind differs from its default's, or with NaN or a number beyond MOST.

    ``usual`` are the class's defaults. Kinds are boolean, number and text; null and lists match any kind.
    """
    for name, default in usual.items():
        value = config.get(name)
        expected, found = kind_of(default), kind_of(value)
        if expected and found and expected != found:
            raise ConfigError(f"{name} is {BOUNDED.repr(value)}, expected {expected}")
        if kind_of(default) == "a number" and not math.isfinite(cast(float, default)):
            continue
        for number in numbers_in(value):
            if not abs(number) <= MOST:  # of NaN too
                raise ConfigError(f"{name} is {BOUNDED.repr(value)}, expected numbers from -{MOST} to {MOST}")


def kind_of(value: object) -> str | None:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "text" if isinstance(value, str) else None


def numbers_in(value: object) -> Iterator[float]:
    """Yield the numbers in a JSON value, also those inside lists and objects."""
    if isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from numbers_in(item)
    elif not isinstance(value, bool) and isinstance(value, int | float):
        yield value
