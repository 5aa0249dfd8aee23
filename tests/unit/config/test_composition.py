"""Every YAML file under conf/ composes into its job."""

import dataclasses
import json
import re

import pytest
from hydra import compose

from sd_quant.cli import SHORTHANDS, composing
from sd_quant.config import InferJob, QuantizeJob
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.knobs import described, read
from sd_quant.models import FAMILIES
from sd_quant.places import input_path

from .composition import CONF, JOBS, NEEDED, composed, defaults_of, options


def test_every_file_under_conf_is_composed_by_the_test_below():
    """Those whose names begin with _ hold what primaries share, and are no options of a group."""
    covered = {f"{primary}.yaml" for primary in JOBS} | {f"{o.replace('=', '/')}.yaml" for _, o in options() if o}
    shared = {f"{entry}.yaml" for name in JOBS for entry in defaults_of(name) if str(entry).startswith("_")}
    assert covered | shared - {"_self_.yaml"} == {str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml")}
    assert len(options()) > 15


def skip_without_its_package(primary: str, option: str) -> None:
    try:
        with composing(primary):
            compose(primary, [option])
    except ResourceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("primary", "option"), options())
def test_every_option_of_every_primary_is_a_job(primary, option):
    overrides = [option, *NEEDED.get(option, [])] if option else []
    refused = {
        ("quantize", "infer=torch"): "an engine for the quantized model",  # it is the baseline of every job
        ("infer", "infer=torch_native"): "another, because this one computes what quantize.py derives",
    }
    if (primary, option) in refused:
        engine = option.partition("=")[2]
        with pytest.raises(ConfigError) as refusal:
            read(JOBS[primary], composed(primary, *overrides))
        assert str(refusal.value).startswith(f"infer.engine is {engine}, expected {refused[primary, option]}")
        return
    group, _, choice = option.partition("=")
    if group == "hydra/launcher":
        skip_without_its_package(primary, option)
    job = read(JOBS[primary], composed(primary, *overrides))
    if group == "infer":
        assert job.infer.engine == choice
    if group == "exclude":
        assert job.quantize.exclude_text == (choice == "text")
    if group == "export_trt":
        assert job.trt.library == choice
    for prompts in ("prompts", "calibration_prompts") if hasattr(job, "model") else ():
        assert input_path(getattr(job.model, prompts)).is_file()


def test_the_preset_is_nemos():
    """Names and defaults of NeMo's sdxl_quantize.yaml; ours, which it does not have, change nothing that it does."""
    job = read(QuantizeJob, composed("quantize", "model=sdxl_nemo", "model.path=sdxl.nemo"))
    found = dataclasses.asdict(job.quantize)
    ours = {
        "collect_method": "mean-max",
        "seed": 42,
        "enable": {
            "conv": {"weight": "int8", "activation": "int8"},
            "linear": {"weight": "int8", "activation": "int8"},
            "attention": "int8",  # for level 4, which NeMo has in FP8 alone
        },
        "exclude": {family: [] for family in FAMILIES},
        "include": {family: [] for family in FAMILIES},
        "weights_alone": {family: [] for family in FAMILIES},
        "exclude_text": False,
        "budget": None,
        "choices": ["int8"],
        "branch_rounds": 0,
        "rounding": "nearest",
        "scale_search": False,
        "per_channel": True,
        "smoothing": "folded",
        "rank": 0,
        "observer": "by_role",
        "observer_percentile": 99.99,
        "shift": True,
        "per_token": False,
        "rotation": 0,
        "percentile_calibrator": "corrected",
        "keep": 0,
        "calibration": None,
        "snapshots": [32, 64, 128, 256, 512, 1024],
        "accelerator": "auto",
        "devices": 1,
    }
    assert found == ours | {
        "exp_name": "nemo",
        "n_steps": 20,
        "format": "int8",
        "percentile": 1.0,
        "batch_size": 1,
        "calib_size": 32,
        "quant_level": 2.5,
        "alpha": "auto",
    }


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("quant_level", "3"),
        ("alpha", "0.5"),
        ("alpha", "0.8"),
        ("smoothing", "modelopt"),
        ("keep", "10"),
        ("keep", "0.1"),
        ("percentile", "0.9"),
        ("collect_method", "min-max"),
        ("calib_size", "8"),
        ("calibration", "outputs/cache/statistics/0123"),
    ],
)
def test_a_knob_has_the_same_meaning_at_the_top_and_in_its_group(knob, value):
    assert knob in SHORTHANDS
    short, full = (read(QuantizeJob, composed("quantize", f"{p}{knob}={value}")) for p in ("", "quantize."))
    assert short == full != read(QuantizeJob, composed("quantize"))


