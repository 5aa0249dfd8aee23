"""A sweep: which jobs a command means, their names and folders, and which of them are still to be done.

Hydra starts the jobs, here or through a launcher. Before the first, ``sweep.json`` is written into the sweep's folder.
It lists the jobs in Hydra's order, named by the knobs that vary: a job finds its folder by its number. The folder's
name is the time and a hash of the jobs: the same command continues its newest sweep. Alternatives not taken: Hydra's
``override_dirname``, for which 0.8 and 0.80 are two values, and a list of jobs in memory, which ends with its process.
"""

import dataclasses
import glob
import json
import logging
import re
import shlex
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sd_quant.cache import open_lock, try_lock
from sd_quant.checkpoints.unopened import starting
from sd_quant.config import deciding
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.files import digest, write_json
from sd_quant.places import LONGEST_NAME, folder_name, input_path
from sd_quant.progress import Work, duration, each
from sd_quant.quantization.recipe import unheeded_knobs
from sd_quant.report.published import read_published
from sd_quant.report.record import DONE, RECORD
from sd_quant.report.summary import FAILED, FAILURE, RECOMMENDATION, SWEEP, UNFINISHED, Sweep, is_running, read_plan
from sd_quant.text import counted, one_line

LOG = logging.getLogger(__name__)
STATED = ("timing", "verdict")  # sections that apply to a sweep as a whole
TEXTS = {  # knobs with texts for networks, and a pattern of the values that are references to other knobs nevertheless
    "prompts": r"\$\{[\w.]*prompts\}",
    "infer.prompts": r"\$\{(oc\.select:prompts,\$\{)?[\w.]*prompts\}+",
    "infer.negative_prompt": "",
    "model.arguments": r"\$\{[\w.]+\}",
}
BARE = re.compile(r"(?<!\\)((?:\\\\)*)\$\{")  # an interpolation that is not escaped
MOST_JOBS = 1000  # each is composed and checked before the first starts, and has a row in the report


def is_sweep(plain: DictConfig, multirun: bool) -> bool:
    """Whether a command is a sweep: by ``-m``, or by the ``hydra.mode`` in its ``plain_config``."""
    return multirun or plain.hydra.mode == RunMode.MULTIRUN


def plain_config(config_name: str, arguments: Sequence[str]) -> DictConfig:
    """Compose the command's configuration without the overrides that have several values."""
    plain = [override.input_line for override in parse(arguments) if not override.is_sweep_override()]
    return compose(config_name, plain, return_hydra_config=True)


def with_literal_texts(config: DictConfig) -> DictConfig:
    """Escape ``${`` in prompts and other texts for networks, so that OmegaConf does not interpolate them."""
    for name, reference in TEXTS.items():
        section, _, knob = name.rpartition(".")
        holder = OmegaConf.select(config, section) if section else config
        node = holder._get_node(knob, validate_access=False) if OmegaConf.is_dict(holder) else None
        value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node and node._value()
        if value is not None:
            change = partial(literal_text, "" if isinstance(value, list) else reference)
            OmegaConf.update(config, name, in_texts(change, value), merge=False)
    return config


def literal_text(reference: str, text: str) -> str:
    return text if re.fullmatch(reference, text) else BARE.sub(r"\1\\${", text)


def in_texts(change: Callable[[str], str], value: object) -> object:
    """Return ``value`` with ``change`` applied to each text in its mappings and lists."""
    if isinstance(value, Mapping):
        return {name: in_texts(change, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_texts(change, each) for each in value]
    return change(value) if isinstance(value, str) else value


def parse(arguments: Sequence[str]) -> list:
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(arguments))


