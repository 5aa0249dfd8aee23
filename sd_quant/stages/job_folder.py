"""The folder of a job: whether the job is done, which files an interrupted attempt has left, and the closing words.

A job is done when its folder has a record with the job's fingerprint, a digest of all its inputs. A process holds the
folder's lock until it ends, so a lock file without a record was left by an interrupted attempt.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from sd_quant import report, stages
from sd_quant.addons import code_of
from sd_quant.config import Model, QuantizeJob, deciding, lora_of, makes_calibration_images, weighted
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.files import UNFINISHED, digest, remove
from sd_quant.interchange import TARGETS
from sd_quant.interchange.result_folder import remove_result
from sd_quant.metrics import SCORES
from sd_quant.places import CONF, GROUPS, input_path, lasting, shown
from sd_quant.process import seconds_since_start
from sd_quant.progress import working
from sd_quant.report import summary
from sd_quant.report.provenance import made_of, provenance
from sd_quant.report.readings import score_of
from sd_quant.report.record import RECORD, Record, read_record
from sd_quant.report.run_table import run_table
from sd_quant.report.shipped import last_words
from sd_quant.report.summary import FAILURE, LOCK, PROVENANCE, RECOMMENDATION, REPORT, SWEEP
from sd_quant.shell import literal
from sd_quant.source import source_digest
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
DONE_BEFORE = "done before: nothing that this job depends on has changed since"
# What each package writes into a job's folder. Nothing else is ever removed: the user may have named any folder.
HAND_OVER = "hand_over"
FOLDERS = ("onnx", "plan", "full_precision", "images", HAND_OVER)
WRITTEN = (*stages.WRITES, *report.WRITES)
A_JOBS = (LOCK, RECORD, PROVENANCE)  # marks of a job's folder
BEFORE_A_JOB = (".hydra", summary.LOG, "judge.log", LOCK, FAILURE)  # left by Hydra, and by a job that was refused


def inputs_of(job: QuantizeJob) -> dict[str, Path]:
    """Return the files and folders that the job reads, by name."""
    inputs = job.model.inputs()
    if makes_calibration_images(job.quantize, job.infer):
        inputs |= job.model.calibration_inputs()
    if job.quantize.calibration is not None:
        inputs["calibration"] = input_path(job.quantize.calibration)
    if job.quantize.assignment is not None:
        inputs["assignment"] = input_path(job.quantize.assignment)
    return inputs | job.infer.inputs()


def facts_of(job: QuantizeJob, directory: Path) -> dict:
    """Return the job's versions, machine, hashes of inputs, and overrides (with the path of the user's presets)."""
    file = directory / ".hydra" / "overrides.yaml"
    overrides = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else []
    own = ",".join(literal(f"file://{folder}") for folder in GROUPS if folder != CONF)
    return provenance(inputs_of(job), [*overrides, *([f"hydra.searchpath=[{own}]"] if own else [])])


def kept_knobs(job: QuantizeJob) -> dict:
    """Return the job's settings; paths of the model's files and ``assignment`` are made valid in any folder."""
    knobs = dataclasses.asdict(job) | {"model": kept_model(job.model)}
    if job.quantize.assignment is not None:
        knobs["quantize"]["assignment"] = lasting(job.quantize.assignment)
    return knobs


def kept_model(model: Model) -> dict:
    knobs = dataclasses.asdict(model)
    names = (
        "path", "vae", "calibration_prompts", "calibration_table", "calibration_image", "calibration_mask", "prompts"
    )  # fmt: skip
    knobs |= {name: lasting(knobs[name]) for name in names if knobs[name] is not None}
    if model.arguments is not None:
        knobs["arguments"] = json.loads(json.dumps(model.given_arguments(), default=str))  # files by absolute paths
    knobs["loras"] = [
        f"{each.denoiser}:{lasting(each.path)}:{each.strength!r}".removeprefix("None:")
        for each in map(lora_of, model.loras)
    ]
    knobs["controlnets"] = [f"{lasting(path)}:{scale!r}" for path, scale in map(weighted, model.controlnets)]
    knobs["calibration_control"] = list(map(lasting, model.calibration_control))
    return knobs


def fingerprint_of(job: QuantizeJob, facts: dict) -> str:
    """Return a digest of everything that decides a record, except the machine: a sweep's jobs may run on several."""
    inputs = {name: file["sha256"] for name, file in facts["inputs"].items()}
    decided_by = [deciding(job), job.infer.prompt_list(), inputs, facts["versions"], source_digest()]
    if any(dataclasses.asdict(job.metrics).values()) and (code := code_of("scores")):
        decided_by.append(source_digest(package=code))
    return digest(json.dumps(decided_by, sort_keys=True))


