"""OpenVINO on the CPU: the runtime where there is no GPU. It runs the same Q/DQ graphs as TensorRT with int8 kernels.

What is not quantized is computed in fp32 (INFERENCE_PRECISION_HINT). By default OpenVINO takes bf16 or fp16 on
processors that have them: the same file would give other images and other speed-ups on the next machine, and a
comparison of int8 with "full precision" would silently be one with bf16.
"""

from collections import Counter
from pathlib import Path

import openvino
import torch

from sd_quant.devices import CPU
from sd_quant.devices import threads as default_threads
from sd_quant.engines.base import cast_inputs
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.text import one_line

DTYPES = {
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
    "boolean": torch.bool,
}
INFO = ("layerType", "primitiveType", "originalLayersNames")  # of a layer of the graph that runs
ONNX_TYPES = {"i8": "INT8", "f8e4m3": "FLOAT8E4M3FN", "i4": "INT4"}  # of kernels that multiply codes
ARITHMETIC = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProductAttention")


class OpenVinoEngine:
    """A compiled model as an ``Engine``."""

    name, device = "openvino", CPU

    def __init__(self, compiled: openvino.CompiledModel, inputs: list[str], outputs: list[str]):
        """``inputs`` and ``outputs`` are the names in the ONNX file, in its order, which compiling keeps.

        The names of compiled ports are ambiguous: an input in front of a node that was optimised away has that node's
        name too.
        """
        self.compiled, self.outputs = compiled, outputs
        types = (DTYPES[port.element_type.get_type_name()] for port in compiled.inputs)
        self.inputs = dict(zip(inputs, types, strict=True))
        self.threads = compiled.get_property("INFERENCE_NUM_THREADS")

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in cast_inputs(self.inputs, inputs).items()}
        try:
            # inputs outlive the call, so they are read in place; outputs are copied out of the engine
            outputs = self.compiled(list(arrays.values()), share_inputs=True, share_outputs=False)
        except RuntimeError as error:
            shapes = {name: array.shape for name, array in arrays.items()}
            raise ValueError(f"OpenVINO refused inputs of shapes {shapes}: {one_line(error)}") from error
        return {name: torch.from_numpy(outputs[index]) for index, name in enumerate(self.outputs)}

    def close(self) -> None:
        del self.compiled


def load(path: Path, *, threads: int | None = None) -> OpenVinoEngine:
    """Compile an ONNX file for this machine's CPU; dynamic dimensions stay dynamic. ``threads`` is by default torch's.

    Raises ArtifactError when the file is broken and ResourceError when OpenVINO would not run it on the CPU.
    """
    onnx_files(path)
    core = openvino.Core()
    if "CPU" not in core.available_devices:
        raise ResourceError(f"OpenVINO offers {core.available_devices} but not CPU; reinstall the package openvino")
    settings: dict[str, str | int] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads or default_threads(),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # else OpenVINO quantizes inputs of linears with quantized weights
    }
    try:
        model = core.read_model(path)
        names = [port.node.friendly_name for port in model.inputs], [port.any_name for port in model.outputs]
        compiled = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot compile {path}: {one_line(error)}") from error
    if (devices := compiled.get_property("EXECUTION_DEVICES")) != ["CPU"]:
        raise ResourceError(f"OpenVINO was asked for CPU but runs {path.name} on {devices}; set the device explicitly")
    return OpenVinoEngine(compiled, *names)


def arithmetic_layers(engine: OpenVinoEngine) -> list[tuple[str, str, list[str]]]:
    """Kind, precision and original names of each multiply-accumulate layer, of the graph that runs, after fusion.

    The precision is that of the kernel, the end of its name: runtimePrecision is that of codes that are dequantized in
    front of the products too. u8 counts as i8, as OpenVINO shifts a convolution's inputs for the processor.
    """
    layers = []
    for layer in engine.compiled.get_runtime_model().get_ops():
        info = {name: value.astype(str) for name, value in layer.get_rt_info().items() if name in INFO}
        if info["layerType"] in ARITHMETIC:
            precision = info["primitiveType"].rpartition("_")[2].lower()
            names = info["originalLayersNames"].split(",")
            layers.append((info["layerType"], "i8" if precision == "u8" else precision, names))
    return layers


def layer_precisions(engine: OpenVinoEngine) -> dict[str, dict[str, int]]:
    """The number of multiply-accumulate layers by kind and by precision, such as {"MatMul": {"i8": 70, "f32": 2}}."""
    counts: dict[str, Counter] = {}
    for kind, precision, _ in arithmetic_layers(engine):
        counts.setdefault(kind, Counter())[precision] += 1
    return {kind: dict(precisions) for kind, precisions in counts.items()}


def products(engine: OpenVinoEngine, path: Path) -> dict[str, str]:
    """See ``sd_quant.engines.products_of``. A node that was taken apart leaves its name in front of a slash."""
    types = {}
    for _, precision, names in arithmetic_layers(engine):
        for name in names:
            types[name.partition("/")[0]] = ONNX_TYPES.get(precision, "FLOAT")
    return types


def int8_layers(engine: OpenVinoEngine) -> int:
    """The number of convolutions and matrix products that run with int8 kernels; none in a quantized file: no gain."""
    return sum(precision == "i8" for _, precision, _ in arithmetic_layers(engine))
