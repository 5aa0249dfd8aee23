"""Compare an engine's outputs with torch's: every part, and every quantized layer and attention by itself.

Errors are relative to the norm of torch's output. Tolerances:

- 1e-3 for a part whose weights are stored in fp32, because sums are added up in another order;
- 1e-2 for an unquantized part in fp16: its weights are rounded (2^-11 each), on a GPU its activations too, over the
  depth of the network. 8e-2 where torch or the file is in bf16, eight times as coarse: the shipped parts have errors up
  to 3e-3 with weights in bf16, and up to 3e-2 with activations in bf16, too;
- the ``layer_tolerance`` of the weight's format for a quantized layer, and 4e-3 more where its product is in bf16.

A layer's error does not show whether it was quantized at all: INT8 moves an output by as little as 0.15 %. So for each
of the faults below, the *step* by which that fault would move the output is computed, and the difference is projected
on this step. The projection divided by the step is the *lean*: 0 without the fault, 1 with it, tolerated up to 0.5.

- ``input``: the layer's input is not rounded, ``weight``: its weight is not; both show where nothing is quantized;
- ``scale``: one scale of its weight, of a channel or of a block, is 2 % off.

A step of less than 1e-3 of the output cannot be distinguished from fp16's rounding: the fault is *hidden* in that
layer. Also hidden are scales of blocks that contribute less than a tenth of their output, and scales of outputs that
fp16 sums from subnormal numbers. Inputs are those of a real call, each moved half-way to its quantized value, so that
no error of fp16 changes the integer to which it is rounded.

Measured on the 150 layers of the shipped checkpoint at ``quant_level`` 3, inputs of convolutions not shifted. Error and
leans: worst of the correct layers in OpenVINO, ONNX Runtime and torch. Caught: layers found where all have the fault.

| weights, inputs      | error  | tolerance | lean: input | weight | scale | caught: unquantized | input | one scale |
|----------------------|--------|-----------|-------------|--------|-------|---------------------|-------|-----------|
| INT8 by channel      | 3.2e-4 | 3e-3      | 0.016       | 0.011  | 0.11  | 150                 | 150   | 150       |
| INT8 by tensor       | 1.4e-3 | 3e-3      | 0.015       | 0.037  | 0.01  | 150                 | 150   | 150       |
| INT8 by channel, fp16| 4.1e-4 | 3e-3      |             | 0.009  | 0.14  | 150                 |       | 150       |
| FP8                  | 5.3e-3 | 1e-2      | 0.026       | 0.017  | 0.02  | 150                 | 150   | 150       |
| INT4, fp16           | 2.5e-4 | 2e-3      |             | 0.001  | 0.17  | 150                 |       | 142       |
| INT4, INT4           | 4.6e-4 | 2e-3      | 0.001       | 0.001  | 0.18  | 150                 | 124   | 140       |

With inputs that were not moved, the worst correct INT8 layer had an error of 3.7e-3; it needed a tolerance of 1e-2,
with which 123 of 150 layers passed unquantized. Errors beyond 5e-4 come from weights half-way between two integers,
which ModelOpt rounds the other way. For blocks, one scale at random was wrong; 9 % of these scales are hidden. 26 of
the INT4 layers are convolutions with unquantized inputs. No runtime here executes FP4; its tolerance is that of FP8.

A layer in bf16 whose input is quantized has the same limits, because its product is fp32 (``export.qdq``): on the
shipped checkpoint the error is 9.0e-4, and leans are 0.023, 0.003 and 0.15, with inputs that bf16 holds.

With shifted convolutions, the worst correct layer of two checkpoints has an error of 1.1e-3 and leans of 0.04, 0.01 and
0.09. The error is fp16's rounding of the bias, the same in every row, so scales are compared without the rows' mean.

The two matrix products of a quantized attention are compared in the same way, given query, key and value; the fault is
that their operands are not rounded. Where logits are large, a score that rounds to the next integer changes a
probability by half, so three quarters of the quantization error are tolerated too. Measured on the shipped checkpoint
in INT8 and FP8: errors of 1.6e-3 and 2.5e-2 in OpenVINO and 5.5e-3 in ONNX Runtime (INT8), leans up to 0.01, 0.22 and
0.06; an unquantized attention has a lean of 1. With AVX2 alone OpenVINO's FP8 has an error of 4.2e-2, where
quantization costs 6.2e-2: it rounds twice there, which moves one value in 200 to the next FP8 number.

The quantized network's output is not compared with the simulation's: one rounding that flips in the first layer changes
all later layers. Its distance to full precision has to be at least half the simulation's distance, because an engine
that quantizes nothing has a distance of zero, and at most 1.5 times the simulation's distance plus 2e-2.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.devices import full_precision
from sd_quant.engines import load_engine, loadable
from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.export.layer_cut import cut_attentions, cut_layers
from sd_quant.files import temporary_folder
from sd_quant.models.parts import Contract
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated
from sd_quant.simulation.modelopt import between_roundings, unrounded

PART_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
SCALE_FAULT = 0.02  # relative error of a weight's scale
FAULTS = {  # in the words of an error message
    "input": "its input were not rounded",
    "weight": "its weight were not rounded",
    "scale": f"a scale of its weight were {SCALE_FAULT:.0%} off",
    "products": "its two products were not of codes",
}
FAULTS_OF = {"layer": ("input", "weight", "scale"), "attention": ("products",)}
ATTENTION_TOLERANCE, SHARE_OF_COST = 1e-2, 0.75  # a tolerance of attention: their sum, by the quantization error
MOST_LEAN = 0.5
VISIBLE = 1e-3  # least step of a fault, relative to the norm of the output
FINEST = 2.0**-24  # the distance of fp16's smallest numbers, half of which an addition may lose
LEAST_SHARE = 0.1  # least contribution of a scale to an output, relative to the terms that fp16 rounds in it
ROUNDING = {torch.bfloat16: 2 * 2.0**-9}  # of a product: its weight and its output are rounded
COARSER = {torch.bfloat16: 8.0}  # a dtype's rounding error over fp16's; the two limits above grow by this factor
CROP_TOKENS, CROP_PIXELS = 256, 16  # of inputs: tokens of a linear's, height and width of a convolution's

Outputs = Mapping[str, Mapping[str, Tensor]]  # tensors by part and by the output's name


def distance(expected: Tensor, actual: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||; infinity where this is not finite, as for an output of zeros."""
    error = relative_error(expected, actual)
    return math.inf if error is None else error


