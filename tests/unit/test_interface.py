import json
import subprocess
import sys
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import sd_quant
from sd_quant.errors import ConfigError
from sd_quant.interface import Comparison, Quantized, Result
from sd_quant.places import CONF, shown
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.statistics import LayerStatistics, Sample, Statistics
from sd_quant.report.table import write_csv
from sd_quant.stages import consumer, target_folder
from sd_quant.stages.load import Loaded, with_recipe

pytestmark = pytest.mark.commit

NOTHING = Statistics({}, {})
ROWS = [
    LayerAssignment("a", "ffn", (10, 64), format="int8", weight_axis=0),
    LayerAssignment("b", "ffn", (10, 64), reason="kept"),
]


@pytest.fixture(scope="module")
def model() -> sd_quant.Model:
    return sd_quant.open()


def loaded_of(model: sd_quant.Model) -> Loaded:
    job = model.job(None, {})
    return with_recipe(model.session, job.model, job.infer, job.quantize)


def test_to_import_it_or_to_choose_a_tracker_imports_nothing_heavy():
    code = """if True:
        import sys, sd_quant
        sd_quant.__version__, dir(sd_quant)
        assert "hydra" not in sys.modules
        import sd_quant.trackers
        assert not {"torch", "mlflow", "PIL", "onnx"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(sd_quant, name) for name in sd_quant.__all__)
    with pytest.raises(AttributeError, match="module sd_quant has no attribute nothing"):
        sd_quant.__getattr__("nothing")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "sentence"), [
    (lambda model: sd_quant.open("nothing"), "there is no preset model=nothing; none is like it"),
    (lambda model: sd_quant.open("sdxl"), "the knob model.path has no value"),
    (lambda model: sd_quant.open("sdxl", "no/such"), "model.path names no/such, which does not exist"),
    (lambda model: sd_quant.open(widht=64), "there is no knob model.widht; did you mean model.width"),
    (lambda model: sd_quant.open(width=63), "model.width is 63, expected a multiple of 8"),
    (lambda model: model.quantize(NOTHING, "int9"), "there is no preset quantize=int9; did you mean int8"),
    (lambda model: model.quantize(NOTHING, quant_level=7), "quant_level is 7.0, expected one of"),
    (lambda model: model.quantize(NOTHING, alhpa=1), "there is no knob quantize.alhpa; did you mean quantize.alp"),
    (lambda model: model.quantize(NOTHING, n_steps=3), "^quantize does not use n_steps; give it to calibrate"),
    (lambda model: model.calibrate(quant_level=3), "^calibrate does not use quant_level; give it to quantize$"),
    (lambda model: model.calibrate(alhpa=0.5), "there is no knob quantize.alhpa; did you mean quantize.alp"),
    (lambda model: model.calibrate("a cat", calib_size=3),
     "^calibrate does not use calib_size beside prompts; leave one of them out"),
    (lambda model: model.calibrate([]), r"^prompts is \[\], expected a text or a list of at least one; give what"),
    (lambda model: model.images(["a cat", 5]), r"^prompts is \['a cat', 5\], expected a text or a list of"),
    (lambda model: model.images(5), "^prompts is 5, expected a text or a list"),
    (lambda model: model.images(["a cat"], stepz=1), "there is no knob infer.stepz; did you mean infer.steps"),
    (lambda model: model.images(["a cat"], steps=10**6), "infer.steps is 1000000, expected from 1 to 100000"),
    (lambda model: sd_quant.compare([], ["a cat"]), "recipes of 0 models were given, expected some of one model"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_the_sentence_of_the_command(model, call, sentence):
    """A Hydra application around it goes on as before."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        outside = GlobalHydra.instance().hydra
        with pytest.raises(ConfigError, match=sentence):
            call(model)
        assert GlobalHydra.instance().hydra is outside
        assert compose("quantize").quantize.quant_level == 3


