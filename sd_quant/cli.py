"""The common part of the commands that Hydra configures: composing, checking, refusing and ending.

    Command() -> check_command, or run_sweep for several jobs -> Hydra -> job_of -> task

A single run, and every job of a sweep, is composed and checked before Hydra makes a folder and before anything heavy is
imported, so a refused command leaves nothing behind. Then Hydra composes the same configuration again and calls the
command's task.
"""

import atexit
import functools
import gc
import logging
import os
import re
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # hydra.main reads the command line with it; there is no public one
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from sd_quant import placement, sweep
from sd_quant.checkpoints.own_knobs import own_knob
from sd_quant.config import JOBS, check_writable, is_run, run_model
from sd_quant.errors import CANCELLED, ConfigError, ResourceError, SdQuantError, fail, of_the_machine
from sd_quant.files import write_json
from sd_quant.knobs import described, fields_of, near, nearest, only_of, read
from sd_quant.places import CONF, GROUPS, check_shipped, input_path, output_path, shown, url
from sd_quant.process import address_space_bytes, end_at_once
from sd_quant.progress import working
from sd_quant.report.summary import FAILURE, read_sweep
from sd_quant.shell import literal, program
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses torchvision in every run, which nothing needs
SWEEPS = "outputs/sweeps"
LIBRARIES = 1.3e9  # bytes of address space that the imports of a job take
LAUNCHERS = {  # the plugins that conf/hydra/launcher builds on, and how each is installed
    "joblib": "pip install 'sd-quant[joblib]'",
    "submitit_local": "pip install 'sd-quant[submitit]'",
    "submitit_slurm": "pip install 'sd-quant[submitit]'",
    "ray": "pip install 'sd-quant[ray]' && pip install --no-deps hydra-ray-launcher==1.2.2",
}
SHORTHANDS = {  # top-level knobs whose values the sections of a configuration take
    *("quant_level", "alpha", "smoothing", "keep", "percentile", "collect_method", "calib_size", "calibration"),
    *("export", "unet_xl", "vae", "clip1", "clip2", "candidates"),
    *("out_path", "prompts", "num_samples", "steps", "scale", "seed", "num_warmup_runs"),
}
STARTING: ContextVar[Path | None] = ContextVar("STARTING", default=None)  # the checkpoint of the job that starts


def given(value: object, preset: object) -> object:
    """The user's value, or the preset's where the user gives none."""
    return preset if value is None else value


def alpha_of(value: object, smoothing: str, preset: object) -> object:
    """Likewise for alpha, which has a preset only where layers are smoothed."""
    return given(value, None if smoothing == "none" else preset)


def case(value: str, choices: Mapping[str, object]) -> object:
    """The entry of ``choices`` for ``value``, or its entry ``else``: a value that depends on the preset."""
    return choices.get(value, choices["else"])


def own(knob: str, usual: object) -> object:
    """What the checkpoint states itself of a knob of ``model``, when a job starts; ``usual`` while Hydra composes."""
    path = STARTING.get()
    usual = list(usual) if isinstance(usual, ListConfig) else usual
    return usual if path is None else own_knob(path, knob, usual)


OmegaConf.register_new_resolver("own", own, replace=True)
OmegaConf.register_new_resolver("given", given, replace=True)  # ${given:...} in conf
OmegaConf.register_new_resolver("alpha_of", alpha_of, replace=True)
OmegaConf.register_new_resolver("case", case, replace=True)
OmegaConf.register_new_resolver(
    "job_name", lambda directory, number: sweep.entry(Path(directory), int(number))["name"], replace=True
)
OmegaConf.register_new_resolver("places", placement.places, replace=True)


def check_no_run(job: object, directory: Path, given: list[str]) -> None:
    """Raises ConfigError when a command other than ``quantize`` would write into the folder of a finished run."""
    if is_run(directory):
        raise ConfigError(
            f"hydra.run.dir is {shown(directory)}, which holds a finished run of quantize, expected another folder; "
            "choose a new one"
        )


