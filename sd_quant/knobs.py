"""Read and check configuration options (knobs) by the annotations of the dataclasses that hold them.

An annotation states the type, the limits of the value, and the meaning, which ``--help`` prints:

    n_steps: Annotated[int, COUNT, "denoising steps of a calibration image"]

An error is one sentence that begins with the knob's full name. Alternatives not taken: pydantic, which takes 0.2 s to
import and whose error types (strict types, unions, unknown names) would need a table as long as ``read_value`` to
become such sentences; OmegaConf's structured configs, whose errors take several lines.
"""

import dataclasses
import difflib
import json
import reprlib
import shlex
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sd_quant.errors import ConfigError

BOUNDED = reprlib.Repr()  # because a few lines of YAML that name each other describe a list of a billion entries
BOUNDED.maxlevel, BOUNDED.maxlist, BOUNDED.maxdict = 3, 20, 10
BOUNDED.maxstring = BOUNDED.maxlong = BOUNDED.maxother = 200

DIFFERENT = 0.3  # the largest difference, as 1 - difflib's ratio, between a misspelling and the name that was meant
FEW = 20  # the most names that an error lists

TYPE_NAMES = {
    float: "a number", int: "a whole number", str: "text", bool: "true or false", types.NoneType: "null",
    list[str]: "a list of texts", list[int]: "a list of whole numbers", list[float]: "a list of numbers",
    list[list[int]]: "a list of lists of whole numbers",
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A condition on a value in addition to its type. Null, where the type allows it, always passes."""

    holds: Callable[[Any], bool]
    expected: str | Callable[[], str]  # the words of an error
    each: bool = False  # whether it applies to each item of a list

    def __str__(self) -> str:
        return self.expected if isinstance(self.expected, str) else self.expected()

    def check(self, knob: str, value: object) -> None:
        """Raise ConfigError when ``value`` of ``knob``, or one of its items if ``each``, breaks the limit."""
        for item in value if self.each else [value]:
            check(self.holds(item), knob, item, str(self))


@dataclass(frozen=True)
class Only:
    """Annotation of a field that holds a nested dataclass: the nested knob ``name`` must also satisfy ``limit``."""

    name: str
    limit: Limit


@dataclass(frozen=True)
class Called:
    """Annotation of a field whose knob has another ``name`` on the command line: a shorthand such as ``alpha``."""

    name: str


def between(least: float, most: float, each: bool = False) -> Limit:
    return Limit(lambda value: least <= value <= most, f"from {least} to {most}", each)


COUNT, FROM_0 = between(1, 100_000), between(0, 100_000)  # of steps, images of a prompt, timed calls, decibels
MORE_THAN_0 = Limit(lambda value: 1e-9 <= value <= 1e9, "more than 0, and from 1e-9 to 1e9")
SHARE = Limit(lambda share: 0 < share < 1, "a number between 0 and 1")
CONFIDENCE = Limit(lambda share: 0.5 <= share <= 0.9999, "a number from 0.5 to 0.9999")
SEEDS = 2**64  # torch's generators take that many
SEED = Limit(lambda seed: 0 <= seed < SEEDS, "a whole number from 0 to 2^64 - 1")


def seed_of(seed: int, number: int) -> int:
    """Return the seed of the image ``number``, counted from 0: ``seed + number`` modulo 2^64."""
    return (seed + number) % SEEDS


def one_of(choices: Collection | Callable[[], Collection], each: bool = False) -> Limit:
    """Return a limit to ``choices``. A function is called at each check, because a table of choices may grow."""
    known = choices if callable(choices) else lambda: choices

    def expected() -> str:
        return "one of " + ", ".join(f"{choice:g}" if isinstance(choice, float) else str(choice) for choice in known())

    return Limit(lambda value: value in known(), expected, each)


def check(holds: bool, knob: str, value: object, expected: str) -> None:
    """Raise ConfigError, with the value of ``knob`` and what was expected, unless ``holds``."""
    if not holds:
        raise ConfigError(f"{knob} is {value}, expected {expected}")


Unused = tuple[
    object, Mapping[str, object], str
]  # a rule: whether it holds; for knobs without effect under it, the only accepted value; the reason


def check_unused(section: object, path: str, *rules: Unused) -> None:
    """Raise ConfigError if a knob of ``section`` is set that by ``rules`` has no effect; ``path`` prefixes its name."""
    for holds, values, because in rules:
        for name, idle in values.items() if holds else ():
            if (value := getattr(section, name)) != idle:
                knob = called(fields_of(type(section))[name][1], path + name)
                expected = idle if isinstance(idle, str) else json.dumps(idle)
                check(False, knob, value, f"{expected}, because {because}")


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return up to three ``known`` dotted names whose last part resembles or contains that of ``name``, best first."""
    section, _, last = name.rpartition(".")
    found = []
    for other in known:
        its_section, _, its_last = other.rpartition(".")
        difference = 1 - difflib.SequenceMatcher(None, last, its_last).ratio()
        if len(last) > 2 and last in its_last:
            difference = min(difference, 0.1)
        if difference <= DIFFERENT:
            found.append((difference, its_section != section, other))
    found.sort()
    return [other for difference, _, other in found[:3] if difference < found[0][0] + 0.1]


def near(name: str, known: Collection[str]) -> str:
    """Return a hint for an unknown name: similar names, or all ``known`` ones if they are few."""
    if close := nearest(name, known):
        return f"did you mean {' or '.join(close)}?"
    return f"known are {', '.join(sorted(known))}" if len(known) <= FEW else "none is like it; --help lists all"


def fields_of(job: type) -> dict[str, tuple[Any, list]]:
    """Return, for each field of a dataclass, its type and the metadata of its ``Annotated``."""
    kinds, hints = typing.get_type_hints(job), typing.get_type_hints(job, include_extras=True)
    names = [field.name for field in dataclasses.fields(job)]
    return {name: (kinds[name], list(getattr(hints[name], "__metadata__", ()))) for name in names}


def read(job: type, mapping: Mapping, path: str = ""):
    """Build the dataclass ``job`` from ``mapping``. Raises ConfigError for unfit entries, naming ``path`` + name."""
    fields = fields_of(job)
    for name in mapping:
        if name not in fields:
            raise ConfigError(f"there is no knob {path}{name}; {near(str(name), fields)}")
    for name in fields:
        if name not in mapping:
            raise ConfigError(f"the knob {path}{name} is missing; give it a value")
    values = {}
    for name, (kind, stated) in fields.items():
        values[name] = value = read_value(kind, in_a_list(kind, mapping[name]), path + name)
        for limit in stated:
            if isinstance(limit, Limit) and value is not None:
                limit.check(called(stated, path + name), value)
    return job(**values)


def called(stated: Collection, usual: str) -> str:
    """Return the name of the ``Called`` in ``stated``, the metadata of a knob's annotation, else the ``usual`` name."""
    return next((entry.name for entry in stated if isinstance(entry, Called)), usual)


def only_of(stated: Collection) -> list[Only]:
    """Return the ``Only`` items of ``stated``, the metadata of the annotation of a nested dataclass of knobs."""
    return [entry for entry in stated if isinstance(entry, Only)]


def in_a_list(kind, value: object) -> object:
    """Return ``[value]`` if the type ``kind`` accepts a list of such values and no single one, else ``value``."""
    options = options_of(kind)
    return [value] if type(value) not in options and any(option == list[type(value)] for option in options) else value


def read_value(kind, value: object, knob: str):
    """Return ``value`` as the type ``kind``; an int may become a float. Raises ConfigError for another type."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{knob} is {BOUNDED.repr(value)}, expected a group of knobs")
        return read(typing.cast(type, kind), value, knob + ".")
    for option in options_of(kind):
        origin = typing.get_origin(option) or option
        if origin is dict and isinstance(value, Mapping):
            name, inner = typing.get_args(option)
            if all(type(key) is name for key in value):
                return {key: read_value(inner, item, f"{knob}.{key}") for key, item in value.items()}
        if origin is list and isinstance(value, list):
            [inner] = typing.get_args(option)
            if typing.get_origin(inner) is list:
                return [read_value(inner, item, f"an item of {knob}") for item in value]
            if all(type(item) is inner for item in value):
                return value
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            check(abs(value) <= sys.float_info.max, knob, value, "a finite number")
            return float(value)
        if origin in (int, str, bool, types.NoneType) and type(value) is origin:
            return value
    text = str in options_of(kind) and isinstance(value, bool | int | float)
    hint = "; if it is one, write " + shlex.quote(f'{knob}="{json.dumps(value)}"') if text else ""
    raise ConfigError(f"{knob} is {BOUNDED.repr(value)}, expected {type_name(kind)}{hint}")


def options_of(kind) -> tuple:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def type_name(kind) -> str:
    return " or ".join(
        TYPE_NAMES.get(option) or f"{type_name(typing.get_args(option)[1])} by name" for option in options_of(kind)
    )
