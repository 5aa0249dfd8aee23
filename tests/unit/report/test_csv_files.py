import csv

import numpy as np
import pytest

from sd_quant.report.csv_files import write_csv


def test_cells_read_back(tmp_path):
    path = tmp_path / "layers.csv"
    rows = [
        {"name": "down.0, conv", "alpha": 0.123456789, "axis": -1, "scale": np.float32(1e-7), "reason": None},
        {"reason": 'says "no"\nand why', "name": "mid", "alpha": -0.5, "axis": 12345678},
    ]
    write_csv(rows, path)
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first == {"name": "down.0, conv", "alpha": "0.123457", "axis": "-1", "scale": "1e-07", "reason": ""}
    assert second == {"name": "mid", "alpha": "-0.5", "axis": "12345678", "scale": "", "reason": 'says "no"\nand why'}
    assert path.read_text().splitlines()[0] == "name,alpha,axis,scale,reason"
    assert [file.name for file in tmp_path.iterdir()] == ["layers.csv"]


def test_text_that_starts_a_formula_is_disarmed(tmp_path):
    formulas = [f"{start}cmd|' /C calc'!A0" for start in "=+-@\t\r"]
    write_csv([{"name": formula} for formula in formulas], tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="", encoding="utf-8") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [f"'{formula}" for formula in formulas]


def test_an_unknown_column_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="surprise"):
        write_csv([{"name": "a"}, {"name": "b", "surprise": 1}], tmp_path / "layers.csv")
    assert not list(tmp_path.iterdir())
