"""Which formats and knobs of a recipe go together."""

import dataclasses
import re
from functools import cache

import pytest

from sd_quant.config import QuantizeJob, check_heeded, recipe, targets_for
from sd_quant.config.recipe import check_recipe, part_presets, part_recipe
from sd_quant.errors import ConfigError
from sd_quant.knobs import read
from sd_quant.quantization.recipe import Pair, Recipe
from tests.nested import with_values
from tests.refusals import refused

from .composition import composed

pytestmark = pytest.mark.commit


@cache
def mapping_of(preset: str) -> dict:
    return composed("quantize", f"quantize={preset}")


def job(preset: str, knobs: dict[str, object]) -> QuantizeJob:
    """The job of a preset with other knobs; those of ``quantize`` go by their names alone."""
    named = {name if "." in name else f"quantize.{name}": value for name, value in knobs.items()}
    return read(QuantizeJob, with_values(mapping_of(preset), named))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "knobs", "sentence"),
    [
        ("int8_per_tensor", {"quant_level": 4}, "quant_level is 4.0, expected at most 3, because int8_per_tensor has "
         "no format for attention's matrix products; give it one by attention=fp8 or attention=int8"),
        ("nvfp4", {"quant_level": 3, "attention": "fp8"}, "attention is fp8, expected null, because quant_level=3 "
         "leaves attention's products alone, 4 does not"),
        ("nvfp4", {"quant_level": 4, "attention": "nvfp4"}, "attention is nvfp4, expected one of int8, fp8"),
        ("svdquant_w4a4", {"quant_level": 4}, "quant_level is 4.0, expected at most 3, because svdquant"),
        ("nvfp4", {"infer.engine": "torch_native"}, "infer.engine is torch_native, expected another, such as"),
        ("int8", {"budget": 0.4, "choices": ["nvfp4"], "infer.engine": "torch_native"}, "quantize.choices is nvfp4, "
         "expected presets that infer.engine=torch_native multiplies, such as int8"),
        ("int8", {"choices": ["q4_k"]}, "quantize.choices is q4_k, expected one of convrot_w4a4, "),
        ("int8", {"fit": "1GB", "infer.engine": "torch_native"}, "fit is 1GB, expected null, because infer.engine"),
        ("int8", {"fit": "1GB", "keep": 2}, "keep is 2, expected 0, because fit=1GB chooses the formats of all"),
        ("int8", {"fit": "1GB", "budget": 0.4}, "quantize.budget is 0.4, expected null, because fit=1GB chooses"),
        ("int8", {"fit": "1GB", "parts": {"vae": "int8_weight_only"}}, "quantize.parts is {'vae': 'int8_weight_only'}, "
         "expected null, because fit=1GB"),
        ("int8", {"resident": "one"}, "quantize.resident is one, expected all, because there is no fit"),
        ("int8", {"rank": 8, "infer.engine": "torch_native"}, "quantize.rank is 8, expected 0, because "
         "infer.engine=torch_native"),
        ("fp8", {"alpha": 0.5}, "alpha is 0.5, expected null, because fp8 smooths nothing"),
        ("int8", {"format": "fp8"}, "quantize.format is fp8, expected the name of the preset that"),
        ("mxfp4", {"per_channel": True}, "quantize.per_channel is True, expected false, because"),
        ("mxfp8", {"scale_search": True}, "quantize.scale_search is True, expected false, because mxfp8 has 8 bits"),
        ("mxfp8", {"trt.library": "tensorrt_rtx"}, "trt.library is tensorrt_rtx, expected none, because TensorRT "
         "builds no product of FP8 numbers in blocks"),
        ("mxfp8", {"infer.engine": "tensorrt"}, "infer.engine is tensorrt, expected another, such as infer=openvino, "
         "because TensorRT builds no product of FP8"),
        ("mxfp8", {"quant_level": 4}, "quant_level is 4.0, expected at most 3, because mxfp8 has no format for att"),
        ("int8_weight_only", {"percentile": 0.5}, "percentile is 0.5, expected 1, because int8_weight"),
        ("int8_weight_only", {"collect_method": "min-max"}, "collect_method is min-max, expected mean-max, bec"),
        ("svdquant_w4a4", {"observer": "mse"}, "quantize.observer is mse, expected min_max, because"),
        ("int8_weight_only", {"weight_observer": "mse"}, "quantize.weight_observer is mse, expected min_max, because"),
        ("int4_w4a4", {"weight_observer": "mse"}, "quantize.weight_observer is mse, expected min_max, because"),
        ("fp8", {"shift": True}, "quantize.shift is True, expected false, because fp8 is more precise near zero than "
         "far from it, so a"),
        ("svdquant_w4a4", {"shift": True}, "quantize.shift is True, expected false, because svdquant_w4a4 leaves the "
         "inputs of convolutions alone"),
        ("int8_per_tensor", {"shift": True}, "quantize.shift is True, expected false, because without "
         "quantize.per_channel fp16 would round away a"),
        ("int4_w4a4", {"per_token": True}, "quantize.per_token is True, expected false, because int4_w4a4 has scales "
         "per block"),
        ("int8_weight_only", {"per_token": True}, "quantize.per_token is True, expected false, because "
         "int8_weight_only leaves the inputs of linears alone"),
        ("int8_weight_only", {"rotation": 64}, "quantize.rotation is 64, expected 0, because int8_weight_only leaves "
         "the inputs of linears alone"),
        ("int8", {"rotation": 16}, "quantize.rotation is 16, expected 0, because the ranges of rotated inputs were not "
         "calibrated; quantize.per_token=true needs none"),
        ("fp8", {"trt.targets": ["SM80", "SM89"]}, "trt.targets is SM80, expected one of SM89, SM120, SM121"),
        ("nvfp4", {"trt.targets": ["SM89"]}, "trt.targets is SM89, expected one of SM120, SM121, because"),
        ("int4_w4a4", {"trt.targets": ["SM75"]}, "trt.targets is SM75, expected one of SM80, SM86, SM89"),
        ("int8", {"trt.targets": ["SM75", "SM89"]}, "trt.targets is ['SM75', 'SM89'], expected newer ones, because "
         "TensorRT for RTX multiplies no"),
        ("nvfp4", {"hessian": 64, "rounding": "nearest"}, "quantize.hessian is 64, expected 0, because only "
         "quantize.rounding=gptq takes one, and it is nearest"),
        ("convrot_w4a4", {"hessian": 64}, "quantize.hessian is 64, expected a multiple of 256, because "
         "quantize.rotation=256 rotates as many inputs together"),
        ("q4_k_weight_only", {"hessian": 64}, "quantize.hessian is 64, expected a multiple of 256, because q4_k has "
         "blocks of as many inputs"),
        ("q4_k_weight_only", {"infer.engine": "torch_native"}, "infer.engine is torch_native, expected another, "
         "such as infer=openvino, because torch itself multiplies no q4_k_weight_only"),
        ("q4_k_weight_only", {"quantize.enable.linear.activation": "q4_k"}, "quantize.enable.linear.activation is "
         "q4_k, expected one of int8, fp8, fp8_128, int4, int4_per_row, mxfp8, mxfp4, nvfp4"),
        ("int8", {"quant_level": 4, "attention": "fp8", "quantize.enable.linear.weight": "fp8"},
         "quantize.format is int8, expected the name of the preset"),
        ("int8", {"parts": {"vae": "none_such"}}, "quantize.parts is {'vae': 'none_such'}, expected a preset for each "
         "part, of con"),
        ("int8", {"parts": {"vae": "int8_weight_only", "clip1": "fp8"}, "calibration": "a folder"},
         "quantize.parts.clip1 is fp8, expected a preset of weights alone such as int8_weight_only, because "
         "calibration=a folder has statistics"),
        ("int8", {"parts": {"vae": "nvfp4"}, "infer.engine": "torch_native"}, "quantize.parts.vae is nvfp4, expected a "
         "preset that infer.engine=t"),
        ("int8", {"parts": {"vae": "svdquant_w4a16"}, "infer.engine": "torch_native"}, "quantize.parts.vae is "
         "svdquant_w4a16, expected a preset that infer.engine=t"),
        # of whole rotations and blocks; and weights alone, which torch computes in every format
        *((preset, {"hessian": 256}, None) for preset in ("nvfp4", "convrot_w4a4", "q4_k_weight_only")),
        *((preset, {"infer.engine": "torch_native"}, None) for preset in ("mxfp4_weight_only", "int8_weight_only")),
    ],
)  # fmt: skip
def test_what_a_preset_cannot_do_is_refused_before_anything_starts(preset, knobs, sentence):
    with refused(sentence and re.escape(sentence)):
        job(preset, knobs)


