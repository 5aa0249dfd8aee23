"""Third-party quantized checkpoints and sd-quant runs, compared on the same prompts and seeds with full precision.

Each candidate gets a folder like a job of a sweep, so the tools that show a sweep show candidates too. All candidates
are opened before anything is computed, so that an unknown file is refused at once. If memory does not hold two
networks, one is open at a time.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sd_quant.cache import locked
from sd_quant.config import Judge, JudgeJob, is_run
from sd_quant.devices import threads
from sd_quant.errors import ConfigError, SdQuantError, of_the_machine
from sd_quant.files import digest, write_json
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import at, read_object
from sd_quant.report.shipped import last_words
from sd_quant.report.summary import FAILURE, LOCK, SWEEP, read_sweep, sweep_table
from sd_quant.source import source_digest
from sd_quant.stages.baseline import Baseline, baseline_of
from sd_quant.stages.job_folder import check_own, finished, remove_leftovers, remove_unfinished
from sd_quant.stages.judge_one import judge_one
from sd_quant.stages.judged_run import run_subject
from sd_quant.stages.third_party import Subject, third_party

LOG = logging.getLogger(__name__)


def judge(job: JudgeJob, directory: Path) -> None:
    """Judge the job's candidates in ``directory``, which becomes a sweep's folder with a job for each candidate.

    Candidates that were judged there before with equal settings are skipped.
    Raises SdQuantError, before anything is computed, for a candidate that cannot be read.
    """
    torch.set_num_threads(threads())
    check_own(directory, marks=(SWEEP,))
    with locked(directory / LOCK, f"waiting for another process, which works in {directory}"):
        if at(read_object(directory / SWEEP), "jobs"):
            raise ConfigError(f"{directory} holds a sweep of quantize; set hydra.run.dir to another folder")
        remove_unfinished(directory)
        baseline = baseline_of(job, directory)
        subjects = subjects_of(job.judge, baseline)
        write_json(directory / SWEEP, plan_of(job.judge))
        try:
            judge_all(subjects, baseline)
        finally:  # show the judged candidates even if one failed
            rebuild(directory)
            print(sweep_table(read_sweep(directory)))
            print(last_words(directory), flush=True)


def plan_of(judge: Judge) -> dict:
    """Return the content of ``sweep.json`` for a folder that holds candidates only."""
    return {
        "schema_version": 1,
        "command": ["sd-quant", "judge", *sys.argv[1:]],
        "varied": [],
        "jobs": [],
        "candidates": judge.planned(),
        "judge": dataclasses.asdict(judge),
    }


def subjects_of(judge: Judge, baseline: Baseline) -> list[Subject]:
    """Open every candidate. Raises SdQuantError if one is unreadable, or lies in (or around) its results' folder."""
    for name, path in judge.named().items():
        folder, given = (baseline.directory / name).resolve(), path.resolve()
        if folder == given or folder in given.parents or given in folder.parents:
            raise ConfigError(
                f"the candidate {path} and the folder of its results, {folder}, lie in each other; set hydra.run.dir "
                "to another folder"
            )
    return [
        (run_subject if is_run(path) else third_party)(name, path, baseline) for name, path in judge.named().items()
    ]


def judge_all(subjects: Sequence[Subject], baseline: Baseline) -> None:
    """Judge each candidate in its own folder. A failure is written there; the first one is raised at the end."""
    directory = baseline.directory
    marks = {each.name: mark_of(each, baseline) for each in subjects}
    left = [each for each in subjects if finished(directory / each.name, marks[each.name]) is None]
    if done := len(subjects) - len(left):
        LOG.info("%d of %d candidates were judged before", done, len(subjects))
    if not left:
        return
    reference, failure = baseline.outputs(), None
    for number, subject in enumerate(left, start=1):
        LOG.info("candidate %d of %d: %s, %s", number, len(left), subject.name, subject.denoiser.maker)
        folder = directory / subject.name
        folder.mkdir(exist_ok=True)
        check_own(folder)
        with locked(folder / LOCK, f"waiting for another process, which works in {folder}"):
            remove_leftovers(folder)
            try:
                judge_one(subject, baseline, reference, marks[subject.name], folder)
            except Exception as error:
                fault = of_the_machine(error)
                refused = error if fault is None else fault
                if not isinstance(refused, SdQuantError):
                    raise
                LOG.error("%s: %s", subject.name, refused)
                reason = {"status": "failed", "reason": str(refused), "exit_code": refused.exit_code}
                write_json(folder / FAILURE, reason)
                failure = failure or refused
    if failure is not None:
        raise failure


def mark_of(subject: Subject, baseline: Baseline) -> str:
    """Return a digest of everything that decides a candidate's record, except the machine."""
    judge = dataclasses.asdict(baseline.judge) | {"candidates": [str(subject.path)]}
    own = {group: dataclasses.asdict(getattr(baseline, group)) for group in ("model", "infer", "metrics")}
    knobs = own | {"judge": judge}
    inputs = {name: each["sha256"] for name, each in baseline.facts["inputs"].items()}
    made = subject.file["sha256"], subject.runtime is not None  # its library may be installed later
    return digest(
        json.dumps([knobs, baseline.prompts, inputs, made, baseline.facts["versions"], source_digest()], sort_keys=True)
    )
