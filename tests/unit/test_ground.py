"""The modules that stand below all rooms: text, numbers, devices, knobs, places, and the digest of the sources."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from sd_quant import devices, places
from sd_quant.devices import best_device, full_precision
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.knobs import SEED, SEEDS, near, nearest, seed_of
from sd_quant.numbers import finite, relative_error
from sd_quant.places import HOME, check_shipped, existing, folder_name, input_path, lasting, output_path, shown
from sd_quant.source import PACKAGE, everything, imported, source_digest
from sd_quant.text import escaped, one_line, printable

pytestmark = pytest.mark.commit

# Text and numbers

HOSTILE = "\x1b[31mred\n\u202edesrever\ud800"


def test_foreign_text_is_shown_without_control_sequences_and_cut_with_dots():
    assert printable(HOSTILE) == " [31mred  desrever "
    assert escaped(HOSTILE) == r"\x1b[31mred\n\u202edesrever\ud800"
    assert one_line(HOSTILE) == "[31mred desrever"
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


@pytest.mark.parametrize("torchs, cores, expected", [(4, 8, 4), (8, 2, 2), (1, 8, 1)])
def test_all_runtimes_have_torchs_threads_within_what_the_process_has(monkeypatch, torchs, cores, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(devices, "cores", lambda: cores)
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
