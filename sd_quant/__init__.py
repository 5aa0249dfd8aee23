"""Post-training quantization of diffusion models, from a checkpoint to engines, with honest numbers.

Begin with ``sd_quant.open``; see ``sd_quant.interface``. Nothing heavy is imported before it is used.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_quant.interface import Comparison, Model, Quantized, Result, Statistics, compare, open

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # OpenVINO sends usage data without asking
__version__ = "0.1.0"
__all__ = ["Comparison", "Model", "Quantized", "Result", "Statistics", "__version__", "compare", "open"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sd_quant import interface

        return getattr(interface, name)
    raise AttributeError(f"module sd_quant has no attribute {name}")


def __dir__() -> list[str]:
    return __all__
