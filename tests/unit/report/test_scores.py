"""A score is a function and a line of the table: whatever shows a run shows it too."""

import csv
import json
import pkgutil

import numpy as np
import pytest
import torch

from sd_quant.metrics import SCORES, Against, Score
from sd_quant.metrics.fidelity import fidelity
from sd_quant.report.record import read_record
from sd_quant.report.run_table import run_table
from sd_quant.report.summary import read_sweep, write_summary

from .sweeps import change_record, report_of, write_job

pytestmark = pytest.mark.commit


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The folder of a run with two scores of the test's own, whose second image is identical."""
    difference = Score("difference", "mean difference", Against.IMAGES, "", "{:.3f}", "levels", more_is_better=False,
                       columns=("difference", "difference_worst"))  # fmt: skip
    drift = Score("drift", "drift", Against.LATENTS, "", "{:.1f}", more_is_better=False, columns=("drift",))
    for score in (difference, drift):
        monkeypatch.setitem(SCORES, score.key, score)
    entry = {"mean": 3.0, "max": 3.0, "values": [3.0, None], "reason": "it equals its reference"}
    return change_record(write_job(tmp_path / "run"), {"fidelity.difference": entry, "fidelity.drift": [1.0, 2.0, 3.0]})


def test_an_added_score_is_in_the_table_of_a_run_in_the_summaries_and_on_the_page(run, without_plots):
    lines = [line.split() for line in run_table(read_record(run)).splitlines()]
    [note] = [line[0] for line in lines if line[-4:] == ["it", "equals", "its", "reference"]]
    assert ["mean", "difference", "3.000", "levels", note, "3.000", "levels"] in lines
    assert ["drift,", "last", "step", "3.0"] in lines

    write_summary(read_sweep(run))
    with (run / "summary.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert [row[name] for name in ("difference", "difference_worst", "drift")] == ["3", "3", "3"]
    lines = (run / "summary.md").read_text().splitlines()
    header, _, values = ([cell.strip() for cell in line.split("|")] for line in lines)
    shown = dict(zip(header, values, strict=True))
    assert shown["mean difference, levels"] == shown["worst mean difference, levels"] == "3.000"
    assert shown["drift"] == "3.0"

    text = report_of(read_sweep(run)).read_text()
    assert ">worst mean difference, levels<" in text and 'data-value="3.0">3.000</td>' in text
    assert "mean difference 3.000 levels" in text  # below the image


def test_the_functions_of_the_table_are_there_and_its_columns_and_keys_stay():
    assert all(callable(pkgutil.resolve_name(score.function)) for score in SCORES.values())
    assert all(key == score.key for key, score in SCORES.items())
    images, latents = np.zeros((1, 64, 64, 3), np.uint8), torch.zeros(1, 2, 4, 8, 8)
    scores = fidelity(images, images, latents, latents)
    assert set(scores) == {"psnr", "ssim", "lpips", "latent_sqnr_db", "latent_sqnr_reason"}
    json.dumps(scores, allow_nan=False)
    columns = [column for score in SCORES.values() for column in score.columns]
    assert columns == ["psnr_db", "psnr_worst_db", "ssim", "lpips", "latent_sqnr_db"]
