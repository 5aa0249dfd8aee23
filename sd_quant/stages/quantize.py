"""The main job: checkpoint, statistics, assignment, ONNX, plans, pictures, latency, parity, record."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
import yaml

from sd_quant.cache import Cache, locked
from sd_quant.calibration.collected_elsewhere import read_shared
from sd_quant.calibration.collection import calibrate, origin
from sd_quant.checkpoints.checks import check_finite
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.tensors import Weights
from sd_quant.config import QuantizeJob, anchored, artifact
from sd_quant.engines import RUNTIMES, check_installed, why_not
from sd_quant.engines.pool import Pool
from sd_quant.errors import ResourceError
from sd_quant.files import TEMPORARY, digest, source_digest, write_json, write_text
from sd_quant.inference.loading import load_model
from sd_quant.inference.parity import layer_outputs, layer_parity, native_outputs, part_parity, run_simulation
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics import SCORES
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.flops import operations, operations_a_second
from sd_quant.metrics.memory import StageTimer, peak_cuda_memory_bytes, peak_memory_bytes
from sd_quant.models.checkpoint import (
    Checkpoint,
    contracts_of,
    denoiser_of,
    denoiser_part,
    denoiser_weights,
    empty_denoiser,
    part_parameters,
    samples_per_image,
)
from sd_quant.models.parts import axes
from sd_quant.progress import duration, progress
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import check_layers, derive
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.csv_files import write_csv
from sd_quant.report.images import comparison_grid, save_images
from sd_quant.report.provenance import provenance
from sd_quant.report.record import (
    DONE,
    RECORD,
    SCHEMA_VERSION,
    Knobs,
    Layers,
    Plan,
    Record,
    Sizes,
    Stage,
    at,
    explained,
    read_record,
    score_of,
    write_record,
)
from sd_quant.report.sensitivity_plot import plot_sensitivity
from sd_quant.report.summary import FAILURE, LOCK
from sd_quant.report.table import run_table
from sd_quant.simulation.modelopt import restorable, save_quantized
from sd_quant.simulation.native import check_device
from sd_quant.simulation.sensitivity import Sensitivity, budget, measure, points
from sd_quant.simulation.sensitivity import rows as sensitivity_rows
from sd_quant.stages.compare import FRAMEWORK, FULL_PRECISION, QUANTIZED, compare_latency, compare_pictures
from sd_quant.stages.export_onnx import export_parts
from sd_quant.stages.export_trt import build_plans, check_gpu, plan_library
from sd_quant.stages.infer import image_names, shown
from sd_quant.stages.needs import (
    check_machine,
    disk_needed,
    fits,
    gpu_memory_needed,
    gpu_memory_of_sides,
    memory_needed,
    memory_of_sides,
)
from sd_quant.stages.opening import check_cuda_graph, module_of, open_simulated
from sd_quant.stages.text_scores import text_scores
from sd_quant.stages.variants import SIMULATED, open_engine, sides_of
from sd_quant.trackers import track

LOG = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parents[1]
TRACKED = "outputs/trackers"
WRITTEN = (
    *(
        "onnx",
        "plan",
        "full_precision",
        "images",
        f"{TEMPORARY}*",
        ".*.part",
        RECORD,
        FAILURE,
        "provenance.json",
        "config.yaml",
    ),
    *("layers.csv", "sensitivity.csv", "sensitivity.png", "quantized_*.pt"),
)


def quantize(job: QuantizeJob, directory: Path) -> float | None:
    """Run the job into ``directory`` and return the mean PSNR in dB; the record is written last.

    A directory in which this very job is done is left as it is, what an earlier attempt left there is removed, and of
    two processes with one directory the second waits for the first.
    """
    if job.trt.library != "none":
        check_installed(plan_library(job.trt))  # before the first stage works for minutes
    runtime = RUNTIMES[job.infer.engine]
    if runtime.file == "plan":
        if not torch.cuda.is_available():
            raise ResourceError(
                f"infer={job.infer.engine} runs plans on an NVIDIA GPU and this machine has none; use infer=openvino"
            )
        check_gpu(set().union(*job.formats().values()))
    if runtime.file is None:
        check_device(job.formats()["weights"])
    check_cuda_graph(job.infer)
    again = (directory / LOCK).exists()
    with locked(directory / LOCK, f"waiting for another process, which works in {directory}"):
        facts = facts_of(job, directory)
        record = finished(directory, fingerprint(job, facts))
        if record is None:
            if again:
                remove_leftovers(directory)
            record = run(job, directory, facts)
        else:
            LOG.info("done before: nothing that this job depends on has changed since")
    print(run_table(record))
    print(f"run directory: {shown(directory)}")
    return score_of(record, SCORES["psnr"]).value.value


def facts_of(job: QuantizeJob, directory: Path) -> dict:
    """Where and from what the job is run."""
    inputs = {"checkpoint": anchored(job.model.path)}
    if job.quantize.calibration is None:
        inputs["calibration_prompts"] = anchored(job.model.calibration_prompts)
    else:
        inputs["calibration"] = anchored(job.quantize.calibration)
    given = directory / ".hydra" / "overrides.yaml"
    return provenance(inputs, yaml.safe_load(given.read_text(encoding="utf-8")) if given.exists() else [])


def fingerprint(job: QuantizeJob, facts: dict) -> str:
    """Of everything that decides the record but the machine, so that the jobs of a sweep may run on several."""
    knobs = dataclasses.asdict(job) | {"cache": None, "published": None, "trackers": None}
    knobs["trt"]["timing_cache"] = None
    inputs = {name: found["sha256"] for name, found in facts["inputs"].items()}
    source = source_digest(*(path.name for path in PACKAGE.iterdir() if path.is_dir()), ".")
    return digest(json.dumps([knobs, job.infer.prompt_list(), inputs, facts["versions"], source], sort_keys=True))


def finished(directory: Path, wanted: str) -> Mapping[str, Any] | None:
    """The record of this very job, if it is there."""
    try:
        record = read_record(directory)
    except (OSError, ValueError):
        return None
    return record if at(record, "fingerprint") == wanted else None


def remove_leftovers(directory: Path) -> None:
    """What a job writes, and nothing else: the directory may be any that the user has named."""
    for name in WRITTEN:
        for path in directory.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(job: QuantizeJob, directory: Path, facts: dict) -> Record:
    """All stages. Returns the record, which it has written."""
    timer, cache = StageTimer(), Cache(anchored(job.cache.dir) if job.cache.dir else None, job.cache.limit_gb * 1e9)
    prompts, sha256 = job.infer.prompt_list(), facts["inputs"]["checkpoint"]["sha256"]
    simulated = why_not(job.infer.engine, job.formats())
    if simulated:
        LOG.info("%s: pictures come from the simulation in torch, and nothing is timed", simulated)
    knobs = dataclasses.asdict(job)
    write_text(directory / "config.yaml", yaml.safe_dump(knobs, sort_keys=False))
    with timer("load"):
        model = job.model
        checkpoint = open_checkpoint(
            anchored(model.path), model.family, io=model.io, max_sequence_length=model.max_sequence_length
        )
        family, parts, network = checkpoint.family, checkpoint.parts(), empty_denoiser(checkpoint)
        denoiser, component = family.DENOISER, denoiser_part(checkpoint).component
        parameters = part_parameters(checkpoint)
        stored = {part: parts[part].contract.weights.itemsize * count for part, count in parameters.items()}
        check_machine(
            memory_needed(parameters, job), disk_needed(stored, job), directory, gpu_memory_needed(parameters, job)
        )
        for weights in checkpoint.components.values():
            check_finite(cast(Weights, weights))
        roles, recipe = family.layer_roles(network), job.quantize
        exclude = recipe.exclude.get(job.model.family, ())
        shapes = {name: network.get_parameter(f"{name}.weight").shape for name in roles}
        attentions = family.attentions(network)
        check_layers(roles, shapes, recipe, attentions, exclude)
        selected = sum(reason_kept(role, recipe.quant_level) is None for role in roles.values())
        kept = budget(job.quantize.keep, selected)
    with timer("calibrate"):
        statistics = statistics_of(checkpoint, roles, job, sha256)
    with timer("assign"):
        derive_with = partial(derive_for, checkpoint, roles, statistics, recipe, attentions, exclude)
        assignment = derive_with()
    sensitivity = None
    if kept:
        with timer("sensitivity"):
            sensitivity = measure_sensitivity(checkpoint, assignment, statistics, kept)
            table = sensitivity_rows(sensitivity, assignment, kept)
            write_csv(table, directory / "sensitivity.csv")
            plot_sensitivity(table, sensitivity.curve, directory / "sensitivity.png")
            assignment = derive_with(list(sensitivity.network_error)[:kept])
    write_csv([layer.row() for layer in assignment.values()], directory / "layers.csv")
    with timer("export"):
        export_parts(checkpoint, sha256, assignment, directory, cache)
    with timer("plans"):
        plans = {}
        if job.trt.library != "none":
            onnx_paths = {part: artifact(directory, "onnx", part) for part in parts}
            plans = build_plans(onnx_paths, directory, job.trt, job.infer, cache)
            if RUNTIMES[job.infer.engine].file == "plan":  # the side to compare with runs from a plan too
                unquantized = {denoiser: artifact(directory / "full_precision", "onnx", denoiser)}
                build_plans(unquantized, directory / "full_precision", job.trt, job.infer, cache)

    together = fits(
        memory_of_sides(parameters, job.infer),
        "all versions of the model",
        gpu_memory_of_sides(parameters, job.infer),
    )
    pool = Pool(partial(open_engine, checkpoint, job.infer, assignment), most=None if together else 1)
    sides = sides_of(checkpoint, pool, job.infer.engine, directory, simulated is not None)
    with timer("pictures"):
        comparison = compare_pictures(
            checkpoint, sides, prompts, job.infer, unquantized_origin(facts), directory, cache
        )
        framework, unquantized_engine, quantized_engine = (
            comparison.pictures[variant] for variant in (FRAMEWORK, FULL_PRECISION, QUANTIZED)
        )
        save_pairs(directory, framework.images, quantized_engine.images, prompts, job)
    with timer("latency"):
        latency = compare_latency(checkpoint, sides, prompts, job.infer, together, simulated)
    with timer("parity"):
        outputs = comparison.outputs
        parity = part_parity(outputs[FRAMEWORK], outputs[FULL_PRECISION], contracts_of(checkpoint))
        simulation_part = pool[SIMULATED]
        simulated_network = denoiser_of(checkpoint, simulation_part.module)
        if simulated is None:
            simulation = run_simulation(simulation_part, simulated_network, comparison.inputs[denoiser], assignment)
        if restorable(assignment):  # from the processor, so that it can be restored where there is no GPU
            save_quantized(simulated_network.cpu(), directory / f"quantized_{component}.pt")
        if simulated is None:
            if RUNTIMES[job.infer.engine].file is None:
                layers = native_outputs(denoiser_of(checkpoint, module_of(sides[QUANTIZED][denoiser])), simulation)
            else:
                pool.close()
                layers = layer_outputs(
                    simulation,
                    assignment,
                    artifact(directory, "onnx", denoiser),
                    parts[denoiser].prefix,
                    job.infer.engine,
                )
            (expected,), (output,) = (outputs[variant][denoiser].values() for variant in (FRAMEWORK, QUANTIZED))
            parity |= layer_parity(simulation, expected, output.cpu(), assignment, layers, denoiser)
        pool.close()

    record = Record(
        schema_version=SCHEMA_VERSION,
        status=DONE,
        fingerprint=fingerprint(job, facts),
        overrides=facts["overrides"],
        knobs=cast(Knobs, knobs["quantize"] | {group: knobs[group] for group in ("model", "trt", "infer")}),
        denoiser={"part": denoiser, "samples_a_picture": samples_per_image(checkpoint, job.infer.scale)},
        prompts=prompts,
        simulated=simulated is not None,
        simulated_because=simulated,
        sizes_bytes=sizes(parameters, directory),
        plans={part: cast(Plan, dataclasses.asdict(report)) for part, report in plans.items()},
        latency=latency,
        fidelity=fidelity(
            framework.images, quantized_engine.images, framework.latents, quantized_engine.latents, sets=True
        ),
        fidelity_unquantized_engine=fidelity(
            framework.images, unquantized_engine.images, framework.latents, unquantized_engine.latents
        ),
        text_scores=text_scores(
            job.metrics,
            job.infer,
            prompts,
            {FULL_PRECISION: framework.images, QUANTIZED: quantized_engine.images},
        ),
        parity=parity,
        layers=count_layers(assignment),
        smoothing=count_smoothing(assignment, artifact(directory, "onnx", denoiser)),
        sensitivity={"curve": sensitivity.curve} if sensitivity else {"curve": None, "reason": "keep is 0"},
        peak_memory_bytes=peak_memory_bytes(),
        peak_cuda_memory_bytes=explained(peak_cuda_memory_bytes(), "no NVIDIA GPU"),
        stages=cast(dict[str, Stage], timer.stages),
        environment={"versions": facts["versions"], "machine": facts["machine"]},
        inputs=facts["inputs"],
    )
    write_json(directory / "provenance.json", facts)
    write_record(record, directory)
    track(job.trackers, record, directory, anchored(TRACKED))
    return record


def unquantized_origin(facts: dict) -> dict:
    """What its pictures depend on besides how they are made; another processor rounds otherwise."""
    packages = ("torch", "diffusers", "transformers", "openvino", "onnxruntime")
    return {
        "checkpoint": facts["inputs"]["checkpoint"]["sha256"],
        "source": source_digest("checkpoints", "engines", "export", "inference", "models"),
        "versions": {name: facts["versions"][name] for name in packages},
        "machine": [facts["machine"][name] for name in ("cpu", "usable_cores", "gpus")],
    }


def statistics_of(
    checkpoint: Checkpoint, roles: dict[str, str], job: QuantizeJob, checkpoint_sha256: str
) -> Statistics:
    knobs = job.quantize
    names = [name for name, role in roles.items() if role != "excluded"]
    sampling = Sampling(knobs.n_steps, job.infer.scale, job.model.height, job.model.width, knobs.batch_size, knobs.seed)
    if knobs.calibration is not None:
        network, contract = empty_denoiser(checkpoint), denoiser_part(checkpoint).contract
        layers = {name: network.get_submodule(name) for name in names}
        here = origin(checkpoint_sha256, names, sampling, "cuda" if torch.cuda.is_available() else "cpu")
        return read_shared(
            anchored(knobs.calibration), layers, contract, here, knobs.calib_size, checkpoint.family.GUIDES
        )
    return calibrate(
        load_model(checkpoint),
        names,
        job.calibration_prompts(),
        sampling,
        checkpoint_sha256=checkpoint_sha256,
        snapshots=knobs.snapshots,
        cache=anchored(job.cache.dir) / "statistics" if job.cache.dir else None,
        accelerator=knobs.accelerator,
        devices=knobs.devices,
        announce=lambda device, prompts: announce_calibration(checkpoint, job, device, prompts),
    )


def announce_calibration(checkpoint: Checkpoint, job: QuantizeJob, device: str, prompts: int) -> None:
    """How long the pass will take on this processor; a GPU is not asked."""
    calls, samples = prompts * job.quantize.n_steps, samples_per_image(checkpoint, job.infer.scale)
    if device != "cpu":
        LOG.info("calibrating on %d prompts: %d samples of the denoiser on %s", prompts, calls * samples, device)
        return
    part = denoiser_part(checkpoint)
    shapes = part.contract.shapes(**axes(samples, job.model.width, job.model.height))
    inputs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):  # what a network makes for itself
        total, _ = operations(part.wrap(empty_denoiser(checkpoint)), inputs)
    seconds = calls * total / operations_a_second()
    LOG.info(
        "calibrating on %d prompts: %d calls of the denoiser with %.4g GFLOP each, about %s on this processor%s",
        prompts, calls, total / 1e9, duration(seconds),
        "; a GPU or calibration=<existing statistics> saves it" if seconds > 1800 else "",
    )  # fmt: skip


def derive_for(
    checkpoint: Checkpoint,
    roles: dict[str, str],
    statistics: Statistics,
    recipe: Recipe,
    head_widths: dict[str, int],
    exclude: Collection[str],
    kept: Collection[str] = (),
) -> dict[str, LayerAssignment]:
    weights = denoiser_weights(checkpoint)
    linears = [name for name, role in roles.items() if role != "conv"]
    inputs = checkpoint.family.shared_inputs(linears)
    return derive(
        roles, lambda name: weights[f"{name}.weight"], statistics.layers, recipe, inputs, kept, head_widths, exclude
    )


def measure_sensitivity(
    checkpoint: Checkpoint, assignment: dict[str, LayerAssignment], statistics: Statistics, kept: int
) -> Sensitivity:
    """On the denoiser's inputs that calibration kept, one call at a time."""
    part = open_simulated(checkpoint, assignment)
    simulated, (output,) = denoiser_of(checkpoint, part.module), part.outputs
    inputs = {name: sample.values for name, sample in statistics.calls.items()}
    calls = [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]
    layers = [layer.name for layer in assignment.values() if layer.format]
    with progress(1 + len(layers) + len(points(kept, len(layers))), "sensitivity") as advance:
        return measure(
            simulated, lambda: torch.cat([part(**call)[output].cpu() for call in calls]), layers, kept, advance
        )


