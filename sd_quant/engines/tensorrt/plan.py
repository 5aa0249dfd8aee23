"""Read a TensorRT plan's header and the record of its build, without executing any of the plan."""

import json
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import open_regular, read_regular
from sd_quant.files.schema import check_schema
from sd_quant.shell import literal, pasted
from sd_quant.text import one_line

# The first 64 bytes of a TensorRT for RTX 1.7 plan, found by building for every target and comparing the bytes: magic,
# size of the whole file, library version, magic again, and a bit for each target.
RTX_HEADER = struct.Struct("<4s12xQ4B4sI28x")
_RTX_MAGIC = b"vtrt"
_TARGET_BITS = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")

# Of TensorRT's own plans, as others report; the version's place by NVIDIA (NVIDIA/TensorRT issue 3073). Not compared.
_MAINLINE_MAGICS = (b"ptrt", b"ftrt")


def rebuild(path: Path) -> str:
    """Return advice, for error messages, to build the plan at ``path`` again, with the complete command if known."""
    run, part = path.absolute().parent.parent, path.stem
    onnx = run / "onnx" / part / f"{part}.onnx"
    if not onnx.is_file():
        return f"rebuild it from its ONNX file; the knobs are listed by: {pasted('export_trt', '--help')}"
    command = pasted("export_trt", f"++files.{part}={literal(onnx)}", f"infer.out_path={literal(run)}")
    return f"rebuild it, with the width, height and batches that it is for added to: {command}"


def describe_plan(path: Path) -> dict:
    """Return the contents of a plan's header: {"is_plan", "library", "version", "targets", "complete", "bytes"}.

    Reads 64 bytes and runs nothing. ``complete`` says whether the file has its original length. ``complete`` and
    ``targets`` are None for plans of TensorRT (not for RTX). Raises ArtifactError when the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            return describe_header(file.read(RTX_HEADER.size), path.stat().st_size)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); {rebuild(path)}") from error


def describe_header(head: bytes, size: int) -> dict:
    """Return ``describe_plan`` for a file of ``size`` bytes that begins with ``head``."""
    unknown = {"is_plan": False, "library": None, "version": None, "targets": None, "complete": None, "bytes": size}
    if len(head) < RTX_HEADER.size:
        return unknown
    magic, length, *version, second_magic, targets = RTX_HEADER.unpack(head)
    plan = unknown | {"is_plan": True, "version": ".".join(map(str, version))}
    if magic in _MAINLINE_MAGICS:
        return plan | {"library": "tensorrt"}
    if magic != _RTX_MAGIC or second_magic != _RTX_MAGIC:
        return unknown
    names = [name for bit, name in enumerate(_TARGET_BITS) if targets >> bit & 1]
    if targets >> len(_TARGET_BITS):
        names.append(f"unknown targets {targets >> len(_TARGET_BITS) << len(_TARGET_BITS):#x}")
    return plan | {"library": "tensorrt_rtx", "targets": names, "complete": length == size}


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The record of one build, written beside the plan as ``<plan>.json``."""

    library: str
    version: str
    targets: list[str]  # the compute capabilities that it runs on, such as SM89
    profile: dict[str, list[list[int]]]  # input to its smallest, most likely and largest shape
    optimization_level: int | None  # as in the knob; None: TensorRT's default
    workspace_gib: float | None  # as in the knob; None: no limit
    onnx: dict[str, str]  # SHA-256 of the ONNX file and of each file of its external weights
    sha256: str  # of the plan
    bytes: int  # of the plan
    seconds: float  # that the build took
    peak_memory_bytes: int  # of the building process; in a job, since its stage began
    timing_cache: str | None = None  # the file with kernel times of this GPU that the build read and extended
    attention: str | None = None  # why its attention is in high precision though the ONNX file's is quantized


def record_path(plan_path: Path) -> Path:
    """Return the path of the record of a plan's build, ``<plan>.json``."""
    return plan_path.with_name(f"{plan_path.name}.json")


def own_command(report: PlanReport, onnx_path: Path, plan_path: Path) -> str | None:
    """Return the command of NVIDIA's own tool, trtexec or tensorrt_rtx, that builds the same plan.

    Returns None for a plan whose attention was changed, because no file has that graph. TensorRT 10 needs
    --stronglyTyped to use the graph's precisions. Source: NVIDIA's documentation of both tools.
    """
    if report.attention is not None:
        return None
    rtx = report.library == "tensorrt_rtx"
    words = ["tensorrt_rtx" if rtx else "trtexec", f"--onnx={onnx_path}", f"--saveEngine={plan_path}"]
    for which, name in enumerate(("min", "opt", "max")):
        shapes = (f"{given}:{'x'.join(map(str, shapes[which]))}" for given, shapes in report.profile.items())
        words.append(f"--{name}Shapes={','.join(shapes)}")
    if rtx:
        words.append(f"--computeCapabilities={','.join(target.removeprefix('SM') for target in report.targets)}")
    elif report.version.startswith("10."):
        words.append("--stronglyTyped")
    if report.workspace_gib is not None:
        words.append(f"--memPoolSize=workspace:{1024 * report.workspace_gib:.0f}")  # MiB
    if report.optimization_level is not None:
        words.append(f"--builderOptimizationLevel={report.optimization_level}")
    return shlex.join([*words, "--profilingVerbosity=detailed", "--skipInference"])


def read_record(plan_path: Path) -> PlanReport:
    """Read the record of a plan's build. Raises ArtifactError when the record is missing or unreadable."""
    path = record_path(plan_path)
    try:
        content = json.loads(read_regular(path))
        check_schema(PlanReport, content, whole=False)
        return PlanReport(**content)
    except (OSError, TypeError, ValueError, RecursionError, ConfigError) as error:
        raise ArtifactError(
            f"{plan_path} has no readable record {path.name} of its build ({one_line(error)}); load it with "
            f"allow_untrusted_plan=true if you trust who made it, or {rebuild(plan_path)}"
        ) from error
