"""Measured times of layers in a file: they come back, and a file of another machine or other layers is refused."""

import csv
from dataclasses import asdict, replace

import pytest

from sd_quant.errors import ConfigError
from sd_quant.report.times_file import Conditions, Layer, read_times, write_times

pytestmark = pytest.mark.commit

HERE = Conditions("Some CPU", "avx512_vnni", "openvino", "2026.4", "2", "auto float16", "64", "96", "2")
CONV = Layer("down.conv", "int8 int8 per_channel", "64x32x3x3", 128)
TIMED = {CONV: 4.5e-5, replace(CONV, computes="unquantized"): 7.25e-5, Layer("=odd", "int4 -", "8x8", 2): 1e-7}


@pytest.fixture
def path(tmp_path):
    write_times([("a label", layer, seconds) for layer, seconds in TIMED.items()], HERE, tmp_path / "times.csv")
    return tmp_path / "times.csv"


def test_times_come_back(path):
    assert read_times(path, TIMED, HERE) == pytest.approx(TIMED)
    assert read_times(path, [CONV], None) == pytest.approx({CONV: TIMED[CONV]})
    with path.open(newline="") as file:
        first, *_ = csv.DictReader(file)
    assert first["microseconds"] == "45" and first["label"] == "a label" and first["rows"] == "128"


@pytest.mark.parametrize("name", Conditions.__dataclass_fields__)
def test_times_of_other_conditions_are_refused(path, name):
    with pytest.raises(ConfigError) as caught:
        read_times(path, [CONV], replace(HERE, **{name: "another"}))
    assert str(caught.value) == (
        f"quantize.times is {path}, measured with {name} {asdict(HERE)[name]}, expected another, this job's; measure "
        "again with quantize.times=measured, or choose another file"
    )


@pytest.mark.parametrize(
    "change", [{"layer": "up.conv"}, {"computes": "int4 -"}, {"weight_shape": "64x64x3x3"}, {"rows": 512}]
)
def test_a_file_without_a_layer_as_it_is_computed_is_refused(path, change):
    wanted = replace(CONV, **change)
    with pytest.raises(ConfigError) as caught:
        read_times(path, [CONV, wanted], HERE)
    assert str(caught.value) == (
        f"quantize.times is {path}, which has no time of {wanted.layer} ({wanted.weight_shape}, {wanted.rows} rows) "
        f"computed as {wanted.computes}, and lacks 1 of 2 times, expected those of this job's layers and formats; "
        "measure again with quantize.times=measured, or choose another file"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "", lambda text: "a,b\n1,2\n", lambda text: text.replace(",45,", ",-1,"),
        lambda text: text.replace(",45,", ",nan,"), lambda text: text.replace(",128,", ",many,"),
        lambda text: text[: len(text) // 2], lambda text: "\0" + text,
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_of_times_is_refused(path, change):
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=r"^quantize\.times is .*expected .*measure again with"):
        read_times(path, TIMED, HERE)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected a table of times"):
        read_times(path, TIMED, HERE)
