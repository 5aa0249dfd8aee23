"""What ``quantize.py`` refuses before it loads anything."""

import importlib.util

import pytest

from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.knobs import read

from .composition import changed


def test_more_calibration_prompts_than_there_are_is_refused(quantize_mapping, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\nthree\n")
    mapping = changed(quantize_mapping, "model.calibration_prompts", str(prompts))
    assert read(QuantizeJob, changed(mapping, "quantize.calib_size", 2)).calibration_prompts() == ["one", "two"]
    job = read(QuantizeJob, changed(mapping, "quantize.calib_size", 4))
    with pytest.raises(ConfigError, match="^calib_size is 4, expected at most the 3 prompts of the prompt file$"):
        job.check_files()


def test_statistics_from_elsewhere_have_to_be_there_and_need_no_prompts(quantize_mapping, tmp_path):
    mapping = changed(quantize_mapping, "model.calibration_prompts", "no/such.txt")
    read(QuantizeJob, changed(mapping, "quantize.calibration", str(tmp_path))).check_files()
    absent = read(QuantizeJob, changed(mapping, "quantize.calibration", "no/such/cache"))
    with pytest.raises(ConfigError, match="^calibration names no/such/cache, which .*; give a statistics"):
        absent.check_files()


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here")
@pytest.mark.parametrize("knob", ["infer.engine", "trt.library"])
def test_a_missing_runtime_is_refused_with_its_extra(quantize_mapping, knob):
    job = read(QuantizeJob, changed(quantize_mapping, knob, "tensorrt"))
    with pytest.raises(
        ResourceError, match=r"the package tensorrt is not installed.* pip install 'sd-quant\[tensorrt\]'"
    ):
        job.check_files()


def test_a_target_that_is_none_is_refused(mappings):
    with pytest.raises(ConfigError, match="^trt.targets is SM90, expected one of SM75"):
        read(QuantizeJob, changed(mappings["quantize"], "trt.targets", ["SM89", "SM90"]))


def test_a_run_keeps_its_pictures_in_its_own_directory(mappings):
    with pytest.raises(ConfigError, match="^infer.out_path is elsewhere, expected null"):
        read(QuantizeJob, changed(mappings["quantize"], "infer.out_path", "elsewhere"))
