"""The commands on a tiny pipeline of every family, in formats and engines so chosen that each meets each of the others.

The road not taken is their product. A job compares each layer of its engine with the simulation itself, so a row here
asserts that it did, of how many layers, and that the files are what the assignment says. Images of random networks say
nothing: twenty steps make decibels of a last bit, and each processor has other last bits.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import onnx
import pytest

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.engines import why_not
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.models.family import family_named
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import formats_used
from tests.presets import model_of, recipe_of

from ..zoo.families import TINY, VARIANTS
from .shared import QUICK, onnx_path, record_of, rows_of

pytestmark = pytest.mark.nightly

SIZE = ("model.width=64", "model.height=64")
PLANS = ("export_trt=tensorrt_rtx", "trt.optimization_level=0")
HANDED_OVER = (*PLANS, "hand_over=[diffusers_modelopt]")
DRAWN = ("steps=1", "prompts=[a red cat]", "num_warmup_runs=0")
MASKED = {"int8": 2, "high precision": 2}  # PixArt's text is masked, which INT8 does not do


@dataclass(frozen=True)
class Row:
    """``attentions`` counts by their format those of level 4; level 3 has none."""

    family: str
    preset: str
    engine: str
    knobs: tuple[str, ...] = ()
    attentions: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.preset}-{self.engine}"

    @property
    def recipe(self) -> list[str]:
        own_format = [knob for knob in self.knobs if knob.startswith("attention=")]
        return [f"quant_level={4 if self.attentions else 3}", *own_format]


ROWS = [  # SDXL and Stable Diffusion 1.5 in INT8 are the main job's and the tiny pipeline's
    Row("sd15", "svdquant_w4a16", "openvino"),
    Row("sd15", "nvfp4", "openvino"),
    Row("sd21", "int8", "onnxruntime", HANDED_OVER),
    Row("sdxl", "int4_w4a4", "onnxruntime"),
    Row("sd3", "svdquant_w4a16", "onnxruntime"),
    Row("sd3", "fp8", "openvino"),
    Row("sd3", "int8_dynamic", "openvino", attentions={"int8": 2}),
    Row("flux", "nvfp4", "onnxruntime", ("attention=fp8",), {"fp8": 4}),
    Row("flux", "fp8", "onnxruntime", PLANS, {"fp8": 4}),
    Row("flux", "int8", "openvino", HANDED_OVER, {"high precision": 4}),  # rotary attention
    Row("pixart", "int8", "openvino", HANDED_OVER, MASKED),
    Row("pixart", "int8", "onnxruntime", ("attention=fp8", *PLANS), {"fp8": 4}),
]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Callable[[str], Path]:
    """``families(name)``: the folder of that pipeline, beside the others and a cache that they share."""
    home = tmp_path_factory.mktemp("families")

    @cache
    def folder(name: str) -> Path:
        TINY[name](home / name)
        return home / name

    return folder


@pytest.fixture(scope="module")
def job(done, families, tmp_path_factory):
    """``job(family, *knobs)``: the folder of a job that ends well."""

    def end(family: str, *knobs: str) -> Path:
        folder, run = families(family.removesuffix("_no_t5")), tmp_path_factory.mktemp("job") / "run"
        model = f"model={family}", f"model.path={folder}", *SIZE
        where = f"cache.dir={folder.parent}/cache", f"hydra.run.dir={run}"
        done("quantize.py", *model, *QUICK, "quant_level=3", *knobs, *where)
        return run

    return end


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_family_in_a_format_by_an_engine(job, families, row):
    run = job(row.family, f"quantize={row.preset}", f"infer={row.engine}", *row.knobs, *row.recipe)
    record, parts, denoiser = record_of(run), model_of(row.family)["parts"], family_named(row.family).DENOISER
    assert sorted(path.name for path in (run / "onnx").iterdir()) == sorted(parts)
    for part in parts:
        onnx.checker.check_model(onnx_path(run, part), full_check=True)
    plans = {path.stem for path in (run / "plan").glob("*.plan") if path.stat().st_size > 100_000}
    assert plans == (set(parts) if PLANS[0] in row.knobs else set())

    recipe = recipe_of(row.preset, *row.recipe)
    used = formats_used(recipe.enable, recipe.quant_level)
    assert record["simulated"] == (why_not(row.engine, used) is not None)
    parity = record["parity"]
    assert set(parity) >= set(parts)
    assert all(0 <= entry["relative_error"] <= entry["tolerance"] for entry in parity.values())
    samples = "1" if row.family == "flux" else "2"  # with guidance, which Flux is only told of
    times = record["latency"][row.engine][denoiser][samples]
    assert times["full_precision"]["min_ms"] > 0
    if record["simulated"]:
        assert times["quantized"]["p50_ms"] is None and times["quantized"]["reason"].startswith("simulated: ")
    else:
        assert parity["quantized_layers"]["count"] == record["layers"]["quantized"] >= 15
        assert f"{denoiser}_quantized" in parity and times["quantized"]["min_ms"] > 0

    layers = {layer["name"]: layer for layer in rows_of(run / "layers.csv")}
    roles = family_named(row.family).layer_roles(empty_denoiser(open_pipeline(families(row.family), row.family)))
    assert {name: each["role"] for name, each in layers.items() if each["role"] not in ("norm", "attention")} == roles
    found = Counter(layer["format"] for name, layer in layers.items() if name in roles)
    assert set(found) <= {*used["weights"], "high precision"}
    assert all(layers[name]["format"] == "high precision" for name, role in roles.items() if role == "excluded")
    (weights,) = used["weights"]
    stored = onnx.load(onnx_path(run, denoiser)).graph.initializer
    codes = [each for each in stored if each.data_type == onnx.TensorProto.DataType.Value(FORMATS[weights].onnx_type)]
    assert len([each for each in codes if len(each.dims) > 1]) >= found[weights] == record["layers"]["quantized"]
    products = sum(count for name, count in row.attentions.items() if name != "high precision")
    for target, entry in record.get("hand_over", {}).items():
        assert entry["quantized"] == entry["of"] == record["layers"]["quantized"]
        assert entry["lost"] == ({f"{target} holds no products of attention": products} if products else {})

    if row.attentions:
        assert Counter(each["format"] for each in layers.values() if each["role"] == "attention") == row.attentions
        assert {each["format"] for each in layers.values() if each["role"] == "qkv"} == {weights}
        assert record["simulated"] or not products or parity["quantized_attentions"]["count"] == products
    if row.attentions and plans:
        assert (record["plans"][denoiser]["attention"] is not None) == ("int8" in row.attentions)


def test_the_inputs_names_change_nothing_but_the_names(job):
    """Of one cache, in which nothing of the one may be taken for the other's: the codes are the same, bit for bit."""
    runs = {io: job("sdxl", f"export.io={io}", "alpha=0.8") for io in ("diffusers", "nemo")}
    graphs = {io: onnx.load(onnx_path(run, "unet_xl")).graph for io, run in runs.items()}
    assert {io: [value.name for value in graph.input] for io, graph in graphs.items()} == {
        "nemo": ["x", "timesteps", "context", "y"],
        "diffusers": ["sample", "timestep", "encoder_hidden_states", "text_embeds", "time_ids"],
    }
    assert (runs["nemo"] / "layers.csv").read_text() == (runs["diffusers"] / "layers.csv").read_text()
    ours, theirs = (
        {weight.name: weight.SerializeToString() for weight in graph.initializer if weight.name.endswith(".int8")}
        for graph in graphs.values()
    )
    assert ours == theirs and len(ours) == record_of(runs["nemo"])["layers"]["quantized"]


