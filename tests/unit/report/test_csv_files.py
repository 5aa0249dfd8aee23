import csv

import pytest

from sd_quant.report.csv_files import write_csv

pytestmark = pytest.mark.commit


def test_text_that_starts_a_formula_is_disarmed(tmp_path):
    formulas = [f"{start}cmd|' /C calc'!A0" for start in "=+-@\t\r"]
    write_csv([{"name": formula} for formula in formulas], tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="", encoding="utf-8") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [f"'{formula}" for formula in formulas]
