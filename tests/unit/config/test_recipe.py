"""Which formats a recipe has, what a file of presets says, and which targets take a preset."""

import dataclasses

import pytest

from sd_quant.config import recipe
from sd_quant.config.assignment_file import labels_in, text_of
from sd_quant.config.recipe import own_recipe, part_presets, part_recipe, presets
from sd_quant.config.targets import executed_by, inputs_held
from sd_quant.errors import ConfigError
from sd_quant.interchange import AS_ASSIGNED, FP16, IN_BLOCKS, PER_ROW, STATIC, TARGETS
from sd_quant.quantization.recipe import Recipe

from .composition import job

pytestmark = pytest.mark.commit


def test_attention_has_a_format_of_its_own_or_the_presets():
    """With NVFP4 linears, as ModelOpt's default for Flux is; what is read again of a finished run is the same."""
    found = job("nvfp4", {"quant_level": 4, "attention": "fp8"})
    assert found.formats() == {"weights": {"nvfp4"}, "inputs": {"nvfp4"}, "attention": {"fp8"}}
    again = job("nvfp4", {"quant_level": 4, "attention": "fp8", "enable": dataclasses.asdict(found.quantize.enable)})
    assert again.quantize == found.quantize
    assert job("int8", {"quant_level": 4, "attention": "fp8"}).formats()["attention"] == {"fp8"}
    assert job("int8", {"quant_level": 4}).formats()["attention"] == {"int8"}


def test_presets_of_other_parts_and_of_choices_are_as_they_are_where_no_knob_is_given():
    """Recipes of other parts fold the smoothing, choices take the job's level and batches; attention has no format."""

    def as_it_is(preset: str, **changes: object) -> Recipe:
        own = job(preset, {"quant_level": 3}).quantize
        fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(Recipe)}
        return Recipe(**fields | {"enable": dataclasses.replace(own.enable, attention=None)} | changes)

    assert set(part_presets()) == set(presets())
    for preset in part_presets():
        smooths = as_it_is(preset).smoothing != "none"
        changes = {"smoothing": "folded" if smooths else "none", "alpha": "auto" if smooths else None, "batch_size": 1}
        assert part_recipe(preset) == as_it_is(preset, **changes), preset
    without_statistics = [preset for preset in part_presets() if not part_recipe(preset).needs_inputs]
    assert without_statistics == ["int8_weight_only"], "inputs decide of codes, of a branch and of codes chosen by them"
    job("int8", {"parts": {"vae": "int8_weight_only"}, "calibration": "a folder"})
    knobs = {"budget": 0.3, "quant_level": 4, "alpha": 0.3, "batch_size": 2}
    offered = job("int8", knobs | {"choices": ["svdquant_w4a4", "nemo", "int8"]}).quantize.offered()
    assert list(offered) == ["int8", "svdquant_w4a4", "nemo"] and offered["int8"].alpha == 0.3
    for preset in ("svdquant_w4a4", "nemo"):
        assert offered[preset] == as_it_is(preset, quant_level=4.0, batch_size=2)


