"""Which jobs of a sweep have the same unquantized engines, so that one job's latencies of these hold for another."""

from pathlib import Path
from typing import Any

import yaml

from sd_quant.config import QuantizeJob, artifact, completed
from sd_quant.engines import RUNTIMES
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import SdQuantError
from sd_quant.files import digest, read_regular, sha256
from sd_quant.files.archive import MAX_TEXT
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.knobs import read
from sd_quant.report.record import DONE, IMAGE, VARIANTS, at, weights_sha256
from sd_quant.report.summary import Job, read_sweep

SAME_MACHINE = ("cpu", "logical_cores", "memory_bytes", "gpus")  # a launcher may have given a job fewer of its cores
THREADS = ("usable_cores", "threads")
UNREADABLE = (SdQuantError, OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError)


def unquantized_file(directory: Path, kind: str, denoiser: str) -> Path:
    """The unquantized denoiser's file of a job in a folder."""
    return artifact(directory / "full_precision", kind, denoiser)


def workload_of_engines(knobs: QuantizeJob, weights: str | None, reference: Path) -> str:
    """A digest of what the latencies of unquantized engines depend on, but for the machine."""
    infer = knobs.infer
    same = (
        infer.width, infer.height, infer.batch_size, infer.steps, infer.scale, infer.precision, infer.cuda_graph,
        infer.image, infer.mask, infer.strength,  # by which an image takes fewer steps, and an encoder beside them
        knobs.compiled_baseline,
    )  # fmt: skip
    return digest(infer.engine, str(same), str(weights), hash_of(reference))


def latency_of_another(knobs: QuantizeJob, facts: dict, directory: Path, denoiser: str) -> tuple[str, dict] | None:
    """The name and the ``latency`` of a finished job of the sweep whose unquantized engines are those of ``knobs``.

    ``directory`` holds the files of the job of ``knobs``, and ``facts`` what it started from. None where no job has
    whole figures of this machine.
    """
    engine, batch = knobs.infer.engine, str(knobs.infer.batch_size)
    kind = str(RUNTIMES[engine].file)
    key = workload_of_engines(knobs, weights_sha256(facts), unquantized_file(directory, kind, denoiser))
    for job in read_sweep(directory.parent).own:
        there = at(job.record, "environment", "machine") or {}
        if job.status != DONE or any(there.get(fact) != facts["machine"][fact] for fact in (*SAME_MACHINE, *THREADS)):
            continue
        latency = at(job.record, "latency")
        image = at(latency, engine, IMAGE, batch, VARIANTS[0])
        if not isinstance(image, dict) or image.get("p50_ms") is None or "of_job" in image:
            continue
        try:
            reference = unquantized_file(job.directory, kind, denoiser)
            same = workload_of_engines(knobs_of(job), weights_sha256(job.record), reference) == key
        except UNREADABLE:
            continue
        if same:
            return job.name, latency
    return None


def knobs_of(job: Job) -> QuantizeJob:
    """The knobs of a job's folder. Raises one of UNREADABLE."""
    stored: Any = load_yaml(read_regular(job.directory / "config.yaml", MAX_TEXT))
    return read(QuantizeJob, completed(stored))


def files_of(path: Path) -> list[Path]:
    """An engine's file and those that hold its weights."""
    return onnx_files(path) if path.suffix.lower() == ".onnx" else [path]


def hash_of(path: Path) -> str:
    """A digest of the ``files_of`` an engine."""
    return digest(*map(sha256, files_of(path)))
