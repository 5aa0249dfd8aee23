"""Limits of parity by hand, and layers that fell back; faults in exported files are in test_parity_faults.py."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sd_quant.errors import SdQuantError
from sd_quant.inference import parity
from sd_quant.inference.executed import executed_entry
from sd_quant.inference.parity import (
    SCALE_FAULT,
    LayerDifference,
    attention_difference,
    checked_entry,
    differences_entry,
    distance,
    layers_entry,
    lean,
    network_entry,
    part_parity,
    run_simulation,
    scale_lean,
)
from sd_quant.models.parts import Contract
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.rewrite import IntegerProducts

pytestmark = pytest.mark.commit


def layer(name: str, fmt: str | None, inputs: str | None) -> LayerAssignment:
    return LayerAssignment(name, "linear", (1, 1), format=fmt, activation_format=inputs)


@pytest.mark.parametrize("error", [2e-3, math.nan, math.inf])
def test_an_error_beyond_its_tolerance_fails_the_job(error):
    assert checked_entry("vae", 1e-4, 1e-3) == {"relative_error": 1e-4, "tolerance": 1e-3}
    with pytest.raises(SdQuantError, match="^the engine differs from torch in vae by"):
        checked_entry("vae", error, 1e-3)
    zeros = torch.zeros(2)  # an output of them, or none at all, is no agreement
    assert distance(zeros, zeros) == distance(torch.ones(2), torch.full((2,), torch.nan)) == math.inf


def test_an_engine_may_differ_from_torch_in_bf16_by_what_bf16_rounds():
    contract = Contract({}, ("out",), {}, torch.float16)

    def parity_of(dtype: torch.dtype, off: float) -> dict:
        outputs = [{"unet": {"out": output}} for output in (torch.ones(4, dtype=dtype), torch.full((4,), 1 + off))]
        return part_parity(*outputs, {"unet": contract})["unet"]

    assert parity_of(torch.bfloat16, 0.02)["tolerance"] == 8e-2
    for dtype, off in ((torch.float16, 0.02), (torch.bfloat16, 0.1)):
        with pytest.raises(SdQuantError, match="differs from torch in unet"):
            parity_of(dtype, off)


def test_a_layer_is_compared_where_its_input_is_not_the_zeros_of_the_unconditional_half(monkeypatch):
    monkeypatch.setattr(parity, "CROP_TOKENS", 4)
    monkeypatch.setattr(parity, "CROP_PIXELS", 2)
    unet = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Flatten(2), torch.nn.Linear(36, 7))
    layers = {
        name: replace(layer(name, "int8", None), weight_shape=tuple(unet.get_submodule(name).weight.shape),
                      weight_amax=torch.ones(1))
        for name in ("0", "2")
    }  # fmt: skip
    simulate(unet, layers)

    x = torch.cat([torch.zeros(1, 3, 6, 6), torch.rand(1, 3, 6, 6)])
    with torch.no_grad():
        found = run_simulation(lambda x: {"out": unet(x)}, unet, {"x": x}, layers)
        assert torch.equal(found.output, unet(x).flatten())
    assert found.inputs["0"].shape == (1, 3, 2, 2) and found.inputs["2"].shape == (1, 4, 36)
    assert all(inputs.any() for inputs in found.inputs.values())
    heads = torch.arange(10.0).view(1, 1, 10, 1).expand(2, 3, 10, 2)  # of a joint attention, the text's last
    assert parity.some_tokens(heads)[0, 0, :, 0].tolist() == [0, 3, 6, 9]
    assert torch.equal(parity.some_tokens(heads[:, :, :4]), heads[-1:, :, :4])


def layers_of(narrow: float = 0.0, wide: float = 0.0, **leans: float | None) -> dict:
    """The entry for layers of tolerances 3e-3 and 1e-2 with these errors; the wide one leans."""
    straight = dict.fromkeys(leans, 0.0)
    return layers_entry({"narrow": LayerDifference(narrow, 3e-3, straight), "wide": LayerDifference(wide, 1e-2, leans)})


@pytest.mark.parametrize("fault", ["input", "weight", "scale"])
def test_the_worst_layer_is_the_one_nearest_its_tolerance_and_may_go_half_of_the_way_to_a_fault(fault):
    found = layers_of(narrow=0.002, wide=0.004)
    assert (found["count"], found["worst"], found["tolerance"]) == (2, "narrow", 0.003)
    with pytest.raises(SdQuantError, match="layer wide by 0.04 "):
        layers_of(narrow=0.002, wide=0.04)
    entry = layers_of(**{fault: 0.4})["faults"][fault]
    assert entry.pop("hidden_scales", 0) == 0
    assert entry == {"worst": "wide", "lean": 0.4, "limit": 0.5, "layers": 2, "hidden": 0}
    with pytest.raises(SdQuantError, match="computes the layer wide as if .*(rounded|off)"):
        layers_of(**{fault: 0.6})


def test_an_attention_that_is_not_of_codes_is_told_by_its_lean():
    """Its error is within the tolerance: quantization itself costs as little."""
    torch.manual_seed(0)
    inputs = [(0.5 * torch.randn(1, 2, 64, 16)).half() for _ in "qkv"]
    query, key, value = (heads.float() for heads in inputs)
    ranges = tuple(heads.abs().amax((0, 2, 3)) for heads in (query, key, value, query @ key.transpose(2, 3)))
    row = LayerAssignment(
        "attn", "attention", (16,), activation_format="int8", attention_amax=ranges, key_mean=torch.zeros(2, 16)
    )
    products = IntegerProducts(row)
    honest = attention_difference(products, inputs, products(query, key, value).half())
    exact = attention_difference(products, inputs, (query @ key.transpose(2, 3)).softmax(-1) @ value)
    assert honest.relative_error < 1e-3 and abs(honest.leans["products"]) < 0.1
    assert exact.relative_error < 3e-2 and exact.leans["products"] == pytest.approx(1)
    assert differences_entry("attention", {"attn": honest})["count"] == 1
    with pytest.raises(SdQuantError, match="computes the layer attn as if its two products were not of codes"):
        differences_entry("attention", {"attn": replace(exact, relative_error=0.0)})
    differences_entry("attention", {"attn": replace(honest, relative_error=0.99 * honest.tolerance)})
    cost = distance((query @ key.transpose(2, 3)).softmax(-1) @ value, products(query, key, value))
    assert honest.tolerance == pytest.approx(0.01 + 0.75 * cost) and cost > 1e-3
    with pytest.raises(SdQuantError, match="in attention attn by "):
        differences_entry("attention", {"attn": replace(honest, relative_error=1.01 * honest.tolerance)})


def test_layers_that_cannot_show_a_fault_are_counted():
    assert layers_of(input=None)["faults"]["input"]["hidden"] == 1
    assert layers_of()["faults"]["scale"] == {
        "worst": None, "lean": None, "limit": 0.5, "layers": 0, "hidden": 0, "hidden_scales": 0.0,
    }  # fmt: skip
    step, output = torch.tensor([1.0, 0.0]), torch.tensor([10.0, 10.0])  # a share of the way, whatever lies across
    assert lean(torch.tensor([0.25, 3.0]), step, output) == 0.25
    assert lean(step, step / 1000, output) is None


@pytest.mark.parametrize("size, found", [(1.0, 0.6), (1e-4, None)])
def test_what_fp16_loses_of_its_smallest_numbers_is_no_fault_of_a_scale(size, found):
    """Sums of 64 terms of 1e-6, which a runtime added up in fp16, were 1 % off in a network of random weights."""
    same = nn.Identity()
    module = SimpleNamespace(input_quantizer=same, weight_quantizer=same, weight=size * torch.rand(4, 64) / 64)
    x = torch.rand(1, 8, 64)
    output = x[0] @ module.weight.T
    row = replace(layer("a", "int8", "int8"), weight_axis=0)
    told, hidden = scale_lean(module, row, x, output, 0.6 * SCALE_FAULT * output)
    assert (told, hidden) == ((None, 1.0) if found is None else (pytest.approx(found, rel=1e-3), 0.0))


def test_the_network_is_half_to_one_and_a_half_times_as_far_from_full_precision_as_its_simulation():
    found = network_entry("unet", 0.16, 0.1)
    assert (found["simulation_relative_error"], found["relative_error"]) == (0.1, 0.16)
    assert found["tolerance"] == pytest.approx(0.17)
    with pytest.raises(SdQuantError, match="the quantized unet by 0.18 "):
        network_entry("unet", 0.18, 0.1)
    assert network_entry("unet", 0.05, 0.1)["least"] == 0.05
    with pytest.raises(SdQuantError, match="the engine cannot have quantized it"):
        network_entry("unet", 0.04, 0.1)


def test_layers_that_fell_back_are_named_and_warned_of(caplog):
    pairs = dict.fromkeys(("fast", "slow", "lost"), ("int8", "int8")) | {"stored": ("int8", None), "kept": (None, None)}
    layers = {name: layer(name, *formats) for name, formats in pairs.items()}
    with caplog.at_level(logging.WARNING):
        entry = executed_entry("runtime", {"fast": "INT8", "slow": "FLOAT", "stored": "FLOAT"}, layers)
    assert entry == {
        "count": 1, "of": 3, "weights_only": 1, "fell_back": ["slow"], "unknown": ["lost"],
        "reason": "runtime does not say what became of 1 layers",
    }  # fmt: skip
    assert caplog.messages == ["runtime computes 1 of 3 quantized layers in floating point: slow"]
    caplog.clear()
    entry = executed_entry("runtime", dict.fromkeys(("fast", "slow", "lost"), "INT8"), layers)
    assert (entry["count"], entry["fell_back"], entry["unknown"], entry["reason"]) == (3, [], [], None)
    assert not caplog.messages
    assert executed_entry("runtime", {"fast": "FLOAT8E4M3FN"}, {"fast": layers["fast"]})["fell_back"] == ["fast"]
    # the two products of an attention count like layers
    row = LayerAssignment("attn", "attention", (16,), activation_format="int8", attention_amax=(torch.ones(1),) * 4)
    kept = LayerAssignment("other", "attention", (16,), reason="it reads the text")
    entry = executed_entry("runtime", {"attn.scores": "INT8", "attn.values": "FLOAT"}, {"attn": row, "other": kept})
    assert (entry["count"], entry["of"], entry["weights_only"]) == (1, 2, 0)
    assert entry["fell_back"] == ["attn.values"] and not entry["unknown"]
