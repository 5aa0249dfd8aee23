"""Which recipes cannot be told from full precision, by the floor of each way to compute it."""

import re

import pytest

from sd_quant.report import plots, rebuild, score_tables
from sd_quant.report.run_table import run_table
from sd_quant.report.shipped import recommendation_of
from sd_quant.report.summary import read_sweep

from .sweeps import change_record, record_of, write_job, write_plan

pytestmark = pytest.mark.commit

PROMPTS = ("a red apple", "a pear", "a plum")


def scored(*psnr: float | None) -> dict:
    known = [value for value in psnr if value is not None]
    mean = sum(known) / len(known) if known else None
    return {
        "psnr": {"mean": mean, "min": min(known, default=None), "values": [*psnr], "reason": None if mean else "none"},
        "ssim": {"mean": 0.99, "values": [0.99] * len(psnr)},
        "lpips": {"mean": 0.001, "values": [0.001] * len(psnr)},
    }


FLOOR = {
    "threads": scored(None, None, None),
    "batch": scored(84.0, None, 86.0),
    "fp16": {"reason": "torch gave a latent that is not finite"},
    "bf16": scored(48.1, 48.0, 47.8),
}


def record(decibels: float) -> dict:
    return record_of(decibels, 1.2, 0.5, PROMPTS) | {"noise_floor": FLOOR}


@pytest.mark.parametrize(("decibels", "place"), [(49, "above"), (48, "from"), (40, "below")])
def test_a_recipe_is_compared_prompt_by_prompt(decibels, place):
    """Identical images count as the best that is not."""
    found = score_tables.beyond(record(decibels), "bf16")
    assert found.value == pytest.approx(decibels - 47.967, abs=0.001) and found.high - found.low < 0.6
    assert score_tables.told(found).endswith(f" ± {found.reach:.1f} dB {place} it")
    assert score_tables.beyond(record(30), "batch").value == pytest.approx(30 - (84 + 86 + 86) / 3)
    assert score_tables.beyond(record_of(30, 1.2, 0.5), "batch") is None
    repeated = score_tables.beyond(record(decibels) | {"prompts": ["a pear"] * 3}, "bf16")
    assert repeated.value == pytest.approx(found.value) and not repeated.known, "three images of a prompt are no sample"


def test_the_closing_table_has_a_line_a_way_and_the_reasons():
    table = run_table(record(40))
    (bf16,) = [line for line in table.splitlines() if line.startswith("bf16")]
    assert re.split(r"  +", bf16) == ["bf16", "47.97 dB", "47.80 dB", "0.9900", "0.0010", "8.0 ± 0.1 dB below it"]
    assert re.search(r"^another number of +identical", table, re.MULTILINE)
    assert "no noise floor by fp16: torch gave a latent that is not finite" in table
    assert "again, by" in table and "again, by" not in run_table(record_of(40, 1.2, 0.5))


@pytest.mark.slow
def test_the_report_says_which_recipes_cannot_be_told_and_draws_the_floor(tmp_path, monkeypatch):
    for name, decibels in (("a", 49.0), ("b", 48.0), ("c", 42.0)):
        change_record(write_job(tmp_path / name, decibels, prompts=PROMPTS), {"noise_floor": FLOOR})
    sweep = write_plan(tmp_path, {name: {"alpha": name} for name in "abc"})
    (table,) = score_tables.floor_tables(sweep)
    assert table.titles == ["recipe", "bf16, 48.0 dB", "another batch, 85.0 dB", "another number of threads, identical"]
    assert [cells[1].split()[-2] for cells in table.rows] == ["above", "from", "below"]
    monkeypatch.setattr(rebuild, "write_plots", lambda drawn, folder: None)
    monkeypatch.setattr(rebuild, "write_report", lambda sweep, advice, drawn, tables, votes: tables)
    (shown,) = rebuild.rebuild(tmp_path)
    assert shown.heading == score_tables.FLOOR
    axes = plots.figures(sweep, recommendation_of(sweep))["pareto_latency"].axes[0]
    drawn = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    texts = [text.get_text() for text in axes.texts]
    assert drawn == pytest.approx([47.967], abs=0.001) and axes.get_ylim()[1] < 60, (
        "the batch's would squeeze all others"
    )
    assert "noise floor by bf16, 48.0 dB: above it a difference is the arithmetic's" in texts
    assert "further up: another batch, 85.0 dB" in texts
    plain = write_job(tmp_path / "d")
    assert score_tables.floor_tables(read_sweep(plain)) == []
