"""What a limit of the whole pipeline leaves for weights, and how all parts share it."""

import csv
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sd_quant.errors import ConfigError
from sd_quant.stages import chosen_by_images as images_of_choice
from sd_quant.stages import fit_pipeline as stage
from sd_quant.stages.fit_pipeline import Group, Offer, Priced

from .sdxl import loaded, opened

pytestmark = pytest.mark.commit

OFFERS = {
    "unet": Offer("unet", [("a", "b"), ("c",)], {"int4": None, "int8": None, "unquantized": None},
                  [{"int4": 5, "int8": 10, "unquantized": 20}, {"int4": 2, "int8": 4, "unquantized": 8}], 30),
    "text": Offer("text", [("d",)], {"int8": None, "unquantized": None}, [{"int8": 10, "unquantized": 40}], 50),
    "vae": Offer("vae", [], {"int8": None, "unquantized": None}, [], 6),
}  # fmt: skip
ERRORS = {
    "unet": {"int4": {"a": 0.3, "b": 0.4, "c": 0.1}, "int8": {"a": 0.03, "b": 0.04, "c": 0.01}},
    "text": {"int8": {"d": 0.05}},
    "vae": {},
}


def priced(rate: float = 2.0) -> dict[str, Priced]:
    return {
        part: Priced(offer, ERRORS[part], stage.choices_of(offer, ERRORS[part], rate, part == "unet"))
        for part, offer in OFFERS.items()
    }


def error_of(labels: stage.Labels, rate: float = 2.0) -> float:
    """Squared errors at the outputs of parts, each worth ``rate`` in images."""
    pairs = [(ERRORS[part].get(label, {}).get(name, 0)) for part, own in labels.items() for name, label in own.items()]
    return rate * sum(error**2 for error in pairs)


@pytest.mark.parametrize("limit", range(35, 86, 5))
def test_no_other_choice_of_layers_of_all_parts_is_better(limit):
    labels = stage.by_layer([Group(list(OFFERS), 0.0, limit)], priced())
    options = [
        {"unet": {"a": one, "b": one, "c": two}, "text": {"d": three}, "vae": {}}
        for one, two, three in itertools.product(OFFERS["unet"].recipes, OFFERS["unet"].recipes, OFFERS["text"].recipes)
        if two != "unquantized"  # the least sensitive unit of the denoiser is quantized
    ]

    def size(given: stage.Labels) -> int:
        return sum(offer.bytes_with(given[part]) for part, offer in OFFERS.items())

    best = min(error_of(option) for option in options if size(option) <= limit)
    assert size(labels) <= limit and error_of(labels) == pytest.approx(best)
    assert sum(stage.total_error(each, labels[part]) for part, each in priced().items()) == pytest.approx(best)


def test_one_format_a_part_is_the_best_that_fits_and_none_where_none_does():
    groups = [Group(list(OFFERS), 0.0, 80)]
    labels = stage.by_part(groups, priced(), "unet")
    assert labels == {"unet": {"a": "int8", "b": "int8", "c": "int8"}, "text": {"d": "unquantized"}, "vae": {}}
    assert stage.by_part([Group(list(OFFERS), 0.0, 34)], priced(), "unet") is None  # 35 bytes at least


def test_parts_that_take_turns_have_a_limit_each():
    groups = [Group([part], 0.0, 25) for part in OFFERS]
    labels = stage.by_layer(groups, priced())
    assert labels["text"] == {"d": "int8"} and labels["unet"] == {"a": "int8", "b": "int8", "c": "int8"}
    assert stage.by_part(groups, priced(), "unet")["text"] == {"d": "int8"}


@pytest.mark.slow
def test_offers_count_every_part_in_its_own_precision():
    """The autoencoder in fp32, encoders and denoiser in fp16; what the networks keep is in no unit."""
    offers = stage.offers_of(given := loaded("fit=1.05GB"))
    assert {part: offer.whole for part, offer in offers.items()} == opened().stored_bytes
    assert offers["vae"].whole == 4 * given.parameters["vae"] and offers["clip2"].whole == 2 * given.parameters["clip2"]
    name = "decoder.up_blocks.0.resnets.0.conv1"
    by_name = {name: row for (name,), row in zip(offers["vae"].units, offers["vae"].sizes, strict=True)}
    conv = by_name[name]
    _, shape = stage.layers_of(given, "vae")[name]
    assert (
        conv["unquantized"] == 4 * math.prod(shape)
        and conv["int8"] < conv["unquantized"] / 3.9
        and conv["int4"] < conv["int8"]
    )
    named = {name for unit in offers["vae"].units for name in unit}
    layers = stage.layers_of(given, "vae")
    divided = {name: math.prod(layers[name][1][1:]) % 64 == 0 for (name,) in offers["vae"].units}
    assert {name: "int4" in row for name, row in by_name.items()} == divided and not all(divided.values())
    assert "decoder.conv_in" not in named and "decoder.mid_block.attentions.0.to_q" in named


