"""What a plan is, known from its first bytes and the record of its build, without running any of it."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from sd_quant.errors import ArtifactError
from sd_quant.text import one_line

REBUILD = "rebuild it from its ONNX with: python export_trt.py"


# The first 64 bytes of a TensorRT for RTX 1.7 plan, found by building for every target and comparing the bytes: magic,
# size of the whole file, library version, magic again, one bit per target.
RTX_HEADER = struct.Struct("<4s12xQ4B4sI28x")
_RTX_MAGIC = b"vtrt"
_TARGET_BITS = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")


# Mainline plans. The magics are those that others report and the version's place is NVIDIA's word (NVIDIA/TensorRT
# issue 3073); there was no mainline plan here to compare them with.
_MAINLINE_MAGICS = (b"ptrt", b"ftrt")


def describe_plan(path: Path) -> dict:
    """What the header of a plan says: {"is_plan", "library", "version", "targets", "complete", "bytes"}.

    Reads 64 bytes and runs nothing. ``targets`` and ``complete`` (does the file have the length it was written with)
    are None where the header does not tell: always for mainline plans, whose GPU only the build's record knows. A
    header is a claim: that the rest of the file is intact only its SHA-256 can say. ArtifactError for no such file.
    """
    try:
        with path.open("rb") as file:
            return describe_header(file.read(RTX_HEADER.size), path.stat().st_size)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); {REBUILD}") from error


def is_plan(path: Path) -> bool:
    """Whether the file begins like a TensorRT plan. Raises ArtifactError when it cannot be read."""
    return describe_plan(path)["is_plan"]


def describe_header(head: bytes, size: int) -> dict:
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
    profile: dict[str, list[list[int]]]
    optimization_level: int | None
    workspace_gib: float | None
    onnx: dict[str, str]  # SHA-256 of the ONNX file and of each file of its external weights
    sha256: str
    bytes: int
    seconds: float
    peak_memory_bytes: int  # of this process since its start
    timing_cache: str | None = None  # what earlier builds on this GPU had measured was used, and this one's added


def record_path(plan_path: Path) -> Path:
    return plan_path.with_name(f"{plan_path.name}.json")


def read_record(plan_path: Path) -> PlanReport:
    """The record of the build. Raises ArtifactError when there is none or it is not one."""
    path = record_path(plan_path)
    try:
        return PlanReport(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{plan_path} has no readable record {path.name} of its build ({one_line(error)}); {REBUILD}, "
            "or load it with allow_untrusted_plan=true if you trust who made it"
        ) from error
