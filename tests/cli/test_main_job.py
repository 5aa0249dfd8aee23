"""One real run of the main job on the checkpoint that ships, and the two commands that go on from its directory."""

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import jsonschema
import matplotlib
import numpy as np
import onnx
import pytest
import torch

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.config import PART_NAMES
from sd_quant.engines import openvino
from sd_quant.engines.gpu import current_gpu
from sd_quant.engines.tensorrt.plan import describe_plan, rebuild
from sd_quant.models.sdxl_nemo import build_modules
from sd_quant.report.record import record_schema

from ..pasting import AWKWARD, words_of
from .shared import PROMPTS, SAMPLING, images_in, onnx_path, pixels, prompts_knob, record_of, rows_of

pytestmark = pytest.mark.commit

# Layers of the mini checkpoint's UNet by role, counted by hand from its config: 26 convolutions in ResBlocks and
# samplers, 11 transformer blocks with 2 feed-forward layers, 6 query/key/value and 2 output projections, and 7
# attention blocks with an input and an output projection.
ROLES = {"conv": 26, "ffn": 11 * 2, "qkv": 11 * 6, "linear": 11 * 2 + 7 * 2}
EXCLUDED, ATTENTIONS = 24, 11 * 2
NAMES = {  # of each graph's inputs and outputs, as NeMo has them
    "unet_xl": (["x", "timesteps", "context", "y"], ["out"]),
    "vae": (["z"], ["dec"]),
    "clip1": (["input_ids"], ["z"]),
    "clip2": (["input_ids"], ["z", "z_pooled"]),
}
SIDES = ("full_precision", "quantized")


def nulls_without_reason(value: object, place: str = "") -> list[str]:
    if not isinstance(value, dict | list):
        return [place] if value is None else []
    explained = isinstance(value, dict) and bool(value.get("reason"))
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        null for name, inner in inside if not str(name).endswith("reason") and not (inner is None and explained)
        for null in nulls_without_reason(inner, f"{place}.{name}")
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(main_job) -> Path:
    return main_job.directory


@pytest.fixture(scope="module")
def record(run) -> dict:
    return record_of(run)


@pytest.fixture(scope="module")
def layers(run) -> list[dict]:
    return rows_of(run / "layers.csv")


@pytest.fixture(scope="module")
def unet(run) -> onnx.GraphProto:
    return onnx.load(onnx_path(run, "unet_xl")).graph


def test_everything_that_a_run_leaves_is_there_and_printed_and_logged(run, main_job, record):
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    expected = {"config.yaml", "layers.csv", "metrics.json", "provenance.json", "quantize.log", "quantized_unet.pt"}
    expected |= {"report.html", "votes.html", "votes_key.json", "images/grid.png"}
    expected |= {f"onnx/{part}/{part}.onnx" for part in PART_NAMES}
    expected |= {f"plan/{part}.plan{record}" for part in PART_NAMES for record in ("", ".json")}
    expected |= {f"images/{side}/000{n}.png" for side in SIDES for n in range(len(PROMPTS))}
    assert expected <= files and not [name for name in files if name.endswith(".part")]
    assert "done  format=int8  quant_level=3.0  alpha=0.8" in main_job.stdout
    for words in ("unet_xl", "speed-up", "PSNR", "peak memory", f"run directory: {run}", "report: file://"):
        assert words in main_job.stdout
    log = (run / "quantize.log").read_text()
    if current_gpu() is None:
        assert "infer=auto is openvino: there is no NVIDIA GPU" in log.splitlines()[0]
    stages = "load calibrate assign images export plans hand_over parity latency".split()
    assert set(record["stages"]) == set(stages) and all(f"{stage} ..." in log for stage in stages)


def test_nobody_is_told_and_nothing_is_written_elsewhere(main_job):
    """Importing OpenVINO tells Google Analytics and leaves a number for this user in ~/intel, unless that is prevented;
    matplotlib keeps a list of the fonts."""
    seen = set((main_job.directory.parent / "watched").read_text().splitlines())
    assert f"{main_job.directory}/.lock" in seen
    usual = (str(main_job.directory.parent), tempfile.gettempdir(), matplotlib.get_cachedir(), "/proc/self", "/dev")
    assert not [line for line in seen if not line.startswith(usual)]


def test_each_layer_has_a_row_with_its_scale_or_its_reason(layers):
    told = Counter((row["role"], row["format"], row["reason"]) for row in layers if row["role"] != "norm")
    assert told == {(role, "int8", ""): count for role, count in ROLES.items()} | {
        ("excluded", "high precision", "excluded by the model family"): EXCLUDED,
        ("attention", "high precision", "role attention is not in quant_level 3"): ATTENTIONS,
    }
    for row in (row for row in layers if row["format"] == "int8"):
        assert float(row["activation_scale"]) > 0 and float(row["weight_scale_min"]) > 0
        assert bool(row["pre_quant_scale_max"]) == bool(row["alpha"]) == (row["role"] != "conv")


