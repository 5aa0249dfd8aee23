"""bitsandbytes in a folder that diffusers saved: four bits in blocks (NF4 and FP4), and eight with outliers (LLM.int8).

Four bits (Dettmers et al. 2023, arXiv:2305.14314): a byte has two codes, the first in the high half. A code is an index
into a table of 16 numbers; the number is multiplied by ``absmax``, its block's largest magnitude. "Double" quantization
stores ``absmax`` in eight bits, in blocks of 256, by a second table in the file and one offset. Everything else is JSON
in bytes, ``quant_state.bitsandbytes__nf4``. ``dequantize_4bit`` multiplies in fp32 and rounds to the dtype in the JSON;
bitsandbytes' layers from 0.50 on round to the input's dtype.

Eight bits (Dettmers et al. 2022, arXiv:2208.07339): codes in int8 with ``SCB``, the largest magnitude of each row.
Inputs are quantized too, see ``OutlierColumns``.

Alternative not taken: the table of a four-bit file, because bitsandbytes' kernels have fixed tables; a file with
another one is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import read_object
from sd_quant.files.tensors import LazyTensor
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.layouts import FP32, INT8, NUMBERS, Layout, Piece
from sd_quant.interchange.stored import DTYPES, Folder, LayerTensors, Shape, fits, told
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser

FACTS = ForeignFormat(
    "diffusers_bitsandbytes", reads="a folder of diffusers in bitsandbytes' NF4, FP4 or LLM.int8", method="bitsandbytes"
)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor([*FP4_MAGNITUDES, *(-each for each in FP4_MAGNITUDES)])}
SAME_TABLE = 1e-3  # versions of bitsandbytes round FP4's table differently

PACKED = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in TABLES}
ABSMAX, TABLE = "weight.absmax", "weight.quant_map"
NESTED_ABSMAX, NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
STATISTICS, LAYOUT = "SCB", "weight_format"
FOUR_BITS = (*PACKED.values(), ABSMAX, TABLE, NESTED_ABSMAX, NESTED_TABLE)
EIGHT_BITS = (STATISTICS, LAYOUT)

MOST_JSON = 4096  # bytes; about 200 are written
MOST_OFFSET = 1e30
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # in which bitsandbytes dequantizes
NESTED_BLOCK, NESTED_NUMBERS = 256, 256
STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
OF_127 = 7.874015718698502e-3  # 1 / 127 as bitsandbytes writes it
ROWS = Layout(
    "int8",
    "1 for a row",
    (Piece("weight", "N K", (INT8,), NUMBERS), Piece(STATISTICS, "N", (FP32,))),
    formula=lambda layout, found, shape: layout.product(found, shape) * OF_127,
)


@dataclass(frozen=True)
class State:
    """The ``quant_state`` of a weight in NF4 or FP4: block size, dtype and offset."""

    kind: str  # of TABLES
    block: int  # numbers that share an ``absmax``
    dtype: torch.dtype  # the weight's dtype before quantization and after dequantization
    offset: float | None  # added to ``absmax`` stored in eight bits; None: fp32 ``absmax``


@dataclass(frozen=True)
class OutlierColumns:
    """LLM.int8's rounding of inputs [..., in] in fp16: int8 by row, except columns with magnitudes >= ``threshold``.

    A row's scale comes from its numbers below the threshold. With a threshold of 0 all columns are int8.
    """

    threshold: float

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        half = rows.half()
        large = half.abs() >= self.threshold if self.threshold > 0 else torch.zeros_like(half, dtype=torch.bool)
        rest = half.masked_fill(large, 0)
        largest = rest.abs().amax(-1, keepdim=True).float()
        codes = (rest * (127.0 / largest)).nan_to_num(0).round()  # NaN: a row of zeros
        rounded = (codes * (largest / 127.0)).to(x)
        return torch.where(large.any(dim=0), rows, rounded).view_as(x)

    def __str__(self) -> str:
        beside = f", columns with {self.threshold:g} and more stay" if self.threshold > 0 else ""
        return f"int8, a scale a row{beside}"


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a folder of a pipeline or of the denoiser alone."""
    folder = Folder(path, checkpoint)
    inputs, (found, others) = OutlierColumns(threshold(folder)), folder.by_layer((*FOUR_BITS, *EIGHT_BITS))
    if convolutions := [layer for layer in found if len(folder.shapes[layer]) != 2]:
        raise ArtifactError(f"{path}: {listing(convolutions)} are convolutions, expected linears alone; fetch it again")
    layers = {
        name: eight_bits(stored, folder.shapes[name], inputs)
        if any(end in stored for end in EIGHT_BITS)
        else four_bits(stored, folder.shapes[name])
        for name, stored in found.items()
    }
    denoiser = folder.whole(FACTS.name, FACTS.method, layers, others)
    if find_spec(FACTS.method) is None:
        return denoiser
    return replace(denoiser, runtime=partial(with_their_layers, denoiser, checkpoint, found, inputs.threshold))


