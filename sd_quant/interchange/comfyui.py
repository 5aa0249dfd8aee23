"""Single safetensors files for ComfyUI: the denoiser or the whole model, with scales or merely cast to eight bits.

A quantized linear ``X`` is marked by JSON bytes in a tensor ``X.comfy_quant`` or by an entry of the header's
``_quantization_metadata``, see ``comfyui_marks``. Older files have one tensor ``scaled_fp8`` (two numbers: unquantized
inputs) and scales ``scale_weight`` and ``scale_input``, always of float8_e4m3fn. A weight in eight bits without a mark
is multiplied as it is stored. Sources: ComfyUI's ``ops.py`` and ``utils.py``.

A denoiser is written with the original checkpoint's tensor names and with marks as tensors, which ComfyUI finds with
and without a name prefix, unlike marks in the header. ``full_precision_matrix_mult`` marks unquantized inputs in
formats ``AS_ASSIGNED``; without it ComfyUI rounds inputs. The zeros of awq_w4a16 are 0. Convolutions are fp16, as
ComfyUI quantizes none. SDXL is written whole, with the prefixes of its four networks. A T5 is a separate file with
transformers' names; ComfyUI looks for marks in no CLIP and no VAE. With diffusers' names it loses marks and scales.

Alternatives not taken: guessing formats from the names of scales, which two tools use differently and ComfyUI ignores;
and calling comfy-kitchen, which picks a kernel by the machine.
"""

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from sd_quant.checkpoints.nemo_networks import to_nemo
from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import read_header, read_object
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor, in_dtype, size_of
from sd_quant.interchange import AS_ASSIGNED, FP16, PER_ROW, STATIC, UNETS, ForeignFormat
from sd_quant.interchange.comfyui_marks import FLOAT8, HARMLESS, HIGH, MARK, METHODS, Marked, tensors_of
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer, checked_whole
from sd_quant.interchange.single_files import placed
from sd_quant.interchange.stored import FP8, LayerTensors, finite, header_of, weight_shapes
from sd_quant.interchange.weights import Assignment, by_authors_names, sixteen_bits, write_file
from sd_quant.models.checkpoint import Checkpoint, OtherNetwork, denoiser_part
from sd_quant.names.authors import OTHER_NETWORKS, PREFIX, denoiser_tensors, sampling_marks, told_family
from sd_quant.names.nemo import PREFIX as NETWORKS
from sd_quant.names.sgm import sgm_key