@pytest.mark.slow
def test_what_cannot_fit_and_what_fits_as_it_is_are_refused_with_both_ends():
    given = loaded("fit=1.05GB")
    offers = stage.offers_of(given)
    (group,) = stage.groups_of(given, offers)
    beside = group.working
    assert group.limit == 1_050_000_000 - beside and beside > 1e9
    least, whole = (sum(getattr(offer, size) for offer in offers.values()) for size in ("least", "whole"))
    for size in (math.ceil(beside + least) - 1, math.ceil(beside + whole)):
        with pytest.raises(ConfigError) as refusal:
            stage.check_fit(replace(given, recipe=replace(given.recipe, fit=size)))
        assert str(refusal.value).startswith(
            f"fit is {size}, expected from {math.ceil(beside + least)} bytes, which unet_xl, vae, clip1, clip2 take at"
        )
        assert f"svdquant_w4a4 or int8_weight_only, {beside / 1e9:.2f} GB for a call" in str(refusal.value)
        assert f"to {math.ceil(beside + whole) - 1}, below which" in str(refusal.value)
    apart = replace(given, recipe=replace(given.recipe, fit="1.04GB", resident="one"))
    one_by_one = stage.groups_of(apart, offers)
    assert [group.parts for group in one_by_one] == [["unet_xl"], ["vae"], ["clip1"], ["clip2"]]
    assert max(group.working for group in one_by_one) == beside
    stage.check_fit(loaded())  # there is nothing to check


@pytest.mark.parametrize(("better", "taken"), [("by layer", "by layer"), ("by part", "by part")])
def test_rates_turn_errors_of_outputs_into_errors_of_images_and_the_better_choice_is_taken(
    monkeypatch, tmp_path, better, taken
):
    """Each whole part is measured in images once, in its smallest format; both choices are measured as they are."""
    full, asked = [np.full((4, 4, 3), 100, np.uint8)], []
    recipe = SimpleNamespace(fit=80, resident="all", seed=0)
    given = SimpleNamespace(recipe=recipe, denoiser="unet", infer=None)

    def images(_, infer, assignments, what):
        asked.append(what)
        away = {"unet in int4": 30, "text in int8": 5}.get(what, 2 if what == f"formats {better}" else 3)
        return [full[0] + np.uint8(away)]

    monkeypatch.setattr(stage, "offers_of", lambda _: OFFERS)
    monkeypatch.setattr(stage, "groups_of", lambda *_: [Group(list(OFFERS), 0.0, 80)])
    monkeypatch.setattr(images_of_choice, "choosing", lambda loaded: loaded.infer)
    monkeypatch.setattr(images_of_choice, "full_precision", lambda *_: (full, {}))
    monkeypatch.setattr(images_of_choice, "simulated_images", images)
    monkeypatch.setattr(stage, "errors_of_part", lambda loaded, statistics, offer, *_: ERRORS[offer.part])
    monkeypatch.setattr(stage, "assign_labels", lambda loaded, statistics, offer, labels: dict(labels))
    fitted = stage.fit_pipeline(given, None, tmp_path)
    assert asked == ["unet in int4", "text in int8", "formats by layer", "formats by part"]
    assert fitted.entry["taken"] == taken and fitted.parts.keys() <= {"text"}
    found = fitted.entry["candidates"][better]
    assert found["psnr"] == pytest.approx(-20 * math.log10(2 / 255))
    with (tmp_path / "budget.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    rate = (30 / 255) ** 2 / (0.3**2 + 0.4**2 + 0.1**2)
    assert float(rows["unet:a+b"]["image_error_int8"]) == pytest.approx(rate * (0.03**2 + 0.04**2), rel=1e-4)
    assert float(rows["text:d"]["image_error_int8"]) == pytest.approx((5 / 255) ** 2, rel=1e-4)
    assert rows["text:d"]["chosen"] in ("int8", "unquantized")