def test_stable_diffusion_3_without_t5_has_all_but_its_part_and_draws_and_builds_again(job, done, tmp_path):
    lean = job("sd3_no_t5", *PLANS, "hand_over=[diffusers_modelopt]")
    record, parts = record_of(lean), model_of("sd3_no_t5")["parts"]
    assert "text_encoder_3" not in parts and record["knobs"]["model"]["parts"] == parts
    assert sorted(path.name for path in (lean / "onnx").iterdir()) == sorted(parts) == sorted(record["plans"])
    assert set(record["parity"]) == {*parts, "quantized_layers", "transformer_quantized"}
    shapes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in onnx.load(onnx_path(lean, "transformer"), load_external_data=False).graph.input
    }
    assert shapes["encoder_hidden_states"][1] == 77 + 256  # of zeros, of which diffusers has as many as of T5's tokens
    assert "text_encoder_3=None" in (lean / "hand_over/diffusers_modelopt/README.md").read_text()

    done("infer.py", f"run='{lean}'", *DRAWN, f"hydra.run.dir={tmp_path}/drawn")
    assert list(record_of(tmp_path / "drawn")["latency"]["openvino"]) == [*parts, "image"]
    done("export_trt.py", f"run='{lean}'", "infer.width=64", "infer.height=64", f"hydra.run.dir={tmp_path}/built")
    assert {path.stem for path in (tmp_path / "built/plan").glob("*.plan")} == set(parts)


def test_a_folder_that_was_saved_without_t5_is_drawn_without_it(done, tmp_path):
    VARIANTS["sd3_no_t5"](tmp_path / "lean")
    model = "infer=torch", "model=sd3", f"model.path={tmp_path}/lean", *SIZE
    done("infer.py", *model, *DRAWN, f"hydra.run.dir={tmp_path}/run")
    assert list(record_of(tmp_path / "run")["latency"]["torch"]) == [*model_of("sd3_no_t5")["parts"], "image"]
