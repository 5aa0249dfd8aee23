"""Engines: one interface over the runtimes that compute the exported parts.

A runtime is one row of facts here and, where it loads files, one module beside it. The rows import neither torch nor a
runtime, so configuration and memory model read them at no cost. To add a runtime, write
``sd_quant/engines/<name>.py`` with a function ``load(path, **options) -> Engine`` (``base`` says what an engine is),
one row in ``RUNTIMES`` and ``conf/infer/<name>.yaml``. A runtime that is not installed is missed only by jobs that
name it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.quantization.formats import FORMATS, Format

if TYPE_CHECKING:
    from sd_quant.engines.base import Engine


def executes_all(where: str, fmt: Format) -> str | None:
    """None: the runtime executes every format wherever it is used."""
    return None


def refused_by_openvino(where: str, fmt: Format) -> str | None:
    """Why OpenVINO cannot execute a format, or None."""
    if where == "inputs" and not fmt.static_scale:
        return "OpenVINO takes no QuantizeLinear whose scales are computed in blocks"
    return None


def refused_by_onnxruntime(where: str, fmt: Format) -> str | None:
    """Why ONNX Runtime cannot execute a format, or None."""
    return f"ONNX Runtime has no kernel for {fmt.name}'s FP4 numbers" if fmt.onnx_type == "FLOAT4E2M1" else None


NO_INTEGER_ATTENTION = "TensorRT takes no unsigned codes, and has a kernel for attention as it is"


def refused_by_tensorrt(where: str, fmt: Format) -> str | None:
    """Why TensorRT cannot execute a format, or None."""
    return NO_INTEGER_ATTENTION if where == "attention" and fmt.equal_levels else None


@dataclass(frozen=True)
class Runtime:
    """What the other rooms need to know of a runtime."""

    name: str
    file: str | None  # the kind of file that it loads, onnx or plan; None: it computes the checkpoint's own modules
    device: str  # where it computes: cpu, cuda, or best, which is the GPU where there is one
    package: str  # the Python package that it takes
    extra: str  # the extra in pyproject.toml that installs the package
    load: str | None = None  # ``module:function`` that opens a file
    products: str | None = None  # ``module:function`` that says what an opened file multiplies, see ``products_of``
    quantized: bool = True  # whether it can compute the quantized model; False: a baseline only
    unquantized: bool = True  # whether it can compute without an assignment, as infer.py does
    compiled: bool = False  # whether its modules go through torch.compile
    precisions: tuple[str, ...] = ()  # other than fp32 that ``load`` takes, for what is not quantized
    ahead_of_time: bool = False  # whether it builds plans for named GPUs on a machine without one
    build: str | None = None  # ``module:function`` that makes what it loads of an ONNX file; None: it loads that
    # (where, fmt) -> why it cannot execute the format in ``where``, which is weights, inputs or attention, or None
    refuses: Callable[[str, Format], str | None] = executes_all
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
            refuses=refused_by_onnxruntime, bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime(
            "tensorrt", "plan", "cuda", package="tensorrt", extra="tensorrt",
            load="sd_quant.engines.tensorrt.run:load", products="sd_quant.engines.tensorrt.inspect:products",
            build="sd_quant.engines.tensorrt.build:build_for", refuses=refused_by_tensorrt,
            bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime(
            "tensorrt_rtx", "plan", "cuda", package="tensorrt_rtx", extra="rtx",
            load="sd_quant.engines.tensorrt.run:load_rtx", products="sd_quant.engines.tensorrt.inspect:products",
            build="sd_quant.engines.tensorrt.build:build_for", ahead_of_time=True, refuses=refused_by_tensorrt,
            bytes_per_parameter=OPENVINO_BYTES,
        ),
        Runtime("torch", None, "best", package="torch", extra="torch", quantized=False),
        Runtime("torch_native", None, "best", package="torch", extra="torch", unquantized=False),
        Runtime("torch_compiled", None, "best", package="torch", extra="torch", compiled=True),
    )
}  # fmt: skip
WITHOUT_A_GPU = "openvino"  # what computes where no plan runs
COMPILED = "torch_compiled"  # the framework's own way to be fast
PLAN_BUILDERS = [name for name, runtime in RUNTIMES.items() if runtime.file == "plan"]


def why_not(name: str, used: Mapping[str, Collection[str]]) -> str | None:
    """The first reason why the runtime cannot execute the formats ``used``, as ``recipe.formats_used`` has them."""
    reasons = (RUNTIMES[name].refuses(where, FORMATS[fmt]) for where in used for fmt in used[where])
    return next((reason for reason in reasons if reason), None)


def not_installed(name: str) -> str | None:
    """That the package of the runtime ``name`` is missing, and what installs it; None where it is there."""
    runtime = RUNTIMES[name]
    if find_spec(runtime.package) is not None:
        return None
    return f"the package {runtime.package} is not installed; pip install 'sd-quant[{runtime.extra}]'"


def check_installed(name: str) -> None:
    """Raises ResourceError when the package of the runtime ``name`` is missing."""
    if missing := not_installed(name):
        raise ResourceError(f"{missing}, or choose another infer= or export_trt=")


def load_engine(name: str, path: Path, **options: object) -> Engine:
    """The engine of the file at ``path``, .onnx or, for TensorRT, .plan; ``options`` are those of its ``load``.

    Raises ConfigError for an unknown name, ResourceError for a runtime or device that is missing here, ArtifactError
    for a broken file.
    """
    loaders = {name: runtime.load for name, runtime in RUNTIMES.items() if runtime.load}
    if name not in loaders:
        nearest = get_close_matches(name, loaders, n=1) or sorted(loaders)
        raise ConfigError(f"there is no engine {name!r}; did you mean {', '.join(nearest)}?")
    try:
        load = pkgutil.resolve_name(loaders[name])
    except ImportError as error:
        extra = RUNTIMES[name].extra
        raise ResourceError(
            f"the engine {name} cannot be imported here ({error}); install it with: pip install 'sd-quant[{extra}]'"
        ) from error
    return load(path, **options)


def loadable(name: str, onnx_path: Path, shapes: Mapping[str, Sequence[int]]) -> Path:
    """What the runtime ``name`` loads of an ONNX file: the file, or one that is built beside it for these shapes.

    ``shapes`` are those of the inputs. Raises what the runtime's builder raises.
    """
    build = RUNTIMES[name].build
    return onnx_path if build is None else pkgutil.resolve_name(build)(onnx_path, name, shapes)


def products_of(engine: Engine, path: Path) -> dict[str, str]:
    """What an engine that was opened from ``path`` multiplies: by the node's name in the ONNX file, a name of
    onnx.TensorProto, such as INT8 where codes are multiplied and FLOAT where they are dequantized first.

    Read from the graph that runs, after fusion, not from the file. Nodes that the runtime does not name are absent, all
    of them where it has no ``products``.
    """
    products = RUNTIMES[engine.name].products
    return {} if products is None else pkgutil.resolve_name(products)(engine, path)
