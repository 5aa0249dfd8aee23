"""Repeated timings on one machine (occasions): their spread widens the intervals of a run's speed-ups."""

from dataclasses import replace
from pathlib import Path

from sd_quant.config import Infer, QuantizeJob, artifact
from sd_quant.engines import RUNTIMES
from sd_quant.engines.onnx_input import structure_of
from sd_quant.files import digest, sha256
from sd_quant.report.occasions import count_occasion, history_of
from sd_quant.report.provenance import versions
from sd_quant.report.record import IMAGE, weights_sha256
from sd_quant.report.timing import CALL, of_conditions, rounds_of
from sd_quant.stages.job_folder import in_sweep
from sd_quant.stages.latency import compare_latency
from sd_quant.stages.shared import CallsOfAnImage, Shared
from sd_quant.stages.variants import Variants


def latency_of_run(
    variants: Variants, job: QuantizeJob, infer: Infer, calls: CallsOfAnImage | None, fingerprint: str
) -> dict:
    """Measure the record's ``latency`` by ``compare_latency`` and count it as an occasion (``count_run``).

    In a sweep, a single denoiser with an engine file gets only a few rounds here: ``time_sweep`` times it later.
    """
    loaded = variants.loaded
    several = len(loaded.checkpoint.family.DENOISERS) > 1
    later = in_sweep(variants.directory) and RUNTIMES[variants.engine].file is not None and not several
    timing = replace(job.timing, budget_s=0) if later else job.timing
    latency = compare_latency(variants, infer, timing, calls)
    if not several:
        count_run(latency, loaded.denoiser, job, variants.shared, fingerprint)
    return latency


def count_run(latency: dict, part: str, job: QuantizeJob, shared: Shared, fingerprint: str) -> None:
    """Widen a run's speed-up intervals by the spread between this machine's occasions; count this run among them."""
    engine, batch = job.infer.engine, job.infer.batch_size
    (samples,) = latency[engine][part]
    timed = rounds_of("run", latency, engine, part, samples, batch)
    call, image = latency[engine][part][samples], latency[engine][IMAGE][str(batch)]
    if timed is None or not call["rounds"]["probes"]:
        return
    key, kind = fingerprint, RUNTIMES[engine].file
    if kind is not None:
        run = shared.directory
        file, reference = (artifact(folder, kind, part) for folder in (run, run / "full_precision"))
        key = digest(workload_of_engines(job, weights_sha256(shared.facts), reference), hash_of(file))
    history = history_of(shared.cache.directory, shared.facts["machine"])
    count_occasion(call["rounds"], {key: timed}, history)
    timed = replace(timed, **of_conditions(call["rounds"]))
    for entry, kind, found in ((call, CALL, timed.denoiser_speedup()), (image, IMAGE, timed.image_speedup())):
        if kind in timed.between and found is not None and found.known:
            entry |= {"own_interval": entry["speedup_interval"], "speedup_interval": [found.low, found.high]}


def workload_of_engines(knobs: QuantizeJob, weights: str | None, reference: Path) -> str:
    """Return a digest of all that decides an unquantized engine's latency, except the machine; ``weights``: hash."""
    infer = knobs.infer
    same = (
        infer.width, infer.height, infer.batch_size, infer.steps, infer.scale, infer.precision, infer.cuda_graph,
        infer.image, infer.mask, infer.strength,  # image-to-image takes fewer steps, and an encoder
        infer.control, knobs.compiled_baseline,
    )  # fmt: skip
    runtimes = str(versions("torch", RUNTIMES[infer.engine].package))
    return digest(infer.engine, str(same), str(weights), hash_of(reference), runtimes)


def hash_of(path: Path) -> str:
    """Return an engine's identity: the digest of its ONNX graph without constants, or of all bytes of its plan."""
    return structure_of(path) if path.suffix.lower() == ".onnx" else sha256(path)
