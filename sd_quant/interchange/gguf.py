"""GGUF files with a denoiser, as of ComfyUI-GGUF, city96 and stable-diffusion.cpp: ggml's blocks of numbers.

A file has ``GGUF``, a version and two counts; metadata; each tensor's name, sides, type and offset; and, at a multiple
of the alignment, the tensors' data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Sides are in the
opposite order of torch's. ComfyUI-GGUF's converter stores a tensor whose rows are no whole blocks as rows of 256, and
its shape in ``comfy.gguf.orig_shape.<name>``. ``general.architecture`` is not read: names and shapes tell more.

The header is parsed here, byte by byte, as it may be hostile; ggml's package ``gguf`` decodes blocks, in fp32.
ComfyUI-GGUF and diffusers multiply scale and code in fp16, which rounds once more.

Linears are written in ggml's formats (``quantization.formats.ggml``), INT8 as Q8_0 and INT4 as Q4_0, whose fp16 scales
of 32 numbers repeat a scale of a row or of 64 numbers exactly. Names are the original checkpoint's: ComfyUI-GGUF
refuses diffusers' names of Flux and SD3. A UNet's have the prefix that diffusers' converter needs to find a UNet.
Vectors are F32, as in ComfyUI-GGUF's converter. Convolutions are F16 in their own shape: stable-diffusion.cpp and
diffusers do not undo that converter's rows of 256, and diffusers has no convolution of ggml's blocks. A linear whose
number of inputs is no multiple of 256 has llama.cpp's substitute for a K-quant. T5's encoder has llama.cpp's names,
which ComfyUI-GGUF and stable-diffusion.cpp read; CLIP they read only from safetensors.

Alternatives not taken: the package's ``GGUFReader``, which maps the file and trusts its counts, and its ``quantize``,
which chooses other scales and has no K-quants.
"""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path, open_regular, refusing
from sd_quant.files.archive import Member, whole_file
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import MAX_DIMENSIONS, MAX_HEADER, MAX_SIDE
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor, in_dtype, read_bytes, strides
from sd_quant.files.tensors import size_of as bytes_of
from sd_quant.interchange import FP16, UNETS, ForeignFormat
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer, checked_whole, needed
from sd_quant.interchange.stored import finite
from sd_quant.interchange.weights import Assignment, JoinedLayers, by_authors_names, codes_and_scales
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.names.authors import PREFIX, Rows, denoiser_tensors, joined, places_in, rows_of, sampling_marks
from sd_quant.quantization.assignment import LayerAssignment

