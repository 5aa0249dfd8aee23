"""The closing table of a run, and of a sweep."""

import re
from itertools import dropwhile, pairwise

import pytest

from sd_quant.metrics.intervals import mean_interval
from sd_quant.report.readings import Number, quotient
from sd_quant.report.rebuild import handed_over_tables
from sd_quant.report.record import ABSENT, parsed
from sd_quant.report.run_table import handed_over_table, run_table
from sd_quant.report.summary import sweep_table
from sd_quant.report.table import as_text, table_of_texts
from tests.nested import with_values

from .sweeps import latency_of, record_of

pytestmark = pytest.mark.commit


def record() -> dict:
    """Of a run whose text encoder left nothing and whose PSNR leaves an image out."""
    made = record_of(24.31, 1.5, 0.5)
    made["fidelity"]["psnr"]["reason"] = "1 of 8 images: identical"
    made["sizes_bytes"]["clip1"] = {}
    made["knobs"] |= {"format": "int8", "quant_level": 2.5, "alpha": 0.8}
    return made


def row(table: str, start: str, after: str = "") -> list[str]:
    """Cells of the first line beginning with ``start`` below the line beginning with ``after``."""
    lines = dropwhile(lambda line: not line.startswith(after), table.splitlines())
    return next(line for line in lines if line.startswith(start)).removeprefix(start).split()


def test_every_number_stands_in_its_place():
    table = run_table(record())
    assert "format=int8  quant_level=2.5  alpha=0.8" in table.splitlines()[0]
    for start, after, cells in (
        ("unet_xl", "size", "16.2 MiB 8.1 MiB 2.00x 28.6 MiB"),
        ("unet_xl", "one call, openvino", "2 20.00 ms 10.00 ms 2.00x"),
        ("torch, full precision", "", "1 800 ms"),
        ("openvino, full precision", "", "1 60.00 ms 13.33x"),
        ("openvino, quantized", "", "1 40.00 ms 20.00x 1.50x"),
        ("PSNR", "", "24.31 ± 0.64 dB [3] 24.26 dB"),
        ("SSIM", "", "0.9800 ± 0.0000 0.9700"),
        ("LPIPS", "", "0.0100 ± 0.0000 0.0200"),
        ("latent SQNR, last step", "", "15.3 dB"),
    ):
        assert row(table, start, after) == cells.split()
    assert "peak memory 2.00 GiB; 12.5 s in all; calibrate 12.5 s" in table and "SLOWER" not in table
    changes = {"sizes_bytes.unet_xl.plan": {"value": None, "reason": "-"}}
    for ends, cell in (([1.22, 1.27], "2.00x ± 0.78"), ({"value": None, "reason": "too few rounds"}, "2.00x\n")):
        changes["latency.openvino.unet_xl.2.speedup_interval"] = ends
        table = run_table(with_values(record(), changes))
        assert cell in table and "plan" not in table


def test_the_compiled_framework_is_a_second_baseline():
    image = {"image": {"1": {"full_precision": {"p50_ms": 100.0}}}}
    table = run_table(with_values(record(), {"latency.torch_compiled": image}))
    assert row(table, "torch_compiled, full") == ["1", "100", "ms"]  # its name goes on in the next line
    assert row(table, "openvino, quantized") == ["1", "40.00", "ms", "20.00x", "2.50x", "1.50x"]
    assert "one call, torch_compiled" not in table and "torch  torch_compiled  precision" in table


def test_each_null_is_a_dash_with_its_reason_and_each_mark_is_explained_once():
    table = run_table(record() | {"plans": {"unet_xl": {"attention": "it takes no unsigned codes"}}})
    notes = {line.split()[0]: line.partition(" ")[2] for line in table.splitlines() if line.startswith("[")}
    for part, before, reason in (
        ("unet_xl", "MiB", "attention is in high precision: it takes no unsigned codes"),
        ("vae", "–", "not quantized"),
        ("clip1", "–", "not in the record"),
    ):
        cells = row(table, part, "size")
        assert notes[next(mark for cell, mark in pairwise(cells) if cell == before and mark in notes)] == reason
    assert notes[row(table, "PSNR")[4]] == "1 of 8 images: identical"  # a number whose mean leaves images out
    assert len(set(notes.values())) == len(notes)
    identical = run_table(with_values(record(), {"fidelity.psnr.values": [24.3, 24.5, None]}))
    assert row(identical, "PSNR")[:2] == ["24.31", "dB"]  # no interval without them
    assert f"[1] {ABSENT}" in run_table({"reason": "the run's own, which is not a number's"})
    assert quotient(Number(3.0), Number(None, "b")) == (None, "b") and quotient(Number(3.0), Number(0)).value is None


def test_a_sentence_is_wrapped_beside_its_whole_title():
    lines = as_text(table_of_texts(["levers", ""], [["precise steps", "a sentence " * 12]]))
    assert [line[:14] for line in lines[2:]] == ["precise steps ", " " * 14]
    assert max(map(len, lines)) <= 80


