"""What Python computes is what the command has left: the same layers, the same files, the same images."""

import re

import numpy as np
import pytest

import sd_quant
from sd_quant.checkpoints.convert import convert
from sd_quant.errors import ConfigError
from sd_quant.metrics.fidelity import psnr
from sd_quant.places import HOME

from .shared import PROMPTS, json_of, pixels, rows_of

pytestmark = pytest.mark.commit

PAGE = HOME / "docs/python.md"


@pytest.fixture(scope="module")
def model(main_job, checkpoint) -> sd_quant.Model:
    return sd_quant.open("sdxl_mini", checkpoint, cache=main_job.cache)


@pytest.fixture(scope="module")
def quantized(model) -> sd_quant.Quantized:
    statistics = model.calibrate(calib_size=4, n_steps=5)
    return model.quantize(statistics, "int8", quant_level=3, alpha=0.8)


def test_layers_are_those_of_the_command(quantized, main_job):
    expected, found = rows_of(main_job.directory / "layers.csv"), quantized.layers()
    assert [row["name"] for row in found] == [row["name"] for row in expected]
    for row, there in zip(found, expected, strict=True):
        for name, value in row.items():
            if isinstance(value, float):  # errors, summed by another number of threads
                assert float(there[name]) == pytest.approx(value, rel=1e-3), (row["name"], name)
            else:
                assert there[name] == ("" if value is None else str(value)), (row["name"], name)


def test_files_are_those_of_the_command(quantized, main_job, tmp_path):
    files = quantized.export(tmp_path / "exported")
    assert list(files) == ["unet_xl", "vae", "clip1", "clip2"]
    for part, path in files.items():
        assert path.read_bytes() == (main_job.directory / f"onnx/{part}/{part}.onnx").read_bytes()
    assert not (tmp_path / "exported/full_precision").exists()


@pytest.mark.nightly
def test_it_is_handed_over_to_other_tools(quantized, main_job, tmp_path):
    """With the command's card, but for how it was made and the last digits of what images say."""
    folder = quantized.hand_over("diffusers_modelopt", tmp_path / "diffusers_modelopt", PROMPTS, steps=5)
    assert (folder / "unet/modelopt_state.pth").is_file() and (folder / "vae/config.json").is_file()
    theirs = main_job.directory / "hand_over/diffusers_modelopt"
    ours, expected = (json_of(each / "hand_over.json") for each in (folder, theirs))
    for figure in ("fidelity", "text"):  # of images whose sums another process has in another order
        assert ours[figure]["psnr"]["mean"] == pytest.approx(expected[figure]["psnr"]["mean"], abs=0.5)
    differ = {name for name in ours if ours[name] != expected[name]}
    assert ours["bytes"] == pytest.approx(expected["bytes"], rel=0.01)  # ModelOpt pickles its state
    assert differ <= {"folder", "run", "command", "fidelity", "text", "bytes"} and "model.quantize(" in ours["command"]
    cards = [(each / "README.md").read_text().split("\n## ") for each in (folder, theirs)]
    headings = [[section.partition("\n")[0] for section in card] for card in cards]
    assert headings[0] == headings[1] and cards[0][:2] == cards[1][:2]
    with pytest.raises(ConfigError, match="folder is .*modelopt, expected a new one, or an empty one"):
        quantized.hand_over("diffusers_modelopt", folder)
    with pytest.raises(ConfigError, match="target is nobody, expected one of comfyui, "):
        quantized.hand_over("nobody", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def images_in(folder) -> np.ndarray:
    return np.asarray([pixels(path) for path in sorted(folder.iterdir())], np.uint8)


def test_images_are_those_of_the_command(quantized, main_job):
    comparison = sd_quant.compare([quantized], PROMPTS, steps=5)
    differ = abs(comparison.full_precision - images_in(main_job.directory / "images/full_precision").astype(int))
    # sums of AVX2 are ordered by where numbers lie in memory
    assert differ.max() <= 1 and (differ > 0).mean() < 0.001
    (result,) = comparison.results
    ours = images_in(main_job.directory / "images/quantized")  # by OpenVINO, and here by the simulation
    assert min(psnr(ours, result.images)) > max(psnr(ours, comparison.full_precision))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_snippet_for_modelopt_runs_as_the_page_has_it(quantized, model, main_job, tmp_path, monkeypatch, dtype):
    import torch

    monkeypatch.chdir(tmp_path)
    quantized.save_modelopt("quantized_unet.pt")
    convert(model.path, tmp_path / "sdxl")
    (snippet,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "mto" in block]
    names: dict = {}
    exec(snippet.replace("float16", dtype), names)
    pipeline = names["pipeline"]
    assert {parameter.dtype for parameter in pipeline.unet.parameters()} == {getattr(torch, dtype)}
    pipeline.set_progress_bar_config(disable=True)
    sampling = {"num_inference_steps": 5, "height": 64, "width": 64, "output_type": "np"}
    make = lambda: pipeline(PROMPTS, generator=torch.manual_seed(1), **sampling).images  # noqa: E731
    restored = make()
    fresh = type(pipeline).from_pretrained("sdxl", torch_dtype=getattr(torch, dtype))
    pipeline.unet = fresh.unet
    full = make()
    assert 18 < -10 * np.log10(np.square(restored - full).mean()) < 45  # quantized, and the same images
