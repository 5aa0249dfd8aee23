"""Does the engine compute what torch computes? Part by part, and layer by layer for what is quantized.

Relative to the norm of torch's output,

- a part whose weights are stored in fp32 may differ by 1e-3, for another order of summation;
- an unquantized part in fp16 by 1e-2. The engine's weights are rounded (2^-11 each), and on a GPU its activations too,
  which accumulates over the depth of the network. Where torch itself computes in bf16, whose numbers lie eight times as
  far apart, by 8e-2;
- one quantized layer by the ``layer_tolerance`` of its weight's format.

That alone is blind: INT8 moves the output of a layer by as little as 0.15 %. So the difference of a layer is also laid
along what each of these faults would add to its output, and may go half of that way at most:

- ``input``: the layer's input is not rounded, ``weight``: its weight is not; both where it is not quantized at all;
- ``scale``: one scale of its weight, of a channel or of a block, is 2 % off.

A fault that would add less than 1e-3 cannot be told from fp16; its layer is counted as hidden. So are scales of blocks
that make less than a tenth of their output, and scales of outputs that fp16 adds up from its smallest numbers. Honest
engines stay clear of the limits because they are given inputs that no error of fp16 moves from one code to the next:
those of a real call, each half-way to what its code stands for.

Measured on the 150 layers of the shipped checkpoint at level 3, the worst honest layer of OpenVINO, ONNX Runtime and
torch (a run's ``parity`` has its own), and what each fault gives, made in all layers of the exported file at once, with
inputs that are not shifted:

| weights, inputs      | error  | tolerance | lean: input | weight | scale | caught: unquantized | input | one scale |
|----------------------|--------|-----------|-------------|--------|-------|---------------------|-------|-----------|
| INT8 by channel      | 3.2e-4 | 3e-3      | 0.016       | 0.011  | 0.11  | 150                 | 150   | 150       |
| INT8 by tensor       | 1.4e-3 | 3e-3      | 0.015       | 0.037  | 0.01  | 150                 | 150   | 150       |
| INT8 by channel, fp16| 4.1e-4 | 3e-3      |             | 0.009  | 0.14  | 150                 |       | 150       |
| FP8                  | 5.3e-3 | 1e-2      | 0.026       | 0.017  | 0.02  | 150                 | 150   | 150       |
| INT4, fp16           | 2.5e-4 | 2e-3      |             | 0.001  | 0.17  | 150                 |       | 142       |
| INT4, INT4           | 4.6e-4 | 2e-3      | 0.001       | 0.001  | 0.18  | 150                 | 124   | 140       |

On the inputs as they are the worst honest INT8 layer had 3.7e-3, and its tolerance of 1e-2 let 123 of the 150 pass with
nothing rounded. Errors beyond 5e-4 are weights that lie between two codes, of which ModelOpt takes the other. The scale
of a block was one at random; hidden are 9 % of them. 26 of the INT4 layers are convolutions, whose inputs are not
rounded. No runtime here executes FP4; its tolerance is that of FP8.

Where inputs of convolutions are shifted, the worst honest layer of two checkpoints has an error of 1.1e-3 and leans of
0.04, 0.01 and 0.09; faults of such a layer are caught in the tests. The error is what fp16 rounds off its bias. That is
the same in every row, so no scale's fault, and rows are compared without their mean there.

The two products of a quantized attention are compared in the same way, from query, key and value as they are
multiplied, and the fault is that nothing is rounded. Where logits are large, one code of a score that rounds the other
way changes a probability by half, so three quarters of what quantization costs are tolerated too. Measured on the
shipped checkpoint in INT8 and in FP8: 1.6e-3 and 2.5e-2 in OpenVINO, 5.5e-3 in ONNX Runtime (INT8), with leans up to
0.01, 0.22 and 0.06; a file without the codes leans 1. On a processor with AVX2 alone OpenVINO's FP8 has 4.2e-2 of the
6.2e-2 that quantization costs, because it rounds twice there and one code in 200 is the next one.

The quantized network as a whole is not compared with its simulation, because roundings that flip in the first layer
change everything behind it. Its distance to full precision may be 1.5 times the simulation's plus 2e-2, and is at least
half of the simulation's: an engine that quantizes nothing is none.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
FAULTS = {  # of a layer or an attention, which would show in its output
    "input": "its input were not rounded",
    "weight": "its weight were not rounded",
    "scale": f"a scale of its weight were {SCALE_FAULT:.0%} off",
    "products": "its two products were not of codes",
}
ATTENTION_TOLERANCE, SHARE_OF_COST = 1e-2, 0.75  # and how much of what quantization costs it is tolerated besides
MOST_LEAN = 0.5  # of the way that a fault would take the output
VISIBLE = 1e-3  # a fault that adds less to an output, relative to its norm, is hidden
FINEST = 2.0**-24  # the distance of fp16's smallest numbers, half of which an addition may lose
LEAST_SHARE = 0.1  # of what fp16 rounds in an output, that the numbers of a scale make; one with less is hidden
COARSER = {torch.bfloat16: 8.0}  # how many times as much as fp16 a dtype rounds, which hides as much more
TOKENS, PIXELS = 256, 16  # what is compared of a layer's input: tokens of a linear, height and width of a convolution

Outputs = Mapping[str, Mapping[str, Tensor]]  # tensors by part and by the output's name


class WatchedEngine:
    """``engine``, with ``on_call`` called with its inputs before every call."""

    def __init__(self, engine: Engine, on_call: Callable[[Mapping[str, Tensor]], None]):
        self.engine, self.on_call = engine, on_call
        self.name, self.inputs, self.device = engine.name, engine.inputs, engine.device

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        self.on_call(inputs)
        return self.engine(**inputs)

    def reopen(self) -> bool:
        return self.engine.reopen()

    def close(self) -> None:
        self.engine.close()


class WatchedVariant(Mapping[str, Engine]):
    """The engines of a variant by part, which remember the inputs of some calls of each."""

    def __init__(self, variant: Mapping[str, Engine], calls: Mapping[str, Collection[int]]):
        """``calls`` gives by part the numbers of the calls that are remembered, of parts that it lacks the first."""
        self.variant, self.wanted = variant, dict.fromkeys(variant, (0,)) | calls
        self.count = dict.fromkeys(variant, 0)  # of the calls so far
        self.seen: dict[str, dict[int, dict[str, Tensor]]] = {}  # a copy of the inputs by part, number and name

    def remember(self, part: str, inputs: Mapping[str, Tensor]) -> None:
        if self.count[part] in self.wanted[part]:
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            self.seen.setdefault(part, {})[self.count[part]] = copies
        self.count[part] += 1

    def __getitem__(self, part: str) -> Engine:
        return WatchedEngine(self.variant[part], partial(self.remember, part))

    def __iter__(self) -> Iterator[str]:
        return iter(self.variant)

    def __len__(self) -> int:
        return len(self.variant)


def distance(expected: Tensor, actual: Tensor) -> float:
    """The relative error, infinite where it is undefined: for an output of zeros, or one that is not finite."""
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
    """The record's entry for each unquantized part, of the worst of its outputs.

    Raises SdQuantError when one exceeds its tolerance.
    """

    def entry(part: str, weights: torch.dtype) -> dict:
        outputs = expected[part]
        error = max(distance(output.float(), actual[part][name].float()) for name, output in outputs.items())
        dtypes = {weights, *(output.dtype for output in outputs.values())}
        return checked_entry(part, error, max(PART_TOLERANCE[dtype] for dtype in dtypes))

    return {part: entry(part, contract.weights) for part, contract in contracts.items()}


@dataclass(frozen=True)
class Simulation:
    """What ModelOpt's quantizers compute in one call of the network."""

    network: nn.Module  # with the quantizers
    output: Tensor  # of the whole network
    inputs: dict[
        str, Tensor
    ]  # fp16, by quantized layer: a crop of its input in this call, away from where codes change
    attention_inputs: dict[str, tuple[Tensor, ...]]  # by quantized attention: crops of query, key and value, fp16


