"""GGUF of SDXL's UNet, as ComfyUI-GGUF and stable-diffusion.cpp read it: linears in INT8 and INT4.

GGUF's Q8_0 and Q4_0 have a scale in fp16 for every 32 numbers (ggml's ``block_q8_0`` and ``block_q4_0``). A scale per
row or per 64 numbers is repeated, so that our codes and scales are held exactly. Keys are Stability AI's, without the
prefix that ComfyUI-GGUF's converter strips too. Vectors are F32, as there. Convolutions are F16 and keep their shape:
the converter reshapes them for the blocks of 256 of other formats, which nothing here has.
Not held: a low-rank branch, and inputs that are multiplied or quantized.
The road not taken is the package's own ``quantize``: it chooses other scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType
from torch import Tensor

from sd_quant.files import atomic_path
from sd_quant.interchange.weights import Assignment, codes_and_scales, flat_shape, high_precision, quantized
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.names.sgm import sgm_names
from sd_quant.quantization.assignment import LayerAssignment

ARCHITECTURE = "sdxl"
KIND = {"int8": "Q8_0", "int4": "Q4_0"}
BLOCK, SCALE_BYTES = 32, 2
CODE_BYTES = {"int8": BLOCK, "int4": BLOCK // 2}  # of a block
LONGEST_NAME = 127  # of a tensor, in ggml


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: ``kind`` is a name of GGMLQuantizationType, ``shape`` that of the array from ``read``."""

    kind: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """In bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> None:
    """Writes the denoiser to ``<part>.gguf`` in ``folder``, one tensor in memory at a time.

    Raises ResourceError when the disk is full.
    """
    tensors = stored_tensors(checkpoint, assignment)
    kinds = [tensor.kind for tensor in tensors.values()]
    with atomic_path(folder / f"{checkpoint.family.DENOISER}.gguf") as temporary:
        writer = GGUFWriter(temporary, ARCHITECTURE)
        try:
            writer.add_quantization_version(GGML_QUANT_VERSION)
            writer.add_file_type(LlamaFileType[f"MOSTLY_{max(('F16', *KIND.values()), key=kinds.count)}"])
            for name, tensor in tensors.items():
                kind = GGMLQuantizationType[tensor.kind]
                writer.add_tensor_info(name, tensor.shape, np.dtype(tensor.dtype), tensor.size, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors.values():
                writer.write_tensor_data(tensor.read())
        finally:
            writer.close()


def stored_tensors(checkpoint: Checkpoint, assignment: Assignment) -> dict[str, Stored]:
    """The tensors by SGM's keys."""
    layers = quantized(assignment)
    weights = high_precision(checkpoint, assignment)
    keys = sgm_names(weights)
    stored: dict[str, Stored] = {}
    for name, tensor in weights.items():
        if layer := layers.get(name.removesuffix(".weight")):
            stored[keys[name]] = quantized_tensor(checkpoint, layer)
        elif len(tensor.shape) > 1:
            stored[keys[name]] = Stored("F16", tensor.shape, np.float16, lambda read=tensor.read: read().numpy())
        else:
            stored[keys[name]] = Stored(
                "F32", tensor.shape, np.float32, lambda read=tensor.read: read().float().numpy()
            )
    assert max(map(len, stored)) <= LONGEST_NAME  # SDXL's have 77 characters at most
    return stored


def quantized_tensor(checkpoint: Checkpoint, layer: LayerAssignment) -> Stored:
    """The blocks of a quantized linear as bytes [out, blocks * bytes of a block]."""
    outputs, inputs = flat_shape(layer)
    shape = outputs, inputs // BLOCK * (SCALE_BYTES + CODE_BYTES[layer.format])

    def read() -> np.ndarray:
        codes, scales = codes_and_scales(checkpoint, layer)
        return blocks_of(codes, scales, layer.format).view(shape).numpy()

    return Stored(KIND[layer.format], shape, np.uint8, read)


def blocks_of(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """Codes int8 [out, in] and fp32 scales [out or 1, divisor of in / 32] as bytes [out, in / 32, bytes of a block].

    A block of Q4_0 has code + 8 of its first half in the low halves of the bytes, of its second in the high ones.
    """
    in_blocks = codes.unflatten(1, (-1, BLOCK))
    outputs, count = in_blocks.shape[:2]
    each = scales.half().repeat_interleave(count // scales.shape[1], dim=1).expand(outputs, count)
    if name == "int8":
        packed = in_blocks.contiguous().view(torch.uint8)
    else:
        low, high = (in_blocks + 8).to(torch.uint8).chunk(2, dim=-1)
        packed = low | high << 4
    return torch.cat([each[..., None].contiguous().view(torch.uint8), packed], dim=-1)
