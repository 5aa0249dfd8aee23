import pytest

from sd_quant.metrics import SCORES, score_named
from sd_quant.report.rebuild import rebuild
from sd_quant.report.run_table import run_table
from sd_quant.report.score_tables import category_cell, category_tables, difference_text, score_tables
from sd_quant.report.summary import read_sweep

from .sweeps import change_record, record_of, write_job, write_plan, write_sweep

pytestmark = pytest.mark.commit

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


def test_the_closing_table_has_what_was_asked_for_with_its_interval():
    lines = run_table(record_of(24, 1.5, 0.5) | {"text_scores": SCORED}).splitlines()
    row = next(line for line in lines if line.startswith("HPSv2"))
    assert row.endswith("  -0.02 [-0.05, 0.01]") and "27.31" in row and "27.29" in row
    assert next(line for line in lines if line.startswith("FID")).split() == ["FID", "23.10", "23.94"]
    reward = next(line for line in lines if line.startswith("ImageReward")).split()
    assert reward[1] == "–" and f"{reward[2]} there is no vocab.txt" in "\n".join(lines)
    assert not any(line.startswith("CLIP score") for line in lines)


@pytest.mark.parametrize(("difference", "text"), [({"mean": 0.5, "low": None, "high": None}, "0.500"), (None, "")])
def test_a_difference_is_one_text(difference, text):
    record = {"text_scores": {"quantized": {"image_reward": {"value": 1.0, "difference": difference}}}}
    assert difference_text(score_named("image_reward"), record) == text


def test_a_sweep_has_a_line_for_each_recipe_that_was_scored(tmp_path):
    assert score_tables(write_sweep(tmp_path)) == []
    change_record(tmp_path / "level=1", {"text_scores": SCORED})
    (table,) = score_tables(read_sweep(tmp_path))
    assert table.titles == ["recipe", "HPSv2", "ImageReward", "FID"]
    assert table.cells == [["quant_level=1", "-0.02 [-0.05, 0.01]", "–", "23.94"]]
    assert "Scores that were asked for" in rebuild(tmp_path).read_text()


BY_CATEGORY = {
    "psnr": {"faces": {"prompts": 8, "mean": 33.411, "interval": [32.0, 34.822]},
             "text <b>": {"prompts": 1, "mean": 30.0, "interval": None}},
    "ocr": {"text <b>": {"prompts": 4, "mean": 0.5, "interval": [0.4, 0.6], "difference": -0.2,
                         "difference_interval": [-0.3, -0.1], "p": 0.01, "differs": True}},
}  # fmt: skip
BETTER = {"difference": 0.2, "difference_interval": [0.1, 0.3]}


def test_a_cell_says_worse_or_better_only_where_it_differs():
    entry = BY_CATEGORY["ocr"]["text <b>"]
    assert category_cell(score_named("ocr"), entry) == "0.500 ± 0.100 (-0.200 ± 0.100, worse)"
    assert category_cell(score_named("ocr"), entry | BETTER) == "0.500 ± 0.100 (0.200 ± 0.100, better)"
    assert category_cell(score_named("ocr"), entry | {"differs": False}) == "0.500 ± 0.100 (-0.200 ± 0.100)"
    assert category_cell(SCORES["lpips"], entry).endswith("better)")
    assert category_cell(SCORES["psnr"], None) == "–"


def test_each_score_with_categories_has_a_table_with_a_column_a_recipe(tmp_path):
    for name in ("a", "b", "c"):
        write_job(tmp_path / name)
    for name in ("a", "b"):
        found = BY_CATEGORY if name == "a" else {"psnr": BY_CATEGORY["psnr"]}
        change_record(tmp_path / name, {"by_category": found})
    sweep = write_plan(tmp_path, {name: {"alpha": name} for name in "abc"})
    psnr, ocr = category_tables(sweep)
    assert (psnr.heading, ocr.heading) == ("PSNR, dB, by category", "text read, by category")
    assert psnr.titles == [*ocr.titles, "alpha=b"] == ["category", "prompts", "alpha=a", "alpha=b"]
    assert psnr.cells == [["faces", "8", *["33.41 ± 1.41"] * 2], ["text <b>", "1", "30.00", "30.00"]]
    page = rebuild(tmp_path).read_text()
    assert "PSNR, dB, by category" in page and "text &lt;b&gt;" in page and "Holm" in page
