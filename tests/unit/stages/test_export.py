"""Export of a job: shared files of the cache, files of the run's folder, shapes of plans, hand-over to other tools."""

import json
import shutil
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
from sd_quant.interchange import TARGETS
from sd_quant.interchange.holding import adapted
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.report.record import parsed
from sd_quant.report.table import write_csv
from sd_quant.stages import choose, export_onnx, hand_over, session, target_folder, targets
from sd_quant.stages.export_onnx import REPORTED, assignment_digest, delivered_files, export_parts, files_of_a_run
from sd_quant.stages.export_trt import build_plans, check_gpu, profile
from tests.graphs import save_graph
from tests.pasting import AWKWARD, words_of
from tests.presets import job
from tests.refusals import refused

from ..config.composition import composed
from .conftest import loaded

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
SHAPE = ExportShape(out_path=None, width=1024, height=512, batch_size=2)
SIZES = ["512x1024", "1024x512", "768x768"]


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


@pytest.mark.parametrize(("without", "quantized", "delivered", "written"), [
    ((), ["unet"], ["unet", "vae", "text"], ["text", "vae", "full_precision/unet", "unet"]),
    ((), ["unet", "text"], ["unet", "vae", "text"],
     ["full_precision/text", "text", "vae", "full_precision/unet", "unet"]),
    (("vae",), ["unet"], ["unet", "text"], ["text", "full_precision/unet", "unet"]),
    (("unet",), ["unet"], ["vae", "text"], ["text", "vae"]),
    (("unet", "vae", "text"), ["unet"], [], []),
])  # fmt: skip
def test_refused_parts_have_no_files_and_quantized_ones_follow_their_twins(without, quantized, delivered, written):
    parts = {name: SimpleNamespace(refused="because" if name in without else None) for name in ("unet", "vae", "text")}
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


@pytest.mark.parametrize(("part", "scale", "knobs", "batches", "sides"), [
    ("unet_xl", None, {}, (1, 4, 16), [(64, 128)] * 3),
    ("unet_xl", None, {"static_batch": True}, (4, 4, 4), [(64, 128)] * 3),  # the pictures asked for
    ("vae", None, {}, (1, 2, 8), [(64, 128)] * 3),
    ("unet_xl", 1.0, {}, (1, 2, 8), [(64, 128)] * 3),  # of a job, which has a scale of its own
    ("unet_xl", 5.0, {}, (1, 4, 16), [(64, 128)] * 3),
    ("vae", None, {"sizes": SIZES}, (1, 2, 8), [(64, 64), (64, 128), (128, 128)]),  # every width with every height
])  # fmt: skip
def test_a_plan_holds_guidances_doubling_and_all_sizes(onnx_path, part, scale, knobs, batches, sides):
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


def row(name: str, *shape: int, **options) -> LayerAssignment:
    known = {"weight_axis": 0, "weight_amax": torch.ones(shape[0]), "activation_amax": 1.0}
    return LayerAssignment(name, "qkv", shape, "int8", "int8", **known | options)


def test_what_a_target_loses_widens_or_stacks_is_counted_by_its_reason():
    attention = LayerAssignment("attn", "attention", (), None, "int8", attention_amax=(torch.ones(1),) * 4)
    kept = LayerAssignment("kept", "qkv", (4, 4), reason="kept")
    rows = {each.name: each for each in (row("a", 4, 4), row("b", 4, 4, 3, 3), row("c", 4, 4, 1, 1), attention, kept)}
    found = targets.lost(rows, adapted(rows, TARGETS["diffusers_torchao"]))
    assert found == {
        "diffusers_torchao holds no convolutions in int8": 2, "diffusers_torchao holds no products of attention": 1
    }  # fmt: skip
    known = ("pos_embed.proj", "transformer_blocks.0.attn.add_q_proj")
    rows = {name: LayerAssignment(name, "linear", (4, 4), reason="kept") for name in known}
    for name, amax in zip((f"transformer_blocks.0.attn.to_{each}" for each in "qkv"), (1.0, 3.0, 2.0), strict=True):
        one = row(name, 4, 4, weight_axis=None, weight_amax=torch.tensor([amax]))
        rows[name] = replace(one, format="fp8", activation_format="fp8")
    (words,) = targets.widened(rows, adapted(rows, TARGETS["comfyui"]))
    assert words.startswith("the ranges of 2 layers: query, key and value are one tensor")
    assert targets.widened(rows, rows) == []


def test_every_column_decides_but_those_of_errors(tmp_path):
    """Their last digits depend on how many threads add them up."""
    layer, found = row("a", 2, 2, pre_quant_scale=torch.ones(2)).row(), {}
    for column in ("", *layer):
        write_csv([layer | ({column: "another"} if column else {})], tmp_path / "layers.csv")
        found[column] = choose.decided(tmp_path / "layers.csv")
    plain = found.pop("")
    ignored = {column for column in found if found[column] == plain}
    assert ignored == {"output_error", "output_error_alpha_0.8"} and len(found) > 18


