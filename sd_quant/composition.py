"""Compose a configuration with Hydra and read it as a checked job; an error of Hydra's becomes one sentence.

Inside ``composing``, Hydra's ``compose`` makes a configuration of YAML and overrides, without opening a checkpoint.
``job_of`` turns it into a checked job, when the job is about to start.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, _utils
from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

from sd_quant import sweep
from sd_quant.checkpoints.unopened import own_knob, starting
from sd_quant.config import JOBS, QuantizeJob, run_model
from sd_quant.errors import ConfigError, ResourceError, SdQuantError
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.knobs import near, nearest, read
from sd_quant.launchers import one_host
from sd_quant.places import CONF, GROUPS
from sd_quant.shell import literal, without_interpolation
from sd_quant.text import one_line

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else each run warns of torchvision, which is not needed
LAUNCHERS = {  # the plugins that conf/hydra/launcher builds on, and how each is installed
    "joblib": "pip install 'sd-quant[joblib]'",
    "submitit_local": "pip install 'sd-quant[submitit]'",
    "submitit_slurm": "pip install 'sd-quant[submitit]'",
    "ray": "pip install 'sd-quant[ray]' && pip install --no-deps hydra-ray-launcher==1.2.2",
}
LONGEST_ARGUMENT, MOST_ITEMS = 2**15, 2000  # Hydra parses a list in the square of its items
SHORTHANDS = {  # top-level knobs whose values the sections of a configuration take
    *("quant_level", "attention", "alpha", "smoothing", "keep", "percentile", "collect_method", "calib_size"),
    *("calibration", "fit", "assignment"),
    *("export", "unet_xl", "vae", "clip1", "clip2", "candidates"),
    *("out_path", "prompts", "num_samples", "steps", "scale", "seed", "num_warmup_runs"),
}


def given(value: object, preset: object) -> object:
    """Return the user's value, or the preset's where the user gives none."""
    return preset if value is None else value


def own(knob: str, usual: object) -> object:
    """Return the value that the checkpoint states for a ``model`` knob; ``usual``, a default, before a job starts."""
    return own_knob(knob, list(usual) if isinstance(usual, ListConfig) else usual)


RESOLVERS: dict[str, Callable[..., Any]] = {  # the functions that YAML in conf calls, as ${given:...}
    "given": given,
    "alpha_of": lambda value, smoothing, preset: given(value, None if smoothing == "none" else preset),
    "case": lambda value, choices: choices.get(value, choices["else"]),
    "own": own,
    "job_name": lambda directory, number: sweep.folder_of(Path(directory), int(number)),
    "places": one_host.places,
}
QUOTED = r"""(?<![^\s,:[{])(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""  # where a quotation mark begins a text
READ_IN_QUOTES = re.compile(r"[^\w \t/\\+.$%*@?|:-]|\$\{", re.ASCII)
SEVERAL_MEANINGS = re.compile(r"""^["']|[][{},\\]""")  # of a text that Hydra cannot read: a list, one text, two
PLACES = re.compile(r"infer\.precise_steps=first\d+,last\d+")
FOLDERS = re.compile(r"(hydra\.(?:run|sweep)\.dir=[\"']?)~(?=/)")
for resolver, function in RESOLVERS.items():
    OmegaConf.register_new_resolver(resolver, function, replace=True)


def bounded_loader(plain: Callable[[], Any] = _utils.get_yaml_loader) -> Callable[[Any], Any]:
    """Return OmegaConf's loader of YAML with a limit on aliases: without it, a few lines can take hours to load."""

    def loader(stream: Any) -> Any:
        text = stream if isinstance(stream, str) else stream.read()
        try:
            load_yaml(text.encode() if "*" in text else b"")
        except ValueError as error:
            file = getattr(stream, "name", "a text")
            raise ConfigError(f"{file} cannot be read as YAML: {error}; write it without aliases") from error
        return plain()(text)

    return loader


_utils.get_yaml_loader = bounded_loader


def job_of(job: type, config: DictConfig):
    """Read a composed configuration as the dataclass ``job`` and check it. Raises SdQuantError if it is invalid."""
    hydra = config.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    if hydra is not None:
        use_groups(hydra.runtime.config_sources)
    checked = read(job, settled(OmegaConf.masked_copy(config, [name for name in config if name != "hydra"])))
    checked.check_files()
    return checked


def job_with(presets: Mapping[str, str], knobs: Mapping[str, object]) -> QuantizeJob:
    """Return the checked job of ``quantize``, even inside a program that uses Hydra. Raises SdQuantError if invalid."""
    outside = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        chosen = [f"{group}={name}" for group, name in presets.items()]
        with composing("quantize"):
            config = compose("quantize", chosen, return_hydra_config=True)
            for name, value in knobs.items():
                try:
                    OmegaConf.update(config, name, sweep.in_texts(without_interpolation, value))
                except OmegaConfBaseException as error:
                    raise ConfigError(f"there is no knob {name}; {near(name, knobs_of(config))}") from error
            return job_of(QuantizeJob, config)
    finally:
        GlobalHydra.instance().hydra = outside


def settled(knobs: DictConfig) -> dict[str, Any]:
    """Return a job's knobs, references resolved; ``model`` is that of ``run``, if given. Raises SdQuantError."""
    if "model" in knobs and knobs.get("run") and (model := run_model(knobs.run)):
        knobs.model = sweep.in_texts(without_interpolation, model)  # before the size and the prompts are taken from it
    knobs = sweep.with_literal_texts(knobs)
    with starting(sweep.checkpoint_of(knobs)):
        try:
            plain = OmegaConf.to_container(knobs, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            raise ConfigError(f"the knob {error.full_key} has no value; give it one on the command line") from error
    return {name: value for name, value in plain.items() if name not in SHORTHANDS}


def use_groups(sources: Iterable) -> None:
    """Set GROUPS, where presets are looked up, to Hydra's folders. Raises ConfigError for a preset in two of them."""
    GROUPS[:] = [Path(source.path) for source in sources if source.schema == "file"]
    ours = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
    first: dict[Path, Path] = {}
    for groups in GROUPS:
        for path in (path for name in ours for path in (groups / name).rglob("*.yaml")):
            name = path.relative_to(groups)
            if (other := first.setdefault(name, groups)) is not groups:
                raise ConfigError(
                    f"{name} is in {other} and in {groups}, expected in one of them; give yours another name"
                )


@contextmanager
def composing(config_name: str) -> Iterator[None]:
    """Let Hydra compose in the block; its errors become SdQuantError. ``config_name``: the command, for messages."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError, yaml.YAMLError) as error:  # infer=3
        raise refusal(error, config_name) from error


def check_assigned(words: Sequence[str]) -> None:
    """Raise ConfigError for an argument that is too long to parse, or no ``name=value``, as after a missing quote."""
    for number, word in enumerate(words):
        if len(word) > LONGEST_ARGUMENT or word.count(",") > MOST_ITEMS:
            raise ConfigError(
                f"the argument {one_line(word, 60)} is {len(word)} characters long, expected at most {LONGEST_ARGUMENT}"
                f" and {MOST_ITEMS} commas; give fewer values, or write prompts into a file"
            )
        if "=" not in word and not word.startswith("~"):  # ~name removes a knob
            ends = takewhile(lambda each: "=" not in each, words[number:])
            whole = shlex.quote(" ".join([*words[max(0, number - 1) : number], *ends]))
            meant = f"; if it is the end of the value before it, write {whole}" if number else ""
            raise ConfigError(f"the argument {word} has no value, expected {word}=<value>{meant}")


def readable(argument: str, multirun: bool) -> str:
    """Return a command's argument with quotes around texts that Hydra accepts only in quotes, such as ``é``.

    Raises ConfigError for an ambiguous text; the message has the argument as it has to be typed.
    """
    if PLACES.fullmatch(argument):  # one value, whose comma separates no jobs
        return argument.replace("=", '="', 1) + '"'
    argument = FOLDERS.sub(lambda found: found[1] + os.path.expanduser("~"), argument)  # Hydra makes them itself
    name, equals, value = argument.partition("=")
    whole = f"{name}={literal(value)}"
    if not equals or not is_read(whole):
        return argument
    if is_read(argument):
        override = OverridesParser.create().parse_override(argument)
        cut = not override.is_sweep_override() and override.value() == value.strip() != value
        return whole if cut else argument
    texts: list[str] = []
    values = split(value) if multirun else [value]
    quoted = f"{name}={','.join(with_quotes(each, texts) for each in values)}"
    if texts == [value.strip()] or not is_read(quoted):
        quoted = whole
    if any(map(SEVERAL_MEANINGS.search, texts)) or len(values) > 1 and quoted == whole:
        found = READ_IN_QUOTES.search("".join(texts)) or re.search(",|.+", texts[0] if texts else ",")
        raise ConfigError(
            f"the argument {argument} cannot be read, because {found and found[0]} stands outside of "
            f"quotes; if this is what is meant, write {shlex.quote(quoted)}"
        )
    return quoted


def is_read(argument: str) -> bool:
    """Whether Hydra can parse the argument, and OmegaConf its value."""
    try:
        override = OverridesParser.create().parse_override(argument)
        OmegaConf.create({} if override.is_sweep_override() else {"value": override.value()})
    except (HydraException, GrammarParseError):
        return False
    return True


def with_quotes(value: str, texts: list[str]) -> str:
    """Return a value with quotes around each text that Hydra cannot read, and append these to ``texts``."""
    value = value.strip()
    if is_read(f"x={value}"):
        return value
    if value[:1] + value[-1:] == "[]":
        return f"[{', '.join(with_quotes(each, texts) for each in split(value[1:-1]))}]"
    pairs = [each.partition(":") for each in split(value[1:-1])]
    if value[:1] + value[-1:] == "{}" and all(colon for _, colon, _ in pairs):
        return f"{{{', '.join(f'{name.strip()}: {with_quotes(each, texts)}' for name, _, each in pairs)}}}"
    if re.fullmatch(QUOTED, value):  # with an interpolation that is none
        return literal(OverridesParser.create().parse_override(f"x={value}").value())
    texts.append(value)
    return literal(value)


def split(values: str) -> list[str]:
    """Split ``values`` at the commas outside of brackets and quotes."""
    found, closing = [""], ""
    for piece in re.findall(f"{QUOTED}|.", values, re.DOTALL):
        if piece == closing[-1:]:
            closing = closing[:-1]
        else:
            closing += {"(": ")", "[": "]", "{": "}"}.get(piece, "")
        found[-1] += piece
        if piece == "," and not closing:
            found[-1:] = [found[-1][:-1], ""]
    return found


def refusal(error: Exception, config_name: str) -> SdQuantError:
    """Translate an error of Hydra or OmegaConf into an SdQuantError with one sentence."""
    text = " ".join(str(error).split())
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError):  # a user's preset, mostly
        return ConfigError(f"a file of presets is no YAML: {one_line(text, 300)}; mend it")
    if isinstance(error, RecursionError):
        return ConfigError("a file of presets has itself among its defaults, or is nested too deeply; mend it")
    if isinstance(error, OverrideParseException):
        name = error.override.partition("=")[0]
        if strange := re.search(r"[^\w./@:+~$-]", name, re.ASCII):
            return ConfigError(f"there is no knob {name}, because no name has {strange[0]} in it; --help lists all")
        return ConfigError(f"the argument {error.override} cannot be read: {text.partition(' See ')[0]}; mend it")
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GrammarParseError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return ConfigError(f"${{ begins no reference to a knob there ({one_line(cause, 200)}); write \\${{ for a text")
    if several := re.search(r"Ambiguous value for argument '(.*?)'\s+1\. To use", str(error), re.DOTALL):
        name, _, value = several[1].partition("=")
        meant = " or ".join(shlex.quote(f"{name}={each}") for each in (literal(value), f"[{value}]"))
        return ConfigError(
            f"the argument {several[1]} has several values, expected one; write {meant} if it is one text or a list, "
            "or add --multirun for a job of each"
        )
    if unknown := re.search(r"Could not override '([^']+)'", text):
        name = unknown[1]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            known = {command: knobs_of(compose(command)) for command in JOBS}
        if name in known[config_name]:
            return ConfigError(f"{name} is a group of knobs in {config_name}, expected {name}.<knob>=<value>")
        others = " and ".join(command for command in JOBS if name in known[command])
        if others and not nearest(name, known[config_name]):
            return ConfigError(f"there is no knob {name} in {config_name}; it is a knob of {others}")
        return ConfigError(f"there is no knob {name}; {near(name, known[config_name])}")
    option = re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text)
    if option and option[1] == "hydra/launcher" and option[2] in LAUNCHERS:
        return ResourceError(f"the launcher {option[2]} is not installed; install it with: {LAUNCHERS[option[2]]}")
    if option and (CONF / option[1]).is_dir():
        presets = [path.stem for groups in GROUPS for path in (groups / option[1]).glob("*.yaml")]
        return ConfigError(f"there is no preset {option[1]}={option[2]}; {near(option[2], presets)}")
    return ConfigError(text)


def knobs_of(node: DictConfig, prefix: str = "") -> list[str]:
    """Return the full names of all knobs and groups of a composed configuration."""
    names = []
    for name in map(str, node):
        names.append(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            names += knobs_of(child, f"{prefix}{name}.")
    return names
