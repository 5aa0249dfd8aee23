"""The main job: checkpoint, statistics, assignment, ONNX, plans, pictures, latency, parity, record."""

import copy
import dataclasses
import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path

import onnx
import torch
import yaml

from sd_quant.calibration.collection import calibrate
from sd_quant.calibration.statistics import Statistics
from sd_quant.checkpoints.nemo import Checkpoint, open_nemo
from sd_quant.config import PART_NAMES, Quantize, QuantizeJob, anchored, artifact, check_installed
from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.errors import ResourceError
from sd_quant.export.graph import copy_of, trace
from sd_quant.export.quantized import write_onnx
from sd_quant.files import write_json, write_text
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.memory import StageTimer, peak_memory_bytes
from sd_quant.models.loading import LoadedModel, load_model, pipeline_of
from sd_quant.models.parts import COMPONENTS, wrap
from sd_quant.models.sdxl import build_modules, layer_roles, shared_inputs
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment, Recipe, derive
from sd_quant.quantization.levels import reason_kept
from sd_quant.quantization.sensitivity import Sensitivity, budget, measure, points
from sd_quant.quantization.sensitivity import rows as sensitivity_rows
from sd_quant.quantization.simulate import save_quantized, simulate
from sd_quant.report.layers import write_csv
from sd_quant.report.pictures import comparison_grid, save_images
from sd_quant.report.provenance import provenance
from sd_quant.report.sensitivity import plot_sensitivity
from sd_quant.report.table import run_table
from sd_quant.stages.export_trt import build_plans, plan_library
from sd_quant.stages.infer import compare_latency, generate, image_names, shown
from sd_quant.stages.parity import layer_parity, part_parity, watch

LOG = logging.getLogger(__name__)


