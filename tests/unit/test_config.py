"""Every YAML file under conf/ composes into its job, and what a job refuses it refuses by the knob's name."""

import dataclasses
import errno
import importlib.util
import json
import re
import tempfile
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sd_quant.cli import SHORTHANDS, composing
from sd_quant.config import (
    BEFORE,
    PART_NAMES,
    ExportJob,
    HandOverJob,
    InferJob,
    Judge,
    JudgeJob,
    QuantizeJob,
    Trt,
    artifact,
    check_enabled,
    check_writable,
    lora_of,
    part_paths,
    run_model,
    targets_for,
)
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.knobs import described, read
from sd_quant.models import FAMILIES
from sd_quant.places import HOME, input_path
from sd_quant.quantization.recipe import Pair

CONF = HOME / "conf"
RANK = (
    "quantize.rank is {}, expected 0, a number of singular directions, or a fraction below 1 of a layer's shorter side"
)
JOBS = {
    "quantize": QuantizeJob,
    "export_trt": ExportJob,
    "infer": InferJob,
    "hand_over": HandOverJob,
    "judge": JudgeJob,
}
NEEDED = {  # mandatory values of a primary or an option
    "hand_over": ["run=some_run", "to=comfyui"],
    "judge": ["candidates=[some.gguf]"],
} | {
    f"model={path.stem}": ["model.path=some_model"]
    for path in (CONF / "model").glob("*.yaml")
    if "path: ???" in path.read_text()
}


