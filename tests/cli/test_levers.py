"""Fewer calls beside fewer bits, from the command line to the report."""

import json

import pytest

pytestmark = pytest.mark.commit

KNOBS = ("infer.prompts=[a rocket,a teapot,a boat]", "infer.steps=6", "timing.budget_s=0", "export_trt=none")


@pytest.mark.nightly
def test_a_sweep_compares_bits_calls_and_both(command, tiny, with_graphs, tmp_path):
    """Its jobs share what does not depend on calls; nothing quantized by the same calls is its own twin."""
    given = (
        *tiny.knobs,
        *KNOBS,
        f"cache.dir={with_graphs(tmp_path / 'cache')}",
        "infer.guidance_until=0.9",
        "infer.sampler=ddim",
    )
    result = command("quantize.py", "-m", *given, "quant_level=0,3", "infer.reuse=null,0.33",
                     f"hydra.sweep.dir={tmp_path}/sweep")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    records = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/metrics.json")}
    assert len(records) == 4
    levers = {name: record["levers"] for name, record in records.items()}
    both, alone = levers["quant_level=3,reuse=0.33"], levers["quant_level=0,reuse=0.33"]
    assert both["schedule"].count("c") == 4 == both["calls"] and both["schedule"][0] == both["schedule"][-1] == "c"
    assert 0 < both["half_calls"] < 4 and levers["quant_level=3,reuse=null"]["calls"] == 6
    assert both["chosen"]["prompts"] >= 1 and alone["twin"]["psnr"]["values"] == [None] * 3
    for name, record in records.items():
        other = levers[name.replace("level=3", "level=0")]
        if levers[name]["schedule"] == other["schedule"]:  # each recipe's own engine has chosen it
            assert levers[name]["calls_alone"]["psnr"]["values"] == other["calls_alone"]["psnr"]["values"]
        assert record["latency"]["openvino"]["image"]["1"]["quantized"]["calls_share"] > 0
    assert records["quant_level=0,reuse=null"]["layers"]["quantized"] == 0
    kinds = {kind: len(list((tmp_path / "cache" / kind).glob("*/manifest.json"))) for kind in ("statistics", "onnx")}
    assert kinds["onnx"] == 3 + 2  # both recipes' UNet beside what is unquantized
    assert "Bits and other levers" in (tmp_path / "sweep/report.html").read_text()
    run, again = f"run='{tmp_path}/sweep/quant_level=3,reuse=0.33'", f"infer.schedule={both['schedule']}"
    images = command("infer.py", run, *tiny.knobs[:4], *KNOBS[:2], again, "infer.sampler=ddim",
                     "infer.guidance_until=0.9", f"hydra.run.dir={tmp_path}/images")  # fmt: skip
    assert images.returncode == 0, images.stderr[-2000:]
    own, made = (
        {file.name: file.read_bytes() for file in (tmp_path / folder).glob("*.png")}
        for folder in ("sweep/quant_level=3,reuse=0.33/images/quantized", "images/images")
    )
    assert len(own) == 3 and made == own, "the same calls make the same images"


def test_levers_that_cannot_be_are_refused_before_anything_is_computed(command, tiny, tmp_path):
    result = command("quantize.py", *tiny.knobs, "infer.schedule=rrrr", f"hydra.run.dir={tmp_path}/run")
    assert result.returncode == 2 and "infer.schedule is rrrr, expected letters c, r and e" in result.stderr
    assert not (tmp_path / "run").exists()
