"""Number formats: how real numbers are stored in few bits, as integer or floating-point codes and scales.

A format is an entry of the table ``FORMATS``, which needs no torch, so that an invalid recipe is rejected at once, plus
its arithmetic: a module of pure functions, or an object with these methods. Code elsewhere reads the table's fields and
does not test for format names. docs/extending.md explains how to add a format.

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
from the weight itself or from calibration, one per tensor or output channel ("one per range" above). A format with
blocks measures the range of every block of numbers along the last axis, for an activation while the network runs.
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
    """A number format: its properties, and its arithmetic in fp32 for ``x`` of any floating-point dtype."""

    name: str
    bits: int  # of one code, without its scales
    block: int | None  # numbers along the last axis that share a scale; None: static scales
    onnx_type: str  # of the codes, a name of onnx.TensorProto; "": graphs hold the decoded weight in fp16
    onnx_scale_types: tuple[str, ...]  # of the scale per range or block, and of the global scale if there is one
    opset: int  # the first whose DequantizeLinear takes these types
    min_compute_capability: int  # of GPUs for which TensorRT can build a plan, even for weights only; 89 for 8.9
    layer_tolerance: float  # for the output error of an engine's layer in this format, see ``inference.parity``
    module: str = ""  # "module" or "module:object" with the functions; by default the module here of the format's name
    attention: bool = False  # whether attention's matrix products can be computed in it
    modelopt_num_bits: int | tuple[int, int] | None = None  # for ModelOpt's quantizers; None: they call this arithmetic
    torch_compute_capability: tuple[int, int] | None = None  # GPUs on which torch multiplies codes; None: on none
    block_bytes: int | None = None  # bytes of a block with its scales; None: as computed from the types above
    block_rows: int = 1  # consecutive rows of a weight whose blocks share a scale; inputs have a scale for each row
    row_scale: bool = False  # whether blocks' scales are relative to a scale of the whole row
    narrow: str | None = None  # the format in place of this one for a weight that its blocks do not divide

    @property
    def static_scale(self) -> bool:
        """Whether scales are computed before the network runs, from weights or calibration; false with blocks."""
        return self.block is None

    @property
    def equal_levels(self) -> bool:
        """Whether values are integers times a static scale, so that neighbouring levels are equally far apart."""
        return self.static_scale and self.onnx_type.startswith("INT")

    @property
    def searched(self) -> bool:
        """Whether codes and scales of weights can be searched (GPTQ, best scales); not in int8, which gains nothing."""
        return self.block is not None or self.bits < 8 or not self.equal_levels

    @property
    def needs_amax(self) -> bool:
        """Whether an input requires a range from calibration: for a static scale, or for a global scale."""
        return self.static_scale or len(self.onnx_scale_types) > 1

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """The torch dtypes of ``onnx_scale_types``."""
        import torch

        dtypes = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "FLOAT8E4M3FN": torch.float8_e4m3fn}
        return tuple(dtypes[kind] for kind in self.onnx_scale_types)

    @cached_property
    def arithmetic(self) -> Any:
        """The module or object with this format's functions, imported on first use."""
        return resolve_name(self.module or f"{__name__}.{self.name}")

    @property
    def largest_code(self) -> float:
        """The code to which ``amax`` is quantized, such as 127. Only formats with static scales have it."""
        return self.arithmetic.QMAX

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        """Compute the scales of ``x``, fp32 with values of ``onnx_scale_types``. ``amax`` broadcasts over ``x``.

        Raises OverflowError when a scale cannot be stored, SdQuantError when blocks do not divide ``x``.
        """
        return self.arithmetic.scales(x, amax)

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Return candidate scales for a search, ``scales(x, amax)`` first. Only for formats that are ``searched``."""
        return self.arithmetic.tried_scales(x, amax)

    def quantize(self, x: Tensor, *scales: Tensor) -> Tensor:
        """Quantize ``x`` to codes of its shape: integers in int8, E4M3 in float8_e4m3fn, E2M1 bit patterns in uint8."""
        return self.arithmetic.quantize(x, *scales)

    def dequantize(self, codes: Tensor, *scales: Tensor) -> Tensor:
        """Return the numbers that the codes represent, fp32."""
        return self.arithmetic.dequantize(codes, *scales)

    def onnx_scale(self, apply: Callable[..., Any], amax: Any, global_scale: float) -> Any:
        """Add ONNX nodes that compute the scale of each block from the value ``amax``. Only for formats with blocks.

        ``apply(op_type, *inputs, **attributes)`` inserts a node and returns its output. Inputs may be Python numbers;
        types in attributes are names of onnx.TensorProto.
        """
        return self.arithmetic.onnx_scale(apply, amax, global_scale)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes as ONNX stores them: 4-bit codes two to a byte, the first in the low half."""
        import torch

        from sd_quant.quantization.formats.blocks import pack_nibbles

        if self.bits == 4:
            return pack_nibbles(codes)
        return codes.view(torch.uint8) if codes.is_floating_point() else codes

    def unpack(self, packed: Tensor) -> Tensor:
        """Undo ``pack``; 4-bit codes become one flat row, with an extra code at the end if their number was odd."""
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
    Format("fp8_128", 8, 128, E4M3, HALF, 21, 89, 1e-2, f"{FLOATS}:FP8_128"),
    Format("fp8_128x128", 8, 128, E4M3, HALF, 21, 89, 1e-2, f"{FLOATS}:FP8_128X128", block_rows=128),
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
    """Return the format for weight rows of ``numbers``: ``name`` if its blocks divide these, else its ``narrow``."""
    fmt = FORMATS[name]
    return name if fmt.narrow is None or fmt.block is None or numbers % fmt.block == 0 else fmt.narrow


def divides(name: str, numbers: int) -> bool:
    """Return whether blocks of the format, or of its ``narrow`` substitute, divide a weight row's ``numbers``."""
    block = FORMATS[dividing(name, numbers)].block
    return block is None or numbers % block == 0


def min_compute_capability(names: Iterable[str]) -> int:
    """Return the smallest GPU compute capability (89 for 8.9) that supports all formats ``names``; 0 for no names."""
    return max((FORMATS[name].min_compute_capability for name in names), default=0)


def fake_quantize(fmt: Format, x: Tensor, amax: Tensor) -> Tensor:
    """Quantize and dequantize ``x``, fp32, with the scales for the range ``amax``."""
    scales = fmt.scales(x, amax)
    return fmt.dequantize(fmt.quantize(x, *scales), *scales)