def stage(name: str) -> Callable[[Any, Path], None]:
    """A task that calls the function ``name`` of the module ``sd_quant.stages.<name>``, which it imports then."""

    def task(job: Any, directory: Path) -> None:
        with importing():
            module = import_module(f"sd_quant.stages.{name}")
        getattr(module, name)(job, directory)

    return task


@dataclass(frozen=True)
class Command:
    """A command that Hydra configures. Calling it runs it on the arguments of this process."""

    name: str  # of conf/<name>.yaml
    job: type  # the dataclass that its configuration is read as
    task: Callable[[Any, Path], object]  # does a job in a folder; a sweeper of Hydra's gets what it returns
    # Called with a single job, its folder and the names of the knobs that were given, before anything is written.
    before_run: Callable[[Any, Path, list[str]], object] = check_no_run
    before_sweep: Callable[[Any], object] = lambda job: None  # called with the first job of a sweep, before any begins
    after_sweep: Callable[[Path], object] = lambda folder: None  # called with the folder of a sweep, before its report

    def __call__(self) -> None:
        """Run the command and exit with the code of its outcome."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's SIGTERM ends a job as Ctrl-C does
        logging.raiseExceptions = False  # on a full disk, each line of the log would print a traceback
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors instead of printing them
        OmegaConf.register_new_resolver("knobs", lambda: "\n".join(described(self.job)), replace=True)  # for --help
        OmegaConf.register_new_resolver("presets", lambda: "\n".join(presets_of(self.name)), replace=True)
        OmegaConf.register_new_resolver("program", lambda name=self.name: shlex.join(program(name)), replace=True)
        arguments, unknown = get_args_parser().parse_known_args()
        shows = arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion
        main = hydra_main(self)
        try:
            check_shipped()
            if unknown:
                raise ConfigError(
                    f"{unknown[0]} is no option; a knob is given without dashes: {unknown[0].lstrip('-')}"
                )
            if shows:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in --help | head
                main()
                return
            overrides = [*arguments.overrides, *search_path(arguments)]
            check_address_space()
            with composing(self.name):
                sweeps = sweep.is_sweep(self.name, overrides, arguments.multirun)
                if not sweeps:
                    check_command(self, overrides)
            if sweeps:
                end_at_once(run_sweep(self, main, overrides))
            main()
            end_at_once(0)
        except SdQuantError as error:
            sys.exit(fail(str(error), error.exit_code))
        except (HydraException, OmegaConfBaseException) as error:
            refused = refusal(error, self.name)
            sys.exit(fail(str(refused), refused.exit_code))
        except (OSError, MemoryError) as error:  # from Hydra's own files, or a sweep's
            if (fault := of_the_machine(error)) is None:
                raise
            sys.exit(fail(str(fault), fault.exit_code))
        except KeyboardInterrupt:
            sys.exit(fail("cancelled; what was finished is kept, and the same command starts again", CANCELLED))


def hydra_main(command: Command) -> Callable[[], object]:
    """The function by which Hydra composes each job of a command, and does it here or through a launcher."""
    job, do = command.job, command.task

    def task(config: DictConfig) -> object:
        return do(job_of(job, config), output_directory())

    task.__module__ = f"sd_quant.commands.{command.name}"  # its last part is Hydra's name of a job and of the log file
    return hydra.main(version_base="1.3", config_path=str(CONF), config_name=command.name)(recording_failure(task))


def presets_of(config_name: str) -> Iterator[str]:
    """A line for each group of a command's configuration: the group, and the presets that the command accepts."""
    plain = lambda path: yaml.safe_load(path.read_text(encoding="utf-8"))  # noqa: E731
    defaults, sections = plain(CONF / f"{config_name}.yaml")["defaults"], fields_of(JOBS[config_name])
    groups = [group.removeprefix("optional ") for entry in defaults if isinstance(entry, dict) for group in entry]
    for group in groups:
        narrowed = only_of(sections[group][1]) if group in sections else []
        files = sorted((CONF / group).glob("*.yaml"))
        taken = [file.stem for file in files if all(each.limit.holds(plain(file)[each.name]) for each in narrowed)]
        yield f"{group}: {', '.join(taken)}"
    if not groups:
        yield "none"


