"""What writes the record of a run, and what reads it."""

import json
import math

import jsonschema
import pytest

from sd_quant.errors import SdQuantError
from sd_quant.files import write_json
from sd_quant.metrics import SCORES
from sd_quant.report.record import (
    ABSENT,
    RECORD,
    Number,
    Record,
    check_shape,
    explained,
    latency_of,
    names,
    number_at,
    quotient,
    read_record,
    score_of,
    seconds_of_job,
    seconds_of_stages,
    weights_sha256,
    write_record,
)
from sd_quant.report.schema import record_schema
from sd_quant.report.table import run_table

NOT_QUANTIZED = {"p50_ms": None, "reason": "not quantized"}
LATENCY = {
    "torch": {"image": {"1": {"full_precision": {"p50_ms": 80.0}}}},
    "openvino": {
        "unet_xl": {"2": {"full_precision": {"p50_ms": 20.0}, "quantized": {"p50_ms": 10.0}, "speedup": 1.9}},
        "vae": {"1": {"full_precision": {"p50_ms": 5.0}, "quantized": NOT_QUANTIZED}},
        "image": {"1": {"full_precision": {"p50_ms": 30.0}, "quantized": {"p50_ms": 15.0}}},
    },
}


def test_what_is_written_is_read_and_nothing_stays_beside_it(tmp_path):
    assert read_record(tmp_path) is None
    record = {"status": "done", "latency": LATENCY, "prompts": ["a"]}
    write_record(record, tmp_path)
    assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


def test_a_record_with_nan_is_not_written(tmp_path):
    with pytest.raises(SdQuantError, match="peak_memory_bytes"):
        write_record({"peak_memory_bytes": math.nan}, tmp_path)
    assert not list(tmp_path.iterdir())


def nested(way: str, value: object) -> dict:
    for key in reversed(way.split(".")):
        value = {key: value}
    return value


def schema_says(record: dict) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(record_schema()).iter_errors(record)]


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("status", 1),
        ("simulated", "yes"),
        ("prompts", "a cat"),
        ("prompts", ["a cat", None]),
        ("latency", []),
        ("latency.openvino.vae.1.quantized.p50_ms", 0),  # something is divided by it
        ("latency.openvino.vae.1.quantized.reason", ["x"]),
        ("latency.openvino.vae.1.speedup", -1.0),
        ("latency.openvino.vae.1.speedup", {"value": "1"}),
        ("fidelity.psnr", [30.0]),
        ("fidelity.psnr.values", [30.0, "x"]),
        ("fidelity.latent_sqnr_db", {"value": 1.0}),
        ("fidelity_unquantized_engine.ssim.mean", True),
        ("peak_memory_bytes", [1]),
        ("stages.load.seconds", "1"),
        ("environment.machine.gpus", "a GPU"),
    ],
)
def test_a_value_of_another_shape_is_named_and_is_none_of_the_schema(tmp_path, way, value):
    (tmp_path / RECORD).write_text(json.dumps(nested(way, value)))
    with pytest.raises(ValueError, match=rf"^{RECORD}\.{way.partition('.')[0]}.* is "):
        read_record(tmp_path)
    assert schema_says(nested(way, value))


@pytest.mark.parametrize("value", [1e18, math.nan])
def test_numbers_that_no_table_has_room_for_are_refused(tmp_path, value):
    (tmp_path / RECORD).write_text(json.dumps({"peak_memory_bytes": value}))
    with pytest.raises(ValueError, match=rf"^{RECORD}\.peak_memory_bytes is "):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("status", None),
        ("of a later version", [{"a": 1}]),
        ("latency", {"value": None, "reason": "the engine is missing"}),
        ("latency.openvino.vae", {"1": None}),
        ("latency.openvino.vae.1.quantized", NOT_QUANTIZED),
        ("latency.openvino.vae.1", {"mean_ms": 3.0}),  # as infer.py leaves it
        ("fidelity.psnr.values", [30, None]),
        ("fidelity.frechet_efficientnet", {"value": None, "reason": "too few", "pictures": 8}),
        ("peak_memory_bytes", {"value": None, "reason": "unknown"}),
        ("knobs", {"alpha": "auto", "infer": {"engine": "openvino", "steps": 20}}),
    ],
)
def test_nulls_with_reasons_and_what_others_know_are_read(tmp_path, way, value):
    write_json(tmp_path / RECORD, nested(way, value))
    assert read_record(tmp_path) == nested(way, value)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100000])
