"""Scores wherever a run is shown: the noise floor, scores that were asked for, by category, and one that is added."""

import csv
import html
import pkgutil
import re

import pytest

from sd_quant.metrics import SCORES, Against, Score, score_named
from sd_quant.report import plots
from sd_quant.report import score_tables as tables_of
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import parsed
from sd_quant.report.run_table import run_table
from sd_quant.report.score_tables import beyond, category_cell, category_tables, difference_text, score_tables, told
from sd_quant.report.shipped import recommendation_of
from sd_quant.report.summary import read_sweep, write_summary

from .sweeps import change_record, record_of, report_of, write_job, write_plan, write_sweep

pytestmark = pytest.mark.commit

# The noise floor

PROMPTS = ("a red apple", "a pear", "a plum")


OTHERS = {"ssim": {"mean": 0.99, "values": [0.99] * 3}, "lpips": {"mean": 0.001, "values": [0.001] * 3}}
FLOOR = {
    "threads": OTHERS | {"psnr": {"mean": None, "min": None, "values": [None] * 3, "reason": "none"}},
    "batch": OTHERS | {"psnr": {"mean": 85.0, "min": 84.0, "values": [84.0, None, 86.0]}},
    "fp16": {"reason": "torch gave a latent that is not finite"},
    "bf16": OTHERS | {"psnr": {"mean": 143.9 / 3, "min": 47.8, "values": [48.1, 48.0, 47.8]}},
}


def record(decibels: float) -> dict:
    return parsed(record_of(decibels, 1.2, 0.5, PROMPTS) | {"noise_floor": FLOOR})


@pytest.mark.parametrize(("decibels", "place"), [(49, "above"), (48, "from"), (40, "below")])
def test_a_recipe_is_compared_prompt_by_prompt_in_a_line_for_each_way(decibels, place):
    """Identical images count as the best that is not."""
    found = beyond(record(decibels), "bf16")
    assert found.value == pytest.approx(decibels - 47.967, abs=0.001) and found.high - found.low < 0.6
    assert told(found).endswith(f" ± {found.reach:.1f} dB {place} it")
    assert beyond(record(30), "batch").value == pytest.approx(30 - (84 + 86 + 86) / 3)
    assert beyond(parsed(record_of(30, 1.2, 0.5)), "batch") is None
    repeated = beyond(parsed(record(decibels) | {"prompts": ["a pear"] * 3}), "bf16")
    assert repeated.value == pytest.approx(found.value) and not repeated.known, "three images of a prompt are no sample"
    table = run_table(record(decibels))
    (bf16,) = [line for line in table.splitlines() if line.startswith("bf16")]
    assert re.split(r"  +", bf16) == ["bf16", "47.97 dB", "47.80 dB", "0.9900", "0.0010", told(found)]
    assert re.search(r"^another number of +identical", table, re.MULTILINE)
    assert "no noise floor by fp16: torch gave a latent that is not finite" in table
    assert "again, by" in table and "again, by" not in run_table(record_of(40, 1.2, 0.5))


@pytest.mark.slow
def test_a_sweep_says_which_recipes_cannot_be_told_and_draws_the_floor(tmp_path):
    for name, decibels in (("a", 49.0), ("b", 48.0), ("c", 42.0)):
        change_record(write_job(tmp_path / name, decibels, prompts=PROMPTS), {"noise_floor": FLOOR})
    sweep = write_plan(tmp_path, {name: {"alpha": name} for name in "abc"})
    (table,) = tables_of.floor_tables(sweep)
    assert table.titles == ["recipe", "bf16, 48.0 dB", "another batch, 85.0 dB", "another number of threads, identical"]
    assert [cells[1].split()[-2] for cells in table.rows] == ["above", "from", "below"]
    axes = plots.figures(sweep, recommendation_of(sweep))["pareto_latency"].axes[0]
    drawn = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    texts = [text.get_text() for text in axes.texts]
    assert drawn == pytest.approx([47.967], abs=0.001) and axes.get_ylim()[1] < 60, "another batch would squeeze all"
    assert "noise floor by bf16, 48.0 dB: above it a difference is the arithmetic's" in texts
    assert "further up: another batch, 85.0 dB" in texts
    assert tables_of.floor_tables(read_sweep(write_job(tmp_path / "d"))) == []


# Scores by networks and photographs

NOT_ASKED = {"value": None, "reason": "metrics does not ask for it"}
SCORED = {
    "full_precision": {
        "hps": {"value": 27.31, "reason": None}, "fid": {"value": 23.1}, "clip_score": NOT_ASKED,
        "image_reward": {"value": None, "reason": "there is no vocab.txt"},
    },
    "quantized": {
        "hps": {"value": 27.29, "reason": None, "difference": {"mean": -0.02, "low": -0.05, "high": 0.012}},
        "fid": {"value": 23.94}, "clip_score": NOT_ASKED,
        "image_reward": {"value": None, "reason": "there is no vocab.txt", "difference": None},
        "mlperf": {"passes": None, "reason": "no CLIP score"},
    },
}  # fmt: skip
BY_CATEGORY = {
    "psnr": {"faces": {"prompts": 8, "mean": 33.411, "interval": [32.0, 34.822]},
             "text <b>": {"prompts": 1, "mean": 30.0, "interval": None}},
    "ocr": {"text <b>": {"prompts": 4, "mean": 0.5, "interval": [0.4, 0.6], "difference": -0.2,
                         "difference_interval": [-0.3, -0.1], "p": 0.01, "differs": True}},
}  # fmt: skip