def threshold(folder: Folder) -> float:
    """Return the config's LLM.int8 threshold. Raises ArtifactError if it is no number, or weights are fp16."""
    given = folder.config.get("llm_int8_threshold", 6.0)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1e6:
        raise ArtifactError(
            f"{folder.path}: llm_int8_threshold in its config is {listing([told(given)])}, expected a number from 0 "
            "on; fetch the folder again"
        )
    eight = folder.config.get("load_in_8bit") is True
    if eight and folder.config.get("llm_int8_has_fp16_weight", False) is not False:
        raise ArtifactError(
            f"{folder.path}: its config has llm_int8_has_fp16_weight, which stores weights that are not quantized yet; "
            "save it again without"
        )
    return float(given)


def four_bits(stored: LayerTensors, shape: Shape) -> QuantizedLayer:
    """Return a layer in NF4 or FP4. Raises ArtifactError for tensors that do not fit ``shape`` or each other."""
    state = state_of(stored, shape)
    numbers, nested = prod(shape), state.offset is not None
    blocks = -(-numbers // state.block)
    width = stored.checked("weight", None, STORAGE).dtype.itemsize  # bytes of an element, whatever its dtype
    count = -(-numbers // (2 * width))
    stored.checked("weight", [(count, 1), (1, count)], STORAGE)
    stored.checked(TABLE, [(16,)], [torch.float32])
    stored.checked(ABSMAX, [(blocks,)], [torch.uint8 if nested else torch.float32])
    if nested:
        stored.checked(NESTED_ABSMAX, [(-(-blocks // NESTED_BLOCK),)], [torch.float32])
        stored.checked(NESTED_TABLE, [(NESTED_NUMBERS,)], [torch.float32])
    else:
        stored.refuse((NESTED_ABSMAX, NESTED_TABLE), "which the quant_state does not mention")
    scales = f"1 for {state.block} numbers{', in int8' if nested else ''}"
    weight = LazyTensor(shape, state.dtype, partial(from_four_bits, stored, shape, state))
    return QuantizedLayer(state.kind, scales, stored.size(), weight)


def state_of(stored: LayerTensors, shape: Shape) -> State:
    """Return the layer's checked ``quant_state``. Raises ArtifactError for a missing, double or malformed state."""
    kinds = [kind for kind, end in PACKED.items() if end in stored]
    if len(kinds) != 1:
        raise ArtifactError(
            f"{stored.path}: layer {stored.layer[:200]!r} has {len(kinds)} quant_states, expected one; fetch it again"
        )
    end = PACKED[kinds[0]]
    size = max(stored.tensors[end].shape, default=0)
    packed = stored.checked(end, [(min(size, MOST_JSON),)], [torch.uint8])
    what = f"{stored.path}: {stored.name(end)} is no quant_state of a weight {list(shape)}"
    content = read_object(what, bytes(packed.read().tolist()))
    with refusing(what, ValueError):
        return checked_state(content, kinds[0], shape)


def checked_state(content: Mapping, kind: str, shape: Shape) -> State:
    """Build a ``State`` from its JSON. Raises ValueError for content that bitsandbytes does not write."""
    templates: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCKS, "dtype": tuple(DTYPES), "shape": list(shape)}
    if "nested_offset" in content:
        templates |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": (int, float)}
    if content.keys() != templates.keys():
        raise ValueError(f"entries {', '.join(sorted(map(str, content)))}")
    offset = content.get("nested_offset")
    for entry, template in templates.items():
        if not fits(content[entry], template) or entry == "nested_offset" and not abs(offset) <= MOST_OFFSET:
            raise ValueError(f"{entry} {told(content[entry])}")
    return State(kind, content["blocksize"], DTYPES[content["dtype"]], offset)


def from_four_bits(stored: LayerTensors, shape: Shape, state: State) -> Tensor:
    """Dequantize a weight to the dtype of ``state``, by the formula of bitsandbytes' ``dequantize_4bit``.

    Raises ArtifactError for infinite or NaN scales, and for a table other than bitsandbytes' own.
    """
    table = TABLES[state.kind]
    if not torch.allclose(stored.tensors[TABLE].read(), table, rtol=0, atol=SAME_TABLE):
        raise ArtifactError(
            f"{stored.path}: {stored.name(TABLE)} is not the table of {state.kind}, and bitsandbytes computes with no "
            "other; fetch the file again"
        )
    absmax = stored.finite(ABSMAX)
    if state.offset is not None:
        numbers = stored.finite(NESTED_TABLE)[absmax.int()]
        scales = stored.finite(NESTED_ABSMAX).repeat_interleave(NESTED_BLOCK)
        absmax = numbers * scales[: len(numbers)] + state.offset
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # of each byte, the high half first
    codes = stored.tensors["weight"].read().flatten().view(torch.uint8)
    numbers = pairs[codes.int()].flatten()[: prod(shape)]
    return (numbers * absmax.repeat_interleave(state.block)[: len(numbers)]).view(shape).to(state.dtype)


def eight_bits(stored: LayerTensors, shape: Shape, inputs: OutlierColumns) -> QuantizedLayer:
    """Return a layer of LLM.int8. Raises ArtifactError for tensors that do not fit its ``shape``."""
    if LAYOUT in stored and int(stored.checked(LAYOUT, [()], [torch.uint8]).read()) != 0:
        raise ArtifactError(
            f"{stored.path}: {stored.name(LAYOUT)} says that the weight is in an order for one GPU, expected rows (0); "
            "save it again with bitsandbytes 0.45 or later"
        )
    stored.refuse(FOUR_BITS, "beside a weight in eight bits")
    return ROWS.layer(stored, shape, stored.size(), inputs)


def with_their_layers(
    denoiser: QuantizedDenoiser, checkpoint: Checkpoint, found: Mapping[str, LayerTensors], threshold: float
) -> nn.Module:
    """Build diffusers' network in fp32 with bitsandbytes' own layers, from the tensors ``found`` by layer, on the CPU.

    ``from_pretrained`` is not used: diffusers 0.42 refuses bitsandbytes without a GPU, though its layers compute.
    """
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    network = empty_denoiser(checkpoint)
    for layer, stored in found.items():
        plain = network.get_submodule(layer)
        assert isinstance(plain, nn.Linear)
        inputs, outputs, bias = plain.in_features, plain.out_features, plain.bias is not None
        tensors = {end: tensor.read() for end, tensor in stored.tensors.items()}
        codes = tensors.pop("weight")
        if STATISTICS in stored:
            eight = Linear8bitLt(inputs, outputs, bias, has_fp16_weights=False, threshold=threshold, device="meta")
            eight.weight = Int8Params(codes, requires_grad=False, CB=codes, SCB=tensors[STATISTICS])
            network.set_submodule(layer, eight)
        else:
            four = Linear4bit(inputs, outputs, bias, device="meta")
            four.weight = Params4bit.from_prequantized(codes, tensors, device="cpu", module=four)
            four.support_avx512bf16_for_cpu = False  # it rounds inputs to bf16, which no GPU does
            network.set_submodule(layer, four)
    others = {name: tensor.read().float() for name, tensor in denoiser.parameters.items()}
    network.load_state_dict(others, assign=True, strict=False)
    return network.eval().requires_grad_(False)