def search_path(arguments: Namespace) -> list[str]:
    """``--config-dir`` as the override that says the same. Raises ConfigError for both, or for what is no folder."""
    if arguments.config_dir is None:
        return []
    folder = Path(arguments.config_dir).absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir is {arguments.config_dir}, which is no folder; give one that holds groups")
    if any(override.startswith("hydra.searchpath=") for override in arguments.overrides):
        raise ConfigError("--config-dir and hydra.searchpath are both given; name all folders in hydra.searchpath")
    return [f"hydra.searchpath=[{literal(f'file://{folder}')}]"]


def check_address_space() -> None:
    """Raises ResourceError where the libraries alone would not fit: some end the process without telling Python."""
    if (left := address_space_bytes()) < LIBRARIES:
        raise ResourceError(
            f"this process may map {left / 1e9:.2f} GB more of its address space, and the libraries alone take about "
            f"{LIBRARIES / 1e9} GB; raise the limit (ulimit -v unlimited)"
        )


def check_command(command: Command, overrides: list[str]) -> None:
    """Compose and check a single run. Raises SdQuantError, makes nothing."""
    config = compose(command.name, overrides, return_hydra_config=True)
    directory = output_path(str(config.hydra.run.dir))
    given = [override.get_key_element() for override in sweep.parse(overrides)]
    command.before_run(job_of(command.job, config), directory, given)
    check_writable(directory)


def run_sweep(command: Command, main: Callable[[], object], overrides: list[str]) -> int:
    """Check all jobs, let Hydra run them with ``main``, and make the report of however many are done.

    Returns the exit code.
    """
    with composing(command.name):
        plan, name, jobs = sweep.plan_of(command.name, overrides, partial(job_of, command.job))
        chosen = any(override.startswith("hydra.sweep.dir=") for override in overrides)
        given = sweep.plain_config(command.name, overrides).hydra.sweep.dir if chosen else None
    begun = sweep.begun(output_path(SWEEPS), name) if given is None else None
    directory = begun or output_path(given or f"{SWEEPS}/{sweep.dated(name)}")
    plan["command"] = ["sd-quant", command.name, *sys.argv[1:]]
    check_writable(directory, "hydra.sweep.dir")
    command.before_sweep(jobs[0])
    with sweep.opened(directory, plan):
        if begun is not None:
            print(f"these jobs were begun before, in {shown(begun)}, and go on; hydra.sweep.dir=<folder> begins anew")
        print(sweep.start_line(read_sweep(directory)), flush=True)
        sys.argv.append(f"hydra.sweep.dir={literal(directory)}")  # jobs may work elsewhere
        cancelled, ended_with, uncompared = False, None, None
        try:
            try:
                main()
            except (
                Exception
            ) as error:  # of the first job that failed, each of which has recorded its own; or a launcher's
                LOG.debug("the sweep ended early", exc_info=error)
                ended_with = error
            try:
                command.after_sweep(directory)
            except SdQuantError as error:  # the jobs are done, and the report shows them
                uncompared = error
        except KeyboardInterrupt:
            cancelled = True
        from sd_quant.report.rebuild import rebuild
        from sd_quant.report.table import sweep_table

        with working("report"):
            page, finished = rebuild(directory), read_sweep(directory)
        print(sweep_table(finished))
        print(f"report: {url(page)}", flush=True)
    if cancelled:
        return fail("cancelled; what was finished is kept, and the same command goes on", CANCELLED)
    code, sentence = sweep.outcome(finished, ended_with)
    if uncompared is not None and not code:
        code, sentence = uncompared.exit_code, f"the jobs are done, and could not be compared together: {uncompared}"
    return fail(sentence, code) if code else 0


def job_of(job: type, config: DictConfig):
    """Read a composed configuration as the dataclass ``job``, and check every knob and every file that it names.

    Raises SdQuantError.
    """
    hydra = config.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    if hydra is not None:
        use_groups(hydra.runtime.config_sources)
    checked = read(job, settled(OmegaConf.masked_copy(config, [name for name in config if name != "hydra"])))
    checked.check_files()
    return checked