def save_pairs(directory: Path, full: np.ndarray, quantized: np.ndarray, prompts: list[str], job: QuantizeJob) -> None:
    """Write the images of both variants, and the sheet with full precision above quantized."""
    for name, images in ((FULL_PRECISION, full), (QUANTIZED, quantized)):
        save_images(images, directory / "images" / name, image_names(prompts))
    label = f"{job.quantize.format} level {job.quantize.quant_level:g}"
    grid = directory / "images" / "grid.png"
    comparison_grid(full, quantized, grid, captions=prompts, labels=("full precision", label))


def sizes(parameters: dict[str, int], directory: Path) -> dict[str, Sizes]:
    """Bytes of each part's files, and of its weights in fp32."""
    found: dict[str, Sizes] = {}
    for part in parameters:
        path, plan = artifact(directory, "onnx", part), artifact(directory, "plan", part)
        full = artifact(directory / "full_precision", "onnx", part)
        stored = bytes_of(path)
        found[part] = {
            "onnx_full_precision": bytes_of(full) if full.exists() else stored,
            "onnx_quantized": explained(stored if full.exists() else None, "not quantized"),
            "plan": explained(plan.stat().st_size if plan.exists() else None, "no plan was asked for"),
            "weights_fp32": 4 * parameters[part],
        }
    return found


def bytes_of(onnx_path: Path) -> int:
    """The graph and the files of its weights."""
    return sum(file.stat().st_size for file in onnx_path.parent.iterdir())


def count_layers(assignment: dict[str, LayerAssignment]) -> Layers:
    layers = [layer for layer in assignment.values() if layer.role not in ("norm", "attention")]
    quantized = sum(layer.format is not None for layer in layers)
    return {"quantized": quantized, "high_precision": len(layers) - quantized}


def count_smoothing(assignment: dict[str, LayerAssignment], onnx_path: Path) -> dict[str, int]:
    """Smoothed layers, and the multiplications that the exported graph really has for them."""
    graph = onnx.load(onnx_path, load_external_data=False).graph
    return {
        "smoothed_layers": sum(
            layer.pre_quant_scale is not None and bool(layer.format) for layer in assignment.values()
        ),
        "folded_layers": sum(layer.folded_into is not None and bool(layer.format) for layer in assignment.values()),
        "multiplications": sum(node.output[0].endswith(".smoothed") for node in graph.node),
    }
