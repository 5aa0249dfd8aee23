"""The section ``trt``: how plans (TensorRT's engine files) are built; and the engine of ``infer=auto``.

``infer=auto`` is the runtime of the plans if they run on this machine's GPU, else OpenVINO, by facts that are known
before anything is built. Alternative not taken: to build plans and see whether they load, which takes minutes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from sd_quant.config.images import Infer
from sd_quant.config.model import SIDE, Model, Sizes, size_of
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, WITHOUT_A_GPU, gpu, why_not
from sd_quant.engines.tensorrt.plan import describe_plan, read_record
from sd_quant.errors import ArtifactError
from sd_quant.knobs import COUNT, MORE_THAN_0, check, one_of
from sd_quant.models import may_be_bf16
from sd_quant.quantization.formats import min_compute_capability

RTX_TARGETS = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")  # GPUs that TensorRT for RTX 1.7 builds for
BF16_CAPABILITY = 80  # Ampere, the first with products of bf16
NO_FP32 = "SM75"  # Turing, for which TensorRT for RTX has no fp32 matrix products
USUAL_TARGETS = ("SM89", "SM120")
NO_GPU = "there is no NVIDIA GPU that torch can use"


@dataclass(slots=True)
class Trt:
    """How plans (TensorRT's engine files) are built: by which library, for which GPUs, batches and image sizes."""

    library: Annotated[
        str,
        one_of(["auto", *PLAN_BUILDERS, "none"]),
        "what builds plans: auto is tensorrt where it and a GPU are there, else tensorrt_rtx; none builds no plans",
    ]
    targets: Annotated[
        list[str] | None,
        one_of(RTX_TARGETS, each=True),
        f"what TensorRT for RTX builds for; null: {', '.join(USUAL_TARGETS)} and this GPU if they can; []: this GPU",
    ]
    static_batch: Annotated[bool, "plans take batches of infer.batch_size only"]
    min_batch_size: Annotated[int, COUNT, "images of the smallest batch of a plan"]
    max_batch_size: Annotated[int, COUNT, "images of the largest batch; guidance doubles it for the denoiser"]
    optimization_level: Annotated[int | None, one_of(range(6)), "TensorRT's own; null: the library's default"]
    sizes: Annotated[Sizes, "image sizes that a plan takes, and all between; null: infer.width x infer.height alone"]
    workspace_gib: Annotated[float | None, MORE_THAN_0, "memory that the builder may use; null: its default"]
    timing_cache: Annotated[str | None, "folder that keeps TensorRT's measurements of this GPU; null: measure again"]

    def __post_init__(self):
        least = self.min_batch_size
        check(self.max_batch_size >= least, "trt.max_batch_size", self.max_batch_size, f"at least {least}")


def plan_library(trt: Trt) -> str:
    """Return the runtime that builds the plans: for auto TensorRT if it and a GPU are there, else TensorRT for RTX."""
    if trt.library != "auto":
        return trt.library
    ahead_of_time = [name for name in PLAN_BUILDERS if RUNTIMES[name].ahead_of_time]
    others = [name for name in PLAN_BUILDERS if name not in ahead_of_time and find_spec(RUNTIMES[name].package)]
    return [*(others if gpu.current_gpu() else ()), *ahead_of_time][0]


def targets_for(trt: Trt, formats: set[str]) -> list[str]:
    """Return the GPUs to build plans for, such as SM89; by default USUAL_TARGETS and this GPU if they have ``formats``.

    Raises ConfigError for a GPU in ``trt.targets`` that lacks a format.
    """
    least = min_compute_capability(formats)
    able = [target for target in RTX_TARGETS if compute_capability(target) >= least]
    for target in trt.targets or []:
        expected = f"one of {', '.join(able)}, because older ones have no {' or '.join(sorted(formats))}"
        check(target in able, "trt.targets", target, expected)
    if trt.targets is not None:
        return trt.targets
    here = {gpu.current_gpu()} - {NO_FP32}  # the image decoder of every model multiplies in fp32
    return [target for target in able if target in here.union(USUAL_TARGETS)]


def check_dtype(model: Model, engine: str | None = None, trt: Trt | None = None) -> None:
    """Raise ConfigError if ``export.dtype`` may be bf16 and ``engine`` or a target of ``trt`` cannot execute it."""
    if not may_be_bf16(model.dtype):
        return
    lacks = RUNTIMES[engine].lacks_bf16 if engine else None
    check(lacks is None, "export.dtype", model.dtype, f"fp16 or fp32 with infer={engine}, because {lacks}")
    old = [target for target in (trt and trt.targets) or () if compute_capability(target) < BF16_CAPABILITY]
    check(not old, "trt.targets", old, f"SM{BF16_CAPABILITY} or newer with export.dtype={model.dtype}, which have bf16")


def compute_capability(target: str) -> int:
    """Return a target's compute capability, such as 89 for SM89."""
    return int(target.removeprefix("SM"))


@dataclass(slots=True)
class ExportShape:
    """The folder, image size and batch of export_trt's plans: its section ``infer``, where NeMo has these knobs."""

    out_path: Annotated[str | None, "folder that gets plan/<part>.plan; null: this command's own"]
    width: Annotated[int, SIDE, "pixels across the images that plans are tuned for"]
    height: Annotated[int, SIDE, "pixels down these images"]
    batch_size: Annotated[int, COUNT, "images at a time"]


def check_batch(trt: Trt, infer: Infer | ExportShape) -> None:
    """Raise ConfigError unless the plans accept batches of ``infer.batch_size``."""
    fits = trt.library == "none" or trt.min_batch_size <= infer.batch_size <= trt.max_batch_size
    expected = f"from trt.min_batch_size={trt.min_batch_size} to trt.max_batch_size={trt.max_batch_size}"
    check(fits, "infer.batch_size", infer.batch_size, expected)


def check_plan_size(trt: Trt, infer: Infer | ExportShape) -> None:
    """Raise ConfigError unless ``trt.sizes`` spans the size that plans are tuned for and the sizes of the images."""
    if trt.library == "none":
        return
    sizes = [(infer.width, infer.height)] if trt.sizes is None else list(map(size_of, trt.sizes))
    made = infer.sizes if isinstance(infer, Infer) and RUNTIMES[infer.engine].file == "plan" else None
    for axis, side in enumerate(("width", "height")):
        taken = [size[axis] for size in sizes]
        least, most = min(taken), max(taken)
        pixels = getattr(infer, side)
        expected = f"from {least} to {most}, as in trt.sizes, because plans are tuned for it"
        check(least <= pixels <= most, f"infer.{side}", pixels, expected)
        expected = f"a {side} from {least} to {most}, which trt.sizes has, because plans make the images"
        for stated in made or ():
            check(least <= size_of(stated)[axis] <= most, "infer.sizes", stated, expected)


def engine_for(trt: Trt, formats: Mapping[str, Collection[str]]) -> tuple[str, str]:
    """Return the engine for a job that builds plans, and the reason; ``formats`` is of the form of ``formats_used``."""
    found = gpu.current_gpu()
    if found is None:
        return WITHOUT_A_GPU, NO_GPU
    if trt.library == "none":
        return WITHOUT_A_GPU, "no plans are built"
    library, used = plan_library(trt), set().union(*formats.values())
    targets = targets_for(trt, used) if RUNTIMES[library].ahead_of_time else []
    if (reason := no_plan_runs(library, found, used, targets)) is not None:
        return WITHOUT_A_GPU, reason
    if (reason := why_not(library, formats)) and not why_not(WITHOUT_A_GPU, formats):
        return WITHOUT_A_GPU, reason
    advice = gpu.better_format(found, formats.get("inputs", ()))
    return library, f"the GPU is {found}, which runs the plans that are built" + (f"; {advice}" if advice else "")


def no_plan_runs(library: str, found: str, used: Collection[str], targets: Collection[str] = ()) -> str | None:
    """Return why GPU ``found`` cannot run a plan of ``library`` for ``targets`` in formats ``used``; None if it can."""
    able = [target for target in RTX_TARGETS if target != NO_FP32] if RUNTIMES[library].ahead_of_time else [found]
    if find_spec(RUNTIMES[library].package) is None:
        return f"the package {RUNTIMES[library].package} is not installed, which runs plans"
    if found not in (targets or able) or compute_capability(found) < min_compute_capability(used):
        built_for = f" for {' and '.join(targets)}" if targets else f" in {' and '.join(sorted(used))}" if used else ""
        return f"the GPU is {found}, which runs no plan of {library}{built_for}"
    return None


def engine_of(plans: Mapping[str, Path], others: Mapping[str, Path]) -> tuple[str, str]:
    """Return the engine for existing files, ``plans`` or ``others`` (ONNX), each by part; and the reason.

    Raises ArtifactError for a plan that cannot be read, has no record of its build, or is of an unknown library.
    """
    missing = [part for part, path in plans.items() if path.suffix.lower() != ".plan" or not path.is_file()]
    if missing or not plans:
        return WITHOUT_A_GPU, f"there is no plan of {missing[0]}" if missing else "no plans are given"
    found, path = gpu.current_gpu(), next(iter(plans.values()))
    described = describe_plan(path)
    library = described["library"] or read_record(path).library
    if library not in PLAN_BUILDERS:
        known = " or ".join(PLAN_BUILDERS)
        raise ArtifactError(f"{path} is said to be of {library}, expected {known}; build it anew")
    if all(path.suffix.lower() == ".plan" for path in others.values()):
        return library, "only plans are given"
    if found is None:
        return WITHOUT_A_GPU, NO_GPU
    targets = described["targets"] or read_record(path).targets
    if not targets:
        return WITHOUT_A_GPU, f"{path} does not say for which GPUs it is"
    if (reason := no_plan_runs(library, found, (), targets)) is not None:
        return WITHOUT_A_GPU, reason
    return library, f"the GPU is {found}, which the plans are for"
