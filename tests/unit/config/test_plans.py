"""Which plans fit which images and engines."""

import pytest

from sd_quant.config import ExportJob, QuantizeJob, targets_for
from sd_quant.errors import ConfigError
from sd_quant.knobs import read

from .composition import changed, composed


def test_a_batch_needs_no_profile_when_no_plan_is_built(mappings):
    mapping = changed(changed(mappings["quantize"], "trt.library", "none"), "infer.batch_size", 64)
    assert read(QuantizeJob, mapping).infer.batch_size == 64


def test_a_size_needs_no_profile_when_no_plan_is_built(mappings):
    sizes = ["128x128", "192x128"]
    mapping = changed(changed(mappings["quantize"], "trt.library", "none"), "trt.sizes", sizes)
    assert read(QuantizeJob, mapping).trt.sizes == sizes


@pytest.mark.parametrize(
    ("engine", "taken", "fits"),
    [
        ("tensorrt_rtx", ["64x64", "192x128"], True),
        ("tensorrt_rtx", ["64x64", "64x128"], False),
        ("tensorrt_rtx", None, False),
        ("openvino", ["64x64", "64x128"], True),
        ("openvino", None, True),
    ],
)
def test_plans_that_make_images_take_their_sizes(mappings, engine, taken, fits):
    mapping = changed(changed(mappings["quantize"], "infer.engine", engine), "trt.sizes", taken)
    mapping = changed(mapping, "infer.sizes", ["64x64", "128x64"])
    if fits:
        assert read(QuantizeJob, mapping).infer.sizes == ["64x64", "128x64"]
        return
    expected = "infer.sizes is 128x64, expected a width from 64 to 64, which trt.sizes has, because plans make the"
    with pytest.raises(ConfigError, match=f"^{expected} images$"):
        read(QuantizeJob, mapping)


def test_plans_of_files_are_tuned_for_a_size_that_they_take(mappings):
    mapping = changed(mappings["export_trt"], "trt.sizes", ["128x64", "192x64"])
    with pytest.raises(ConfigError, match="^infer.width is 64, expected from 128 to 192, as in trt.sizes"):
        read(ExportJob, mapping)


@pytest.mark.parametrize(
    ("library", "fits"), [("auto", True), ("tensorrt", True), ("tensorrt_rtx", False), ("none", False)]
)
def test_an_engine_that_runs_plans_needs_the_library_that_builds_them(mappings, library, fits):
    mapping = changed(changed(mappings["quantize"], "infer.engine", "tensorrt"), "trt.library", library)
    if fits:
        assert read(QuantizeJob, mapping).trt.library == library
        return
    with pytest.raises(
        ConfigError, match=f"^trt.library is {library}, expected auto or tensorrt, because infer.engine="
    ):
        read(QuantizeJob, mapping)


@pytest.mark.parametrize(
    ("preset", "level", "targets"),
    [("int8", 3, ["SM89", "SM120"]), ("fp8", 4, ["SM89", "SM120"]), ("mxfp4", 1, ["SM120"]), ("nvfp4", 3, ["SM120"])],
)
def test_by_default_plans_are_for_the_usual_targets_that_have_the_format(preset, level, targets):
    job = read(QuantizeJob, composed("quantize", f"quantize={preset}", f"quant_level={level}"))
    assert targets_for(job.trt, set().union(*job.formats().values())) == targets
