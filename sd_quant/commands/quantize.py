"""Quantize a checkpoint: ONNX files, engines, images and measurements."""

import logging
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from sd_quant.cli import Command, importing, record_failure
from sd_quant.config import QuantizeJob, check_heeded
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.report.summary import LOG as LOG_FILE
from sd_quant.report.summary import WAS_CANCELLED
from sd_quant.stages.closing import DONE_BEFORE, closing_words, in_sweep
from sd_quant.stages.job_folder import check_no_other_run, done_before
from sd_quant.stages.relay import Relay
from sd_quant.stages.trace_ahead import tracer_for

LOG = logging.getLogger(__name__)
RELAY = Relay(record_failure)


def task(job: QuantizeJob, directory: Path) -> float | None:
    """Do the job, unless its folder holds its result. Returns the mean PSNR in dB, which Hydra's sweepers read."""
    if job.judge.candidates and not in_sweep(directory):
        raise ConfigError(
            "candidates are judged beside the recipes of a sweep, and this is a single run; add -m, or give its folder "
            "to judge as one of the candidates"
        )
    if (record := done_before(job, directory)) is not None:  # before the imports that the work itself needs
        LOG.info(DONE_BEFORE)
        return closing_words(record, directory)
    with tracer_for(job.cache) as tracer:
        with importing():
            from sd_quant.stages.quantize import quantize

        try:
            return quantize(job, directory, tracer, RELAY if goes_on_beside(job) else None)
        except KeyboardInterrupt:
            if RELAY.waiting is not None:
                with (RELAY.waiting.directory / LOG_FILE).open("a", encoding="utf-8") as log:
                    log.write(f"the job {WAS_CANCELLED}\n")
            raise


def goes_on_beside(job: QuantizeJob) -> bool:
    """Whether the next job may begin while this one's plans are built, and before this one is timed.

    So it is in a sweep of this process: a launcher's jobs may have run where nothing is timed afterwards, and a search
    proposes a job by the results of those before it.
    """
    hydra = HydraConfig.get()
    return hydra.mode == RunMode.MULTIRUN and hydra.runtime.choices["hydra/launcher"] == "basic" and job.search is None


def check_before_run(job: QuantizeJob, directory: Path, given: list[str]) -> None:
    """Raises ConfigError for a knob without effect, and for a folder with another finished run."""
    if job.search is not None:
        raise ConfigError(
            f"search is {job.search:g} and proposes jobs of a sweep, and this is a single run; add -m and the values "
            "among which it searches, such as quant_level=1,2.5,3"
        )
    check_heeded(job, given)
    check_no_other_run(job, directory)


def check_before_sweep(job: QuantizeJob) -> None:
    """Raises SdQuantError for a third-party checkpoint that cannot be read, before hours of other work."""
    if job.judge.candidates:
        with importing():
            from sd_quant.stages.judge import check_candidates

        check_candidates(job.model, job.judge)


def compare_together(directory: Path) -> None:
    """Time the engines of a sweep's jobs together and judge its third-party checkpoints, after the last job."""
    with importing():
        from sd_quant.stages.judge import judge_sweep
        from sd_quant.stages.time_sweep import fill_in_records, time_sweep

    RELAY.finish()
    untimed = None
    try:
        time_sweep(directory)
        fill_in_records(directory)
    except SdQuantError as error:  # the judgement does not depend on it
        untimed = error
    judge_sweep(directory)
    if untimed is not None:
        raise untimed


main = Command("quantize", QuantizeJob, task, check_before_run, check_before_sweep, compare_together)