@pytest.mark.parametrize("primary", JOBS)
def test_help_says_of_every_knob_what_it_means_and_takes(primary, mappings):
    lines = list(described(JOBS[primary]))
    knobs = [f"{group}.{name}" for group in ("quantize", "trt", "infer") for name in mappings[primary].get(group, {})]
    told = {line.partition(":")[0].rpartition(".")[2] for line in lines}
    assert {knob.rpartition(".")[2] for knob in knobs} - {"enable"} <= told and lines
    assert all(re.fullmatch(r"[a-z_.0-9]+: [^$]+ \(.+\)", line) for line in lines)


def test_a_line_of_help():
    assert {
        "quantize.n_steps: denoising steps of a calibration image (at least 1)",
        "quantize.enable.conv.weight: format of a layer's weight (one of int8, fp8, int4, mxfp4, nvfp4)",
        "quantize.exclude: patterns of layers that stay in high precision, by model family (patterns by the name of a "
        "family: flux, pixart, sd15, sd21, sd3, sdxl)",
        "cache.dir: where it is kept; null: everything is made anew and nothing kept (text or null)",
    } <= set(described(QuantizeJob))


def test_a_folder_has_images_of_its_own_size(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet/config.json").write_text('{"sample_size": 96}')
    of_folder = composed("quantize", "model=sd15", f"model.path={tmp_path}")
    assert (of_folder["model"]["width"], of_folder["infer"]["height"]) == (768, 768)
    given = composed("quantize", "model=sd15", f"model.path={tmp_path}", "model.width=512")
    assert (given["infer"]["width"], given["infer"]["height"]) == (512, 768)
    assert composed("quantize", "model=sd15", "model.path=nowhere")["model"]["width"] == 512


@pytest.mark.parametrize(("t5", "parts"), [(["transformers", "T5EncoderModel"], 5), ([None, None], 4)])
def test_a_folder_has_parts_of_its_own(tmp_path, t5, parts):
    usual = ["transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"]
    (tmp_path / "model_index.json").write_text(
        json.dumps({name: ["some", "Kind"] for name in usual[:4]} | {usual[4]: t5})
    )
    for primary in ("quantize", "infer", "export_trt"):
        assert composed(primary, "model=sd3", f"model.path={tmp_path}")["model"]["parts"] == usual[:parts]
        assert composed(primary, "model=sd3_no_t5", f"model.path={tmp_path}")["model"]["parts"] == usual[:4]
        given = composed(primary, "model=sd3", f"model.path={tmp_path}", f"model.parts=[{','.join(usual)}]")
        assert given["model"]["parts"] == usual
    assert composed("infer", "model=sd3", "model.path=nowhere")["model"]["parts"] == usual


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_a_model_of_few_steps_recommends_them(name):
    """All others have 20, as NeMo does."""
    model = [f"model={name}", *NEEDED.get(f"model={name}", [])]
    steps = {"sdxl_turbo": 4, "flux_schnell": 4}.get(name, 20)
    job = read(QuantizeJob, composed("quantize", *model))
    assert (job.quantize.n_steps, job.infer.steps) == (steps, steps)
    assert read(InferJob, composed("infer", *model)).infer.steps == steps
    assert read(InferJob, composed("infer", *model, "steps=7")).infer.steps == 7
    given = read(QuantizeJob, composed("quantize", *model, "infer.steps=7", "quantize.n_steps=9"))
    assert (given.quantize.n_steps, given.infer.steps) == (9, 7)


def test_without_smoothing_a_preset_recommends_no_alpha():
    assert read(QuantizeJob, composed("quantize", "smoothing=none")).quantize.alpha is None
    assert read(QuantizeJob, composed("quantize", "quantize=svdquant_w4a4", "smoothing=none")).quantize.alpha is None
    assert read(QuantizeJob, composed("quantize", "quantize=svdquant_w4a4", "alpha=0.5")).quantize.alpha == 0.5
