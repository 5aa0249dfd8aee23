"""TensorRT plans from ONNX files: of this run, of an earlier run, given by path, or of an unquantized checkpoint."""

import logging
import math
from functools import partial
from pathlib import Path

import onnx
import torch
import yaml

from sd_quant.cache import Cache
from sd_quant.config import ExportJob, ExportShape, Infer, Trt, artifact, part_paths, plan_library, size_of, targets_for
from sd_quant.engines import RUNTIMES
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.tensorrt.build import Profile, build_plan, profile_of
from sd_quant.engines.tensorrt.plan import PlanReport, describe_plan, own_command, read_record
from sd_quant.engines.tensorrt.run import runtime_module
from sd_quant.errors import ResourceError
from sd_quant.files import sha256, write_text
from sd_quant.models.parts import exported
from sd_quant.places import output_path
from sd_quant.progress import progress
from sd_quant.quantization.formats import FORMATS
from sd_quant.stages.export_onnx import delivered_files, export_parts
from sd_quant.stages.job_folder import kept_model
from sd_quant.stages.resources import Needs, check_machine, plans_need
from sd_quant.stages.session import Session, open_session
from sd_quant.stages.variants import Variants

LOG = logging.getLogger(__name__)


def export_trt(job: ExportJob, directory: Path) -> None:
    """Build TensorRT plans into ``infer.out_path``, else ``directory``; from a checkpoint, export ONNX files first."""
    out = output_path(job.infer.out_path) if job.infer.out_path else directory
    if job.unquantized():
        paths = export_unquantized(job, out)
        if job.trt.library == "none":
            return
    else:
        paths = part_paths(job, "onnx")
        parameters = {part: numbers_in(path) for part, path in paths.items()}
        check_machine(plans_need(parameters, 2 * sum(parameters.values())), out)
    reports = build_plans(paths, out, job.trt, job.infer, Cache(None))
    for part, report in reports.items():
        print(f"{part:14} {report.bytes / 1e6:8.1f} MB  {report.seconds:6.1f} s  {' '.join(report.targets)}")
    for part, report in reports.items():
        if line := own_command(report, paths[part], artifact(out, "plan", part)):
            print(line)
    print(f"plans: {out / 'plan'}")


def export_unquantized(job: ExportJob, out: Path) -> dict[str, Path]:
    """Write each part's unquantized ONNX file; return paths by part. Raises SdQuantError for an unusable checkpoint.

    Also write the model's knobs as ``config.yaml``, so that ``infer.py run=`` accepts the folder as a run.
    """

    def needs(session: Session) -> Needs:
        stored = sum(session.stored_bytes.values())
        plans = plans_need(session.parameters, stored) if job.trt.library != "none" else Needs()
        return plans | Needs(disk={"onnx": stored})

    checkpoint = open_session(job.model, needs=needs, directory=out).checkpoint
    export_parts(checkpoint, "", delivered_files(checkpoint, {}, out), Cache(None))  # no key without a cache
    write_text(out / "config.yaml", yaml.safe_dump({"model": kept_model(job.model)}, sort_keys=False))
    print(f"onnx: {out / 'onnx'}")
    return {part: artifact(out, "onnx", part) for part in exported(checkpoint.parts())}


def numbers_in(onnx_path: Path) -> int:
    """Count the parameters of an ONNX file. Raises ArtifactError for a broken file or missing weights."""
    onnx_files(onnx_path)
    graph = onnx.load(onnx_path, load_external_data=False).graph
    return sum(math.prod(weight.dims) for weight in graph.initializer)


def formats_in(onnx_path: Path) -> set[str]:
    """Return the names of an ONNX file's weight formats; the attribute ``block_size`` tells MXFP8 from FP8."""
    graph = onnx.load(onnx_path, load_external_data=False).graph
    types = {weight.name: onnx.TensorProto.DataType.Name(weight.data_type) for weight in graph.initializer}
    found = {
        (types.get(node.input[0]), not any(each.name == "block_size" for each in node.attribute))
        for node in graph.node
        if node.op_type == "DequantizeLinear"
    }
    return {name for name, fmt in FORMATS.items() if (fmt.onnx_type, fmt.static_scale) in found}


