"""Prompts, sizes and images to start from."""

import re

import pytest

from sd_quant.config import InferJob, QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.knobs import read

from .composition import JOBS, changed, composed


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


def test_prompts_come_from_a_list_or_a_file(quantize_mapping, tmp_path):
    listed = changed(changed(quantize_mapping, "infer.prompts", ["a", "b"]), "infer.num_samples", 2)
    assert read(QuantizeJob, listed).infer.prompt_list() == ["a", "a", "b", "b"]
    (tmp_path / "prompts.txt").write_text("c\nd\n")
    named = changed(quantize_mapping, "infer.prompts", str(tmp_path / "prompts.txt"))
    assert read(QuantizeJob, named).infer.prompt_list() == ["c", "d"]
    with pytest.raises(ConfigError, match=r"^infer\.prompts is empty, expected at least one prompt$"):
        read(QuantizeJob, changed(quantize_mapping, "infer.prompts", [])).check_files()


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


def test_a_prompt_without_brackets_is_told_of_them(mappings, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^infer.prompts is cat, which is no file .*brackets: 'infer.prompts=\[cat\]'$"
    ):
        read(QuantizeJob, changed(mappings["quantize"], "infer.prompts", "cat")).infer.prompt_list()
