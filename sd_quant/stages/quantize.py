"""The main job: checkpoint, statistics, assignment, ONNX, plans, pictures, latency, parity, record."""

import dataclasses
import logging
from functools import partial
from pathlib import Path

import torch
import yaml

from sd_quant.calibration.statistics import LayerStatistics, collect
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.config import PART_NAMES, QuantizeJob, anchored, artifact, check_installed
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
from sd_quant.models.sdxl import build_modules, layer_roles
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment, Recipe, derive
from sd_quant.quantization.simulate import save_quantized, simulate
from sd_quant.report.layers import write_layers_csv
from sd_quant.report.pictures import comparison_grid, save_images
from sd_quant.report.provenance import provenance
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
    with timer("calibrate"):
        statistics = calibrate(model, roles, job)
    with timer("assign"):
        weights = checkpoint.components["unet"]
        recipe = Recipe(
            job.quantize.quant_level, job.quantize.alpha, job.quantize.percentile, job.quantize.collect_method
        )
        assignment = derive(roles, lambda name: weights[f"{name}.weight"], statistics, recipe)
        write_layers_csv([layer.row() for layer in assignment.values()], directory / "layers.csv")
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


def calibrate(model: LoadedModel, roles: dict[str, str], job: QuantizeJob) -> dict[str, LayerStatistics]:
    """The one statistics pass: the real pipeline on the calibration prompts, without decoding a picture."""
    knobs, prompts = job.quantize, job.calibration_prompts()
    engines = {name: engine for name, engine in model.torch_engines().items() if name != "vae"}
    pipeline = pipeline_of(model.checkpoint, engines)
    sampling = Sampling(knobs.n_steps, job.infer.scale, job.model.height, job.model.width, knobs.batch_size, knobs.seed)
    names = {name: role for name, role in roles.items() if role != "excluded"}
    now: dict = {}
    batches = -(-len(prompts) // knobs.batch_size)
    with (
        progress(batches * knobs.n_steps, "calibrate") as advance,
        collect(
            model.modules["unet"], names, len(prompts), knobs.n_steps, lambda: (now["step"], now["batch"])
        ) as statistics,
    ):

        def on_step(step: int) -> None:
            now["step"] = step
            advance()

        pipeline(
            prompts,
            sampling,
            decode=False,
            on_batch=lambda indices: now.update(batch=list(indices)),
            on_step=on_step,
        )
    return statistics


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
    quantized = sum(layer.format is not None for layer in assignment.values())
    return {"quantized": quantized, "high_precision": len(assignment) - quantized}
