"""Does the engine compute what torch computes? Part by part, and layer by layer for what is quantized.

Tolerances, relative to the norm of torch's output:

- ``vae`` 1e-3: both sides fp32, different order of summation.
- ``clip1``, ``clip2``, unquantized ``unet_xl`` 1e-2: the engine's weights are stored in fp16 (2^-11 each), and on a GPU
  its activations too, accumulated over the depth of the network.
- one quantized layer 1e-2: the same INT8 weights and scales on both sides, but an input that fp16 rounds to the other
  side of a step moves one whole step.
- the quantized UNet as a whole is not compared with its simulation: flipped roundings in the first layer change
  everything behind it. Its distance to full precision may exceed the simulation's by half and 2e-2, no more.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.config import artifact
from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.export.layer_cut import cut_layers
from sd_quant.metrics.fidelity import relative_error
from sd_quant.quantization.assignment import LayerAssignment

PART_TOLERANCE = {"unet_xl": 1e-2, "vae": 1e-3, "clip1": 1e-2, "clip2": 1e-2}
LAYER_TOLERANCE = 1e-2


class Watched:
    """An engine that remembers the inputs of one of its calls."""

    def __init__(self, engine: Engine, call: int, seen: dict[str, dict[str, Tensor]], part: str):
        self.engine, self.name, self.inputs = engine, engine.name, engine.inputs
        self.countdown, self.seen, self.part = call, seen, part

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        if self.countdown == 0:
            self.seen[self.part] = {name: tensor.clone() for name, tensor in inputs.items()}
        self.countdown -= 1
        return self.engine(**inputs)

    def close(self) -> None:
        self.engine.close()


def watch(engines: Mapping[str, Engine], unet_calls: int) -> tuple[dict[str, Watched], dict[str, dict[str, Tensor]]]:
    """The engines, and what they will have seen: the UNet in the middle of the first picture, the others at once."""
    seen: dict[str, dict[str, Tensor]] = {}
    calls = {"unet_xl": unet_calls // 2}
    return {part: Watched(engine, calls.get(part, 0), seen, part) for part, engine in engines.items()}, seen


def held(what: str, error: float, tolerance: float) -> dict[str, float]:
    """The record's entry. Raises SdQuantError when the error exceeds the tolerance."""
    if not error <= tolerance:
        raise SdQuantError(
            f"the engine differs from torch in {what} by {error:.2g} of its norm, more than the tolerated "
            f"{tolerance:.2g}; do not ship it, and report the checkpoint and the versions in provenance.json"
        )
    return {"relative_error": error, "tolerance": tolerance}


def part_parity(framework: Mapping[str, Engine], engines: Mapping[str, Engine], seen: Mapping) -> dict:
    """Relative error of each unquantized part, the worst of its outputs, on inputs from a real picture."""
    entries = {}
    for part, tolerance in PART_TOLERANCE.items():
        expected, found = framework[part](**seen[part]), engines[part](**seen[part])
        error = max(relative_error(expected[name].float(), found[name].float()) for name in expected)
        entries[part] = held(part, error, tolerance)
    return entries


def layer_parity(
    simulated: Engine,
    quantized: Engine,
    inputs: Mapping[str, Tensor],
    full_output: Tensor,
    assignment: Mapping[str, LayerAssignment],
    directory: Path,
    engine: str,
) -> dict:
    """The quantized UNet against ModelOpt's simulation: every layer on the inputs it has there, then the whole."""
    module = simulated.module.unet
    layers = {layer.name: layer for layer in assignment.values() if layer.format == "int8"}
    captured, expected = {}, {}

    def capture(name: str):
        def hook(layer: torch.nn.Module, arguments: tuple, output: Tensor) -> None:
            captured[name] = arguments[0].half()
            linear = len(layers[name].weight_shape) == 2
            bias = layer.bias if linear and layer.bias is not None else 0
            expected[name] = output - bias  # the cut graph ends at the MatMul, before its bias

        return hook

    hooks = [module.get_submodule(name).register_forward_hook(capture(name)) for name in layers]
    simulated_output = simulated(**inputs)["out"]
    for hook in hooks:
        hook.remove()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.onnx"
        read = set(cut_layers(artifact(directory, "onnx", "unet_xl"), assignment, path).values())
        inputs_read = {name: tensor for name, tensor in captured.items() if name in read}
        outputs = load_engine("openvino" if engine.startswith("tensorrt") else engine, path)(**inputs_read)
    errors = {name: relative_error(expected[name], outputs[f"{name}.output"].float()) for name in layers}
    worst = max(errors, key=errors.get)
    engine_error = relative_error(full_output, quantized(**inputs)["out"].float())
    simulation_error = relative_error(full_output, simulated_output)
    return {
        "int8_layers": {"count": len(errors), "worst": worst, **held(f"layer {worst}", errors[worst], LAYER_TOLERANCE)},
        "unet_xl_quantized": {
            **held("the quantized unet_xl", engine_error, 1.5 * simulation_error + 2e-2),
            "simulation_relative_error": simulation_error,
        },
    }
