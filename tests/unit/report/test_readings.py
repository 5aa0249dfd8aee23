"""Figures of a record, and the reasons of those that are missing."""

import pytest

from sd_quant.report.readings import Number, number_at, quotient
from sd_quant.report.record import ABSENT

pytestmark = pytest.mark.commit


def test_a_number_comes_with_the_reason_beside_where_its_way_ends():
    none = {"value": None, "reason": "no plan"}
    record = {"reason": "the run's own", "sizes_bytes": {"unet_xl": {"plan": none, "onnx_quantized": 3}, "vae": none}}
    assert number_at(record, "sizes_bytes", "unet_xl", "onnx_quantized") == (3, None)
    assert number_at(record, "sizes_bytes", "unet_xl", "plan") == (None, "no plan")
    assert number_at(record, "sizes_bytes", "vae", "plan") == (None, "no plan")
    assert number_at(record, "peak_memory_bytes") == number_at({}, "a", "b", "c") == (None, ABSENT)


def test_a_quotient_and_what_is_recorded_have_the_reason_of_what_is_missing():
    assert quotient(Number(3.0), Number(2.0)) == (1.5, None)
    assert quotient(Number(None, "a"), Number(None, "b")) == (None, "a")
    assert quotient(Number(3.0), Number(None, "b")) == (None, "b")
    assert quotient(Number(3.0), Number(0)).value is None
