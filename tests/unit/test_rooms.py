"""One way down: every import in ``sd_quant`` points to a room further down the table, and no files form a ring."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from sd_quant import report, stages
from sd_quant.engines import RUNTIMES
from sd_quant.interchange import NAMES as FOREIGN_FORMATS
from sd_quant.places import HOME
from sd_quant.quantization.formats import FORMATS
from sd_quant.report.record import RECORD
from sd_quant.report.summary import FAILURE, PROVENANCE, REPORT
from sd_quant.stages.job_folder import WRITTEN

pytestmark = pytest.mark.commit

PACKAGE = HOME / "sd_quant"

# From the top: a room may import those below it. Files and folders at the top level of sd_quant are rooms.
ROOMS = (
    "__main__",  # sd-quant
    "commands",  # the three that Hydra configures
    "interface",  # the same steps from Python
    "cli",  # what the commands share that Hydra configures
    "help",  # knobs with their defaults
    "composition",  # YAML and overrides to a job
    "launchers",  # what those of Hydra need beside their YAML
    "sweep",
    "stages",  # the steps of the three commands
    "config",  # the jobs: what is composed from YAML, checked
    "trackers",
    "observed",  # any pipeline, opened by watching it: it runs the pipeline and verifies graphs in engines
    "report",  # the record and everything that shows it
    "calibration",  # runs the pipeline, so it stands above it
    "inference",  # the pipeline with engines
    "interchange",  # files of other tools: to weights and inputs, and from an assignment
    "metrics",
    "engines",
    "export",  # assignment to ONNX
    "simulation",  # assignment to torch
    "checkpoints",  # files to named weights
    "quantization",  # statistics and recipe to assignment
    "layers",  # roles, from the data flow of a call
    "models",  # families
    "names",  # of tensors, in each author's layout
    "progress",
    "devices",
    "cache",
    "source",
    "files",  # readers of hostile bytes; and the ground, which imports nothing above
    "addons",  # what other distributions bring, by name
    "knobs",
    "numbers",
    "shell",  # commands as they are pasted
    "places",  # where relative paths lead
    "errors",
    "process",
    "text",
)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name in it, such as ``engines.base``."""
    paths = {path.relative_to(PACKAGE).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, wherever in it the import stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def own_imports(name: str) -> set[str]:
    """The project's modules that a module imports."""
    known = modules()
    wanted = {full.removeprefix("sd_quant.") for full in imports_of(known[name]) if full.startswith("sd_quant.")}
    # `from sd_quant.engines import openvino` names the package too, which is only another way to the module
    return {
        module for module in wanted & known.keys() if not any(m.startswith(f"{module}.") for m in wanted & known.keys())
    }


def room_of(module: str) -> str:
    return module.partition(".")[0]


def strings_of(name: str) -> set[str]:
    nodes = ast.walk(tree_of(modules()[name]))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_import_points_down_the_table_which_names_every_room_and_none_that_is_gone():
    assert {room_of(name) for name in modules()} - {""} == set(ROOMS) | {"__init__"}
    up = [
        f"{name} imports {other}"
        for name in modules()
        for other in own_imports(name)
        if "__init__" not in (name, other) and ROOMS.index(room_of(other)) < ROOMS.index(room_of(name))
    ]
    assert not up


def test_no_files_import_each_other_in_a_ring_and_each_twenty_of_ours_at_most():
    assert not {name: len(found) for name in modules() if len(found := own_imports(name)) > 20}
    try:
        list(TopologicalSorter({name: own_imports(name) for name in modules()}).static_order())
    except CycleError as error:
        pytest.fail(f"a ring: {' <- '.join(error.args[1])}")


def test_a_function_takes_eight_parameters_at_most():
    """But for Triton's kernels, whose parameters are those of a launch."""
    for name in modules():
        for node in ast.walk(tree_of(modules()[name])):
            if isinstance(node, ast.FunctionDef) and not node.name.endswith("product_kernel"):
                taken = [node.args.vararg, node.args.kwarg, *node.args.posonlyargs, *node.args.args]
                named = {each.arg for each in (*taken, *node.args.kwonlyargs) if each is not None} - {"self", "cls"}
                assert len(named) <= 8, f"{node.name} of {name} takes {len(named)}"


def test_hydra_and_config_stay_at_the_edge_and_no_add_on_is_imported():
    for name in modules():
        assert not [full for full in imports_of(modules()[name]) if full.startswith("sd_quant_")], name
    for name in [name for name in modules() if room_of(name) in ROOMS[ROOMS.index("stages") :]]:
        foreign = {full.partition(".")[0] for full in imports_of(modules()[name])}
        assert not foreign & {"hydra", "omegaconf"}, name
        below_config = ROOMS.index(room_of(name)) > ROOMS.index("config")
        assert not (below_config and "config" in own_imports(name)), name


NAMED_AT_HOME = {"engines": set(RUNTIMES) - {"torch"}, "quantization": set(FORMATS)}
# whose versions a run records; and other tools' files, which are called after tools and say which formats these have
LISTS_OF_PACKAGES = {"report.provenance", *(name for name in modules() if room_of(name) == "interchange")}


def test_runtimes_and_formats_are_named_in_their_own_rooms_alone_and_foreign_formats_in_their_own_files():
    """Elsewhere their facts are asked for: what a runtime reads, whether a format has static scales.

    Two foreign formats are also kinds of files and runtimes, which other rooms name.
    """
    for name in modules().keys() - LISTS_OF_PACKAGES:
        foreign = set().union(*(names for room, names in NAMED_AT_HOME.items() if room != room_of(name)))
        assert not (named := strings_of(name) & foreign), f"{name} names {', '.join(named)}"
    for name in modules().keys() - {"interchange"}:
        own = {name.removeprefix("interchange."), "onnx", "openvino"}
        assert not strings_of(name) & set(FOREIGN_FORMATS) - own, name


CHECKED_BY_THE_SESSION = {
    "check_request", "check_mask", "check_latents", "check_guidance", "check_steps", "check_sizes", "check_machine",
    "check_finite", "check_batch", "open_checkpoint", "open_observed", "fits", "Pool",
}  # fmt: skip


def calls_of(name: str) -> set[str]:
    """Functions and methods that a module calls, by their last names."""
    calls = [node.func for node in ast.walk(tree_of(modules()[name])) if isinstance(node, ast.Call)]
    return {getattr(call, "id", None) or f".{getattr(call, 'attr', '')}" for call in calls}


def test_only_the_session_opens_a_model_checks_it_and_makes_its_pool():
    """A check that every stage has to remember is forgotten by the next. Two have reasons to check earlier.

    One checks before minutes of hashing, the other ONNX files, where there is no checkpoint.
    """
    earlier = {"stages.opening": {"check_request"}, "stages.export_trt": {"check_machine"}}
    at_work = [name for name in modules() if room_of(name) in ROOMS[: ROOMS.index("stages") + 1]]
    for name in set(at_work) - {"stages.session"}:
        assert calls_of(name) & CHECKED_BY_THE_SESSION <= earlier.get(name, set()), name


# Files of Hydra, of the package, of a sweep's folder, and of a folder of hand_over, which has a list of its own.
ELSEWHERE = {"overrides.yaml", "_comparison.yaml", "published.md", "README.md", "page.html"}


def test_each_room_declares_the_files_that_it_writes_into_a_jobs_folder():
    """So what an interrupted job may have left is known without a list of other rooms' files."""
    assert {*stages.WRITES, *report.WRITES} == set(WRITTEN)
    assert {RECORD, FAILURE, PROVENANCE, REPORT} <= set(report.WRITES)
    declared = {pattern.rpartition("/")[2] for pattern in WRITTEN} | {"[0-9]*.png", "[0-9]*.webp"} | ELSEWHERE
    for name in [name for name in modules() if room_of(name) in ("stages", "report")]:
        divisions = [node for node in ast.walk(tree_of(modules()[name])) if isinstance(node, ast.BinOp)]
        behind_slashes = [node.right for node in divisions if isinstance(node.op, ast.Div)]
        for file in filter(None, map(file_in, behind_slashes)):
            assert any(fnmatch(file, pattern) for pattern in declared), f"{name} writes {file}"


def file_in(node: ast.expr) -> str | None:
    """The name of a file that stands behind a slash, with 0 for what is known only when it runs."""
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    name = "".join(str(getattr(piece, "value", "")) if isinstance(piece, ast.Constant) else "0" for piece in pieces)
    return name if re.search(r"\w\.[a-z]{2,7}$", name) else None


OPENERS = {
    "open", "open_regular", "read_regular",
    ".read_bytes", ".read_text", ".ZipFile", ".Unpickler", ".frombuf", ".safe_open",
}  # fmt: skip
OWN_FILES = {"checkpoints.nemo_entries", "checkpoints.nemo_networks", "models.clip_tokenizer"}  # of the package
UNPICKLING = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}


