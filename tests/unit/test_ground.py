"""The modules that stand below all rooms: text, numbers, devices, knobs, places, and the digest of the sources."""

import ctypes
import io
import logging
import math
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper
from PIL import Image

from sd_quant import devices, places, process
from sd_quant import progress as module
from sd_quant.devices import best_device, full_precision
from sd_quant.engines import load_engine
from sd_quant.errors import (
    CANCELLED,
    LONGEST,
    ArtifactError,
    ConfigError,
    ResourceError,
    SdQuantError,
    exit_with_its_code,
    of_the_machine,
)
from sd_quant.knobs import SEED, SEEDS, near, nearest, seed_of
from sd_quant.metrics.memory import StageTimer
from sd_quant.numbers import finite, relative_error
from sd_quant.places import HOME, check_shipped, existing, folder_name, input_path, lasting, output_path, shown
from sd_quant.progress import ConsoleFormatter, progress
from sd_quant.source import PACKAGE, everything, imported, source_digest
from sd_quant.text import escaped, one_line, printable
from tests.graphs import save_graph

pytestmark = pytest.mark.commit

# Text and numbers


def test_foreign_text_is_shown_without_control_sequences_and_cut_with_dots():
    hostile = "\x1b[31mred\n\u202edesrever\ud800"
    assert printable(hostile) == " [31mred  desrever "
    assert escaped(hostile) == r"\x1b[31mred\n\u202edesrever\ud800"
    assert one_line(hostile) == "[31mred desrever"
    assert one_line("a page\n\n  of a library's words", 9) == "a page..."
    assert one_line("  nine\nletters ", 12) == "nine letters"
    assert one_line(ValueError()) == ""


def test_relative_errors_are_finite_or_none():
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), reference) is None
    assert relative_error(reference, torch.tensor([3.0, math.nan])) is None
    with pytest.raises(ArtifactError, match="expected one shape; give both the same inputs"):
        relative_error(reference, torch.ones(3))
    assert [finite(value) for value in (1.5, math.nan, math.inf, -math.inf)] == [1.5, None, None, None]


# Devices


def test_scores_are_computed_in_fp32_and_nothing_else_changes():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled
    with full_precision() as device:
        assert device == best_device()
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled) == (False, before[1])
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled) == before


