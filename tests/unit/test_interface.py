import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import sd_quant
from sd_quant.errors import ConfigError
from sd_quant.interface import Comparison, Quantized, Result, job_with
from sd_quant.places import CONF
from sd_quant.quantization.assignment import LayerAssignment


@pytest.fixture(scope="module")
def model() -> sd_quant.Model:
    return sd_quant.open()


def test_to_import_it_or_to_choose_a_tracker_imports_nothing_heavy():
    code = """if True:
        import sys, sd_quant
        sd_quant.__version__, dir(sd_quant)
        assert "hydra" not in sys.modules
        import sd_quant.trackers
        assert not {"torch", "mlflow", "PIL", "onnx"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_exported_is_there():
    assert all(hasattr(sd_quant, name) for name in sd_quant.__all__)
    with pytest.raises(AttributeError, match="module sd_quant has no attribute nothing"):
        sd_quant.__getattr__("nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda model: sd_quant.open("nothing"), "there is no preset model=nothing; known are flux"),
        (lambda model: sd_quant.open("sdxl"), "the knob model.path has no value"),
        (lambda model: sd_quant.open("sdxl", "no/such"), "model.path names no/such, which does not exist"),
        (lambda model: sd_quant.open(widht=64), "there is no knob model.widht; did you mean model.width"),
        (lambda model: sd_quant.open(width=63), "model.width is 63, expected a multiple of 64"),
        (lambda model: model.quantize(None, "int9"), "there is no preset quantize=int9; did you mean int8"),
        (lambda model: model.quantize(None, quant_level=7), "quant_level is 7.0, expected one of"),
        (lambda model: model.quantize(None, alhpa=0.5), "there is no knob quantize.alhpa; did you mean quantize.alpha"),
        (lambda model: model.calibrate([]), "prompts are .., expected a list of texts"),
        (lambda model: model.images("a cat"), "prompts are 'a cat', expected a list of texts"),
        (lambda model: model.images(["a cat"], stepz=1), "there is no knob infer.stepz; did you mean infer.steps"),
        (lambda model: model.images(["a cat"], steps=10**6), "infer.steps is 1000000, expected at most"),
        (lambda model: sd_quant.compare([], ["a cat"]), "recipes of 0 models were given, expected some of one model"),
    ],
)
def test_what_cannot_be_is_refused_in_the_sentence_of_the_command(model, call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call(model)


def test_knobs_are_those_of_the_command(model):
    job = model.job("fp8", {"quant_level": 4, "n_steps": 3, "scale": 2.5}, {"prompts": ["a [cat], ${b}"], "steps": 7})
    assert (job.quantize.format, job.quantize.quant_level, job.quantize.n_steps) == ("fp8", 4, 3)
    assert (job.infer.scale, job.infer.prompts, job.infer.steps) == (2.5, ["a [cat], ${b}"], 7)
    assert job.quantize.alpha == "auto" or job.quantize.smoothing == "none"
    assert job.cache.dir is None


def test_a_hydra_application_around_it_goes_on_as_before():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        outside = GlobalHydra.instance().hydra
        assert job_with({"model": "sdxl_mini"}, {}).quantize.format == "int8"
        assert GlobalHydra.instance().hydra is outside
        assert compose("quantize").quant_level == 2.5


@pytest.mark.slow
def test_bytes_of_weights_are_those_of_their_formats(model):
    loaded = sd_quant.interface.layers_of(model.checkpoint, model.job(None, {}))
    rows = [
        LayerAssignment("a", "ffn", (10, 64), format="int8", weight_axis=0),
        LayerAssignment("b", "ffn", (10, 64), format=None, reason="kept"),
    ]
    made = Quantized(model, "one", None, loaded, {row.name: row for row in rows})
    parameters = model.parameters["unet_xl"]
    assert made.weight_bytes == 2 * parameters - 2 * 640 + 640 + 10 * 2  # codes, and a scale in fp16 for each channel
    assert made.share == made.weight_bytes / (2 * parameters)
    unheld = replace(made, assignment={"a": replace(rows[0], format="int4", low_rank=None)})
    with pytest.raises(ConfigError, match="ModelOpt cannot hold one, expected INT8 or FP8"):
        unheld.save_modelopt("unwritten.pt")


@pytest.mark.slow
def test_a_comparison_is_a_table_with_intervals(model, tmp_path):
    loaded = sd_quant.interface.layers_of(model.checkpoint, model.job(None, {}))
    images = np.zeros((3, 64, 64, 3), np.uint8)
    scores = {"psnr": {"values": [30.0, 32.0, None]}, "ssim": {"mean": 0.9}, "lpips": {"mean": 0.01}}
    same = {"psnr": {"values": [None] * 3}, "ssim": {"mean": 1.0}, "lpips": {"mean": 0.0}}
    results = [
        Result(Quantized(model, name, None, loaded, {}), images, each) for name, each in (("a", scores), ("b", same))
    ]
    comparison = Comparison(["x", "y", "z"], images, results)
    first, second = comparison.rows()
    assert (first["recipe"], first["psnr_db"], first["share_of_fp16"]) == ("a", 31.0, 1.0)
    assert first["psnr_db_high"] - 31 == pytest.approx(12.7062, rel=1e-4)  # t of one degree, with s = sqrt 2
    assert second["psnr_db"] == float("inf")
    assert "31.00 ± 12.71" in str(comparison).splitlines()[1]
    assert comparison.grid(tmp_path / "grid.png", 0).stat().st_size > 0
