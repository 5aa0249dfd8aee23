"""Run the commands that Hydra configures: check, start one job or a sweep, record failures, exit.

    Command() -> check_command, or run_sweep for several jobs -> Hydra -> job_of -> task

A single run, and every job of a sweep, is composed and checked before Hydra makes a folder and before anything heavy is
imported, so a refused command leaves nothing. Then Hydra composes the same again and calls the command's task.
"""

import atexit
import functools
import gc
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra import compose
from hydra._internal.utils import get_args_parser  # hydra.main reads the command line with it; there is no public one
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sd_quant import launchers, sweep
from sd_quant.checkpoints.unopened import starting
from sd_quant.composition import check_assigned, composing, job_of, readable, refusal
from sd_quant.config import is_finished_run
from sd_quant.errors import (
    CANCELLED,
    ConfigError,
    ResourceError,
    SdQuantError,
    exit_with_its_code,
    fail,
    is_cancelled,
    of_the_machine,
)
from sd_quant.files import check_writable
from sd_quant.help import help_of, printed
from sd_quant.places import CONF, check_shipped, output_path, shown
from sd_quant.process import address_space_bytes, end_at_once
from sd_quant.progress import working
from sd_quant.report.record import RECORD
from sd_quant.report.summary import FAILURE, WAS_CANCELLED, read_sweep
from sd_quant.shell import literal
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
SWEEPS = "outputs/sweeps"
LIBRARIES = 1.3e9  # bytes of address space that the imports of a job take


def check_no_run(job: object, directory: Path, given: list[str]) -> None:
    """Raise ConfigError when a command other than ``quantize`` would write into the folder of a finished run."""
    if is_finished_run(directory):
        raise ConfigError(f"hydra.run.dir is {shown(directory)}, which holds a finished run; choose a new folder")


def check_no_others(job: object, directory: Path, given: list[str]) -> None:
    """Raise ConfigError if ``directory`` is a finished run's, or has files and no record of a command."""
    check_no_run(job, directory, given)
    found = sorted(os.listdir(directory)) if os.access(directory, os.R_OK) else []
    if found and not {".hydra", RECORD} & {*found}:
        raise ConfigError(
            f"hydra.run.dir is {shown(directory)}, which holds {one_line(found[0], 100)} that no command has written, "
            "expected a folder that is new, empty or a command's; choose another"
        )


