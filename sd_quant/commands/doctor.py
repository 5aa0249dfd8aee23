"""What is installed, what works here and by what a format is run: text to paste into an issue, in a second.

Nothing heavy is imported: a package is known by its metadata, a GPU by nvidia-smi. So what is installed and does not
load is not noticed. What reads YAML or requirements is imported where it is used, because that may be what is missing.
No path is printed, because paths hold names. The road not taken is to import torch and every runtime, which takes ten
seconds and ends with the first that is broken.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, requires
from importlib.util import find_spec
from pathlib import Path

from sd_quant import __version__
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, WITHOUT_A_GPU, not_installed, why_not
from sd_quant.errors import SdQuantError
from sd_quant.knobs import read
from sd_quant.places import HOME, output_path
from sd_quant.process import address_space_bytes, available_memory_bytes, cores
from sd_quant.quantization.recipe import Enable, formats_used
from sd_quant.report import provenance

FOLDERS = {"results": "outputs", "cache": "outputs/cache"}  # where a run writes by default
LEVEL = 3.0  # the quant_level that formats are told for: all layers, without attention's products
MISSING = "not installed"
HEEDED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # variables of the environment
Lines = Iterator[tuple[str, str]]


def main() -> None:
    """Prints every section."""
    argparse.ArgumentParser("sd-quant doctor", description=__doc__.splitlines()[0]).parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in doctor | head
    for title, section in SECTIONS.items():
        print(title)
        for name, text in told(section):
            print(f"  {name:18} {text}")


def told(section: Callable[[], Lines]) -> Lines:
    """The lines of a section; what cannot be found out is a line too."""
    try:
        yield from section()
    except Exception as error:  # of a package that is broken, mostly; its words may hold a path
        yield "cannot be told", f"{type(error).__name__} {getattr(error, 'name', None) or ''}".strip()


def packages() -> Lines:
    """Versions of what a record names, and what else is missing or of a version that is not supported."""
    git = provenance.git_state(HOME)
    changed = " with changes" if git["dirty"] else ""
    yield "sd-quant", __version__ + (f", commit {git['commit'][:10]}{changed}" if git["commit"] else "")
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    named = {name: found for name, found in provenance.versions(*provenance.PACKAGES).items() if name != "sd-quant"}
    for name, found in named.items():
        build = f", built for {torch_build()}" if found and name == "torch" else ""
        yield name, (found or MISSING) + build
    for wanted in requirements():
        if (words := lacking(wanted)) and (wanted.name not in named or words != MISSING):
            yield wanted.name, words


def extras() -> Lines:
    """Which extras are there, and what the others lack."""
    there: list[str] = []
    others: list[str] = []
    for extra in metadata("sd-quant").get_all("Provides-Extra") or []:
        found = {wanted.name: lacking(wanted) for wanted in requirements(extra)}
        bad = [name if words == MISSING else f"{name} {words}" for name, words in found.items() if words]
        (others if bad else there).append(f"{extra} ({', '.join(bad)})" if bad else extra)
    yield "installed", ", ".join(there) or "none"
    yield "not installed", "; ".join(others) or "none"


def requirements(extra: str = "") -> list:
    """What sd-quant requires, as packaging reads it, or an extra beside that; nothing where it is not installed."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(line) for line in requires("sd-quant") or []]
    except PackageNotFoundError:
        return []
    always = [wanted for wanted in found if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]
    if not extra:
        return always
    return [wanted for wanted in found if wanted not in always and wanted.marker.evaluate({"extra": extra})]


def lacking(wanted) -> str | None:
    """What is wrong with what is installed for a requirement, or None."""
    found = provenance.versions(wanted.name)[wanted.name]
    if found is None:
        return MISSING
    return None if wanted.specifier.contains(found, prereleases=True) else f"{found}, supported is {wanted.specifier}"


def torch_build() -> str:
    """What torch was built for, from the file that it reads itself: CUDA and its version, or the processor."""
    try:
        [folder] = find_spec("torch").submodule_search_locations
        text = (Path(folder) / "version.py").read_text(encoding="utf-8")
    except (AttributeError, OSError, ValueError):
        return "nothing: its files are missing"
    found = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return f"CUDA {found[1]}" if found else "the processor"