FACTS = ForeignFormat(
    "comfyui",
    reads="a safetensors file for ComfyUI, with its marks or merely cast",
    bf16=True,
    consumer="ComfyUI",
    tried=("comfy-kitchen==0.2.40",),  # whose kernels and layouts ComfyUI calls
    untried="ComfyUI 0.33.0 opens every format but awq_w4a16, which follows the source of 0.38.1, and computes on a "
    "processor what judge computes. No GPU has run them.",
    formats={
        "fp8": STATIC,
        "int8": PER_ROW,
        "nvfp4": AS_ASSIGNED,
        "mxfp8": AS_ASSIGNED,
        "int4_per_row": PER_ROW,
        "int4_in_int8": PER_ROW,
        "int4": FP16,
    },
    loading={
        "sdxl": ("Copy `sdxl.safetensors` to `ComfyUI/models/checkpoints`.", "Open it with the node Load Checkpoint."),
        **{
            family: (
                f"Copy `{part}.safetensors` to `ComfyUI/models/diffusion_models`.",
                "Open it with the node Load Diffusion Model.",
                f"Text encoders and VAE are not in it: open the model's own with {text} and Load VAE.",
            )
            for family, part, text in (
                ("sd15", "unet", "Load CLIP, type stable_diffusion,"),
                ("sd21", "unet", "Load CLIP, type stable_diffusion,"),
                ("sd3", "transformer", "TripleCLIPLoader, or DualCLIPLoader, type sd3, where it has no T5,"),
                ("flux", "transformer", "DualCLIPLoader, type flux,"),
                ("pixart", "transformer", "Load CLIP, type pixart,"),
            )
        },
    },
    encoder="Copy `{component}.safetensors` to `ComfyUI/models/text_encoders`, and choose it in that node in place of "
    "the model's own T5.",
    multiplied=frozenset({"nvfp4"}),
    rotated=frozenset({"int8", "int4_per_row", "int4_in_int8"}),
    always_rotated=frozenset({"int4_per_row", "int4_in_int8"}),
    per_channel={"fp8": False, "int4_per_row": True},
    multiples={"int4_per_row": 64},  # of inputs, in the kernels
    excluded=dict.fromkeys(  # by the shape of their weight ComfyUI tells models and their sizes apart
        ("nvfp4", "int4_per_row", "int4_in_int8", "int4"),
        (
            "*.attentions.*.attn2.to_k",
            "*.attentions.*.attn2.to_v",
            "add_embedding.linear_1",
            "time_text_embed.text_embedder.linear_1",
            "context_embedder",
            "x_embedder",
            "caption_projection.linear_1",
            "proj_out",
        ),
    )
    | {"mxfp8": ("context_embedder", "x_embedder", "proj_out")},  # padding would add to the outputs that it counts
    joined=True,
    one_range=frozenset({"fp8", "nvfp4"}),
    families=UNETS | {"sd3", "flux", "pixart"},
    others=None,
    marks=True,
    networks=("T5EncoderModel",),
    traps={
        "": (
            "`Unsupported quantization format`, or a `KeyError` of the format's name: ComfyUI is too old. It has int8 "
            "from 0.27 on, convrot_w4a4 from 0.28, asym_w4a8_int8 from 0.31, awq_w4a16 from 0.38.1.",
            "A T5 in INT8 is dequantized from 0.38.1 on; 0.33.0 rounds its inputs too, 0.7 % of a linear's output.",
            "Other programs open GGUF in its place: stable-diffusion.cpp's package 0.4.7 crashes at INT8, INT4 and "
            "NVFP4, and draws other images from FP8 and MXFP8 without a word; InvokeAI 6.14 takes the file for one "
            "that is not quantized.",
        ),
        **dict.fromkeys(
            ("fp8", "mxfp8", "nvfp4"),
            (
                "Where the processor or GPU has no such products, ComfyUI dequantizes weights and leaves inputs as "
                "they are: images are nearer to full precision than the scores below say.",
            ),
        ),
        "int4": (
            "awq_w4a16 is computed in the dtype of its scales, fp16: start ComfyUI with `--fp16-unet`. In bf16 or fp32 "
            "SDXL stops (`mat1 and mat2 must have the same dtype`), and Flux's inputs pass through fp16.",
        ),
        "int8": (
            "ComfyUI of June 2026 forgets the rotation and the scales of rows where it adds a LoRA (issue 14642).",
            "On ROCm rotated INT8 has drawn black (ComfyUI's issue 15084, open); quantize.rotation=0 rotates none.",
        ),
    },
)
METADATA, OLD_MARK = "_quantization_metadata", "scaled_fp8"
VERSION = "1.0"  # of the metadata; FLUX.3's 1.1 has other marks
OLD_NAMES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
MAX_MARK = 4096  # bytes
FOREIGN = ".qweight"  # the end of a name that others give to codes in their own order
SCALE = ".weight_scale"  # the end of a name that ComfyUI does not read without a mark
WHOLE = "sdxl.safetensors"

Marks = Mapping[str, Mapping[str, Any]]  # by layer, in the file's names without the prefix


# Reading


