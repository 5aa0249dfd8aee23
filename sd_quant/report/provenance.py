"""The provenance of a run: versions, machine, commit and hashes of inputs, enough to repeat it or to explain it.

A fact that cannot be found out is null, never a failure. The road not taken is ``pip freeze`` and ``os.environ``: both
are long, and the latter holds secrets.
"""

import hashlib
import os
import platform
import subprocess
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
    """``{started, overrides, versions, machine, git, inputs}``; ``inputs``: name -> file or folder, hashed here.

    A path in the result is the path as given. Call it first: ``started`` is the time of the call.
    """
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
    """Platform, processor, memory and GPUs.

    ``usable_cores`` counts the cores that this process may run on, ``affinity`` names them, and ``threads`` counts the
    threads of torch and of every runtime. A virtual machine sees a constant frequency and no governor.
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
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
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
    try:
        path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None


def git_state(repository: Path) -> dict:
    """``{commit, dirty}`` of ``repository``, both None when it is not the top of a git repository with a commit.

    The top, because an installed copy may lie inside somebody else's repository.
    """
    top = _git(repository, "rev-parse", "--show-toplevel")
    commit = _git(repository, "rev-parse", "--verify", "HEAD")
    if not top or not commit or Path(top).resolve() != repository.resolve():
        return {"commit": None, "dirty": None}
    changes = _git(repository, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def fingerprint(path: Path) -> dict:
    """``{path, sha256, bytes}`` of a file; of a folder, the digest of its sorted ``<sha256>  <name>`` lines.

    An absent path has null digest and size, and a reason.
    """
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
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