def quantize(job: QuantizeJob, directory: Path) -> float | None:
    """Run the job into ``directory`` and return the mean PSNR in dB; the record is written last."""
    if job.trt.library != "none":
        check_installed(plan_library(job.trt))  # before the first stage works for minutes
    if job.infer.engine.startswith("tensorrt") and not torch.cuda.is_available():
        raise ResourceError(
            f"infer={job.infer.engine} runs plans on an NVIDIA GPU and this machine has none; use infer=openvino"
        )
    timer, path = StageTimer(), anchored(job.model.path)
    inputs = {"checkpoint": path, "calibration_prompts": anchored(job.model.calibration_prompts)}
    given = directory / ".hydra" / "overrides.yaml"
    origin = provenance(inputs, yaml.safe_load(given.read_text(encoding="utf-8")) if given.exists() else [])
    knobs = dataclasses.asdict(job)
    write_text(directory / "config.yaml", yaml.safe_dump(knobs, sort_keys=False))
    prompts = job.infer.prompt_list()

    with timer("load"):
        checkpoint = open_nemo(path)
        model = load_model(checkpoint)
        roles = layer_roles(model.modules["unet"])
        kept = budget(
            job.quantize.keep, sum(reason_kept(role, job.quantize.quant_level) is None for role in roles.values())
        )
    with timer("calibrate"):
        statistics = statistics_of(model, roles, job, origin["inputs"]["checkpoint"]["sha256"])
    with timer("assign"):
        assignment = derive_for(checkpoint, roles, statistics, job.quantize)
    sensitivity = None
    if kept:
        with timer("sensitivity"):
            sensitivity = measure_sensitivity(model, assignment, statistics, kept)
            table = sensitivity_rows(sensitivity, assignment, kept)
            write_csv(table, directory / "sensitivity.csv")
            plot_sensitivity(table, sensitivity.curve, directory / "sensitivity.png")
            assignment = derive_for(checkpoint, roles, statistics, job.quantize, list(sensitivity.network_error)[:kept])
    write_csv([layer.row() for layer in assignment.values()], directory / "layers.csv")
    with timer("export"):
        export_parts(model, assignment, directory)
    with timer("plans"):
        plans = {}
        if job.trt.library != "none":
            onnx_paths = {part: artifact(directory, "onnx", part) for part in PART_NAMES}
            plans = build_plans(onnx_paths, directory, job.trt, job.infer)
            if job.infer.engine.startswith("tensorrt"):  # the side to compare with runs from a plan too
                unquantized_unet = {"unet_xl": artifact(directory / "full_precision", "onnx", "unet_xl")}
                build_plans(unquantized_unet, directory / "full_precision", job.trt, job.infer)

    framework = model.torch_engines()
    with timer("engines"):
        full_precision, quantized = load_engines(job.infer.engine, directory)
    watched, seen = watch(framework, unet_calls=job.infer.steps)
    with timer("pictures"):
        reference = generate(pipeline_of(checkpoint, watched), prompts, job.infer, "torch")
        unquantized = generate(pipeline_of(checkpoint, full_precision), prompts, job.infer, job.infer.engine)
        twins = generate(pipeline_of(checkpoint, quantized), prompts, job.infer, f"{job.infer.engine} quantized")
        save_pictures(directory, reference.images, twins.images, prompts, job)
    with timer("latency"):
        latency = compare_latency(checkpoint, framework, full_precision, quantized, prompts, job.infer)
    with timer("parity"):
        parity = part_parity(framework, full_precision, seen)
        full_output = framework["unet_xl"](**seen["unet_xl"])["out"]
        simulated = simulate(model.modules["unet"], assignment)
        save_quantized(simulated, directory / "quantized_unet.pt")
        parity |= layer_parity(
            framework["unet_xl"],
            quantized["unet_xl"],
            seen["unet_xl"],
            full_output,
            assignment,
            directory,
            job.infer.engine,
        )

    closeness = fidelity(reference.images, twins.images, reference.latents, twins.latents)
    record = {
        "schema_version": 1,
        "status": "done",
        "knobs": {**knobs["quantize"], "model": knobs["model"], "trt": knobs["trt"], "infer": knobs["infer"]},
        "prompts": prompts,
        "sizes_bytes": sizes(model, directory),
        "plans": {part: dataclasses.asdict(report) for part, report in plans.items()},
        "latency": latency,
        "fidelity": closeness,
        "fidelity_unquantized_engine": fidelity(
            reference.images, unquantized.images, reference.latents, unquantized.latents
        ),
        "parity": parity,
        "layers": count_layers(assignment),
        "smoothing": count_smoothing(assignment, directory),
        "sensitivity": {"curve": sensitivity.curve} if sensitivity else {"curve": None, "reason": "keep is 0"},
        "peak_memory_bytes": peak_memory_bytes(),
        "stages": timer.stages,
        "environment": {"versions": origin["versions"], "machine": origin["machine"]},
        "inputs": origin["inputs"],
    }
    write_json(directory / "provenance.json", origin)
    write_json(directory / "metrics.json", record)
    print(run_table(record))
    print(f"run directory: {shown(directory)}")
    return closeness["psnr"]["mean"]


def statistics_of(model: LoadedModel, roles: dict[str, str], job: QuantizeJob, checkpoint_sha256: str) -> Statistics:
    knobs = job.quantize
    return calibrate(
        model,
        [name for name, role in roles.items() if role != "excluded"],
        job.calibration_prompts(),
        Sampling(knobs.n_steps, job.infer.scale, job.model.height, job.model.width, knobs.batch_size, knobs.seed),
        checkpoint_sha256=checkpoint_sha256,
        snapshots=knobs.snapshots,
        cache=anchored(knobs.cache_dir) if knobs.cache_dir else None,
        accelerator=knobs.accelerator,
        devices=knobs.devices,
    )


def derive_for(
    checkpoint: Checkpoint, roles: dict[str, str], statistics: Statistics, knobs: Quantize, kept: Collection[str] = ()
) -> dict[str, LayerAssignment]:
    fields = {field.name: getattr(knobs, field.name) for field in dataclasses.fields(Recipe)}
    weights = checkpoint.components["unet"]
    return derive(
        roles, lambda name: weights[f"{name}.weight"], statistics.layers, Recipe(**fields), shared_inputs(roles), kept
    )


def measure_sensitivity(
    model: LoadedModel, assignment: dict[str, LayerAssignment], statistics: Statistics, kept: int
) -> Sensitivity:
    """On the UNet inputs that calibration kept, one call at a time."""
    part = copy.deepcopy(model.parts["unet_xl"])
    simulated = simulate(part.get_submodule("unet"), assignment)
    inputs = {name: sample.values for name, sample in statistics.calls.items()}
    calls = [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]
    layers = [layer.name for layer in assignment.values() if layer.format]
    with progress(1 + len(layers) + len(points(kept, len(layers))), "sensitivity") as advance:
        return measure(simulated, lambda: torch.cat([part(**call) for call in calls]), layers, kept, advance)