def expand(config_name: str, arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the knobs that vary, and each job's overrides in Hydra's order. Raises ConfigError above MOST_JOBS."""
    sweeper = plain_config(config_name, arguments).hydra.sweeper
    if not str(sweeper.get("_target_")).endswith("BasicSweeper"):
        raise ConfigError(f"hydra/sweeper is {sweeper.get('_target_')}, expected Hydra's basic one: it names jobs here")
    params = [f"{name}={value}" for name, value in (sweeper.params or {}).items()]
    task = [override.input_line for override in parse(arguments) if not override.is_hydra_override()]
    values: dict[str, list[str]] = {}
    for override in parse(params + task):  # the last one of a knob counts, at the place of the first
        name = override.get_key_element()
        if not override.is_sweep_override():
            values[name] = [override.get_value_element_as_str()]
        elif override.is_discrete_sweep():
            values[name] = list(islice(override.sweep_string_iterator(), MOST_JOBS + 1))
        else:
            raise ConfigError(f"{override.input_line} is an interval, expected values such as 0.5,0.8 or range(8,33,8)")
    if prod(map(len, values.values())) > MOST_JOBS:
        expected = "expected at most so many; vary fewer values at a time"
        raise ConfigError(f"the command means more than {MOST_JOBS} jobs, {expected}")
    jobs = [[f"{name}={value}" for name, value in zip(values, job, strict=True)] for job in product(*values.values())]
    return [name for name, chosen in values.items() if len(set(chosen)) > 1], jobs


def plan_of(
    config_name: str, arguments: Sequence[str], job_of: Callable[[DictConfig], Any]
) -> tuple[dict, str, list[Any]]:
    """Return the content of ``sweep.json``, the folder's name without its time, and the jobs, checked by ``job_of``.

    A job with the same result as an earlier one names it in ``same_as``. Raises ConfigError for an invalid job.
    """
    varied, overridden = expand(config_name, arguments)
    varied = [name.lstrip("+") for name in varied]
    elsewhere = [argument for argument in arguments if argument.startswith("hydra.searchpath=")]  # the user's groups
    entries, jobs, published = [], list[Any](), None
    first_of: dict[str, str] = {}  # the name of the first job by its result
    by_name: dict[str, str] = {}  # the overrides of a job by its name
    for overrides in each(overridden, "jobs checked"):
        config = with_literal_texts(compose(config_name, [*overrides, *elsewhere], return_hydra_config=True))
        with starting(checkpoint_of(config)):
            values = {name: value_of(config, name) for name in varied}
        name, this = job_name(values), " ".join(overrides)
        try:
            job = job_of(config)
        except ConfigError as error:
            raise ConfigError(f"job {name}: {error}") from error
        if (same := by_name.setdefault(name, this)) is not this:
            raise ConfigError(f"two jobs of the sweep are one: {same} and {this}; leave one of the values out")
        if file := getattr(job, "published", None):
            published = read_published(input_path(file), file)
        jobs.append(job)
        entries.append({"name": name, "varied": values, "overrides": overrides})
        if (done := first_of.setdefault(result_of(job), name)) != name:
            entries[-1]["same_as"] = done
    identity = digest(*(json.dumps(deciding(job), sort_keys=True) for job in jobs))
    experiments = [text.partition("=")[2] for text in arguments if text.startswith(("experiment=", "+experiment="))]
    label = (experiments or [""])[-1] or "-".join(name.rpartition(".")[2] for name in varied) or "one"
    plan = {
        "schema_version": 1, "command": list(arguments), "varied": varied, "jobs": entries, "identity": identity,
        "published": published,
        **{name: dataclasses.asdict(getattr(jobs[-1], name)) for name in STATED if hasattr(jobs[-1], name)},
    }  # fmt: skip
    return plan, f"{folder_name(label)[:60]}_{identity[:8]}", jobs


def dated(name: str) -> str:
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"


def begun(folder: Path, name: str) -> Path | None:
    """Return the newest folder below ``folder`` of a sweep called ``name``; None if there is none."""
    return max((path.parent for path in folder.glob(f"*_{glob.escape(name)}/{SWEEP}")), default=None)


def result_of(job: Any) -> str:
    """Return a text that is equal for jobs whose results must be equal, whatever the names of their presets."""
    knobs = deciding(job)
    if "quantize" in knobs:
        knobs["quantize"] |= unheeded_knobs(job.quantize) | dict.fromkeys(("format", "exp_name", "attention"))
    return json.dumps(knobs, sort_keys=True)


def checkpoint_of(config: DictConfig) -> Path | None:
    """Return the path of the configuration's checkpoint, or None for a command without one."""
    path = OmegaConf.select(config, "model.path")
    return None if path is None else input_path(str(path))


def value_of(config: DictConfig, name: str):
    """Return the value of a knob, or the preset chosen for a group such as ``quantize``, as plain data."""
    choices = config.hydra.runtime.choices
    if name in choices:
        return choices[name]
    value = OmegaConf.select(config, name)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def job_name(values: dict) -> str:
    """Name a job and its folder by the values of its knobs, such as ``quant_level=2.5,alpha=auto``."""
    texts = [f"{name.rpartition('.')[2]}={written(value)}" for name, value in values.items()]
    name = ",".join(texts) or "job"
    safe = folder_name(name)
    return safe if safe == name else f"{safe[:LONGEST_NAME]}-{digest(*texts)[:8]}"


def written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def opened(directory: Path, plan: dict) -> Iterator[None]:
    """Lock a sweep's folder in the block and write its plan. Raises ConfigError if it is locked or another sweep's."""
    directory.mkdir(parents=True, exist_ok=True)
    with open_lock(directory / ".sweep.lock") as lock:
        if not try_lock(lock):
            raise ConfigError(
                f"another process is running a sweep in {directory}; wait for it, or set another hydra.sweep.dir"
            )
        if (directory / SWEEP).exists():
            there = read_plan(directory)
            if there.get("identity") != plan["identity"]:
                raise ConfigError(
                    f"{directory} holds another sweep ({shlex.join(map(str, there.get('command', [])))}); "
                    "set another hydra.sweep.dir"
                )
        (directory / RECOMMENDATION).unlink(missing_ok=True)  # which is of the jobs that were done before
        write_json(directory / SWEEP, plan)
        yield


def entry(directory: Path, number: int) -> dict:
    """Return the plan's entry of Hydra's job ``number``: its ``name``, and ``same_as``, a job with an equal result."""
    return read_plan(directory)["jobs"][number]


def write_failure(directory: Path, reason: str, exit_code: int) -> None:
    """Write why a job failed into its folder, unless the disk is full."""
    with suppress(OSError, ResourceError):
        write_json(directory / FAILURE, {"status": FAILED, "reason": reason, "exit_code": exit_code})


def start_line(sweep: Sweep) -> str:
    done, failed = (sum(job.status == status for job in sweep.own) for status in (DONE, FAILED))
    before = [f"{done} done before"] if done else []
    before += [f"{failed} failed before and tried again"] if failed else []
    if twins := len(sweep.names) - len(sweep.own):
        before.append(f"{twins} of them the same as another, done once")
    what = f"sweep of {counted(len(sweep.names), 'job')} in {sweep.directory}"
    return what + (f": {', '.join(before)}" if before else "")


class Jobs(Work):
    """The progress of a sweep's jobs on any machine, read from their folders."""

    def __init__(self, directory: Path):
        super().__init__("jobs")
        self.directory = directory
        self.before = self.count()[0]

    def count(self) -> tuple[int, int, int, int]:
        """Count the jobs that are done, have failed, are running, and are waiting (not begun, or died)."""
        planned = read_plan(self.directory)["jobs"]
        folders = [self.directory / job["name"] for job in planned if "same_as" not in job]
        undone = [folder for folder in folders if not (folder / RECORD).exists()]
        running = sum(is_running(folder) is True for folder in undone)
        failed = sum((folder / FAILURE).exists() and not is_running(folder) for folder in undone)
        return len(folders) - len(undone), failed, running, len(undone) - failed - running

    def line(self) -> str:
        """Describe the state, as ``jobs: 3 done, 1 failed, 2 running, 2 waiting; about 84 s to go``."""
        (done, failed, running, waiting), taken = self.count(), time.monotonic() - self.started
        told = f"{done} done, {failed} failed, {running} running, {waiting} waiting"
        new = done - self.before
        left = f"about {duration(taken * (running + waiting) / new)} to go" if new > 0 else f"{duration(taken)} so far"
        return f"{self.description}: {told}; {left}"


def job_line(sweep: Sweep, number: int) -> str:
    """Announce a job, as ``job 3 of 12: alpha=0.5; about 4 min of work to go``."""
    name, total = sweep.names[number], len(sweep.names)
    job = next(job for job in sweep.jobs if name in (job.name, *job.twins))
    if name != job.name:
        return f"job {number + 1} of {total}: {name} gives the same assignment as {job.name} and is not done again"
    tried = f", failed before: {job.reason}" if job.status == FAILED else ""
    return f"job {number + 1} of {total}: {job.name}{tried}{left(sweep)}"


def left(sweep: Sweep) -> str:
    """Estimate the time of the remaining jobs by the median of those that are done; empty before the first."""
    seconds = [job.record["seconds"] for job in sweep.own if job.record["seconds"]]
    waiting = len(sweep.own) - len(seconds)
    return f"; about {duration(waiting * statistics.median(seconds))} of work to go" if seconds and waiting else ""


def folder_of(directory: Path, number: int) -> str:
    """Return the name of a job's folder; its number if there is no plan, so that ``check_shared`` refuses the job."""
    return entry(directory, number)["name"] if (directory / SWEEP).exists() else str(number)


def check_shared(directory: Path) -> None:
    """Raise ResourceError on a machine that does not share the sweep's folder with the command that started it."""
    if not (directory / SWEEP).exists():
        raise ResourceError(
            f"{directory} has no {SWEEP} on {socket.gethostname()}, which was to do a job, expected the one that the "
            "command has written; let this machine share the folder, or set hydra.sweep.dir to one that all share"
        )


def outcome(sweep: Sweep, ended_with: Exception | None = None) -> tuple[int, str]:
    """Return the exit code of a sweep and the sentence about its jobs that are not done.

    ``ended_with`` is the error that ended the sweep: the launcher's if some jobs have no result, else a job's.
    """
    bad = [job for job in sweep.jobs if job.status != DONE]
    if not bad:
        return 0, ""
    reasons = [f"{job.name}: {job.reason}" for job in bad]
    if ended_with is not None and any(job.status == UNFINISHED for job in bad):
        complaint = one_line(ended_with, 300)
        reasons = [f"{job.name}: {job.reason}" for job in bad if job.status == FAILED]
        reasons.insert(0, f"the launcher failed with {type(ended_with).__name__}: {complaint}")
    told = "; ".join(reasons[:3]) + ("; ..." if len(reasons) > 3 else "")
    what = f"{len(bad)} of {counted(len(sweep.jobs), 'job')} {'is' if len(bad) == 1 else 'are'} not done"
    return 1, f"{what} ({told}); the same command tries them again"
