"""A pipeline that edits images, and one that makes a video of one, through every command."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.unit.observed.given import BUILT, built

from .shared import QUICK, pixels, record_of

pytestmark = pytest.mark.nightly

QUICKLY = [knob for knob in QUICK if not knob.startswith("infer.prompts")]  # which the tables have
TABLES = "model.calibration_table=conf/model/prompts/shapes.csv", "infer.table=conf/model/prompts/shapes_evaluation.csv"


def knobs(folder: Path, name: str) -> list[str]:
    arguments = ",".join(f"{key}:{json.dumps(value)}" for key, value in BUILT[name][1].items())
    size = "model.width=96", "model.height=64", f"cache.dir={folder}/cache"
    return ["model=diffusers", f"model.path={folder}/{name}", f"model.arguments={{{arguments}}}", *size]


@pytest.fixture(scope="module", params=["kontext", "wan"])
def given(request, done, made_once) -> tuple[Path, str]:
    """A folder with the pipeline, a ``run`` in INT8, handed over, and its ``cache``; and the pipeline's name."""

    def make(folder: Path) -> None:
        built(request.param).save_pretrained(folder / request.param)
        usual = [*TABLES, *QUICKLY, "hand_over=[diffusers_torchao]", f"hydra.run.dir={folder}/run"]
        done("quantize.py", *knobs(folder, request.param), *usual)

    return made_once(f"given_{request.param}", make), request.param


def test_the_main_job_reads_an_image_a_row(done, given, tmp_path):
    folder, name = given
    record = record_of(folder / "run")
    assert record["simulated"] is False and record["prompts"][0] == "make it yellow"
    named = {key for key in record["inputs"] if key.startswith(("infer.table", "model.calibration_table"))}
    assert {"infer.table", "infer.table 1 image", "model.calibration_table 16 image"} <= named
    parts = {path.name for path in (folder / "run/onnx").iterdir()}
    assert {"transformer", "vae", "vae_encoder"} <= parts and ("image_encoder" in parts) == (name == "wan")
    assert record["hand_over"]["diffusers_torchao"]["fidelity"]["psnr"]["mean"] > 20
    done("infer.py", f"run='{folder}/run'", TABLES[1], "steps=2", "num_warmup_runs=0", f"hydra.run.dir={tmp_path}/out")
    again, before = tmp_path / "out/images/0000.png", folder / "run/images/quantized/0000.png"
    assert np.array_equal(pixels(again), pixels(before)) and pixels(again).std() > 5


def test_a_candidate_is_judged_by_the_same_calls(done, given, tmp_path):
    folder, name = given
    if name == "kontext":
        candidates = f"candidates=['{folder}/run']", TABLES[1], "infer.steps=2"
        done("judge.py", *knobs(folder, name), *candidates, f"hydra.run.dir={tmp_path}/out")
        (record,) = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/metrics.json"))
        assert record["fidelity"]["psnr"]["mean"] > 20


def test_a_table_alone_and_prompts_beside_one_are_refused_before_anything_is_computed(given, command, tmp_path):
    folder, name = given
    for knob, sentence in [
        (TABLES[:1], "infer.table is null, expected a table, because model.calibration_table is one"),
        ((*TABLES, "infer.prompts=[a cat]"), "infer.prompts was given and changes nothing, because infer.table has"),
        ((*TABLES, "infer.num_prompts=2"), "infer.num_prompts is 2, expected null, because infer.table has the calls"),
    ]:
        result = command("quantize.py", *knobs(folder, name), *knob, *QUICKLY, f"hydra.run.dir={tmp_path}/out")
        assert result.returncode == 2 and sentence in result.stderr, result.stderr