def checked_entry(what: str, error: float, tolerance: float) -> dict[str, float]:
    """The record's entry for an error. Raises SdQuantError when it exceeds the tolerance or is NaN."""
    if not error <= tolerance:
        raise SdQuantError(
            f"the engine differs from torch in {what} by {error:.2g} of its norm, more than the tolerated "
            f"{tolerance:.2g}; do not ship it, and report the checkpoint and the versions in provenance.json"
        )
    return {"relative_error": error, "tolerance": tolerance}


def part_parity(expected: Outputs, actual: Outputs, contracts: Mapping[str, Contract]) -> dict:
    """Return the record's entry, with the largest error, by unquantized part. Raises SdQuantError above a tolerance."""
    entries = {}
    for part, contract in contracts.items():
        outputs = expected[part]
        error = max(distance(output.float(), actual[part][name].float()) for name, output in outputs.items())
        dtypes = {contract.weights, *(output.dtype for output in outputs.values())}
        entries[part] = checked_entry(part, error, max(PART_TOLERANCE[dtype] for dtype in dtypes))
    return entries


@dataclass(frozen=True)
class Simulation:
    """One call of the network with ModelOpt's fake quantizers, and its layers' inputs."""

    network: nn.Module  # with the quantizers
    output: Tensor  # of the whole network, as ``joined``
    inputs: dict[str, Tensor]  # fp16, by quantized layer: a crop of its input, moved away from rounding boundaries
    attention_inputs: dict[str, tuple[Tensor, ...]]  # fp16, by quantized attention: crops of query, key and value


def run_simulation(
    simulated: Engine, network: nn.Module, inputs: Mapping[str, Tensor], assignment: Mapping[str, LayerAssignment]
) -> Simulation:
    """Call ``simulated``, which computes ``network``; keep crops of the inputs of quantized layers and attentions."""
    crops: dict[str, Tensor] = {}
    heads_of: dict[str, tuple[Tensor, ...]] = {}

    def keep_crop(row: LayerAssignment, layer: nn.Module, arguments: tuple) -> None:
        x = arguments[0]
        # of the last sample: the first is unconditional, where cross-attention adds nothing but zeros
        crop = x.flatten(0, -2)[None, -CROP_TOKENS:] if is_linear(row) else x[-1:, :, :CROP_PIXELS, :CROP_PIXELS]
        crops[row.name] = between_roundings(layer, crop).half().cpu()

    def keep_heads(row: LayerAssignment, products: nn.Module, arguments: tuple) -> None:
        heads_of[row.name] = tuple(some_tokens(heads).half().cpu() for heads in arguments[:3])  # without a mask

    hooks = []
    for row in assignment.values():
        if row.format is not None:
            hooks.append(network.get_submodule(row.name).register_forward_pre_hook(partial(keep_crop, row)))
        if row.attention_products:
            hooks.append(products_of(network, row).register_forward_pre_hook(partial(keep_heads, row)))
    outputs = simulated(**inputs)
    for hook in hooks:
        hook.remove()
    return Simulation(network, joined(outputs), crops, heads_of)


