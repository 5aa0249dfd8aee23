"""OpenVINO on the CPU: the runtime without a GPU. It runs the same Q/DQ graphs as TensorRT, with int8 kernels.

Unquantized layers compute in fp32 (INFERENCE_PRECISION_HINT) unless the caller requests bf16. OpenVINO's default is the
processor's own 16-bit type, so that machines would differ in their images. Files in bf16 run in fp32 (``in_fp32``).

A model is compiled for the shapes of each call, because OpenVINO fuses no element-wise nodes if shapes are dynamic: a
pass of the shipped UNet then takes 1.1 to 1.5 times as long (docs/results_speed.md), of the full SDXL's 1.05 times. Two
kinds of models are still compiled for dynamic shapes, as fused kernels of OpenVINO 2026.4 round differently: FP8 models
(error of the UNet's output 0.040 instead of 0.012, as in ONNX Runtime), and models whose integers are dequantized first
(see below; with AVX2 alone, an attention of known shapes is wrong by 0.04 of the UNet's output).

Without VNNI, int8 kernels add two products in 16 bits, and the sum saturates: a layer's output is off by up to 0.16 of
its norm. Where a test product saturates, INT8 values are dequantized and multiplied in fp32, without any speed-up.
Alternative not taken: weights of seven bits (NNCF's ``overflow_fix``), for which each processor needs its own file.
"""

import logging
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import openvino
import torch
from openvino import opset13 as opset
from openvino.preprocess import PrePostProcessor

from sd_quant.devices import CPU
from sd_quant.devices import threads as default_threads
from sd_quant.engines.base import cast_inputs
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
FP8 = "f8e4m3"
CODE_TYPES = {"i8": "INT8", FP8: "FLOAT8E4M3FN", "i4": "INT4"}  # of kernels: names of onnx.TensorProto
FP32: dict[str, str | int] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # else OpenVINO quantizes inputs of linears with quantized weights
}
QUANTIZER = "FakeQuantize"  # OpenVINO's form of a QuantizeLinear
DEQUANTIZED = {"LP_TRANSFORMS_MODE": "NO"}  # integers are dequantized before they are multiplied
DTYPES = {  # not by OpenVINO's own map to numpy, which takes bf16 for fp16
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "i8": torch.int8,
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "boolean": torch.bool,
}  # fmt: skip
LARGEST_CODES = np.full(64, 127, np.int8)
KEPT = 2  # models of an engine, compiled for different shapes
Shapes = tuple[tuple[int, ...], ...]  # of the inputs in their order
ARITHMETIC = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProductAttention")


@cache
def core() -> openvino.Core:
    """Return the process's only ``openvino.Core``.

    On processors with AMX each core replaces the stack of signal handlers. If a process had two, destroyed in the order
    of creation, the next signal would use freed memory: Ctrl-C would crash the process with SIGSEGV.
    """
    return openvino.Core()


class OpenVinoEngine:
    """An OpenVINO model as an ``Engine``, compiled for the shapes of its calls."""

    name, device = "openvino", CPU

    def __init__(self, model: openvino.Model, path: Path, settings: dict[str, str | int], kept: int = KEPT):
        """Hold ``model``, read from the ONNX file ``path``, and up to ``kept`` compilations for different shapes."""
        self.model, self.path, self.settings, self.kept = model, path, settings, kept
        self.threads = settings["INFERENCE_NUM_THREADS"]
        # In a compiled model names are ambiguous: an input in front of an optimized node has that node's name too.
        self.inputs = {port.node.friendly_name: dtype_of(port, path) for port in model.inputs}
        self.outputs = [port.any_name for port in model.outputs]
        self.dtypes = [port.element_type.get_type_name() for port in model.outputs]
        self.shapes = [port.partial_shape for port in model.inputs]  # with the file's dynamic axes
        self.fixed = FP8 not in types_in(model) and not DEQUANTIZED.items() <= settings.items()
        self.compiled_models: dict[Shapes, openvino.CompiledModel] = {}  # the last used at the end
        self.exported: tuple[Shapes, bytes] | None = None  # the compiled model that ``reopen`` imports

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = list(map(shared_memory, cast_inputs(self.inputs, inputs).values()))
        compiled = self.compiled_for(tuple(tuple(array.shape) for array in arrays))
        # inputs outlive the call, so they are read in place; outputs are copied out of the engine
        try:
            outputs = compiled(arrays, share_inputs=True, share_outputs=False)
        except RuntimeError as error:
            raise ValueError(f"{self.refusal(tuple(array.shape) for array in arrays)}: {one_line(error)}") from error
        return {name: tensor_of(outputs[index], self.dtypes[index]) for index, name in enumerate(self.outputs)}

    def compiled_for(self, shapes: Shapes) -> openvino.CompiledModel:
        """Return the model compiled for these input shapes. Raises ValueError for shapes that the graph forbids."""
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
            while len(self.compiled_models) >= self.kept:
                del self.compiled_models[next(iter(self.compiled_models))]
            compiled = compiled_model(self.model, self.path, self.settings)
        self.compiled_models[shapes] = compiled
        return compiled

    def refusal(self, shapes: Iterable[tuple[int, ...]]) -> str:
        return f"OpenVINO refused inputs of shapes {dict(zip(self.inputs, shapes, strict=True))}"

    @property
    def compiled(self) -> openvino.CompiledModel:
        """The compiled model of the last call; before the first call, the model compiled for dynamic shapes."""
        if not self.compiled_models:
            self.compiled_models[()] = compiled_model(self.model, self.path, self.settings)
        return list(self.compiled_models.values())[-1]

    def reopen(self) -> bool:
        """Replace the last compiled model by an imported copy, which takes a quarter of the compilation time."""
        compiled, shapes = self.compiled, next(reversed(self.compiled_models))
        if self.exported is None or self.exported[0] != shapes:
            stream = BytesIO()
            compiled.export_model(stream)
            self.exported = shapes, stream.getvalue()
        del compiled
        self.compiled_models.clear()
        self.compiled_models[shapes] = core().import_model(BytesIO(self.exported[1]), "CPU", self.settings)
        return True

    def close(self) -> None:
        self.compiled_models.clear()
        self.exported = None
        del self.model


