"""What a job refuses it refuses by the knob's name."""

from copy import deepcopy

import pytest

from sd_quant.config import QuantizeJob, Trt
from sd_quant.errors import ConfigError
from sd_quant.knobs import read

from .composition import JOBS, changed

RANK = (
    "quantize.rank is {}, expected 0, a number of singular directions, or a fraction below 1 of a layer's shorter side"
)
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
        ("quantize.format", "int3", "quantize.format is int3, expected one of fp8, int4_w4a4, int8, int8_dynamic, "
            "int8_per_tensor, int8_weight_only, mxfp4, nvfp4, rotated_w4a4, svdquant_nvfp4, svdquant_w4a16, "
            "svdquant_w4a4"),
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
        ("quantize.per_token", 1, "quantize.per_token is 1, expected true or false"),
        *(("quantize.rotation", group, f"quantize.rotation is {group}, expected one of 0, 4, 16, 64, 256")
          for group in (-4, 2, 8, 32, 1024)),
        ("quantize.rotation", True, "quantize.rotation is True, expected a whole number"),
        ("quantize.rotation", 64, "quantize.rotation is 64, expected 0 without quantize.per_token, because how large a "
         "rotated input gets was not calibrated"),
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


def test_whole_numbers_are_numbers(mappings):
    job = read(QuantizeJob, changed(mappings["quantize"], "quantize.alpha", 1))
    assert job.quantize.alpha == 1.0 and isinstance(job.quantize.alpha, float)


def test_reading_a_group_alone(mappings):
    assert read(Trt, mappings["quantize"]["trt"], "trt.").targets is None
