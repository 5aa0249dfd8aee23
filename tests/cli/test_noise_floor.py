"""Full precision computed in other ways, from the command line to the report."""

import json

import pytest

pytestmark = pytest.mark.commit


@pytest.mark.nightly
def test_a_run_measures_its_floor_and_the_next_recipe_finds_it_in_the_cache(command, tiny, with_graphs, tmp_path):
    given = (*tiny.knobs, "infer.prompts=[a rocket,a teapot]", f"cache.dir={with_graphs(tmp_path / 'cache')}")
    first = command("quantize.py", *given, "noise_floor=all", f"hydra.run.dir={tmp_path}/first")
    assert first.returncode == 0, first.stderr[-3000:]
    floor = json.loads((tmp_path / "first/metrics.json").read_text())["noise_floor"]
    assert list(floor) == ["runtime", "batch", "threads", "isa", "fp32", "fp16", "bf16"]
    assert "the reference is computed in fp32" in floor["fp32"]["reason"]
    assert len(floor["runtime"]["psnr"]["values"]) == 2 and floor["bf16"]["psnr"]["mean"] < 70
    assert "full precision again, by" in first.stdout and "another batch" in first.stdout
    assert "The noise floor" in (tmp_path / "first/report.html").read_text()
    second = command(
        "quantize.py", *given, "quant_level=1", "noise_floor=[bf16,batch]", f"hydra.run.dir={tmp_path}/second"
    )
    assert second.returncode == 0, second.stderr[-3000:]
    told = (second.stdout + second.stderr).count("images comes from the cache")
    assert told == 4, "the reference, the unquantized engine and both ways: nothing is made again"
    again = json.loads((tmp_path / "second/metrics.json").read_text())["noise_floor"]
    assert again == {way: floor[way] for way in ("bf16", "batch")}


@pytest.mark.nightly
def test_a_way_that_this_machine_does_not_have_is_refused_before_calibration(command, tiny, tmp_path):
    result = command("quantize.py", *tiny.knobs, "noise_floor=[batch]", f"hydra.run.dir={tmp_path}/run")
    assert result.returncode == 2 and "calibrate" not in result.stdout + result.stderr
    assert "noise_floor has batch, but no two of these images fit into one batch; leave it out, or" in result.stderr
