"""A plain mapping as a typed dataclass: unknown names, missing values and wrong types are refused by the knob's name.

Not taken: OmegaConf's structured configs, which report a wrong knob in several lines and a type of their own.
"""

import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Mapping

from sd_quant.errors import ConfigError

# A few lines of YAML that name each other describe a list of a billion entries.
BOUNDED = reprlib.Repr()
BOUNDED.maxlevel, BOUNDED.maxlist, BOUNDED.maxdict = 3, 20, 10
BOUNDED.maxstring = BOUNDED.maxlong = BOUNDED.maxother = 200


def check(holds: bool, knob: str, found: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{knob} is {found}, expected {expected}")


def check_choice(knob: str, found: object, choices) -> None:
    known = ", ".join(f"{choice:g}" if isinstance(choice, float) else str(choice) for choice in choices)
    check(found in choices, knob, found, f"one of {known}")


def check_at_least(knob: str, found: int | float, least: int | float) -> None:
    check(found >= least, knob, found, f"at least {least}")


def near(name: str, known) -> str:
    """``; did you mean ...`` for a misspelt name, or the names that exist."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(known))}"


def read(job: type, mapping: Mapping, path: str = ""):
    """``mapping`` as a dataclass, every type checked. Raises ConfigError with the knob's full name."""
    hints = typing.get_type_hints(job)
    known = {field.name: hints[field.name] for field in dataclasses.fields(job)}
    for name in mapping:
        if name not in known:
            raise ConfigError(f"there is no knob {path}{name}; {near(str(name), known)}")
    for name in known:
        if name not in mapping:
            raise ConfigError(f"the knob {path}{name} is missing; give it a value")
    return job(**{name: read_value(hint, mapping[name], path + name) for name, hint in known.items()})


def read_value(hint, value: object, knob: str):
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{knob} is {BOUNDED.repr(value)}, expected a group of knobs")
        return read(typing.cast(type, hint), value, knob + ".")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is dict and isinstance(value, Mapping):
            name, inner = typing.get_args(option)
            if all(type(key) is name for key in value):
                return {key: read_value(inner, item, f"{knob}.{key}") for key, item in value.items()}
        if origin is list and isinstance(value, list) and all(type(item) in typing.get_args(option) for item in value):
            return value
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            check(math.isfinite(value), knob, value, "a finite number")
            return float(value)
        if origin in (int, str, bool, types.NoneType) and type(value) is origin:
            return value
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false", types.NoneType: "null"}
    lists = {str: "a list of texts", int: "a list of whole numbers"}
    expected = " or ".join(
        names[option] if option in names else lists[typing.get_args(option)[0]] for option in options
    )
    raise ConfigError(f"{knob} is {BOUNDED.repr(value)}, expected {expected}")