FACTS = ForeignFormat(
    "gguf",
    reads="a GGUF file, as ComfyUI-GGUF and stable-diffusion.cpp write it",
    package="gguf",
    bf16=True,
    consumer="ComfyUI-GGUF",
    tried=("gguf==0.19.0",),  # whose reader and dequantizers it calls
    untried="ComfyUI 0.33.0 with ComfyUI-GGUF (795e451), stable-diffusion.cpp's package 0.4.7 and InvokeAI 6.14 (both: "
    "Flux) compute such files on a processor, decoded in fp16; the node Unet Loader (GGUF/Advanced) has dequant_dtype "
    "float32. No GPU has run them.",
    formats=dict.fromkeys(("int8", "int4", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"), FP16),
    loading={
        family: (f"Copy `{part}.gguf` to `ComfyUI/models/unet`.", "Open it with the node Unet Loader (GGUF).", *more)
        for family, part, *more in (
            ("sdxl", "unet_xl"),
            ("sd15", "unet"),
            (
                "sd21",
                "unet",
                "ComfyUI-GGUF has no name of its own for Stable Diffusion 2; the file has the one that its converter "
                "gives, sd1. diffusers' from_single_file and stable-diffusion.cpp tell the model by its keys.",
            ),
            ("sd3", "transformer"),
            ("flux", "transformer"),
        )
    },
    encoder="Copy `{component}.gguf` to `ComfyUI/models/text_encoders`, and open it with DualCLIPLoader (GGUF), or "
    "TripleCLIPLoader (GGUF), in place of the model's own T5.",
    block=32,
    joined=True,
    networks=("T5EncoderModel",),
    families=UNETS | {"sd3", "flux"},
    others=None,
    marks=True,
)
MAGIC, T5 = b"GGUF", "T5EncoderModel"
T5_ENDS = {  # llama.cpp's names of T5's encoder, of the gated kind that pipelines have (version 1.1)
    "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k",
    "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_o",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
    "layer.1.layer_norm": "ffn_norm",
}
T5_OTHERS = {"shared.weight": "token_embd.weight", "encoder.final_layer_norm.weight": "enc.output_norm.weight"}
VERSIONS = (2, 3)
MAX_TENSORS = 50_000  # Flux has 780, a whole SDXL 2,500
MAX_ENTRIES = 50_000  # of the metadata: a shape for each tensor at most, and some more
MAX_NAME = 1000  # bytes; ggml allows 63, stable-diffusion.cpp 127
MAX_ALIGNMENT = 2**20
ALIGNMENT = 32  # where the file says none
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
# types of metadata, as struct has them; strings and arrays are 8 and 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
INT32, STRING, ARRAY = 5, 8, 9


@dataclass(frozen=True)
class Kind:
    """A block type of ggml: ``block`` numbers lie in ``size`` bytes, and ``share`` of them have one scale."""

    name: str
    block: int
    size: int
    share: int


PLAIN = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
QUANTIZED = {
    2: Kind("Q4_0", 32, 18, 32), 3: Kind("Q4_1", 32, 20, 32), 6: Kind("Q5_0", 32, 22, 32), 7: Kind("Q5_1", 32, 24, 32),
    8: Kind("Q8_0", 32, 34, 32), 10: Kind("Q2_K", 256, 84, 16), 11: Kind("Q3_K", 256, 110, 16),
    12: Kind("Q4_K", 256, 144, 32), 13: Kind("Q5_K", 256, 176, 32), 14: Kind("Q6_K", 256, 210, 16),
    20: Kind("IQ4_NL", 32, 18, 32), 23: Kind("IQ4_XS", 256, 136, 32),
}  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """A quantized tensor, or some of its rows, as consecutive blocks in a file, dequantized by ``read``."""

    member: Member
    name: str
    start: int  # byte of ``member``
    shape: tuple[int, ...]
    kind: Kind
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return prod(self.shape) // self.kind.block * self.kind.size

    def rows(self, rows: Rows) -> "Blocks":
        """Return some rows of the tensor. Raises ArtifactError if they begin or end within a block."""
        width = prod(self.shape[1:])
        first, count = rows.start * width, (rows.stop - rows.start) * width
        if first % self.kind.block or count % self.kind.block:
            raise ArtifactError(
                f"{self.member.name}: rows {rows.start} to {rows.stop} of {self.name[:200]!r} are no whole blocks of "
                f"{self.kind.name}, {self.kind.block} numbers each; expected whole ones, so convert the model again"
            )
        start = self.start + first // self.kind.block * self.kind.size
        return replace(self, start=start, shape=(rows.stop - rows.start, *self.shape[1:]))

    def codes(self) -> np.ndarray:
        """Return the blocks as they are stored, uint8 [blocks, bytes of a block]."""
        return np.frombuffer(self.member.read(self.start, self.size), np.uint8).reshape(-1, self.kind.size)

    def read(self) -> Tensor:
        """Dequantize to fp32. Raises ArtifactError when a number is NaN or infinite."""
        from gguf import GGMLQuantizationType, quants

        codes = self.codes()
        rows = codes.reshape(gcd(len(codes), self.shape[0]), -1)  # of which the package decodes 16 at once
        with np.errstate(all="ignore"):  # a stranger's scales may be anything
            numbers = quants.dequantize(rows, GGMLQuantizationType[self.kind.name])
        found = torch.from_numpy(np.ascontiguousarray(numbers)).reshape(self.shape)
        return finite(found, Path(self.member.name), self.name)


Tensors = Mapping[str, "StoredTensor | Blocks"]


def recognizes(path: Path) -> bool:
    """Return whether ``path`` is a file that begins with GGUF's magic bytes."""
    try:
        with open_regular(path) as file:
            return file.read(4) == MAGIC
    except (OSError, ValueError):
        return False


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a GGUF file."""
    tensors, version = read_header(whole_file(path))
    network = empty_denoiser(checkpoint)
    names, unknown = denoiser_tensors(tensors)
    if is_t5(network):
        names = {name: stored for name in needed(network) if (stored := llama_name(name)) in tensors}
        unknown = [stored for stored in tensors if stored not in names.values()]
    modules = dict(network.named_modules())
    found = without_kernels({name: tensors[full] for name, full in names.items()}, modules)
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    places, others = places_in(path, network, shapes, {name: each.shape for name, each in found.items()})
    parts = {
        name: [source.rows(rows) if isinstance(source := found[rows.name], Blocks) else rows_of(source, rows)
               for rows in of_one]
        for name, of_one in places.items()
    }  # fmt: skip
    layers: dict[str, QuantizedLayer] = {}
    for name, of_one in parts.items():
        layer, blocks = name.removesuffix(".weight"), [each for each in of_one if isinstance(each, Blocks)]
        if blocks and isinstance(modules.get(layer), nn.Linear | nn.Conv2d):
            layers[layer] = stored_layer(blocks, joined(of_one))
    parameters = {name: joined(each) for name, each in parts.items() if name.removesuffix(".weight") not in layers}
    size, marks, maker = sum(map(size_of, found.values())), sampling_marks(tensors), f"GGUF {version}"
    runtime = partial(in_diffusers, checkpoint, parts) if find_spec("gguf") is not None else None  # as diffusers needs
    denoiser = QuantizedDenoiser(path, FACTS.name, maker, layers, parameters, size, marks, runtime=runtime)
    return checked_whole(denoiser, checkpoint, [*unknown, *others])


def is_t5(network: nn.Module) -> bool:
    return type(network).__name__ == T5


def llama_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of transformers' ``T5EncoderModel``; an unknown name unchanged."""
    block = re.fullmatch(r"encoder\.block\.(\d+)\.(.+)\.weight", name)
    if block is None or block[2] not in T5_ENDS:
        return T5_OTHERS.get(name, name)
    return f"enc.blk.{block[1]}.{T5_ENDS[block[2]]}.weight"


def stored_layer(parts: Sequence[Blocks], weight: Readable) -> QuantizedLayer:
    """Return the layer whose ``weight`` is stored in ``parts``, blocks of one type."""
    kind = parts[0].kind
    return QuantizedLayer(kind.name, f"1 for {kind.share} numbers", sum(map(size_of, parts)), weight)


def size_of(tensor: StoredTensor | Blocks) -> int:
    """Return the stored size in bytes."""
    return tensor.size if isinstance(tensor, Blocks) else bytes_of([tensor])


def without_kernels(tensors: Tensors, modules: Mapping[str, nn.Module]) -> Tensors:
    """Return ``tensors``, with 1 x 1 convolution kernels of ``proj_in`` and ``proj_out`` reshaped for linears.

    stable-diffusion.cpp stores these kernels for every UNet.
    """
    ends = (".proj_in", ".proj_out")
    if not any(name.endswith(ends) and isinstance(module, nn.Linear) for name, module in modules.items()):
        return tensors
    kernels = tuple(f"{end}.weight" for end in ends)
    return {
        name: _reshaped(each, each.shape[:2]) if name.endswith(kernels) and each.shape[2:] == (1, 1) else each
        for name, each in tensors.items()
    }


def read_header(member: Member) -> tuple[Tensors, int]:
    """Return every tensor by name, in the header's order, and the version of the format; weights are not read.

    Raises ArtifactError for a damaged header, and for a tensor beyond the file's end or over another tensor.
    """
    header = Header(bytes(member.read(0, min(member.size, MAX_HEADER))))
    with refusing(f"{member.name} is not a whole GGUF file", ValueError):
        version, entries, described = header.parsed()
        alignment = entries.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError("an alignment that is no power of two")
        data = -(-header.position // alignment) * alignment
        tensors: dict[str, StoredTensor | Blocks] = {}
        unknown: list[str] = []
        for name, shape, number, offset in described:
            if offset % alignment or offset > MAX_SIDE:
                raise ValueError(f"{name[:200]!r} begins at byte {offset}, which is no multiple of {alignment}")
            if number not in PLAIN and number not in QUANTIZED:
                unknown.append(f"{name} {number}")
                continue
            tensors[name] = _located(member, name, shape, number, data + offset)
        if unknown:
            raise ArtifactError(
                f"{member.name} holds {len(unknown)} tensors of types of ggml's that are not read here "
                f"({listing(unknown, 5)}); expected {', '.join(kind.name for kind in QUANTIZED.values())}, F32, F16 or "
                "BF16, so choose such a file"
            )
        end = data
        for each in sorted(tensors.values(), key=lambda each: each.start):
            if each.start < end:
                raise ValueError(f"tensors overlap at byte {each.start}")
            end = each.start + size_of(each)
        if end > member.size:
            raise ValueError(f"{end} bytes described, {member.size} present")
        for entry, shape in entries.items():
            name = entry.removeprefix(ORIGINAL_SHAPE)
            if name != entry and (not isinstance(shape, tuple) or min(shape, default=1) < 0):
                raise ValueError(f"{entry[:200]!r} is no shape")
            if name != entry and name in tensors:
                tensors[name] = _reshaped(tensors[name], shape)
    return tensors, version


class Header:
    """The bytes of a header and a reading position. Methods raise ValueError for damaged bytes."""

    def __init__(self, data: bytes):
        self.data, self.position = data, 0

    def parsed(self) -> tuple[int, dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Return the version, the metadata, and each tensor's name, shape in torch's order, type and offset."""
        if self.taken(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = self.numbers("I")
        if int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            raise ValueError(
                "its numbers are big-endian, little-endian expected: gguf_convert_endian.py of llama.cpp turns them"
            )
        if version not in VERSIONS:
            raise ValueError(f"version {version}, {' or '.join(map(str, VERSIONS))} expected")
        count, entries = self.numbers("QQ")
        if count > MAX_TENSORS or entries > MAX_ENTRIES:
            raise ValueError(f"{count} tensors and {entries} entries of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name, (kind,) = self.text(), self.numbers("I")
            if name in metadata:
                raise ValueError(f"{name[:200]!r} stands twice in the metadata")
            metadata[name] = self.value(kind)
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, (dimensions,) = self.text(), self.numbers("I")
            if len(name) > MAX_NAME or name in found or dimensions > MAX_DIMENSIONS:
                raise ValueError(f"{name[:200]!r} stands twice, or has too long a name or {dimensions} dimensions")
            shape = self.numbers("Q" * dimensions)[::-1]
            found[name] = (name, shape, *self.numbers("IQ"))
        return version, metadata, list(found.values())

    def taken(self, length: int) -> bytes:
        if length > len(self.data) - self.position:
            raise ValueError(f"it ends, or its header is longer than {MAX_HEADER} bytes, within the header")
        self.position += length
        return self.data[self.position - length : self.position]

    def numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.taken(struct.calcsize(f"<{layout}")))

    def text(self) -> str:
        """Read a string. Raises UnicodeDecodeError, a ValueError, for bytes that are not UTF-8."""
        return self.taken(*self.numbers("Q")).decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value of type ``kind``; None for an array that cannot be a shape."""
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind != ARRAY:
            raise ValueError(f"metadata of type {kind}")
        inner, count = self.numbers("IQ")
        if inner == STRING:
            for _ in range(count):  # each has eight bytes at least, so it ends with the header
                self.taken(*self.numbers("Q"))
        elif inner not in SCALARS:
            raise ValueError(f"an array of type {inner}")
        elif inner == INT32 and count <= MAX_DIMENSIONS:
            return self.numbers(SCALARS[inner] * count)
        else:
            self.taken(count * struct.calcsize(SCALARS[inner]))
        return None


def _located(member: Member, name: str, shape: tuple[int, ...], number: int, start: int) -> StoredTensor | Blocks:
    if prod(shape) > MAX_SIDE or max(shape, default=0) > MAX_SIDE:
        raise ValueError(f"{name[:200]!r} has the shape {list(shape)}")
    if number in PLAIN:
        return StoredTensor(member, start, shape, strides(shape), PLAIN[number])
    kind = QUANTIZED[number]
    if not shape or shape[-1] % kind.block:
        raise ValueError(
            f"{name[:200]!r} has the shape {list(shape)}, whose rows are no whole blocks of {kind.name}, {kind.block} "
            "numbers each"
        )
    return Blocks(member, name, start, shape, kind)


def _reshaped(tensor: StoredTensor | Blocks, shape: tuple[int, ...]) -> StoredTensor | Blocks:
    """Return ``tensor`` with another shape. Raises ValueError if the numbers of elements differ."""
    if prod(shape) != prod(tensor.shape):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has the original shape {list(shape)}")
    if isinstance(tensor, Blocks):
        return replace(tensor, shape=shape)
    return replace(tensor, shape=shape, stride=strides(shape))


def in_diffusers(checkpoint: Checkpoint, parts: Mapping[str, Sequence[StoredTensor | Blocks]]) -> nn.Module:
    """Build the fp32 denoiser with diffusers' GGUF linears. ``parts`` has each tensor's pieces by diffusers' name."""
    from diffusers.quantizers.gguf.utils import GGUFParameter, _replace_with_gguf_linear, dequantize_gguf_tensor
    from gguf import GGMLQuantizationType as Type

    network = empty_denoiser(checkpoint)
    state: dict[str, Tensor] = {}
    for name, of_one in parts.items():
        if not isinstance(of_one[0], Blocks):
            state[name] = joined(of_one).read().float()
            continue
        shape, kind = joined(of_one).shape, of_one[0].kind
        blocks = torch.cat([torch.from_numpy(each.codes().copy()) for each in of_one])
        linear = isinstance(network.get_submodule(name.rpartition(".")[0]), nn.Linear) and not shape[-1] % kind.block
        stored = GGUFParameter(blocks.reshape(shape[0], -1) if linear else blocks, quant_type=Type[kind.name])
        state[name] = stored if linear else dequantize_gguf_tensor(stored).float().reshape(shape)
    network = _replace_with_gguf_linear(network, torch.float32, state)
    for name, tensor in state.items():
        owner, _, leaf = name.rpartition(".")
        module = network.get_submodule(owner)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            plain = isinstance(tensor, nn.Parameter)
            module._parameters[leaf] = tensor if plain else nn.Parameter(tensor, requires_grad=False)
    return network.eval()


# Writing

WRITTEN = {
    "int8": QUANTIZED[8], "int4": QUANTIZED[2], "q4_1": QUANTIZED[3], "q5_0": QUANTIZED[6], "q5_1": QUANTIZED[7],
    "q8_0": QUANTIZED[8], "q4_k": QUANTIZED[12], "q5_k": QUANTIZED[13], "q6_k": QUANTIZED[14],
}  # fmt: skip
# llama.cpp's file type by the commonest tensor type, if its name differs: the mixture with the fewest other types
FILE_TYPES = {"Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}
LONGEST_NAME = 127  # of a tensor, in ggml
# ComfyUI-GGUF's names of architectures, each with a tensor that identifies it (the first match counts) and a prefix
ARCHITECTURES = {
    "flux": ("double_blocks.0.img_attn.proj.weight", ""), "sd3": ("joint_blocks.0.x_block.attn.qkv.weight", ""),
    "sdxl": ("label_emb.0.0.weight", PREFIX), "sd1": ("input_blocks.0.0.weight", PREFIX),
    "t5encoder": ("enc.output_norm.weight", ""),
}  # fmt: skip


def write(
    checkpoint: Checkpoint, assignment: Assignment, folder: Path, marks: Mapping[str, Readable] | None = None
) -> Path:
    """Write the denoiser to a file in ``folder``, with ``marks``, tensors on its sampling, and return the path."""
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType

    tensors = tensors_of(checkpoint, assignment) | {name: ("F32", mark) for name, mark in (marks or {}).items()}
    architecture, prefix = next((name, prefix) for name, (key, prefix) in ARCHITECTURES.items() if key in tensors)
    assert max(map(len, tensors)) + len(prefix) <= LONGEST_NAME  # they have 100 characters at most
    kinds = [kind for kind, _ in tensors.values()]
    commonest = max(dict.fromkeys(("F16", *(kind.name for kind in WRITTEN.values()))), key=kinds.count)
    path = folder / f"{checkpoint.family.DENOISER}.gguf"
    with atomic_path(path) as temporary:
        writer = GGUFWriter(temporary, architecture)
        try:
            writer.add_quantization_version(GGML_QUANT_VERSION)
            writer.add_file_type(LlamaFileType[f"MOSTLY_{FILE_TYPES.get(commonest, commonest)}"])
            for name, (kind, tensor) in tensors.items():
                dtype = np.dtype(f"uint{8 * tensor.dtype.itemsize}")  # of bytes: numpy has no bfloat16
                writer.add_tensor_info(
                    prefix + name, tensor.shape, dtype, bytes_of([tensor]), GGMLQuantizationType[kind]
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, (_, tensor) in tensors.items():
                writer.write_tensor_data(np.frombuffer(read_bytes(name, tensor), np.uint8))
        finally:
            writer.close()
    return path


def tensors_of(checkpoint: Checkpoint, assignment: Assignment) -> dict[str, tuple[str, LazyTensor]]:
    """Return (ggml's type, tensor) by the name in the file; a quantized tensor is bytes [out, bytes of a row]."""
    plain, joined = by_authors_names(checkpoint, assignment)
    if is_t5(empty_denoiser(checkpoint)):
        plain = {llama_name(name): tensor for name, tensor in plain.items()}
        joined = {llama_name(name): layers for name, layers in joined.items()}
    found = {key: (WRITTEN[layers.first.format].name, in_blocks(checkpoint, layers)) for key, layers in joined.items()}
    for key, tensor in plain.items():
        if len(tensor.shape) > 1:
            half = torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float16
            found[key] = "BF16" if half == torch.bfloat16 else "F16", in_dtype(tensor, half)
        else:
            found[key] = "F32", in_dtype(tensor, torch.float32)
    return found


def in_blocks(checkpoint: Checkpoint, layers: JoinedLayers) -> LazyTensor:
    """Return the blocks of a quantized linear as bytes [out, blocks of a row * bytes of a block]."""
    (outputs, inputs), kind = layers.shape, WRITTEN[layers.first.format]

    def rows(layer: LayerAssignment) -> Tensor:
        return blocks_of(kind, *codes_and_scales(checkpoint, layer)).flatten(1)

    return LazyTensor((outputs, inputs // kind.block * kind.size), torch.uint8, lambda: layers.rows(rows))


def blocks_of(kind: Kind, codes: Tensor, *scales: Tensor) -> Tensor:
    """Pack codes int8 [out, in] and fp32 scales to bytes [out, in / numbers of a block, bytes of a block].

    Scales are those of ``quantization.formats.ggml``, or one: [out or 1, divisor of in / 32]. Sources: ``block_*``
    in ggml-common.h and ``quantize_row_*_ref`` in ggml-quants.c.
    """
    blocks = codes.unflatten(1, (-1, kind.block))
    outputs, count = blocks.shape[:2]

    def each(scale: Tensor) -> Tensor:
        """Return ``scale`` as [out, blocks, scales of a block]; a scale that several blocks share is repeated."""
        scale = scale.expand(outputs, -1)
        return scale.repeat_interleave(max(1, count // scale.shape[1]), dim=1).unflatten(1, (count, -1))

    parts = PACKED[kind.name](blocks, *map(each, scales))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def halves(codes: Tensor) -> Tensor:
    """Pack the low four bits of codes [..., n] in n / 2 bytes: the codes' first half in the low halves of bytes."""
    low, high = (codes.to(torch.uint8) & 0xF).chunk(2, dim=-1)
    return low | high << 4


def bits_in_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack the ``bits`` above the low four of codes [..., parts, n] in n bytes: part i at bit i * bits."""
    shifts = torch.arange(codes.shape[-2], dtype=torch.uint8)[:, None] * bits
    return ((codes.to(torch.uint8) >> 4) << shifts).sum(-2, dtype=torch.uint8)


def fifth_bits(codes: Tensor) -> Tensor:
    """Pack the fifth bit of each code [..., 32] in four bytes: that of code 8 i + j is bit j of byte i."""
    return bits_in_bytes(codes.unflatten(-1, (4, 8)).transpose(-1, -2), 1)


def six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """Pack eight scales and eight minimums 0..63 [..., 8] in 12 bytes."""
    (low, high), (low_minimums, high_minimums) = (each.to(torch.uint8).chunk(2, -1) for each in (scales, minimums))
    return torch.cat(
        [low | high >> 4 << 6, low_minimums | high_minimums >> 4 << 6, high & 0xF | (high_minimums & 0xF) << 4], -1
    )


def q4_k(codes: Tensor, d: Tensor, dmin: Tensor, scales: Tensor, minimums: Tensor) -> tuple[Tensor, ...]:
    low = halves(codes.unflatten(-1, (4, 64))).flatten(-2)
    return d.half(), dmin.half(), six_bits(scales, minimums), low


def q5_k(codes: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    *before, low = q4_k(codes, *scales)
    return *before, bits_in_bytes(codes.unflatten(-1, (8, 32)), 1), low


def q6_k(codes: Tensor, d: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Pack Q6_K: of each 128 codes, the first 64 have their low bits in the low halves of 64 bytes."""
    parts = (codes + 32).unflatten(-1, (2, 4, 32))
    low = halves(parts.flatten(-2)).flatten(-2)
    return low, bits_in_bytes(parts, 2).flatten(-2), scales.to(torch.int8), d.half()


# the parts of a block as they lie in it, from codes [out, blocks, numbers] and scales [out, blocks, scales of a block]
PACKED: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "Q8_0": lambda codes, scale: (scale.half(), codes),
    "Q4_0": lambda codes, scale: (scale.half(), halves(codes + 8)),
    "Q4_1": lambda codes, scale, least: (scale.half(), least.half(), halves(codes)),
    "Q5_0": lambda codes, scale: (scale.half(), fifth_bits(codes + 16), halves(codes + 16)),
    "Q5_1": lambda codes, scale, least: (scale.half(), least.half(), fifth_bits(codes), halves(codes)),
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
