"""The long cases that a change touches: a table from folders to test files, of which the longest match counts.

The road not taken is a record of the lines that each case runs: it is finer, and wrong after the next move of code.
"""

from collections.abc import Iterable
from fnmatch import fnmatch

ALL = ("*",)
COMMANDS = ("tests/cli/test_*",)
JOBS = ("tests/cli/test_families.py", "tests/cli/test_recipes.py", "tests/cli/test_observed.py")
CLUSTER = ("tests/cli/cluster/*", *(f"tests/cli/test_{name}.py" for name in ("launchers", "sweep")))
HOSTILE = ("tests/cli/test_hostile_input.py", "tests/fuzz/*")
HANDED = ("tests/cli/test_hand_over.py", "tests/cli/test_judge.py")
TARGETS = (*HANDED, "tests/unit/interchange/*", "tests/unit/test_programs.py")
PAGES = ("tests/cli/test_report_browser.py", "addons/votes/tests/test_browser.py")

# Beside what is here, a file of sd_quant/<room> touches tests/unit/<room>, an add-on's its tests, and one of tests its
# neighbours.
TABLE: dict[str, tuple[str, ...]] = {
    ".ci/": ALL,
    **dict.fromkeys((".gitattributes", ".gitignore", "LICENSE"), ()),
    **dict.fromkeys(("Makefile", "conftest.py", "constraints.txt", "pyproject.toml", "setup.py"), ALL),
    **dict.fromkeys(("export_trt.py", "hand_over.py", "infer.py", "judge.py", "quantize.py"), COMMANDS),
    "README.md": ("tests/unit/test_docs.py", "tests/cli/test_documents.py"),
    "SECURITY.md": ("tests/unit/test_docs.py",),
    "addons/": ("tests/cli/test_installed.py", "tests/cli/test_main_job.py"),
    "addons/scores/": ("tests/cli/test_installed.py", "tests/cli/test_judge.py", "tests/unit/stages/*"),
    "addons/scores/tests/": (),
    "addons/votes/tests/": (),
    "benchmarks/": ("tests/unit/benchmarks/*",),
    "benchmarks/results/": (),
    "checkpoints/": COMMANDS,
    "conf/": (*COMMANDS, "tests/unit/test_sweep.py"),
    "docs/": ("tests/unit/test_docs.py", "tests/cli/test_documents.py"),
    "examples/": ("tests/cli/test_interface.py", "tests/cli/test_extension.py", "tests/unit/test_docs.py"),
    "sd_quant/": COMMANDS,  # the modules that stand at its top
    "sd_quant/cache.py": (*CLUSTER, "tests/faults/*"),
    "sd_quant/calibration/": (*JOBS, "tests/cli/test_launchers.py"),
    "sd_quant/checkpoints/": (*JOBS, *HOSTILE, *TARGETS),
    "sd_quant/commands/": COMMANDS,
    "sd_quant/composition.py": (*COMMANDS, *CLUSTER),
    "sd_quant/config/": COMMANDS,
    "sd_quant/engines/": (*JOBS, "tests/cli/test_deployed.py", "tests/unit/export/*"),
    "sd_quant/export/": (*JOBS, "tests/cli/test_deployed.py", "tests/cli/test_hand_over.py"),
    "sd_quant/files/": (*HOSTILE, "tests/unit/checkpoints/*"),
    "sd_quant/inference/": (*JOBS, "tests/unit/models/*"),
    "sd_quant/interchange/": (*TARGETS, "tests/fuzz/*", "tests/unit/quantization/*"),
    "sd_quant/launchers/": CLUSTER,
    "sd_quant/layers/": ("tests/cli/test_observed.py", "tests/unit/benchmarks/test_tiny_*", "tests/unit/observed/*"),
    "sd_quant/metrics/": ("tests/unit/stages/*", "tests/unit/benchmarks/test_they_run.py"),
    "sd_quant/models/": (*JOBS, "tests/unit/export/*"),
    "sd_quant/names/": (*TARGETS, "tests/unit/checkpoints/*"),
    "sd_quant/observed/": ("tests/cli/test_observed.py", "tests/unit/benchmarks/test_tiny_*"),
    "sd_quant/quantization/": (*JOBS, "tests/unit/export/*", "tests/unit/simulation/*", *TARGETS),
    "sd_quant/report/": (*PAGES, "tests/cli/test_sweep.py"),
    "sd_quant/shipped/": ("tests/cli/test_installed.py",),
    "sd_quant/simulation/": ("tests/cli/test_recipes.py",),
    "sd_quant/stages/": (*COMMANDS, "tests/faults/*"),
    "sd_quant/sweep.py": CLUSTER,
    "sd_quant/trackers/": ("tests/cli/test_sweep.py",),
    "tests/": ALL,
    **dict.fromkeys((f"tests/{name}/" for name in ("cli", "faults", "fuzz", "gpu", "mutations", "unit")), ()),
    "tests/pairs/": ("tests/cli/test_pairs.py",),
    "tests/programs/": ("tests/unit/test_programs.py",),  # and make programs-check
    "tests/run.py": (),
}


class UnknownPath(Exception):
    """A file that the table does not know, named in its sentence."""


def patterns_of(path: str) -> set[str]:
    """Patterns of the files of cases that a change of this file touches, ``path`` from the repository's root.

    Raises ``UnknownPath`` where no folder of the table holds it.
    """
    rows = [row for row in TABLE if path == row or row.endswith("/") and path.startswith(row)]
    if not rows:
        raise UnknownPath(f"{path} is in no folder that tests/cadence/touched.py knows; add a row for it there")
    patterns = set(TABLE[max(rows, key=len)])
    folder, _, name = path.rpartition("/")
    if folder.startswith("addons/"):
        patterns.add(f"{'/'.join(path.split('/')[:2])}/tests/*")
    elif folder.startswith("tests/"):
        patterns.add(path if name.startswith("test_") else f"{folder}/*")
    elif folder.startswith("sd_quant/"):
        patterns.add(f"tests/unit/{folder.removeprefix('sd_quant/')}/*")
    return patterns


def touched(changed: Iterable[str], files: Iterable[str]) -> list[str]:
    """Those of ``files`` that the changed paths touch, in their order."""
    patterns = set().union(*map(patterns_of, changed))
    return [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