def test_untrusted_files_are_opened_by_their_readers_alone():
    """A checkpoint's bytes come from ``files``, which refuses pipes and bounds sizes. Nothing unpickles."""
    for name in modules():
        assert not {full.partition(".")[0] for full in imports_of(modules()[name])} & UNPICKLING, name
        if room_of(name) in ("checkpoints", "models", "names") and name not in OWN_FILES:
            assert not calls_of(name) & OPENERS, name


# Lines that each may have, lists of deliberate faults and corpora included. Lowered when one gets lighter; raised only
# with a sentence, in the message of the commit, that says what the lines are worth.
BUDGETS = {"sd_quant": 47_636, "addons": 2_650, "tests": 46_939, "benchmarks": 6_122}
TEXTS = {".py", ".diff", ".json"}


@pytest.mark.parametrize("folder", BUDGETS)
def test_nothing_gets_heavier(folder):
    files = [path for path in (HOME / folder).rglob("*") if path.suffix in TEXTS and "shipped" not in path.parts]
    lines = sum(path.read_bytes().count(b"\n") for path in files if folder == "tests" or path.suffix == ".py")
    assert lines <= BUDGETS[folder], f"{folder} has {lines} lines: take as many away as you add"


def test_no_test_imports_from_a_test():
    """What two need is in a helper module or in conftest.py; a case that is moved breaks no other."""
    for path in (HOME / "tests").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("tests.")):
                module = (node.module or "").rpartition(".")[2]
                assert not module.startswith("test_"), f"{path} imports from {module}"
                assert node.module or not [each for each in node.names if each.name.startswith("test_")], path
