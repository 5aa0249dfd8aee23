"""What a plan multiplies, by TensorRT's own engine inspector."""

import json
import re
from pathlib import Path

from sd_quant.engines.tensorrt.library import runtime_module
from sd_quant.engines.tensorrt.run import TensorRtEngine

ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
ONNX_TYPES = {"INT8": "INT8", "FP8": "FLOAT8E4M3FN", "INT4": "INT4", "FP4": "FLOAT4E2M1"}
CODES = re.compile(rf"\b({'|'.join(ONNX_TYPES)})\b", re.IGNORECASE)


def products(engine: TensorRtEngine, path: Path) -> dict[str, str]:
    """See ``sd_quant.engines.products_of``. Plans built before they kept such details name nothing."""
    trt = runtime_module(engine.name)
    inspector = engine.engine.create_engine_inspector()
    return products_in(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def products_in(information: str) -> dict[str, str]:
    """``products`` from the inspector's JSON, in which a layer says from which nodes of the ONNX file it was fused.

    The type is that of the first input, the layer's activations, which is floating point where codes are dequantized
    in front of it. A plan without details has names of layers alone.
    """
    types = {}
    for layer in json.loads(information).get("Layers", []):
        if not isinstance(layer, dict) or not layer.get("Inputs"):
            continue
        codes = CODES.search(str(layer["Inputs"][0].get("Format/Datatype", "")))
        for name in ONNX_LAYER.findall(layer.get("Metadata", "")):
            types[name] = ONNX_TYPES[codes[1].upper()] if codes else "FLOAT"
    return types
