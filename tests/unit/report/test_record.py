"""The record of a run: its writer, its reader, its schema, and the provenance that it holds."""

import json
import math
import runpy
import shutil
import subprocess
from functools import reduce
from pathlib import Path

import jsonschema
import pytest

from sd_quant.errors import SdQuantError
from sd_quant.files import write_json
from sd_quant.places import HOME
from sd_quant.report import record as records
from sd_quant.report.provenance import fingerprint, git_state
from sd_quant.report.record import RECORD, parsed, read_record, record_schema
from tests.nested import with_values

from .sweeps import latency_of

pytestmark = pytest.mark.commit


def test_what_is_written_is_read_and_nothing_stays_beside_it(tmp_path):
    assert read_record(tmp_path) is None
    with pytest.raises(SdQuantError, match="peak_memory_bytes"):
        records.write_record({"peak_memory_bytes": math.nan}, tmp_path)
    assert not list(tmp_path.iterdir())
    record = {"status": "done", "latency": latency_of(1.5), "prompts": ["a"]}
    records.write_record(record, tmp_path)
    assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


def nested(way: str, value: object) -> dict:
    return reduce(lambda inner, key: {key: inner}, reversed(way.split(".")), value)


def schema_says(record: dict) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(record_schema()).iter_errors(record)]


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("status", 1),
        ("status", ["x\n" * 1000]),  # of which one short line is quoted
        ("prompts", ["a cat", None]),
        ("latency.openvino.vae.1.quantized.p50_ms", 0),  # something is divided by it
        ("fidelity.latent_sqnr_db", {"value": 1.0}),
        ("fidelity_unquantized_engine.ssim.mean", True),
        *(("peak_memory_bytes", value) for value in (1e18, 10**400)),
    ],
)
def test_a_value_of_another_shape_is_named_and_is_none_of_the_schema(tmp_path, way, value):
    (tmp_path / RECORD).write_text(json.dumps(nested(way, value)))
    with pytest.raises(ValueError, match=rf"^{RECORD}\.{way.partition('.')[0]}.* is .{{1,100}}$"):
        read_record(tmp_path)
    assert schema_says(nested(way, value))


def test_nulls_with_reasons_and_what_others_know_are_read(tmp_path):
    vae = {"1": None, "2": {"mean_ms": 3.0}}  # as infer.py leaves it
    record = {
        "of a later version": [{"a": 1}], "peak_memory_bytes": {"value": None, "reason": "unknown"},
        "latency": {"openvino": {"vae": vae}, "torch": {"value": None, "reason": "the engine is missing"}},
        "fidelity": {"psnr": {"values": [30, None]}},
        "knobs": {"alpha": "auto", "infer": {"engine": "openvino", "steps": 20}},
    }  # fmt: skip
    write_json(tmp_path / RECORD, record)
    assert read_record(tmp_path) == parsed(record)


def test_a_reader_finds_none_or_an_empty_part_where_a_record_has_nothing(tmp_path):
    stays = {"latency": {"torch": {"reason": "busy"}}, "seconds": None, "more": {"a": None}}
    write_json(tmp_path / RECORD, with_values(stays, {"levers": None, "prompts": None, "latency.torch.vae": None}))
    record = read_record(tmp_path)
    assert record == stays and not record["levers"] and record["levers"]["twin"]["psnr"]["mean"] is None
    assert record["prompts"] == record["latency"]["torch"]["unet"]["2"]["rounds"]["openings"] == []


def test_weights_with_loras_are_others():
    own = {"inputs": {"checkpoint": {"sha256": "a"}, "calibration_prompts": {"sha256": "p"}}}
    lora, vae = {"lora 1 at 0.8": {"sha256": "b"}}, {"vae": {"sha256": "b"}}
    others = (lora, {"lora 1 at 0.5": lora["lora 1 at 0.8"]}, vae, {"vae": {"sha256": "c"}}, lora | vae)
    made = [own, *({"inputs": own["inputs"] | more} for more in others)]
    assert records.weights_sha256(own) == "a" and len({records.weights_sha256(each) for each in made}) == 6
    assert records.base_sha256(made[-1]) == records.base_sha256(made[3]) != "a" == records.base_sha256(made[1])
    assert records.weights_sha256({}) is None


def test_every_name_of_the_schema_is_explained():
    page, schema = runpy.run_path(str(HOME / "docs/make_pages.py")), record_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert not schema_says({"of_a_later_version": [1], "peak_memory_bytes": {"value": None, "reason": "killed"}})
    silent = [name for name, _, said in page["entries"](schema, schema["$defs"], {}) if not said]
    assert all(name.endswith("<...>") for name in silent), silent


def test_a_folder_is_known_by_its_files_names_and_contents_and_an_absent_input_has_a_reason(tmp_path):
    for place in ("a/unet/weights", "b/unet/weights", "c/unet/other"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_bytes(b"123")
    first, second, third = (fingerprint(tmp_path / folder) for folder in "abc")
    assert first["sha256"] == second["sha256"] != third["sha256"] and first["bytes"] == 3
    absent = {"path": "no/such/file", "sha256": None, "bytes": None, "reason": "no such file or folder"}
    assert fingerprint(Path("no/such/file")) == absent


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_state_of_a_clean_a_changed_and_a_foreign_repository(tmp_path, monkeypatch):
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set when a git hook runs the tests
        monkeypatch.delenv(variable, raising=False)
    nothing = {"commit": None, "dirty": None}
    assert git_state(tmp_path) == nothing

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath="]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    assert git_state(tmp_path) == nothing  # no commit yet
    git("commit", "--allow-empty", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "site-packages").mkdir()
    assert git_state(tmp_path / "site-packages") == nothing
    (tmp_path / "new.py").write_text("")
    assert git_state(tmp_path)["dirty"] is True
    monkeypatch.setenv("PATH", str(tmp_path))  # where git is not
    assert git_state(tmp_path) == nothing