def run_simulation(
    simulated: Engine, network: nn.Module, inputs: Mapping[str, Tensor], assignment: Mapping[str, LayerAssignment]
) -> Simulation:
    """Call ``simulated``, which computes ``network``, and keep a crop of the input of every quantized layer."""
    crops: dict[str, Tensor] = {}

    def capture(name: str, linear: bool):
        def hook(layer: nn.Module, arguments: tuple) -> None:
            x = arguments[0]
            # from the last sample, because the first is unconditional, where cross-attention adds nothing but zeros
            crop = x.flatten(0, -2)[None, -TOKENS:] if linear else x[-1:, :, :PIXELS, :PIXELS]
            crops[name] = between_roundings(layer, crop).half().cpu()

        return hook

    hooks = [
        network.get_submodule(layer.name).register_forward_pre_hook(capture(layer.name, is_linear(layer)))
        for layer in assignment.values()
        if layer.format is not None
    ]
    of_attentions: dict[str, tuple[Tensor, ...]] = {}

    def capture_attention(name: str):
        def hook(products: nn.Module, arguments: tuple) -> None:
            of_attentions[name] = tuple(some_tokens(heads).half().cpu() for heads in arguments)

        return hook

    hooks += [
        products_of(network, layer).register_forward_pre_hook(capture_attention(layer.name))
        for layer in assignment.values()
        if layer.attention_products
    ]
    (output,) = simulated(**inputs).values()
    for hook in hooks:
        hook.remove()
    return Simulation(network, output.cpu(), crops, of_attentions)


