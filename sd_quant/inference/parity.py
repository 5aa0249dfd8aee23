"""Does the engine compute what torch computes? Part by part, and layer by layer for what is quantized.

Tolerances, relative to the norm of torch's output:

- A part whose weights are stored in fp32: 1e-3, for another order of summation.
- An unquantized part in fp16: 1e-2. The engine's weights are rounded (2^-11 each), and on a GPU its activations too,
  which accumulates over the depth of the network.
- One quantized layer: the ``layer_tolerance`` of its input's format. Engine and simulation have the same codes and
  scales, but an input that fp16 rounds across the boundary between two codes moves by a whole step: for E4M3 an eighth
  of the number, for INT4 a seventh of its block's range. 1e-2 for an input that is not quantized.
- The quantized network as a whole is not compared with its simulation, because roundings that flip in the first layer
  change everything behind it. Its distance to full precision may be 1.5 times the simulation's plus 2e-2.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.engines import RUNTIMES, load_engine
from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.export.layer_cut import cut_layers
from sd_quant.files import temporary_folder
from sd_quant.models.parts import Contract
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

PART_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2}
UNQUANTIZED_INPUT_TOLERANCE = 1e-2
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

    def close(self) -> None:
        self.engine.close()


class WatchedVariant(Mapping[str, Engine]):
    """The engines of a variant by part, which remember the inputs of one call of each."""

    def __init__(self, variant: Mapping[str, Engine], calls: Mapping[str, int]):
        """``calls`` gives by part the number of the call that is remembered, 0 for parts that it lacks."""
        self.variant, self.countdown = variant, dict.fromkeys(variant, 0) | calls
        self.seen: dict[str, dict[str, Tensor]] = {}  # a copy of the inputs by part and name

    def remember(self, part: str, inputs: Mapping[str, Tensor]) -> None:
        if self.countdown[part] == 0:
            self.seen[part] = {name: tensor.clone() for name, tensor in inputs.items()}
        self.countdown[part] -= 1

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


def layer_tolerance(layer: LayerAssignment) -> float:
    """The relative error tolerated for a layer, by the format of its input, which decides how large a step is."""
    name = layer.activation_format
    return UNQUANTIZED_INPUT_TOLERANCE if name is None else FORMATS[name].layer_tolerance


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
    return {
        part: checked_entry(
            part,
            max(distance(expected[part][name].float(), actual[part][name].float()) for name in expected[part]),
            PART_TOLERANCE[contract.weights],
        )
        for part, contract in contracts.items()
    }


@dataclass(frozen=True)
class Simulation:
    """What ModelOpt's quantizers compute in one call of the network."""

    output: Tensor  # of the whole network
    inputs: dict[str, Tensor]  # fp16, by quantized layer: a crop of its input in this call
    outputs: dict[str, Tensor]  # of each layer for its crop, without a linear's bias, which is added behind the MatMul


def run_simulation(
    simulated: Engine, module: nn.Module, inputs: Mapping[str, Tensor], assignment: Mapping[str, LayerAssignment]
) -> Simulation:
    """Call ``simulated``, whose network is ``module``; every quantized layer also computes a crop of its input."""
    layers = [layer for layer in assignment.values() if layer.format is not None]
    crops: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def capture(name: str, linear: bool):
        def hook(layer: nn.Module, arguments: tuple) -> None:
            x = arguments[0]
            # from the last sample, because the first is unconditional, where cross-attention adds nothing but zeros
            crop = x.flatten(0, -2)[None, -TOKENS:] if linear else x[-1:, :, :PIXELS, :PIXELS]
            bias = layer.bias if linear and layer.bias is not None else 0
            crops[name], outputs[name] = crop.half().cpu(), (layer.forward(crop) - bias).cpu()

        return hook

    hooks = [
        module.get_submodule(layer.name).register_forward_pre_hook(capture(layer.name, len(layer.weight_shape) == 2))
        for layer in layers
    ]
    (output,) = simulated(**inputs).values()
    for hook in hooks:
        hook.remove()
    return Simulation(output.cpu(), crops, outputs)


def layer_outputs(
    simulation: Simulation, assignment: Mapping[str, LayerAssignment], onnx_path: Path, prefix: str, engine: str
) -> dict[str, Tensor]:
    """The output of each quantized layer of the exported network for the simulation's inputs.

    Computed by the runtime ``engine``, or by the one that it names for single layers.
    """
    with temporary_folder(onnx_path.parents[2]) as folder:
        path = Path(folder) / "layers.onnx"
        names = set(cut_layers(onnx_path, assignment, path, prefix).values())
        layers = load_engine(RUNTIMES[engine].layer_runtime or engine, path)
        outputs = layers(**{name: tensor for name, tensor in simulation.inputs.items() if name in names})
        layers.close()
    return {name: outputs[f"{name}.output"] for name in simulation.outputs}


def native_outputs(unet: nn.Module, simulation: Simulation) -> dict[str, Tensor]:
    """The output of each of ``unet``'s layers of codes for the simulation's inputs, without a linear's bias."""
    outputs = {}
    for name, crop in simulation.inputs.items():
        layer = unet.get_submodule(name)
        bias = layer.bias if crop.ndim == 3 and layer.bias is not None else 0
        outputs[name] = (layer(crop.to(next(unet.parameters()))) - bias).detach().cpu()
    return outputs


def layer_parity(
    simulation: Simulation,
    full_output: Tensor,
    quantized_output: Tensor,
    assignment: Mapping[str, LayerAssignment],
    outputs: Mapping[str, Tensor],
    denoiser: str,
) -> dict:
    """The record's entries for the quantized layers, each compared with the simulation, and for the whole network.

    ``outputs`` are those of the engine's layers for the simulation's inputs; ``full_output`` and ``quantized_output``
    those of the network, computed by torch and by the quantized engine for the same inputs.
    Raises SdQuantError when a layer or the network exceeds its tolerance.
    """
    errors = {name: distance(expected, outputs[name].float()) for name, expected in simulation.outputs.items()}
    tolerances = {name: layer_tolerance(assignment[name]) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / tolerances[name])
    engine_error = distance(full_output, quantized_output.float())
    simulation_error = distance(full_output, simulation.output)
    worst_entry = checked_entry(f"layer {worst}", errors[worst], tolerances[worst])
    return {
        "quantized_layers": {"count": len(errors), "worst": worst, **worst_entry},
        f"{denoiser}_quantized": {
            **checked_entry(f"the quantized {denoiser}", engine_error, 1.5 * simulation_error + 2e-2),
            "simulation_relative_error": simulation_error,
        },
    }