@pytest.mark.parametrize(
    ("preset", "per_token", "rotation"),
    [("int8", True, 0), ("int8", True, 256), ("fp8", True, 4), ("int4_w4a4", False, 16), ("nvfp4", False, 16)],
)
def test_inputs_that_can_be_scaled_per_token_or_rotated_are(preset, per_token, rotation):
    quantize = job(preset, {"per_token": per_token, "rotation": rotation}).quantize
    assert (quantize.scaled_per_token("conv"), quantize.rotation_of("conv", 768)) == (False, 0)
    assert (quantize.scaled_per_token("ffn"), quantize.rotation_of("qkv", 768)) == (per_token, rotation)
    assert quantize.rotation_of("qkv", 640) == min(rotation, 64)


def test_attention_has_a_format_of_its_own_or_the_presets():
    """With NVFP4 linears, as ModelOpt's default for Flux is; what is read again of a finished run is the same."""
    found = job("nvfp4", {"quant_level": 4, "attention": "fp8"})
    assert found.formats() == {"weights": {"nvfp4"}, "inputs": {"nvfp4"}, "attention": {"fp8"}}
    again = job("nvfp4", {"quant_level": 4, "attention": "fp8", "enable": dataclasses.asdict(found.quantize.enable)})
    assert again.quantize == found.quantize
    assert job("int8", {"quant_level": 4, "attention": "fp8"}).formats()["attention"] == {"fp8"}
    assert job("int8", {"quant_level": 4}).formats()["attention"] == {"int8"}


