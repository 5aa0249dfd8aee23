"""Engines: one interface over the runtimes that compute the exported parts.

A runtime is one row of ``RUNTIMES`` and, if it loads files, one module beside this one. The rows import neither torch
nor a runtime, so configuration and memory model read them at no cost. A runtime that is not installed affects only jobs
that name it. docs/extending.md says how to add one.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.knobs import near
from sd_quant.quantization.formats import FORMATS, Format

if TYPE_CHECKING:
    from sd_quant.engines.base import Engine


# Why a runtime cannot execute a format in ``where`` (weights, inputs or attention); None: it can.
Refuses = Callable[[str, Format], str | None]


def refused_by_openvino(where: str, fmt: Format) -> str | None:
    if where == "inputs" and not fmt.static_scale:
        return "OpenVINO takes no QuantizeLinear whose scales are computed in blocks"
    return None


def refused_by_onnxruntime(where: str, fmt: Format) -> str | None:
    return f"ONNX Runtime has no kernel for {fmt.name}'s FP4 numbers" if fmt.onnx_type == "FLOAT4E2M1" else None


NO_INTEGER_ATTENTION = "TensorRT takes no unsigned codes, and has a kernel for attention as it is"


def refused_by_tensorrt(where: str, fmt: Format) -> str | None:
    if where == "inputs" and not fmt.static_scale and fmt.onnx_type == "FLOAT8E4M3FN":
        return "TensorRT builds no product of FP8 numbers in blocks whose scales the graph computes"
    return NO_INTEGER_ATTENTION if where == "attention" and fmt.equal_levels else None


@dataclass(frozen=True)
class Runtime:
    """Facts of a runtime. Functions are ``module:function``, imported when they are called."""

    name: str
    file: str | None  # the kind of file that it loads, onnx or plan; None: it computes the checkpoint's own modules
    device: str  # where it computes: cpu, cuda, or best, which is the GPU where there is one
    package: str  # the Python package that it requires
    extra: str  # the extra in pyproject.toml that installs the package
    load: str | None = None  # opens a file
    products: str | None = None  # the types that an opened file multiplies, see ``products_of``
    quantized: bool = True  # whether it can compute the quantized model; False: a baseline only
    unquantized: bool = True  # whether it can compute without an assignment, as infer.py does
    compiled: bool = False  # whether torch compiles its modules
    precisions: tuple[str, ...] = ()  # of layers that are not quantized, other than fp32, that ``load`` supports
    ahead_of_time: bool = False  # whether it builds plans for named GPUs on a machine without one
    build: str | None = None  # builds the file that it loads from an ONNX file; None: it loads ONNX
    refuses: Refuses = lambda where, fmt: None
    lacks_bf16: str | None = None  # why it executes no file with weights in bf16; None: it does
    bytes_per_parameter: float = 4.0  # memory at its peak, measured by benchmarks/full_size.py and rounded up


OPENVINO_BYTES = 6.5  # per parameter, without the file that OpenVINO maps, which the kernel can drop

RUNTIMES: dict[str, Runtime] = {
    row.name: row
    for row in (
        Runtime(
            "openvino", "onnx", "cpu", package="openvino", extra="openvino", load="sd_quant.engines.openvino:load",
            products="sd_quant.engines.openvino:products", refuses=refused_by_openvino, precisions=("bf16",),
            bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime(
            "onnxruntime", "onnx", "cpu", package="onnxruntime", extra="onnxruntime",
            load="sd_quant.engines.onnxruntime:load", products="sd_quant.engines.onnxruntime:products",
            refuses=refused_by_onnxruntime, lacks_bf16="ONNX Runtime's CPU has no products of bf16",
            bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime(
            "tensorrt", "plan", "cuda", package="tensorrt", extra="tensorrt",
            load="sd_quant.engines.tensorrt.run:load", products="sd_quant.engines.tensorrt.run:products",
            build="sd_quant.engines.tensorrt.build:build_for", refuses=refused_by_tensorrt,
            bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime(
            "tensorrt_rtx", "plan", "cuda", package="tensorrt_rtx", extra="rtx",
            load="sd_quant.engines.tensorrt.run:load_rtx", products="sd_quant.engines.tensorrt.run:products",
            build="sd_quant.engines.tensorrt.build:build_for", ahead_of_time=True, refuses=refused_by_tensorrt,
            bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime("torch", None, "best", package="torch", extra="torch", quantized=False),
        Runtime("torch_native", None, "best", package="torch", extra="torch", unquantized=False),
        Runtime("torch_compiled", None, "best", package="torch", extra="torch", compiled=True),
    )
}  # fmt: skip
WITHOUT_A_GPU = "openvino"  # the default where no plan runs
REFEREE = "onnxruntime"  # executes ONNX as it is written, and shares no code with the exporter
COMPILED = "torch_compiled"  # the framework's own fastest runtime
PLAN_BUILDERS = [name for name, runtime in RUNTIMES.items() if runtime.file == "plan"]


def why_not(name: str, used: Mapping[str, Collection[str]]) -> str | None:
    """The first reason why the runtime cannot execute ``used``, the result of ``recipe.formats_used``; or None."""
    reasons = (RUNTIMES[name].refuses(where, FORMATS[fmt]) for where in used for fmt in used[where])
    return next((reason for reason in reasons if reason), None)


def not_installed(name: str) -> str | None:
    """The message that the package of the runtime ``name`` is missing, or None."""
    runtime = RUNTIMES[name]
    if find_spec(runtime.package) is not None:
        return None
    return f"the package {runtime.package} is not installed; pip install 'sd-quant[{runtime.extra}]'"


def check_installed(name: str) -> None:
    """Raises ResourceError when the package of the runtime ``name`` is missing."""
    if missing := not_installed(name):
        raise ResourceError(f"{missing}, or choose another infer= or export_trt=")


def not_importable(name: str, error: ImportError) -> ResourceError:
    """The error that a module of the runtime ``name`` cannot be imported."""
    extra = RUNTIMES[name].extra
    return ResourceError(
        f"the runtime {name} cannot be imported here ({error}); install it with: pip install 'sd-quant[{extra}]'"
    )


def load_engine(name: str, path: Path, **options: object) -> Engine:
    """The engine of the file at ``path``, .onnx or, for TensorRT, .plan; ``options`` are those of its ``load``.

    Raises ConfigError for an unknown name, ResourceError for a missing runtime or device, ArtifactError for a broken
    file.
    """
    loaders = {name: runtime.load for name, runtime in RUNTIMES.items() if runtime.load}
    if name not in loaders:
        raise ConfigError(f"there is no engine {name!r}; {near(name, loaders)}")
    try:
        load = pkgutil.resolve_name(loaders[name])
    except ImportError as error:
        raise not_importable(name, error) from error
    return load(path, **options)


def loadable(name: str, onnx_path: Path, shapes: Mapping[str, Sequence[int]]) -> Path:
    """The file that the runtime ``name`` loads: the ONNX file, or one built beside it for these shapes of its inputs.

    Raises what the runtime's builder raises.
    """
    build = RUNTIMES[name].build
    return onnx_path if build is None else pkgutil.resolve_name(build)(onnx_path, name, shapes)


def products_of(engine: Engine, path: Path) -> dict[str, str]:
    """The type that each node of an engine, opened from the ONNX file ``path``, multiplies, by the node's name.

    It is a name of onnx.TensorProto, such as INT8 for codes, or FLOAT where codes are dequantized first. It is read
    from the graph that runs, after fusion. Nodes that the runtime does not name are absent.
    """
    products = RUNTIMES[engine.name].products
    return {} if products is None else pkgutil.resolve_name(products)(engine, path)
