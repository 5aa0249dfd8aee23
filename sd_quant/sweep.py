"""A sweep: which jobs a command means, what they are called, where they go, and what is left to do.

Hydra starts the jobs, here or through a launcher. Around that stands one file, ``sweep.json``, written before the first
job: the jobs in Hydra's order, each named by the knobs that vary, in a folder whose name is its time, and what depends
on nothing but the command and the configuration. So the same command finds the newest that it has begun, and every job
knows its folder by its number. The
roads not taken: ``override_dirname``, for which 0.8 and 0.80 are two values, and a list of jobs in memory, which dies
with its process.
"""

import dataclasses
import fcntl
import glob
import json
import logging
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sd_quant.config import deciding
from sd_quant.errors import ConfigError
from sd_quant.files import digest, write_json
from sd_quant.places import LONGEST_NAME, folder_name, input_path
from sd_quant.progress import duration, each
from sd_quant.quantization.recipe import unheeded_knobs
from sd_quant.report.published import read_published
from sd_quant.report.record import DONE, seconds_of_stages
from sd_quant.report.summary import FAILED, SWEEP, UNFINISHED, Sweep
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
STATED = ("judge", "timing", "verdict")  # sections that are for a sweep as a whole
TIME = "%Y-%m-%d_%H-%M-%S"
MOST_JOBS = 1000  # each is composed and checked before the first starts, and stands in the report


def is_sweep(config_name: str, arguments: Sequence[str], multirun: bool) -> bool:
    """Whether ``-m``, or an experiment's ``hydra.mode``, makes several jobs of the command."""
    return multirun or plain_config(config_name, arguments).hydra.mode == RunMode.MULTIRUN


def plain_config(config_name: str, arguments: Sequence[str]) -> DictConfig:
    """The configuration of the command without what varies."""
    plain = [override.input_line for override in parse(arguments) if not override.is_sweep_override()]
    return compose(config_name, plain, return_hydra_config=True)


def parse(arguments: Sequence[str]) -> list:
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(arguments))


