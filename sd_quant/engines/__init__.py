"""Engines: one interface to the inference runtimes that compute the exported parts of a model.

A runtime is one entry of ``RUNTIMES`` and, if it loads files, one module in this package (docs/extending.md). Entries
import neither torch nor the runtime, so a missing runtime affects only jobs that name it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.knobs import near
from sd_quant.quantization.formats import FORMATS, Format

if TYPE_CHECKING:
    from sd_quant.engines.base import Engine

# The reason why a runtime cannot execute a format in ``where`` (weights, inputs or attention), or None.
Refuses = Callable[[str, Format], str | None]
NO_INTEGER_ATTENTION = "TensorRT takes no unsigned codes, and has a kernel for attention as it is"


def refused_by_openvino(where: str, fmt: Format) -> str | None:
    if where == "inputs" and not fmt.static_scale:
        return "OpenVINO takes no QuantizeLinear whose scales are computed in blocks"
    return None


def refused_by_onnxruntime(where: str, fmt: Format) -> str | None:
    return f"ONNX Runtime has no kernel for {fmt.name}'s FP4 numbers" if fmt.onnx_type == "FLOAT4E2M1" else None


def refused_by_tensorrt(where: str, fmt: Format) -> str | None:
    if where == "inputs" and not fmt.static_scale and fmt.onnx_type == "FLOAT8E4M3FN":
        return "TensorRT builds no product of FP8 numbers in blocks whose scales the graph computes"
    return NO_INTEGER_ATTENTION if where == "attention" and fmt.equal_levels else None


@dataclass(frozen=True)
class Runtime:
    """The properties of a runtime. Functions are given as "module:function" and imported when they are called."""

    name: str
    file: str | None  # the kind of file that it loads, onnx or plan; None: it computes torch's own modules
    device: str  # where it computes: cpu, cuda, or best, which is the GPU where there is one
    package: str  # the Python package that it requires
    extra: str  # the extra in pyproject.toml that installs the package
    load: str | None = None  # the function that opens a file
    products: str | None = None  # for ``products_of``
    quantized: bool = True  # whether it can compute the quantized model; False: a baseline only
    unquantized: bool = True  # whether it can compute without an assignment, as infer.py does
    compiled: bool = False  # whether torch compiles its modules
    precisions: tuple[str, ...] = ()  # of unquantized layers, other than fp32, that ``load`` supports
    ahead_of_time: bool = False  # whether it builds plans for named GPUs on a machine without one
    build: str | None = None  # the function that builds its file from an ONNX file; None: it loads ONNX
    refuses: Refuses = lambda where, fmt: None  # why it cannot execute a format
    lacks_bf16: str | None = None  # why it executes no file with weights in bf16; None: it does

    @property
    def bytes_per_parameter(self) -> float:
        """Peak bytes of memory per model parameter, from benchmarks/full_size.py, rounded up; without mapped files."""
        return 4.0 if self.file is None else 6.5


RUNTIMES: dict[str, Runtime] = {
    row.name: row
    for row in (
        Runtime(
            "openvino", "onnx", "cpu", package="openvino", extra="openvino", load="sd_quant.engines.openvino:load",
            products="sd_quant.engines.openvino:products", refuses=refused_by_openvino, precisions=("bf16",),
        ),
        Runtime(
            "onnxruntime", "onnx", "cpu", package="onnxruntime", extra="onnxruntime",
            load="sd_quant.engines.onnxruntime:load", products="sd_quant.engines.onnxruntime:products",
            refuses=refused_by_onnxruntime, lacks_bf16="ONNX Runtime's CPU has no products of bf16",
        ),
        Runtime(
            "tensorrt", "plan", "cuda", package="tensorrt", extra="tensorrt",
            load="sd_quant.engines.tensorrt.run:load", products="sd_quant.engines.tensorrt.run:products",
            build="sd_quant.engines.tensorrt.build:build_for", refuses=refused_by_tensorrt,
        ),
        Runtime(
            "tensorrt_rtx", "plan", "cuda", package="tensorrt_rtx", extra="rtx",
            load="sd_quant.engines.tensorrt.run:load_rtx", products="sd_quant.engines.tensorrt.run:products",
            build="sd_quant.engines.tensorrt.build:build_for", ahead_of_time=True, refuses=refused_by_tensorrt,
        ),
        Runtime("torch", None, "best", package="torch", extra="torch", quantized=False),
        Runtime("torch_native", None, "best", package="torch", extra="torch", unquantized=False),
        Runtime("torch_compiled", None, "best", package="torch", extra="torch", compiled=True),
    )
}  # fmt: skip
WITHOUT_A_GPU = "openvino"  # the default where no plan runs
COMPILED = "torch_compiled"  # the framework's own fastest runtime
PLAN_BUILDERS = [name for name, runtime in RUNTIMES.items() if runtime.file == "plan"]


def why_not(name: str, used: Mapping[str, Collection[str]]) -> str | None:
    """Return why the runtime cannot execute one of the formats ``used``, by place (weights, inputs, ...), or None."""
    reasons = (RUNTIMES[name].refuses(where, FORMATS[fmt]) for where in used for fmt in used[where])
    return next((reason for reason in reasons if reason), None)


def not_installed(name: str) -> str | None:
    """Return a message when the runtime's package is missing, otherwise None."""
    package, extra = RUNTIMES[name].package, RUNTIMES[name].extra
    found = find_spec(package) is not None
    return None if found else f"the package {package} is not installed; pip install 'sd-quant[{extra}]'"


def check_installed(name: str) -> None:
    """Raise ResourceError when the runtime's package is missing."""
    if missing := not_installed(name):
        raise ResourceError(f"{missing}, or choose another infer= or export_trt=")


def imported(name: str, what: str) -> Any:
    """Import and return ``what``, "module" or "module:function", of the runtime ``name``. Raises ResourceError."""
    try:
        return pkgutil.resolve_name(what)
    except ImportError as error:
        install = f"install it with: pip install 'sd-quant[{RUNTIMES[name].extra}]'"
        raise ResourceError(f"the runtime {name} cannot be imported here ({error}); {install}") from error


def load_engine(name: str, path: Path, **options: object) -> Engine:
    """Load an ONNX file or TensorRT plan into the runtime ``name``; ``options`` are passed to its ``load`` function.

    Raises ConfigError for an unknown name, ResourceError for a missing runtime or device, ArtifactError for a broken
    file.
    """
    loaders = {name: runtime.load for name, runtime in RUNTIMES.items() if runtime.load}
    if name not in loaders:
        raise ConfigError(f"there is no engine {name!r}; {near(name, loaders)}")
    return imported(name, loaders[name])(path, **options)


def loadable(name: str, onnx_path: Path, shapes: Mapping[str, Sequence[int]]) -> Path:
    """Return the file that the runtime ``name`` loads: the ONNX file, or a plan built for these input shapes."""
    build = RUNTIMES[name].build
    return onnx_path if build is None else imported(name, build)(onnx_path, name, shapes)


def products_of(engine: Engine, path: Path) -> dict[str, str]:
    """Return the number type in which the runtime computes each matrix product or convolution, by ONNX node name.

    Types are names of onnx.TensorProto, such as INT8, read from the runtime's graph after fusion; FLOAT where quantized
    values are dequantized first. ``path`` is the engine's ONNX file. Nodes that the runtime does not name are missing.
    """
    products = RUNTIMES[engine.name].products
    return {} if products is None else imported(engine.name, products)(engine, path)