def settled(knobs: DictConfig) -> dict[str, Any]:
    """The sections of a job that starts, each knob with its value: its own, the run's or what the checkpoint states.

    Raises ConfigError for a knob without a value, ArtifactError for a run whose configuration is damaged.
    """
    if "model" in knobs and knobs.get("run") and (model := run_model(knobs.run)):
        knobs.model = model  # before the size and the prompts are taken from it
    path = OmegaConf.select(knobs, "model.path")
    token = STARTING.set(None if path is None else input_path(str(path)))
    try:
        plain = OmegaConf.to_container(knobs, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"the knob {error.full_key} has no value; give it one on the command line") from error
    finally:
        STARTING.reset(token)
    return {name: value for name, value in plain.items() if name not in SHORTHANDS}


def use_groups(sources: Iterable) -> None:
    """Look for presets where Hydra does. Raises ConfigError for a preset that is in two of its folders."""
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
def importing() -> Iterator[None]:
    """Keep the garbage collector away from the millions of objects that the imports in the block make.

    Only the first block in a process does so: to a later job of a sweep everything is imported, and freezing again
    would keep the garbage of the job before it.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # else compiled extensions report leaks when the process ends
    finally:
        gc.enable()


def output_directory() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


def recording_failure(task: Callable[[DictConfig], object]) -> Callable[[DictConfig], object]:
    """Wrap ``task``: announce a job of a sweep, and write the reason of a failure into the job's folder.

    A refusal of a single run ends the process here, because Hydra would print a line of its own. In a sweep Hydra has
    to see it, to go on with the next job.
    """

    @functools.wraps(task)
    def recorded(config: DictConfig) -> object:
        hydra, directory = HydraConfig.get(), output_directory()
        os.chdir(hydra.runtime.cwd)  # a launcher may have started this elsewhere
        multirun = hydra.mode == RunMode.MULTIRUN
        if multirun:
            LOG.info("%s", sweep.job_line(read_sweep(directory.parent), hydra.job.num))
            if "same_as" in sweep.entry(directory.parent, hydra.job.num):
                return None
        if (directory / FAILURE).is_file():
            (directory / FAILURE).unlink()
        try:
            with working("getting ready"):
                return task(config)
        except Exception as error:
            refused = of_the_machine(error) or error
            known = isinstance(refused, SdQuantError)
            reason, code = (str(refused), refused.exit_code) if known else (f"it crashed: {error!r}", 1)
            with suppress(OSError, ResourceError):  # the disk may be full
                write_json(directory / FAILURE, {"status": "failed", "reason": reason, "exit_code": code})
            crashed_in_sweep = multirun and not known  # in a single run Hydra shows the traceback
            said = {"said_at_the_end": known and not multirun}
            LOG.error("%s", reason, exc_info=error if crashed_in_sweep else None, extra=said)
            if crashed_in_sweep:
                raise SdQuantError(reason) from error  # not every exception can be pickled by a launcher
            if multirun and refused is not error:
                raise refused from error
            if multirun or not known:
                raise
            sys.exit(fail(reason, code))

    return recorded


@contextmanager
def composing(config_name: str) -> Iterator[None]:
    """Let Hydra compose in the block; its errors are raised as SdQuantError."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:  # ValueError: infer=3
        raise refusal(error, config_name) from error


def refusal(error: Exception, config_name: str) -> SdQuantError:
    """Translate an error of Hydra's or OmegaConf's into one sentence."""
    text = " ".join(str(error).split())
    if isinstance(error, yaml.YAMLError):  # a user's preset, mostly
        return ConfigError(f"a file of presets is no YAML: {one_line(text, 300)}; mend it")
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return ConfigError(f"the argument {error.override} has no value, expected {error.override}=<value>")
        several = str(error.override).count("=") > 1  # as in the folder of a sweep's job
        hint = "; put a value with = in it in quotes of its own, as in \"run='...'\"" if several else ""
        return ConfigError(f"the argument {error.override} cannot be read: {text}{hint}")
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
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
    """The full names of all knobs and groups of a composed configuration."""
    names = []
    for name in map(str, node):
        names.append(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            names += knobs_of(child, f"{prefix}{name}.")
    return names