def test_knobs_are_those_of_the_command(model, tmp_path):
    (tmp_path / "two.txt").write_text("a red bicycle\na blue door\n")
    short = sd_quant.open(calibration_prompts=str(tmp_path / "two.txt"))  # too short for calibration alone
    with pytest.raises(ConfigError, match="^calib_size is [0-9]+, expected at most the 2 prompts"):
        short.calibrate()
    recipe = {"quant_level": 4, "n_steps": 3, "scale": 2.5, "exp_name": "${b}"}
    job = model.job("fp8", recipe, {"prompts": ["a [cat], ${b}"], "steps": 7})
    assert job.quantize.exp_name == "${b}"
    assert (job.quantize.format, job.quantize.quant_level, job.quantize.n_steps) == ("fp8", 4, 3)
    assert (job.infer.scale, job.infer.prompts, job.infer.steps) == (2.5, ["a [cat], ${b}"], 7)
    assert job.quantize.alpha == "auto" or job.quantize.smoothing == "none"
    assert job.cache.dir is None


@pytest.mark.slow
def test_a_recipe_knows_prompts_and_steps_from_the_statistics(model, monkeypatch):
    monkeypatch.setattr(sd_quant.interface.model, "choose", lambda *_: SimpleNamespace(assignments={"unet_xl": {}}))
    conv = LayerStatistics("conv", torch.ones(2000, 7), Sample(torch.ones(0), torch.ones(0)))
    linear = LayerStatistics("linear", torch.ones(7, 3), conv.rows)
    calls = {"x": Sample(torch.ones(4, 1), torch.ones(4))}
    statistics = Statistics({"a": linear, "b": conv}, calls)  # of more prompts than the preset has
    assert repr(statistics) == "Statistics(2 layers, 2000 prompts, 7 steps, 4 calls)"
    assert repr(Statistics({"a": linear}, {})) == "Statistics(1 layers, 7 steps, 0 calls)"
    made = model.quantize(statistics, quant_level=1, percentile=0.15)
    assert (made.job.quantize.n_steps, made.job.quantize.calib_size) == (7, 2000)
    with pytest.raises(ConfigError, match="percentile is 0.14, expected at least 0.142857, one of the 7 steps"):
        model.quantize(statistics, quant_level=1, percentile=0.14)
    assert model.quantize(Statistics({"a": linear}, {})).job.quantize.calib_size is None


@pytest.mark.slow
def test_what_is_handed_over_has_the_card_of_the_command(model, tmp_path, monkeypatch):
    def write(place, target, checkpoint, rows, marks):
        place.mkdir()
        (place / "weights").write_bytes(bytes(200_000))
        return {}

    monkeypatch.setattr(target_folder, "write_folder", write)
    known = {"weight_axis": 0, "weight_amax": torch.ones(32), "activation_amax": 1.0}
    rows = {"a": LayerAssignment("a", "qkv", (32, 32), "int8", "int8", **known)}
    knobs = {"quant_level": 3, "observer": "mse"}
    loaded = loaded_of(model)
    made = Quantized(model, "int8", model.job(None, knobs), loaded, rows, knobs)
    with pytest.raises(ConfigError, match="^hand_over does not use steps without prompts; give prompts$"):
        made.hand_over("comfyui", tmp_path / "out", steps=3)
    monkeypatch.setattr(
        sd_quant.interface.Model, "generate", lambda *given, sampling: SimpleNamespace(images=given[1:])
    )
    scores = {"lpips": {"values": [0.001, 0.09]}}

    def fidelity_of(loaded, infer, reference, opened, target):
        assert (reference, infer.steps, target) == (("a rocket", {"steps": 3}), 3, "comfyui")
        assert infer.prompts == ["a rocket"]
        return scores

    monkeypatch.setattr(consumer, "fidelity_of", fidelity_of)
    for folder, prompts, figures in (("a", {}, None), ("b", {"prompts": "a rocket", "steps": 3}, scores)):
        (tmp_path / folder).mkdir()  # an empty one is filled
        assert made.hand_over("comfyui", tmp_path / folder, **prompts) == tmp_path / folder
        assert {path.name for path in (tmp_path / folder).iterdir()} == {"README.md", "hand_over.json", "weights"}
        found = json.loads((tmp_path / folder / "hand_over.json").read_text())
        assert (found["run"], found["quantized"], found["fidelity"]) == (None, 1, figures)
    card = (tmp_path / "b/README.md").read_text()
    assert "# unet_xl for ComfyUI" in card and "| lpips | 0.0455 | 0 to 0.6" in card
    code = card.partition("## How it was made\n\n")[2].partition("\n\n")[0]
    assert code.splitlines() == [
        "    model = sd_quant.open('sdxl_mini')",
        "    quantized = model.quantize(statistics, 'int8', quant_level=3, observer='mse')  # statistics: of "
        "model.calibrate",
        f"    quantized.hand_over('comfyui', '{tmp_path}/b')",
    ]
    compile(dedent(code), "card", "exec")