def shared_memory(tensor: torch.Tensor) -> np.ndarray | openvino.Tensor:
    """Wrap the tensor for OpenVINO without a copy."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return openvino.Tensor(tensor.view(torch.int16).numpy(), openvino.Shape(tensor.shape), openvino.Type.bf16)


def tensor_of(output: np.ndarray, dtype: str) -> torch.Tensor:
    """Convert an output to a tensor; OpenVINO returns bf16 as an fp16 array with the bits of bf16."""
    tensor = torch.from_numpy(output)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


def dtype_of(port: openvino.Output, path: Path) -> torch.dtype:
    """Return the torch dtype of an input. Raises ArtifactError, which names the file ``path``, for unknown types."""
    found = port.element_type.get_type_name()
    if found in DTYPES:
        return DTYPES[found]
    raise ArtifactError(
        f"{path} has an input {port.node.friendly_name} of type {found}, expected one of {', '.join(DTYPES)}; export "
        "it with inputs of another type"
    )


def compiled_model(model: openvino.Model, path: Path, settings: dict[str, str | int]) -> openvino.CompiledModel:
    """Compile ``model``. Raises ArtifactError when that fails, ResourceError for a device other than the CPU."""
    try:
        compiled = core().compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot compile {path}: {one_line(error)}") from error
    if (devices := compiled.get_property("EXECUTION_DEVICES")) != ["CPU"]:
        raise ResourceError(f"OpenVINO was asked for CPU but runs {path.name} on {devices}; set the device explicitly")
    return compiled


def load(path: Path, *, threads: int | None = None, precision: str = "fp32", kept: int = KEPT) -> OpenVinoEngine:
    """Load an ONNX file for the CPU; ``threads`` defaults to torch's, ``kept`` limits compilations in memory.

    ``precision`` of unquantized layers is fp32 or bf16. It falls back to fp32 on a processor without bf16, and for a
    file without 16-bit weights, because parts that are exported in fp32, such as a VAE, require fp32.
    Raises ArtifactError for a broken file and ResourceError when OpenVINO has no CPU device.
    """
    onnx_files(path)
    if "CPU" not in core().available_devices:
        raise ResourceError(f"OpenVINO offers {core().available_devices} but not CPU; reinstall the package openvino")
    settings = FP32 | {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads or default_threads()}
    try:
        model = core().read_model(path)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot compile {path}: {one_line(error)}") from error
    operations = model.get_ops()
    stored = {op.get_element_type().get_type_name() for op in operations if op.get_type_name() == "Constant"}
    if precision != "fp32" and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        LOG.info("this processor has no %s, so OpenVINO computes in fp32 what is not quantized", precision)
        precision = "fp32"
    if precision != "fp32" and not stored.isdisjoint(("f16", "bf16")):
        settings["INFERENCE_PRECISION_HINT"] = precision
    elif "bf16" in types_in(model):
        model = in_fp32(model)
    if any(op.get_type_name() == QUANTIZER for op in model.get_ops()) and saturates():
        LOG.info(
            "this processor has no VNNI, without which OpenVINO's sums of INT8 products saturate: computed in fp32"
        )
        settings |= DEQUANTIZED
        round_by_arithmetic(model)
    return OpenVinoEngine(model, path, settings, kept)


def types_in(model: openvino.Model) -> set[str]:
    return {port.element_type.get_type_name() for op in model.get_ops() for port in op.outputs()}


def in_fp32(model: openvino.Model) -> openvino.Model:
    """Convert ``model``, read from a file in bf16, to fp32, except for its inputs and outputs.

    OpenVINO's precision hint converts fp16 in a file, and not bf16.
    """
    bf16 = openvino.Type.bf16
    ports = [[i for i, port in enumerate(each) if port.element_type == bf16] for each in (model.inputs, model.outputs)]
    for op in model.get_ordered_ops():
        kind = op.get_type_name()
        if kind == "Parameter" and op.get_element_type() == bf16:
            op.set_element_type(openvino.Type.f32)
        elif kind == "Constant" and op.get_element_type() == bf16:
            readers = op.output(0).get_target_inputs()
            converted = opset.convert(op, "f32").output(0)
            for reader in readers:
                reader.replace_source_output(converted)
        elif kind == "Convert" and op.get_attributes()["destination_type"] == "bf16":
            op.output(0).replace(opset.convert(op.input_value(0), "f32").output(0))
    model.validate_nodes_and_infer_types()
    prepared = PrePostProcessor(model)
    for index in ports[0]:
        prepared.input(index).tensor().set_element_type(bf16)
    for index in ports[1]:
        prepared.output(index).tensor().set_element_type(bf16)
    return prepared.build()


def round_by_arithmetic(model: openvino.Model) -> None:
    """Replace each FakeQuantize by QuantizeLinear's arithmetic, ``clamp(round(x / scale) + zero_point)``, in place.

    With ``DEQUANTIZED``, OpenVINO 2026.4 moves FakeQuantize through transposes, which fails for some graphs.
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
    """Return whether this processor's int8 kernels saturate: their product of vectors of 127 is wrong."""
    x = opset.parameter([1, LARGEST_CODES.size], np.float32)
    low, high = opset.constant(np.float32(-128)), opset.constant(np.float32(127))
    codes = opset.fake_quantize(x, low, high, low, high, 256)
    weight_codes = opset.convert(opset.constant(LARGEST_CODES[None]), "f32")
    weight = opset.multiply(weight_codes, opset.constant(np.ones((1, 1), "f4")))
    product = opset.matmul(codes, weight, transpose_a=False, transpose_b=True)
    compiled = core().compile_model(openvino.Model([product], [x]), "CPU", FP32)
    (sums,) = compiled([LARGEST_CODES[None].astype(np.float32)]).values()
    return sums.item() != int((LARGEST_CODES.astype(np.int64) ** 2).sum())


