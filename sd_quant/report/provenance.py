"""The provenance of a run: versions, machine, commit and hashes of inputs, enough to repeat or explain the run.

An unknown fact is null, never an error. Alternatives not taken: ``pip freeze``, which is long, and ``os.environ``,
which holds secrets.
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
    """Return ``{started, overrides, machine, git, versions, inputs}`` as of now; ``inputs``: paths by name, to hash."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": list(overrides),
        "machine": machine(),
        "git": git_state(HOME),
        **made_of(inputs),
    }


def made_of(inputs: dict[str, Path]) -> dict:
    """Return ``{versions, inputs}``, the facts that determine a result on any machine, without importing torch."""
    return {
        "versions": {"python": platform.python_version(), **versions(*PACKAGES)},
        "inputs": {name: fingerprint(path) for name, path in inputs.items()},
    }


def machine() -> dict:
    """Describe the machine: platform, processor, memory, GPUs; ``threads``: those of torch and each inference engine.

    This process may use the cores ``affinity``. A virtual machine sees a constant frequency and no governor.
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
    """Return ``{cpu, cpu_int8, cpu_mhz}``: name, instructions for INT8 products, each core's current frequency."""
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
    """Return the first core's frequency governor, such as performance or powersave; None if unknown."""
    with suppress(OSError):
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    return None


def git_state(repository: Path) -> dict:
    """Return ``{commit, dirty}`` of ``repository``; both None unless it is the top folder of a git work tree."""
    top = _git(repository, "rev-parse", "--show-toplevel")
    commit = _git(repository, "rev-parse", "--verify", "HEAD")
    if not top or not commit or Path(top).resolve() != repository.resolve():
        return {"commit": None, "dirty": None}
    changes = _git(repository, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def fingerprint(path: Path) -> dict:
    """Return ``{path, sha256, bytes}``, a folder hashed as sorted ``<sha256>  <name>`` lines; ``reason`` if missing."""
    if path.is_file():
        return {"path": str(path), "sha256": sha256(path), "bytes": path.stat().st_size}
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = "".join(f"{sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
        size = sum(file.stat().st_size for file in files)
        return {"path": str(path), "sha256": hashlib.sha256(lines.encode()).hexdigest(), "bytes": size}
    return {"path": str(path), "sha256": None, "bytes": None, "reason": "no such file or folder"}


def versions(*packages: str) -> dict[str, str | None]:
    """Return the version of each package by name; None for a package that is not installed."""
    installed = {name: [*metadata.distributions(name=name)] for name in packages}
    return {name: found[0].version if found else None for name, found in installed.items()}


def _git(repository: Path, *arguments: str) -> str | None:
    """Run git in ``repository`` and return its output, or None when git fails or is not installed."""
    command = ["git", "-C", str(repository), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return None
