"""Checks of a run's engines: parity with torch, the numeric types in which they multiply, and their memory.

For its memory, each engine is opened alone: otherwise it could reuse memory that another engine has freed. The memory
of a pipeline, with all parts open or one at a time, is derived from these figures. Alternative not taken: one process
for each engine, whose libraries alone take several hundred times the memory of a small engine.
"""

from dataclasses import replace

from sd_quant.config import artifact
from sd_quant.engines import RUNTIMES, products_of
from sd_quant.engines.replayed import Replayed
from sd_quant.export.layer_cut import names_of_products
from sd_quant.inference.executed import executed_entry, types_of_layers
from sd_quant.inference.parity import (
    exported_outputs,
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
from sd_quant.stages.open_parts import module_of
from sd_quant.stages.shared import VariantOutputs
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants


def verify(variants: Variants, comparison: VariantOutputs) -> dict:
    """Measure ``parity``: how far engines differ from torch. Raises SdQuantError for an error beyond tolerance.

    Writes the simulation as a ModelOpt checkpoint if that can store the recipe. Closes engines if memory is short.
    """
    loaded, outputs = variants.loaded, comparison.outputs
    contracts = contracts_of(loaded.checkpoint)
    parity = part_parity(outputs[FRAMEWORK], outputs[FULL_PRECISION], contracts)
    for part, assignment in variants.assignments.items():
        if part not in loaded.denoisers or any(layer.format for layer in assignment.values()):
            parity |= parity_of(variants, comparison, part)
        else:  # only levers (steps, schedule) differ
            part_parity(outputs[FRAMEWORK], {**outputs[FULL_PRECISION], **outputs[QUANTIZED]}, contracts)
    variants.make_room()
    return parity


def parity_of(variants: Variants, comparison: VariantOutputs, part: str) -> dict:
    """Measure the parity of one quantized part and its layers, as ``verify`` does for all parts."""
    variants.make_room()
    loaded, assignment, simulated = variants.loaded, variants.assignments[part], variants.simulation(part)
    described, denoises = loaded.parts[part], part in loaded.denoisers
    network, simulation = network_in(described, simulated.module), None
    if variants.simulated is None or not denoises:
        simulation = run_simulation(simulated, network, comparison.inputs[part], assignment)
    if denoises and restorable(assignment):  # on the CPU, so that it can be restored without a GPU
        save_quantized(network.cpu(), variants.directory / f"quantized_{described.component}.pt")
    if simulation is None:
        return {}
    engine, stored = variants.engine, described.contract.weights
    if RUNTIMES[engine].file is not None:
        simulation, path = rounded_inputs(simulation, stored), artifact(variants.directory, "onnx", part)
        variants.make_room()  # for single layers
        outputs = exported_outputs(simulation, assignment, path, described.prefix, engine, stored)
    else:  # torch as the engine simulates attention, too
        module = module_of(variants.engines[QUANTIZED][part])
        simulation = rounded_inputs(simulation, next(module.parameters()).dtype if denoises else stored)
        outputs = native_outputs(network_in(described, module), simulation)
    full, quantized = (comparison.outputs[variant][part] for variant in (FRAMEWORK, QUANTIZED))
    found = layer_parity(simulation, full, quantized, assignment, outputs, part)
    return found if part == loaded.denoiser else {f"{part}_layers": found.pop("quantized_layers"), **found}


def executed_layers(variants: Variants) -> dict:
    """Return the record's ``executed``: numeric types in which the quantized engine multiplies. Closes no engine."""
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
