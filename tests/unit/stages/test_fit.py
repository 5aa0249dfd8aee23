"""What a limit leaves for layers, which of them choose together and by which images, and what is written of that."""

import csv
import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

import sd_quant
from sd_quant.config.assignment_file import labels_in
from sd_quant.errors import ConfigError
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import KEPT, stored_bytes
from sd_quant.stages import choose, load
from sd_quant.stages import chosen_by_images as by_images
from sd_quant.stages import fit as stage
from sd_quant.stages.export_onnx import assignment_digest
from sd_quant.stages.load import Loaded, Offered
from sd_quant.stages.open_parts import open_simulated
from tests.presets import job, recipe_of
from tests.refusals import refused
from tests.zoo.families import sd15_of_one_level

from .conftest import loaded as sdxl
from .conftest import opened

pytestmark = pytest.mark.commit

SHAPES = {"conv": (64, 64, 3, 3), "first": (64, 4, 3, 3)} | dict.fromkeys(("q", "k", "out", "proj"), (64, 64))
ROLES = {"conv": "conv", "q": "qkv", "k": "qkv", "out": "ffn", "first": "excluded", "proj": "ffn"}
INPUTS = [SharedInput(("q", "k"), "norm"), SharedInput(("out",)), SharedInput(("proj",))]
QUANTIZED = ("conv", "q", "k", "out")
PARAMETERS = 5000 + sum(stored_bytes(shape, "ffn", None) // 2 for shape in SHAPES.values())  # those of norms too
INT4, INT8 = "svdquant_w4a16", "int8_weight_only"
RECIPE = cache(recipe_of)
OFFERS = {
    "unet": stage.Offer(
        "", [("a", "b"), ("c",)], dict.fromkeys("abc", "ffn"),
        {name: {"int4": size, "int8": 2 * size, KEPT: 4 * size} for name, size in {"a": 2, "b": 3, "c": 2}.items()},
        {"int4": RECIPE(INT4), "int8": RECIPE(INT8), KEPT: None}, 30,
    ),
    "text": stage.Offer(
        "text:", [("d",)], {"d": "linear"}, {"d": {"int8": 10, KEPT: 40}}, {"int8": RECIPE(INT8), KEPT: None}, 50
    ),
    "vae": stage.Offer("vae:", [], {}, {}, {"int8": RECIPE(INT8), KEPT: None}, 6),
}  # fmt: skip
OF_LAYERS = {
    "unet": {"int4": {"a": 0.3, "b": 0.4, "c": 0.1}, "int8": {"a": 0.03, "b": 0.04, "c": 0.01}},
    "text": {"int8": {"d": 0.05}}, "vae": {},
}  # fmt: skip
RATES = {"int4": 0.02, "int8": 0.01, "text:int8": 3.0}  # what a squared error does to images
KNOBS = {"quant_level": 2, "alpha": 0.7}
ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
TO_Q, TO_K = f"{ATTENTION}.to_q", f"{ATTENTION}.to_k"
CONV, OTHER = "down_blocks.0.resnets.0.conv1", "mid_block.attentions.0.proj_out"


def loaded(alone: tuple[str, ...] = (), budget: float | None = None, exclude: tuple[str, ...] = ()) -> SimpleNamespace:
    """``proj`` is excluded, ``first`` by role; the first preset leaves out ``exclude`` and the inputs of ``alone``."""
    recipe = replace(RECIPE(INT4, "quant_level=3", "alpha=0.5", "quantize.budget=0.9"), budget=budget)
    given = SimpleNamespace(
        recipe=recipe, roles=ROLES, shapes=SHAPES, shared_inputs=INPUTS, exclude=["proj"], denoiser="unet",
        parameters={"unet": PARAMETERS, "vae": 7}, checkpoint=None, guidance_scale=5.0, labels=None,
        offered={INT4: Offered(recipe, exclude, alone), INT8: Offered(recipe.beside(INT8))},
    )  # fmt: skip
    given.recipe_with = lambda name, label: Loaded.recipe_with(given, name, label)
    return given


def test_what_a_layer_can_have_and_with_which_it_chooses():
    """Readers of one input choose together if any preset folds; what is excluded does not choose."""
    branch = 2 * loaded().recipe.rank_of("linear", SHAPES["out"]) * sum(SHAPES["out"])
    sizes = [stage.offer_of_denoiser(given, 0).sizes["out"][INT4] for given in (loaded(), loaded(alone=("out",)))]
    assert branch > 0 and sizes[0] - sizes[1] == branch
    given = loaded(exclude=("k", "out"))
    given.shapes = SHAPES | {"conv": (64, 6, 3, 3)}  # INT4 has blocks of 64
    offer = stage.offer_of_denoiser(given, 0)
    costs = dict(zip(offer.units, offer.costs, strict=True))
    assert {unit: list(own) for unit, own in costs.items()} == {
        ("conv",): [INT8, "unquantized"], ("q", "k"): [INT4, INT8, "unquantized"], ("out",): [INT8, "unquantized"]
    }  # fmt: skip
    half = stored_bytes(SHAPES["k"], "qkv", None)
    assert costs["q", "k"][INT4] == stored_bytes(SHAPES["q"], "qkv", given.recipe) + half, "k stays in fp16"
    given.offered = {INT8: given.offered[INT8]}
    assert stage.units_of(given) == [("conv",), ("q",), ("k",), ("out",)]
    given.offered["int8"] = Offered(given.recipe.beside("int8"))
    assert stage.units_of(given) == offer.units, "also where the job's own preset smooths nothing"


def test_what_a_budget_leaves_for_layers_and_one_that_cannot_be_met_or_asks_for_nothing_is_refused():
    sizes = {key: [stored_bytes(SHAPES[key], ROLES[key], own) for own in (None, loaded().recipe)] for key in QUANTIZED}
    whole, quantized = map(sum, zip(*sizes.values(), strict=True))
    fewest = 2 * PARAMETERS - whole + quantized  # everything else in fp16, and branches
    assert stage.limit_of(loaded()) is None
    [limit] = stage.limits_of(stage.limit_of(loaded(budget=fewest)))
    assert (limit.most, limit.units) == (quantized, [0, 1, 2])
    assert stage.limit_of(loaded(budget=0.4)).limit == int(0.4 * 4 * PARAMETERS)
    for budget in (1, 0.01, fewest - 1, 2 * PARAMETERS):
        with pytest.raises(ConfigError) as refusal:
            stage.limit_of(loaded(budget=budget))
        assert str(refusal.value) == (
            f"quantize.budget is {budget}, expected from {fewest} bytes (a share of {fewest / PARAMETERS / 4:.4f}), "
            f"the least with {INT4} or {INT8}, to {2 * PARAMETERS - 1}, below which something has to be quantized"
        )


# All parts


def in_images(labels: dict[str, dict[str, str]], what: str = "") -> float:
    return sum(
        RATES[OFFERS[part].named(label)] * OF_LAYERS[part][label][name] ** 2
        for part, own in labels.items() for name, label in own.items() if label != KEPT
    )  # fmt: skip


def fitted_to(monkeypatch, folder: Path, *groups: stage.Group, squared_error_of=in_images) -> stage.Fitted:
    def assigned(_, statistics, offers, labels):
        return {part: own for part, own in labels.items() if set(own.values()) - {KEPT}}

    def alone(own, names):
        return {name: label if name in names else KEPT for name, label in own.items()}

    monkeypatch.setattr(stage, "assigned", assigned)
    monkeypatch.setattr(stage, "quantized_alone", alone)
    wholes = {offer.named(each): {part: offer.all_in(each)} for part, offer in OFFERS.items() for each in offer.labels}
    uniform = {label: in_images(labels) ** 0.5 for label, labels in wholes.items()}
    given = SimpleNamespace(denoiser="unet", recipe=SimpleNamespace(choices=[]), offered={})
    limited = stage.Limited(OFFERS, groups, 80, "all")
    return stage.fit(given, None, limited, stage.Measured(OF_LAYERS, uniform, squared_error_of), folder)


@pytest.mark.parametrize("limit", range(35, 86, 5))
def test_no_other_choice_of_layers_of_all_parts_is_better(monkeypatch, tmp_path, limit):
    """Nor of one label for each part, where one fits; the denoiser is quantized, at least its least sensitive unit."""

    def fits(labels: dict[str, dict[str, str]]) -> bool:
        return sum(offer.bytes_with(labels[part]) for part, offer in OFFERS.items()) <= limit

    fitted = fitted_to(monkeypatch, tmp_path, stage.Group(list(OFFERS), 0.0, limit))
    options = [
        {"unet": {"a": one, "b": one, "c": two}, "text": {"d": three}, "vae": {}}
        for one, two, three in itertools.product(("int4", "int8", KEPT), ("int4", "int8"), ("int8", KEPT))
    ]
    fitting = [option for option in options if fits(option)]
    best, labels = min(map(in_images, fitting)), fitted.labels_with("by layer")
    assert fits(labels) and in_images(labels) == pytest.approx(best)
    assert fitted.solved.candidates["by layer"].predicted ** 2 == pytest.approx(best)
    plain = [in_images(option) for option in fitting if len({*option["unet"].values()}) == 1]
    assert in_images(fitted.labels_with("by part")) == pytest.approx(min(plain))


def test_parts_that_take_turns_have_a_limit_each(monkeypatch, tmp_path):
    fitted = fitted_to(monkeypatch, tmp_path, *(stage.Group([part], 0.0, 25) for part in OFFERS))
    expected = {"unet": dict.fromkeys("abc", "int8"), "text": {"d": "int8"}, "vae": {}}
    assert fitted.labels_with("by layer") == fitted.labels_with("by part") == expected


@pytest.mark.parametrize("taken", ["by layer", "by part"])
def test_the_better_of_the_measured_choices_is_taken(monkeypatch, tmp_path, taken):
    plain = {"unet": dict.fromkeys("abc", "int8"), "text": {"d": "int8"}}

    def measured(labels, what):
        wins = what == "the choice as a whole" and (labels == plain) == (taken == "by part")
        return in_images(labels) / (1000 if wins else 1)

    fitted = fitted_to(monkeypatch, tmp_path, stage.Group(list(OFFERS), 5.0, 60), squared_error_of=measured)
    entry = fitted.entry()
    found = entry["candidates"][taken]
    assert entry["taken"] == taken and entry["groups"] == [{"parts": list(OFFERS), "beside_weights_bytes": 5}]
    assert found["psnr"] == pytest.approx(-10 * math.log10(in_images(fitted.labels_with(taken)) / 1000))
    with (tmp_path / "budget.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert rows["text:d"]["bytes_int8"] == "10" and rows["text:d"]["network_error_int8"] == "0.05"
    assert rows["a"]["bytes_int4"] == "2" and rows["text:d"]["bytes_int4"] == ""
    assert {name: row["chosen"] for name, row in rows.items() if name in "abc"} == fitted.labels


@pytest.mark.slow
def test_offers_count_every_part_in_its_own_precision():
    """The autoencoder in fp32, encoders and denoiser in fp16; what the networks keep is in no unit."""
    offers = stage.offers_of(given := sdxl("fit=1.05GB"))
    assert {part: offer.whole for part, offer in offers.items()} == opened().stored_bytes
    assert offers["vae"].whole == 4 * given.parameters["vae"] and offers["clip2"].whole == 2 * given.parameters["clip2"]
    layers, sizes = stage.layers_of(given, "vae"), offers["vae"].sizes
    conv = sizes[name := "decoder.up_blocks.0.resnets.0.conv1"]
    assert conv[KEPT] == 4 * math.prod(layers[name][1]) > 3.9 * conv["int8"] and conv["int4"] < conv["int8"]
    divided = {name: math.prod(layers[name][1][1:]) % 64 == 0 for name in sizes}
    assert {name: "int4" in row for name, row in sizes.items()} == divided and not all(divided.values())
    assert "decoder.conv_in" not in sizes and "decoder.mid_block.attentions.0.to_q" in sizes


@pytest.mark.slow
def test_precise_steps_have_weights_of_their_own_in_the_limit():
    plain, precise = (
        stage.offers_of(sdxl("fit=1.05GB", *knobs)) for knobs in ((), ("infer.schedule=fhcc", "infer.steps=4"))
    )
    name, own = next(iter(plain["unet_xl"].sizes.items()))
    assert precise["unet_xl"].sizes[name] == {label: 2 * size for label, size in own.items()}
    assert precise["unet_xl"].whole == 3 * plain["unet_xl"].whole and precise["vae"] == plain["vae"]
    chosen = stage.offers_of(sdxl("fit=1.05GB", "infer.precise_steps=2"))["unet_xl"]
    assert chosen.whole == 2 * plain["unet_xl"].whole, "full precision is opened to choose them alone"


def test_what_cannot_fit_and_what_fits_as_it_is_are_refused_with_both_ends():
    given = sdxl("fit=1.05GB")
    offers = stage.offers_of(given)
    (group,) = stage.groups_of(given, offers)
    beside = group.working
    assert group.limit == 1_050_000_000 - beside and beside > 1e9
    least, whole = (sum(getattr(offer, size) for offer in offers.values()) for size in ("least", "whole"))
    for size in (math.ceil(beside + least) - 1, math.ceil(beside + whole)):
        with pytest.raises(ConfigError) as refusal:
            stage.limit_of(replace(given, recipe=replace(given.recipe, fit=size)))
        assert str(refusal.value).startswith(
            f"fit is {size}, expected from {math.ceil(beside + least)} bytes, which unet_xl, vae, clip1, clip2 take at"
        )
        assert f"svdquant_w4a4 or int8_weight_only, {beside / 1e9:.2f} GB for a call" in str(refusal.value)
        assert f"to {math.ceil(beside + whole) - 1}, below which" in str(refusal.value)
    apart = replace(given, recipe=replace(given.recipe, fit="1.04GB", resident="one"))
    one_by_one = stage.groups_of(apart, offers)
    assert [group.parts for group in one_by_one] == [["unet_xl"], ["vae"], ["clip1"], ["clip2"]]
    assert max(group.working for group in one_by_one) == beside


# A tiny network


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> sd_quant.Model:
    sd15_of_one_level(folder := tmp_path_factory.mktemp("sd15"))
    return sd_quant.open("sd15", folder, width=64, height=64)


@pytest.fixture(scope="module")
def statistics(model) -> sd_quant.Statistics:
    found = model.calibrate(["a rocket"], n_steps=2)
    found.calls = {name: replace(sample, values=sample.values[:1]) for name, sample in found.calls.items()}
    return found


def same(found: dict[str, LayerAssignment], expected: dict[str, LayerAssignment]) -> bool:
    """Whether assignments are equal bit for bit, but for the reasons why layers are left."""
    one, other = (
        [(name, row.role, row.alpha, row.output_error, row.fixed_alpha_error) for name, row in rows.items()]
        for rows in (found, expected)
    )
    return one == other and assignment_digest(found) == assignment_digest(expected)


@pytest.fixture
def left(monkeypatch) -> list[str]:
    """The files of labels that are written."""
    found, write = [], choose.text_of
    monkeypatch.setattr(choose, "text_of", lambda *given: found.append(write(*given)) or found[-1])
    return found


@pytest.mark.nightly
def test_the_file_that_a_run_leaves_gives_its_assignment_back_bit_for_bit(model, statistics, tmp_path, left):
    """Of INT8 with folded smoothing and NVFP4 with chosen codes; the budget is half-way between both."""
    job = model.job("int8", {**KNOBS, "budget": 0.3, "choices": ["nvfp4"]})
    given = load.with_recipe(model.session, job.model, job.infer, job.quantize)
    offer = stage.limit_of(given).offers["unet"]
    budget = sum(offer.bytes_with(offer.all_in(label)) for label in ("int8", "nvfp4")) // 2
    made = model.quantize(statistics, "int8", budget=budget, choices=["nvfp4"], **KNOBS).assignment
    assert {layer.format for layer in made.values()} >= {"int8", "nvfp4"}
    (tmp_path / "a.yaml").write_text(left[-1])
    again = model.quantize(statistics, "int8", assignment=str(tmp_path / "a.yaml"), **KNOBS)
    assert left[-1] == left[-2] and same(again.assignment, made)


@pytest.mark.slow
def test_a_plain_run_leaves_a_file_too_and_one_line_of_it_changes_one_layer(model, statistics, tmp_path, left):
    plain = model.quantize(statistics, "int8", **KNOBS).assignment
    file = tmp_path / "a.yaml"
    knobs = {**KNOBS, "assignment": str(file)}
    file.write_text(left[0])
    assert same(model.quantize(statistics, "int8", **knobs).assignment, plain)
    assert set(labels_in(str(file)).values()) == {"int8"}
    file.write_text(left[0].replace("conv1: int8", "conv1: int4_w4a4", 1))
    changed = model.quantize(statistics, "int8", **knobs).assignment
    (name,) = [name for name, layer in changed.items() if layer.format != plain[name].format]
    assert (changed[name].format, changed[name].activation_format) == ("int4", None) and name.endswith("conv1")
    untouched = {each: row for each, row in changed.items() if each != name}
    assert same(untouched, {each: plain[each] for each in untouched})


@pytest.fixture(scope="module")
def with_file(model, tmp_path_factory) -> Loaded:
    """A job whose file gives a layer each of three presets."""
    file = tmp_path_factory.mktemp("file") / "a.yaml"
    file.write_text(f"{TO_Q}: int8\n{CONV}: svdquant_w4a4\n{OTHER}: q4_k_weight_only")
    job = model.job("nvfp4", {"quant_level": 3, "assignment": str(file)})
    return load.with_recipe(model.session, job.model, job.infer, job.quantize)


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "facts", "sentence"), [
    ({f"{ATTENTION}.to_p": "int8"}, {}, "names .*to_p, which is no layer .*did you mean .*attn1.to_"),
    ({"time_embedding.linear_1": "int8"}, {}, "gives time_embedding.linear_1 int8, .*excluded by the mod"),
    ({TO_Q: "svdquant_w4a4", TO_K: "int8"}, {},
     f"gives {TO_Q} svdquant_w4a4 and {TO_K} int8, which read one input, .*; give {TO_Q}, {TO_K}, "),
    ({TO_Q: "q4_k_weight_only"}, {"shapes": {TO_Q: (64, 24)}},
     "q4_k_weight_only, expected fp16 or another preset, because .*do not divide"),
    ({TO_Q: "int8"}, {"exclude": ["*.to_q"]}, "to_q int8, expected fp16 or no line, because it is kept: .*excl"),
    ({TO_Q: "int8"}, {"quant_level": 2.0}, "to_q int8, expected fp16 or no line, because it is kept: .*level 2"),
    ({TO_Q: "int8", TO_K: "fp16"}, {}, None),
])  # fmt: skip
def test_labels_that_layers_cannot_have_are_refused(with_file, labels, facts, sentence):
    shapes = with_file.shapes | facts.get("shapes", {})
    recipe = replace(with_file.recipe, quant_level=facts.get("quant_level", 3.0))
    given = replace(with_file, shapes=shapes, recipe=recipe, exclude=facts.get("exclude", []))
    with refused(sentence and f"assignment .*{sentence}"):
        load.check_labels(replace(given, labels=labels))