SLOWER = with_values(
    latency_of(1.5)["openvino"], {"unet_xl.2.speedup": 0.8, "image.1.quantized.p50_ms": 75.0, "image.1.speedup": None}
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"degenerate": []}, ()),
        ({"degenerate": [{"index": index, "reason": "black"} for index in (3, 5, 6, 7, 9)]},
         ("DEGENERATE: image 3 is black; image 5 is black; image 6 is black; 2 more images are degenerate.",)),
        ({"latency": {"openvino": SLOWER}},
         ("SLOWER: unet_xl at batch 2 on openvino takes 1.25 times as long quantized as unquantized.",
          "SLOWER: prompt to image at batch 1 on openvino takes 1.25 times as long")),
        *(({"latency.openvino.unet_xl.2.speedup": speedup}, ()) for speedup in (1.0, 0.996)),  # two decimals show 1
        ({"latency.openvino.unet_xl.2.rounds": {"others": 0.4, "steal": 0.0, "reference_spread": 0.1}},
         ("BUSY: while unet_xl was timed on openvino, other processes took 40% of the processors' time",)),
        ({"latency.openvino.unet_xl.2.rounds": {"others": 0.01, "steal": 0.0, "reference_spread": 0.1}}, ()),
        ({"executed": {"count": 1, "of": 3, "fell_back": ["conv1", "conv2"]}},
         ("FLOAT: openvino computes 2 of 3 quantized layers in floating point; metrics.json names",)),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_run_stands_in_words_at_the_top(changes, said):
    table = run_table(with_values(record(), changes))
    assert len(re.findall("^[A-Z]{4,}: ", table, re.MULTILINE)) == len(said)
    assert all(line.startswith(words) for line, words in zip(table.splitlines()[2:], said, strict=False))


NULL = {"value": None, "reason": "the engine is missing"}


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"status": "failed", "reason": "the disk is full", "latency": None, "stages": {}},
        {"latency": NULL, "fidelity": NULL, "sizes_bytes": NULL},
        {"latency": {"tensorrt": {"unet_xl": NULL, "image": {"1": NULL}}}, "fidelity": {"latent_sqnr_db": []}},
        {"fidelity": {"latent_sqnr_db": [3.0, None], "latent_sqnr_reason": "NaN"}},
    ],
)
def test_an_unfinished_record_still_gives_a_table_and_its_reason_cannot_steer_the_terminal(broken):
    table = run_table(broken)
    assert ("unet_xl" in table) == ("unet_xl" in str(broken))
    assert broken.get("status", "unfinished") in table
    for reason in ("the engine is missing", "the disk is full", "NaN"):
        assert (reason in table) == (reason in str(broken))
    steering = run_table(broken | {"status": "failed", "reason": "layer \x1b[2J\r\x07evil\nSLOWER: nothing"})
    assert all(letter.isprintable() or letter == "\n" for letter in steering)
    assert steering.splitlines()[0] == "failed: layer  [2J  evil SLOWER: nothing"


def test_what_was_handed_over_has_an_interval_and_jobs_exports_stand_in_one_table(small_sweep):
    psnr = {"psnr": {"values": [30.0, None, 32.0, 37.0]}}
    shown = f"33.0 ± {mean_interval([30.0, 32.0, 37.0]).reach:.1f} dB"
    entry = {"quantized": 95, "of": 150, "bytes": {"a": 2**20, "b": None}, "fidelity": psnr}
    for changes, cells in (
        ({}, ["95 of 150", shown, "1.0 MiB"]),
        ({"fidelity": None}, ["95 of 150", "–", "1.0 MiB"]),
        ({"fidelity": {"psnr": {"values": [30.0]}}}, ["95 of 150", "30.0 dB", "1.0 MiB"]),
        ({"parts": {"clip1": {"quantized": 12, "of": 12}}}, ["95 of 150, clip1 12 of 12", shown, "1.0 MiB"]),
    ):
        assert handed_over_table({"gguf": entry | changes}).rows == [["gguf", *cells]]
    assert "gguf" in run_table(record() | {"hand_over": {"gguf": entry}})
    assert handed_over_tables(small_sweep) == [] and handed_over_table({}).rows == []
    for job in small_sweep.jobs[:4]:
        job.record["hand_over"] = parsed({"hand_over": {"gguf": entry}})["hand_over"]
    (table,) = handed_over_tables(small_sweep)
    assert table.rows == [[f"level={level}", "gguf", "95 of 150", shown, "1.0 MiB"] for level in "1234"]
    assert len(table.titles) == len(table.rows[0])


def test_a_sweeps_table_has_a_line_for_each_recipe_and_why_some_have_no_figures(small_sweep):
    """It fits a terminal of 80 columns and parts no figure."""
    head, _, *recipes, empty, failed, unfinished = sweep_table(small_sweep).splitlines()
    assert head.split("  ")[0] == "recipe" and "denoiser speedup" in head
    names = [*(f"level={level}" for level in "1234"), "level=5 (failed)", "level=6 (unfinished)"]
    assert [line.split("  ")[0] for line in recipes] == names and not empty
    assert "44.00 ± 0.64" in recipes[0] and "1.33x" in recipes[1] and "–" in recipes[4]
    assert failed == "level=5: the disk is full" and unfinished.startswith("level=6: it left no record")
    for row in small_sweep.rows:
        row["job"] += ",calibration_prompts=outputs/prompts.txt,alpha=0.5"
    table = sweep_table(small_sweep).partition("\n\n")[0].splitlines()
    assert max(map(len, table)) == 80 and sum(" ± 0.64 " in line and "x ± 0.0" in line for line in table) == 4
    assert "prompts.txt,alpha=0.5" in table
