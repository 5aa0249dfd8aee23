import pytest

from sd_quant.metrics import SCORES
from sd_quant.report import rebuild
from sd_quant.report.named_scores import category_cell, category_tables

from .sweeps import change_record, write_job, write_plan

pytestmark = pytest.mark.commit

BY_CATEGORY = {
    "psnr": {"faces": {"prompts": 8, "mean": 33.411, "interval": [32.0, 34.822]},
             "text <b>": {"prompts": 1, "mean": 30.0, "interval": None}},
    "ocr": {"text <b>": {"prompts": 4, "mean": 0.5, "interval": [0.4, 0.6], "difference": -0.2,
                         "difference_interval": [-0.3, -0.1], "p": 0.01, "differs": True}},
}  # fmt: skip


BETTER = {"difference": 0.2, "difference_interval": [0.1, 0.3]}


def test_a_cell_says_worse_or_better_only_where_it_differs():
    entry = BY_CATEGORY["ocr"]["text <b>"]
    assert category_cell(SCORES["ocr"], entry) == "0.500 ± 0.100 (-0.200 ± 0.100, worse)"
    assert category_cell(SCORES["ocr"], entry | BETTER) == "0.500 ± 0.100 (0.200 ± 0.100, better)"
    assert category_cell(SCORES["ocr"], entry | {"differs": False}) == "0.500 ± 0.100 (-0.200 ± 0.100)"
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
    assert psnr.titles == ["category", "prompts", "alpha=a", "alpha=b"] and ocr.titles == [
        "category",
        "prompts",
        "alpha=a",
    ]
    assert psnr.cells == [["faces", "8", *["33.41 ± 1.41"] * 2], ["text <b>", "1", "30.00", "30.00"]]
    page = rebuild.rebuild(tmp_path).read_text()
    assert "PSNR, dB, by category" in page and "text &lt;b&gt;" in page and "Holm" in page
