import json
import runpy

import jsonschema

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


def test_it_takes_nulls_with_reasons_and_what_a_later_version_knows():
    """What it does not take is beside what the reader does not take, in the tests of records."""
    record = {
        "schema_version": 1,
        "prompts": ["a cat"],
        "of_a_later_version": [1],
        "peak_memory_bytes": {"value": None, "reason": "killed"},
        "fidelity": {"psnr": {"mean": None, "values": [30.5, None]}},
    }
    jsonschema.validate(record, record_schema())