def finished(directory: Path, wanted: str) -> Record | None:
    """Return the record in ``directory`` if its fingerprint is ``wanted``, else None."""
    try:
        record = read_record(directory)
    except (OSError, ValueError):
        return None
    return record if record is not None and record["fingerprint"] == wanted else None


def done_before(job: QuantizeJob, directory: Path) -> Record | None:
    """Return the record if this very job is done in ``directory``, else None. Does not import torch."""
    if not (directory / RECORD).is_file():
        return None
    return finished(directory, fingerprint_of(job, made_of(inputs_of(job))))


def check_no_other_run(job: QuantizeJob, directory: Path, wanted: str | None = None) -> None:
    """Raise ConfigError if the folder holds a finished run of another fingerprint and ``overwrite`` is false.

    ``wanted``: the job's own fingerprint, if known; else it is computed. Does not import torch.
    """
    record = None
    with suppress(OSError, ValueError):  # a record damaged by an interrupted attempt
        record = read_record(directory)
    if record is None or job.overwrite:
        return
    if record["fingerprint"] == (wanted or fingerprint_of(job, made_of(inputs_of(job)))):
        return
    made_by = " ".join(map(str, record["overrides"])) or "no arguments"
    raise ConfigError(
        f"{shown(directory)} holds a finished run, of {one_line(made_by, 300)}, whose knobs, inputs or versions are "
        "not this one's, expected a new folder; choose another hydra.run.dir, or add overwrite=true, which removes it"
    )


def check_own(directory: Path, marks: Sequence[str] = A_JOBS) -> None:
    """Raise ConfigError for a folder with foreign files and none of ``marks``, the files that every job writes."""
    others = sorted(path.name for path in directory.iterdir() if path.name not in BEFORE_A_JOB)
    if others and not any((directory / name).exists() for name in marks):
        named = " and ".join(others[:2]) + (" and more" if len(others) > 2 else "")
        raise ConfigError(
            f"hydra.run.dir is {directory}, which holds {named} that no job has written, expected a folder that is "
            "new, empty or a job's; choose another"
        )


def check_still_there(directory: Path) -> None:
    """Raise SdQuantError if the folder was removed while its job ran, even if a new folder has the same path."""
    if not (directory / LOCK).exists():
        raise SdQuantError(
            f"{directory} was removed while its job was running, so files of it are missing; start the job again"
        )


def remove_leftovers(directory: Path) -> None:
    """Remove the files of an earlier attempt, and folders that are then empty; never follow a link."""
    for name in WRITTEN:
        for path in directory.glob(name):
            between = [folder for folder in path.parents if directory in folder.parents]  # links may lead out of it
            if (path.is_symlink() or path.is_file()) and not any(folder.is_symlink() for folder in between):
                path.unlink()
    remove_unfinished(directory)
    for folder in (directory / name for name in FOLDERS if not (directory / name).is_symlink()):
        for place, _, _ in os.walk(folder):
            remove_unfinished(Path(place))
        if folder.name == HAND_OVER:
            for target in TARGETS:
                remove_result(folder / target)
        for place, _, _ in os.walk(folder, topdown=False):
            with suppress(OSError):  # someone else's file is in it
                Path(place).rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished (temporary) files in ``folder``, of any process. The caller holds the folder's lock."""
    for path in list(folder.iterdir()):
        if UNFINISHED.fullmatch(path.name):
            remove(path)


def closing_words(record: Record, directory: Path) -> float | None:
    """Print a run's table, or log a line for a sweep's job; return the mean PSNR in dB, or None.

    A run's report is drawn too, unless it is newer than the record. A sweep draws one report for all its jobs.
    """
    psnr = score_of(record["fidelity"], SCORES["psnr"]).value.value
    if in_sweep(directory):
        LOG.info("done: %s", directory.name if psnr is None else f"{directory.name}, PSNR {psnr:.2f} dB")
        return psnr
    print(run_table(record))
    drawn = [directory / REPORT, directory / RECOMMENDATION]
    made = (directory / RECORD).stat().st_mtime_ns
    if any(not path.exists() or path.stat().st_mtime_ns < made for path in drawn):
        from sd_quant.report.rebuild import rebuild  # which draws

        with working("report"):
            rebuild(directory)
    print(f"run directory: {shown(directory)} (the command took {seconds_since_start():.1f} s)")
    print(last_words(directory))
    return psnr


def in_sweep(directory: Path) -> bool:
    return (directory.parent / SWEEP).exists()