def composed(primary: str, *overrides: str) -> dict:
    """What Hydra makes of a primary, without its own section and the short names of knobs."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(primary, [*NEEDED.get(primary, []), *overrides])
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return {name: value for name, value in plain.items() if name not in SHORTHANDS}


def defaults_of(primary: str) -> list:
    return yaml.safe_load((CONF / f"{primary}.yaml").read_text())["defaults"]


def groups_of(primary: str) -> set[str]:
    return {
        name.removeprefix("optional ") for entry in defaults_of(primary) if isinstance(entry, dict) for name in entry
    }


def options() -> list[tuple[str, str]]:
    """Each primary alone, then with each option of each of its groups; a launcher is for all of them."""
    pairs = [(primary, "") for primary in JOBS]
    for path in sorted(CONF.glob("*/**/*.yaml")):
        group = str(path.parent.relative_to(CONF))
        pairs += [(name, f"{group}={path.stem}") for name in JOBS if group in {*groups_of(name), "hydra/launcher"}]
    return pairs


def test_every_file_under_conf_is_composed_by_the_test_below():
    """Those whose names begin with _ hold what primaries share, and are no options of a group."""
    covered = {f"{primary}.yaml" for primary in JOBS} | {f"{o.replace('=', '/')}.yaml" for _, o in options() if o}
    shared = {f"{entry}.yaml" for name in JOBS for entry in defaults_of(name) if str(entry).startswith("_")}
    assert covered | shared - {"_self_.yaml"} == {str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml")}
    assert len(options()) > 15


@pytest.mark.parametrize(
    "engine, taken", [("openvino", False), ("onnxruntime", False), ("torch", True), ("tensorrt", True)]
)
def test_what_runs_on_the_processor_has_no_graph_of_cuda(engine, taken):
    overrides = ["infer=" + engine, "infer.cuda_graph=true", "run=x"]
    if taken:
        assert read(JOBS["infer"], composed("infer", *overrides)).infer.cuda_graph
        return
    with pytest.raises(ConfigError, match=f"infer.cuda_graph is True, expected false, because infer.engine={engine}"):
        read(JOBS["infer"], composed("infer", *overrides))


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


@pytest.mark.parametrize("scale", [0, 1])
def test_a_negative_prompt_needs_guidance(mappings, scale):
    mapping = changed(changed(mappings["infer"], "infer.scale", scale), "infer.negative_prompt", "blurry")
    sentence = f"infer.negative_prompt is blurry, expected null, because at infer.scale={scale} nothing is guided"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read(InferJob, mapping)
    assert read(InferJob, changed(mapping, "infer.scale", 1.1)).infer.negative_prompts() == ["blurry"]


@pytest.mark.parametrize(
    ("negative", "found"),
    [
        ("rain.txt", "rain.txt, expected the text itself or a list of texts: only infer.prompts is read from a file"),
        (["rain"], "a list of 1 texts, expected one for each of the 2 prompts, or a single text for all"),
        ([], "a list of 0 texts, expected one for each of the 2 prompts, or a single text for all"),
        (5, "5, expected a list of texts or text or null"),
        ("", None),
        ("rain", None),
        (["rain", "nude"], None),
    ],
)
def test_negative_prompts_are_one_text_or_one_for_each_prompt(mappings, negative, found):
    mapping = changed(mappings["quantize"], "infer.prompts", ["a cat", "a dog"])
    mapping = changed(changed(mapping, "infer.num_samples", 3), "infer.negative_prompt", negative)
    if found is None:
        infer = read(QuantizeJob, mapping).infer
        infer.check_files()
        assert len(infer.negative_prompts(3)) in (3, len(infer.prompt_list()))
        return
    with pytest.raises(ConfigError, match=f"^{re.escape(f'infer.negative_prompt is {found}')}$"):
        read(QuantizeJob, mapping).infer.check_files()


def test_negative_prompts_are_repeated_as_the_prompts_are(mappings):
    mapping = changed(mappings["quantize"], "infer.negative_prompt", ["rain", "nude"])
    infer = read(QuantizeJob, changed(mapping, "infer.num_samples", 2)).infer
    assert infer.negative_prompts(2) == ["rain", "rain", "nude", "nude"]
    assert infer.negative_prompts() == ["rain", "nude"]
    assert read(QuantizeJob, mappings["quantize"]).infer.negative_prompts(2) is None


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


# ------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def mappings() -> dict[str, dict]:
    return {primary: composed(primary) for primary in JOBS}


def changed(mapping: dict, knob: str, value: object) -> dict:
    mapping = deepcopy(mapping)
    *groups, name = knob.split(".")
    inner = mapping
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return mapping


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("knob", "value", "sentence"),
    [
        ("model.family", "dalle", "model.family is dalle, expected one of flux, pixart, sd15, sd21, sd3, sdxl"),
        ("model.io", "onnx", "export.io is onnx, expected one of nemo, diffusers"),
        ("model.max_sequence_length", 0, "model.max_sequence_length is 0, expected at least 1"),
        ("model.width", 100, "model.width is 100, expected a multiple of 64 from 64 to 4096"),
        ("model.height", 0, "model.height is 0, expected a multiple of 64 from 64 to 4096"),
        ("model.height", 8192, "model.height is 8192, expected a multiple of 64 from 64 to 4096"),
        *(
            (f"{section}.sizes", [found], f"{section}.sizes is {found}, expected WIDTHxHEIGHT such as 832x1216, each "
             "side a multiple of 64 from 64 to 4096")
            for section in ("model", "trt", "infer")
            for found in ("832x1200", "0x64", "64x8192", "64", "64x64x64", "64 x 64", "ax64", "064x64", "-64x64")
        ),
        ("model.sizes", [], "model.sizes is [], expected at least one"),
        ("infer.sizes", [], "infer.sizes is [], expected at least one"),
        ("trt.sizes", [], "trt.sizes is [], expected at least one"),
        ("trt.sizes", "64x64", "trt.sizes is '64x64', expected a list of texts or null"),
        ("trt.sizes", ["128x64", "192x64"],
            "infer.width is 64, expected from 128 to 192, as in trt.sizes, because plans are tuned for it"),
        ("trt.sizes", ["64x128", "64x192"],
            "infer.height is 64, expected from 128 to 192, as in trt.sizes, because plans are tuned for it"),
        ("model.path", 3, "model.path is 3, expected text"),
        ("quantize.format", "int3", "quantize.format is int3, expected one of fp8, int4_w4a4, int8, int8_per_tensor, "
            "int8_weight_only, mxfp4, nvfp4, svdquant_nvfp4, svdquant_w4a16, svdquant_w4a4"),
        ("quantize.quant_level", 5, "quant_level is 5.0, expected one of 1, 2, 2.5, 3, 4"),
        ("quantize.rank", -1, RANK.format(-1)),
        ("quantize.rank", 1.5, RANK.format(1.5)),
        ("quantize.quant_level", "three", "quantize.quant_level is 'three', expected a number"),
        ("quantize.quant_level", True, "quantize.quant_level is True, expected a number"),
        ("quantize.percentile", 1.5, "percentile is 1.5, expected a number above 0 and up to 1"),
        ("quantize.alpha", 1.5, "alpha is 1.5, expected a number from 0 to 1, or auto"),
        ("quantize.alpha", -0.1, "alpha is -0.1, expected a number from 0 to 1, or auto"),
        ("quantize.alpha", "best", "alpha is best, expected a number from 0 to 1, or auto"),
        ("quantize.alpha", NAN, "quantize.alpha is nan, expected a finite number"),
        ("quantize.alpha", None, "alpha is None, expected a number from 0 to 1, or auto"),
        ("quantize.smoothing", "all", "smoothing is all, expected one of folded, modelopt, none"),
        ("quantize.smoothing", "none", "alpha is auto, expected null, because int8 smooths nothing"),
        (
            "quantize.exclude",
            {"sdx": ["*"]},
            "quantize.exclude is {'sdx': ['*']}, expected patterns by the name of a family: flux, pixart, sd15, sd21, "
            "sd3, sdxl",
        ),
        ("quantize.exclude", {"sdxl": "*"}, "quantize.exclude.sdxl is '*', expected a list of texts"),
        ("quantize.budget", 1.5, "quantize.budget is 1.5, expected bytes, or a share below 1 of what the "
         "denoiser's weights take in fp32"),
        ("quantize.budget", 0, "quantize.budget is 0, expected bytes, or a share below 1 of what the "
         "denoiser's weights take in fp32"),
        ("quantize.choices", ["int3"], "quantize.choices is int3, expected one of int8, fp8, int4, mxfp4, nvfp4"),
        ("quantize.rounding", "gptq", "quantize.rounding is gptq, expected nearest, because int8 has 8 bits for a "
         "weight, where choosing them gains nothing"),
        ("quantize.branch_rounds", 3, "quantize.branch_rounds is 3, expected 0 with quantize.rank=0, because there is "
         "no low-rank branch to fit"),
        ("quantize.scale_search", True, "quantize.scale_search is True, expected false, because int8 has 8 bits for "
         "a weight, where choosing them gains nothing"),
        (
            "quantize.observer",
            "min",
            "quantize.observer is min, expected one of min_max, percentile, histogram, entropy, mse, by_role",
        ),
        (
            "quantize.observer_percentile",
            99.9,
            "quantize.observer_percentile is 99.9, expected 99.99, because only quantize.observer=percentile heeds it",
        ),
        (
            "quantize.percentile_calibrator",
            "nemo",
            "quantize.percentile_calibrator is nemo, expected one of corrected, modelopt",
        ),
        (
            "quantize.keep",
            1.0,
            "keep is 1.0, expected a number of layers or a fraction below 1: keeping all would quantize nothing",
        ),
        (
            "quantize.keep",
            -1,
            "keep is -1, expected a number of layers or a fraction below 1: keeping all would quantize nothing",
        ),
        ("quantize.keep", "all", "quantize.keep is 'all', expected a whole number or a number"),
        ("quantize.snapshots", [0, 8], "quantize.snapshots is [0, 8], expected numbers of prompts"),
        ("quantize.snapshots", ["8"], "quantize.snapshots is ['8'], expected a list of whole numbers"),
        ("quantize.snapshots", 8, "quantize.snapshots is 8, expected a list of whole numbers"),
        ("cache.dir", 3, "cache.dir is 3, expected text or null"),
        ("quantize.calibration", 3, "quantize.calibration is 3, expected text or null"),
        ("quantize.accelerator", "tpu", "quantize.accelerator is tpu, expected one of auto, cpu, cuda"),
        ("quantize.devices", 0, "quantize.devices is 0, expected at least 1"),
        (
            "quantize.percentile",
            0.04,
            "percentile is 0.04, expected at least 0.05, one of the 20 steps, because it selects no step",
        ),
        ("quantize.percentile", 0, "percentile is 0.0, expected a number above 0 and up to 1"),
        ("quantize.percentile", 99, "percentile is 99.0, expected a number above 0 and up to 1"),
        (
            "quantize.collect_method",
            "mean",
            "collect_method is mean, expected one of global_min, min-max, min-mean, mean-max, default",
        ),
        ("quantize.n_steps", 0, "quantize.n_steps is 0, expected at least 1"),
        ("quantize.n_steps", 2.5, "quantize.n_steps is 2.5, expected a whole number"),
        ("quantize.n_steps", True, "quantize.n_steps is True, expected a whole number"),
        ("quantize.batch_size", 0, "quantize.batch_size is 0, expected at least 1"),
        ("quantize.calib_size", -1, "quantize.calib_size is -1, expected at least 1"),
        ("quantize.seed", -1, "quantize.seed is -1, expected a whole number from 0 to 2^32 - 1"),
        ("quantize.exp_name", None, "quantize.exp_name is None, expected text"),
        ("trt.library", "rtx", "trt.library is rtx, expected one of auto, tensorrt, tensorrt_rtx, none"),
        ("trt.targets", "SM89", "trt.targets is 'SM89', expected a list of texts or null"),
        ("trt.targets", [89], "trt.targets is [89], expected a list of texts or null"),
        ("trt.static_batch", 1, "trt.static_batch is 1, expected true or false"),
        ("trt.min_batch_size", 0, "trt.min_batch_size is 0, expected at least 1"),
        ("trt.min_batch_size", 9, "trt.max_batch_size is 8, expected at least 9"),
        ("trt.optimization_level", 6, "trt.optimization_level is 6, expected one of 0, 1, 2, 3, 4, 5"),
        ("trt.optimization_level", "best", "trt.optimization_level is 'best', expected a whole number or null"),
        ("trt.workspace_gib", 0, "trt.workspace_gib is 0.0, expected more than 0"),
        ("trt.workspace_gib", INFINITY, "trt.workspace_gib is inf, expected a finite number"),
        (
            "infer.batch_size",
            9,
            "infer.batch_size is 9, expected from trt.min_batch_size=1 to trt.max_batch_size=8",
        ),
        ("infer.width", 65, "infer.width is 65, expected a multiple of 64 from 64 to 4096"),
        ("infer.num_samples", 0, "infer.num_samples is 0, expected at least 1"),
        ("infer.num_warmup_runs", -1, "infer.num_warmup_runs is -1, expected at least 0"),
        ("infer.num_timed_runs", 0, "infer.num_timed_runs is 0, expected at least 1"),
        ("infer.scale", -1, "infer.scale is -1.0, expected at least 0"),
        ("infer.scale", INFINITY, "infer.scale is inf, expected a finite number"),
        ("infer.seed", 2**32, "infer.seed is 4294967296, expected a whole number from 0 to 2^32 - 1"),
        ("infer.prompts", 5, "infer.prompts is 5, expected a list of texts or text"),
        ("infer.allow_untrusted_plan", "yes", "infer.allow_untrusted_plan is 'yes', expected true or false"),
        ("infer", 3, "infer is 3, expected a group of knobs"),
        ("quantize.quant_levle", 3, "there is no knob quantize.quant_levle; did you mean quant_level?"),
        ("trt.xyzzy", 1, "there is no knob trt.xyzzy; known are library, max_batch_size, min_batch_size, "
         "optimization_level, sizes, static_batch, targets, timing_cache, workspace_gib"),
        ("modle", {}, "there is no knob modle; did you mean model?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(mappings, knob, value, sentence):
    with pytest.raises(ConfigError) as refusal:
        read(QuantizeJob, changed(mappings["quantize"], knob, value))
    assert str(refusal.value) == sentence


def test_level_4_takes_a_format_for_attention():
    sentence = (
        "quant_level is 4.0, expected at most 3, because int8_per_tensor has no format for attention's matrix "
        "products; quantize=fp8 and quantize=int8 have"
    )
    with pytest.raises(ConfigError) as refusal:
        read(QuantizeJob, composed("quantize", "quantize=int8_per_tensor", "quant_level=4"))
    assert str(refusal.value) == sentence
    for preset in ("fp8", "int8"):
        assert read(QuantizeJob, composed("quantize", f"quantize={preset}", "quant_level=4")).quantize.quant_level == 4


@pytest.mark.parametrize("primary", JOBS)
def test_every_missing_knob_is_named(mappings, primary):
    complete = mappings[primary]
    read(JOBS[primary], complete)
    knobs = list(complete) + [
        f"{group}.{name}"
        for group, inner in complete.items()
        if isinstance(inner, dict) and group != "files"
        for name in inner
    ]
    for knob in knobs:
        *groups, name = knob.split(".")
        mapping = deepcopy(complete)
        del (mapping[groups[0]] if groups else mapping)[name]
        with pytest.raises(ConfigError) as refusal:
            read(JOBS[primary], mapping)
        assert str(refusal.value) == f"the knob {knob} is missing; give it a value"


def test_a_whole_number_of_layers_to_keep_stays_one(mappings):
    for value, kind in ((1, int), (0.5, float)):
        assert type(read(QuantizeJob, changed(mappings["quantize"], "quantize.keep", value)).quantize.keep) is kind


def test_a_cache_that_cannot_be_written_is_refused(mappings, tmp_path):
    (tmp_path / "file").touch()
    job = read(QuantizeJob, changed(mappings["quantize"], "cache.dir", str(tmp_path / "file" / "cache")))
    with pytest.raises(ConfigError, match=r"^the cache .* cannot be written, .*; set cache\.dir"):
        job.check_files()


def test_whole_numbers_are_numbers(mappings):
    job = read(QuantizeJob, changed(mappings["quantize"], "quantize.alpha", 1))
    assert job.quantize.alpha == 1.0 and isinstance(job.quantize.alpha, float)


def test_a_batch_needs_no_profile_when_no_plan_is_built(mappings):
    mapping = changed(changed(mappings["quantize"], "trt.library", "none"), "infer.batch_size", 64)
    assert read(QuantizeJob, mapping).infer.batch_size == 64


def test_a_size_needs_no_profile_when_no_plan_is_built(mappings):
    sizes = ["128x128", "192x128"]
    mapping = changed(changed(mappings["quantize"], "trt.library", "none"), "trt.sizes", sizes)
    assert read(QuantizeJob, mapping).trt.sizes == sizes


def test_what_is_of_one_size_is_refused_with_several(mappings):
    sizes = changed(mappings["quantize"], "infer.sizes", ["64x64", "64x128"])
    sizes = changed(sizes, "model.sizes", ["64x64", "64x128"])
    for knob, expected in (
        ("infer.latents", "null with infer.sizes, because noise is of one size"),
        ("infer.image", "null with infer.sizes, because images to begin with are read at one size"),
        ("model.calibration_image", "null with model.sizes, because images to begin with are read at one size"),
        ("metrics.clip_weights", "null with infer.sizes, because this score is of images of one size"),
        ("metrics.fid_references", "null with infer.sizes, because this score is of images of one size"),
    ):
        with pytest.raises(ConfigError, match=f"^{knob} is given, expected {expected}$"):
            read(QuantizeJob, changed(sizes, knob, "given"))


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


# ----------------------------------------------------------------------------------------- files that jobs name


@pytest.fixture
def archive(tmp_path) -> Path:
    """An empty tar: whole, though no checkpoint."""
    path = tmp_path / "empty.nemo"
    path.write_bytes(bytes(1024))
    return path


@pytest.fixture
def quantize_mapping(mappings, archive) -> dict:
    return changed(mappings["quantize"], "model.path", str(archive))


def test_more_calibration_prompts_than_there_are_is_refused(quantize_mapping, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\nthree\n")
    mapping = changed(quantize_mapping, "model.calibration_prompts", str(prompts))
    assert read(QuantizeJob, changed(mapping, "quantize.calib_size", 2)).calibration_prompts() == ["one", "two"]
    job = read(QuantizeJob, changed(mapping, "quantize.calib_size", 4))
    with pytest.raises(ConfigError, match="^calib_size is 4, expected at most the 3 prompts of the prompt file$"):
        job.check_files()


def test_statistics_from_elsewhere_have_to_be_there_and_need_no_prompts(quantize_mapping, tmp_path):
    mapping = changed(quantize_mapping, "model.calibration_prompts", "no/such.txt")
    read(QuantizeJob, changed(mapping, "quantize.calibration", str(tmp_path))).check_files()
    absent = read(QuantizeJob, changed(mapping, "quantize.calibration", "no/such/cache"))
    with pytest.raises(ConfigError, match="^calibration names no/such/cache, which .*; give a statistics"):
        absent.check_files()


def test_prompts_come_from_a_list_or_a_file(quantize_mapping, tmp_path):
    listed = changed(changed(quantize_mapping, "infer.prompts", ["a", "b"]), "infer.num_samples", 2)
    assert read(QuantizeJob, listed).infer.prompt_list() == ["a", "a", "b", "b"]
    (tmp_path / "prompts.txt").write_text("c\nd\n")
    named = changed(quantize_mapping, "infer.prompts", str(tmp_path / "prompts.txt"))
    assert read(QuantizeJob, named).infer.prompt_list() == ["c", "d"]
    with pytest.raises(ConfigError, match=r"^infer\.prompts is empty, expected at least one prompt$"):
        read(QuantizeJob, changed(quantize_mapping, "infer.prompts", [])).check_files()


def test_a_checkpoint_has_to_be_there_and_whole(mappings, quantize_mapping, archive):
    read(QuantizeJob, quantize_mapping).check_files()
    absent = read(QuantizeJob, changed(mappings["quantize"], "model.path", "no/such.nemo"))
    with pytest.raises(ConfigError, match=r"^model\.path names no/such\.nemo, which does not exist"):
        absent.check_files()
    archive.write_bytes(b"not a tar" * 100)
    with pytest.raises(ArtifactError, match="no valid tar header"):
        read(QuantizeJob, quantize_mapping).check_files()


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here")
@pytest.mark.parametrize("knob", ["infer.engine", "trt.library"])
def test_a_missing_runtime_is_refused_with_its_extra(quantize_mapping, knob):
    job = read(QuantizeJob, changed(quantize_mapping, knob, "tensorrt"))
    with pytest.raises(
        ResourceError, match=r"the package tensorrt is not installed.* pip install 'sd-quant\[tensorrt\]'"
    ):
        job.check_files()


@pytest.fixture
def run(tmp_path) -> Path:
    """The directory of an earlier run, as far as the checks look."""
    for part in PART_NAMES:
        path = artifact(tmp_path / "run", "onnx", part)
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path / "run"


def test_parts_come_from_the_run_and_single_paths_go_before(mappings, run, tmp_path):
    mapping = changed(mappings["export_trt"], "run", str(run))
    own = tmp_path / "own.onnx"
    own.touch()
    job = read(ExportJob, changed(mapping, "files.vae", str(own)))
    job.check_files()
    paths = part_paths(job, "onnx")
    assert list(paths) == list(PART_NAMES)
    assert paths["vae"] == own
    assert paths["unet_xl"] == run / "onnx/unet_xl/unet_xl.onnx"
    assert artifact(run, "plan", "unet_xl") == run / "plan/unet_xl.plan"


def test_an_export_takes_some_parts_and_pictures_need_all(mappings, run, archive):
    unet = str(artifact(run, "onnx", "unet_xl"))
    read(ExportJob, changed(mappings["export_trt"], "files.unet_xl", unet)).check_files()
    mapping = changed(changed(mappings["infer"], "files.unet_xl", unet), "model.path", str(archive))
    with pytest.raises(ConfigError, match=r"^no file is given for vae, clip1, clip2; set run=.* or vae=<path of its"):
        read(InferJob, mapping).check_files()


def test_without_files_an_export_is_of_the_checkpoint(mappings, run, archive):
    job = read(ExportJob, changed(mappings["export_trt"], "model.path", str(archive)))
    assert job.unquantized()
    job.check_files()
    with pytest.raises(ConfigError, match="^model.path names missing.nemo, which does not exist"):
        read(ExportJob, changed(mappings["export_trt"], "model.path", "missing.nemo")).check_files()
    read(ExportJob, changed(mappings["export_trt"], "trt.library", "none"))  # its ONNX files alone
    with pytest.raises(ConfigError, match="^trt.library is none, expected a library that builds plans"):
        read(ExportJob, changed(changed(mappings["export_trt"], "trt.library", "none"), "run", str(run)))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("style.safetensors", ("style.safetensors", 1.0)),
        ("a/b.safetensors:0.8", ("a/b.safetensors", 0.8)),
        ("b.safetensors:-1", ("b.safetensors", -1.0)),
    ],
)
def test_a_lora_has_a_strength(mappings, stated, expected):
    job = read(InferJob, changed(mappings["infer"], "model.loras", [stated]))
    assert lora_of(job.model.loras[0]) == expected
    with pytest.raises(ConfigError, match="^model.loras names .*, which does not exist"):
        job.model.check_files()


@pytest.fixture
def picture(tmp_path) -> Path:
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        (tmp_path / f"pictures/{name}.png").touch()
    return tmp_path / "pictures"


def test_images_to_start_from_make_the_encoder_a_part(mappings, run, picture):
    assert not read(QuantizeJob, mappings["quantize"]).model.encoder
    for primary, job in (("quantize", QuantizeJob), ("infer", InferJob)):
        mapping = changed(mappings[primary], "infer.image", str(picture))
        assert read(job, mapping).model.encoder
    assert list(part_paths(read(InferJob, changed(mapping, "run", str(run))), "onnx")) == [*PART_NAMES, "vae_encoder"]
    calibrated = changed(mappings["quantize"], "model.calibration_image", str(picture))
    assert read(QuantizeJob, calibrated).model.encoder


def test_prompts_and_images_take_turns_until_all_are_used(mappings, picture):
    infer = changed(mappings["infer"], "infer.prompts", ["a"])
    two = read(InferJob, changed(changed(infer, "infer.image", str(picture)), "infer.num_samples", 2))
    assert two.infer.prompt_list() == ["a"] * 4
    three = changed(changed(infer, "infer.image", str(picture)), "infer.prompts", ["a", "b", "c"])
    assert read(InferJob, three).infer.prompt_list() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("knobs", "refusal"),
    [
        ({"infer.mask": "m.png"}, "^infer.mask is m.png, expected null without infer.image, because it is the mask"),
        ({"infer.strength": 0.0}, "^infer.strength is 0.0, expected more than 0 and at most 1"),
        ({"infer.strength": 1.5}, "^infer.strength is 1.5, expected more than 0 and at most 1"),
        ({"infer.strength": 0.5}, "^infer.strength is 0.5, expected null without infer.image"),
        (
            {"infer.image": "a.png", "infer.strength": 0.01},
            "^infer.steps is 20, expected at least 100, because infer.str",
        ),
        (
            {"infer.image": "a.png", "infer.steps": 1},
            "^infer.steps is 1, expected at least 2, because infer.strength=0.6",
        ),
        (
            {"model.calibration_image": "a.png", "quantize.n_steps": 1},
            "^quantize.n_steps is 1, expected at least 2, bec",
        ),
        ({"infer.image": "a.png", "infer.latents": "n.pt"}, "^infer.latents is n.pt, expected null with infer.image"),
        ({"model.calibration_mask": "m.png"}, "^model.calibration_mask is m.png, expected null without model.calib"),
    ],
)
def test_knobs_of_images_that_do_not_go_together(mappings, knobs, refusal):
    mapping = mappings["quantize"]
    for name, value in knobs.items():
        mapping = changed(mapping, name, value)
    with pytest.raises(ConfigError, match=refusal):
        read(QuantizeJob, mapping)


def test_absent_images_and_masks_are_refused(mappings, picture):
    image = changed(mappings["quantize"], "infer.image", "missing.png")
    with pytest.raises(ConfigError, match="^infer.image names missing.png, which does not exist"):
        read(QuantizeJob, image).check_files()
    (picture.parent / "masks").mkdir()
    (picture.parent / "masks/a.png").touch()
    masked = changed(changed(image, "infer.image", str(picture)), "infer.mask", str(picture.parent / "masks"))
    with pytest.raises(ConfigError, match=r"^infer.mask is .* holds no mask for 1 of 2 images, such as b.png"):
        read(QuantizeJob, masked).check_files()


@pytest.mark.parametrize("stated", ["b.safetensors:much", "b.safetensors:nan", "b.safetensors:", ":0.5", ""])
def test_a_strength_that_is_no_number_is_refused(mappings, stated):
    with pytest.raises(ConfigError, match=r"^model.loras .* a file, or file:strength with a number"):
        read(InferJob, changed(mappings["infer"], "model.loras", [stated]))


def test_a_missing_part_is_named_with_its_path(mappings, run):
    missing = artifact(run, "onnx", "clip1")
    missing.unlink()
    with pytest.raises(ConfigError, match=f"^clip1 should be at {missing}, which does not exist"):
        read(ExportJob, changed(mappings["export_trt"], "run", str(run))).check_files()


def test_the_model_of_a_run_is_read_from_its_configuration(mappings, run):
    assert run_model(str(run)) is None
    model = mappings["infer"]["model"] | {"path": "some.nemo", "width": 128}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert run_model(str(run)) == model
    earlier = {name: value for name, value in model.items() if name not in BEFORE["model"]}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": earlier}))
    assert run_model(str(run)) == model, "of a run from before these knobs"
    environment = yaml.safe_dump({"model": model | {"path": "${oc.env:HOME}"}})  # Hydra would read it
    for broken in (
        "a: [",
        "just text",
        "other: 1",
        "model: " + "1:" * 100_000 + "1",
        "model: " + "[" * 9999,
        environment,
    ):
        (run / "config.yaml").write_text(broken)
        with pytest.raises(ArtifactError, match=r"config\.yaml is not the config of a run"):
            run_model(str(run))


def test_a_target_that_is_none_is_refused(mappings):
    with pytest.raises(ConfigError, match="^trt.targets is SM90, expected one of SM75"):
        read(QuantizeJob, changed(mappings["quantize"], "trt.targets", ["SM89", "SM90"]))


def test_a_run_keeps_its_pictures_in_its_own_directory(mappings):
    with pytest.raises(ConfigError, match="^infer.out_path is elsewhere, expected null"):
        read(QuantizeJob, changed(mappings["quantize"], "infer.out_path", "elsewhere"))


def test_an_out_path_below_a_file_is_refused(mappings, run, archive):
    mapping = changed(mappings["export_trt"], "run", str(run))
    read(ExportJob, changed(mapping, "infer.out_path", str(run / "new"))).check_files()
    assert not (run / "new").exists()
    below = changed(mapping, "infer.out_path", str(archive / "new"))
    with pytest.raises(ConfigError, match=r"cannot be written, because of .*empty\.nemo; set infer\.out_path$"):
        read(ExportJob, below).check_files()


def test_writable_makes_nothing(tmp_path):
    check_writable(tmp_path / "a/b/c")
    assert not list(tmp_path.iterdir())
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"because of .*broken; set hydra\.run\.dir"):
        check_writable(tmp_path / "broken/run")


def test_a_folder_that_cannot_be_made_is_refused(monkeypatch):
    """/proc has the permissions of a folder in which its owner may write."""
    with pytest.raises(ConfigError, match=r"^the output directory /proc/x/y cannot be written, because of /proc; set"):
        check_writable(Path("/proc/x/y"))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(full))
    with pytest.raises(ResourceError, match="the disk is full"):
        check_writable(Path("/tmp/x"))


def test_reading_a_group_alone(mappings):
    assert read(Trt, mappings["quantize"]["trt"], "trt.").targets is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["quantize=nvfp4", "infer=torch_native"], "infer.engine is torch_native, expected another, such as"),
        (
            ["quantize.budget=0.4", "infer=torch_native"],
            "quantize.budget is 0.4, expected null, because infer.engine=torch_native multiplies codes with codes",
        ),
        (
            ["quantize.rank=8", "infer=torch_native"],
            "quantize.rank is 8, expected 0, because infer.engine=torch_native",
        ),
        (["quantize=fp8", "alpha=0.5"], "alpha is 0.5, expected null, because fp8 smooths nothing"),
        (
            ["quantize=int8", "quantize.format=fp8"],
            "quantize.format is fp8, expected the name of the preset that",
        ),
        (
            ["quantize=mxfp4", "quantize.per_channel=true"],
            "quantize.per_channel is True, expected false, because",
        ),
        (
            ["quantize=int8_weight_only", "percentile=0.5"],
            "percentile is 0.5, expected 1, because int8_weight",
        ),
        (
            ["quantize=int8_weight_only", "collect_method=min-max"],
            "collect_method is min-max, expected mean-max, bec",
        ),
        (
            ["quantize=svdquant_w4a4", "quantize.observer=mse"],
            "quantize.observer is mse, expected min_max, because",
        ),
        (
            ["quantize=fp8", "quantize.shift=true"],
            "quantize.shift is True, expected false, because fp8 is more precise near zero than far from it, so a",
        ),
        (
            ["quantize=svdquant_w4a4", "quantize.shift=true"],
            "quantize.shift is True, expected false, because svdquant_w4a4 leaves the inputs of convolutions alone",
        ),
        (
            ["quantize=int8_per_tensor", "quantize.shift=true"],
            "quantize.shift is True, expected false without quantize.per_channel, because fp16 would round away a",
        ),
        (
            ["quantize=svdquant_w4a4", "quant_level=4"],
            "quant_level is 4.0, expected at most 3, because svdquant",
        ),
        (
            ["quantize=fp8", "trt.targets=[SM80,SM89]"],
            "trt.targets is SM80, expected one of SM89, SM120, SM121",
        ),
        (
            ["quantize=nvfp4", "trt.targets=[SM89]"],
            "trt.targets is SM89, expected one of SM120, SM121, because",
        ),
        (
            ["quantize=int4_w4a4", "trt.targets=[SM75]"],
            "trt.targets is SM75, expected one of SM80, SM86, SM89",
        ),
        (
            ["trt.targets=[SM75,SM89]"],
            "trt.targets is ['SM75', 'SM89'], expected newer ones, because TensorRT for RTX multiplies no",
        ),
    ],
)
def test_what_a_preset_cannot_do_is_refused_before_anything_starts(overrides, sentence):
    with pytest.raises(ConfigError) as error:
        read(QuantizeJob, composed("quantize", *overrides))
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("preset", "level", "targets"),
    [("int8", 3, ["SM89", "SM120"]), ("fp8", 4, ["SM89", "SM120"]), ("mxfp4", 1, ["SM120"]), ("nvfp4", 3, ["SM120"])],
)
def test_by_default_plans_are_for_the_usual_targets_that_have_the_format(preset, level, targets):
    job = read(QuantizeJob, composed("quantize", f"quantize={preset}", f"quant_level={level}"))
    assert targets_for(job.trt, set().union(*job.formats().values())) == targets


def test_a_conv_takes_no_input_in_blocks():
    """They lie along the last axis, which is no channel there."""
    quantize = read(QuantizeJob, composed("quantize")).quantize
    enable = dataclasses.replace(quantize.enable, conv=Pair("nvfp4", "nvfp4"))
    with pytest.raises(ConfigError, match=r"^quantize\.enable\.conv\.activation is nvfp4, expected one of int8, fp8$"):
        check_enabled(dataclasses.replace(quantize, enable=enable))


def test_without_smoothing_a_preset_recommends_no_alpha():
    assert read(QuantizeJob, composed("quantize", "smoothing=none")).quantize.alpha is None
    assert read(QuantizeJob, composed("quantize", "quantize=svdquant_w4a4", "smoothing=none")).quantize.alpha is None
    assert read(QuantizeJob, composed("quantize", "quantize=svdquant_w4a4", "alpha=0.5")).quantize.alpha == 0.5


def test_a_prompt_without_brackets_is_told_of_them(mappings, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^infer.prompts is cat, which is no file .*brackets: 'infer.prompts=\[cat\]'$"
    ):
        read(QuantizeJob, changed(mappings["quantize"], "infer.prompts", "cat")).infer.prompt_list()


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


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.gguf", "b/c.safetensors"], ["a.gguf", "c.safetensors"]),
        (["x/unet", "y/unet"], ["x-unet", "y-unet"]),
        (["1/x/unet", "2/x/unet", "a.gguf"], ["1-x-unet", "2-x-unet", "3-..a.gguf"]),
        (["a b;c.gguf"], ["a-b-c.gguf"]),
    ],
)
def test_each_candidate_has_a_name_of_its_own(paths, names, tmp_path, monkeypatch):
    """Which is that of a folder too."""
    monkeypatch.chdir(tmp_path)
    found = Judge(paths, 20, True, 0.95).named()
    expected = [name.replace("..", f"{tmp_path.name}-") for name in names]
    assert list(found) == expected and [path.relative_to(tmp_path) for path in found.values()] == list(map(Path, paths))
