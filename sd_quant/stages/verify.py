"""Parity of the engines with torch: of every unquantized part, every quantized layer, and the quantized network."""

from dataclasses import replace

from torch import Tensor

from sd_quant.config import artifact
from sd_quant.engines import RUNTIMES, products_of
from sd_quant.engines.replayed import Replayed
from sd_quant.export.layer_cut import names_of_products
from sd_quant.inference.executed import executed_entry, types_of_layers
from sd_quant.inference.parity import (
    attention_outputs,
    layer_outputs,
    layer_parity,
    native_outputs,
    part_parity,
    rounded_inputs,
    run_simulation,
)
from sd_quant.models.checkpoint import contracts_of
from sd_quant.models.parts import network_in
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.modelopt import restorable, save_quantized
from sd_quant.simulation.native import products_of_layers
from sd_quant.stages.compare import VariantOutputs
from sd_quant.stages.open_parts import module_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants


def verify(variants: Variants, comparison: VariantOutputs) -> dict:
    """The record's ``parity``. Raises SdQuantError for an engine that differs from torch by more than is tolerated.

    Writes ModelOpt's checkpoint of the simulation, if that can hold the recipe. Closes engines where memory is short.
    """
    loaded, outputs = variants.loaded, comparison.outputs
    contracts = contracts_of(loaded.checkpoint)
    parity = part_parity(outputs[FRAMEWORK], outputs[FULL_PRECISION], contracts)
    for part, assignment in variants.assignments.items():
        if part not in loaded.denoisers or any(layer.format for layer in assignment.values()):
            parity |= parity_of(variants, comparison, part)
        else:  # the levers alone
            part_parity(outputs[FRAMEWORK], {**outputs[FULL_PRECISION], **outputs[QUANTIZED]}, contracts)
    variants.make_room()
    return parity


def parity_of(variants: Variants, comparison: VariantOutputs, part: str) -> dict:
    """The record's entries for a quantized part and its layers, as ``verify``."""
    variants.make_room()
    loaded, assignment, simulated = variants.loaded, variants.assignments[part], variants.simulation(part)
    described, denoises = loaded.parts[part], part in loaded.denoisers
    network, simulation = network_in(described, simulated.module), None
    if variants.simulated is None or not denoises:
        simulation = run_simulation(simulated, network, comparison.inputs[part], assignment)
    if denoises and restorable(assignment):  # from the CPU, so that it can be restored where there is no GPU
        save_quantized(network.cpu(), variants.directory / f"quantized_{described.component}.pt")
    if simulation is None:
        return {}
    engine, stored, attentions = variants.engine, described.contract.weights, dict[str, Tensor]()
    if RUNTIMES[engine].file is not None:
        simulation, path = rounded_inputs(simulation, stored), artifact(variants.directory, "onnx", part)
        variants.make_room()  # for the layers
        layers = layer_outputs(simulation, assignment, path, described.prefix, engine, stored)
        attentions = attention_outputs(simulation, assignment, path, engine, stored)
    else:  # whose attentions are the simulation's
        module = module_of(variants.engines[QUANTIZED][part])
        simulation = rounded_inputs(simulation, next(module.parameters()).dtype if denoises else stored)
        layers = native_outputs(network_in(described, module), simulation)
    full, quantized = (comparison.outputs[variant][part] for variant in (FRAMEWORK, QUANTIZED))
    found = layer_parity(simulation, full, quantized, assignment, layers, attentions, part)
    return found if part == loaded.denoiser else {f"{part}_layers": found.pop("quantized_layers"), **found}


def executed_layers(variants: Variants) -> dict:
    """The record's ``executed``: the types in which the quantized engine multiplies. Closes no engine."""
    loaded, types, every = variants.loaded, dict[str, str](), dict[str, LayerAssignment]()
    if variants.simulated is not None:
        unknown: dict = {"count": None, "of": None, "weights_only": None, "fell_back": [], "unknown": []}
        return unknown | {"reason": f"simulated: {variants.simulated}"}
    for part in loaded.denoisers:
        quantized, kind = variants.engines[QUANTIZED][part], RUNTIMES[variants.engine].file
        assignment, described = variants.assignments[part], loaded.parts[part]
        begin = "" if part == loaded.denoiser else f"{part}:"
        if kind is None:
            found = products_of_layers(network_in(described, module_of(quantized)), assignment)
        else:
            opened = quantized.engine if isinstance(quantized, Replayed) else quantized
            products = products_of(opened, artifact(variants.directory, kind, part))
            path = artifact(variants.directory, "onnx", part)
            found = types_of_layers(products, names_of_products(path, assignment, described.prefix))
        types |= {begin + name: each for name, each in found.items()}
        every |= {begin + name: replace(row, name=begin + row.name) for name, row in assignment.items()}
    return executed_entry(variants.engine, types, every)