@pytest.mark.parametrize("when", ["write", "card", "meanwhile"])
def test_an_earlier_result_stays_until_the_next_is_whole(tmp_path, monkeypatch, when):
    folder, earlier = tmp_path / "gguf", json.dumps({"files": ["old", "../canary"]})
    folder.mkdir()
    (folder / target_folder.FIGURES).write_text(earlier)
    for name in ("gguf/old", "canary"):
        (tmp_path / name).touch()

    def write(place, *_):
        place.mkdir()
        (place / "weights").write_bytes(bytes(200_000))
        if when == "write":
            raise KeyboardInterrupt
        if when == "meanwhile":
            (folder / "thesis.txt").touch()

    def make() -> dict:
        rows = {"unet_xl": {"a": row("a", 32, 32)}}
        return target_folder.write_target(TARGETS["gguf"], loaded(), rows, rows, folder, "sd-quant", None, tmp_path)

    monkeypatch.setattr(target_folder, "write_folder", write)
    if when == "write":
        with pytest.raises(KeyboardInterrupt):
            make()
        assert (folder / target_folder.FIGURES).read_text() == earlier and not list(tmp_path.glob(".*"))
    elif when == "meanwhile":
        with refused(".*holds thesis.txt, which was not handed over by us"):
            make()
        assert {path.name for path in folder.iterdir()} == {"thesis.txt", "old", target_folder.FIGURES}
    else:
        for _ in range(2):  # over the earlier result, and over its own
            assert make()["bytes"] == {"weights": 200_000}
            names = {path.name for path in folder.iterdir()}
            assert names == {"weights", "README.md", target_folder.FIGURES}
            figures = json.loads((folder / target_folder.FIGURES).read_text())
            assert names == set(figures["files"]) and "choose the nearest in KSampler" in figures["sampling"][0]
        assert (tmp_path / "canary").exists()


def test_a_card_has_the_command_that_made_it(tmp_path, monkeypatch, answering):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["quantize.py"])  # of a checkout, which the reader of a card may not have
    said, held, run = [], [], tmp_path / AWKWARD
    monkeypatch.setattr(hand_over, "write_target", lambda *given: said.append(given[5]) or held.append(given[3]))
    answering(
        hand_over, measured_by=None, images_of_run=None, recipe_of_run=job(), handed_over_table=None,
        record_of_run=parsed(None), chosen_again=(loaded(), {"unet_xl": {"a": row("a", 32, 32)}}), as_text=[],
        open_session=SimpleNamespace(checkpoint=None),
    )  # fmt: skip
    given = ["prompts=[it's a rocket, a key]", "hand_over=[gguf]", "model.path='${x}'"]
    shared = SimpleNamespace(facts={"overrides": given})
    variants = SimpleNamespace(loaded=loaded(), directory=run, shared=shared, assignments={})
    hand_over.hand_over_run(variants, {"gguf": {}})
    assert words_of(said.pop(), tmp_path / "bin") == ["sd-quant", "quantize", *given]
    for images in (True, False):
        asked = SimpleNamespace(run=AWKWARD, cache=None, targets=lambda: ["gguf"], images=images)
        hand_over.hand_over(asked, tmp_path / "out")
        program, command, *words = words_of(said.pop(), tmp_path / "bin")
        made = composed(command, *words)
        assert (program, command, made["run"]) == ("sd-quant", "hand_over", AWKWARD)
        assert (made["to"], made["images"]) == ("gguf", images)
    assert [rows["unet_xl"]["a"].format for rows in held[1:]] == ["int8", "int8"]


def test_a_disk_that_is_too_small_is_found_out_before_anything_is_written(tmp_path, monkeypatch, answering):
    class Opened(session.Session):
        parts = {"unet_xl": SimpleNamespace(contract=SimpleNamespace(weights=torch.float16))}
        parameters = {"unet_xl": 10**9}

    answering(shutil, disk_usage=SimpleNamespace(free=0))
    answering(session, open_unchecked=Opened(None))
    answering(hand_over, recipe_of_run=SimpleNamespace(model=None))
    asked = SimpleNamespace(run=str(tmp_path), cache=None, images=False, targets=lambda: ["onnx", "gguf"])
    with pytest.raises(ResourceError, match=r"needs up to 4.00 GB .*hand_over 4.0 GB.* and the disk has 0.00 GB free"):
        hand_over.hand_over(asked, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


@pytest.mark.parametrize(("target", "knobs", "sentence"), [
    ("gguf", [], None),
    ("gguf", ["infer.schedule=ccrc", "infer.steps=4"], None),
    ("gguf", ["infer.precise_steps=last3"], "gguf cannot say which steps are precise.* export a run without"),
])  # fmt: skip
def test_a_recipe_with_precise_steps_is_not_exported(target, knobs, sentence):
    with refused(sentence):
        targets.check_schedule([target], job(*knobs).infer)