def expand(config_name: str, arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The knobs that vary, and the overrides of every job, as Hydra's basic sweeper orders and numbers them.

    Raises ConfigError for another sweeper, a range that cannot be counted, and more than ``MOST_JOBS`` jobs.
    """
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
        raise ConfigError(
            f"the command means more than {MOST_JOBS} jobs, expected at most so many; vary fewer values at a time"
        )
    jobs = [[f"{name}={value}" for name, value in zip(values, job, strict=True)] for job in product(*values.values())]
    return [name for name, chosen in values.items() if len(set(chosen)) > 1], jobs


def plan_of(config_name: str, arguments: Sequence[str], job_of: Callable[[DictConfig], Any]) -> tuple[dict, str]:
    """What ``sweep.json`` holds, and a name for the folder, behind its time; ``job_of`` checks and returns a job.

    Jobs that are sure to give the same assignment are done once: all but the first name it as ``same_as``.
    Raises ConfigError, naming the job, when one of them is impossible: nothing has started then.
    """
    varied, jobs = expand(config_name, arguments)
    elsewhere = [argument for argument in arguments if argument.startswith("hydra.searchpath=")]  # the user's groups
    entries, everything, published, stated = [], [], None, dict[str, dict]()
    judging: list[Any] = []
    by_result: dict[str, str] = {}  # the name of the first job that gives it
    for overrides in each(jobs, "jobs checked"):
        config = compose(config_name, [*overrides, *elsewhere], return_hydra_config=True)
        values = {name.lstrip("+"): value_of(config, name.lstrip("+")) for name in varied}
        try:
            job = job_of(config)
        except ConfigError as error:
            raise ConfigError(f"job {job_name(values)}: {error}") from error
        if name := getattr(job, "published", None):
            published = read_published(input_path(name), name)
        stated = {name: dataclasses.asdict(getattr(job, name)) for name in STATED if hasattr(job, name)}
        everything.append(json.dumps(deciding(job), sort_keys=True))
        judging.append(job)
        entry: dict[str, Any] = {"name": job_name(values), "varied": values, "overrides": overrides}
        if (done := by_result.setdefault(result_of(job), entry["name"])) != entry["name"]:
            entry["same_as"] = done
        entries.append(entry)
    first: dict[str, str] = {}
    for entry in entries:
        this = " ".join(entry["overrides"])
        if (same := first.setdefault(str(entry["name"]), this)) is not this:
            raise ConfigError(f"two jobs of the sweep are one: {same} and {this}; leave one of the values out")
    identity, candidates = digest(*everything), candidates_of(judging)
    if taken := {each["name"] for each in candidates} & {entry["name"] for entry in entries}:
        raise ConfigError(
            f"the candidate {min(taken)} would have the folder of the job of that name; give it by another name, "
            "such as that of a link to it"
        )
    label = experiment_of(arguments) or "-".join(name.lstrip("+").rpartition(".")[2] for name in varied) or "one"
    plan = {
        "schema_version": 1,
        "command": list(arguments),
        "varied": [name.lstrip("+") for name in varied],
        "jobs": entries,
        "identity": identity,
        "published": published,
        "candidates": candidates,
        **stated,
    }
    return plan, f"{folder_name(label)[:60]}_{identity[:8]}"


def dated(name: str) -> str:
    """A folder's name that begins with the time, as a run's."""
    return f"{datetime.now():{TIME}}_{name}"


def begun(folder: Path, name: str) -> Path | None:
    """The newest folder of a sweep of this name below ``folder``, if there is one."""
    return max((path.parent for path in folder.glob(f"*_{glob.escape(name)}/{SWEEP}")), default=None)


def candidates_of(jobs: Sequence[Any]) -> list[dict]:
    """What is judged beside the jobs. Raises ConfigError when they have not one model and make not the same images."""
    if not hasattr(jobs[0], "judge"):
        return []
    planned = [job.judge.planned() for job in jobs]
    by_what = [
        json.dumps([dataclasses.asdict(each) for each in (job.model, job.infer)], sort_keys=True) for job in jobs
    ]
    if any(planned) and len(set(map(json.dumps, planned)) | set(by_what)) > 2:
        raise ConfigError(
            "candidates are judged beside recipes for one model and the same images, and the jobs of this sweep differ "
            "in model, infer or candidates; vary the recipe alone"
        )
    return planned[0]


def result_of(job: Any) -> str:
    """The same text for jobs that are sure to give the same assignment, whatever it is called."""
    knobs = deciding(job)
    if "quantize" in knobs:
        knobs["quantize"] |= unheeded_knobs(job.quantize) | dict.fromkeys(("format", "exp_name"))
    return json.dumps(knobs, sort_keys=True)


def experiment_of(arguments: Sequence[str]) -> str | None:
    names = [
        argument.partition("=")[2] for argument in arguments if argument.startswith(("experiment=", "+experiment="))
    ]
    return names[-1] if names else None


def value_of(config: DictConfig, name: str):
    """The value of a knob, or of a choice such as ``quantize``, as JSON has it."""
    choices = config.hydra.runtime.choices
    if name in choices:
        return choices[name]
    value = OmegaConf.select(config, name)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def job_name(values: dict) -> str:
    """``quant_level=2.5,alpha=auto``: deterministic, a folder's name, and another one for every other job."""
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
    """The folder is this sweep's alone while the block runs. Raises ConfigError when it is another's."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".sweep.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is running a sweep in {directory}; wait for it, or set another hydra.sweep.dir"
            ) from error
        if (directory / SWEEP).exists():
            there = json.loads((directory / SWEEP).read_text(encoding="utf-8"))
            if there.get("identity") != plan["identity"]:
                raise ConfigError(
                    f"{directory} holds another sweep ({shlex.join(map(str, there.get('command', [])))}); "
                    "set another hydra.sweep.dir"
                )
        write_json(directory / SWEEP, plan)
        yield


def twin_of(directory: Path, number: int) -> str | None:
    """The job that is done in place of Hydra's n-th, because it gives the same assignment; None for all others."""
    return json.loads((directory / SWEEP).read_text(encoding="utf-8"))["jobs"][number].get("same_as")


def name_of_job(directory: str, number: int) -> str:
    """The folder of Hydra's n-th job; ``conf/_command.yaml`` asks for it."""
    return json.loads((Path(directory) / SWEEP).read_text(encoding="utf-8"))["jobs"][int(number)]["name"]


def start_line(sweep: Sweep) -> str:
    done, failed = (sum(job.status == status for job in sweep.own) for status in (DONE, FAILED))
    before = [f"{done} done before"] if done else []
    before += [f"{failed} failed before and tried again"] if failed else []
    if twins := len(sweep.names) - len(sweep.own):
        before.append(f"{twins} of them the same as another, done once")
    return f"sweep of {len(sweep.names)} jobs in {sweep.directory}" + (f": {', '.join(before)}" if before else "")


def job_line(sweep: Sweep, number: int) -> str:
    """``job 3 of 12: alpha=0.5; about 4 min of work to go``."""
    name, total = sweep.names[number], len(sweep.names)
    job = next(job for job in sweep.jobs if name in (job.name, *job.twins))
    if name != job.name:
        return f"job {number + 1} of {total}: {name} gives the same assignment as {job.name} and is not done again"
    tried = f", failed before: {job.reason}" if job.status == FAILED else ""
    return f"job {number + 1} of {total}: {job.name}{tried}{left(sweep)}"


def left(sweep: Sweep) -> str:
    """How long the other jobs will take, from the median of those that are done; nothing before there are any."""
    seconds = [sum(seconds_of_stages(job.record).values()) for job in sweep.own if job.record is not None]
    waiting = len(sweep.own) - len(seconds)
    return f"; about {duration(waiting * statistics.median(seconds))} of work to go" if seconds and waiting else ""


def outcome(sweep: Sweep, ended_with: Exception | None = None) -> tuple[int, str]:
    """The exit code and what to say: a sweep is as good as its worst job.

    ``ended_with`` is the error that reached the process which started the jobs: a job's own, unless some have not even
    failed. Then it is the launcher's.
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
    return 1, f"{len(bad)} of {len(sweep.jobs)} jobs are not done ({told}); the same command tries them again"