def machine() -> Lines:
    processor = provenance.processor_facts()
    flags = {*(processor.get("flags") or processor.get("Features") or "").split()}
    name = processor.get("model name") or platform.processor() or platform.machine()
    yield "processor", f"{name}, {cores()} of {os.cpu_count()} cores"
    products = ", ".join(sorted(flags & provenance.INT8_INSTRUCTIONS))
    yield "INT8 products", products or "none, so integers gain nothing on this processor"
    for index, gpu in enumerate(gpus()):
        described = f"{gpu['name']}, compute capability {gpu['compute_cap']}, {gpu['memory.total']}"
        yield f"GPU {index}", f"{described}, driver {gpu['driver_version']}"
    if not gpus():
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
def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; nothing where it is not there, fails or takes long."""
    asked = ("name", "compute_cap", "driver_version", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in told.splitlines())
    return [dict(zip(asked, row, strict=True)) for row in rows if len(row) == len(asked)]


def usable_gpu() -> str | None:
    """The compute capability, such as SM89, of the GPU that torch would use; None where it can use none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    index = int(first) if first.isdigit() else 0  # else it is the name of one
    hidden = first in ("", "-1") or index >= len(gpus()) or not torch_build().startswith("CUDA")
    return None if hidden else f"SM{gpus()[index]['compute_cap'].replace('.', '')}"


def free_disk(folder: Path) -> str:
    from sd_quant.config import check_writable

    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        check_writable(folder)
    except SdQuantError as error:
        return "cannot be written" if error.exit_code == 2 else "full"
    return f"{shutil.disk_usage(there).free / 2**30:.1f} GiB free"


def runtimes() -> Lines:
    """What ``infer=`` can be here."""
    for name, runtime in RUNTIMES.items():
        works = "can compute here" + ("" if runtime.quantized else ", the unquantized model alone")
        yield name, why_not_here(name, usable_gpu()) or works


def why_not_here(name: str, gpu: str | None, used: Collection[str] = ()) -> str | None:
    """Why a runtime computes nothing on this machine, or nothing in the formats ``used``; else None."""
    from sd_quant.config.engine_choice import NO_GPU, no_plan_runs

    if (missing := not_installed(name)) or RUNTIMES[name].device != "cuda":
        return missing
    reason = NO_GPU if gpu is None else no_plan_runs(name, gpu, used)
    return f"builds plans and runs none: {reason}" if reason and RUNTIMES[name].ahead_of_time else reason


def formats() -> Lines:
    """By what each preset is run here."""
    import yaml

    from sd_quant.config.recipe import presets

    for name, path in presets().items():
        yield name, run_by(yaml.safe_load(path.read_text(encoding="utf-8")), usable_gpu())


def run_by(preset: Mapping, gpu: str | None) -> str:
    """What runs the recipe of a preset, first what infer=auto takes; or why a run simulates it."""
    from sd_quant.config.main_job import torch_multiplies

    enable = read(Enable, preset["enable"], "enable.")
    used = formats_used(enable, LEVEL)
    able = []
    for name, runtime in RUNTIMES.items():
        multiplied = runtime.file is not None or (torch_multiplies(enable) and not preset.get("rank"))
        here = not why_not_here(name, gpu, set().union(*used.values()))
        if runtime.quantized and multiplied and here and not why_not(name, used):
            able.append(name)
    auto = next((name for name in (*PLAN_BUILDERS, WITHOUT_A_GPU) if name in able), None)
    others = ", ".join(f"infer={name}" for name in able if name != auto)
    if auto is None:
        absent = not_installed(WITHOUT_A_GPU)
        reason = f"refused: {absent}" if absent else f"simulated: {why_not(WITHOUT_A_GPU, used)}"
        return reason + (f"; {others} executes it" if others else "")
    return auto + (f"; also with {others}" if others else "")


SECTIONS = {
    "packages": packages,
    "extras": extras,
    "machine": machine,
    "runtimes (infer=)": runtimes,
    f"formats (quantize=) at quant_level={LEVEL:g}, and what runs them with infer=auto": formats,
}
