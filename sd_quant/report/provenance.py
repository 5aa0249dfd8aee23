"""The provenance of a run: versions, machine, commit and hashes of inputs, enough to repeat it or to explain it.

An unknown fact is null, never a failure. Roads not taken: ``pip freeze``, which is long, and ``os.environ``, which
holds secrets.
"""

import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from sd_quant.files import sha256
from sd_quant.places import HOME
from sd_quant.process import affinity

PACKAGES = (
    "sd-quant", "torch", "diffusers", "transformers", "nvidia-modelopt", "onnx", "onnxruntime", "openvino", "tensorrt",
    "tensorrt_rtx", "hydra-core",
)  # fmt: skip
INT8_INSTRUCTIONS = {"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"}  # they decide whether int8 pays on a CPU


def provenance(inputs: dict[str, Path], overrides: list[str]) -> dict:
    """``{started, overrides, versions, machine, git, inputs}`` of ``inputs`` by name; ``started`` is now."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": list(overrides),
        "machine": machine(),
        "git": git_state(HOME),
        **made_of(inputs),
    }


def made_of(inputs: dict[str, Path]) -> dict:
    """``{versions, inputs}``: the facts that decide a result on any machine. Imports nothing heavy."""
    return {
        "versions": {"python": platform.python_version(), **versions(*PACKAGES)},
        "inputs": {name: fingerprint(path) for name, path in inputs.items()},
    }


def machine() -> dict:
    """Platform, processor, memory and GPUs; ``threads`` are those of torch and of every runtime.

    ``usable_cores`` and ``affinity`` are the process's. A virtual machine sees a constant frequency and no governor.
    """
    import torch  # here, because what a job was made of is asked without its machine

    from sd_quant.devices import threads

    return {
        "platform": platform.platform(),
        **processor(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(affinity()) or os.cpu_count(),
        "affinity": affinity() or None,
        "threads": threads(),
        "cpu_governor": governor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "compute_capabilities": [
            "SM{}{}".format(*torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())
        ],
    }


def processor() -> dict:
    """``{cpu, cpu_int8, cpu_mhz}``: the name, the instructions for products of INT8, and each core's frequency now."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = [[part.strip() for part in line.partition(":")] for line in text.splitlines()]
    first = {key: value for key, _, value in reversed(lines)}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    return {
        "cpu": first.get("model name") or platform.processor() or None,
        "cpu_int8": sorted(flags & INT8_INSTRUCTIONS),
        "cpu_mhz": [float(value) for key, _, value in lines if key == "cpu MHz"],
    }


def governor() -> str | None:
    """The policy for the first core's frequency, such as performance or powersave."""
    with suppress(OSError):
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    return None


def git_state(repository: Path) -> dict:
    """``{commit, dirty}`` of ``repository``, None unless it is the top of one; a copy may lie inside another."""
    top = _git(repository, "rev-parse", "--show-toplevel")
    commit = _git(repository, "rev-parse", "--verify", "HEAD")
    if not top or not commit or Path(top).resolve() != repository.resolve():
        return {"commit": None, "dirty": None}
    changes = _git(repository, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def fingerprint(path: Path) -> dict:
    """``{path, sha256, bytes}`` of a file, or of a folder's sorted ``<sha256>  <name>`` lines; or with a reason."""
    if path.is_file():
        return {"path": str(path), "sha256": sha256(path), "bytes": path.stat().st_size}
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = "".join(f"{sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
        size = sum(file.stat().st_size for file in files)
        return {"path": str(path), "sha256": hashlib.sha256(lines.encode()).hexdigest(), "bytes": size}
    return {"path": str(path), "sha256": None, "bytes": None, "reason": "no such file or folder"}


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of installed packages; None for one that is not installed."""
    installed = {name: [*metadata.distributions(name=name)] for name in packages}
    return {name: found[0].version if found else None for name, found in installed.items()}


def _git(repository: Path, *arguments: str) -> str | None:
    """The output of git, or None when it fails or is not installed."""
    command = ["git", "-C", str(repository), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return None
