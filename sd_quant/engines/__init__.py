"""Engines: one interface over the runtimes that execute the exported graphs.

To add a backend, write ``sd_quant/engines/<name>.py`` with a function ``load(path, **options) -> Engine`` (base.py says
what an engine is) and add one line to ``ENGINES``: its name and where that function is, as ``module:function``. Nothing
is imported until an engine of that name is loaded: a runtime that is not installed is missed only by who asks for it.
"""

import pkgutil
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

from sd_quant.engines.base import Engine
from sd_quant.errors import ConfigError, ResourceError

ENGINES = {
    "onnxruntime": "sd_quant.engines.onnxruntime:load",
    "openvino": "sd_quant.engines.openvino:load",
    "tensorrt": "sd_quant.engines.tensorrt.run:load",
    "tensorrt_rtx": "sd_quant.engines.tensorrt.run:load_rtx",
}

# What a runtime cannot execute of a quantized graph: part of the graph and format, and why.
FOUR_BITS = ("int4", "mxfp4", "nvfp4")
NOT_EXECUTED = {
    "openvino": {
        ("inputs", name): "OpenVINO takes no QuantizeLinear whose scales are computed in blocks" for name in FOUR_BITS
    },
    "onnxruntime": {
        (part, name): f"ONNX Runtime has no kernel for {name}'s FP4 numbers"
        for part in ("weights", "inputs")
        for name in ("mxfp4", "nvfp4")
    },
}  # fmt: skip


def why_not(engine: str, used: Mapping[str, Collection[str]]) -> str | None:
    """Why ``engine`` cannot execute these formats (``levels.formats_used``), or None."""
    refused = NOT_EXECUTED.get(engine, {})
    return next((refused[part, name] for part in used for name in used[part] if (part, name) in refused), None)


def load_engine(name: str, path: Path, **options: object) -> Engine:
    """The file at ``path`` (.onnx, or .plan for TensorRT) ready to be called; ``options`` are those of its ``load``.

    Raises ConfigError for an unknown name, ResourceError for a runtime or device that is missing here, ArtifactError
    for a broken file.
    """
    if name not in ENGINES:
        nearest = get_close_matches(name, ENGINES, n=1) or sorted(ENGINES)
        raise ConfigError(f"there is no engine {name!r}; did you mean {', '.join(nearest)}?")
    try:
        load = pkgutil.resolve_name(ENGINES[name])
    except ImportError as error:
        extra = {"tensorrt_rtx": "rtx"}.get(name, name)  # as pyproject.toml calls it
        raise ResourceError(
            f"the engine {name} cannot be imported here ({error}); install it with: pip install 'sd-quant[{extra}]'"
        ) from error
    return load(path, **options)