def arithmetic_layers(engine: OpenVinoEngine) -> list[tuple[str, list[str]]]:
    """Return, for each multiply-accumulate layer after fusion, its kernel's precision and its ONNX nodes' names.

    The precision is the end of the kernel's name, because runtimePrecision is int8 even where values are dequantized
    first. u8 counts as i8: OpenVINO shifts a convolution's inputs for some processors.
    """
    layers = []
    for layer in engine.compiled.get_runtime_model().get_ops():
        info = layer.get_rt_info()
        if info["layerType"].astype(str) in ARITHMETIC:
            precision = info["primitiveType"].astype(str).rpartition("_")[2].lower()
            names = info["originalLayersNames"].astype(str).split(",")
            layers.append(("i8" if precision == "u8" else precision, names))
    return layers


def products(engine: OpenVinoEngine, path: Path) -> dict[str, str]:
    """Implement ``sd_quant.engines.products_of``. OpenVINO names the parts of a decomposed node "<node>/...".

    With ``DEQUANTIZED`` all products are FLOAT; their names come from the file, as the compiled graph lacks some.
    """
    if DEQUANTIZED.items() <= engine.settings.items():
        nodes = (op for op in engine.model.get_ops() if op.get_type_name() in ARITHMETIC)
        return {op.friendly_name.partition("/")[0]: "FLOAT" for op in nodes}
    layers = [(name, precision) for precision, names in arithmetic_layers(engine) for name in names]
    return {name.partition("/")[0]: CODE_TYPES.get(precision, "FLOAT") for name, precision in layers}


def int8_layers(engine: OpenVinoEngine) -> int:
    """Count the convolutions and matrix products that run with int8 kernels."""
    return sum(precision == "i8" for precision, _ in arithmetic_layers(engine))
