"""What a stranger's configuration has to hold: a dataclass states type and limits of every entry that is read.

They are stated as a knob's are (``sd_quant.knobs``), before anything is computed with them: a text or a billion where a
number of channels belongs is refused by name. Entries that nothing reads are left alone, whatever they are.
"""

import dataclasses
from collections.abc import Mapping
from typing import cast

from sd_quant.errors import ConfigError
from sd_quant.knobs import BOUNDED, Limit, fields_of, read_value


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
