import struct
from dataclasses import fields

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from sd_quant.cache import Cache
from sd_quant.config import ExportShape, Trt
from sd_quant.errors import ResourceError
from sd_quant.stages.export_trt import build_plans, check_gpu, profile
from tests.presets import job

pytestmark = pytest.mark.commit

SHAPE = ExportShape(out_path=None, width=1024, height=512, batch_size=2)


def trt(**knobs) -> Trt:
    usual = {"library": "auto", "targets": [], "static_batch": False, "min_batch_size": 1, "max_batch_size": 8}
    return Trt(**dict.fromkeys(field.name for field in fields(Trt)) | usual | knobs)


@pytest.fixture
def onnx_path(tmp_path):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", 4, "height", "width"])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT16, None)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["out"])], "graph", [x], [out])
    path = tmp_path / "unet_xl.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def test_the_unet_holds_the_doubling_of_guidance_and_other_parts_do_not(onnx_path):
    unet, vae = (profile(onnx_path, part, trt(), SHAPE) for part in ("unet_xl", "vae"))
    assert unet == {"x": ((1, 4, 64, 128), (4, 4, 64, 128), (16, 4, 64, 128))}
    assert vae == {"x": ((1, 4, 64, 128), (2, 4, 64, 128), (8, 4, 64, 128))}
    # a static batch is the pictures asked for
    assert set(profile(onnx_path, "unet_xl", trt(static_batch=True), SHAPE)["x"]) == {(4, 4, 64, 128)}


@pytest.mark.parametrize(("scale", "most"), [(1.0, 8), (5.0, 16)])
def test_a_job_without_guidance_has_nothing_to_double(onnx_path, scale, most):
    """``infer.scale`` is the job's own, where it makes pictures too."""
    knobs = job("infer.width=1024", "infer.height=512", "infer.batch_size=2", f"infer.scale={scale}")
    assert profile(onnx_path, "unet_xl", trt(), knobs.infer)["x"][2] == (most, 4, 64, 128)


SIZES = ["512x1024", "1024x512", "768x768"]


def test_a_plan_of_several_sizes_takes_all_of_them_and_is_tuned_for_one(onnx_path):
    """And every width with every height, because a profile has a range for each axis."""
    expected = ((1, 4, 64, 64), (2, 4, 64, 128), (8, 4, 128, 128))
    assert profile(onnx_path, "vae", trt(sizes=SIZES), SHAPE)["x"] == expected


def test_a_plan_that_is_built_has_the_ranges_of_its_sizes(onnx_path, tmp_path):
    """In its bytes, where the shapes of a profile stand as they are, and in its record."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    knobs = trt(library="tensorrt_rtx", targets=["SM89"], sizes=SIZES)
    report = build_plans({"unet_xl": onnx_path}, tmp_path, knobs, SHAPE, Cache(None))["unet_xl"]
    shapes = profile(onnx_path, "unet_xl", knobs, SHAPE)["x"]
    assert report.profile == {"x": list(map(list, shapes))}
    plan = (tmp_path / "plan" / "unet_xl.plan").read_bytes()
    assert all(struct.pack("<4q", *shape) in plan for shape in shapes) and struct.pack("<4q", 9, 9, 9, 9) not in plan


def test_a_gpu_builds_for_the_formats_that_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_gpu({"int8", "int4", "fp8"})
    with pytest.raises(ResourceError, match=r"compute capability 8.9 and nvfp4 takes 10;"):
        check_gpu({"int8", "nvfp4"})
