"""Print what is installed, what works on this machine and which engine runs which format, to paste into an issue.

Nothing heavy is imported: packages are read from their metadata, GPUs from nvidia-smi, and a package that is installed
and does not load goes unnoticed. Modules that read YAML or requirements may be missing, so they are imported where they
are used. No path is printed: paths hold names of people. Alternative not taken: to import torch and every runtime,
which takes ten seconds and ends with the first broken package.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, requires
from importlib.util import find_spec
from pathlib import Path

from sd_quant import __version__
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, WITHOUT_A_GPU, not_installed, why_not
from sd_quant.errors import SdQuantError
from sd_quant.places import HOME, output_path
from sd_quant.process import address_space_bytes, available_memory_bytes, cores
from sd_quant.quantization.recipe import Recipe, formats_used
from sd_quant.report import provenance

FOLDERS = {"results": "outputs", "cache": "outputs/cache"}  # where a run writes by default
LEVEL = 3.0  # the quant_level for which engines are named: all layers, without attention's products
MISSING = "not installed"
HEEDED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environment variables that change what works
Lines = Iterator[tuple[str, str]]


def main() -> None:
    """Print every section of the report."""
    argparse.ArgumentParser("sd-quant doctor", description=__doc__.splitlines()[0]).parse_args()
    for title, section in SECTIONS.items():
        print(title)
        for name, text in told(section):
            print(f"  {name:18} {text}")


def told(section: Callable[[], Lines]) -> Lines:
    """Yield the lines of a section; if it fails, the last line names the exception."""
    try:
        yield from section()
    except Exception as error:  # mostly from a broken package; its message may hold a path
        yield "cannot be told", f"{type(error).__name__} {getattr(error, 'name', None) or ''}".strip()


def packages() -> Lines:
    """Yield the versions that a run records, and required packages that are missing or of an unsupported version."""
    git = provenance.git_state(HOME)
    changed = " with changes" if git["dirty"] else ""
    yield "sd-quant", __version__ + (f", commit {git['commit'][:10]}{changed}" if git["commit"] else "")
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    named = {name: found for name, found in provenance.versions(*provenance.PACKAGES).items() if name != "sd-quant"}
    for name, found in named.items():
        build = f", built for {torch_build()}" if found and name == "torch" else ""
        yield name, (found or MISSING) + build
    for wanted in requirements():
        if (fault := fault_of(wanted)) and (wanted.name not in named or fault != MISSING):
            yield wanted.name, fault


def extras() -> Lines:
    """Yield the extras (optional dependencies) that are installed, and the incomplete ones with missing packages."""
    complete: list[str] = []
    others: list[str] = []
    for extra in metadata("sd-quant").get_all("Provides-Extra") or []:
        faults = [(wanted.name, fault) for wanted in requirements(extra) if (fault := fault_of(wanted))]
        told = ", ".join(name if fault == MISSING else f"{name} {fault}" for name, fault in faults)
        (others if faults else complete).append(f"{extra} ({told})" if faults else extra)
    yield "installed", ", ".join(complete) or "none"
    yield "not installed", "; ".join(others) or "none"


def requirements(extra: str = "") -> list:
    """Return the requirements of sd-quant, or those that an extra adds; [] where sd-quant is not installed."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(line) for line in requires("sd-quant") or []]
    except PackageNotFoundError:
        return []
    of_this = [wanted for wanted in found if ("extra ==" in str(wanted.marker)) == bool(extra)]
    return [wanted for wanted in of_this if wanted.marker is None or wanted.marker.evaluate({"extra": extra})]


def fault_of(wanted) -> str | None:
    """Return what is wrong with the installed package of a requirement, or None."""
    found = provenance.versions(wanted.name)[wanted.name]
    if found is None:
        return MISSING
    return None if wanted.specifier.contains(found, prereleases=True) else f"{found}, supported is {wanted.specifier}"


def torch_build() -> str:
    """Return what torch was built for, CUDA with its version or the processor, as read from torch's version.py."""
    try:
        [folder] = find_spec("torch").submodule_search_locations
        text = (Path(folder) / "version.py").read_text(encoding="utf-8")
    except (AttributeError, OSError, ValueError):
        return "nothing: its files are missing"
    found = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return f"CUDA {found[1]}" if found else "the processor"


