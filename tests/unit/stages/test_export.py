"""Which assignments share a cached file, what is delivered, and which shapes plans have."""

import struct
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch

from sd_quant.cache import Cache
from sd_quant.config import ExportShape, Trt
from sd_quant.errors import ResourceError
from sd_quant.export import onnx_file
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages import export_onnx
from sd_quant.stages.export_onnx import REPORTED, assignment_digest, delivered_files, export_parts, files_of_a_run
from sd_quant.stages.export_trt import build_plans, check_gpu, profile
from tests.graphs import save_graph
from tests.presets import job

pytestmark = pytest.mark.commit

LAYER = LayerAssignment("layer", "ffn", (2, 4), "int8", "int8")
OTHER = {
    "name": "other", "weight_shape": (4, 2), "format": "int4", "activation_format": None, "weight_axis": 0,
    "weight_amax": torch.ones(2), "activation_amax": 1.0, "activation_zero_point": -110, "per_token": True,
    "rotation": 4, "bias": torch.ones(2), "pre_quant_scale": torch.ones(4), "folded_into": "norm",
    "output_scale": torch.ones(2), "output_shift": torch.ones(2),
    "rounded": (torch.ones(2, 4).to(torch.int8), torch.ones(2, 1)),
    "low_rank": (torch.ones(2, 1).half(), torch.ones(1, 4).half()),
    "attention_amax": (torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2)), "key_mean": torch.ones(2, 16),
}  # fmt: skip


def test_what_is_written_makes_another_file_and_what_is_only_reported_does_not():
    """Every field is one or the other; so does another number of a tensor."""
    assert {field.name for field in fields(LAYER)} == OTHER.keys() | REPORTED
    up, down = OTHER["low_rank"]
    rows = [
        LAYER,
        *(replace(LAYER, **{name: other}) for name, other in OTHER.items()),
        replace(LAYER, low_rank=(up, 2 * down)),
    ]
    assert len({assignment_digest({"layer": row}) for row in rows}) == len(rows)
    reported = replace(LAYER, reason="kept", alpha=0.5, output_error=0.1)
    assert assignment_digest({"layer": reported}) == assignment_digest({"layer": LAYER})


# What is delivered


@pytest.mark.parametrize(("refused", "quantized", "delivered", "written"), [
    ((), ["unet"], ["unet", "vae", "text"], ["text", "vae", "full_precision/unet", "unet"]),
    ((), ["unet", "text"], ["unet", "vae", "text"],
     ["full_precision/text", "text", "vae", "full_precision/unet", "unet"]),
    (("vae",), ["unet"], ["unet", "text"], ["text", "full_precision/unet", "unet"]),
    (("unet",), ["unet"], ["vae", "text"], ["text", "vae"]),
    (("unet", "vae", "text"), ["unet"], [], []),
])  # fmt: skip
def test_parts_that_are_refused_have_no_files_and_each_quantized_one_is_behind_its_unquantized_twin(
    refused, quantized, delivered, written
):
    parts = {name: SimpleNamespace(refused="because" if name in refused else None) for name in ("unet", "vae", "text")}
    checkpoint = SimpleNamespace(parts=lambda: parts, family=SimpleNamespace(DENOISER="unet"))
    assignments = dict.fromkeys(quantized, {"layer": LAYER})
    files = delivered_files(checkpoint, assignments, Path("run"))
    assert [file.part for file in files] == delivered
    assert {file.part: bool(file.assignment) for file in files} == {part: part in quantized for part in delivered}
    of_a_run = files_of_a_run(checkpoint, assignments, Path("run"))
    assert [str((file.directory / file.part).relative_to("run")) for file in of_a_run] == written
    for file in of_a_run:
        assert file.delivered == ("full_precision" not in file.directory.parts)
        assert bool(file.assignment) == (file.delivered and file.part in quantized)


def test_weights_beside_a_graph_are_read_by_onnx_itself(tmp_path, monkeypatch):
    """Which refuses a file that is in the cache under another name, as the unquantized denoiser's is."""
    parts = {name: SimpleNamespace(contract=name, identity="", refused=None) for name in ("unet", "vae")}
    checkpoint = SimpleNamespace(parts=lambda: parts, family=SimpleNamespace(DENOISER="unet"))
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 0)
    node, weight = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"]), np.ones((64, 64), np.float32)

    def product(part: str) -> ir.Model:
        shapes = {"x": [2, 64]}, {"y": [2, 64]}
        return ir.load(save_graph(tmp_path / f"{part}.onnx", [node], {"weight": weight}, *shapes, np.float32))

    monkeypatch.setattr(export_onnx, "trace_part", lambda checkpoint, part: product(part))
    monkeypatch.setattr(
        export_onnx, "write_part", lambda graph, checkpoint, part, path, chosen: onnx_file.save(product(part), path)
    )
    for run in (tmp_path / "one", tmp_path / "two"):
        files = files_of_a_run(checkpoint, {"unet": {"layer": LAYER}}, run)
        export_parts(checkpoint, "hash", files, Cache(tmp_path / "cache", 1e9))
        for part in parts:
            onnx.checker.check_model(run / f"onnx/{part}/{part}.onnx", full_check=True)
    links = {path.relative_to(tmp_path): path.stat().st_nlink for path in tmp_path.rglob("*.data")}
    assert {str(path): names for path, names in links.items() if names > 1 and path.parts[0] != "cache"} == {
        f"{run}/full_precision/onnx/unet/unet.onnx.data": 3 for run in ("one", "two")
    }


SHAPE = ExportShape(out_path=None, width=1024, height=512, batch_size=2)


def trt(**knobs) -> Trt:
    usual = {"library": "auto", "targets": [], "static_batch": False, "min_batch_size": 1, "max_batch_size": 8}
    return Trt(**dict.fromkeys(field.name for field in fields(Trt)) | usual | knobs)


@pytest.fixture
def onnx_path(tmp_path):
    onnx.save(onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> '
        "graph (float16[batch,4,height,width] x) => (float16[a,b,c,d] out) { out = Identity (x) }"
    ), path := tmp_path / "unet_xl.onnx")  # fmt: skip
    return path


SIZES = ["512x1024", "1024x512", "768x768"]


@pytest.mark.parametrize(("part", "scale", "knobs", "batches", "sides"), [
    ("unet_xl", None, {}, (1, 4, 16), [(64, 128)] * 3),
    ("unet_xl", None, {"static_batch": True}, (4, 4, 4), [(64, 128)] * 3),  # the pictures asked for
    ("vae", None, {}, (1, 2, 8), [(64, 128)] * 3),
    ("unet_xl", 1.0, {}, (1, 2, 8), [(64, 128)] * 3),  # of a job, which has a scale of its own
    ("unet_xl", 5.0, {}, (1, 4, 16), [(64, 128)] * 3),
    ("vae", None, {"sizes": SIZES}, (1, 2, 8), [(64, 64), (64, 128), (128, 128)]),  # every width with every height
])  # fmt: skip
def test_a_plan_holds_the_doubling_of_guidance_and_all_sizes_and_is_tuned_for_one(
    onnx_path, part, scale, knobs, batches, sides
):
    of_job = "infer.width=1024", "infer.height=512", "infer.batch_size=2", f"infer.scale={scale}"
    shape = SHAPE if scale is None else job(*of_job).infer
    expected = tuple((batch, 4, *side) for batch, side in zip(batches, sides, strict=True))
    assert profile(onnx_path, part, trt(**knobs), shape) == {"x": expected}


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