def some_tokens(heads: Tensor) -> Tensor:
    """At most ``TOKENS`` of the last sample's tokens [1, heads, tokens, head_width], evenly spaced.

    The tokens of a joint attention are the image's and behind them the text's, so those of one end are of one kind.
    """
    return heads[-1:, :, :: -(-heads.shape[2] // TOKENS)]


def products_of(network: nn.Module, attention: LayerAssignment) -> nn.Module:
    """What computes the two products of a simulated attention."""
    return network.get_submodule(f"{attention.name}.processor.products")


def is_linear(layer: LayerAssignment) -> bool:
    return len(layer.weight_shape) == 2


def layer_outputs(
    simulation: Simulation, assignment: Mapping[str, LayerAssignment], onnx_path: Path, prefix: str, engine: str
) -> dict[str, Tensor]:
    """The output of each quantized layer of the exported network for the simulation's inputs.

    The runtime ``engine`` computes them from a file of its own kind, a plan that is built here if it loads plans.
    """
    with temporary_folder(onnx_path.parents[2]) as folder:
        path = Path(folder) / "layers.onnx"
        names = set(cut_layers(onnx_path, assignment, path, prefix).values())
        inputs = {name: tensor for name, tensor in simulation.inputs.items() if name in names}
        layers = load_engine(engine, loadable(engine, path, {name: tuple(x.shape) for name, x in inputs.items()}))
        outputs = {name: output.cpu() for name, output in layers(**inputs).items()}
        layers.close()
    return {name: outputs[f"{name}.output"] for name in simulation.inputs}


def attention_outputs(
    simulation: Simulation, assignment: Mapping[str, LayerAssignment], onnx_path: Path, engine: str
) -> dict[str, Tensor]:
    """What each quantized attention of the exported network makes of the simulation's queries, keys and values."""
    if not simulation.attention_inputs:
        return {}
    with temporary_folder(onnx_path.parents[2]) as folder:
        path = Path(folder) / "attentions.onnx"
        cut_attentions(onnx_path, [assignment[name] for name in simulation.attention_inputs], path)
        inputs: dict[str, Tensor] = {}
        for name, (query, key, value) in simulation.attention_inputs.items():
            given = {"query": query, "key": key.transpose(2, 3).contiguous(), "value": value}
            inputs |= {f"{name}.given_{what}": tensor for what, tensor in given.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        attentions = load_engine(engine, loadable(engine, path, shapes))
        outputs = {name: output.cpu() for name, output in attentions(**inputs).items()}
        attentions.close()
    return {name: outputs[f"{name}.given_output"] for name in simulation.attention_inputs}


def rounded_inputs(simulation: Simulation, dtype: torch.dtype) -> Simulation:
    """With inputs that ``dtype`` holds exactly. bf16 is coarser than the codes of INT8, and would change some."""
    return replace(simulation, inputs={name: crop.to(dtype).half() for name, crop in simulation.inputs.items()})


@torch.no_grad()
def native_outputs(unet: nn.Module, simulation: Simulation) -> dict[str, Tensor]:
    """The output of each of ``unet``'s layers of codes for the simulation's inputs, without a linear's bias."""
    outputs = {}
    for name, crop in simulation.inputs.items():
        layer = unet.get_submodule(name)
        bias = layer.bias.clone() if crop.ndim == 3 and layer.bias is not None else None
        if bias is not None:  # zero, not subtracted from the output, which would have been rounded with it
            layer.bias.zero_()
        outputs[name] = layer(crop.to(next(unet.parameters()))).cpu()
        if bias is not None:
            layer.bias.copy_(bias)
    return outputs


@dataclass(frozen=True)
class LayerDifference:
    """How an engine's output of one layer differs from the simulation's."""

    relative_error: float
    leans: dict[str, float | None]  # by fault: how much of its way the difference goes; None: it could not show
    hidden_scales: float = 0.0  # share of the weight's scales that make too little of the output to show
    cost: float = 0.0  # of an attention: how far the simulation is from what is not quantized


@full_precision()
@torch.inference_mode()
def layer_difference(module: nn.Module, layer: LayerAssignment, x: Tensor, actual: Tensor) -> LayerDifference:
    """``actual`` against what the simulation's ``module`` computes of ``x``.

    A linear's output is without its bias, which is added behind the MatMul; a convolution's has it.
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
    return LayerDifference(distance(expected, actual.to(expected)), leans, hidden_scales)


@full_precision()
@torch.inference_mode()
def attention_difference(products: nn.Module, inputs: Sequence[Tensor], actual: Tensor) -> LayerDifference:
    """``actual`` against what the simulation's ``products`` compute of query, key and value."""
    query, key, value = (heads.to(next(products.buffers(), heads.float())) for heads in inputs)
    expected = products(query, key, value)
    actual = actual.to(expected)
    exact = (query @ key.transpose(2, 3)).softmax(-1) @ value
    leans = {"products": lean(actual - expected, exact - expected, expected)}
    return LayerDifference(distance(expected, actual), leans, cost=distance(exact, expected))


def rows(output: Tensor, layer: LayerAssignment) -> Tensor:
    """An output of a linear [..., N] or of a convolution [B, N, H, W] as [rows, N]."""
    return (output if is_linear(layer) else output.movedim(1, -1)).flatten(0, -2)


def lean(difference: Tensor, step: Tensor, output: Tensor) -> float | None:
    """How much of the way of ``step``, which a fault would add to ``output``, the ``difference`` goes; None: hidden."""
    if not step.norm() >= VISIBLE * output.norm():
        return None
    return ((difference * step).sum() / step.square().sum()).item()


def scale_lean(
    module: nn.Module, layer: LayerAssignment, x: Tensor, output: Tensor, difference: Tensor, least: float = LEAST_SHARE
) -> tuple[float | None, float]:
    """The largest ``lean``, of either sign, of the weight's scales that show, and the share of those that do not.

    A scale shows that makes at ``least`` such a share of what is rounded.

    ``output`` and ``difference`` are [rows, N]. Of a scale, the step is SCALE_FAULT of what its numbers add to the
    output: a whole weight's to all of it, a channel's to a column, a block's to its share of a column.
    """
    inputs, weight = factors(module, layer, x)
    if layer.bias is not None:  # what fp16 rounds off it is the same for every row, and no scale's fault
        inputs, difference = (values - values.mean(0) for values in (inputs, difference))
    # what fp16 rounds, squared: the terms of the sums, and the sums
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
    """The quantized inputs [rows, K] and weight [N, K] whose product is the output, without its bias.

    They are rotated where codes are of rotated ones.
    """
    inputs = rotated(module.input_quantizer(x), layer.rotation)
    weight = rotated(module.weight_quantizer(module.weight).flatten(1), layer.rotation)
    if not is_linear(layer):
        windows = {name: getattr(module, name) for name in ("dilation", "padding", "stride")}
        inputs = F.unfold(inputs, module.kernel_size, **windows).movedim(1, -1)
    return inputs.flatten(0, -2), weight


def layer_parity(
    simulation: Simulation,
    full_output: Tensor,
    quantized_output: Tensor,
    assignment: Mapping[str, LayerAssignment],
    outputs: Mapping[str, Tensor],
    attentions: Mapping[str, Tensor],
    denoiser: str,
) -> dict:
    """The record's entries for the quantized layers, each compared with the simulation, and for the whole network.

    ``outputs`` and ``attentions`` are those of the engine's layers and of its attentions for the simulation's inputs;
    ``full_output`` and ``quantized_output`` those of the network, computed by torch and by the quantized engine for the
    same inputs.
    Raises SdQuantError when a layer or the network exceeds its tolerance.
    """
    differences = {
        name: layer_difference(simulation.network.get_submodule(name), assignment[name], x, outputs[name])
        for name, x in simulation.inputs.items()
    }
    of_attentions = {
        name: attention_difference(products_of(simulation.network, assignment[name]), inputs, attentions[name])
        for name, inputs in simulation.attention_inputs.items()
        if name in attentions
    }
    return {
        "quantized_layers": layers_entry(differences, assignment),
        **({"quantized_attentions": attentions_entry(of_attentions)} if of_attentions else {}),
        f"{denoiser}_quantized": network_entry(
            denoiser, distance(full_output, quantized_output.float()), distance(full_output, simulation.output)
        ),
    }


def layers_entry(differences: Mapping[str, LayerDifference], assignment: Mapping[str, LayerAssignment]) -> dict:
    """The record's entry for the quantized layers. Raises SdQuantError for one that is computed otherwise."""
    errors = {name: difference.relative_error for name, difference in differences.items()}
    tolerances = {name: FORMATS[assignment[name].format].layer_tolerance for name in errors}
    worst = nearest_to_tolerance(errors, tolerances)
    entry = checked_entry(f"layer {worst}", errors[worst], tolerances[worst])  # so all numbers that follow are finite
    faults = {fault: fault_entry(fault, differences) for fault in ("input", "weight", "scale")}
    faults["scale"]["hidden_scales"] = statistics.fmean(each.hidden_scales for each in differences.values())
    return {"count": len(errors), "worst": worst, **entry, "faults": faults}


def attentions_entry(differences: Mapping[str, LayerDifference]) -> dict:
    """The record's entry for the quantized attentions. Raises SdQuantError for one that is computed otherwise."""
    errors = {name: difference.relative_error for name, difference in differences.items()}
    tolerances = {
        name: ATTENTION_TOLERANCE + SHARE_OF_COST * difference.cost for name, difference in differences.items()
    }
    worst = nearest_to_tolerance(errors, tolerances)
    entry = checked_entry(f"attention {worst}", errors[worst], tolerances[worst])
    return {"count": len(errors), "worst": worst, **entry, "faults": {"products": fault_entry("products", differences)}}


def nearest_to_tolerance(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> str:
    """The name of the error that is the largest share of what is tolerated."""
    return max(errors, key=lambda name: errors[name] / tolerances[name])


def fault_entry(fault: str, differences: Mapping[str, LayerDifference]) -> dict:
    """The layer that leans most towards a fault, and how many layers that could have it could not show it.

    Raises SdQuantError for one that leans too far.
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
    """The record's entry for the quantized network, by its distance to full precision and its simulation's.

    Raises SdQuantError for an engine that is too far, or so near that it cannot be quantized.
    """
    entry = checked_entry(f"the quantized {denoiser}", engine_error, 1.5 * simulation_error + 2e-2)
    least = 0.5 * simulation_error
    if engine_error < least:
        raise SdQuantError(
            f"the quantized {denoiser} differs from full precision by {engine_error:.2g} of its norm, and its "
            f"simulation by {simulation_error:.2g}: the engine cannot have quantized it; do not report its figures"
        )
    return {**entry, "least": least, "simulation_relative_error": simulation_error}
