"""What a job refuses it refuses by the knob's name."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import is_dataclass

import pytest

from sd_quant.errors import ConfigError
from sd_quant.knobs import fields_of, options_of, read

from .composition import JOBS

pytestmark = pytest.mark.commit

NAMED = "diffusers, flux, pixart, sd15, sd21, sd3, sdxl"
NAN, INFINITY = float("nan"), float("inf")
SIZES = [[found] for found in ("832x1201", "0x64", "64x8192", "64", "64x64x64", "64 x 64", "ax64", "064x64", "-64x64")]
BOTH = {"enough_db": 40, "time_of_a_db": 0.03, "confidence": 0.95, "floor_db": None, "worst_db": None, "speedup": 2,
        "image_ms": 900}  # fmt: skip
REFUSED = {  # how begins what was expected, of which knob, instead of which values
    "from 0 to ": {"infer.num_warmup_runs": [-1], "infer.scale": [-1, 1e300]},
    "from 1 to ": {
        "model.max_sequence_length": [0], "quantize.devices": [0], "quantize.n_steps": [0], "quantize.batch_size": [0],
        "quantize.calib_size": [-1], "trt.min_batch_size": [0], "infer.num_samples": [0], "infer.num_timed_runs": [0],
    },
    "at least one, and at most 64": {"model.sizes": [[], 65 * ["64x64"]], "infer.sizes": [[]], "trt.sizes": [[]]},
    "a multiple of 8 from 8 to 4096": {"model.width": [100], "model.height": [0, 8192], "infer.width": [65]},
    "a multiple of 64 from 64 to 4096": {"model.width": [72], "model.height": [72], "infer.width": [72]},
    "WIDTHxHEIGHT such as 832x1216, each side a multiple of 8 from 8 to 4096": {
        "model.sizes": SIZES, "trt.sizes": SIZES, "infer.sizes": SIZES,
    },
    "WIDTHxHEIGHT such as 832x1216, each side a multiple of 64 from 64 to 4096": {
        "model.sizes": [["832x1200"]], "trt.sizes": [["832x1200"]], "infer.sizes": [["832x1200"]],
    },
    "text": {"model.path": [3], "quantize.exp_name": [None]},
    "text or null": {"cache.dir": [3], "quantize.calibration": [3]},
    "a list of texts": {"quantize.exclude.sdxl": ["*"]},
    "a list of texts or null": {"trt.sizes": [64], "trt.targets": [89, [89]]},
    "a list of texts or text": {"infer.prompts": [5]},
    "a number": {"quantize.quant_level": ["three", True]},
    "a finite number": {"quantize.alpha": [NAN], "trt.workspace_gib": [INFINITY], "infer.scale": [INFINITY]},
    "a whole number": {"quantize.n_steps": [2.5, True], "quantize.rotation": [True]},
    "a whole number or null": {"trt.optimization_level": ["best"]},
    "a whole number or a number": {"quantize.keep": ["all"]},
    "a list of whole numbers": {"quantize.snapshots": [["8"], "8"]},
    "a whole number from 0 to 2^64 - 1": {"quantize.seed": [-1], "infer.seed": [2**64]},
    "true or false": {"quantize.per_token": [1], "trt.static_batch": [1], "infer.allow_untrusted_plan": ["yes"]},
    "a group of knobs": {"infer": [3]},
    "more than 0": {
        "infer.guidance_until": [0], "trt.workspace_gib": [0],
        "verdict.floor_db": [0, 1e300], "verdict.worst_db": [-3], "verdict.image_ms": [0, 1e-300],
    },
    "more than 1": {"verdict.speedup": [1, 0.5, 1e300]},
    "a number between 0 and 1": {"infer.reuse": [0, 1.5]},
    "letters c, h, f, r and e, of which the first is c, h or f": {"infer.schedule": ["rrrr", "cx", ""]},
    "one for each of the 20 steps": {"infer.schedule": ["ccrc"]},
    "two computed steps before the first e": {"infer.schedule": ["ce" + 18 * "c"]},
    "a share of the 20 steps from 0.05 to 0.45: the first": {"infer.reuse": [0.01, 0.6, 0.99]},
    "one of ": {
        "quantize.quant_level": [5], "quantize.format": ["int3"], "quantize.choices": [["int3"]],
        "quantize.smoothing": ["all"], "quantize.observer": ["min"], "quantize.percentile_calibrator": ["nemo"],
        "quantize.weight_observer": ["by_role"],
        "quantize.collect_method": ["mean"], "quantize.accelerator": ["tpu"], "quantize.rotation": [-4, 2, 8, 32, 1024],
        "trt.library": ["rtx"], "trt.targets": [["SM89", "SM90"]], "trt.optimization_level": [6],
        "infer.sampler": ["plms"], "model.family": ["dalle"], "hand_over": [["comfi"]], "infer.engine": ["tvm"],
    },
    "a number above 0 and up to 1": {"quantize.percentile": [0, 1.5, 99]},
    "at least 0.05, one of the 20 steps, because it selects no step": {"quantize.percentile": [0.04]},
    "a number from 0 to 1, or auto": {"quantize.alpha": [1.5, -0.1, "best", None]},
    "null, because a run keeps everything in hydra.run.dir": {"infer.out_path": ["elsewhere"]},
    "numbers of prompts": {"quantize.snapshots": [[0, 8], [8, 10**9]]},
    "0, a number of singular directions, or a fraction below 1 of": {"quantize.rank": [-1, 1.5]},
    "bytes, or a share below 1 of what the denoiser's weights take in fp32": {"quantize.budget": [0, 1.5]},
    "bytes, such as 12GB or 800MiB": {"quantize.fit": [0, "GB", "12 gb", "0GB", "1e9GB", f"{400 * '9'}GB"]},
    "a number of layers below 1000 or a fraction below 1: keeping all would quantize nothing": {
        "quantize.keep": [1.0, -1, 1000],
    },
    f"patterns by the name of a family: {NAMED}": {"quantize.exclude": [{"sdx": ["*"]}]},
    "nearest, because int8 has 8 bits for a weight": {"quantize.rounding": ["gptq"]},
    "0, because int8 has 8 bits for a weight": {"quantize.hessian": [256]},
    "0, or a multiple of 64 up to 4096": {"quantize.hessian": [-64, 32, 100, 4160]},
    "false, because int8 has 8 bits for a weight": {"quantize.scale_search": [True]},
    "0, because the ranges of rotated inputs were not calibrated": {"quantize.rotation": [64]},
    "0, because with quantize.rank=0 there is no low-rank branch to fit": {"quantize.branch_rounds": [3]},
    "false, because with quantize.rank=0 there is no low-rank branch to share": {"quantize.shared_branch": [True]},
    "from trt.min_batch_size=1 to trt.max_batch_size=8": {"infer.batch_size": [9]},
}  # fmt: skip


def forms(value: object) -> set[str]:
    """How a refusal may put a value, or the item of a list."""
    items = value if isinstance(value, list) else []
    return {form for each in (value, *items) for form in (str(each), repr(each), f"{each}.0")}


@pytest.mark.parametrize(
    ("knob", "values", "expected"),
    [(knob, values, expected) for expected, knobs in REFUSED.items() for knob, values in knobs.items()],
)
def test_a_wrong_value_is_refused_by_its_name(job, knob, values, expected):
    for value in values:
        with pytest.raises(ConfigError) as refusal:
            job("quantize", {knob: value})
        said, _, told = str(refusal.value).partition(", expected ")
        name, _, found = said.partition(" is ")
        assert name in (knob, knob.removeprefix("quantize.")) and found in forms(value) and told.startswith(expected)


def test_every_number_of_things_has_a_limit(job, mappings):
    """Seeds, bytes and seconds make nothing of their size; what else is counted is refused before it is made."""
    free = {"quantize.seed", "infer.seed", "infer.prompts_seed", "quantize.budget", "quantize.fit"}

    def whole(kind: type, path: str = "") -> Iterator[str]:
        for name, (own, _) in fields_of(kind).items():
            if is_dataclass(own):
                yield from whole(own, f"{path}{name}.")
            elif int in options_of(own) or list[int] in options_of(own):
                yield path + name

    for primary in mappings:
        for knob in {*whole(JOBS[primary])} - free:
            with pytest.raises(ConfigError, match=r" is \[?1000000000\b|, expected at least 1000000000$"):
                job(primary, {knob: 10**9})


ONE_BY_PART = "expected one of fp16, bf16, fp32, stored, or one by part"


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"model.io": "onnx"}, "export.io is onnx, expected one of nemo, diffusers"),
        ({"model.family": "dalle"}, f"model.family is dalle, expected one of {NAMED}"),
        ({"model.dtype": "fp12"}, f"export.dtype is fp12, {ONE_BY_PART}"),
        ({"model.dtype": {"vae": "int8"}}, f"export.dtype is {{'vae': 'int8'}}, {ONE_BY_PART}"),
        ({"model.dtype": {"clip9": "bf16"}},
            "export.dtype is of clip9, expected of a part of the model: unet_xl, vae, clip1, clip2, vae_encoder"),
        ({"model.dtype": {"vae": "bf16"}, "infer.engine": "onnxruntime"},
            "export.dtype is {'vae': 'bf16'}, expected fp16 or fp32 with infer=onnxruntime, because ONNX Runtime's CPU "
            "has no products of bf16"),
        ({"model.dtype": "stored", "trt.targets": ["SM75", "SM80"]},
            "trt.targets is ['SM75'], expected SM80 or newer with export.dtype=stored, which have bf16"),
        ({"trt.sizes": ["128x64", "192x64"]},
            "infer.width is 64, expected from 128 to 192, as in trt.sizes, because plans are tuned for it"),
        ({"trt.sizes": ["64x128", "64x192"]},
            "infer.height is 64, expected from 128 to 192, as in trt.sizes, because plans are tuned for it"),
        ({"trt.min_batch_size": 9}, "trt.max_batch_size is 8, expected at least 9"),
        ({"verdict": BOTH}, "verdict.image_ms is 900.0, expected null, because verdict.speedup is the target already"),
        ({"quantize.smoothing": "none"}, "alpha is auto, expected null, because int8 smooths nothing"),
        ({"quantize.quant_levle": 3}, "there is no knob quantize.quant_levle; did you mean quant_level?"),
        ({"trt.xyzzy": 1}, "there is no knob trt.xyzzy; known are library, max_batch_size, min_batch_size, "
            "optimization_level, sizes, static_batch, targets, timing_cache, workspace_gib"),
        ({"modle": {}}, "there is no knob modle; did you mean model?"),
    ],
)  # fmt: skip
def test_a_refusal_may_be_of_another_knob_or_of_none(job, knobs, sentence):
    with pytest.raises(ConfigError) as refusal:
        job("quantize", knobs)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("primary", JOBS)
def test_every_missing_knob_is_named(mappings, primary):
    complete = mappings[primary]
    groups = {name: inner for name, inner in complete.items() if isinstance(inner, dict) and name != "files"}
    for knob in (*complete, *(f"{group}.{name}" for group, inner in groups.items() for name in inner)):
        group, _, name = knob.rpartition(".")
        mapping = deepcopy(complete)
        del (mapping[group] if group else mapping)[name]
        with pytest.raises(ConfigError) as refusal:
            read(JOBS[primary], mapping)
        assert str(refusal.value) == f"the knob {knob} is missing; give it a value"


def test_numbers_keep_their_kind_unless_a_fraction_is_expected(job):
    for knob, value, kind in (("keep", 1, int), ("keep", 0.5, float), ("alpha", 1, float)):
        found = getattr(job("quantize", {f"quantize.{knob}": value}).quantize, knob)
        assert found == value and type(found) is kind
