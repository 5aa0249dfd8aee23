"""OpenVINO on the CPU: the runtime where there is no GPU. It runs the same Q/DQ graphs as TensorRT with int8 kernels.

What is not quantized is computed in fp32 (INFERENCE_PRECISION_HINT) unless bf16 is asked for. By default OpenVINO takes
bf16 or fp16 on processors that have them: the same file would give other images and other speed-ups on the next
machine, and a comparison of int8 with "full precision" would silently be one with bf16.

A model is compiled for the very shapes that it is called with. One for dynamic shapes, the road not taken, is computed
node by node: OpenVINO joins element-wise nodes into kernels only where it knows their shapes. A pass of the shipped
checkpoint's UNet then takes 1.1 to 1.5 times as long (benchmarks/shapes.py), of the full SDXL's 1.05 times. It is taken
for FP8, because OpenVINO 2026.4 joins nodes around FP8 numbers into kernels that round otherwise: the UNet's output is
then 0.040 away from torch's, and 0.012 with dynamic shapes as in ONNX Runtime.
It is taken too where codes are dequantized (below): behind an attention whose shapes it knows OpenVINO rounds in the
attention's own kernel, and on processors with AVX2 alone wrongly, by 0.04 of the shipped UNet's output.

A processor without VNNI adds two products of 8-bit codes in 16 bits, and OpenVINO's int8 kernels let the sum saturate:
a layer's output is then up to 0.16 of its norm away. Where a product shows that, codes are dequantized and multiplied
in fp32: the images are right and nothing is gained in speed, which ``executed`` of the record says. Weights of seven
bits, NNCF's ``overflow_fix``, are the road not taken: the file would be another for each processor.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import openvino
import torch
from openvino import opset13 as opset

from sd_quant.devices import CPU
from sd_quant.devices import threads as default_threads
from sd_quant.engines.base import cast_inputs
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
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
FP8 = "f8e4m3"
ONNX_TYPES = {"i8": "INT8", FP8: "FLOAT8E4M3FN", "i4": "INT4"}  # of kernels that multiply codes
FP32: dict[str, str | int] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # else OpenVINO quantizes inputs of linears with quantized weights
}
BF16 = "BF16"  # among what a processor can do
QUANTIZER = "FakeQuantize"  # what OpenVINO reads a QuantizeLinear as
DEQUANTIZED = {"LP_TRANSFORMS_MODE": "NO"}  # codes are not multiplied, but what they stand for
LARGEST = np.full(64, 127, np.int8)  # codes of a layer's input, and of its weight
KEPT = 2  # models of an engine, compiled for different shapes
Shapes = tuple[tuple[int, ...], ...]  # of the inputs in their order
ARITHMETIC = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProductAttention")


class OpenVinoEngine:
    """A model as an ``Engine``."""

    name, device = "openvino", CPU

    def __init__(self, model: openvino.Model, path: Path, settings: dict[str, str | int]):
        """``model`` is that of the ONNX file at ``path``."""
        self.model, self.path, self.settings = model, path, settings
        self.threads = settings["INFERENCE_NUM_THREADS"]
        # The names of ports are ambiguous once a model is compiled: an input in front of a node that was optimised away
        # has that node's name too. Their order is that of the file.
        self.inputs = {port.node.friendly_name: DTYPES[port.element_type.get_type_name()] for port in model.inputs}
        self.outputs = [port.any_name for port in model.outputs]
        self.shapes = [port.partial_shape for port in model.inputs]  # with the file's dynamic axes
        types = {port.element_type.get_type_name() for op in model.get_ops() for port in op.outputs()}
        self.fixed = FP8 not in types and not DEQUANTIZED.items() <= settings.items()
        self.compiled_models: dict[Shapes, openvino.CompiledModel] = {}  # the last used behind the others
        self.exported: tuple[Shapes, bytes] | None = None  # what was compiled for these, once it was opened again

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = [tensor.numpy() for tensor in cast_inputs(self.inputs, inputs).values()]
        compiled = self.compiled_for(tuple(array.shape for array in arrays))  # which refuses other shapes
        # inputs outlive the call, so they are read in place; outputs are copied out of the engine
        try:
            outputs = compiled(arrays, share_inputs=True, share_outputs=False)
        except RuntimeError as error:
            raise ValueError(f"{self.refusal(array.shape for array in arrays)}: {one_line(error)}") from error
        return {name: torch.from_numpy(outputs[index]) for index, name in enumerate(self.outputs)}

    def compiled_for(self, shapes: Shapes) -> openvino.CompiledModel:
        """The model compiled for inputs of these shapes.

        Raises ValueError for shapes that the graph does not take, and what ``compiled_model`` raises.
        """
        if not all(map(openvino.PartialShape.compatible, self.shapes, map(openvino.PartialShape, shapes))):
            takes = f"{self.path.name} takes {dict(zip(self.inputs, self.shapes, strict=True))}"
            raise ValueError(f"{self.refusal(shapes)}: {takes}")
        if not self.fixed:
            return self.compiled
        compiled = self.compiled_models.pop(shapes, None)
        if compiled is None:
            try:
                self.model.reshape(dict(enumerate(map(openvino.PartialShape, shapes))))
            except RuntimeError as error:
                raise ValueError(f"{self.refusal(shapes)}: {one_line(error)}") from error
            while len(self.compiled_models) >= KEPT:
                del self.compiled_models[next(iter(self.compiled_models))]
            compiled = compiled_model(self.model, self.path, self.settings)
        self.compiled_models[shapes] = compiled
        return compiled

    def refusal(self, shapes: Iterable[tuple[int, ...]]) -> str:
        return f"OpenVINO refused inputs of shapes {dict(zip(self.inputs, shapes, strict=True))}"

    @property
    def compiled(self) -> openvino.CompiledModel:
        """The model as it was last called; before any call, for dynamic shapes."""
        if not self.compiled_models:
            self.compiled_models[()] = compiled_model(self.model, self.path, self.settings)
        return list(self.compiled_models.values())[-1]

    def reopen(self) -> bool:
        """From the exported form of what was last called, in a quarter of the time that compiling takes."""
        compiled, shapes = self.compiled, next(reversed(self.compiled_models))
        if self.exported is None or self.exported[0] != shapes:
            stream = BytesIO()
            compiled.export_model(stream)
            self.exported = shapes, stream.getvalue()
        del compiled
        self.compiled_models.clear()
        self.compiled_models[shapes] = openvino.Core().import_model(BytesIO(self.exported[1]), "CPU", self.settings)
        return True

    def close(self) -> None:
        self.compiled_models.clear()
        self.exported = None
        del self.model


def compiled_model(model: openvino.Model, path: Path, settings: dict[str, str | int]) -> openvino.CompiledModel:
    """Raises ArtifactError when OpenVINO cannot compile it, and ResourceError when it would not run on the CPU."""
    try:
        compiled = openvino.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot compile {path}: {one_line(error)}") from error
    if (devices := compiled.get_property("EXECUTION_DEVICES")) != ["CPU"]:
        raise ResourceError(f"OpenVINO was asked for CPU but runs {path.name} on {devices}; set the device explicitly")
    return compiled


def load(path: Path, *, threads: int | None = None, precision: str = "fp32") -> OpenVinoEngine:
    """Read an ONNX file for this machine's CPU. ``threads`` is by default torch's.

    ``precision`` is that of what is not quantized, fp32 or bf16. It is fp32 where the processor has no bf16, and for a
    file without weights in fp16: a part that is exported in fp32, as a VAE is, needs it.
    Raises ArtifactError when the file is broken and ResourceError when OpenVINO has no CPU.
    """
    onnx_files(path)
    core = openvino.Core()
    if "CPU" not in core.available_devices:
        raise ResourceError(f"OpenVINO offers {core.available_devices} but not CPU; reinstall the package openvino")
    settings = FP32 | {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads or default_threads()}
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot compile {path}: {one_line(error)}") from error
    if precision != "fp32" and BF16 not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        LOG.info("this processor has no %s, so OpenVINO computes in fp32 what is not quantized", precision)
    elif precision != "fp32" and "f16" in {op.get_element_type().get_type_name() for op in constants(model)}:
        settings["INFERENCE_PRECISION_HINT"] = precision
    if any(op.get_type_name() == QUANTIZER for op in model.get_ops()) and saturates():
        LOG.info(
            "this processor has no VNNI, without which OpenVINO's sums of INT8 products saturate: computed in fp32"
        )
        settings |= DEQUANTIZED
        round_by_arithmetic(model)
    return OpenVinoEngine(model, path, settings)


def constants(model: openvino.Model) -> list[openvino.Node]:
    return [op for op in model.get_ops() if op.get_type_name() == "Constant"]


def round_by_arithmetic(model: openvino.Model) -> None:
    """Replace each quantizer by ONNX's formula, ``clamp(round(x / scale) + zero_point)``, in place.

    Where codes are not multiplied, OpenVINO 2026.4 moves quantizers through transposes, and fails at some.
    """
    for op in (op for op in model.get_ops() if op.get_type_name() == QUANTIZER):
        low, high, lowest_code, largest_code = (op.input_value(port).get_node().get_data() for port in range(1, 5))
        scale = (high - low) / (largest_code - lowest_code)
        zero_point = np.round(lowest_code - low / scale)
        rounded = opset.round(opset.divide(op.input_value(0), opset.constant(scale)), "half_to_even")
        codes = opset.add(rounded, opset.constant(zero_point))
        op.output(0).replace(opset.clamp(codes, lowest_code.item(), largest_code.item()).output(0))


@cache
def saturates() -> bool:
    """Whether int8 kernels go wrong here: a product of the largest codes, whose sum of two takes more than 16 bits."""
    x = opset.parameter([1, LARGEST.size], np.float32)
    low, high = opset.constant(np.float32(-128)), opset.constant(np.float32(127))
    codes = opset.fake_quantize(x, low, high, low, high, 256)
    weight = opset.multiply(opset.convert(opset.constant(LARGEST[None]), "f32"), opset.constant(np.ones((1, 1), "f4")))
    product = opset.matmul(codes, weight, transpose_a=False, transpose_b=True)
    compiled = openvino.compile_model(openvino.Model([product], [x]), "CPU", FP32)
    (sums,) = compiled([LARGEST[None].astype(np.float32)]).values()
    return sums.item() != int((LARGEST.astype(np.int64) ** 2).sum())


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
    """See ``sd_quant.engines.products_of``. A node that was taken apart leaves its name in front of a slash.

    Where codes are dequantized, every product is a float's, and some nodes lose their names on their way.
    """
    if DEQUANTIZED.items() <= engine.settings.items():
        nodes = (op for op in engine.model.get_ops() if op.get_type_name() in ARITHMETIC)
        return {op.friendly_name.partition("/")[0]: "FLOAT" for op in nodes}
    types = {}
    for _, precision, names in arithmetic_layers(engine):
        for name in names:
            types[name.partition("/")[0]] = ONNX_TYPES.get(precision, "FLOAT")
    return types


def int8_layers(engine: OpenVinoEngine) -> int:
    """The number of convolutions and matrix products that run with int8 kernels; none in a quantized file: no gain."""
    return sum(precision == "i8" for _, precision, _ in arithmetic_layers(engine))
