"""Limits of parity by hand; and faults of single layers, made in real exported files that a real runtime runs.

A fault is made in the file of single layers, where the runtime would make it: everything else is as it is exported.
"""

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

from sd_quant.engines import load_engine, products_of
from sd_quant.engines.tensorrt import build as building
from sd_quant.engines.tensorrt.plan import describe_plan
from sd_quant.engines.torch import TorchEngine, placed
from sd_quant.errors import SdQuantError
from sd_quant.export.layer_cut import names_of_products
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import copy_of, trace
from sd_quant.inference import parity
from sd_quant.inference.executed import executed_entry, types_of_layers
from sd_quant.inference.parity import (
    SCALE_FAULT,
    LayerDifference,
    attention_difference,
    checked_entry,
    differences_entry,
    distance,
    layer_difference,
    layers_entry,
    lean,
    native_outputs,
    network_entry,
    part_parity,
    rounded_inputs,
    run_simulation,
    scale_lean,
)
from sd_quant.models.parts import Contract
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.convolutions import with_shifted_bias
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.native import products_of_layers, with_native_layers
from sd_quant.simulation.rewrite import IntegerProducts
from tests.layers import drawn, inputs_seen

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


# Faults of single layers, made in real exported files that a real runtime runs: each is caught, honest files pass


WIDTH, HIDDEN = 64, 256
FAULTY = ("conv", "up", "down")
RECIPES = {
    # format of weights, of linears' and convolutions' inputs; whether channels have scales, code of zero;
    # whether inputs of linears are scaled per token, and how many of their channels are rotated together
    "int8": ("int8", "int8", "int8", True, 0, False, 0),
    "int8_shifted": ("int8", "int8", "int8", True, -60, False, 0),
    "int8_per_tensor": ("int8", "int8", "int8", False, 0, False, 0),
    "fp8": ("fp8", "fp8", "fp8", False, 0, False, 0),
    "int4_weight_only": ("int4", None, None, False, 0, False, 0),
    "int4": ("int4", "int4", None, False, 0, False, 0),
    "int8_dynamic": ("int8", "int8", "int8", True, 0, True, 0),
    "int8_rotated": ("int8", "int8", "int8", True, 0, True, 16),
    "fp8_per_row": ("fp8", "fp8", "fp8", True, 0, True, 0),
    "int4_rotated": ("int4", "int4", None, False, 0, False, 64),
}
RUNS = [
    (recipe, engine)
    for recipe in RECIPES
    for engine in ("openvino", "onnxruntime")
    if not (recipe in ("int4", "int4_rotated") and engine == "openvino")  # which does not execute it
]
CAUSES = {
    "unquantized": "were not rounded",
    "unrounded input": "its input were not rounded",
    "scale": "a scale of its weight were 2% off|differs from torch in layer",
}


def faults() -> list[tuple[str, str, str, str]]:
    """Every run with every fault, in each layer in turn: recipe, engine, fault and layer."""
    found = []
    for number, (recipe, engine) in enumerate(RUNS):
        _, of_linears, of_convolutions, *_ = RECIPES[recipe]
        rounded = [name for name in FAULTY if (of_convolutions if name == "conv" else of_linears)]
        for turn, fault in enumerate(CAUSES):
            names = rounded if fault == "unrounded input" else FAULTY
            found += [(recipe, engine, fault, names[(number + turn) % len(names)])] if names else []
    return found


