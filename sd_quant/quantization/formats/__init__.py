"""Number formats: how real numbers are stored in few bits.

A format is one row of ``FORMATS``, which imports no torch, so that an impossible recipe is refused at once, and a
module of pure functions or an object in one. Other rooms read these facts and name no format. docs/extending.md says
how to add one.

| format       | codes                | scales                                              | published in             |
|--------------|----------------------|-----------------------------------------------------|--------------------------|
| int8         | -128..127            | fp16, one per range                                 | ONNX QuantizeLinear      |
| fp8          | E4M3                 | fp16, one per range                                 | OCP FP8 1.0              |
| int4         | -8..7, two to a byte | fp16, one per 64 numbers                            | ONNX QuantizeLinear      |
| int4_per_row | -8..7, two to a byte | fp16, one per range                                 | ONNX QuantizeLinear      |
| int4_in_int8 | -8..7, two to a byte | E4M3, one per 16 numbers, and one fp32 for each row | ComfyUI's w4a8_int8      |
| fp8_128      | E4M3                 | fp16, one per 128 numbers                           | DeepSeek-V3, section 3.3 |
| fp8_128x128  | E4M3                 | fp16, one per 128 numbers of 128 rows               | the same                 |
| mxfp8        | E4M3                 | a power of two, one per 32 numbers                  | OCP Microscaling 1.0     |
| mxfp4        | E2M1, two to a byte  | a power of two, one per 32 numbers                  | OCP Microscaling 1.0     |
| nvfp4        | E2M1, two to a byte  | E4M3, one per 16 numbers, and one fp32 for them all | TensorRT's documentation |
| q4_1..       | 4 to 8 bits          | see ``ggml``                                        | ggml's ggml-quants.c     |

A range, or amax, is the largest magnitude of a tensor or of a part of it. A format without blocks has static scales,
from the weight itself or from calibration. A format with blocks measures the range of every block of numbers along the
last axis, for an activation while the network runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Format:
    """Facts of a number format, and its arithmetic: fp32, from ``x`` of any floating-point dtype."""

    name: str
    bits: int  # of one code, without its scales
    block: int | None  # numbers along the last axis that share a scale; None: static scales
    onnx_type: str  # of the codes, a name of onnx.TensorProto; "": graphs hold the decoded weight in fp16
    onnx_scale_types: tuple[str, ...]  # of the scale per range or block, and of the global scale if there is one
    opset: int  # the first whose DequantizeLinear takes these types
    min_compute_capability: int  # GPUs that TensorRT can build a plan for, 89 for 8.9, even with weights alone
    layer_tolerance: float  # of the output of a layer with weights in it, in an engine; see ``inference.parity``
    module: str = ""  # with the functions, or an object in one; by default the one of the format's name in this folder
    attention: bool = False  # whether attention's matrix products can be computed in it
    modelopt_num_bits: int | tuple[int, int] | None = None  # for ModelOpt's quantizers; None: they call this arithmetic
    torch_compute_capability: tuple[int, int] | None = None  # GPUs on which torch multiplies codes; None: on none
    block_bytes: int | None = None  # of a block with its scales; None: what the types above take
    block_rows: int = 1  # of a weight whose blocks share a scale; inputs have one for each row
    row_scale: bool = False  # whether blocks' scales are relative to one of the whole row, which must be there
    narrow: str | None = None  # the format in place of this one for a weight that its blocks do not divide

    @property
    def static_scale(self) -> bool:
        """Whether scales are computed from ranges that are known before the network runs."""
        return self.block is None

    @property
    def equal_levels(self) -> bool:
        """Whether codes are integers times one scale."""
        return self.static_scale and self.onnx_type.startswith("INT")

    @property
    def searched(self) -> bool:
        """Whether codes and scales of weights can be searched. With 255 equal levels that gains nothing."""
        return self.block is not None or self.bits < 8 or not self.equal_levels

    @property
    def needs_amax(self) -> bool:
        """Whether an input requires a range from calibration: for a static scale, or for a global one."""
        return self.static_scale or len(self.onnx_scale_types) > 1

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """torch's dtypes for ``onnx_scale_types``."""
        import torch

        dtypes = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "FLOAT8E4M3FN": torch.float8_e4m3fn}
        return tuple(dtypes[kind] for kind in self.onnx_scale_types)

    @cached_property
    def arithmetic(self) -> Any:
        """The module, or the object, with the functions."""
        return resolve_name(self.module or f"{__name__}.{self.name}")

    @property
    def largest_code(self) -> float:
        """The code of ``amax``. Only formats with static scales have one."""
        return self.arithmetic.QMAX

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """The scales of ``x`` in fp32, exactly representable in ``onnx_scale_types``. ``amax`` broadcasts over ``x``.

        Raises OverflowError when a scale cannot be stored, SdQuantError when blocks do not divide ``x``.
        """
        return self.arithmetic.scales(x, amax)

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Candidates for a search, ``scales(x, amax)`` first. Only formats that are ``searched`` have them."""
        return self.arithmetic.tried_scales(x, amax)

    def quantize(self, x: Tensor, *scales: Tensor) -> Tensor:
        """The codes of ``x``, in its shape: integers as int8, E4M3 as float8_e4m3fn, E2M1 as bit patterns in uint8."""
        return self.arithmetic.quantize(x, *scales)

    def dequantize(self, codes: Tensor, *scales: Tensor) -> Tensor:
        """The numbers that the codes stand for, fp32."""
        return self.arithmetic.dequantize(codes, *scales)

    def onnx_scale(self, apply: Callable[..., Any], amax: Any, global_scale: float) -> Any:
        """The scale of each block, computed in the graph from the ONNX value ``amax``. Only for formats with blocks.

        ``apply(op_type, *inputs, **attributes)`` inserts a node and returns its output. An input may be a number, and
        a type a name of onnx.TensorProto.
        """
        return self.arithmetic.onnx_scale(apply, amax, global_scale)

    def pack(self, codes: Tensor) -> Tensor:
        """The codes as ONNX stores them: 4-bit codes two to a byte, the first in the low half."""
        import torch

        from sd_quant.quantization.formats.blocks import pack_nibbles

        if self.bits == 4:
            return pack_nibbles(codes)
        return codes.view(torch.uint8) if codes.is_floating_point() else codes

    def unpack(self, packed: Tensor) -> Tensor:
        """The codes of ``pack`` as one row; with one more at the end if there was an odd number of 4-bit codes."""
        import torch

        from sd_quant.quantization.formats.blocks import unpack_nibbles

        if self.bits == 8:
            return packed.view(torch.float8_e4m3fn) if self.onnx_type == "FLOAT8E4M3FN" else packed
        if self.onnx_type == "INT4":
            return (unpack_nibbles(packed) ^ 8).to(torch.int8) - 8  # two's complement
        return unpack_nibbles(packed)


INTEGERS, FLOATS, GGML = (f"{__name__}.{name}" for name in ("integers", "floats", "ggml"))
E4M3, E2M1, HALF = "FLOAT8E4M3FN", "FLOAT4E2M1", ("FLOAT16",)
FORMATS: dict[str, Format] = {row.name: row for row in (
    # name, bits, block, onnx_type, onnx_scale_types, opset, min_compute_capability, layer_tolerance, module
    Format("int8", 8, None, "INT8", HALF, 19, 75, 3e-3, f"{INTEGERS}:INT8", attention=True, modelopt_num_bits=8,
           torch_compute_capability=(8, 0)),
    Format("fp8", 8, None, E4M3, HALF, 19, 89, 1e-2, f"{FLOATS}:FP8", attention=True, modelopt_num_bits=(4, 3),
           torch_compute_capability=(8, 9)),
    Format("fp8_128", 8, 128, E4M3, HALF, 21, 89, 1e-2, f"{FLOATS}:FP8_128", torch_compute_capability=(8, 9)),
    Format("fp8_128x128", 8, 128, E4M3, HALF, 21, 89, 1e-2, f"{FLOATS}:FP8_128X128", torch_compute_capability=(8, 9),
           block_rows=128),
    Format("int4", 4, 64, "INT4", HALF, 21, 80, 2e-3, f"{INTEGERS}:INT4"),
    Format("int4_per_row", 4, None, "INT4", HALF, 21, 80, 2e-3, f"{INTEGERS}:INT4_PER_ROW"),
    # the bytes of its rows' scales, four a row, are not counted
    Format("int4_in_int8", 4, 16, "", (), 19, 75, 2e-3, block_bytes=9, row_scale=True),
    Format("mxfp8", 8, 32, E4M3, HALF, 21, 100, 1e-2, f"{FLOATS}:MXFP8"),
    Format("mxfp4", 4, 32, E2M1, HALF, 23, 100, 1e-2, f"{FLOATS}:MXFP4"),
    Format("nvfp4", 4, 16, E2M1, (E4M3, "FLOAT"), 23, 100, 1e-2),
    Format("q4_1", 4, 32, "", (), 19, 75, 2e-3, f"{GGML}:Q4_1", block_bytes=20),
    Format("q5_0", 5, 32, "", (), 19, 75, 2e-3, f"{GGML}:Q5_0", block_bytes=22),
    Format("q5_1", 5, 32, "", (), 19, 75, 2e-3, f"{GGML}:Q5_1", block_bytes=24),
    Format("q8_0", 8, 32, "", (), 19, 75, 2e-3, f"{GGML}:Q8_0", block_bytes=34),
    # replaced for narrow weights as in llama.cpp
    Format("q4_k", 4, 256, "", (), 19, 75, 2e-3, f"{GGML}:Q4_K", block_bytes=144, narrow="q5_0"),
    Format("q5_k", 5, 256, "", (), 19, 75, 2e-3, f"{GGML}:Q5_K", block_bytes=176, narrow="q5_1"),
    Format("q6_k", 6, 256, "", (), 19, 75, 2e-3, f"{GGML}:Q6_K", block_bytes=210, narrow="q8_0"),
)}  # fmt: skip


def dividing(name: str, numbers: int) -> str:
    """The format ``name``, or its stand-in where its blocks do not divide a weight's ``numbers`` for one output."""
    fmt = FORMATS[name]
    return name if fmt.narrow is None or fmt.block is None or numbers % fmt.block == 0 else fmt.narrow


def divides(name: str, numbers: int) -> bool:
    """Whether blocks of the format, or of its stand-in, divide the ``numbers`` of a weight for one output."""
    block = FORMATS[dividing(name, numbers)].block
    return block is None or numbers % block == 0


def min_compute_capability(names: Iterable[str]) -> int:
    """The smallest compute capability of a GPU that supports all the formats ``names``; 0 for none."""
    return max((FORMATS[name].min_compute_capability for name in names), default=0)


def fake_quantize(fmt: Format, x: Tensor, amax: Tensor) -> Tensor:
    """``x`` quantized and dequantized, fp32."""
    scales = fmt.scales(x, amax)
    return fmt.dequantize(fmt.quantize(x, *scales), *scales)
