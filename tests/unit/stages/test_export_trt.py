from dataclasses import fields

import onnx
import pytest
from onnx import TensorProto, helper

from sd_quant.config import ExportShape, Infer, Trt
from sd_quant.stages.export_trt import plan_library, profile

SHAPE = ExportShape(out_path=None, width=1024, height=512, batch_size=2)


def trt(**knobs) -> Trt:
    default = {"library": "auto", "targets": [], "static_batch": False, "min_batch_size": 1, "max_batch_size": 8}
    return Trt(**default | {"optimization_level": None, "workspace_gib": None, "timing_cache": None} | knobs)


@pytest.fixture
def onnx_path(tmp_path):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", 4, "height", "width"])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT16, None)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["out"])], "graph", [x], [out])
    path = tmp_path / "unet_xl.onnx"
    onnx.save(helper.make_model(graph), path)
    return path


def test_the_unet_holds_the_doubling_of_guidance(onnx_path):
    expected = {"x": ((1, 4, 64, 128), (4, 4, 64, 128), (16, 4, 64, 128))}
    assert profile(onnx_path, "unet_xl", trt(), SHAPE) == expected


def test_a_job_without_guidance_has_nothing_to_double(onnx_path):
    """``infer.scale`` is the job's own, where it makes pictures too."""
    knobs = dict.fromkeys((field.name for field in fields(Infer)), 1) | {"engine": "openvino", "prompts": ["a cat"]}
    knobs |= {"precision": "auto", "cuda_graph": False}
    sizes = {"width": 1024, "height": 512, "batch_size": 2}
    for scale, most in ((1.0, 8), (5.0, 16)):
        infer = Infer(**knobs | sizes | {"scale": scale})
        assert profile(onnx_path, "unet_xl", trt(), infer)["x"][2] == (most, 4, 64, 128)


def test_other_parts_are_not_doubled(onnx_path):
    assert profile(onnx_path, "vae", trt(max_batch_size=4), SHAPE)["x"] == (
        (1, 4, 64, 128),
        (2, 4, 64, 128),
        (4, 4, 64, 128),
    )


def test_a_static_batch_is_the_pictures_asked_for(onnx_path):
    assert set(profile(onnx_path, "unet_xl", trt(static_batch=True), SHAPE)["x"]) == {(4, 4, 64, 128)}


def test_a_library_that_is_named_is_taken():
    assert plan_library(trt(library="tensorrt")) == "tensorrt"
