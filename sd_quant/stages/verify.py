"""Parity of the engines with torch: of every unquantized part, every quantized layer, and the quantized network."""

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
from sd_quant.models.parts import network_in
from sd_quant.simulation.modelopt import restorable, save_quantized
from sd_quant.simulation.native import products_of_layers
from sd_quant.stages.compare import VariantOutputs
from sd_quant.stages.open_parts import module_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants


def verify(variants: Variants, comparison: VariantOutputs) -> dict:
    """The record's ``parity``. Writes ModelOpt's checkpoint of the simulation, if that can hold the recipe.

    Closes all engines where memory does not hold them together. Raises SdQuantError when an engine differs from torch
    by more than is tolerated.
    """
    loaded, outputs = variants.loaded, comparison.outputs
    contracts = contracts_of(loaded.checkpoint)
    parity = part_parity(outputs[FRAMEWORK], outputs[FULL_PRECISION], contracts)
    if any(layer.format for layer in variants.assignment.values()):
        parity |= parity_of_denoiser(variants, comparison)
    else:  # the levers alone
        part_parity(outputs[FRAMEWORK], {**outputs[FULL_PRECISION], **outputs[QUANTIZED]}, contracts)
    for part in variants.assignments.keys() - {loaded.denoiser}:
        parity |= parity_of_part(variants, comparison, part)
    variants.make_room()
    return parity


def parity_of_denoiser(variants: Variants, comparison: VariantOutputs) -> dict:
    """The record's entries for the quantized denoiser and its layers, as ``verify``."""
    loaded, assignment, denoiser = variants.loaded, variants.assignment, variants.loaded.denoiser
    computes_file = RUNTIMES[variants.engine].file is not None
    simulated_part = variants.simulation(denoiser)
    network = denoiser_of(loaded.checkpoint, simulated_part.module)
    simulation = None
    if variants.simulated is None:
        simulation = run_simulation(simulated_part, network, comparison.inputs[denoiser], assignment)
    if restorable(assignment):  # from the CPU, so that it can be restored where there is no GPU
        save_quantized(network.cpu(), variants.directory / f"quantized_{loaded.component}.pt")
    if simulation is None:
        return {}
    weights = loaded.parts[denoiser].contract.weights
    if not computes_file:
        weights = next(module_of(variants.engines[QUANTIZED][denoiser]).parameters()).dtype
    simulation = rounded_inputs(simulation, weights)
    layers = outputs_of_layers(variants, simulation, denoiser)
    attentions = {}  # torch's own layers have the simulation's
    if computes_file:
        path = artifact(variants.directory, "onnx", denoiser)
        attentions = attention_outputs(simulation, assignment, path, variants.engine, weights)
    full, quantized = (comparison.outputs[variant][denoiser] for variant in (FRAMEWORK, QUANTIZED))
    return layer_parity(simulation, full, quantized, assignment, layers, attentions, denoiser)


def parity_of_part(variants: Variants, comparison: VariantOutputs, part: str) -> dict:
    """The record's entries for another quantized part and its layers. Raises SdQuantError as ``verify``."""
    variants.make_room()
    assignment, simulated = variants.assignments[part], variants.simulation(part)
    network = network_in(variants.loaded.parts[part], simulated.module)
    simulation = run_simulation(simulated, network, comparison.inputs[part], assignment)
    simulation = rounded_inputs(simulation, variants.loaded.parts[part].contract.weights)
    layers = outputs_of_layers(variants, simulation, part)
    full, quantized = comparison.outputs[FRAMEWORK][part], comparison.outputs[QUANTIZED][part]
    found = layer_parity(simulation, full, quantized, assignment, layers, {}, part)
    return {f"{part}_layers": found.pop("quantized_layers"), **found}


def executed_layers(variants: Variants) -> dict:
    """The record's ``executed``: the types in which the quantized engine multiplies. Closes no engine."""
    loaded, assignment = variants.loaded, variants.assignment
    if variants.simulated is not None:
        return not_executed(f"simulated: {variants.simulated}")
    quantized, kind = variants.engines[QUANTIZED][loaded.denoiser], RUNTIMES[variants.engine].file
    if kind is None:
        types = products_of_layers(denoiser_of(loaded.checkpoint, module_of(quantized)), assignment)
    else:
        opened = quantized.engine if isinstance(quantized, Replayed) else quantized
        products = products_of(opened, artifact(variants.directory, kind, loaded.denoiser))
        path, prefix = artifact(variants.directory, "onnx", loaded.denoiser), loaded.parts[loaded.denoiser].prefix
        types = types_of_layers(products, names_of_products(path, assignment, prefix))
    return executed_entry(variants.engine, types, assignment)


def outputs_of_layers(variants: Variants, simulation: Simulation, name: str) -> dict[str, Tensor]:
    """The output of each of the layers of a part by the quantized engine, for the simulation's inputs."""
    part, assignment = variants.loaded.parts[name], variants.assignments[name]
    if RUNTIMES[variants.engine].file is None:
        return native_outputs(network_in(part, module_of(variants.engines[QUANTIZED][name])), simulation)
    variants.make_room()  # for the layers
    path = artifact(variants.directory, "onnx", name)
    return layer_outputs(simulation, assignment, path, part.prefix, variants.engine, part.contract.weights)