@pytest.mark.slow
@torch.no_grad()
def test_layers_that_are_quantized_alone_leave_the_others_smoothed_and_not_rounded(model, statistics):
    assignment = model.quantize(statistics, "int8", quant_level=3, alpha=0.7).assignment
    calls = {name: sample.values[0] for name, sample in statistics.calls.items()}

    def output(given: dict[str, LayerAssignment]) -> torch.Tensor:
        (found,) = open_simulated(model.session.checkpoint, given)(**calls).values()
        return found

    full = output({})
    none, one, every = (
        relative_error(full, output(stage.quantized_alone(assignment, names)))
        for names in ((), [TO_Q], list(assignment))
    )
    assert none < 2e-4 < one < every and every == relative_error(full, output(assignment))


def test_formats_are_chosen_by_calibrations_condition_images_and_not_by_those_of_the_job(tmp_path, monkeypatch):
    for number in range(6):
        Image.new("RGB", (90, 90), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "config.json").touch()
    net, of_job = f"model.controlnets=[{tmp_path}]", f"infer.control=[{tmp_path}]"
    asked = job("infer.prompts=[a]", net, of_job, f"model.calibration_control=[{tmp_path}/5.png]")
    made = Mock(return_value=([], {}))
    monkeypatch.setattr(by_images, "images_of", made)
    by_images.image_errors(SimpleNamespace(model=asked.model, infer=asked.infer, recipe=asked.quantize))
    _, infer, sampling, *_ = made.call_args.args
    assert len(infer.prompt_list()) == by_images.PROMPTS
    assert [row["image"].getpixel((0, 0)) for row in sampling.arguments] == [(5, 0, 0)]
