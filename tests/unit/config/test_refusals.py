"""What a job refuses it refuses by the knob's name: single values, and knobs that do not go together."""

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import is_dataclass

import pytest

from sd_quant.config import check_heeded
from sd_quant.errors import ConfigError
from sd_quant.knobs import fields_of, options_of, read
from tests.refusals import refused

from .composition import JOBS, job, mapping_of

pytestmark = pytest.mark.commit

NAMED = "diffusers, flux, pixart, sd15, sd21, sd3, sdxl"
SIZES = [[found] for found in ("832x1201", "0x64", "64x8192", "64", "64x64x64", "64 x 64", "ax64", "064x64", "-64x64")]
SEVERAL = {"infer.sizes": ["64x64", "128x64"], "model.sizes": ["64x64", "128x64"]}
NEGATIVE = {"infer.prompts": ["a cat", "a dog"], "infer.num_samples": 3}
SCORE = "null, because this score needs images of one size, and infer.sizes is given"
ONE_BY_PART = "expected one of fp16, bf16, fp32, stored, or one by part"
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
    "a finite number": {"quantize.alpha": [math.nan], "trt.workspace_gib": [math.inf], "infer.scale": [math.inf]},
    "a whole number": {"quantize.n_steps": [2.5, True], "quantize.rotation": [True]},
    "a whole number or null": {"trt.optimization_level": ["best"]},
    "a whole number or a number": {"quantize.keep": ["all"]},
    "a list of whole numbers": {"quantize.snapshots": [["8"], "8"]},
    "a whole number from 0 to 2^64 - 1": {"quantize.seed": [-1], "infer.seed": [2**64]},
    "true or false": {"quantize.per_token": [1], "trt.static_batch": [1], "infer.allow_untrusted_plan": ["yes"]},
    "a group of knobs": {"infer": [3]},
    "more than 0": {
        "trt.workspace_gib": [0],
        "verdict.floor_db": [0, 1e300], "verdict.worst_db": [-3], "verdict.image_ms": [0, 1e-300],
    },
    "more than 1": {"verdict.speedup": [1, 0.5, 1e300]},
    "more than 0 and at most 1": {"infer.strength": [0.0, 1.5]},
    "a number between 0 and 1": {"infer.reuse": [0, 1.5]},
    "letters c, h, f, r and e, of which the first is c, h or f": {"infer.schedule": ["rrrr", "cxhh", ""]},
    "one for each of the 20 steps": {"infer.schedule": ["ccrc", "chh"]},
    "two computed steps before the first e": {"infer.schedule": ["ce" + 18 * "c", "he" + 18 * "c"]},
    "a share of the 20 steps from 0.05 to 0.45: the first": {"infer.reuse": [0.01, 0.6, 0.99]},
    "one of ": {
        "quantize.quant_level": [5], "quantize.format": ["int3"], "quantize.choices": [["int3"]],
        "quantize.smoothing": ["all"], "quantize.observer": ["min"], "quantize.percentile_calibrator": ["nemo"],
        "quantize.collect_method": ["mean"], "quantize.accelerator": ["tpu"], "quantize.rotation": [-4, 2, 8, 32, 1024],
        "trt.library": ["rtx"], "trt.targets": [["SM89", "SM90"]], "trt.optimization_level": [6],
        "model.family": ["dalle"], "hand_over": [["comfi"]], "infer.engine": ["tvm"],
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
    "false, because int8 has 8 bits for a weight": {"quantize.scale_search": [True]},
    "0, because the ranges of rotated inputs were not calibrated": {"quantize.rotation": [64]},
    "0, because with quantize.rank=0 there is no low-rank branch to fit": {"quantize.branch_rounds": [3]},
    "from trt.min_batch_size=1 to trt.max_batch_size=8": {"infer.batch_size": [9]},
}  # fmt: skip


def forms(value: object) -> set[str]:
    """How a refusal may put a value, or the item of a list."""
    items = value if isinstance(value, list) else []
    return {form for each in (value, *items) for form in (str(each), repr(each), f"{each}.0")}