def export_parts(model: LoadedModel, assignment: dict[str, LayerAssignment], directory: Path) -> None:
    """ONNX of every part, and the UNet once more unquantized, which is what the quantized engine is compared with."""
    checkpoint = model.checkpoint
    with progress(len(PART_NAMES), "export") as advance:
        for part in PART_NAMES:
            component, prefix = COMPONENTS[part]
            source, contract = checkpoint.components[component], model.contracts[part]
            graph = trace(
                lambda part=part: wrap(build_modules(checkpoint.model_config, checkpoint.clip1, checkpoint.clip2))[
                    part
                ],
                contract,
            )
            write = partial(
                write_onnx,
                inputs=len(contract.inputs),
                prefix=prefix,
                read=lambda name, source=source, prefix=prefix: source[name.removeprefix(prefix)],
            )
            if part == "unet_xl":
                write(copy_of(graph), artifact(directory / "full_precision", "onnx", part), assignment={})
            write(graph, artifact(directory, "onnx", part), assignment=assignment if part == "unet_xl" else {})
            advance()


def load_engines(engine: str, directory: Path) -> tuple[dict[str, Engine], dict[str, Engine]]:
    """Unquantized and quantized engines; the parts that are not quantized are the same objects in both."""
    kind = "plan" if engine.startswith("tensorrt") else "onnx"
    quantized = {part: load_engine(engine, artifact(directory, kind, part)) for part in PART_NAMES}
    unet = load_engine(engine, artifact(directory / "full_precision", kind, "unet_xl"))
    return quantized | {"unet_xl": unet}, quantized


def save_pictures(directory: Path, reference, twins, prompts: list[str], job: QuantizeJob) -> None:
    for name, images in (("full_precision", reference), ("quantized", twins)):
        save_images(images, directory / "images" / name, image_names(prompts))
    label = f"{job.quantize.format} level {job.quantize.quant_level:g}"
    comparison_grid(
        reference, twins, directory / "images" / "grid.png", captions=prompts, labels=("full precision", label)
    )


def sizes(model: LoadedModel, directory: Path) -> dict:
    """Bytes of every file; what the same weights take in fp32 stands beside them."""
    found = {}
    for part in PART_NAMES:
        path, plan = artifact(directory, "onnx", part), artifact(directory, "plan", part)
        full = artifact(directory / "full_precision", "onnx", part)
        stored = bytes_of(path)
        found[part] = {
            "onnx_full_precision": bytes_of(full) if full.exists() else stored,
            "onnx_quantized": stored if full.exists() else {"value": None, "reason": "not quantized"},
            "plan": plan.stat().st_size if plan.exists() else {"value": None, "reason": "no plan was asked for"},
            "weights_fp32": 4 * sum(parameter.numel() for parameter in model.parts[part].parameters()),
        }
    return found


def bytes_of(onnx_path: Path) -> int:
    """The graph and the files of its weights."""
    return sum(file.stat().st_size for file in onnx_path.parent.iterdir())


def count_layers(assignment: dict[str, LayerAssignment]) -> dict[str, int]:
    layers = [layer for layer in assignment.values() if layer.role != "norm"]
    quantized = sum(layer.format is not None for layer in layers)
    return {"quantized": quantized, "high_precision": len(layers) - quantized}


def count_smoothing(assignment: dict[str, LayerAssignment], directory: Path) -> dict[str, int]:
    """Smoothed layers, and the multiplications that the exported graph really has for them."""
    graph = onnx.load(artifact(directory, "onnx", "unet_xl"), load_external_data=False).graph
    return {
        "smoothed_layers": sum(
            layer.pre_quant_scale is not None and bool(layer.format) for layer in assignment.values()
        ),
        "folded_layers": sum(layer.folded_into is not None and bool(layer.format) for layer in assignment.values()),
        "multiplications": sum(node.output[0].endswith(".smoothed") for node in graph.node),
    }
