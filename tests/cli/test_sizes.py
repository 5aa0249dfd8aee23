"""Images, statistics and plans of several sizes, by the commands."""

import json
import struct

import numpy as np
import pytest
from PIL import Image

from .conftest import PROMPTS

pytestmark = pytest.mark.commit

SIZES = {"0000": (64, 64), "0001": (64, 128)}  # by image


@pytest.fixture(scope="module")
def prompts() -> str:
    return f"infer.prompts=[{','.join(PROMPTS)}]"


def sizes_in(folder) -> dict[str, tuple[int, int]]:
    return {path.stem: pixels(path).shape[1::-1] for path in sorted(folder.glob("0*.png"))}


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


@pytest.mark.nightly
def test_a_run_calibrates_on_and_compares_images_of_all_sizes(command, tiny, with_graphs, prompts, tmp_path):
    run = tmp_path / "run"
    result = command(
        "quantize.py", *tiny.knobs, "quant_level=1", "model.sizes=[128x64,64x64]", "infer.sizes=[64x64,64x128]",
        prompts, f"cache.dir={with_graphs(tmp_path / 'cache')}", f"hydra.run.dir={run}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    for variant in ("full_precision", "quantized"):
        assert sizes_in(run / "images" / variant) == SIZES
    record = json.loads((run / "metrics.json").read_text())
    fidelity = record["fidelity"]
    assert len(fidelity["psnr"]["values"]) == len(fidelity["ssim"]["values"]) == 2
    (entry,) = (tmp_path / "cache" / "statistics").rglob("*.safetensors")
    assert b'\\"sizes\\": [\\"128x64\\", \\"64x64\\"]' in entry.read_bytes()[:10_000]
    again = command(
        "infer.py", f"run={run}", prompts, "infer.sizes=[64x64,64x128]", "steps=2", "num_warmup_runs=0",
        "infer.num_timed_runs=1", f"hydra.run.dir={tmp_path}/again",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert sizes_in(tmp_path / "again" / "images") == SIZES
    for name in SIZES:
        first, second = (
            pixels(folder / f"{name}.png") for folder in (run / "images" / "quantized", tmp_path / "again" / "images")
        )
        assert abs(first - second).max() <= 1


def test_a_plan_takes_the_sizes_that_were_asked_for(command, main_job, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    onnx = main_job.directory / "onnx" / "vae" / "vae.onnx"
    result = command(
        "export_trt.py", f"vae={onnx}", "trt.targets=[SM89]", "trt.sizes=[64x128,128x64]", "infer.width=128",
        f"hydra.run.dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    shapes = json.loads((tmp_path / "plan/vae.plan.json").read_text())["profile"]["z"]
    assert [shape[2:] for shape in shapes] == [[8, 8], [8, 16], [16, 16]]
    plan = (tmp_path / "plan/vae.plan").read_bytes()
    assert all(struct.pack("<4q", *shape) in plan for shape in shapes)


@pytest.mark.parametrize(
    ("script", "knob"), [("quantize.py", "model.sizes"), ("infer.py", "infer.sizes"), ("export_trt.py", "trt.sizes")]
)
def test_a_size_that_no_image_has_is_refused(command, script, knob, tmp_path):
    result = command(script, f"{knob}=[64x64,832x1200]", f"hydra.run.dir={tmp_path}/run")
    assert result.returncode == 2
    expected = "WIDTHxHEIGHT such as 832x1216, each side a multiple of 64 from 64 to 4096, as this family's images have"
    sentence = f"{knob} is 832x1200, expected {expected}"
    assert result.stderr.splitlines()[-1] == f"error: {sentence}"
    assert not (tmp_path / "run").exists()
