"""The commands on a tiny pipeline of every family, and SDXL by either names of its inputs.

In INT8; of other formats the exported denoiser's layers are compared with their simulation, for a recipe from calls on
random inputs, in the graph that the commands have traced.
"""

import csv
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from sd_quant.calibration.hooks import collect, draw
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.engines import load_engine, why_not
from sd_quant.export.parts import write_part
from sd_quant.inference.loading import LoadedModel, load_model
from sd_quant.inference.parity import layer_outputs, layer_parity, run_simulation
from sd_quant.models import family_named
from sd_quant.models.checkpoint import denoiser_of, denoiser_part, denoiser_weights, empty_denoiser
from sd_quant.models.parts import axes
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import formats_used
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.modelopt import simulate
from tests.presets import model_of, recipe_of

from ..pipelines import TINY, VARIANTS
from .sweeps import link_cache

PRESETS = ("fp8", "svdquant_w4a16", "int4_w4a4", "nvfp4")
SMALL = (
    "calib_size=2", "quantize.n_steps=2", "infer.steps=2", "infer.num_timed_runs=1", "infer.num_warmup_runs=1",
    "infer.prompts=[a red cat]", "timing.budget_s=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """One for each family, by its name."""
    path = tmp_path_factory.mktemp("families")
    for name, write in TINY.items():
        write(path / name)
    return path


@pytest.fixture(scope="module")
def sweep(command, folders, tmp_path_factory) -> Path:
    """One command for all of them."""
    folder = tmp_path_factory.mktemp("sweep")
    result = command(
        "quantize.py", "-m", f"model={','.join(TINY)}", f"model.path={folders}/${{.family}}", "model.width=64",
        "model.height=64", "quant_level=3", "alpha=0.8", *SMALL, f"cache.dir={folder}/cache",
        "hand_over=[diffusers_modelopt]",
        f"hydra.sweep.dir={folder}/sweep",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "sweep"


def run_of(sweep: Path, name: str) -> Path:
    return sweep / f"model={name}"


def record_of(directory: Path) -> dict:
    return json.loads((directory / "metrics.json").read_text())


def parts_of(name: str) -> list[str]:
    return model_of(name)["parts"]


def onnx_path(directory: Path, part: str) -> Path:
    return directory / "onnx" / part / f"{part}.onnx"


@pytest.mark.parametrize("name", TINY)
def test_every_part_has_a_valid_file_and_a_plan(sweep, name):
    directory, parts = run_of(sweep, name), parts_of(name)
    assert sorted(path.name for path in (directory / "onnx").iterdir()) == sorted(parts)
    for part in parts:
        onnx.checker.check_model(onnx_path(directory, part), full_check=True)
        assert (directory / "plan" / f"{part}.plan").stat().st_size > 100_000
    assert list(record_of(directory)["plans"]) == parts


@pytest.mark.parametrize("name", TINY)
def test_every_part_is_what_torch_computes(sweep, name):
    record, denoiser = record_of(run_of(sweep, name)), family_named(name).DENOISER
    parity = record["parity"]
    assert set(parity) == {*parts_of(name), "quantized_layers", f"{denoiser}_quantized"}
    assert all(0 <= entry["relative_error"] <= entry["tolerance"] for entry in parity.values())
    assert parity["quantized_layers"]["count"] == record["layers"]["quantized"]
    assert record["fidelity_unquantized_engine"]["psnr"]["mean"] > record["fidelity"]["psnr"]["mean"] > 20


@pytest.mark.parametrize("name", TINY)
def test_all_layers_but_the_excluded_are_int8(sweep, folders, name):
    directory = run_of(sweep, name)
    checkpoint = open_pipeline(folders / name, name)
    roles = checkpoint.family.layer_roles(empty_denoiser(checkpoint))
    with (directory / "layers.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file) if row["role"] not in ("norm", "attention")}
    assert {layer: row["role"] for layer, row in rows.items()} == roles
    assert all((row["format"] == "int8") == (row["role"] != "excluded") for row in rows.values())
    found = Counter(row["format"] for row in rows.values())
    assert record_of(directory)["layers"] == {"quantized": found["int8"], "high_precision": found["high precision"]}
    graph = onnx.load(onnx_path(directory, checkpoint.family.DENOISER)).graph
    integers = [weight for weight in graph.initializer if weight.data_type == onnx.TensorProto.INT8]
    assert len([weight for weight in integers if len(weight.dims) > 1]) == found["int8"] >= 20


@pytest.mark.parametrize("name", TINY)
def test_modelopt_is_handed_every_layer(sweep, name):
    directory, record = run_of(sweep, name), record_of(run_of(sweep, name))
    entry, component = record["hand_over"]["diffusers_modelopt"], family_named(name).DENOISER.removesuffix("_xl")
    assert entry["quantized"] == entry["of"] == record["layers"]["quantized"] and entry["lost"] == {}
    assert (directory / "hand_over/diffusers_modelopt" / component / "modelopt_state.pth").is_file()
    assert entry["fidelity"]["psnr"]["mean"] > 15


@pytest.mark.parametrize("name", TINY)
def test_latency_counts_the_samples_of_the_family(sweep, name):
    """Two a picture with guidance, which Flux is only told of."""
    record, family = record_of(run_of(sweep, name)), family_named(name)
    batch = "1" if name == "flux" else "2"
    assert record["denoiser"] == {"part": family.DENOISER, "samples_a_picture": int(batch)}
    for engine, sides in {"torch": ["full_precision"], "openvino": ["full_precision", "quantized"]}.items():
        latency = record["latency"][engine]
        assert set(latency) == {*parts_of(name), "image"} and set(latency[family.DENOISER]) == {batch}
        assert all(latency[family.DENOISER][batch][side]["p50_ms"] > 0 for side in sides)
        assert all(set(times) == {"1"} for part, times in latency.items() if part != family.DENOISER)


def test_one_report_and_one_table_tell_of_all(sweep):
    page = (sweep / "report.html").read_text(encoding="utf-8")
    assert all(f"model={name}" in page for name in TINY)
    with (sweep / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert {job: row["status"] for job, row in rows.items()} == {f"model={name}": "done" for name in TINY}
    assert all(float(row["denoiser_ms"]) > 0 for row in rows.values())


def test_a_run_of_a_transformer_draws_again(command, sweep, tmp_path):
    run = run_of(sweep, "flux")
    result = command("infer.py", f"run='{run}'", "steps=1", "prompts=[a red cat]", "num_warmup_runs=0",
                     f"hydra.run.dir={tmp_path}/run")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    latency = record_of(tmp_path / "run")["latency"]["openvino"]
    assert list(latency) == [*parts_of("flux"), "image"] and latency["transformer"]["1"]["p50_ms"] > 0
    assert (tmp_path / "run/images/0000.png").stat().st_size > 1000


def test_plans_of_a_transformer_are_built_again(command, sweep, tmp_path):
    run = run_of(sweep, "pixart")
    result = command("export_trt.py", f"run='{run}'", "infer.width=64", "infer.height=64",
                     f"hydra.run.dir={tmp_path}/run")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    plans = {path.stem: path.stat().st_size for path in (tmp_path / "run/plan").glob("*.plan")}
    assert set(plans) == set(parts_of("pixart")) and min(plans.values()) > 100_000


def test_the_inputs_names_change_nothing_but_the_names(command, folders, sweep, tmp_path):
    """Of one cache, in which nothing of the one may be taken for the other's."""
    link_cache(sweep.parent / "cache", tmp_path / "cache")
    result = command(
        "quantize.py", "export.io=nemo", "export_trt=none", "model=sdxl", f"model.path={folders}/sdxl",
        "model.width=64", "model.height=64", "quant_level=3", "alpha=0.8", *SMALL, f"cache.dir={tmp_path}/cache",
        f"hydra.run.dir={tmp_path}/run",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    runs = {"nemo": tmp_path / "run", "diffusers": run_of(sweep, "sdxl")}
    inputs = {
        io: [value.name for value in onnx.load(onnx_path(run, "unet_xl"), load_external_data=False).graph.input]
        for io, run in runs.items()
    }
    assert inputs == {
        "nemo": ["x", "timesteps", "context", "y"],
        "diffusers": ["sample", "timestep", "encoder_hidden_states", "text_embeds", "time_ids"],
    }
    records = {io: record_of(run) for io, run in runs.items()}
    psnr = [record["fidelity"]["psnr"]["mean"] for record in records.values()]
    assert psnr[0] == pytest.approx(psnr[1], abs=0.5) and psnr[0] > 20
    assert records["nemo"]["layers"] == records["diffusers"]["layers"]


# ------------------------------------------------------------------------------------------------------------- variants


@pytest.fixture(scope="module")
def lean(command, folders, sweep, tmp_path_factory) -> Path:
    """A run of Stable Diffusion 3 without the T5 that its folder has; graphs are in the cache, statistics are not."""
    folder = tmp_path_factory.mktemp("lean")
    link_cache(sweep.parent / "cache", folder / "cache")
    result = command(
        "quantize.py", "model=sd3_no_t5", f"model.path={folders}/sd3", "model.width=64", "model.height=64",
        "quant_level=3", "alpha=0.8", *SMALL, f"cache.dir={folder}/cache", "hand_over=[diffusers_modelopt]",
        f"hydra.run.dir={folder}/run",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "run"


def test_stable_diffusion_3_without_t5_has_all_but_its_part(lean):
    record, parts = record_of(lean), parts_of("sd3_no_t5")
    assert "text_encoder_3" not in parts and record["knobs"]["model"]["parts"] == parts
    assert sorted(path.name for path in (lean / "onnx").iterdir()) == sorted(parts) == sorted(record["plans"])
    assert set(record["parity"]) == {*parts, "quantized_layers", "transformer_quantized"}
    assert record["fidelity_unquantized_engine"]["psnr"]["mean"] > record["fidelity"]["psnr"]["mean"] > 20
    shapes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in onnx.load(onnx_path(lean, "transformer"), load_external_data=False).graph.input
    }
    assert shapes["encoder_hidden_states"][1] == 77 + 256  # of zeros, of which diffusers has as many as of T5's tokens
    card = (lean / "hand_over/diffusers_modelopt/README.md").read_text()
    assert "text_encoder_3=None, tokenizer_3=None" in card


@pytest.mark.parametrize("preset", ["int8", "fp8"])
def test_level_4_quantizes_the_joint_attention_of_stable_diffusion_3(command, folders, sweep, tmp_path, preset):
    link_cache(sweep.parent / "cache", tmp_path / "cache")
    result = command(
        "quantize.py", "model=sd3", f"model.path={folders}/sd3", "model.width=64", "model.height=64",
        f"quantize={preset}", "quant_level=4", *SMALL, "export_trt=none", f"cache.dir={tmp_path}/cache",
        f"hydra.run.dir={tmp_path}/run",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    record = record_of(tmp_path / "run")
    assert record["parity"]["quantized_attentions"]["count"] == 2
    assert record["fidelity_unquantized_engine"]["psnr"]["mean"] > record["fidelity"]["psnr"]["mean"] > 20
    with (tmp_path / "run/layers.csv").open(newline="") as file:
        formats = {row["name"]: row["format"] for row in csv.DictReader(file) if row["role"] == "attention"}
    assert formats == {f"transformer_blocks.{block}.attn": preset for block in range(2)}


def test_a_run_without_t5_draws_and_builds_again(command, lean, tmp_path):
    drawn = command("infer.py", f"run='{lean}'", "steps=1", "prompts=[a red cat]", "num_warmup_runs=0",
                    f"hydra.run.dir={tmp_path}/drawn")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr[-3000:]
    assert list(record_of(tmp_path / "drawn")["latency"]["openvino"]) == [*parts_of("sd3_no_t5"), "image"]
    built = command("export_trt.py", f"run='{lean}'", "infer.width=64", "infer.height=64",
                    f"hydra.run.dir={tmp_path}/built")  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    assert {path.stem for path in (tmp_path / "built/plan").glob("*.plan")} == set(parts_of("sd3_no_t5"))


def test_a_folder_that_was_saved_without_t5_is_drawn_without_it(command, tmp_path):
    VARIANTS["sd3_no_t5"](tmp_path / "lean")
    result = command("infer.py", "infer=torch", "model=sd3", f"model.path={tmp_path}/lean", "model.width=64",
                     "model.height=64", "steps=1", "prompts=[a red cat]", "num_warmup_runs=0",
                     f"hydra.run.dir={tmp_path}/run")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert list(record_of(tmp_path / "run")["latency"]["torch"]) == [*parts_of("sd3_no_t5"), "image"]


def test_schnell_takes_its_four_steps_without_guidance(command, tmp_path):
    VARIANTS["flux_schnell"](tmp_path / "schnell")
    small = [knob for knob in SMALL if not knob.startswith(("infer.steps", "quantize.n_steps"))]
    given = (
        f"model.path={tmp_path}/schnell", "model.width=64", "model.height=64", "quant_level=3", "alpha=0.8", *small,
        "export_trt=none", "cache.dir=null",
    )  # fmt: skip
    result = command("quantize.py", "model=flux_schnell", *given, f"hydra.run.dir={tmp_path}/run")
    assert result.returncode == 0, result.stderr[-3000:]
    record = record_of(tmp_path / "run")
    knobs = record["knobs"]
    assert (knobs["n_steps"], knobs["infer"]["steps"], knobs["infer"]["scale"]) == (4, 4, 0)
    assert len(record["fidelity"]["latent_sqnr_db"]) == 4 and record["fidelity"]["psnr"]["mean"] > 20
    inputs = onnx.load(onnx_path(tmp_path / "run", "transformer"), load_external_data=False).graph.input
    assert [value.name for value in inputs] == [
        *("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    ]
    assert inputs[1].type.tensor_type.shape.dim[1].dim_value == 256
    refused = command("quantize.py", "model=flux", *given, f"hydra.run.dir={tmp_path}/refused")
    assert refused.returncode == 2 and "infer.scale is 3.5, expected at most 1" in refused.stderr


# -------------------------------------------------------------------------------------------------------- other formats


@dataclass(frozen=True)
class Network:
    checkpoint: DiffusersCheckpoint
    graph: Path
    calls: list[dict[str, Tensor]]
    roles: dict[str, str]
    statistics: dict[str, LayerStatistics]

    def loaded(self) -> LoadedModel:
        return load_model(self.checkpoint)


def inputs_of(checkpoint: DiffusersCheckpoint, seed: int) -> dict[str, Tensor]:
    contract = denoiser_part(checkpoint).contract
    random = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=random) for name, shape in contract.shapes(**axes(2, 64, 64)).items()}
    return found | {name: torch.full_like(found[name], 0.5) for name in found if name.startswith("timestep")}


@pytest.fixture(scope="module", params=sorted(set(TINY) - {"sd21"}))  # whose layers are those of SD 1.5 and SDXL
def network(request, folders, sweep) -> Network:
    tokens = model_of(request.param)["max_sequence_length"]
    checkpoint = open_pipeline(folders / request.param, request.param, tokens)
    model, calls = load_model(checkpoint), [inputs_of(checkpoint, seed) for seed in range(2)]
    roles = checkpoint.family.layer_roles(model.denoiser)
    layers = {name: model.denoiser.get_submodule(name) for name, role in roles.items() if role != "excluded"}
    part, now = model.parts[checkpoint.family.DENOISER], {}
    with collect(part, layers, range(2), 1, lambda: (0, [now["call"]]), draw(layers, range(2), 1, seed=0)) as found:
        for now["call"], call in enumerate(calls):
            part(**call)
    graph = graph_of(sweep, request.param, checkpoint.family.DENOISER)
    return Network(checkpoint, graph, calls, roles, found.layers)


def graph_of(sweep: Path, name: str, part: str) -> Path:
    """The one that the sweep's job has left in the cache."""
    wanted = record_of(run_of(sweep, name))["inputs"]["checkpoint"]["sha256"], part
    [entry] = [
        manifest.parent
        for manifest in sweep.parent.glob("cache/graph/*/manifest.json")
        if (origin := json.loads(manifest.read_text())["origin"]) and (origin["checkpoint"], origin["part"]) == wanted
    ]
    return entry / "graph.onnx"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_exported_layers_compute_what_the_simulation_does(network, preset, tmp_path):
    checkpoint, family, recipe = network.checkpoint, network.checkpoint.family, recipe_of(preset, "quant_level=3")
    alpha = None if recipe.smoothing == "none" else 0.5
    recipe = replace(recipe, alpha=alpha, rank=min(recipe.rank, 8))
    weights, part = denoiser_weights(checkpoint), denoiser_part(checkpoint)
    inputs = family.shared_inputs([name for name, role in network.roles.items() if role != "conv"])
    assignment = derive(
        network.roles, lambda name: weights[f"{name}.weight"], network.statistics, recipe, inputs,
        bias_of=lambda name: weights[bias] if (bias := f"{name}.bias") in weights else None,
    )  # fmt: skip
    path = tmp_path / "onnx" / family.DENOISER / f"{family.DENOISER}.onnx"
    path.parent.mkdir(parents=True)
    write_part(ir.load(network.graph), checkpoint, family.DENOISER, path, assignment)
    onnx.checker.check_model(path, full_check=True)
    stored = {onnx.TensorProto.DataType.Name(weight.data_type) for weight in onnx.load(path).graph.initializer}
    assert stored & {"FLOAT8E4M3FN", "INT8", "INT4", "FLOAT4E2M1"}

    model = network.loaded()
    engine, call = model.torch_engine(family.DENOISER), network.calls[0]
    (full,) = engine(**call).values()
    simulate(denoiser_of(checkpoint, engine.module), assignment)
    simulation = run_simulation(engine, denoiser_of(checkpoint, engine.module), call, assignment)
    assert not torch.equal(full, simulation.output)
    used = formats_used(recipe.enable, recipe.quant_level)
    for name in ("openvino", "onnxruntime"):
        if why_not(name, used) is None:
            outputs = layer_outputs(simulation, assignment, path, part.prefix, name)
            loaded = load_engine(name, path)
            (quantized,) = loaded(**call).values()
            loaded.close()
            parity = layer_parity(simulation, full, quantized, assignment, outputs, {}, family.DENOISER)
            assert parity["quantized_layers"]["count"] == sum(layer.format is not None for layer in assignment.values())