def test_smoothing_is_folded_where_it_can_be_and_the_graph_multiplies_elsewhere(layers, unet, record):
    """Of each of the 11 blocks' two readers of the text one multiplication is left, and of each of the 7 proj_out."""
    smoothing = Counter(row["smoothing"].split(" ")[0] for row in layers if row["role"] in ("ffn", "qkv", "linear"))
    assert smoothing == {"folded": 124 - 11 * 2 - 7, "multiplication": 11 * 2 + 7}
    norms = {row["name"].rpartition(".")[2] for row in layers if row["role"] == "norm"}
    assert norms == {"norm", "norm1", "norm2", "norm3"}
    multiplications = sum(node.output[0].endswith(".smoothed") for node in unet.node)
    assert record["smoothing"] == {"smoothed_layers": 124, "folded_layers": 95, "multiplications": multiplications}
    assert multiplications == 11 + 7


@pytest.mark.parametrize("part", PART_NAMES)
def test_each_onnx_file_is_valid_with_nemos_names_and_its_plan_is_one_for_both_targets(run, record, part):
    path, plan = onnx_path(run, part), run / "plan" / f"{part}.plan"
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path, load_external_data=False).graph
    assert ([value.name for value in graph.input], [value.name for value in graph.output]) == NAMES[part]
    described = describe_plan(plan)
    assert described["is_plan"] and described["complete"]
    assert (described["library"], described["targets"]) == ("tensorrt_rtx", ["SM89", "SM120"])
    built = json.loads(plan.with_name(f"{part}.plan.json").read_text())
    assert built == record["plans"][part]
    assert built["sha256"] == hashlib.sha256(plan.read_bytes()).hexdigest()
    assert built["onnx"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}


def test_the_weights_of_exactly_the_assigned_layers_are_int8(unet, layers):
    int8 = [tensor.name for tensor in unet.initializer if tensor.data_type == onnx.TensorProto.INT8]
    weights = {name for name in int8 if not name.endswith("zero_point")}
    assert weights == {f"unet.{row['name']}.weight.int8" for row in layers if row["format"] == "int8"}
    counts = Counter(node.op_type for node in unet.node)
    shared = 11 * 3  # query, key and value of a self-attention read one quantized tensor, key and value of the text too
    shifted = sum(row["activation_zero_point"] not in ("", "0") for row in layers)
    assert len(weights) == sum(ROLES.values()) and counts["Pad"] == shifted
    assert counts["QuantizeLinear"] == len(weights) - shared + counts["Pad"]  # of zero, where codes are padded
    assert counts["DequantizeLinear"] == 2 * len(weights) - shared


def test_the_quantized_file_is_at_most_three_tenths_of_the_fp32_weights_and_executes_in_int8(record, run, int8_kernels):
    sizes, path = record["sizes_bytes"]["unet_xl"], onnx_path(run, "unet_xl")
    assert sizes["onnx_quantized"] == sum(file.stat().st_size for file in path.parent.iterdir())
    assert sizes["onnx_quantized"] <= 0.30 * sizes["weights_fp32"]
    assert sizes["onnx_quantized"] <= 0.60 * sizes["onnx_full_precision"]
    engine = openvino.load(path)
    assert openvino.int8_layers(engine) == sum(ROLES.values()), openvino.arithmetic_layers(engine)


def test_the_pictures_are_twins_that_differ(run, record):
    width, height = record["knobs"]["infer"]["width"], record["knobs"]["infer"]["height"]
    full, quantized = (np.asarray([*images_in(run / "images" / side).values()]) for side in SIDES)
    assert full.shape == quantized.shape == (len(PROMPTS), height, width, 3) and (full[0] != full[1]).any()
    errors = np.square(full - quantized).mean((1, 2, 3))
    assert full.std((1, 2, 3)).min() > 1 and errors.min() > 0
    expected = 10 * np.log10(255**2 / errors)
    np.testing.assert_allclose(record["fidelity"]["psnr"]["values"], expected, rtol=1e-4)
    grid = pixels(run / "images/grid.png")
    assert grid.shape[0] >= 2 * height and grid.shape[1] >= 2 * width


