"""Scores wherever a run is shown: those that were asked for, and one that is added."""

import csv
import html
import pkgutil

import pytest

from sd_quant.metrics import SCORES, Against, Score, score_named
from sd_quant.report import score_tables as tables_of
from sd_quant.report.rebuild import rebuild
from sd_quant.report.run_table import run_table
from sd_quant.report.score_tables import difference_text, score_tables
from sd_quant.report.summary import read_sweep, write_summary

from .sweeps import change_record, record_of, report_of, write_job, write_sweep

pytestmark = pytest.mark.commit

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


def test_a_sweep_has_a_line_for_each_recipe_that_was_scored(tmp_path, without_plots):
    assert score_tables(write_sweep(tmp_path)) == []
    change_record(tmp_path / "level=1", {"text_scores": SCORED})
    sweep = read_sweep(tmp_path)
    (table,) = score_tables(sweep)
    assert table.titles == ["recipe", "HPSv2", "ImageReward", "FID"]
    assert table.cells == [["quant_level=1", "-0.02 [-0.05, 0.01]", "–", "23.94"]]
    page = html.unescape(rebuild(tmp_path).read_text())
    assert tables_of.ASKED in page


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