class Network(nn.Module):
    """A convolution and two linears, the first of them smoothed; each reads what has outliers, as layers do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.silu(self.conv(x)).flatten(2).transpose(1, 2)
        return self.down(F.gelu(self.up(tokens)))


CONTRACT = Contract({"x": ("batch", WIDTH, 16, 16)}, ("out",), {"x": torch.float16}, torch.float16)


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    network = Network().eval().requires_grad_(False)
    network.up.bias.mul_(100)
    network.down.bias.mul_(100)
    for layer in (network.conv, network.up, network.down):
        layer.weight.mul_(torch.rand(layer.weight.shape[1]).mul(4).exp().view(1, -1, *[1] * (layer.weight.ndim - 2)))
    return network


INPUTS = {"x": drawn(2, WIDTH, 16, 16, seed=1).half().float()}


def assign(network: Network, recipe: str) -> dict[str, LayerAssignment]:
    fmt, of_linears, of_convolutions, per_channel, zero_point, per_token, rotation = RECIPES[recipe]
    factor, seen = {"up": torch.linspace(0.5, 2, WIDTH)}, inputs_seen(network, FAULTY, lambda: network(**INPUTS))
    amax = {name: (x * factor.get(name, 1)).abs().max().item() for name, x in seen.items()}
    assignment = {}
    for name, layer in network.named_children():
        linear = layer.weight.ndim == 2
        weight = rotated(layer.weight / factor.get(name, 1), rotation * linear)
        ranges = weight.abs().flatten(1).amax(1) if per_channel else weight.abs().amax().view(1)
        assignment[name] = LayerAssignment(
            name, "ffn" if linear else "conv", tuple(weight.shape), fmt, of_linears if linear else of_convolutions,
            weight_axis=0 if per_channel else None, weight_amax=ranges,
            activation_amax=1.0 if per_token and linear else amax[name], pre_quant_scale=factor.get(name),
            per_token=per_token and linear, rotation=rotation * linear,
        )  # fmt: skip
    if zero_point:
        conv = replace(assignment["conv"], activation_amax=1.9 * amax["conv"], activation_zero_point=zero_point)
        assignment["conv"] = with_shifted_bias(conv, network.conv.weight, network.conv.bias)
    return assignment


@pytest.fixture(scope="module")
def export(network, tmp_path_factory):
    traced = trace(Network, CONTRACT)

    @cache
    def export(recipe: str):
        assignment = assign(network, recipe)
        path = tmp_path_factory.mktemp(recipe) / "onnx" / "unet" / "unet.onnx"
        path.parent.mkdir(parents=True)
        read = network.state_dict().__getitem__
        write_onnx(copy_of(traced), path, inputs=1, read=read, assignment=assignment)
        module = deepcopy(network)
        simulate(module, assignment)
        return assignment, run_simulation(TorchEngine(module, CONTRACT), module, INPUTS, assignment), path

    return export


def unrounded_input(graph: onnx.GraphProto, layer: LayerAssignment, node: onnx.NodeProto) -> None:
    made = {output for each in graph.node for output in each.output}
    if layer.activation_zero_point:
        (pad,) = [each for each in graph.node if each.op_type == "Pad"]
        (dequantize,) = [each for each in graph.node if pad.output[0] in each.input]
        dequantize.input[0] = pad.input[0]  # nobody reads it any more, and it has to be sound
        pad.input[0], pad.input[2] = f"{layer.name}.input_shifted", f"{layer.name}.input_shifted_zero"
        node.input[0] = pad.output[0]
        return
    before = ("input_over_largest", "input_rotated", "smoothed")  # what stands nearest to QuantizeLinear
    found = [f"{layer.name}.{what}" for what in before if f"{layer.name}.{what}" in made]
    node.input[0] = found[0] if found else layer.name


def unrounded_weight(graph: onnx.GraphProto, layer: LayerAssignment, node: onnx.NodeProto, network: Network) -> None:
    weight = rotated(rewritten(network.get_submodule(layer.name).weight, layer), layer.rotation).half()
    values = (weight if weight.ndim == 4 else weight.T).contiguous().numpy()
    graph.initializer.append(numpy_helper.from_array(values, f"{layer.name}.exact"))
    node.input[1] = f"{layer.name}.exact"


def wrong_scale(graph: onnx.GraphProto, layer: LayerAssignment) -> None:
    """One of them, that of the first channel or block."""
    (tensor,) = [tensor for tensor in graph.initializer if tensor.name == f"{layer.name}.weight.scale"]
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[0] *= np.float16(1.02)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def faulty_cut(monkeypatch, network: Network, fault: str, name: str) -> None:
    """Let the layer ``name`` be cut out with the ``fault``."""
    cut_layers = parity.cut_layers

    def cut(onnx_path: Path, assignment, path: Path, *names: object) -> dict[str, str]:
        reads = cut_layers(onnx_path, assignment, path, *names)
        model, layer = onnx.load(path), assignment[name]
        (node,) = [node for node in model.graph.node if f"{name}.output" in node.output]
        if layer.per_token:
            (node,) = [each for each in model.graph.node if node.input[0] in each.output]
        if fault in ("unquantized", "unrounded input") and layer.activation_format is not None:
            unrounded_input(model.graph, layer, node)
        if fault == "unquantized":
            unrounded_weight(model.graph, layer, node, network)
        if fault == "scale":
            wrong_scale(model.graph, layer)
        onnx.save(model, path)
        return reads

    monkeypatch.setattr(parity, "cut_layers", cut)


def entry_of(export, recipe: str, outputs_of: Callable) -> dict:
    assignment, simulation, path = export(recipe)
    outputs = outputs_of(simulation, assignment, path)
    return layers_entry({
        name: layer_difference(simulation.network.get_submodule(name), assignment[name], x, outputs[name])
        for name, x in simulation.inputs.items()
    })  # fmt: skip


def outputs_by(engine: str) -> Callable:
    return lambda simulation, assignment, path: parity.exported_outputs(simulation, assignment, path, "", engine)


@pytest.mark.slow
@pytest.mark.parametrize("recipe, engine", RUNS)
def test_an_honest_export_stays_clear_of_every_limit(export, recipe, engine):
    """By half and more: limits that honest layers only just keep would fail on another machine."""
    entry = entry_of(export, recipe, outputs_by(engine))
    assert entry["count"] == 3 and entry["relative_error"] < entry["tolerance"] / 2
    with_inputs = sum(layer.activation_format is not None for layer in export(recipe)[0].values())
    layers = {name: fault["layers"] for name, fault in entry["faults"].items()}
    assert layers == {"input": with_inputs, "weight": 3, "scale": 3}
    for fault in entry["faults"].values():
        assert fault["hidden"] == 0 and (fault["lean"] or 0) < fault["limit"] / 2


@pytest.mark.slow
def test_what_fp16_rounds_off_a_bias_is_no_fault_of_a_scale(export):
    """It is the same in every row, and inputs of one sign make a channel's output nearly that."""
    assignment, simulation, _ = export("int8_shifted")
    conv, x = simulation.network.get_submodule("conv"), simulation.inputs["conv"].abs()
    simulated = conv(x.float())
    difference = layer_difference(conv, assignment["conv"], x, simulated + 0.005 * simulated.std())
    assert difference.relative_error > 1e-3 and difference.leans["scale"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("recipe, engine, fault, name", faults())
def test_a_fault_of_one_layer_is_caught(export, network, monkeypatch, recipe, engine, fault, name):
    faulty_cut(monkeypatch, network, fault, name)
    with pytest.raises(SdQuantError, match=f"(?=.*{name})(?:.*(?:{CAUSES[fault]}))|differs from torch in layer {name}"):
        entry_of(export, recipe, outputs_by(engine))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "fp8", "int8_dynamic", "int8_rotated"])
