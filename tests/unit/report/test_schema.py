import json
import runpy

import jsonschema
import pytest

from sd_quant.places import HOME
from sd_quant.report.record import SCHEMA_VERSION
from sd_quant.report.schema import FILE, record_schema


def test_the_file_in_the_package_is_the_schema_of_today():
    assert json.loads(FILE.read_text()) == record_schema(), "python -m sd_quant.report.schema writes it"
    jsonschema.Draft202012Validator.check_schema(record_schema())
    assert record_schema()["version"] == SCHEMA_VERSION


def test_every_name_is_explained():
    page = runpy.run_path(str(HOME / "docs/make_pages.py"))
    silent = [name for name, _, said in page["entries"](record_schema(), {}) if not said]
    assert all(name.endswith("<...>") for name in silent), silent


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({"schema_version": 1, "prompts": ["a cat"], "of_a_later_version": [1]}, None),
        ({"peak_memory_bytes": {"value": None, "reason": "killed"}}, None),
        ({"fidelity": {"psnr": {"mean": None, "values": [30.5, None]}}}, None),
        ({"prompts": [None]}, "$.prompts[0]"),
        ({"schema_version": "1"}, "$.schema_version"),
        ({"latency": {"openvino": {"vae": {"1": {"speedup": 0}}}}}, "$.latency.openvino.vae['1'].speedup"),
        ({"fidelity": {"psnr": {"mean": "high"}}}, "$.fidelity.psnr.mean"),
    ],
)
def test_what_it_takes_for_a_record(record, wrong):
    found = [error.json_path for error in jsonschema.Draft202012Validator(record_schema()).iter_errors(record)]
    assert found == ([] if wrong is None else [wrong])
