"""The text of ``--help`` and ``--cfg job``: a line of ``WIDTH`` columns for each knob, with its resolved default.

A line has as much of a knob's meaning as fits, up to the end of a clause; ``--help NAME`` has the whole. Alternative
not taken: a second, short text for each knob, which would drift from the first.
"""

import dataclasses
import re
import shlex
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

from sd_quant import sweep
from sd_quant.config import JOBS
from sd_quant.errors import ConfigError
from sd_quant.knobs import Limit, Only, called, fields_of, near, only_of, options_of, type_name
from sd_quant.places import CONF
from sd_quant.shell import program
from sd_quant.text import one_line

WIDTH, MEANING = 100, 42  # columns of a line, and the one where meanings begin at the latest
LONGEST = 54  # columns of a knob with its default
MISSING = "???"  # of a knob without a default


def resolved(node: Any) -> Any:
    """Return a composed configuration as plain data, all references resolved; ``???`` where a value has to be given."""
    if isinstance(node, ListConfig):
        return [resolved(each) for each in node]
    if not isinstance(node, DictConfig):
        return node
    values = {}
    for name in node:
        try:
            values[name] = resolved(node[name])
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            values[name] = MISSING
    return values


def printed(config: DictConfig, package: str | None) -> str:
    """Return a job's resolved knobs as YAML, all or those of ``package``. Raises ConfigError for an unknown package."""
    values = resolved(sweep.with_literal_texts(config))
    section = values.get("quantize", {})  # whose values the shorthands give, where they give some
    values |= {name: section[name] for name in values if values[name] is None and name in section}
    for name in package.split(".") if package not in (None, "_global_") else ():
        if not (isinstance(values, dict) and name in values):
            raise ConfigError(f"--package is {package}, expected the name of a knob or of a group of knobs")
        values = values[name]
    head = f"# @package {package}\n" if package and isinstance(values, dict) else ""
    return head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True).removesuffix("...\n").rstrip("\n")


def knobs_of_job(job: type, path: str = "", narrowed: Collection[Only] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield name on the command line, full name and meaning of each knob; ``narrowed``: stricter limits of knobs."""
    for name, (kind, stated) in fields_of(job).items():
        if dataclasses.is_dataclass(kind):
            yield from knobs_of_job(typing.cast(type, kind), f"{path}{name}.", only_of(stated))
            continue
        meaning = next(entry for entry in stated if isinstance(entry, str))
        limits = [each.limit for each in narrowed if each.name == name] or stated
        takes = " and ".join(str(entry) for entry in limits if isinstance(entry, Limit)) or type_name(kind)
        null = " or null" if type(None) in options_of(kind) and not takes.endswith("null") else ""
        yield called(stated, path + name), path + name, f"{meaning} ({takes}{null})"


def presets_of(config_name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each group (folder of presets) of a command's configuration, and the presets that the command accepts."""
    plain = lambda path: yaml.safe_load(path.read_text(encoding="utf-8"))  # noqa: E731
    defaults, sections = plain(CONF / f"{config_name}.yaml")["defaults"], fields_of(JOBS[config_name])
    for group in [name.removeprefix("optional ") for entry in defaults if isinstance(entry, dict) for name in entry]:
        narrowed = only_of(sections[group][1]) if group in sections else []
        files = sorted((CONF / group).glob("*.yaml"))
        taken = [file.stem for file in files if all(each.limit.holds(plain(file)[each.name]) for each in narrowed)]
        yield group, taken


def written(value: Any) -> str:
    """Return a default value as text for the command line; empty lists of a mapping are left out."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {written(each)}' for name, each in value.items() if each != [])}}}"
    return f"[{','.join(map(written, value))}]" if isinstance(value, list) else sweep.written(value)


def default_of(values: Any, path: str) -> str:
    return written(reduce(lambda node, name: node[name] if name in (node or ()) else None, path.split("."), values))


def line(name: str, default: str, meaning: str) -> str:
    """Return a knob on one line, with as many clauses of its meaning as fit; ``…`` stands for the others."""
    start = f"  {one_line(f'{name}={default}', LONGEST):{MEANING - 4}}  "
    meaning, _, takes = meaning.rpartition(" (") if meaning.endswith(")") else (meaning, "", "")
    room = WIDTH - len(start)
    if len(whole := f"{meaning} ({takes}" if takes else meaning) <= room:
        return start + whole
    ends = [found.start() for found in re.finditer(r"[;,] |$", meaning)]
    fitting = max((end for end in ends if end <= room - 2), default=meaning.rfind(" ", 0, room - 2))
    return start + meaning[:fitting] + (" …" if fitting < len(meaning) else "")


def listed(job: type, values: Any) -> str:
    """Return a line for each knob of a job, grouped by section; ``values``: the defaults by section and name."""
    sections: dict[str, list[str]] = {}
    for name, path, text in knobs_of_job(job):
        section = path.partition(".")[0] if "." in path else "the job"
        sections.setdefault(section, []).append(line(name, default_of(values, path), text))
    return "\n\n".join("\n".join([f"{section}:", *each]) for section, each in sections.items())


def explained(job: type, values: Any, names: Sequence[str]) -> str:
    """Return the full descriptions of the knobs or sections ``names``. Raises ConfigError for an unknown name."""
    every, found = list(knobs_of_job(job)), []
    for wanted in names:
        known = [each for each in every if wanted in each[:2] or each[1].startswith(f"{wanted}.")]
        if not known:
            raise ConfigError(f"--help explains no knob {wanted}; {near(wanted, [name for name, _, _ in every])}")
        found += [f"{name}={default_of(values, path)}\n{wrapped(text)}" for name, path, text in known]
    return "\n".join(found)


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def help_of(name: str, config: DictConfig, knobs: Sequence[str]) -> str:
    """Return the help of the command ``name`` by Hydra's help template, or the full descriptions of ``knobs``."""
    own = OmegaConf.masked_copy(config, [each for each in config if each != "hydra"])
    values, job = resolved(sweep.with_literal_texts(own)), JOBS[name]
    if knobs:
        return explained(job, values, knobs)
    chosen, presets = config.hydra.runtime.choices, dict(presets_of(name))
    groups = [f"  {group}={written(chosen[group])}\n{wrapped(', '.join(taken))}" for group, taken in presets.items()]
    lines = {key: line(key, default_of(values, path), text) for key, path, text in knobs_of_job(job)}
    lines |= {group: line(group, written(chosen[group]), ", ".join(taken)) for group, taken in presets.items()}
    functions: dict[str, Callable[..., str]] = {
        "program": lambda command=name: shlex.join(program(command)),
        "presets": lambda: "\n".join(groups) or "  none",
        "first": lambda *names: "\n".join(map(lines.__getitem__, names)),
        "knobs": lambda: listed(job, values),
    }
    for resolver, function in functions.items():
        OmegaConf.register_new_resolver(resolver, function, replace=True)
    return config.hydra.help.template.rstrip("\n")
