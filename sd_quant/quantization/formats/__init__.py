"""Number formats: how real numbers become few bits and back. Each is one module of pure functions.

To add one, write ``sd_quant/quantization/formats/<name>.py`` with what ``Format`` lists, a line in ``FORMATS`` and one
in ``recipe.LEAST_CAPABILITY``: which GPUs have it. Statistics, simulation, weights and the layer report need no more.
Inputs in blocks also need the operations that find their scales (``export.dynamic.SCALES``), and inputs of any kind a
tolerance (``stages.parity``); a test says which table lacks it.

| format | codes                 | scales                                              | published in                  |
|--------|-----------------------|-----------------------------------------------------|-------------------------------|
| int8   | -128..127             | fp16, one per amax                                  | ONNX QuantizeLinear           |
| fp8    | E4M3                  | fp16, one per amax                                  | OCP FP8 1.0                   |
| int4   | -8..7, two to a byte  | fp16, one per 64 numbers                            | ONNX QuantizeLinear           |
| mxfp4  | E2M1, two to a byte   | a power of two, one per 32 numbers                  | OCP Microscaling (MX) 1.0     |
| nvfp4  | E2M1, two to a byte   | E4M3, one per 16 numbers, and one fp32 for them all | TensorRT's documentation      |

What has a scale per amax needs a range in advance: of a weight it is known, of an activation calibration finds it. What
has a scale per block finds the range in the numbers themselves, along the last axis, while the network runs.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from sd_quant.quantization.formats import fp8, int4, int8, mxfp4, nvfp4


class Format(Protocol):
    """What a module of this package has. Everything is computed in fp32; ``x`` is real, of any floating dtype.

    ``scales(x, amax)`` are fp32 and exactly what the file stores; ``amax`` broadcasts over ``x``. It raises
    OverflowError when one cannot be stored, and SdQuantError when blocks do not divide ``x``.
    ``quantize(x, *scales)`` gives codes of the shape of ``x``: integers as int8, E4M3 as float8_e4m3fn, E2M1 as bit
    patterns in uint8. ``dequantize(codes, *scales)`` is fp32. ``pack(codes)`` are the bytes as ONNX stores them, of
    4-bit codes two to a byte and the first in the low half.
    """

    @property
    def BLOCK(self) -> int | None:
        """Numbers along the last axis that share a scale; None: ``amax`` alone decides."""

    @property
    def BITS(self) -> int:
        """Of one number, without its scales."""

    @property
    def ONNX_TYPE(self) -> str:
        """Of the codes, a name of onnx.TensorProto."""

    @property
    def ONNX_SCALE_TYPES(self) -> tuple[str, ...]:
        """Of each of the scales."""

    @property
    def OPSET(self) -> int:
        """The first that has these types in DequantizeLinear."""

    @property
    def scales(self) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]: ...

    @property
    def quantize(self) -> Callable[..., Tensor]: ...

    @property
    def dequantize(self) -> Callable[..., Tensor]: ...

    @property
    def pack(self) -> Callable[[Tensor], Tensor]: ...


FORMATS: dict[str, Format] = {"int8": int8, "fp8": fp8, "int4": int4, "mxfp4": mxfp4, "nvfp4": nvfp4}


def fake_quantize(form: Format, x: Tensor, amax: Tensor) -> Tensor:
    """fp32: ``x`` as the format keeps it."""
    scales = form.scales(x, amax)
    return form.dequantize(form.quantize(x, *scales), *scales)
