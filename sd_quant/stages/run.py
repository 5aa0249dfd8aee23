"""The steps of ``quantize`` in order; each step is a function in another module of this package."""

from contextlib import nullcontext

from sd_quant.config import QuantizeJob
from sd_quant.metrics.memory import StageTimer
from sd_quant.report.record import Record, weights_sha256
from sd_quant.stages.calibrate import statistics_of
from sd_quant.stages.choose import choose
from sd_quant.stages.compare import compare_images, framework_images, save_run
from sd_quant.stages.export_onnx import export_parts, files_of_a_run
from sd_quant.stages.export_trt import build_run_plans
from sd_quant.stages.hand_over import hand_over_run, rows_of_run
from sd_quant.stages.levers import compared, scheduled
from sd_quant.stages.occasions import latency_of_run
from sd_quant.stages.open_parts import say_choice
from sd_quant.stages.opening import opened
from sd_quant.stages.run_record import Results, written_record
from sd_quant.stages.shared import Shared
from sd_quant.stages.variants import FRAMEWORK, variants_of, why_simulated
from sd_quant.stages.verify import executed_layers, verify


def run(job: QuantizeJob, shared: Shared, fingerprint: str) -> Record:
    """Run all steps of a job; write and return the record, which has the job's ``fingerprint``."""
    step = StageTimer()
    say_choice(job.infer)
    with step("load"):
        loaded = opened(job, shared.directory)
    simulated = why_simulated(loaded, job.formats())
    with step("calibrate"):
        statistics = statistics_of(loaded, job, str(weights_sha256(shared.facts)))
    chosen = choose(loaded, statistics, shared.directory, step, shared)
    variants = variants_of(loaded, chosen.assignments, shared, simulated, job.compiled_baseline)
    rows = rows_of_run(variants, job.hand_over)  # refused before anything is exported
    with step("images"):
        framework = framework_images(loaded.checkpoint, variants.engines[FRAMEWORK], job.infer, shared)
        variants.make_room()
    with step("export"):
        files = files_of_a_run(loaded.checkpoint, chosen.assignments, shared.directory, job.infer.precise_letters)
        export_parts(loaded.checkpoint, shared.sha256, files, shared.cache)
    with step("plans") if job.trt.library != "none" else nullcontext():
        plans = build_run_plans(variants, job.trt)
    with step("images"):
        infer, schedules = scheduled(variants, job)
        comparison = compare_images(variants, framework, infer)
        save_run(variants, comparison)
    with step("hand_over") if rows else nullcontext():
        handed_over = hand_over_run(variants, rows)
    with step("parity"):
        executed = executed_layers(variants)
        parity = verify(variants, comparison)
    with step("latency"):
        latency = latency_of_run(variants, job, infer, comparison.of_an_image, fingerprint)
    with step("levers") if infer.pulls_levers else nullcontext():
        levers = compared(variants, comparison, infer, latency, schedules)
    variants.pool.close()
    results = Results(
        variants, chosen, statistics.peaks, plans, comparison, latency, parity, executed, handed_over, levers
    )
    return written_record(job, results, step, fingerprint)