def test_the_closing_table_has_the_scores_that_were_asked_for_with_their_intervals():
    lines = run_table(record_of(24, 1.5, 0.5) | {"text_scores": SCORED}).splitlines()
    row = next(line for line in lines if line.startswith("HPSv2"))
    assert row.endswith("  -0.02 [-0.05, 0.01]") and "27.31" in row and "27.29" in row
    assert next(line for line in lines if line.startswith("FID")).split() == ["FID", "23.10", "23.94"]
    reward = next(line for line in lines if line.startswith("ImageReward")).split()
    assert reward[1] == "–" and f"{reward[2]} there is no vocab.txt" in "\n".join(lines)
    assert not any(line.startswith("CLIP score") for line in lines)
    for difference, text in (({"mean": 0.5, "low": None, "high": None}, "0.500"), (None, "")):
        record = {"text_scores": {"quantized": {"image_reward": {"value": 1.0, "difference": difference}}}}
        assert difference_text(score_named("image_reward"), record) == text


def test_a_sweep_has_a_line_for_each_recipe_that_was_scored_and_one_for_each_category(tmp_path, without_plots):
    assert score_tables(write_sweep(tmp_path)) == category_tables(read_sweep(tmp_path)) == []
    for level, found in ((1, BY_CATEGORY), (3, {"psnr": BY_CATEGORY["psnr"]})):
        change_record(tmp_path / f"level={level}", {"by_category": found})
    change_record(tmp_path / "level=1", {"text_scores": SCORED, "noise_floor": FLOOR})
    sweep = read_sweep(tmp_path)
    (table,) = score_tables(sweep)
    assert table.titles == ["recipe", "HPSv2", "ImageReward", "FID"]
    assert table.cells == [["quant_level=1", "-0.02 [-0.05, 0.01]", "–", "23.94"]]
    psnr, ocr = category_tables(sweep)
    assert (psnr.heading, ocr.heading) == ("PSNR, dB, by category", "text read, by category")
    assert psnr.titles == [*ocr.titles, "quant_level=3"] == ["category", "prompts", "quant_level=1", "quant_level=3"]
    assert psnr.cells == [["faces", "8", *["33.41 ± 1.41"] * 2], ["text <b>", "1", "30.00", "30.00"]]
    assert ocr.cells == [["text <b>", "4", "0.500 ± 0.100 (-0.200 ± 0.100, worse)"]]
    page = html.unescape(rebuild(tmp_path).read_text())
    assert all(heading in page for heading in (tables_of.FLOOR, tables_of.ASKED, psnr.heading))
    entry = BY_CATEGORY["ocr"]["text <b>"]
    for score, changes, cell in (  # worse or better only where it differs
        ("ocr", {"difference": 0.2, "difference_interval": [0.1, 0.3]}, "0.500 ± 0.100 (0.200 ± 0.100, better)"),
        ("ocr", {"differs": False}, "0.500 ± 0.100 (-0.200 ± 0.100)"),
        ("lpips", {}, "0.5000 ± 0.1000 (-0.2000 ± 0.1000, better)"),
    ):
        assert category_cell(score_named(score), entry | changes) == cell


# A score that is added to the table


def test_an_added_score_is_in_the_table_of_a_run_in_the_summaries_and_on_the_page(tmp_path, monkeypatch, without_plots):
    """Its second image is identical."""
    columns = ("difference", "difference_worst")
    for score in (
        Score("difference", "mean difference", Against.IMAGES, "", "{:.3f}", "levels", False, columns=columns),
        Score("drift", "drift", Against.LATENTS, "", "{:.1f}", more_is_better=False, columns=("drift",)),
    ):
        monkeypatch.setitem(SCORES, score.key, score)
    entry = {"mean": 3.0, "max": 3.0, "values": [3.0, None], "reason": "it equals its reference"}
    changes = {"fidelity.difference": entry, "fidelity.drift": [1.0, 2.0, 3.0]}
    sweep = read_sweep(change_record(write_job(tmp_path / "run"), changes))

    lines = [line.split() for line in run_table(sweep.jobs[0].record).splitlines()]
    [note] = [line[0] for line in lines if line[-4:] == ["it", "equals", "its", "reference"]]
    assert ["mean", "difference", "3.000", "levels", note, "3.000", "levels"] in lines
    assert ["drift,", "last", "step", "3.0"] in lines

    write_summary(sweep)
    with (sweep.directory / "summary.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert [row[name] for name in ("difference", "difference_worst", "drift")] == ["3", "3", "3"]
    header, _, values = (line.split(" | ") for line in (sweep.directory / "summary.md").read_text().splitlines())
    shown = dict(zip(header, values, strict=True))
    titles = ("mean difference, levels", "worst mean difference, levels", "drift")
    assert [shown[title].strip() for title in titles] == ["3.000", "3.000", "3.0"]
    text = report_of(sweep).read_text()
    assert ">worst mean difference, levels<" in text and 'data-value="3.0">3.000</td>' in text
    assert "mean difference 3.000 levels" in text  # below the image


def test_the_functions_of_the_table_are_there_and_its_columns_and_keys_stay():
    assert all(callable(pkgutil.resolve_name(score.function)) for score in SCORES.values())
    assert {score.key: score.columns for score in SCORES.values()} == {
        "psnr": ("psnr_db", "psnr_worst_db"), "ssim": ("ssim",), "lpips": ("lpips",),
        "latent_sqnr_db": ("latent_sqnr_db",), "clip_score": (), "fid": (),
    }  # fmt: skip
    assert all(key == score.key for key, score in SCORES.items())