@pytest.mark.slow
def test_bytes_of_weights_are_those_of_their_formats(model):
    loaded = loaded_of(model)
    made = Quantized(model, "one", None, loaded, {row.name: row for row in ROWS})
    parameters = model.parameters["unet_xl"]
    assert made.weight_bytes == 2 * parameters - 2 * 640 + 640 + 10 * 2  # codes, and a scale in fp16 for each channel
    assert made.share == made.weight_bytes / (2 * parameters)
    both = replace(made, loaded=replace(loaded, others={"clip1": loaded}), parts={"clip1": {}})  # as of two denoisers
    assert both.weight_bytes == made.weight_bytes + 2 * model.parameters["clip1"]
    assert both.share == both.weight_bytes / (2 * (parameters + model.parameters["clip1"]))
    unheld = replace(made, assignment={"a": replace(ROWS[0], format="int4", low_rank=None)})
    with pytest.raises(ConfigError, match="ModelOpt cannot hold one, expected INT8 or FP8"):
        unheld.save_modelopt("unwritten.pt")


@pytest.mark.slow
def test_each_thing_is_shown_in_a_line(model):
    path = CONF / "x.nemo"
    count = f"{model.parameters['unet_xl']:,}"
    assert repr(replace(model, path=path)) == f"Model(sdxl_mini, {shown(path)}, {count} parameters in unet_xl)"
    rows = {row.name: row for row in (*ROWS, LayerAssignment("c", "attention", ()))}
    made = Quantized(model, "int8, alpha=0.8", None, None, rows)
    assert repr(made) == "Quantized(int8, alpha=0.8: 1 of 2 layers of sdxl_mini)"
    result = Result(made, np.zeros((1, 64, 64, 3), np.uint8), {"psnr": {"values": [31.234]}})
    assert repr(result) == "Result(int8, alpha=0.8: 31.23 dB)"
    comparison = Comparison(["a cat"], result.images, [result, result])
    assert repr(comparison) == "Comparison(int8, alpha=0.8; int8, alpha=0.8; 1 prompt)"


@pytest.mark.slow
def test_a_comparison_is_a_table_with_intervals(model, tmp_path):
    loaded = loaded_of(model)
    images = np.zeros((3, 64, 64, 3), np.uint8)
    scores = {"psnr": {"values": [30.0, 32.0, None]}, "ssim": {"mean": 0.9}, "lpips": {"mean": 0.01}}
    same = {"psnr": {"values": [None] * 3}, "ssim": {"mean": 1.0}, "lpips": {"mean": 0.0}}
    one = {"psnr": {"values": [30.0]}, "ssim": {"mean": 0.9}, "lpips": {"mean": 0.01}}
    named = {"a": scores, "b": same, "c": one}
    results = [Result(Quantized(model, name, None, loaded, {}), images, each) for name, each in named.items()]
    comparison = Comparison(["x", "y", "z"], images, results)
    first, second, third = comparison.rows()
    assert (first["recipe"], first["psnr_db"], first["share_of_fp16"]) == ("a", 31.0, 1.0)
    assert first["psnr_db_high"] - 31 == pytest.approx(12.7062, rel=1e-4)  # t of one degree, with s = sqrt 2
    assert second["psnr_db"] == float("inf")
    assert [third[f"psnr_db{end}"] for end in ("", "_low", "_high")] == [30.0, None, None]  # of one image
    lines = str(comparison).splitlines()
    assert "31.00 ± 12.71" in lines[1] and "30.00" in lines[3] and not any("±" in line for line in lines[2:])
    write_csv(comparison.rows(), tmp_path / "rows.csv")
    assert ",30,,,0.9," in (tmp_path / "rows.csv").read_text()
    assert comparison.grid(tmp_path / "grid.png", 0).stat().st_size > 0
