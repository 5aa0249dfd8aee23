"""Parity of the engines with torch: of every unquantized part, every quantized layer, and the quantized network."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sd_quant.config import artifact
from sd_quant.engines import RUNTIMES, products_of
from sd_quant.engines.replayed import Replayed
from sd_quant.export.layer_cut import names_of_products
from sd_quant.inference.executed import executed_entry, not_executed, types_of_layers
from sd_quant.inference.parity import (
    Simulation,
    attention_outputs,
    layer_outputs,
    layer_parity,
    native_outputs,
    part_parity,
    rounded_inputs,
    run_simulation,
)
from sd_quant.models.checkpoint import contracts_of, denoiser_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.modelopt import restorable, save_quantized
from sd_quant.simulation.native import products_of_layers
from sd_quant.stages.compare import VariantOutputs
from sd_quant.stages.load import Loaded
from sd_quant.stages.open_parts import module_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants


def verify(
    loaded: Loaded,
    assignment: Mapping[str, LayerAssignment],
    variants: Variants,
    comparison: VariantOutputs,
    engine: str,
    directory: Path,
) -> dict:
    """The record's ``parity``. Writes ModelOpt's checkpoint of the simulation, if that can hold the recipe.

    Closes all engines where memory does not hold them together.
    Raises SdQuantError when an engine differs from torch by more than is tolerated.
    """
    outputs, denoiser = comparison.outputs, loaded.denoiser
    parity = part_parity(outputs[FRAMEWORK], outputs[FULL_PRECISION], contracts_of(loaded.checkpoint))
    simulated_part = variants.simulation
    network = denoiser_of(loaded.checkpoint, simulated_part.module)
    simulation = None
    if variants.simulated is None:
        simulation = run_simulation(simulated_part, network, comparison.inputs[denoiser], assignment)
    if restorable(assignment):  # from the CPU, so that it can be restored where there is no GPU
        save_quantized(network.cpu(), directory / f"quantized_{loaded.component}.pt")
    if simulation is not None:
        if RUNTIMES[engine].file is None:
            weight = next(module_of(variants.engines[QUANTIZED][denoiser]).parameters())
            simulation = rounded_inputs(simulation, weight.dtype)
        layers = outputs_of_layers(loaded, assignment, variants, simulation, engine, directory)
        attentions = {}  # torch's own layers have the simulation's
        if RUNTIMES[engine].file is not None:
            path = artifact(directory, "onnx", denoiser)
            attentions = attention_outputs(simulation, assignment, path, engine)
        (expected,), (output,) = (outputs[variant][denoiser].values() for variant in (FRAMEWORK, QUANTIZED))
        parity |= layer_parity(simulation, expected, output.cpu(), assignment, layers, attentions, denoiser)
    variants.make_room()
    return parity


def executed_layers(
    loaded: Loaded, assignment: Mapping[str, LayerAssignment], variants: Variants, engine: str, directory: Path
) -> dict:
    """The record's ``executed``: in which numbers the quantized engine multiplies. Closes no engine."""
    if variants.simulated is not None:
        return not_executed(f"simulated: {variants.simulated}")
    quantized = variants.engines[QUANTIZED][loaded.denoiser]
    if RUNTIMES[engine].file is None:
        types = products_of_layers(denoiser_of(loaded.checkpoint, module_of(quantized)), assignment)
    else:
        opened = quantized.engine if isinstance(quantized, Replayed) else quantized
        products = products_of(opened, artifact(directory, RUNTIMES[engine].file, loaded.denoiser))
        onnx_path, prefix = artifact(directory, "onnx", loaded.denoiser), loaded.parts[loaded.denoiser].prefix
        types = types_of_layers(products, names_of_products(onnx_path, assignment, prefix))
    return executed_entry(engine, types, assignment)


def outputs_of_layers(
    loaded: Loaded,
    assignment: Mapping[str, LayerAssignment],
    variants: Variants,
    simulation: Simulation,
    engine: str,
    directory: Path,
) -> dict[str, Tensor]:
    """The output of each of the quantized engine's layers for the simulation's inputs."""
    denoiser = loaded.denoiser
    if RUNTIMES[engine].file is None:
        module = module_of(variants.engines[QUANTIZED][denoiser])
        return native_outputs(denoiser_of(loaded.checkpoint, module), simulation)
    variants.make_room()  # for the layers
    path = artifact(directory, "onnx", denoiser)
    return layer_outputs(simulation, assignment, path, loaded.parts[denoiser].prefix, engine)
