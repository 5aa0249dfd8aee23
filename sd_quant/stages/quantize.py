"""The main job: from a checkpoint to the quantized model's files, its images, and a record of its figures.

``run`` takes the steps in their order: each is a function in a file of its own with typed input and output.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from sd_quant.cache import locked
from sd_quant.config import Infer, QuantizeJob, plan_library
from sd_quant.config.recipe import part_recipe
from sd_quant.devices import threads
from sd_quant.engines import RUNTIMES, check_installed, why_not
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.files import write_json, write_text
from sd_quant.inference.samplers import WEIGHTS_ALONE
from sd_quant.interchange.result_folder import check_free
from sd_quant.metrics.memory import StageTimer
from sd_quant.places import output_path
from sd_quant.quantization.recipe import formats_used
from sd_quant.report.record import Record, weights_sha256, write_record
from sd_quant.report.summary import LOCK, PROVENANCE
from sd_quant.simulation.native import check_device
from sd_quant.stages.calibrate import bytes_of_hessians, calibrated_sha256, statistics_of
from sd_quant.stages.checks import check_request
from sd_quant.stages.choose import choose
from sd_quant.stages.closing import DONE_BEFORE, closing_words, in_sweep
from sd_quant.stages.compare import KeptOutputs, compare_images, framework_images, save_pairs
from sd_quant.stages.export_onnx import export_parts, files_of_a_run
from sd_quant.stages.export_trt import build_run_plans, check_gpu
from sd_quant.stages.fit import limit_of
from sd_quant.stages.generate import keep_prompts
from sd_quant.stages.hand_over import check_schedule, check_servers, hand_over_run, rows_of
from sd_quant.stages.job_folder import (
    HAND_OVER,
    check_no_other_run,
    check_own,
    check_still_there,
    facts_of,
    fingerprint_of,
    finished,
    kept_knobs,
    remove_leftovers,
)
from sd_quant.stages.latency import compare_latency
from sd_quant.stages.levers import check_levers, compared, scheduled
from sd_quant.stages.load import Loaded, load
from sd_quant.stages.noise_floor import check_noise_floor, noise_floor
from sd_quant.stages.occasions import count_run
from sd_quant.stages.open_parts import check_cuda_graph, say_choice
from sd_quant.stages.part_memory import memory_of_parts
from sd_quant.stages.resources import Needs, run_needs
from sd_quant.stages.results import Results, record_of
from sd_quant.stages.session import cache_of, write_observed
from sd_quant.stages.variants import FRAMEWORK, variants_of
from sd_quant.stages.verify import executed_layers, verify
from sd_quant.trackers import track

LOG = logging.getLogger(__name__)
TRACKED = "outputs/trackers"


def quantize(job: QuantizeJob, directory: Path) -> float | None:
    """Run the job in ``directory`` and return the mean PSNR in dB; the record is written last.

    If this very job is done already, the directory stays as it is. Files of an interrupted attempt are removed. Of two
    processes with one directory the second waits for the first.
    """
    check_runtimes(job)
    check_own(directory)
    attempted = (directory / LOCK).exists()
    with locked(directory / LOCK, f"waiting for another process, which works in {directory}"):
        facts = facts_of(job, directory)
        wanted = fingerprint_of(job, facts)
        record = finished(directory, wanted)
        if record is not None:
            LOG.info(DONE_BEFORE)
            return closing_words(record, directory)
        if not in_sweep(directory):  # a sweep's folder holds its own jobs alone
            check_no_other_run(job, directory, wanted)
        if attempted:
            remove_leftovers(directory)
        try:
            record = run(job, directory, facts, wanted)
        except Exception:
            check_still_there(directory)  # else that is why
            raise
        return closing_words(record, directory)


def check_runtimes(job: QuantizeJob) -> None:
    """Check before the first step, which may take minutes, whether the job's runtimes can work here.

    Raises ResourceError if not, and ConfigError for another part than the denoiser that the engine cannot execute: the
    denoiser alone is simulated then.
    """
    if job.trt.library != "none":
        check_installed(plan_library(job.trt))
    runtime = RUNTIMES[job.infer.engine]
    if runtime.file == "plan":
        if not torch.cuda.is_available():
            raise ResourceError(
                f"infer={job.infer.engine} runs plans on an NVIDIA GPU and this machine has none; use infer=openvino"
            )
        check_gpu(set().union(*job.formats().values()))
    if runtime.file is None:
        check_device(job.formats()["inputs"])
    for part, preset in job.quantize.quantized_parts.items():
        recipe = part_recipe(preset)
        reason = None if recipe is None else why_not(job.infer.engine, formats_used(recipe.enable, recipe.quant_level))
        if reason is not None:
            raise ConfigError(
                f"quantize.parts gives {part} the preset {preset}, which infer.engine={job.infer.engine} cannot "
                f"execute, because {reason}; choose another preset for this part, or another engine"
            )
    check_cuda_graph(job.infer)
    check_request(job.model, job.infer)


def why_not_exported(loaded: Loaded, infer: Infer) -> str | None:
    """Why an engine that loads files has none of a denoiser; None where it has all or loads none."""
    refused = {part: because for part in loaded.denoisers if (because := loaded.parts[part].refused) is not None}
    if not refused or RUNTIMES[infer.engine].file is None:
        return None
    return "; ".join(f"the {part} is not exported, because {because}" for part, because in refused.items())


def why_not_measured(job: QuantizeJob, step: StageTimer, directory: Path) -> str | None:
    """Why memory is not measured by part; None where it is."""
    if not job.memory_of_parts:
        return "memory_of_parts is false"
    if in_sweep(directory):
        return "a sweep opens no engine once more for each job; a run alone measures it"
    return None if step.resets else "/proc/self/clear_refs cannot be written"


def run(job: QuantizeJob, directory: Path, facts: dict, fingerprint: str) -> Record:
    """Take all steps in their order, write the record and return it."""
    torch.set_num_threads(threads())
    step, cache = StageTimer(), cache_of(job.cache)
    prompts, sha256, calibrated = job.infer.prompt_list(), weights_sha256(facts), calibrated_sha256(job, facts)
    say_choice(job.infer)
    if refused := job.why_no_plans():
        LOG.info("no plans are built: %s", refused)
    write_text(directory / "config.yaml", yaml.safe_dump(kept_knobs(job), sort_keys=False))
    keep_prompts(job.infer, directory)

    def needs(loaded: Loaded) -> Needs:
        plans, others = job.trt.library != "none", 3 * sum(loaded.stored_bytes[part] for part in loaded.others)
        return run_needs(
            loaded.parameters, loaded.stored_bytes, job.model, job.infer, job.quantize, plans, len(job.hand_over),
            sum(map(bytes_of_hessians, (loaded, *loaded.others.values()))),
        ) | Needs(disk={"other denoisers": others} if others else {})  # fmt: skip

    with step("load"):
        loaded = load(job.model, job.infer, job.quantize, needs, directory)
        limit_of(loaded)  # refuses a limit before calibration
        check_levers(loaded.checkpoint, job.infer)
        check_servers(job.hand_over, loaded.checkpoint)
        check_schedule(job.hand_over, job.infer)
        check_noise_floor(job.noise_floor, loaded, job.infer)
        write_observed(loaded, directory)
    simulated = why_not(job.infer.engine, job.formats()) or why_not_exported(loaded, job.infer)
    if simulated:
        LOG.info("%s: images come from the simulation in torch, and nothing is timed", simulated)
    with step("calibrate"):
        statistics = statistics_of(loaded, job, calibrated)
    kept = KeptOutputs(facts, directory, cache)
    chosen, peaks = choose(loaded, statistics, directory, step, kept), statistics.peaks
    calls = replace(statistics, layers={}, parts={})
    del statistics  # Hessians may take gigabytes
    assignment = chosen.assignment
    assignments = {loaded.denoiser: assignment, **chosen.parts}
    rows = rows_of(job.hand_over, assignments, loaded.checkpoint)  # refused before anything is exported
    for name in rows:
        check_free(directory / HAND_OVER / name)
    variants = variants_of(loaded, job.infer, assignments, directory, simulated, job.compiled_baseline)
    with step("images"):
        framework = framework_images(loaded.checkpoint, variants.engines[FRAMEWORK], prompts, job.infer, kept)
        floor = noise_floor(job.noise_floor, loaded, variants, framework, prompts, job.infer, kept)
        variants.make_room()
    with step("export"):
        precise = WEIGHTS_ALONE in job.infer.precise_letters
        files = files_of_a_run(loaded.checkpoint, assignments, directory, precise)
        export_parts(loaded.checkpoint, sha256, files, cache)
    reports = {}
    if job.trt.library != "none":
        with step("plans"):
            reports = build_run_plans(loaded, directory, job.trt, job.infer, cache)
    with step("images"):
        infer, chosen_steps = scheduled(variants, job, kept, calls)
        comparison = compare_images(loaded.checkpoint, framework, variants, prompts, infer, kept)
        recipe = "mixed" if job.quantize.mixes else job.quantize.format
        label = f"{recipe} level {job.quantize.quant_level:g}"
        frame = job.infer.width if loaded.checkpoint.family.MOVES else None
        save_pairs(comparison, prompts, label, directory, frame)
    with step("hand_over") if rows else nullcontext():
        handed_over = hand_over_run(loaded, assignments, rows, job, directory, facts["overrides"])
    with step("parity"):
        executed = executed_layers(variants)
        parity = verify(variants, comparison)
    several = len(loaded.checkpoint.family.DENOISERS) > 1  # of which a sweep times none
    timed_later = in_sweep(directory) and RUNTIMES[job.infer.engine].file is not None and not several
    timing = replace(job.timing, budget_s=0) if timed_later else job.timing
    with step("latency"):
        latency = compare_latency(
            loaded.checkpoint, variants.engines, prompts, infer, timing, variants.together, variants.simulated,
            chosen.parts, comparison.of_an_image,
        )  # fmt: skip
        if not several:
            count_run(latency, loaded.denoiser, job, facts, fingerprint, directory)
    with step("levers") if infer.pulls_levers else nullcontext():
        levers = compared(loaded, comparison, variants, infer, kept, latency, chosen_steps)
    memory: dict = {"reason": why_not_measured(job, step, directory)}
    if memory["reason"] is None:
        with step("memory"):
            memory = memory_of_parts(variants, job.infer, step.restart_peak)
    variants.pool.close()
    results = Results(
        loaded, chosen, peaks, reports, comparison, simulated, latency, parity, executed, handed_over, memory, levers,
        floor,
    )  # fmt: skip
    check_still_there(directory)
    record = record_of(job, fingerprint, facts, results, step, directory)
    write_json(directory / PROVENANCE, facts)
    write_record(record, directory)
    track(job.trackers, record, directory, output_path(TRACKED))
    return record
