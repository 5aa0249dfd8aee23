"""Does the engine compute what torch computes? Part by part, and layer by layer for what is quantized.

Tolerances, relative to the norm of torch's output:

- a part whose weights are stored in fp32, 1e-3: different order of summation.
- a part in fp16, unquantized, 1e-2: the engine's weights are rounded (2^-11 each), and on a GPU its activations too,
  accumulated over the depth of the network.
- one quantized layer, by the format of its input: the same codes and scales on both sides, but an input that fp16
  rounds to the other side of a step moves one whole step. 1e-2 for INT8 and for inputs that are not quantized; a step
  of E4M3 is an eighth of the number, of INT4 a seventh of the block's range.
- the quantized network as a whole is not compared with its simulation: flipped roundings in the first layer change
  everything behind it. Its distance to full precision may exceed the simulation's by half and 2e-2, no more.
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
TOKENS, PIXELS = 256, 16  # of a layer's input that are compared: rows of a linear, height and width for a convolution

Outputs = Mapping[str, Mapping[str, Tensor]]  # part to name to tensor


class Watched:
    """An engine whose inputs somebody is told of."""

    def __init__(self, engine: Engine, told: Callable[[Mapping[str, Tensor]], None]):
        self.engine, self.told = engine, told
        self.name, self.inputs, self.device = engine.name, engine.inputs, engine.device

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        self.told(inputs)
        return self.engine(**inputs)

    def close(self) -> None:
        self.engine.close()


class WatchedVariant(Mapping[str, Engine]):
    """A side that remembers the inputs of one call of each part: the first, or the n-th where ``calls`` says so."""

    def __init__(self, side: Mapping[str, Engine], calls: Mapping[str, int]):
        self.side, self.countdown = side, dict.fromkeys(side, 0) | calls
        self.seen: dict[str, dict[str, Tensor]] = {}

    def remember(self, part: str, inputs: Mapping[str, Tensor]) -> None:
        if self.countdown[part] == 0:
            self.seen[part] = {name: tensor.clone() for name, tensor in inputs.items()}
        self.countdown[part] -= 1

    def __getitem__(self, part: str) -> Engine:
        return Watched(self.side[part], partial(self.remember, part))

    def __iter__(self) -> Iterator[str]:
        return iter(self.side)

    def __len__(self) -> int:
        return len(self.side)


def distance(expected: Tensor, found: Tensor) -> float:
    """Relative error, infinite where there is none: an output of zeros, or one that is not finite."""
    error = relative_error(expected, found)
    return math.inf if error is None else error


def layer_tolerance(layer: LayerAssignment) -> float:
    """Relative error tolerated for one layer; by the format of its input, which decides how far one step is."""
    name = layer.activation_format
    return UNQUANTIZED_INPUT_TOLERANCE if name is None else FORMATS[name].layer_tolerance


def held(what: str, error: float, tolerance: float) -> dict[str, float]:
    """The record's entry. Raises SdQuantError when the error exceeds the tolerance."""
    if not error <= tolerance:
        raise SdQuantError(
            f"the engine differs from torch in {what} by {error:.2g} of its norm, more than the tolerated "
            f"{tolerance:.2g}; do not ship it, and report the checkpoint and the versions in provenance.json"
        )
    return {"relative_error": error, "tolerance": tolerance}


def part_parity(expected: Outputs, found: Outputs, contracts: Mapping[str, Contract]) -> dict:
    """Relative error of each unquantized part, the worst of its outputs."""
    return {
        part: held(
            part,
            max(distance(expected[part][name].float(), found[part][name].float()) for name in expected[part]),
            PART_TOLERANCE[contract.weights],
        )
        for part, contract in contracts.items()
    }


@dataclass(frozen=True)
class Simulation:
    """What ModelOpt's quantizers compute: the network's output, and of each quantized layer a piece of its input, fp16,
    and the output for that piece alone (without a linear's bias, which comes behind the MatMul)."""

    output: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def run_simulation(
    simulated: Engine, module: nn.Module, inputs: Mapping[str, Tensor], assignment: Mapping[str, LayerAssignment]
) -> Simulation:
    """One call of the simulated network, ``module`` in it, watched: every layer on a piece of its inputs there."""
    layers = [layer for layer in assignment.values() if layer.format is not None]
    pieces: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}

    def capture(name: str, linear: bool):
        def hook(layer: nn.Module, arguments: tuple) -> None:
            x = arguments[0]
            # of the last sample: the first is unconditional, where cross-attention adds nothing but zeros
            piece = x.flatten(0, -2)[None, -TOKENS:] if linear else x[-1:, :, :PIXELS, :PIXELS]
            bias = layer.bias if linear and layer.bias is not None else 0
            pieces[name], expected[name] = piece.half().cpu(), (layer.forward(piece) - bias).cpu()

        return hook

    hooks = [
        module.get_submodule(layer.name).register_forward_pre_hook(capture(layer.name, len(layer.weight_shape) == 2))
        for layer in layers
    ]
    (output,) = simulated(**inputs).values()
    for hook in hooks:
        hook.remove()
    return Simulation(output.cpu(), pieces, expected)


def layer_outputs(
    simulation: Simulation, assignment: Mapping[str, LayerAssignment], onnx_path: Path, prefix: str, engine: str
) -> dict[str, Tensor]:
    """Of each layer of the exported network, by a runtime for the CPU where the engine takes no part of a network."""
    with temporary_folder(onnx_path.parents[2]) as folder:
        path = Path(folder) / "layers.onnx"
        read = set(cut_layers(onnx_path, assignment, path, prefix).values())
        layers = load_engine(RUNTIMES[engine].layer_runtime or engine, path)
        outputs = layers(**{name: tensor for name, tensor in simulation.inputs.items() if name in read})
        layers.close()
    return {name: outputs[f"{name}.output"] for name in simulation.outputs}


def native_outputs(unet: nn.Module, simulation: Simulation) -> dict[str, Tensor]:
    """Of each layer that torch computes itself, without a linear's bias."""
    found = {}
    for name, piece in simulation.inputs.items():
        layer = unet.get_submodule(name)
        bias = layer.bias if piece.ndim == 3 and layer.bias is not None else 0
        found[name] = (layer(piece.to(next(unet.parameters()))) - bias).detach().cpu()
    return found


def layer_parity(
    simulation: Simulation,
    full_output: Tensor,
    quantized_output: Tensor,
    assignment: Mapping[str, LayerAssignment],
    outputs: Mapping[str, Tensor],
    denoiser: str,
) -> dict:
    """The quantized network against the simulation: every layer on its own, then the whole.

    ``outputs`` are those of the engine's layers for the simulation's inputs.
    """
    errors = {name: distance(expected, outputs[name].float()) for name, expected in simulation.outputs.items()}
    tolerances = {name: layer_tolerance(assignment[name]) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / tolerances[name])
    engine_error = distance(full_output, quantized_output.float())
    simulation_error = distance(full_output, simulation.output)
    worst_held = held(f"layer {worst}", errors[worst], tolerances[worst])
    return {
        "quantized_layers": {"count": len(errors), "worst": worst, **worst_held},
        f"{denoiser}_quantized": {
            **held(f"the quantized {denoiser}", engine_error, 1.5 * simulation_error + 2e-2),
            "simulation_relative_error": simulation_error,
        },
    }
