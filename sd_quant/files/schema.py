"""What a stranger's configuration has to hold: a dataclass states type and limits of every entry that is read.

They are stated as a knob's are (``sd_quant.knobs``), before anything is computed with them: a text or a billion where a
number of channels belongs is refused by name. Entries that nothing reads are left alone, whatever they are.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import cast

from sd_quant.errors import ConfigError
from sd_quant.knobs import BOUNDED, Limit, fields_of, read_value

MOST = 10**9  # of a number in a config: no network is as wide, and no sampler has as many steps


def check_schema(schema: type, config: object, path: str = "", whole: bool = True) -> None:
    """Raises ConfigError unless ``config`` has every field of the dataclass ``schema``; ``path`` is for messages.

    Where it need not be ``whole``, entries may be missing.
    """
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
    """Raises ConfigError for an entry of another kind than in ``usual``, or with a number that is none or beyond MOST.

    ``usual`` holds what a class takes for entries that are not given, so it states the kind of each without a list of
    ours. A kind is true or false, a number or text; null says none, and a list may stand for one value.
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
    """The numbers of an entry, in lists too."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value