def check_gpu(formats: set[str]) -> None:
    """Raise ResourceError if this machine's GPU is too old for a format."""
    major, minor = torch.cuda.get_device_capability()
    for name in formats:
        needed = FORMATS[name].min_compute_capability
        if 10 * major + minor < needed:
            raise ResourceError(
                f"this GPU has compute capability {major}.{minor} and {name} takes {needed / 10:g}; "
                "choose another preset, or build for another GPU with export_trt=tensorrt_rtx"
            )


def profile(onnx_path: Path, part: str, trt: Trt, infer: Infer | ExportShape) -> Profile:
    """Return the input shapes that a part's plan accepts, from the settings, whose batch sizes count images."""
    limits = None if trt.static_batch else (trt.min_batch_size, trt.max_batch_size)
    guided = not isinstance(infer, Infer) or infer.scale > 1
    size, sizes = (infer.width, infer.height), list(map(size_of, trt.sizes or ()))
    return profile_of(onnx_path, part, infer.batch_size, limits, size, sizes, guided=guided)


def build_run_plans(variants: Variants, trt: Trt) -> dict[str, PlanReport]:
    """Build a run's plans and, if its engine loads plans, unquantized plans; return reports of the first, by part."""
    if trt.library == "none":
        return {}
    loaded, infer, directory, cache = variants.loaded, variants.loaded.infer, variants.directory, variants.shared.cache
    parts = [artifact(directory, "onnx", part).parent for part in exported(loaded.parts)]
    paths = {path.stem: path for part in parts for path in sorted(part.glob("*.onnx"))}  # two with precise steps
    plans = build_plans(paths, directory, trt, infer, cache)
    if RUNTIMES[infer.engine].file == "plan":
        unquantized = directory / "full_precision"
        twins = {part: path for part in paths if (path := artifact(unquantized, "onnx", part)).exists()}
        build_plans(twins, unquantized, trt, infer, cache)
    return plans


def build_plans(
    paths: dict[str, Path], out: Path, trt: Trt, infer: Infer | ExportShape, cache: Cache
) -> dict[str, PlanReport]:
    """Build ``out/plan/<part>.plan`` from each file in ``paths``, or take it from the cache; return reports by part."""
    library = plan_library(trt)
    formats = set().union(*(formats_in(path) for path in paths.values()))
    targets = targets_for(trt, formats) if RUNTIMES[library].ahead_of_time else []
    if not targets:
        check_gpu(formats)
    reports = {}
    with progress(len(paths), "build plans") as advance:
        for part, path in paths.items():
            shapes, plan = profile(path, part, trt, infer), artifact(out, "plan", part)
            origin = {
                "onnx": {file.name: sha256(file) for file in onnx_files(path)},
                "profile": shapes,
                "knobs": [library, targets, trt.optimization_level, trt.workspace_gib],
                "version": getattr(runtime_module(library), "__version__", None),
                "gpu": None if targets else torch.cuda.get_device_name(),  # a plan without targets is for this GPU
            }
            build = partial(
                build_plan,
                path,
                library=library,
                profile=shapes,
                compute_capabilities=targets,
                optimization_level=trt.optimization_level,
                workspace_gib=trt.workspace_gib,
                timing_cache=output_path(trt.timing_cache) if trt.timing_cache else None,
            )
            cache.provide("plan", origin, plan.parent, lambda folder, build=build, name=plan.name: build(folder / name))
            reports[part] = read_record(plan)
            LOG.info("%s.plan: %.1f MB, %s %s for %s", part, reports[part].bytes / 1e6, library,
                     describe_plan(plan)["version"], " ".join(reports[part].targets))  # fmt: skip
            advance()
    return reports
