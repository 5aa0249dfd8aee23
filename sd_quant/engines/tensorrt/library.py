"""The Python modules ``tensorrt`` and ``tensorrt_rtx``: imported when asked for, with one logger each."""

import importlib
import logging
from collections import deque
from functools import cache
from types import ModuleType

import torch

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.text import one_line

log = logging.getLogger("sd_quant.engines.tensorrt")
EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}


def runtime_module(library: str) -> ModuleType:
    """The module ``tensorrt`` or ``tensorrt_rtx``. ConfigError for another name, ResourceError if not installed."""
    if library not in EXTRAS:
        raise ConfigError(f"there is no TensorRT library {library!r}; choose one of: {', '.join(EXTRAS)}")
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ResourceError(
            f"the runtime {library} is not usable here ({error}); install it: pip install 'sd-quant[{EXTRAS[library]}]'"
        ) from error


@cache
def library_logger(library: str):
    """The library's one logger: TensorRT keeps the first it is given for the whole process and ignores the others."""
    trt = runtime_module(library)

    class Logger(trt.ILogger):  # type: ignore[name-defined]  # the base is only known at run time
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=8)
            self.warned: set[str] = set()

        def log(self, severity, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(one_line(message))
            new_warning = severity == trt.ILogger.WARNING and message not in self.warned
            self.warned.add(message)  # TensorRT repeats a warning for every layer that it concerns
            log.log(logging.WARNING if new_warning else logging.DEBUG, "%s: %s", library, message)

    return Logger()


def device_target() -> str:
    if not torch.cuda.is_available():
        raise ResourceError(
            "this machine has no NVIDIA GPU that torch can use, neither to run a plan nor to build one for; "
            "use infer=openvino here, or name the targets of a tensorrt_rtx build, such as SM89"
        )
    return "SM{}{}".format(*torch.cuda.get_device_capability())