@pytest.mark.parametrize("content", ["", "format: mine", "enable: 3", "enable: {conv: {weight: int3}}"])
def test_a_preset_that_cannot_be_read_is_none_for_other_parts(content, monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    monkeypatch.setattr(recipe, "presets", lambda: {"mine": tmp_path / "mine.yaml"})
    assert part_presets() == []


@pytest.mark.parametrize(("name", "end"), [
    ("q4_k", "; q4_k is a format, of q4_k_weight_only"),
    ("int4_in_int8", "; int4_in_int8 is a format, of convrot_w4a8"),
    ("q5_1", "; q5_1 is a format that no preset has: write one, as docs/formats.md says"),
    ("int3", "svdquant_w4a4"),
])  # fmt: skip
def test_a_format_alone_is_no_choice_and_the_presets_that_have_it_are_named(name, end):
    with pytest.raises(ConfigError) as refusal:
        job("int8", {"choices": [name]})
    assert str(refusal.value).endswith(end)


def test_formats_of_other_parts_and_of_all_choices_are_formats_of_the_job():
    """Plans are built only for GPUs with these formats, and torch refuses formats that it cannot multiply."""
    found = job("int8", {"quantize.parts": {"vae": "fp8"}, "quant_level": 3})
    assert found.formats() == {"weights": {"int8", "fp8"}, "inputs": {"int8", "fp8"}, "attention": set()}
    assert job("int8", {"quantize.parts": {"vae": "int8"}, "infer.engine": "torch_native"})
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


def test_what_is_written_is_read_and_says_how_to_give_it_back(tmp_path):
    file = tmp_path / "assignment.yaml"
    conv1, conv2, to_q = (f"down_blocks.{name}" for name in ("0.resnets.conv1", "0.resnets.conv2", "1.attentions.to_q"))
    labels = {"conv_in": "fp16", conv1: "int8", conv2: "nvfp4", to_q: "int8"}
    file.write_text(text := text_of(labels, ["quantize=int8", "quant_level=3"]))
    assert labels_in(str(file)) == labels
    assert "python quantize.py quantize=int8 quant_level=3 assignment=<this file>" in text
    header, *blocks = text.rstrip("\n").split("\n\n")
    assert header.startswith("#") and [block.count("\n") for block in blocks] == [0, 1, 0]


@pytest.mark.parametrize(("text", "sentence"), [
    ("", "assignment is .* has no layers, expected a mapping from names of layers to presets or fp16"),
    ("- conv: int8", "has no layers"),
    ("conv: 8", "assignment gives 'conv' '8', expected a mapping"),
    ("conv: [int8]", "assignment gives 'conv' "),
    ("conv: int8\nconv: fp16", "cannot be read .*'conv' stands twice"),
    ("conv: !!python/object:os.system {}", "cannot be read"),
    ("a: [", "cannot be read"),
])  # fmt: skip
def test_what_is_no_mapping_of_labels_is_refused(tmp_path, text, sentence):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        labels_in(str(tmp_path / "a.yaml"))
    with pytest.raises(ConfigError, match="^assignment names no/such.yaml, which does not exist"):
        labels_in("no/such.yaml")


def test_how_a_target_computes_a_preset_and_which_tools_execute_one_that_is_simulated_here():
    held = {
        "comfyui": {  # which quantizes inputs whatever the recipe says, and has one scale for a weight in fp8
            "int8": PER_ROW, "int8_weight_only": PER_ROW, "fp8": STATIC, "fp8_per_row": None, "nvfp4": AS_ASSIGNED,
            "mxfp4": None, "mxfp8": AS_ASSIGNED, "convrot_w4a4": PER_ROW, "convrot_w4a8": PER_ROW,
        },
        "diffusers_torchao": {"int8": STATIC, "int8_dynamic": PER_ROW, "int8_weight_only": FP16},
        "diffusers_bfl": {"fp8_per_row": PER_ROW}, "diffusers_sdnq": {"rotated_w4a4": None},
        "gguf": {"int8": FP16, "int8_weight_only": FP16, "q4_k_weight_only": FP16, "svdquant_w4a16": None},  # no branch
        "nunchaku": {"svdquant_w4a4": IN_BLOCKS, "svdquant_w4a16": None},
        "sglang_fp8": {"fp8_per_block": IN_BLOCKS}, "modelopt_export": {"fp8_per_block": None},
        "onnx": {"convrot_w4a8": None}, "openvino": {"q6_k_weight_only": None},  # whose graph would hold fp16
    }  # fmt: skip
    assert held == {
        target: {preset: inputs_held(TARGETS[target], own_recipe(preset)) for preset in expected}
        for target, expected in held.items()
    }
    assert inputs_held(TARGETS["comfyui"], dataclasses.replace(own_recipe("fp8"), per_channel=True)) is None
    by = {name: executed_by(own_recipe(name)) for name in presets()}
    assert by["svdquant_w4a4"] == ["diffusers_nunchaku_lite", "nunchaku"]
    assert {"modelopt_export", "comfyui", "diffusers_bfl"} <= set(by["nvfp4"])
    assert by["rotated_w4a4"] == by["mxfp4"] == []
    assert by["mxfp8"] == ["comfyui"] and by["fp8_per_block"] == ["sglang_fp8"]
    assert "gguf" not in by["int8"] and "gguf" in by["int8_weight_only"]
