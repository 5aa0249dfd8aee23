"""ONNX Runtime on the CPU: the reference, which executes ONNX as it is written.

It checks the exported graph and is not meant for speed: most Q/DQ pairs of this export run unfused, in floating point.
"""

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import torch

from sd_quant.devices import CPU
from sd_quant.devices import threads as default_threads
from sd_quant.engines.base import cast_inputs
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.files import temporary_folder
from sd_quant.text import one_line

PROVIDER = "CPUExecutionProvider"
ERRORS_ONLY = 3  # ONNX Runtime's log severity
# Operators that multiply integers; other operators multiply dequantized numbers.
MULTIPLY_CODES = {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv", "QLinearMatMul"}
MULTIPLY_FLOATS = {"Conv", "FusedConv", "FusedMatMul", "Gemm", "MatMul", "MatMulNBits", "NhwcFusedConv"}


class OnnxRuntimeEngine:
    """An ONNX Runtime session as an ``Engine``."""

    name, device = "onnxruntime", CPU

    def __init__(self, create: Callable[[], onnxruntime.InferenceSession]):
        self.create, self.session = create, (session := create())
        # its names of types are torch's: tensor(float16), tensor(float), tensor(int64)
        self.inputs = {port.name: getattr(torch, port.type[len("tensor(") : -1]) for port in session.get_inputs()}
        self.outputs = [port.name for port in session.get_outputs()]
        self.threads = session.get_session_options().intra_op_num_threads

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in cast_inputs(self.inputs, inputs).items()}
        try:
            outputs = self.session.run(self.outputs, arrays)  # new arrays, which own their memory
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            shapes = {name: array.shape for name, array in arrays.items()}
            raise ValueError(f"ONNX Runtime refused inputs of shapes {shapes}: {one_line(error)}") from error
        return {name: torch.from_numpy(output) for name, output in zip(self.outputs, outputs, strict=True)}

    def reopen(self) -> bool:
        del self.session
        self.session = self.create()
        return True

    def close(self) -> None:
        del self.session


def load(path: Path, *, threads: int | None = None) -> OnnxRuntimeEngine:
    """Load an ONNX file on the CPU provider only. ``threads`` defaults to torch's number of threads.

    Raises ArtifactError for a broken file, ResourceError where another provider would run it.
    """
    onnx_files(path)
    options = session_options(path, threads)
    try:
        engine = OnnxRuntimeEngine(lambda: onnxruntime.InferenceSession(path, options, providers=[PROVIDER]))
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise ArtifactError(f"ONNX Runtime cannot load {path}: {one_line(error)}") from error
    if (used := engine.session.get_providers()) != [PROVIDER]:
        raise ResourceError(f"ONNX Runtime was asked for {PROVIDER} but would run on {used}")
    return engine


def session_options(path: Path, threads: int | None = None) -> onnxruntime.SessionOptions:
    """Return the session options with which the file at ``path`` is optimized and run."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # fp32; else inputs become INT8
    options.add_session_config_entry("session.x64quantprecision", "1")  # else sums saturate on processors without VNNI
    graph = onnx.load(path, load_external_data=False).graph
    if any(tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN for tensor in graph.initializer):
        # its optimizers move quantizers in front of transposes, which it does not support in FP8
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads or default_threads()
    return options


def products(engine: OnnxRuntimeEngine, path: Path) -> dict[str, str]:
    """Implement ``sd_quant.engines.products_of``, by optimizing the file again and reading the optimized graph."""
    with temporary_folder(path.parent) as folder:
        options, optimized = session_options(path), Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(optimized)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        onnxruntime.InferenceSession(path, options, providers=[PROVIDER])
        nodes = onnx.load(optimized, load_external_data=False).graph.node
    types = dict.fromkeys(MULTIPLY_FLOATS, "FLOAT") | dict.fromkeys(MULTIPLY_CODES, "INT8")
    return {re.sub(r"_token_\d+$", "", node.name): types[node.op_type] for node in nodes if node.op_type in types}
