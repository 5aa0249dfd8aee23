"""Other people's quantized denoisers, read back: what each layer is stored as, and what its weight and input become.

This is ``hand_over`` in the other direction. A reader is a row of facts here and one file beside it with two functions:
``recognizes(path)`` says by a glance whether a file or folder is of its kind, and ``read(path, checkpoint)`` returns a
``Candidate``. Readers treat what they read as hostile: no code of a file is executed, sizes are checked before anything
is allocated, and a file that is only partly understood is refused by names. A row imports nothing, so what a reader
knows can be said without it. To add one, write ``sd_quant/interchange/<name>.py`` and one row in ``READERS``.

The road not taken is to open each file with its own library: that executes what the file names, needs six libraries at
once, and says nothing of what stands in the file. Where the library is installed it is asked besides, see ``runtime``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Reader:
    """One kind of file or folder."""

    name: str  # of the module
    what: str  # for people
    package: str | None = None  # without which nothing can be decoded; an extra's name too

    @property
    def module(self) -> ModuleType:
        return import_module(f"{__name__}.{self.name}")

    @property
    def recognizes(self) -> Callable[[Path], bool]:
        return self.module.recognizes


ROWS: tuple[Reader, ...] = (
    Reader("gguf", "a GGUF file, as ComfyUI-GGUF and stable-diffusion.cpp write it", package="gguf"),
    Reader("comfyui", "a safetensors file for ComfyUI, with its marks or merely cast"),
    Reader("diffusers_sdnq", "a diffusers folder quantized with SDNQ"),
    Reader("diffusers_torchao", "a diffusers folder quantized with torchao"),
    Reader("diffusers_bitsandbytes", "a folder of diffusers in bitsandbytes' NF4, FP4 or LLM.int8"),
    Reader("diffusers_quanto", "a folder of diffusers or of quanto in quanto's int8, float8, int4 or int2"),
    Reader("diffusers_modelopt", "a folder of diffusers with NVIDIA ModelOpt's quantizers, compressed or exported"),
)
READERS = {row.name: row for row in ROWS}
