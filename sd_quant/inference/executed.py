"""In which numbers an engine multiplies: layers that it computes in floating point though their recipe has codes.

A runtime may execute a quantized graph correctly and still gain nothing, because it dequantizes first. What is stored
in few bits for its size alone, weights with inputs in high precision, is meant to be multiplied in floating point.
"""

import logging
from collections.abc import Mapping, Sequence

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

LOG = logging.getLogger(__name__)
NAMED = 5  # layers that a warning names; the record names all


def types_of_layers(products: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What each layer multiplies; ``products`` has it by the runtime's name for it, ``names`` all names of a layer."""
    known = {layer: [name for name in candidates if name in products] for layer, candidates in names.items()}
    return {layer: products[found[0]] for layer, found in known.items() if found}


def executed_entry(engine: str, types: Mapping[str, str], assignment: Mapping[str, LayerAssignment]) -> dict:
    """The record's ``executed``; ``types`` gives by layer what it multiplies, a name of onnx.TensorProto."""
    layers = [layer for layer in assignment.values() if layer.format is not None]
    meant = {layer.name: layer.activation_format for layer in layers if layer.activation_format is not None}
    weights_only = len(layers) - len(meant)
    for layer in assignment.values():
        meant |= dict.fromkeys(layer.attention_products, layer.activation_format)
    known = [name for name in meant if name in types]
    fell_back = [name for name in known if types[name] != FORMATS[meant[name]].onnx_type]
    if fell_back:
        shown = ", ".join(fell_back[:NAMED]) + (", ..." if len(fell_back) > NAMED else "")
        LOG.warning("%s computes %d of %d quantized layers in floating point: %s", engine, len(fell_back), len(meant),
                    shown)  # fmt: skip
    unknown = [name for name in meant if name not in types]
    return {
        "count": len(known) - len(fell_back),
        "of": len(meant),
        "weights_only": weights_only,
        "fell_back": fell_back,
        "unknown": unknown,
        "reason": f"{engine} does not say what became of {len(unknown)} layers" if unknown else None,
    }


def not_executed(reason: str) -> dict:
    """The record's ``executed`` where it cannot be known."""
    return {"count": None, "of": None, "weights_only": None, "fell_back": [], "unknown": [], "reason": reason}