@pytest.mark.parametrize(("knob", "values", "expected"), [
    (knob, values, expected) for expected, knobs in REFUSED.items() for knob, values in knobs.items()
])  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(knob, values, expected):
    for value in values:
        with pytest.raises(ConfigError) as refusal:
            job("quantize", {knob: value})
        said, _, told = str(refusal.value).partition(", expected ")
        name, _, found = said.partition(" is ")
        assert name in (knob, knob.removeprefix("quantize.")) and found in forms(value) and told.startswith(expected)


def test_every_number_of_things_has_a_limit():
    """Seeds, bytes and seconds make nothing of their size; what else is counted is refused before it is made."""
    free = {"quantize.seed", "infer.seed", "infer.prompts_seed", "quantize.budget", "quantize.fit"}

    def whole(kind: type, path: str = "") -> Iterator[str]:
        for name, (own, _) in fields_of(kind).items():
            if is_dataclass(own):
                yield from whole(own, f"{path}{name}.")
            elif int in options_of(own) or list[int] in options_of(own):
                yield path + name

    for primary in JOBS:
        for knob in {*whole(JOBS[primary])} - free:
            with pytest.raises(ConfigError, match=r" is \[?1000000000\b|, expected at least 1000000000$"):
                job(primary, {knob: 10**9})