def test_what_is_no_record_is_a_value_error(tmp_path, text):
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ValueError):
        read_record(tmp_path)


def test_what_is_quoted_is_one_short_line():
    with pytest.raises(ValueError) as refused:
        check_shape({"a\x1b": ["x\n" * 1000]}, dict[str, dict[str, int]], "it")
    assert len(str(refused.value)) < 120 and "\n" not in str(refused.value)


def test_the_latency_of_a_part_and_of_an_image():
    record = {"latency": LATENCY}
    full, quantized, speedup, _ = latency_of(record, "openvino", "unet_xl", 2)
    assert (full.value, quantized.value, speedup.value) == (20.0, 10.0, 1.9)
    assert latency_of(record, "openvino", "image", "1").speedup.value == 2.0  # of the medians, as none is recorded
    assert latency_of(record, "openvino", "vae", "1").quantized == (None, "not quantized")
    assert latency_of(record, "openvino", "vae", "1").speedup == (None, "not quantized")
    assert latency_of(record, "torch", "image", "1").quantized == (None, ABSENT)
    assert latency_of({}, "openvino", "image", "1").full_precision == (None, ABSENT)
    assert names(record, "latency", "openvino") == ["unet_xl", "vae", "image"]


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
    assert explained(None, "a") == {"value": None, "reason": "a"} and explained(0, "a") == 0


def test_the_seconds_of_stages_are_those_that_there_are():
    stages = {"reason": "a stranger's", "load": {"seconds": 2.0}, "export": None, "plans": {}, "parity": {"seconds": 0}}
    record = {"stages": stages}
    check_shape(record, Record, RECORD)
    assert seconds_of_stages(record) == {"load": 2.0, "parity": 0} and seconds_of_stages({}) == {}
    assert seconds_of_job(record) == 2 and seconds_of_job({}) is None
    assert seconds_of_job(record | {"seconds": 1.5}) == 1.5  # stages overlapped
    assert "load 2.0 s; parity 0.0 s" in run_table(record)


def test_the_worst_image_is_the_least_like_full_precision():
    scores = {key: {"mean": 2.0, "min": 1.0, "max": 3.0, "values": [1.0, 3.0]} for key in ("psnr", "lpips")}
    record = {"fidelity": {**scores, "latent_sqnr_db": [9.0, None], "latent_sqnr_reason": "NaN"}}
    assert score_of(record, SCORES["psnr"])[:2] == ((2.0, None), (1.0, None))
    assert score_of(record, SCORES["lpips"])[:2] == ((2.0, None), (3.0, None))
    assert score_of(record, SCORES["latent_sqnr_db"]).value == (None, "NaN")
    assert score_of(record, SCORES["latent_sqnr_db"]).values == [9.0, None]
    assert score_of(record, SCORES["ssim"]) == ((None, ABSENT), (None, ABSENT), [])


def test_weights_with_loras_are_others():
    own = {"inputs": {"checkpoint": {"sha256": "a"}, "calibration_prompts": {"sha256": "p"}}}
    lora = {"lora 1 at 0.8": {"sha256": "b"}}
    made = [own, *({"inputs": own["inputs"] | more} for more in (lora, {"lora 1 at 0.5": lora["lora 1 at 0.8"]}))]
    assert weights_sha256(own) == "a" and len({weights_sha256(each) for each in made}) == 3
    assert weights_sha256({}) is None