def test_a_conv_takes_no_input_in_blocks():
    """They lie along the last axis, which is no channel there."""
    quantize = job("int8", {}).quantize
    enable = dataclasses.replace(quantize.enable, conv=Pair("nvfp4", "nvfp4"))
    expected = r"^quantize\.enable\.conv\.activation is nvfp4, expected one of int8, fp8, int4_per_row$"
    with pytest.raises(ConfigError, match=expected):
        check_recipe(dataclasses.replace(quantize, enable=enable))


@pytest.mark.parametrize(
    ("preset", "level", "targets"),
    [("int8", 4, ["SM89", "SM120"]), ("fp8", 4, ["SM89", "SM120"]), ("mxfp4", 1, ["SM120"]), ("nvfp4", 3, ["SM120"])],
)
def test_by_default_plans_are_for_the_usual_targets_that_have_the_format(preset, level, targets):
    found = job(preset, {"quant_level": level})
    assert targets_for(found.trt, set().union(*found.formats().values())) == targets


def test_by_default_there_are_no_plans_where_no_library_builds_them():
    assert job("mxfp8", {}).trt.library == "none" and job("mxfp4", {}).trt.library == "auto"


def test_other_parts_have_every_preset_as_it_is_without_knobs():
    """With scales per tensor where the preset says nothing; smoothing is folded, and attention has no format there."""
    assert set(part_presets()) == set(recipe.presets())
    for preset in part_presets():
        of_part, own = part_recipe(preset), job(preset, {"quant_level": 3}).quantize
        smooths = own.smoothing != "none"
        expected = {"smoothing": "folded" if smooths else "none", "alpha": "auto" if smooths else None}
        expected |= {"enable": dataclasses.replace(own.enable, attention=None), "batch_size": 1}
        for field in dataclasses.fields(Recipe):
            assert getattr(of_part, field.name) == expected.get(field.name, getattr(own, field.name)), field.name


def test_statistics_are_needed_where_inputs_decide():
    """int8 rounds inputs, svdquant_w4a16 has a branch, q4_k_weight_only chooses codes by inputs."""
    without = [preset for preset in part_presets() if not part_recipe(preset).needs_inputs]
    assert without == ["int8_weight_only"]
    job("int8", {"parts": {"vae": "int8_weight_only"}, "calibration": "a folder"})


def test_formats_of_other_parts_are_formats_of_the_job():
    """So plans are built for GPUs that have them, and torch refuses what it cannot multiply."""
    found = job("int8", {"quantize.parts": {"vae": "fp8"}, "quant_level": 3})
    assert found.formats() == {"weights": {"int8", "fp8"}, "inputs": {"int8", "fp8"}, "attention": set()}
    assert job("int8", {"quantize.parts": {"vae": "int8"}, "infer.engine": "torch_native"})