def machine() -> Lines:
    """Yield the processor, GPUs, memory, limits of this process and free disk space."""
    processor = provenance.processor()
    yield "processor", f"{processor['cpu'] or platform.machine()}, {cores()} of {os.cpu_count()} cores"
    products = ", ".join(processor["cpu_int8"])
    yield "INT8 products", products or "none, so integers gain nothing on this processor"
    for index, (name, capability, driver, memory) in enumerate(listed_gpus()):
        yield f"GPU {index}", f"{name}, compute capability {capability}, {memory}, driver {driver}"
    if not listed_gpus():
        yield "GPU", "none that nvidia-smi lists" if shutil.which("nvidia-smi") else "none: there is no nvidia-smi"
    yield "memory", f"{available_memory_bytes() / 2**30:.1f} GiB available"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "open files", " of ".join("unlimited" if each == resource.RLIM_INFINITY else str(each) for each in files)
    left = address_space_bytes()
    yield "address space", "unlimited" if left == float("inf") else f"{left / 2**30:.1f} GiB left"
    yield from ((name, os.environ[name]) for name in HEEDED if name in os.environ)
    for what, path in FOLDERS.items():
        yield f"disk for {what}", free_disk(output_path(path))


@cache
def listed_gpus() -> list[list[str]]:
    """Return name, compute capability, driver and memory of each GPU; [] if nvidia-smi fails or takes 5 s."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [row for line in told.splitlines() if len(row := line.split(", ")) == 4]


def gpu_in_use() -> list[str] | None:
    """Return the row of ``listed_gpus`` of the GPU that torch would use; None if it can use no GPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    index = int(first) if first.isdigit() else 0  # else it is a GPU's identifier
    hidden = first in ("", "-1") or index >= len(listed_gpus()) or not torch_build().startswith("CUDA")
    return None if hidden else listed_gpus()[index]


def usable_gpu() -> str | None:
    """Return the compute capability of ``gpu_in_use``, such as SM89."""
    return None if (found := gpu_in_use()) is None else f"SM{found[1].replace('.', '')}"


def free_disk(folder: Path) -> str:
    """Return the free space for a folder that may not exist yet, or why nothing can be written."""
    from sd_quant.files import check_writable

    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        check_writable(folder)
    except SdQuantError as error:
        return "cannot be written" if error.exit_code == 2 else "full"
    return f"{shutil.disk_usage(there).free / 2**30:.1f} GiB free"


def runtimes() -> Lines:
    """Yield each runtime of ``infer=``, and whether it computes on this machine."""
    for name, runtime in RUNTIMES.items():
        works = "can compute here" if runtime.quantized else "can compute here, the unquantized model alone"
        yield name, why_not_here(name, usable_gpu()) or works


def why_not_here(name: str, gpu: str | None, used: Collection[str] = ()) -> str | None:
    """Return why a runtime cannot compute here, on ``gpu`` (such as SM89) in the formats ``used``; None if it can."""
    from sd_quant.config.plans import NO_GPU, no_plan_runs

    if (missing := not_installed(name)) or RUNTIMES[name].device != "cuda":
        return missing
    reason = NO_GPU if gpu is None else no_plan_runs(name, gpu, used)
    return f"builds plans and runs none: {reason}" if reason and RUNTIMES[name].ahead_of_time else reason


def formats() -> Lines:
    """Yield each preset, and the engines that execute it here."""
    from sd_quant.config.recipe import own_recipe, presets

    for name in presets():
        recipe = own_recipe(name)
        yield name, run_by(recipe, usable_gpu()) if recipe else "enables nothing that can be read"


def run_by(recipe: Recipe, gpu: str | None) -> str:
    """Return in words which engines execute a recipe here, that of ``infer=auto`` first, or why it is simulated."""
    from sd_quant.config.main_job import torch_multiplies
    from sd_quant.config.targets import executed_by

    used = formats_used(recipe.enable, LEVEL)
    able = []
    for name, runtime in RUNTIMES.items():
        multiplied = runtime.file is not None or (torch_multiplies(recipe.enable) and not recipe.rank)
        here = not why_not_here(name, gpu, set().union(*used.values()))
        if runtime.quantized and multiplied and here and not why_not(name, used):
            able.append(name)
    auto = next((name for name in (*PLAN_BUILDERS, WITHOUT_A_GPU) if name in able), None)
    others = ", ".join(f"infer={name}" for name in able if name != auto)
    if auto is not None:
        return auto + (f"; also with {others}" if others else "")
    absent = not_installed(WITHOUT_A_GPU)
    reason = f"refused: {absent}" if absent else f"simulated: {why_not(WITHOUT_A_GPU, used)}"
    targets = ", ".join(executed_by(recipe))
    reason += f"; tools of hand_over=[{targets}] execute it on their GPUs" if targets else ""
    return reason + (f"; {others} executes it" if others else "")


SECTIONS = {
    "packages": packages,
    "extras": extras,
    "machine": machine,
    "runtimes (infer=)": runtimes,
    f"formats (quantize=) at quant_level={LEVEL:g}, and what runs them with infer=auto": formats,
}