def joined(outputs: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all outputs of a part to one vector, fp32 on the CPU."""
    return torch.cat([output.float().cpu().flatten() for output in outputs.values()])


def some_tokens(heads: Tensor) -> Tensor:
    """Return ``CROP_TOKENS`` or fewer tokens, evenly spaced, of the last sample of [B, heads, tokens, head_width],
    because a joint attention has image tokens first and text tokens last."""
    return heads[-1:, :, :: -(-heads.shape[2] // CROP_TOKENS)]


def products_of(network: nn.Module, attention: LayerAssignment) -> nn.Module:
    """Return the module that computes the two matrix products of a simulated attention."""
    return network.get_submodule(f"{attention.name}.processor.products")


def is_linear(layer: LayerAssignment) -> bool:
    return len(layer.weight_shape) == 2


def exported_outputs(
    simulation: Simulation,
    assignment: Mapping[str, LayerAssignment],
    onnx_path: Path,
    prefix: str,
    engine: str,
    dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """Run each quantized layer and attention of the exported network by itself on the simulation's inputs.

    Returns the outputs by name. ``dtype`` is that of the network's weights; in the graph ``prefix`` precedes layers'
    names. ``engine`` names the runtime; TensorRT plans are built for the cut-out layers.
    """

    def layers(path: Path) -> dict[str, Tensor]:
        names = set(cut_layers(onnx_path, assignment, path, prefix, dtype).values())
        return {name: tensor.to(dtype) for name, tensor in simulation.inputs.items() if name in names}

    def attentions(path: Path) -> dict[str, Tensor]:
        cut_attentions(onnx_path, [assignment[name] for name in simulation.attention_inputs], path, dtype)
        inputs: dict[str, Tensor] = {}
        for name, (query, key, value) in simulation.attention_inputs.items():
            given = {"query": query, "key": key.transpose(2, 3).contiguous(), "value": value}
            inputs |= {f"{name}.given_{what}": tensor for what, tensor in given.items()}
        return inputs

    found: dict[str, Tensor] = {}
    for write in (layers, attentions)[: 2 if simulation.attention_inputs else 1]:
        with temporary_folder(onnx_path.parents[2]) as folder:
            path = Path(folder) / "cut.onnx"
            inputs = write(path)
            opened = load_engine(engine, loadable(engine, path, {name: tuple(x.shape) for name, x in inputs.items()}))
            found |= {name.rpartition(".")[0]: output.cpu() for name, output in opened(**inputs).items()}
            opened.close()
    return found


def rounded_inputs(simulation: Simulation, dtype: torch.dtype) -> Simulation:
    """Return the simulation with its layers' inputs rounded to ``dtype``, as bf16 can be coarser than INT8's steps."""
    return replace(simulation, inputs={name: crop.to(dtype).half() for name, crop in simulation.inputs.items()})


@torch.no_grad()
def native_outputs(network: nn.Module, simulation: Simulation) -> dict[str, Tensor]:
    """Return outputs of ``network``'s natively quantized layers for the simulation's inputs; linears without bias."""
    outputs = {}
    for name, crop in simulation.inputs.items():
        layer = network.get_submodule(name)
        bias = layer.bias.clone() if crop.ndim == 3 and layer.bias is not None else None
        if bias is not None:  # zero, not subtracted from the output, which would have been rounded with it
            layer.bias.zero_()
        outputs[name] = layer(crop.to(next(network.parameters()))).cpu()
        if bias is not None:
            layer.bias.copy_(bias)
    return outputs


@dataclass(frozen=True)
class LayerDifference:
    """The difference of an engine's and the simulation's output of one layer or attention."""

    relative_error: float
    tolerance: float
    leans: dict[str, float | None]  # by fault; None where it is hidden
    hidden_scales: float = 0.0  # share of the weight's scales that contribute too little to the output to be judged


@full_precision()
@torch.inference_mode()
def layer_difference(module: nn.Module, layer: LayerAssignment, x: Tensor, actual: Tensor) -> LayerDifference:
    """Compare the engine's output ``actual`` for the input ``x`` with that of the simulated layer ``module``.

    ``actual`` includes the bias of a convolution, not of a linear, whose graph adds the bias after the MatMul.
    """
    x = x.to(module.get_parameter("weight"))
    forward = lambda: module.forward(x)  # noqa: E731  # without the hook that adds a low-rank branch
    simulated, bias = forward(), module.bias if is_linear(layer) and module.bias is not None else 0
    with unrounded(module.weight_quantizer):
        steps = {"weight": forward() - simulated}
    if layer.activation_format is not None:
        with unrounded(module.input_quantizer):
            steps["input"] = forward() - simulated
    expected = simulated - bias
    difference, coarser = actual.to(expected) - expected, COARSER.get(actual.dtype, 1.0)
    leans = {fault: lean(difference, step, coarser * expected) for fault, step in steps.items()}
    least = coarser * LEAST_SHARE
    leans["scale"], hidden_scales = scale_lean(module, layer, x, rows(expected, layer), rows(difference, layer), least)
    tolerance = FORMATS[layer.format].layer_tolerance + ROUNDING.get(actual.dtype, 0.0)
    return LayerDifference(distance(expected, actual.to(expected)), tolerance, leans, hidden_scales)


@full_precision()
@torch.inference_mode()
def attention_difference(products: nn.Module, inputs: Sequence[Tensor], actual: Tensor) -> LayerDifference:
    """Compare an engine's output ``actual`` for query, key and value with that of ``products``, simulated attention."""
    query, key, value = (heads.to(next(products.buffers(), heads.float())) for heads in inputs)
    expected = products(query, key, value)
    actual = actual.to(expected)
    exact = (query @ key.transpose(2, 3)).softmax(-1) @ value
    leans = {"products": lean(actual - expected, exact - expected, expected)}
    tolerance = ATTENTION_TOLERANCE + SHARE_OF_COST * distance(exact, expected)
    return LayerDifference(distance(expected, actual), tolerance, leans)


def rows(output: Tensor, layer: LayerAssignment) -> Tensor:
    """Reshape an output with N channels, [..., N] of a linear or [B, N, H, W] of a convolution, to [rows, N]."""
    return (output if is_linear(layer) else output.movedim(1, -1)).flatten(0, -2)


def lean(difference: Tensor, step: Tensor, output: Tensor) -> float | None:
    """Return what share of a fault's ``step`` is in ``difference``, by projection; None if it is too small."""
    if not step.norm() >= VISIBLE * output.norm():
        return None
    return ((difference * step).sum() / step.square().sum()).item()


def scale_lean(
    module: nn.Module, layer: LayerAssignment, x: Tensor, output: Tensor, difference: Tensor, least: float = LEAST_SHARE
) -> tuple[float | None, float]:
    """Return the largest absolute ``lean`` of the weight's visible scales (or None), and the share of hidden scales.

    ``output`` and ``difference`` are [rows, N], N output channels. A scale's step is SCALE_FAULT times what its weights
    contribute: to all of the output (one scale per tensor), to a column (per channel), or to a part of a column's sums
    (per block). A scale is visible if this is at least the share ``least`` of the terms and sums that fp16 rounds.
    """
    inputs, weight = factors(module, layer, x)
    if layer.bias is not None:  # fp16's rounding of it is the same for every row, and no scale's fault
        inputs, difference = (values - values.mean(0) for values in (inputs, difference))
    # the square of all that fp16 rounds: the terms of the sums, and the sums
    magnitude = inputs.square().sum(0) @ weight.T.square() + output.square().sum(0)
    block, columns = FORMATS[layer.format].block, weight.shape[1]
    whole = block is None and layer.weight_axis is None
    if whole:
        difference, magnitude = difference.reshape(-1, 1), magnitude.sum()
    leans, total = [], 0
    for start in range(0, columns, block or columns):
        taken = slice(start, start + (block or columns))
        share = inputs[:, taken] @ weight[:, taken].T
        step = SCALE_FAULT * (share.reshape(-1, 1) if whole else share)
        visible = step.square().sum(0) >= (SCALE_FAULT * least) ** 2 * magnitude
        visible &= step.square().mean(0).sqrt() >= inputs.shape[1] * FINEST / 2  # which leaves no step of zeros
        leans.append(((difference * step).sum(0) / step.square().sum(0))[visible].abs())
        total += step.shape[1]
    shown = torch.cat(leans)
    return (shown.max().item() if len(shown) else None), 1 - len(shown) / total


def factors(module: Any, layer: LayerAssignment, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return dequantized inputs [rows, K] and weight [N, K], rotated as in the file; output is inputs @ weight^T."""
    inputs = rotated(module.input_quantizer(x), layer.rotation)
    weight = rotated(module.weight_quantizer(module.weight).flatten(1), layer.rotation)
    if not is_linear(layer):
        windows = {name: getattr(module, name) for name in ("dilation", "padding", "stride")}
        inputs = F.unfold(inputs, module.kernel_size, **windows).movedim(1, -1)
    return inputs.flatten(0, -2), weight


def layer_parity(
    simulation: Simulation,
    full_outputs: Mapping[str, Tensor],
    quantized_outputs: Mapping[str, Tensor],
    assignment: Mapping[str, LayerAssignment],
    outputs: Mapping[str, Tensor],
    part: str,
) -> dict:
    """Build the record's entries for the quantized layers and attentions, and for the whole network, named ``part``.

    ``outputs`` are the engine's outputs of single layers and attentions; ``full_outputs`` and ``quantized_outputs`` are
    the network's, in full precision and from the quantized engine. Raises SdQuantError for an error above a tolerance.
    """
    full_output = joined(full_outputs)
    differences = {
        name: layer_difference(simulation.network.get_submodule(name), assignment[name], x, outputs[name])
        for name, x in simulation.inputs.items()
    }
    of_attentions = {
        name: attention_difference(products_of(simulation.network, assignment[name]), inputs, outputs[name])
        for name, inputs in simulation.attention_inputs.items()
        if name in outputs  # layers of codes in torch leave them to the simulation
    }
    return {
        "quantized_layers": layers_entry(differences),
        **({"quantized_attentions": differences_entry("attention", of_attentions)} if of_attentions else {}),
        f"{part}_quantized": network_entry(
            part, distance(full_output, joined(quantized_outputs)), distance(full_output, simulation.output)
        ),
    }


def layers_entry(differences: Mapping[str, LayerDifference]) -> dict:
    """Return ``differences_entry`` of the quantized layers, with the mean share of weight scales that are hidden."""
    entry = differences_entry("layer", differences)
    entry["faults"]["scale"]["hidden_scales"] = statistics.fmean(each.hidden_scales for each in differences.values())
    return entry


def differences_entry(kind: str, differences: Mapping[str, LayerDifference]) -> dict[str, Any]:
    """Return the number of layers, the error that is largest relative to its tolerance, and an entry for each fault.

    Raises SdQuantError for an error above its tolerance and for a lean above MOST_LEAN.
    """
    worst = max(differences, key=lambda name: differences[name].relative_error / differences[name].tolerance)
    entry = checked_entry(f"{kind} {worst}", differences[worst].relative_error, differences[worst].tolerance)
    found = {fault: fault_entry(fault, differences) for fault in FAULTS_OF[kind]}  # of finite numbers now
    return {"count": len(differences), "worst": worst, **entry, "faults": found}


def fault_entry(fault: str, differences: Mapping[str, LayerDifference]) -> dict:
    """Return the largest lean to a fault, its layer, how many layers can have the fault and in how many it is hidden.

    Raises SdQuantError for a lean above MOST_LEAN.
    """
    leans = {name: each.leans[fault] for name, each in differences.items() if fault in each.leans}
    shown = {name: value for name, value in leans.items() if value is not None}
    worst = max(shown, key=lambda name: shown[name], default=None)
    if worst is not None and not shown[worst] <= MOST_LEAN:
        raise SdQuantError(
            f"the engine computes the layer {worst} as if {FAULTS[fault]}: its output goes {shown[worst]:.0%} of the "
            "way there; do not ship it, and report the checkpoint and the versions in provenance.json"
        )
    lean = None if worst is None else shown[worst]
    return {"worst": worst, "lean": lean, "limit": MOST_LEAN, "layers": len(leans), "hidden": len(leans) - len(shown)}


def network_entry(denoiser: str, engine_error: float, simulation_error: float) -> dict:
    """Build the record's entry from the engine's and the simulation's relative error against full precision.

    Raises SdQuantError for an engine's error that is too large, or so small that nothing can have been quantized.
    """
    entry = checked_entry(f"the quantized {denoiser}", engine_error, 1.5 * simulation_error + 2e-2)
    least = 0.5 * simulation_error
    if engine_error < least:
        raise SdQuantError(
            f"the quantized {denoiser} differs from full precision by {engine_error:.2g} of its norm, and its "
            f"simulation by {simulation_error:.2g}: the engine cannot have quantized it; do not report its figures"
        )
    return {**entry, "least": least, "simulation_relative_error": simulation_error}