@pytest.mark.parametrize(("which", "knobs", "refusal"), [
    ("quantize", {"model.io": "onnx"}, "export.io is onnx, expected one of nemo, diffusers"),
    ("quantize", {"model.family": "dalle"}, f"one of {NAMED}"),
    ("quantize", {"model.dtype": "fp12"}, f"export.dtype is fp12, {ONE_BY_PART}"),
    ("quantize", {"model.dtype": {"vae": "int8"}}, f"export.dtype is {{'vae': 'int8'}}, {ONE_BY_PART}"),
    ("quantize", {"model.dtype": {"clip9": "bf16"}},
     "export.dtype is of clip9, expected of a part of the model: unet_xl, vae, clip1, clip2, vae_encoder"),
    ("quantize", {"model.dtype": {"vae": "bf16"}, "infer.engine": "onnxruntime"}, "export.dtype is {'vae': 'bf16'}, "
     "expected fp16 or fp32 with infer=onnxruntime, because ONNX Runtime's CPU has no products of bf16"),
    ("quantize", {"model.dtype": "stored", "trt.targets": ["SM75", "SM80"]},
     "trt.targets is ['SM75'], expected SM80 or newer with export.dtype=stored, which have bf16"),
    ("quantize", {"trt.sizes": ["128x64", "192x64"]},
     "infer.width is 64, expected from 128 to 192, as in trt.sizes, because plans are tuned for it"),
    ("quantize", {"trt.sizes": ["64x128", "64x192"]},
     "infer.height is 64, expected from 128 to 192, as in trt.sizes, because plans are tuned for it"),
    ("quantize", {"trt.min_batch_size": 9}, "trt.max_batch_size is 8, expected at least 9"),
    ("quantize", {"verdict.speedup": 2, "verdict.image_ms": 900},
     "null, because verdict.speedup is the target already"),
    ("quantize", {"quantize.smoothing": "none"}, "alpha is auto, expected null, because int8 smooths nothing"),
    ("quantize", {"trt.xyzzy": 1}, "there is no knob trt.xyzzy; known are library, max_batch_size, min_batch_size, "
     "optimization_level, sizes, static_batch, targets, timing_cache, workspace_gib"),
    ("quantize", {"modle": {}}, "there is no knob modle; did you mean model?"),
    ("infer", {"infer.engine": "torch", "infer.cuda_graph": True, "run": "x"}, None),
    ("infer", {"infer.engine": "tensorrt", "infer.cuda_graph": True, "run": "x"}, None),
    ("infer", {"infer.scale": 1.1, "infer.negative_prompt": "blurry"}, None),
    *(("quantize", NEGATIVE | {"infer.negative_prompt": given}, None) for given in ("", "rain", ["rain", "nude"])),
    ("quantize", {"trt.library": "none", "infer.batch_size": 64}, None),
    ("quantize", {"trt.library": "none", "trt.sizes": ["128x128", "192x128"]}, None),
    ("quantize", SEVERAL | {"infer.engine": "tensorrt_rtx", "trt.sizes": ["64x64", "192x128"]}, None),
    ("quantize", SEVERAL | {"infer.engine": "openvino", "trt.sizes": ["64x64", "64x128"]}, None),
    ("quantize", SEVERAL | {"infer.engine": "openvino", "trt.sizes": None}, None),
    ("quantize", {"infer.engine": "tensorrt", "trt.library": "auto"}, None),
    ("quantize", {"infer.engine": "tensorrt", "trt.library": "tensorrt"}, None),
    ("quantize", {"model.dtype": {"vae": "fp32"}, "infer.engine": "onnxruntime"}, None),
    *(("infer", {"run": "x", "infer.engine": engine, "infer.cuda_graph": True}, f"false, because infer.engine={engine}")
      for engine in ("openvino", "onnxruntime")),
    *(("infer", {"infer.scale": scale, "infer.negative_prompt": "blurry"},
       f"null, because at infer.scale={scale} nothing is guided") for scale in (0, 1)),
    ("quantize", NEGATIVE | {"infer.negative_prompt": "rain.txt"},
     "the text itself or a list of texts: only infer.prompts is read from a file"),
    *(("quantize", NEGATIVE | {"infer.negative_prompt": prompts}, f"infer.negative_prompt is a list of "
       f"{len(prompts)} texts, expected one for each of the 2 prompts, or a single text for all")
      for prompts in (["rain"], [])),
    ("quantize", {"infer.mask": "m.png"}, "null, because there is no infer.image"),
    ("quantize", {"infer.strength": 0.5}, "null, because there is no infer.image"),
    ("quantize", {"infer.image": "a.png", "infer.strength": 0.01},
     "infer.steps is 20, expected at least 100, because infer.str"),
    ("quantize", {"infer.image": "a.png", "infer.steps": 1}, "at least 2, because infer.strength=0.6"),
    ("quantize", {"model.calibration_image": "a.png", "quantize.n_steps": 1}, "at least 2, bec"),
    ("quantize", {"infer.image": "a.png", "infer.latents": "n.pt"},
     "null, because the noise that is added to infer.image"),
    ("quantize", {"model.calibration_mask": "m.png"}, "null, because there is no model.calib"),
    ("quantize", SEVERAL | {"infer.latents": "x"}, "null, because noise has one size"),
    ("quantize", SEVERAL | {"infer.image": "x"}, "null, because source images are read at one size, and infer.sizes"),
    ("quantize", SEVERAL | {"model.calibration_image": "x"}, "null, because source images are read at one size"),
    ("quantize", SEVERAL | {"metrics.clip_weights": "x"}, SCORE),
    ("quantize", SEVERAL | {"metrics.fid_references": "x"}, SCORE),
    *(("quantize", SEVERAL | {"infer.engine": "tensorrt_rtx", "trt.sizes": sizes}, "infer.sizes is 128x64, expected "
       "a width from 64 to 64, which trt.sizes has, because plans make the images")
      for sizes in (None, ["64x64", "64x128"])),
    ("export_trt", {"trt.sizes": ["128x64", "192x64"]}, "infer.width is 64, expected from 128 to 192, as in trt.sizes"),
    *(("quantize", {"infer.engine": "tensorrt", "trt.library": library},
       "auto or tensorrt, because infer.engine=tensorrt") for library in ("tensorrt_rtx", "none")),
    ("quantize", {"infer.precise_steps": "first12,last12"}, "at most the 20 steps of an image, and these are 24"),
    ("quantize", {"infer.precise_steps": 20}, "fewer than the 20 steps"),
    *(("quantize", {"infer.precise_steps": value}, "places such as first3,last3, or a number")
      for value in (0, "first0", "first3last3", "3dB", "last", "none", "auto")),
    ("quantize", {"infer.schedule": "chhc", "infer.steps": 4, "infer.precise_steps": 2}, "null"),
    ("quantize", {"infer.reuse": 0.3, "infer.precise_steps": 2}, "null, because infer.reuse"),
    ("int8_weight_only", {"infer.precise_steps": 2},
     "no step h, because quantize=int8_weight_only quantizes no inputs"),
    ("q4_k_weight_only", {"infer.steps": 4, "infer.schedule": "chhc"}, "no step h, because quantize=q4_k_weight_only"),
    *(("quantize", {f"infer.{knob}": value, "calib_size": 1}, f"at least 2, because infer.{knob} chooses")
      for knob, value in (("precise_steps", 2), ("reuse", 0.3))),
    ("nvfp4", {"infer.engine": "openvino", "infer.precise_steps": 3}, None),
    ("int8_weight_only", {"infer.schedule": "cffc", "infer.steps": 4}, None),
    ("quantize", {"infer.schedule": "hfcr", "infer.steps": 4}, None),
    # what a preset cannot do
    ("int8_per_tensor", {"quant_level": 4}, "at most 3, because int8_per_tensor has no format for attention's matrix "
     "products; give it one by attention=fp8 or attention=int8"),
    ("nvfp4", {"quant_level": 3, "attention": "fp8"},
     "null, because quant_level=3 leaves attention's products alone, 4 does not"),
    ("nvfp4", {"quant_level": 4, "attention": "nvfp4"}, "one of int8, fp8"),
    ("svdquant_w4a4", {"quant_level": 4}, "at most 3, because svdquant"),
    ("nvfp4", {"infer.engine": "torch_native"}, "another, such as"),
    ("int8", {"budget": 0.4, "infer.engine": "torch_native", "choices": ["nvfp4"]},
     "presets that infer.engine=torch_native multiplies, such as int8"),
    ("int8", {"choices": ["q4_k"]}, "one of convrot_w4a4, "),
    ("int8", {"infer.engine": "torch_native", "fit": "1GB"}, "null, because infer.engine"),
    ("int8", {"fit": "1GB", "keep": 2}, "0, because fit=1GB chooses the formats of all"),
    ("int8", {"fit": "1GB", "budget": 0.4}, "null, because fit=1GB chooses"),
    ("int8", {"fit": "1GB", "parts": {"vae": "int8_weight_only"}}, "null, because fit=1GB"),
    ("int8", {"resident": "one"}, "all, because there is no fit"),
    ("int8", {"infer.engine": "torch_native", "rank": 8}, "0, because infer.engine=torch_native"),
    ("fp8", {"alpha": 0.5}, "null, because fp8 smooths nothing"),
    ("int8", {"format": "fp8"}, "the name of the preset that"),
    ("mxfp4", {"per_channel": True}, "false, because"),
    ("mxfp8", {"scale_search": True}, "false, because mxfp8 has 8 bits"),
    ("mxfp8", {"trt.library": "tensorrt_rtx"}, "none, because TensorRT builds no product of FP8 numbers in blocks"),
    ("mxfp8", {"infer.engine": "tensorrt"},
     "another, such as infer=openvino, because TensorRT builds no product of FP8"),
    ("mxfp8", {"quant_level": 4}, "at most 3, because mxfp8 has no format for att"),
    ("int8_weight_only", {"percentile": 0.5}, "1, because int8_weight"),
    ("int8_weight_only", {"collect_method": "min-max"}, "mean-max, bec"),
    ("svdquant_w4a4", {"observer": "mse"}, "min_max, because"),
    ("fp8", {"observer": "mse"}, "min_max, because the levels of inputs of fp8 are not"),
    ("fp8", {"shift": True}, "false, because fp8 is more precise near zero than far from it, so a"),
    ("svdquant_w4a4", {"shift": True}, "false, because svdquant_w4a4 leaves the inputs of convolutions alone"),
    ("int8_per_tensor", {"shift": True}, "false, because without quantize.per_channel fp16 would round away a"),
    ("int4_w4a4", {"per_token": True}, "false, because int4_w4a4 has scales per block"),
    ("int8_weight_only", {"per_token": True}, "false, because int8_weight_only leaves the inputs of linears alone"),
    ("int8_weight_only", {"rotation": 64}, "0, because int8_weight_only leaves the inputs of linears alone"),
    ("int8", {"rotation": 16},
     "0, because the ranges of rotated inputs were not calibrated; quantize.per_token=true needs none"),
    ("fp8", {"trt.targets": ["SM80", "SM89"]}, "one of SM89, SM120, SM121"),
    ("nvfp4", {"trt.targets": ["SM89"]}, "one of SM120, SM121, because"),
    ("int4_w4a4", {"trt.targets": ["SM75"]}, "one of SM80, SM86, SM89"),
    ("int8", {"trt.targets": ["SM75", "SM89"]}, "newer ones, because TensorRT for RTX multiplies no"),
    ("q4_k_weight_only", {"infer.engine": "torch_native"},
     "another, such as infer=openvino, because torch itself multiplies no q4_k_weight_only"),
    ("fp8_per_block", {"infer.engine": "torch_native"},
     "another, such as infer=openvino, because torch itself multiplies no fp8_per_block"),
    ("q4_k_weight_only", {"quantize.enable.linear.activation": "q4_k"},
     "one of int8, fp8, fp8_128, int4, int4_per_row, mxfp8, mxfp4, nvfp4"),
    # blocks lie along the last axis, which is no channel of a convolution's input
    ("int8", {"quantize.enable.conv.activation": "nvfp4"}, "one of int8, fp8, int4_per_row"),
    ("int8", {"quant_level": 4, "attention": "fp8", "quantize.enable.linear.weight": "fp8"},
     "quantize.format is int8, expected the name of the preset"),
    ("int8", {"parts": {"vae": "none_such"}}, "a preset for each part, of con"),
    ("int8", {"parts": {"vae": "int8_weight_only", "clip1": "fp8"}, "calibration": "a folder"}, "quantize.parts.clip1 "
     "is fp8, expected a preset of weights alone such as int8_weight_only, because calibration=a folder has"),
    *(("int8", {"parts": {"vae": preset}, "infer.engine": "torch_native"},
       f"quantize.parts.vae is {preset}, expected a preset that infer.engine=t")
      for preset in ("nvfp4", "svdquant_w4a16")),
    # of whole rotations and blocks; and weights alone, which torch computes in every format
    *((preset, {"infer.engine": "torch_native"}, None) for preset in ("mxfp4_weight_only", "int8_weight_only")),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(which, knobs, refusal):
    """A row that states only the expectation checks that the last knob is named with its value."""
    said = refusal and re.escape(refusal)
    if refusal and ", expected " not in refusal and not refusal.startswith("there is no knob"):
        knob, value = list(knobs.items())[-1]
        values = "|".join(map(re.escape, forms(value)))
        said = rf"(quantize\.)?{re.escape(knob.removeprefix('quantize.'))} is ({values}), expected {said}"
    with refused(said):
        found = job(which, knobs)
        if refusal or "infer.prompts" in knobs:  # others that are taken name files that are not there
            found.infer.check_files()


@pytest.mark.parametrize(("given", "knobs", "because"), [
    ("alpha", {"quant_level": 1.0}, "quant_level=1 quantizes no linear"),
    ("quantize.rank", {"quant_level": 1.0}, "quant_level=1 quantizes no linear"),
    ("trt.max_batch_size", {"trt.library": "none"}, "export_trt=none builds no plan"),
])  # fmt: skip
def test_a_knob_that_changes_nothing_is_refused_where_it_is_given(given, knobs, because):
    check_heeded(job("int8", knobs), ["quant_level", "calib_size"])
    with pytest.raises(ConfigError, match=f"{given} was given and changes nothing, because {because}"):
        check_heeded(job("int8", knobs), ["quant_level", given])
    check_heeded(job("int8", {"trt.library": "tensorrt_rtx"}), [given])


@pytest.mark.parametrize("primary", JOBS)
def test_every_missing_knob_is_named(primary):
    complete = mapping_of(primary)
    groups = {name: inner for name, inner in complete.items() if isinstance(inner, dict) and name != "files"}
    for knob in (*complete, *(f"{group}.{name}" for group, inner in groups.items() for name in inner)):
        group, _, name = knob.rpartition(".")
        mapping = deepcopy(complete)
        del (mapping[group] if group else mapping)[name]
        with pytest.raises(ConfigError) as refusal:
            read(JOBS[primary], mapping)
        assert str(refusal.value) == f"the knob {knob} is missing; give it a value"


def test_numbers_keep_their_kind_unless_a_fraction_is_expected():
    for knob, value, kind in (("keep", 1, int), ("keep", 0.5, float), ("alpha", 1, float)):
        found = getattr(job("quantize", {f"quantize.{knob}": value}).quantize, knob)
        assert found == value and type(found) is kind
