"""Report which quantized layers an engine multiplies in their quantized format, and which it dequantizes first.

Weight-only quantized layers, which make the file smaller, are multiplied in floating point and counted separately.
"""

import logging
from collections.abc import Mapping, Sequence

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

LOG = logging.getLogger(__name__)
MOST_NAMED = 5  # layers in the warning; the record names all


def types_of_layers(products: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the type in which each layer is multiplied: the entry of ``products`` for one of the layer's ``names``."""
    known = {layer: [name for name in aliases if name in products] for layer, aliases in names.items()}
    return {layer: products[found[0]] for layer, found in known.items() if found}


def executed_entry(engine: str, types: Mapping[str, str], assignment: Mapping[str, LayerAssignment]) -> dict:
    """Build the record's ``executed`` entry from layers' ``types``; warn of quantized layers run in floating point."""
    layers = [layer for layer in assignment.values() if layer.format is not None]
    meant = {layer.name: layer.activation_format for layer in layers if layer.activation_format is not None}
    weights_only = len(layers) - len(meant)
    for layer in assignment.values():
        meant |= dict.fromkeys(layer.attention_products, layer.activation_format)
    known = [name for name in meant if name in types]
    fell_back = [name for name in known if types[name] != FORMATS[meant[name]].onnx_type]
    if fell_back:
        named = ", ".join(fell_back[:MOST_NAMED]) + (", ..." if len(fell_back) > MOST_NAMED else "")
        counts = len(fell_back), len(meant)
        LOG.warning("%s computes %d of %d quantized layers in floating point: %s", engine, *counts, named)
    unknown = [name for name in meant if name not in types]
    return {
        "count": len(known) - len(fell_back),
        "of": len(meant),
        "weights_only": weights_only,
        "fell_back": fell_back,
        "unknown": unknown,
        "reason": f"{engine} does not say what became of {len(unknown)} layers" if unknown else None,
    }