def test_all_runtimes_have_torchs_threads_within_what_the_process_has(monkeypatch):
    for torchs, cores, expected in ((4, 8, 4), (8, 2, 2), (1, 8, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda torchs=torchs: torchs)
        monkeypatch.setattr(devices, "cores", lambda cores=cores: cores)
        assert devices.threads() == expected


# Names of knobs that may have been meant, and seeds

KNOBS = [
    "quant_level", "alpha", "calib_size", "quantize.n_steps", "quantize.batch_size", "quantize.seed", "infer.steps",
    "infer.batch_size", "infer.prompts", "infer.seed", "model.prompts", "model.parts", "trt.sizes", "unet_xl",
]  # fmt: skip


def test_only_what_can_be_meant_is_near():
    meant = {
        "quant_levle": ["quant_level"],
        "steps": ["infer.steps"],  # without its section; and quantize.n_steps is less like it
        "infer.n_steps": ["quantize.n_steps"],
        "quantize.n_step": ["quantize.n_steps"],
        "infr.seed": ["infer.seed", "quantize.seed"],
        "quantize.batchsize": ["quantize.batch_size", "infer.batch_size"],  # its own section first
        "promts": ["infer.prompts", "model.prompts"],  # and not model.parts
        "calib": ["calib_size"],  # a part of it
        "quant": ["quant_level"],
        "to": [],
        "guidance": [],
    }
    assert {name: nearest(name, KNOBS) for name in meant} == meant
    assert nearest("quant_level", [name for name in KNOBS if name != "quant_level"]) == []  # infer.py has unet_xl
    assert nearest("int4", ["int8", "int4_w4a4"]) == ["int4_w4a4"]
    assert near("noise", ["b", "a"]) == "known are a, b"
    assert near("noise", KNOBS * 2) == "none is like it; --help lists all"
    assert near("alhpa", KNOBS) == "did you mean alpha?"


def test_the_seed_behind_the_last_is_the_first():
    assert [seed_of(7, 0), seed_of(2**32, 1), seed_of(SEEDS - 1, 0)] == [7, 2**32 + 1, SEEDS - 1]
    assert [seed_of(SEEDS - 1, number) for number in (1, 2, SEEDS)] == [0, 1, SEEDS - 1]
    for seed in (0, 2**32 + 1, 2**63 - 1, SEEDS - 1):  # as torch takes and keeps it
        assert SEED.holds(seed) and torch.Generator().manual_seed(seed).initial_seed() == seed
    assert not SEED.holds(-1) and not SEED.holds(SEEDS)


# Places


def test_what_the_user_names_is_looked_for_here_first_then_among_what_ships_and_results_go_here(tmp_path, monkeypatch):
    monkeypatch.chdir(here := tmp_path)
    mine = here / "conf/quantize.yaml"
    assert input_path("conf/quantize.yaml") == HOME / "conf/quantize.yaml" and output_path("conf/quantize.yaml") == mine
    assert input_path("no/such") == output_path("no/such") == here / "no/such"
    mine.parent.mkdir()
    mine.touch()
    assert input_path("conf/quantize.yaml") == input_path(mine) == mine
    assert (shown(here / "outputs/one"), shown(Path("/no/such"))) == ("outputs/one", "/no/such")
    for path, looked in (("no/such", f" (looked in {here} and {HOME})"), ("/no/such", "")):
        with pytest.raises(ConfigError) as refused:
            existing("model.path", path, "another")
        assert str(refused.value) == f"model.path names {path}, which does not exist{looked}; give another"
    assert existing("model.path", "docs", "another") == HOME / "docs"
    # a record keeps paths that lead to the same file from elsewhere
    kept = {"conf/quantize.yaml": str(mine), "docs/knobs.md": "docs/knobs.md", "/no/such": "/no/such"}
    assert {path: lasting(path) for path in kept} == kept


def test_an_installation_without_its_configuration_is_refused(tmp_path, monkeypatch):
    check_shipped()
    monkeypatch.setattr(places, "CONF", tmp_path / "conf")
    with pytest.raises(ResourceError, match="was installed without its configuration; install it again"):
        check_shipped()


def test_a_name_of_a_folder_leads_nowhere_else_and_is_no_files():
    named = {
        "a.gguf": "a.gguf", "quant_level=2.5,alpha=auto": "quant_level=2.5,alpha=auto", "a b;c": "a-b-c",
        "..": "unnamed", ".": "unnamed", "": "unnamed", "../../etc": "-..-etc", ".lock": "lock", ".hydra": "hydra",
        "report.html": "report-html", "sweep.JSON": "sweep-JSON", "a.csv": "a-csv", "layers.png": "layers-png",
    }  # fmt: skip
    assert {text: folder_name(text) for text in named} == named
    long, other = folder_name("a" * 300), folder_name("a" * 301)
    assert len(long) < 140 and long != other


# The digest of the sources: an edit of any file that is imported changes it, and of no other

STATISTICS = ("calibration.collection", "checkpoints.kinds")


@pytest.mark.slow
def test_an_edit_counts_where_the_file_is_imported_and_nowhere_else(tmp_path):
    package = tmp_path / "sd_quant"
    shutil.copytree(PACKAGE, package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    files, before = imported(STATISTICS, package), source_digest(*STATISTICS, package=package)
    whole = source_digest(package=package)
    assert whole == source_digest()
    some = sorted(everything(package))[::20]
    assert {path in files for path in some} == {True, False}
    for path in some:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert source_digest(package=package) != whole, path
        assert (source_digest(*STATISTICS, package=package) != before) == (path in files), path
        path.write_bytes(content)


@pytest.mark.parametrize("modules, counts, does_not", [
    (STATISTICS, ["models/sd3.py", "calibration/hooks.py", "names/sgm.py", "files/archive.py"], ["report/page.py"]),
    (("export.parts",), ["quantization/formats/nvfp4.py", "export/nodes.py"], ["metrics/lpips.py", "cli.py"]),
    (("inference.parity",), ["engines/onnxruntime.py", "engines/tensorrt/run.py"], ["stages/quantize.py"]),
])  # fmt: skip
def test_modules_that_a_table_names_count_as_imported(modules, counts, does_not):
    files = {path.relative_to(PACKAGE).as_posix() for path in imported(modules, PACKAGE)}
    assert files >= set(counts) and not files & set(does_not)


TOO_MANY = 1 << 50
FULL = Path("/dev/full")  # every write to it finds no space


def test_what_fails_as_ctrl_c_passes_is_cancelled(capsys):
    """As where it comes between two steps of ``with torch.device``, whose end finds nothing to pop then."""

    def interrupted():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    with pytest.raises(SystemExit) as ended:
        exit_with_its_code(interrupted)
    assert ended.value.code == CANCELLED == 130
    assert "cancelled; nothing half written is left" in capsys.readouterr().err


def by_engine(name: str, folder: Path) -> None:
    """The product of two small inputs is a petabyte."""
    node, inputs = helper.make_node("MatMul", ["x", "y"], ["product"]), {"x": ["n", 1], "y": [1, "n"]}
    path = save_graph(folder / "a.onnx", [node], {}, inputs, {"product": ["n", "n"]}, np.float32)
    # with two threads, because with one OpenVINO 2026.4 gives a tensor of no elements and says nothing
    load_engine(name, path, threads=2)(x=torch.zeros(1 << 24, 1), y=torch.zeros(1, 1 << 24))


@pytest.mark.parametrize("ask", [
    lambda folder: torch.empty(TOO_MANY), lambda folder: np.empty(TOO_MANY, np.float32),
    lambda folder: bytearray(TOO_MANY), partial(by_engine, "onnxruntime"), partial(by_engine, "openvino"),
])  # fmt: skip
def test_too_little_memory(ask, tmp_path):
    with pytest.raises(Exception) as complaint, StageTimer()("pictures"):
        ask(tmp_path)
    refused = of_the_machine(complaint.value)
    assert isinstance(refused, ResourceError) and refused.exit_code == 4
    words = str(refused)
    assert words.startswith("out of memory in the stage pictures, with up to ") and " GB of memory (" in words
    assert words.endswith("or take a larger machine") and len(words) <= LONGEST and words.isprintable()
    with pytest.raises(ArtifactError) as complaint:
        try:
            ask(tmp_path)
        except Exception as error:
            raise ArtifactError("the file cannot be compiled") from error  # as an engine says, whatever the reason
    assert str(of_the_machine(complaint.value)).startswith("out of memory (")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("write", [
    lambda file: file.write(b"text"), lambda file: Image.new("RGB", (64, 64)).save(file, format="png"),
    lambda file: np.save(file, np.zeros(100_000)), lambda file: torch.save(torch.zeros(100_000), file),
])  # fmt: skip
def test_a_full_disk(write):
    with FULL.open("wb", buffering=0) as file, pytest.raises(Exception) as complaint:
        write(file)
    assert str(of_the_machine(complaint.value)).startswith("the disk is full")


def test_anything_else_is_not_the_machines_and_a_resource_error_keeps_its_words():
    quoting = ArtifactError("'No space left on device, out of memory' is no prompt")  # a refusal quotes what it refuses
    for error in (ValueError("no"), SdQuantError("no"), FileNotFoundError(2, "No such file"), KeyError(), quoting):
        assert of_the_machine(error) is None
    error = ResourceError("this machine has no GPU")
    assert of_the_machine(error) is error


def test_a_sentence_that_quotes_too_much_keeps_its_beginning_and_its_advice():
    words = str(SdQuantError("the file names xxx" + "x\x1b[2J\n\u202e" * 10_000 + "; fetch it again"))
    assert len(words) == LONGEST and words.isprintable()
    assert words.startswith("the file names xxx") and words.endswith("; fetch it again")


def test_no_thread_for_want_of_addresses_is_too_little_memory():
    """What OpenVINO says under ``ulimit -v``, below the sentence of its engine."""
    refused = ArtifactError("OpenVINO cannot compile a.onnx: Resource temporarily unavailable")
    refused.__cause__ = RuntimeError("Exception from src/plugins/plugin.cpp:54: Resource temporarily unavailable")
    assert str(of_the_machine(refused)).startswith("out of memory (Exception from")
    for said in ("Failed to serialize proto", "'onnx.ModelProto': Arena alloc failed", "dev/plugin.cpp:54: can't alloc",
                 "a.so: failed to map segment from shared object"):  # fmt: skip
        assert isinstance(of_the_machine(RuntimeError(said)), ResourceError)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(files)``: the kernel says this, and nothing else."""

    def written(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(process, "Path", lambda path: Path(f"{tmp_path}{path}"))

    return written


@pytest.mark.parametrize("files, quota, cores", [
    ({"cpu.max": "250000 100000"}, 2.5, 2), ({"cpu.max": "50000 100000"}, 0.5, 1), ({"cpu.max": "max 100000"}, None, 8),
    ({"cpu/cpu.cfs_quota_us": "6400000", "cpu/cpu.cfs_period_us": "100000"}, 64.0, 8),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 8), ({}, None, 8),
])  # fmt: skip
def test_cores_are_those_of_the_process_within_the_containers_share(monkeypatch, machine, files, quota, cores):
    machine({f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert (process.quota_of_cgroup(), process.cores()) == (quota, cores)


@pytest.mark.parametrize("limit, expected", [("max", 8 * 2**20), ("6000000", 2_000_000), ("90000000", 8 * 2**20)])
def test_the_memory_that_is_available_is_bounded_by_a_containers_limit(monkeypatch, machine, limit, expected):
    """In a container the kernel counts the memory of the whole machine."""
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8192 kB", "sys/fs/cgroup/memory.max": limit}
    machine(files | {"sys/fs/cgroup/memory.current": "4000000"})
    assert process.available_memory_bytes() == expected
    monkeypatch.setattr(process, "address_space_bytes", lambda: 1e6)
    assert process.available_memory_bytes() == 1_000_000


def test_not_even_compiled_code_writes_to_standard_output(capfd):
    libc = ctypes.CDLL(None)
    libc.printf(b"before\n")
    libc.fflush(None)
    with pytest.raises(ZeroDivisionError), process.without_output():
        libc.printf(b"compiled\n")
        raise ZeroDivisionError
    libc.printf(b"after\n")
    libc.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


def test_the_address_space_that_is_left(monkeypatch):
    assert process.address_space_bytes() == math.inf
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (mapped + 10**9, resource.RLIM_INFINITY))
    assert process.address_space_bytes() == pytest.approx(1e9, abs=1e8)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert process.address_space_bytes() == 0


LEAVES_A_WORKER = """
import os
from joblib import Parallel, delayed
from sd_quant.process import end_at_once
print(*Parallel(n_jobs=2)(delayed(os.getpid)() for _ in range(4)), flush=True)
end_at_once(3)
"""


def test_a_process_that_ends_at_once_leaves_no_worker_of_joblib(tmp_path):
    """They would keep their memory and the terminal for five minutes more."""
    pytest.importorskip("joblib")
    with (tmp_path / "printed").open("w") as file:  # a pipe would be waited for
        code = subprocess.run([sys.executable, "-c", LEAVES_A_WORKER], stdout=file, timeout=200).returncode
    workers = (tmp_path / "printed").read_text().split()
    assert code == 3 and len(workers) == 4
    assert not [pid for pid in workers if Path("/proc", pid).exists()]


def test_a_command_whose_reader_is_gone_goes_on_to_its_end(tmp_path):
    """As in ``quantize | head``: no traceback, and its files are written."""
    code = f"""if True:
        from pathlib import Path
        from sd_quant.errors import exit_with_its_code

        def main():
            for _ in range(3):
                print("a line" * 10000, flush=True)
            Path({str(tmp_path / "done")!r}).touch()

        exit_with_its_code(main)
    """
    ended = subprocess.run(["sh", "-c", f"{sys.executable} - | head -c 3"], input=code, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("a l", "") and (tmp_path / "done").exists()


def test_a_confined_block_has_a_time_and_a_memory_and_ends_without_a_trace():
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(TimeoutError, match="more than 0 s"), process.confined(0.2):
        while True:
            pass
    with pytest.raises(MemoryError), process.confined(60, memory=1e8):
        bytearray(10**9)
    with process.confined(60), process.confined(60, memory=1e9):
        bytearray(10**8)
    after = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    assert before == after and signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_a_line_says_how_far_work_is_and_how_much_is_left_by_what_it_took_so_far(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    work = module.Work("calibrate", 10)
    now[0] += 36
    assert work.line() == "calibrate: 0 of 10, 36 s so far"
    work.done = 3
    assert work.line() == "calibrate: 3 of 10, about 84 s to go"
    now[0] += 200
    assert work.line() == "calibrate: 3 of 10, about 9 min to go"
    assert module.Work("export", started=now[0] - 40).line() == "export: 40 s so far"


def test_nothing_is_silent_for_long_and_who_prints_lines_is_not_interrupted(monkeypatch, caplog):
    """Neither one unit of work that takes long, nor what has no units; the innermost is named, in whatever thread."""

    def heard(line: str) -> bool:
        """Within half a minute."""
        return any(line in caplog.text or time.sleep(0.01) for _ in range(3000))

    monkeypatch.setattr(module, "QUIET", 0.02)
    monkeypatch.setattr(module, "POLLED_EVERY", 0.005)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "sd_quant.progress"), module.working("latency"):
        assert heard("latency: ")
        with progress(5, "rounds") as advance:
            advance()
            assert heard("rounds: 1 of 5, about ")
    assert sys.stderr.getvalue() == "" and module.GOING_ON == []
    caplog.clear()
    monkeypatch.setattr(ConsoleFormatter, "last_line", time.monotonic() + 60)
    with caplog.at_level(logging.INFO, "sd_quant.progress"), module.working("latency"):
        time.sleep(0.1)
    assert caplog.messages == []


def test_a_terminal_gets_a_bar(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.isatty = lambda: True
    with caplog.at_level(logging.INFO), progress(2, "calibrate") as advance:
        assert "calibrate:   0%" in sys.stderr.getvalue()
        advance()
        time.sleep(0.15)  # the bar redraws ten times a second
        advance()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(ConsoleFormatter())
        handler.handle(logging.makeLogRecord({"msg": "export", "levelno": logging.INFO}))
    assert "calibrate: 100%" in sys.stderr.getvalue() and "2/2" in sys.stderr.getvalue()
    assert re.search(r"\r +\r\d\d:\d\d:\d\d export\n", sys.stderr.getvalue())  # in the bar's place, not behind it
    assert caplog.messages == []


def test_what_a_command_ends_with_and_what_libraries_tell_is_kept_from_the_console():
    said = logging.makeLogRecord({"name": "sd_quant.cli", "levelno": logging.ERROR, "said_at_the_end": True})
    ours, library, warning = (
        logging.makeLogRecord({"name": name, "levelno": level})
        for name, level in (("sd_quant.x", logging.INFO), ("onnx_ir", logging.INFO), ("onnx_ir", logging.WARNING))
    )
    shown = [module.ConsoleFilter().filter(record) for record in (said, ours, library, warning)]
    assert shown == [False, True, False, True]
    for level, said in ((logging.INFO, " export: 3 s"), (logging.WARNING, " WARNING: export: 3 s")):
        record = logging.LogRecord("sd_quant.x", level, "x.py", 1, "export: %s s", (3,), None)
        assert re.fullmatch(rf"\d\d:\d\d:\d\d{said}", ConsoleFormatter().format(record))