def test_the_record_is_complete_and_follows_its_schema(record, main_job, checkpoint):
    assert (record["schema_version"], record["status"]) == (3, "done")
    assert record["prompts"] == PROMPTS
    assert (record["knobs"]["quant_level"], record["knobs"]["alpha"], record["knobs"]["seed"]) == (3.0, 0.8, 42)
    assert record["layers"] == {"quantized": sum(ROLES.values()), "high_precision": EXCLUDED}
    assert record["inputs"]["calibration_prompts"]["sha256"]
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["peak_memory_bytes"] > 2**28 and record["degenerate"] == []
    assert set(record["sizes_bytes"]) == set(PART_NAMES) == set(record["plans"])
    for name in ("sizes_bytes", "latency", "fidelity", "fidelity_unquantized_engine", "parity", "layers", "stages"):
        assert record[name] and not nulls_without_reason(record[name]), name
    validator = jsonschema.Draft202012Validator(record_schema())
    assert not [f"{error.json_path}: {error.message}" for error in validator.iter_errors(record)]
    assert record.keys() == record_schema()["properties"].keys()
    provenance = json.loads((main_job.directory / "provenance.json").read_text())
    assert provenance["inputs"] == record["inputs"] and provenance["started"].endswith("+00:00")
    assert record["inputs"]["checkpoint"]["sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()


def test_latency_is_measured_for_both_engines(record):
    assert set(record["latency"]) == {"torch", "openvino"}
    for part in (*PART_NAMES, "image"):
        batch = "2" if part == "unet_xl" else "1"  # guidance doubles the UNet's
        engine = record["latency"]["openvino"][part][batch]
        sides = [record["latency"]["torch"][part][batch]["full_precision"], engine["full_precision"]]
        if part in ("unet_xl", "image"):
            assert engine["speedup"] > 0
        else:
            assert engine["quantized"] == {"p50_ms": None, "reason": "not quantized"}
        if part == "image":  # from the UNet's own rounds, and what an image takes beside them
            assert engine["quantized"]["p50_ms"] == pytest.approx(sides[1]["p50_ms"] / engine["speedup"])
        for times in [*sides, engine["quantized"]] if part == "unet_xl" else sides:
            assert times["n"] == len(times["samples_ms"]) == 3 and times["warmup"] == 1
            assert 0 < times["min_ms"] <= times["p50_ms"] <= times["p90_ms"] <= times["p99_ms"]


def test_the_engine_computes_what_torch_computes(record):
    assert set(record["parity"]) == {*PART_NAMES, "quantized_layers", "unet_xl_quantized"}
    for entry in record["parity"].values():
        assert 0 <= entry["relative_error"] <= entry["tolerance"]
    assert record["parity"]["quantized_layers"]["count"] == sum(ROLES.values())
    assert record["parity"]["unet_xl_quantized"]["relative_error"] > record["parity"]["unet_xl"]["relative_error"]
    unquantized, quantized = (record[name]["psnr"]["min"] for name in ("fidelity_unquantized_engine", "fidelity"))
    assert unquantized > 40 > quantized > 15
    unquantized, quantized = (record[name]["lpips"]["max"] for name in ("fidelity_unquantized_engine", "fidelity"))
    assert 0 <= unquantized < quantized < 0.5


def test_modelopt_restores_the_quantized_unet(run, checkpoint, layers):
    import modelopt.torch.opt as mto

    opened = open_nemo(checkpoint)
    unet = build_modules(opened.model_config, opened.clip1, opened.clip2)["unet"]
    unet = mto.restore(unet, run / "quantized_unet.pt")
    for row in layers:
        layer = unet.get_submodule(row["name"])
        quantizers = [getattr(layer, kind, None) for kind in ("weight_quantizer", "input_quantizer")]
        enabled = [quantizer is not None and quantizer.is_enabled for quantizer in quantizers]
        assert enabled == [row["format"] == "int8"] * 2
        if row["format"] == "int8":
            scales = float(row["weight_scale_max"]), float(row["activation_scale"])
            found = [quantizer.amax.max().item() / 127 for quantizer in quantizers]
            assert found == pytest.approx(scales, rel=1e-4) and quantizers[1].amax.numel() == 1


# ----------------------------------------------------------------------------------- the commands that go on from a run


def test_images_of_the_run_come_out_the_same(done, run, main_job, checkpoint, tmp_path):
    """From the files one by one; that ``run=`` finds them is tested with a tiny pipeline."""
    paths = [f"{part}={onnx_path(run, part)}" for part in PART_NAMES] + [f"model.path={checkpoint}"]
    where = f"hydra.run.dir={tmp_path}/images"
    done("infer.py", *paths, prompts_knob(PROMPTS), *SAMPLING, where)
    np.testing.assert_equal(images_in(tmp_path / "images/images"), images_in(run / "images/quantized"))
    record = record_of(tmp_path / "images")
    assert (record["status"], record["prompts"]) == ("done", PROMPTS)
    assert set(record["latency"]["openvino"]) == {*PART_NAMES, "image"}


def test_a_refused_plan_is_rebuilt_by_the_command_that_the_refusal_prints(run, done, tmp_path):
    copy = tmp_path / AWKWARD
    shutil.copytree(run / "onnx/clip1", copy / "onnx/clip1")
    (copy / "plan").mkdir()
    (copy / "plan/clip1.plan").write_bytes(b"damaged")
    *_, said = rebuild(copy / "plan/clip1.plan").partition(": ")
    program, *words = words_of(said, tmp_path / "bin")
    assert program == "sd-quant"
    done("-m", "sd_quant", *words)
    assert describe_plan(copy / "plan/clip1.plan")["complete"]
