import pytest

from sd_quant.metrics import SCORES
from sd_quant.report.named_scores import difference_text, score_tables
from sd_quant.report.rebuild import rebuild
from sd_quant.report.run_table import run_table
from sd_quant.report.summary import read_sweep

from .sweeps import change_record, record_of, write_sweep

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


def test_without_files_there_is_no_table():
    for entry in ({"value": None, "reason": "no weights were named in metrics"}, None):
        assert "by named files" not in run_table(record_of(24, 1.5, 0.5) | {"text_scores": entry})


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        ({"mean": -0.021, "low": -0.049, "high": 0.011}, "-0.021 [-0.049, 0.011]"),
        ({"mean": 0.5, "low": None, "high": None}, "0.500"),
        (None, ""),
    ],
)
def test_a_difference_is_one_text(difference, text):
    record = {"text_scores": {"quantized": {"image_reward": {"value": 1.0, "difference": difference}}}}
    assert difference_text(SCORES["image_reward"], record) == text


def test_a_sweep_has_a_line_for_each_recipe_that_was_scored(tmp_path):
    assert score_tables(write_sweep(tmp_path)) == []
    change_record(tmp_path / "level=1", {"text_scores": SCORED})
    (table,) = score_tables(read_sweep(tmp_path))
    assert table.titles == ["recipe", "HPSv2", "ImageReward", "FID"]
    assert table.cells == [["quant_level=1", "-0.02 [-0.05, 0.01]", "–", "23.94"]]
    assert "Scores that were asked for" in rebuild(tmp_path).read_text()