def stage(name: str) -> Callable[[Any, Path], None]:
    """Return a task that imports the module ``sd_quant.stages.<name>`` and calls its function of that name."""

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
    after_sweep: Callable[[Path], object] = lambda folder: None  # called with the folder of a sweep, before its report

    def __call__(self) -> None:
        """Run the command and exit with the code of its outcome."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's SIGTERM ends a job as Ctrl-C does
        logging.raiseExceptions = False  # on a full disk, each line of the log would print a traceback
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors instead of printing them
        exit_with_its_code(self.run, "what was finished is kept, and the same command starts again")

    def run(self) -> None:
        """Check the arguments of this process and let Hydra run what they mean."""
        check_shipped()
        arguments, unknown = get_args_parser().parse_known_args()
        if unknown:
            raise ConfigError(f"{unknown[0]} is no option; a knob is given without dashes: {unknown[0].lstrip('-')}")
        explained = [word for word in arguments.overrides if arguments.help and "=" not in word]
        words = [word for word in arguments.overrides if word not in explained]
        check_assigned(words)
        main = hydra_main(self)
        typed = {word: readable(word, arguments.multirun) for word in words}
        sys.argv[1:] = [typed.get(word, word) for word in sys.argv[1:]]  # Hydra reads them again
        overrides = [*map(typed.get, words), *search_path(arguments)]
        try:
            if arguments.help:  # Hydra would print the same, and read every group twice for a list that is not shown
                with composing(self.name):
                    print(help_of(self.name, compose(self.name, overrides, return_hydra_config=True), explained))
                return
            if arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion:
                with composing(self.name):
                    config = compose(self.name, overrides) if arguments.cfg else OmegaConf.create()
                with starting(sweep.checkpoint_of(config)):
                    print(printed(config, arguments.package)) if arguments.cfg == "job" else main()
                return
            if (left := address_space_bytes()) < LIBRARIES:  # some libraries would abort the process
                raise ResourceError(
                    f"this process may map {left / 1e9:.2f} GB more of its address space, and the libraries alone take "
                    f"about {LIBRARIES / 1e9} GB; raise the limit (ulimit -v unlimited)"
                )
            with composing(self.name):
                plain = sweep.plain_config(self.name, overrides)
                sweeps = sweep.is_sweep(plain, arguments.multirun)
                if not sweeps:
                    check_command(self, overrides, plain)
            if sweeps:
                end_at_once(run_sweep(self, main, overrides))
            main()
            end_at_once(0)
        except (HydraException, OmegaConfBaseException) as error:
            raise refusal(error, self.name) from error


def hydra_main(command: Command) -> Callable[[], object]:
    """Return a function with which Hydra composes and runs each job of a command, here or through a launcher."""
    job, do = command.job, command.task

    def task(config: DictConfig) -> object:
        return do(job_of(job, config), Path(HydraConfig.get().runtime.output_dir))

    task.__module__ = f"sd_quant.commands.{command.name}"  # its last part is Hydra's name of a job and of the log file
    return hydra.main(version_base="1.3", config_path=str(CONF), config_name=command.name)(recording_failure(task))


def search_path(arguments: Namespace) -> list[str]:
    """Translate ``--config-dir`` into ``hydra.searchpath=``. Raises ConfigError if both are given, or for no folder."""
    if arguments.config_dir is None:
        return []
    folder = Path(arguments.config_dir).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir is {arguments.config_dir}, which is no folder; give one that holds groups")
    if any(override.startswith("hydra.searchpath=") for override in arguments.overrides):
        raise ConfigError("--config-dir and hydra.searchpath are both given; name all folders in hydra.searchpath")
    return [f"hydra.searchpath=[{literal(f'file://{folder}')}]"]


def check_command(command: Command, overrides: list[str], plain: DictConfig) -> None:
    """Check a single run, writing nothing; ``plain``: knobs without those of several values. Raises SdQuantError."""
    parsed = sweep.parse(overrides)
    varies = any(override.is_sweep_override() for override in parsed)  # which Hydra refuses
    config = compose(command.name, overrides, return_hydra_config=True) if varies else plain
    directory = output_path(str(config.hydra.run.dir))
    given = [override.get_key_element() for override in parsed]
    command.before_run(job_of(command.job, config), directory, given)
    check_writable(directory)


def run_sweep(command: Command, main: Callable[[], object], overrides: list[str]) -> int:
    """Check all jobs, let Hydra run them with ``main``, and report on the finished ones. Return the exit code."""
    with composing(command.name):
        plan, name, jobs = sweep.plan_of(command.name, overrides, partial(job_of, command.job))
        chosen = any(override.startswith("hydra.sweep.dir=") for override in overrides)
        hydra = sweep.plain_config(command.name, overrides).hydra
        given = hydra.sweep.dir if chosen else None
    begun = sweep.begun(output_path(SWEEPS), name) if given is None else None
    directory = begun or output_path(given or f"{SWEEPS}/{sweep.dated(name)}")
    plan["command"] = ["sd-quant", command.name, *sys.argv[1:]]
    check_writable(directory, "hydra.sweep.dir")
    launchers.prepare(hydra.launcher, directory)
    with sweep.opened(directory, plan):
        if begun is not None:
            print(f"these jobs were begun before, in {shown(begun)}, and go on; hydra.sweep.dir=<folder> begins anew")
        print(sweep.start_line(read_sweep(directory)), flush=True)
        sys.argv.append(f"hydra.sweep.dir={literal(directory)}")  # jobs may work elsewhere
        cancelled, ended_with, uncompared = False, None, None
        try:
            try:
                with working(sweep.Jobs(directory)):
                    main()
            except Exception as error:  # of the first job that failed, or of the launcher
                LOG.debug("the sweep ended early", exc_info=error)
                ended_with = error
            try:
                command.after_sweep(directory)
            except SdQuantError as error:  # the jobs are done, and the report shows them
                uncompared = error
        except KeyboardInterrupt:
            cancelled = True
        if not directory.is_dir():
            raise removed(directory)
        from sd_quant.report.rebuild import rebuild
        from sd_quant.report.shipped import last_words
        from sd_quant.report.summary import sweep_table

        with working("report"):
            rebuild(directory)
        finished = read_sweep(directory)
        print(sweep_table(finished))
        print(last_words(directory), flush=True)
    if cancelled:
        return fail("cancelled; what was finished is kept, and the same command goes on", CANCELLED)
    code, sentence = sweep.outcome(finished, ended_with)
    if uncompared is not None and not code:
        code, sentence = uncompared.exit_code, f"the jobs are done, and could not be compared together: {uncompared}"
    return fail(sentence, code) if code else 0


@contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector away from the millions of objects that the imports in the block make.

    Only the first block of a process does so: freezing again would keep the garbage of the sweep's previous job.
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


def recording_failure(task: Callable[[DictConfig], object]) -> Callable[[DictConfig], object]:
    """Wrap ``task``: announce a job of a sweep, and write the reason of a failure into the job's folder.

    An SdQuantError ends the process of a single run here, before Hydra prints a line of its own; a sweep goes on.
    """

    @functools.wraps(task)
    def recorded(config: DictConfig) -> object:
        hydra = HydraConfig.get()
        directory, multirun = Path(hydra.runtime.output_dir), hydra.mode == RunMode.MULTIRUN
        if multirun:
            sweep.check_shared(directory.parent)
        os.chdir(hydra.runtime.cwd)  # a launcher may have started this elsewhere
        if multirun:
            LOG.info("%s", sweep.job_line(read_sweep(directory.parent), hydra.job.num))
            if "same_as" in sweep.entry(directory.parent, hydra.job.num):
                return None
        if (directory / FAILURE).is_file():
            (directory / FAILURE).unlink()
        try:
            with working("getting ready"):
                return task(config)
        except (KeyboardInterrupt, Exception) as error:
            if not isinstance(error, Exception) or is_cancelled(error):
                LOG.warning("the job %s", WAS_CANCELLED)
                raise KeyboardInterrupt from error
            raised = record_failure(directory, error, multirun)
            if not multirun and isinstance(raised, SdQuantError):
                sys.exit(fail(str(raised), raised.exit_code))
            if raised is not error:
                raise raised from error
            raise

    return recorded


def removed(directory: Path) -> SdQuantError:
    return SdQuantError(f"{directory} was removed while a job was running, so files of it are missing; start it again")


def record_failure(directory: Path, error: Exception, in_sweep: bool = True) -> Exception:
    """Log why a job failed, write it into the job's folder, and return the error that is to be raised.

    In a sweep, a crash is logged with its traceback and returned as SdQuantError, which every launcher can pickle.
    """
    refused = of_the_machine(error) or error if directory.is_dir() else removed(directory)
    known = isinstance(refused, SdQuantError)
    reason, code = (str(refused), refused.exit_code) if known else (f"it crashed: {error!r}", 1)
    if directory.is_dir():
        sweep.write_failure(directory, reason, code)
    crashed_in_sweep = in_sweep and not known
    said = {"said_at_the_end": known and not in_sweep}
    LOG.error("%s", reason, exc_info=error if crashed_in_sweep else None, extra=said)
    return SdQuantError(reason) if crashed_in_sweep else refused
