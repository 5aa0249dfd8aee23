"""The command ``quantize``: from a checkpoint to the quantized model's files, its images and a record."""

import logging
from pathlib import Path

from sd_quant.cache import locked
from sd_quant.config import QuantizeJob
from sd_quant.report.record import parsed
from sd_quant.report.summary import LOCK
from sd_quant.stages import job_folder
from sd_quant.stages.opening import check_runtimes
from sd_quant.stages.run import run
from sd_quant.stages.shared import Shared, cache_of

LOG = logging.getLogger(__name__)


def quantize(job: QuantizeJob, directory: Path) -> float | None:
    """Run the job in ``directory`` and return the mean PSNR in dB; the record is written last.

    If the same job is done already, the directory is not changed. Files of an interrupted attempt are removed. A second
    process with the same directory waits for the first.
    """
    check_runtimes(job)
    job_folder.check_own(directory)
    attempted = (directory / LOCK).exists()
    with locked(directory / LOCK, f"waiting for another process, which works in {directory}"):
        facts = job_folder.facts_of(job, directory)
        wanted = job_folder.fingerprint_of(job, facts)
        if (record := job_folder.finished(directory, wanted)) is not None:
            LOG.info(job_folder.DONE_BEFORE)
            return job_folder.closing_words(record, directory)
        if not job_folder.in_sweep(directory):  # a sweep's folder holds its own jobs alone
            job_folder.check_no_other_run(job, directory, wanted)
        if attempted:
            job_folder.remove_leftovers(directory)
        try:
            made = run(job, Shared(facts, directory, cache_of(job.cache)), wanted)
        except Exception:
            job_folder.check_still_there(directory)  # a removed folder explains the failure
            raise
        return job_folder.closing_words(parsed(made), directory)
