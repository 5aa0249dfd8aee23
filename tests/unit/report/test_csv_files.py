import csv

import pytest
from pyarrow import parquet

from sd_quant.report.csv_files import write_csv
from sd_quant.report.summary import write_parquet

pytestmark = pytest.mark.commit


def test_text_that_starts_a_formula_is_disarmed(tmp_path):
    formulas = [f"{start}cmd|' /C calc'!A0" for start in "=+-@\t\r"]
    write_csv([{"name": formula} for formula in formulas], tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="", encoding="utf-8") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [f"'{formula}" for formula in formulas]


def test_a_table_has_the_columns_of_all_its_rows_in_order_of_first_appearance(tmp_path):
    rows = [{"name": "a", "bytes_int8": 8}, {"name": "b", "bytes_int4": 4, "bytes_int8": 8}]
    write_csv(rows, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes() == b"name,bytes_int8,bytes_int4\r\na,8,\r\nb,8,4\r\n"
    write_parquet(rows, tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == [rows[0] | {"bytes_int4": None}, rows[1]]