def recognizes(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file with ComfyUI's marks, or of a denoiser without scales."""
    tensors, metadata = header_of(path)
    if any(name.endswith(FOREIGN) for name in tensors):
        return False
    if is_marked(tensors, metadata):
        return True
    return not any(name.endswith(SCALE) for name in tensors) and told_family(denoiser_tensors(tensors)[0]) is not None


def is_marked(tensors: Collection[str], metadata: Collection[str]) -> bool:
    """Return whether names of tensors or of metadata entries include ComfyUI's marks."""
    return METADATA in metadata or any(name.endswith((f".{MARK}", OLD_MARK)) for name in tensors)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a file for ComfyUI. Raises ArtifactError for unknown, damaged or contradicting marks."""
    tensors, metadata = read_header(whole_file(path))
    names, unknown = denoiser_tensors(tensors)
    found = {name: tensors[full] for name, full in names.items()}
    marks, old = marks_in(path, found, metadata, whole=any(full != name for name, full in names.items()))
    coded, used = marked_tensors(path, found, marks, old)
    rest = {name: each for name, each in found.items() if name not in used}
    layers, parameters, others = placed(path, checkpoint, rest, coded, FACTS.consumer)
    shapes = weight_shapes(checkpoint)
    for name, stored in parameters.copy().items():
        if stored.dtype in FLOAT8:  # merely cast
            parameters[name] = weight = cast(stored, path, name)
            if (layer := name.removesuffix(".weight")) in shapes:
                layers[layer] = QuantizedLayer(FLOAT8[stored.dtype], "none", size_of([stored]), weight)
                del parameters[name]
    layers = {name: layers[name] for name in shapes if name in layers}
    unplaced = [f"{layer}.weight, marked" for layer in marks if f"{layer}.weight" not in rest]
    size, how = size_of(found.values()), sampling_marks(tensors)
    denoiser = QuantizedDenoiser(path, FACTS.name, FACTS.consumer, layers, parameters, size, how)
    return checked_whole(denoiser, checkpoint, [*unknown, *unplaced, *others])


def cast(stored: Readable, path: Path, name: str) -> LazyTensor:
    """Return an FP8 tensor without scales as fp32, converted and checked for NaN and infinity at each read."""
    return LazyTensor(tuple(stored.shape), torch.float32, lambda: finite(stored.read().float(), path, name))


def marks_in(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any], whole: bool
) -> tuple[Marks, bool]:
    """Return each quantized layer's mark, its description in JSON, and whether the file has the older ``scaled_fp8``.

    Names of ``tensors`` have no prefix; names in the metadata of a ``whole`` model have one. Raises ArtifactError
    for contradicting marks, unknown formats and unknown entries.
    """
    suffix = f".{MARK}"
    single = {name.removesuffix(suffix): read_mark(path, name, each) for name, each in tensors.items()
              if name.endswith(suffix)}  # fmt: skip
    listed = marks_in_metadata(path, metadata, whole) if METADATA in metadata else {}
    if OLD_MARK in tensors and (single or METADATA in metadata):
        raise ArtifactError(
            f"{path} has marks of two kinds, {OLD_MARK} and {MARK if single else METADATA}, and so two meanings; "
            "expected one of them, so quantize the model again"
        )
    if twice := [layer for layer in single if layer in listed and single[layer] != listed[layer]]:
        raise ArtifactError(
            f"{path} marks layers in two ways ({len(twice)}: {listing(twice, 5)}), and so has two meanings; quantize "
            "the model again"
        )
    marks = {**single, **listed}
    if old := OLD_MARK in tensors:
        high = prod(tensors[OLD_MARK].shape) == 2
        ends = ".scale_weight"
        marks = {name.removesuffix(ends): {"format": FP8, HIGH: high} for name in tensors if name.endswith(ends)}
    strange = [f"{layer} {ascii(mark.get('format'))[:100]}" for layer, mark in marks.items()
               if not isinstance(mark.get("format"), str) or mark["format"] not in METHODS]  # fmt: skip
    if strange:
        raise ArtifactError(
            f"{path} has layers in formats that are not read here ({len(strange)}: {listing(strange, 3)}); expected "
            f"{', '.join(METHODS)}, so choose such a file"
        )
    for layer, mark in marks.items():
        known = HARMLESS | METHODS[mark["format"]].entries
        if extra := [key for key in mark if key not in known]:
            raise ArtifactError(
                f"{path}: the mark of {layer[:200]!r} has entries that are not known here ({listing(extra, 3)}); "
                f"expected {', '.join(sorted(known))}, so give a file that ComfyUI itself has written"
            )
    return marks, old


def read_mark(path: Path, name: str, tensor: StoredTensor) -> Mapping[str, Any]:
    """Return the JSON in a tensor ``comfy_quant``. Raises ArtifactError for a tensor other than short uint8 JSON."""
    if tensor.dtype != torch.uint8 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_MARK:
        raise ArtifactError(
            f"{path}: {name[:200]!r} is {tensor.dtype} {list(tensor.shape)}; expected JSON in at most {MAX_MARK} "
            "bytes, so fetch the file again"
        )
    return read_object(f"{path}: {name[:200]!r}", bytes(tensor.read().tolist()))


def marks_in_metadata(path: Path, metadata: Mapping[str, Any], whole: bool) -> Marks:
    """Return the denoiser's marks in the header, without other networks'. Raises ArtifactError for a broken entry."""
    header = read_object(f"{path}: {METADATA}", metadata[METADATA])
    if (version := header.get("format_version", VERSION)) != VERSION:
        raise ArtifactError(
            f"{path}: {METADATA} has the format_version {ascii(version)[:100]}, expected {VERSION!r}, whose marks are "
            "known here; give a file in it"
        )
    layers = header.get("layers")
    if not isinstance(layers, Mapping) or not all(isinstance(mark, Mapping) for mark in layers.values()):
        raise ArtifactError(f"{path}: {METADATA} lists no layers with their marks; fetch the file again")
    if not whole:
        return layers
    if bare := [name for name in layers if not name.startswith((PREFIX, *OTHER_NETWORKS))]:
        raise ArtifactError(
            f"{path}: {METADATA} has layers without the prefix {PREFIX} of their tensors "
            f"({len(bare)}: {listing(bare, 5)}), which ComfyUI does not find; quantize the model again"
        )
    return {name.removeprefix(PREFIX): mark for name, mark in layers.items() if name.startswith(PREFIX)}


def marked_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], marks: Marks, old: bool
) -> tuple[dict[str, Marked], set[str]]:
    """Return marked layers that have a weight, and names of their other tensors; ``old``: scales have older names."""
    new_names = OLD_NAMES if old else {}
    found: dict[str, dict[str, StoredTensor]] = {layer: {} for layer in marks}
    used = {OLD_MARK} if old else set()
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        if layer not in marks:
            continue
        known = METHODS[marks[layer]["format"]].ends
        if end == MARK:
            used.add(name)
        elif end == "weight":
            found[layer][end] = tensor
        elif (new := new_names.get(end, end)) in known and (not old or end in new_names):
            found[layer][new] = tensor
            used.add(name)
    marked = {
        name: Marked(LayerTensors(path, name, own), marks[name]) for name, own in found.items() if "weight" in own
    }
    return marked, used


# Writing


def write(
    checkpoint: Checkpoint, assignment: Assignment, folder: Path, marks: Mapping[str, Readable] | None = None
) -> Path:
    """Write the denoiser or a whole SDXL to a file, with ``marks``, tensors on its sampling, and return the path."""
    plain, joined = by_authors_names(checkpoint, assignment)
    state: dict[str, Readable] = dict(plain)
    alone = isinstance(checkpoint, OtherNetwork)  # ComfyUI dequantizes a text encoder's weights and leaves inputs
    formats = dict.fromkeys(FACTS.formats, AS_ASSIGNED) if alone else FACTS.formats
    for stored, layers in joined.items():
        tensors = tensors_of(checkpoint, layers, formats)
        state |= {f"{stored.removesuffix('weight')}{end}": each for end, each in tensors.items()}
    denoiser = denoiser_part(checkpoint).component
    name = f"{denoiser}.safetensors"
    if not alone and NETWORKS.keys() <= checkpoint.components.keys():  # SDXL's
        name = WHOLE
        state = {PREFIX + key: each for key, each in state.items()}
        for component in (each for each in NETWORKS if each != denoiser):
            others = to_nemo(component, checkpoint.components[component].parameters)
            (dtype,) = {sixteen_bits(part) for part in checkpoint.parts().values() if part.component == component}
            state |= {sgm_key(key): in_dtype(each, dtype) for key, each in others.items()}
    return write_file(folder / name, {**state, **(marks or {})})