def test_layers_of_codes_pass_and_leave_their_biases_as_they_are(export, network, recipe):
    assignment, simulation, _ = export(recipe)
    native = with_native_layers(deepcopy(network), assignment)
    bias = native.up.bias.clone()
    entry = entry_of(export, recipe, lambda simulation, assignment, path: native_outputs(native, simulation))
    assert entry["relative_error"] < entry["tolerance"] / 2 and torch.equal(native.up.bias, bias)
    assert bias.any()
    if recipe not in ("fp8", "int8_rotated"):
        return
    # in bf16 with inputs that it holds: it is coarser than half a step of INT8 from code 64 on
    native = placed(with_native_layers(deepcopy(network), assignment), torch.device("cpu"), torch.bfloat16)
    held = rounded_inputs(simulation, torch.bfloat16)
    outputs = native_outputs(native, held)
    for name, x in held.inputs.items():
        assert torch.equal(x, x.bfloat16().half()) and not torch.equal(x, simulation.inputs[name])
        found = layer_difference(simulation.network.get_submodule(name), assignment[name], x, outputs[name])
        stated = FORMATS[assignment[name].format].layer_tolerance
        assert found.relative_error < stated and found.tolerance == stated + 2**-8
        assert all(lean is None or abs(lean) < 0.2 for lean in found.leans.values())


@pytest.mark.parametrize(("recipe", "engine", "multiplied"), [
    ("int8", "openvino", "INT8"), ("int8_rotated", "openvino", "INT8"), ("int4_weight_only", "openvino", "FLOAT"),
    ("fp8", "openvino", "FLOAT"), ("int8", "onnxruntime", "FLOAT"), ("fp8", "onnxruntime", "FLOAT"),
])  # fmt: skip
def test_a_runtime_says_in_which_numbers_it_multiplies(export, recipe, engine, multiplied, request):
    """OpenVINO has kernels for INT8; ONNX Runtime fuses none of this export's Q/DQ pairs, whose scales are fp16."""
    if multiplied == "INT8":
        request.getfixturevalue("int8_kernels")
    assignment, _, path = export(recipe)
    products = products_of(load_engine(engine, path), path)
    types = types_of_layers(products, names_of_products(path, assignment, ""))
    assert types == dict.fromkeys(FAULTY, multiplied)


@pytest.mark.parametrize("device, linear", [("cuda", "FLOAT8E4M3FN"), ("cpu", "FLOAT")])
def test_layers_of_codes_are_counted(export, network, monkeypatch, device, linear):
    """No processor multiplies FP8."""
    native = with_native_layers(deepcopy(network), export("fp8")[0])
    monkeypatch.setattr("sd_quant.simulation.native.best_device", lambda: torch.device(device))
    assert products_of_layers(native, export("fp8")[0]) == {"conv": "FLOAT", "up": linear, "down": linear}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "int4_weight_only", "int8_rotated"])
def test_layers_of_a_plan_are_those_of_a_plan(export, monkeypatch, recipe):
    """Built by the job's own library. It runs on a GPU only, so that another runtime computes the file of this one."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    assignment, simulation, path = export(recipe)
    loaded = []

    def load(name: str, plan: Path):
        described = describe_plan(plan)
        loaded.append((name, described["library"], described["complete"]))
        return load_engine("openvino", plan.with_suffix(".onnx"))

    monkeypatch.setattr(building, "build_plan", partial(building.build_plan, compute_capabilities=["SM89"]))
    monkeypatch.setattr(parity, "load_engine", load)
    outputs = parity.exported_outputs(simulation, assignment, path, "", "tensorrt_rtx")
    assert loaded == [("tensorrt_rtx", "tensorrt_rtx", True)]
    assert outputs.keys() == simulation.inputs.keys() and not list(path.parents[2].glob("*.plan"))
