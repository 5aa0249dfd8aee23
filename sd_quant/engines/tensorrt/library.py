"""The Python modules ``tensorrt`` and ``tensorrt_rtx``, imported on first use, and one logger for each."""

import importlib
import logging
from collections import deque
from functools import cache
from types import ModuleType

from sd_quant.engines import RUNTIMES, not_importable
from sd_quant.engines.gpu import current_gpu
from sd_quant.errors import ResourceError
from sd_quant.text import one_line

LOG = logging.getLogger("sd_quant.engines.tensorrt")


def runtime_module(library: str) -> ModuleType:
    """The module of one of ``PLAN_BUILDERS``. Raises ResourceError if it is not installed."""
    try:
        return importlib.import_module(RUNTIMES[library].package)
    except ImportError as error:
        raise not_importable(library, error) from error


@cache
def library_logger(library: str):
    """The logger of the library; TensorRT keeps the first one of a process and ignores all others.

    Its ``errors`` are the last eight, the reasons why a call failed.
    """
    trt = runtime_module(library)

    class Logger(trt.ILogger):  # type: ignore[name-defined]  # the base is only known at run time
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=8)

        def log(self, severity, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(one_line(message))
            LOG.debug("%s: %s", library, message)  # its warnings are about choices that no knob makes

    return Logger()


def device_target() -> str:
    """The compute capability of this machine's GPU, such as SM89. Raises ResourceError when there is none."""
    if (found := current_gpu()) is None:
        raise ResourceError(
            "this machine has no NVIDIA GPU that torch can use, neither to run a plan nor to build one for; "
            "use infer=openvino here, or name the targets of a tensorrt_rtx build, such as SM89"
        )
    return found