@pytest.mark.parametrize("content", ["", "format: mine", "enable: 3", "enable: {conv: {weight: int3}}"])
def test_a_preset_that_cannot_be_read_is_none_for_other_parts(content, monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    monkeypatch.setattr(recipe, "presets", lambda: {"mine": tmp_path / "mine.yaml"})
    assert part_presets() == []


@pytest.mark.parametrize(
    ("given", "knobs", "because"),
    [
        ("alpha", {"quant_level": 1.0}, "quant_level=1 quantizes no linear"),
        ("quantize.rank", {"quant_level": 1.0}, "quant_level=1 quantizes no linear"),
        ("trt.max_batch_size", {"trt.library": "none"}, "export_trt=none builds no plan"),
        ("judge.layers", {}, "there are no candidates"),
    ],
)
def test_a_knob_that_changes_nothing_is_refused_where_it_is_given(given, knobs, because):
    check_heeded(job("int8", knobs), ["quant_level", "calib_size"])
    with pytest.raises(ConfigError, match=f"{given} was given and changes nothing, because {because}"):
        check_heeded(job("int8", knobs), ["quant_level", given])
    check_heeded(job("int8", {"judge.candidates": ["a.gguf"], "trt.library": "tensorrt_rtx"}), [given])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("q4_k", "; q4_k is a format, of q4_k_weight_only"),
        ("int4_in_int8", "; int4_in_int8 is a format, of convrot_w4a8"),
        ("q5_1", "; q5_1 is a format that no preset has: write one, as docs/formats.md says"),
        ("int3", "svdquant_w4a4"),
    ],
)
def test_a_format_alone_is_no_choice_and_the_presets_that_have_it_are_named(name, end):
    with pytest.raises(ConfigError) as refusal:
        job("int8", {"choices": [name]})
    assert str(refusal.value).endswith(end)


def test_another_preset_is_offered_as_it_is_where_no_knob_is_given():
    """Its own smoothing, rank and rounding; the level, and the batches of calibration, are the job's."""
    found = job("int8", {"budget": 0.3, "quant_level": 4, "alpha": 0.3, "batch_size": 2, "choices": ["svdquant_w4a4",
                "nemo", "int8"]}).quantize.offered()  # fmt: skip
    assert list(found) == ["int8", "svdquant_w4a4", "nemo"] and found["int8"].alpha == 0.3
    for preset in ("svdquant_w4a4", "nemo"):
        own = job(preset, {"quant_level": 3}).quantize
        expected = {"enable": dataclasses.replace(own.enable, attention=None), "quant_level": 4.0, "batch_size": 2}
        for field in dataclasses.fields(Recipe):
            wanted = expected.get(field.name, getattr(own, field.name))
            assert getattr(found[preset], field.name) == wanted, field.name


def test_formats_of_all_choices_are_formats_of_the_job():
    knobs = {"choices": ["fp8_per_row", "svdquant_w4a16"], "quant_level": 4}
    assert job("int8", knobs).formats()["weights"] == {"int8"}, "without a limit there is no choice"
    found = job("int8", knobs | {"budget": 0.3}).formats()
    assert found == {"weights": {"int8", "fp8", "int4"}, "inputs": {"int8", "fp8"}, "attention": {"int8"}}
    assert job("int8", knobs | {"budget": 0.3, "choices": ["mxfp8"]}).trt.library == "none", "no plan has it"


def test_weights_alone_for_as_many_bytes_are_no_choice():
    """They would take every layer, and nothing would be multiplied in eight bits."""
    offered = {preset: list(job(preset, {"budget": 0.3}).quantize.offered()) for preset in ("int8", "svdquant_w4a16")}
    assert offered == {"int8": ["int8"], "svdquant_w4a16": ["svdquant_w4a16", "int8_weight_only"]}


def test_a_file_decides_alone(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("conv: nvfp4\nout: fp16\n")
    found = job("int8", {"assignment": str(file)})
    assert found.formats() == {"weights": {"nvfp4"}, "inputs": {"nvfp4"}, "attention": set()}
    for knob, value in (("keep", 2), ("quantize.budget", 0.3), ("fit", "1GB")):
        with pytest.raises(ConfigError, match=f"^{knob} is {value}, expected .*, because assignment=.* decides for"):
            job("int8", {"assignment": str(file), knob.removeprefix("quantize."): value})
    for text, sentence in (
        ("conv: fp16", "expected a file that gives a layer a preset"),
        ("conv: int4", "assignment of conv is int4, expected fp16 or one of .*; int4 is a format, of convrot_w4a4 and"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            job("int8", {"assignment": str(file)})
