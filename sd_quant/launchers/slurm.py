"""Wait for a sweep's Slurm jobs by polling ``squeue``, and report for a job that died what Slurm says about it.

submitit polls ``sacct``, which fails on a cluster without accounting, with three warnings each time, so that a killed
job is waited for without end. ``squeue`` works on every cluster and lists ended jobs for a while. submitit also raises
for the first dead job, which ends the command while other jobs run on; here a dead job counts as failed instead.
"""

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Collection
from functools import partialmethod
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from sd_quant import sweep
from sd_quant.errors import ResourceError, of_the_machine
from sd_quant.launchers import failed
from sd_quant.report.summary import FAILURE
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
POLLED_EVERY = 15  # seconds, at most, between two looks at the queue, each of which is for all jobs of a sweep
FORGOTTEN = "FORGOTTEN"  # of a job that the queue knows no more
ENDED = {  # squeue(1), "JOB STATE CODES"; submitit takes those that it does not know for ended, such as SUSPENDED
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", FORGOTTEN,
}  # fmt: skip
ADVICE = {"OUT_OF_MEMORY": "; raise hydra.launcher.mem_gb", "TIMEOUT": "; raise hydra.launcher.timeout_min"}
KILLED = ", as Slurm does for want of memory on some clusters; raise hydra.launcher.mem_gb"
wait_for_results = SlurmJob.results


def prepare(launcher: DictConfig, directory: Path) -> None:
    """Patch submitit to poll ``squeue`` and to go on when a job dies. Raises ResourceError without Slurm."""
    if missing := [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]:
        raise ResourceError(
            f"hydra/launcher=slurm requires {', '.join(missing)}, which is not on the PATH of this machine; start the "
            "command on a machine of the cluster, or take hydra/launcher=one_host"
        )
    SlurmJob.watcher = Queue(delay_s=POLLED_EVERY)
    SlurmJob.results = partialmethod(results_of, directory)  # type: ignore[assignment]


class Queue(SlurmInfoWatcher):
    """submitit's watcher, polling ``squeue``. ``_info_dict``: dictionaries of State and NodeList by job id."""

    def update(self) -> None:
        """Query ``squeue`` for the jobs that have not ended. A failed query is logged and repeated the next time."""
        waiting = {job for job in self._registered if not self.is_done(job, mode="cache")}
        asked = ",".join(sorted({job.partition("_")[0] for job in waiting}))
        command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={asked}", "--format=%i|%T|%N"]
        if waiting:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0 or "Invalid job id" in result.stderr:
                self._info_dict |= states(result.stdout, waiting)
            else:
                LOG.warning("squeue does not answer: %s", one_line(result.stderr, 200))
        self._last_status_check = time.time()

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode=mode) in ENDED


def states(printed: str, waiting: Collection[str]) -> dict[str, dict[str, str]]:
    """Parse State and NodeList of each waiting job from squeue's output; FORGOTTEN for a job that is not listed."""
    lines = [line.split("|") for line in printed.splitlines()]
    found = {job: {"State": state, "NodeList": nodes} for job, state, nodes in lines}
    return {job: found.get(job, {"State": FORGOTTEN, "NodeList": ""}) for job in waiting}


def results_of(job: SlurmJob, directory: Path) -> list[JobReturn]:
    """Wait for a job and return Hydra's result for it. The failure of a dead job is also written into its folder."""
    name = sweep.entry(directory, job.submission().args[2])["name"]  # by Hydra's number of the job
    failure: Exception
    try:
        results = wait_for_results(job)
        if results[0].status != JobStatus.FAILED or (directory / name / FAILURE).exists():
            return results
        error = results[0]._return_value  # of a job that failed before its first word
        failure = of_the_machine(error) or error
    except (UncompletedJobError, FailedJobError):
        failure = ResourceError(reason(job))
    return [failed(directory, name, failure)]


def reason(job: SlurmJob) -> str:
    """Describe how a dead job ended: Slurm's state, the node, and the last line of Slurm's or else the job's errors."""
    found = job.watcher.get_info(job.job_id, mode="cache")
    state, nodes = found.get("State", FORGOTTEN), found.get("NodeList")
    ended = f"Slurm's job {job.job_id} ended as {state}" + (f" on {nodes}" if nodes else "")
    if not (job.paths.stdout.exists() or job.paths.stderr.exists()):
        return f"{ended} and wrote nothing into {job.paths.folder.parent}; do all nodes share this folder?"
    lines = [line for line in (job.stderr() or "").splitlines() if line.strip()]
    told = [line for line in lines if re.search("slurmstepd.*: error:", line)] or lines
    said = f": {one_line(told[-1], 300)}" if told else ""
    if "memory limit" in said:  # which some versions give as FAILED
        state = "OUT_OF_MEMORY"
    advice = KILLED if said.endswith("Killed") else ADVICE.get(state, "")
    return f"{ended}{said}{advice}"
