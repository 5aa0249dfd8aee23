"""Black Forest Labs' FP8 by row and NVFP4: one safetensors file, which diffusers' ``BFLQuantizationConfig`` reads.

A linear is quantized if it has a ``weight_scale``, in NVFP4 if it has a ``weight_scale_2`` (diffusers 0.42,
``quantizers/bfl``). All scales multiply. The tensors of NVFP4 are those that ModelOpt exports.

On GPUs of compute capability 8.9 each row of inputs is scaled to FP8's largest number, 448, if both sides of the weight
are multiples of 16; on Blackwell with FlashInfer inputs are NVFP4 with the common scale ``input_scale``. Elsewhere
weights are dequantized and inputs stay unquantized. Inputs are simulated here as on these GPUs.

Names are diffusers' or the original checkpoint's, with stacked query, key and value. Files are written with diffusers'
names: of original ones diffusers knows only Flux in full width. PixArt's class cannot be opened from a single file. The
format has no pre_quant_scale and no branch.

Alternative not taken: diffusers' own two quantizers, which accept no integer codes or scales from outside.
"""

from collections.abc import Mapping
from pathlib import Path

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import read_header
from sd_quant.files.tensors import Readable, StoredTensor, size_of
from sd_quant.interchange import DIFFUSERS, PER_ROW, STATIC, UNETS, ForeignFormat
from sd_quant.interchange.comfyui import is_marked
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, checked_whole
from sd_quant.interchange.inputs import Nvfp4, RowFloat8
from sd_quant.interchange.layouts import E4M3, FP32, INPUTS, NUMBERS, OF_ALL, TWO_IN_A_BYTE, UINT8, Layout, Piece
from sd_quant.interchange.single_files import Coded, placed
from sd_quant.interchange.stored import FP8, Shape, by_layer, header_of
from sd_quant.interchange.weights import Assignment, with_coded_weights, write_file
from sd_quant.models.checkpoint import Checkpoint, denoiser_part
from sd_quant.names.authors import denoiser_tensors, sampling_marks
from sd_quant.quantization.assignment import LayerAssignment

FACTS = ForeignFormat(
    "diffusers_bfl",
    reads="a safetensors file in Black Forest Labs' FP8 by row or NVFP4",
    bf16=True,
    consumer="diffusers",
    tried=DIFFUSERS,
    formats={"fp8": PER_ROW, "nvfp4": STATIC},
    loading="import torch\nfrom diffusers import BFLQuantizationConfig, DiffusionPipeline, {network}\n\n"
    "folder, config = {folder!r}, BFLQuantizationConfig(compute_dtype=torch.bfloat16)\n"
    "denoiser = {network}.from_single_file(\n"
    "    f'{{folder}}/{component}.safetensors', config=f'{{folder}}/{component}', quantization_config=config\n)\n"
    "pipeline = DiffusionPipeline.from_pretrained(\n"
    "    folder{absent}, torch_dtype=torch.bfloat16, {component}=denoiser\n)",
    families=UNETS | {"flux", "sd3"},
)
SCALE, COMMON, OF_INPUTS = "weight_scale", "weight_scale_2", "input_scale"
MULTIPLE = 16  # of both sides of a weight whose product diffusers has in FP8
ROWS = Layout(
    FP8, "1 for a row", (Piece("weight", "N K", (E4M3,), NUMBERS), Piece(SCALE, "N", (FP32,))), FACTS.consumer
)
NVFP4 = Layout("nvfp4", "1 for 16 numbers", (
    Piece("weight", "N K/2", (UINT8,), NUMBERS, packing=TWO_IN_A_BYTE),
    Piece(SCALE, "N K/16", (E4M3,)), Piece(COMMON, "|1", (FP32,), OF_ALL),
    Piece(OF_INPUTS, "|1", (FP32,), INPUTS),  # without which diffusers raises
), FACTS.consumer, columns=16)  # fmt: skip


def recognizes(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file with scales of weights and without ComfyUI's marks."""
    tensors, metadata = header_of(path)
    return any(name.endswith(f".{SCALE}") for name in tensors) and not is_marked(tensors, metadata)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a file of Black Forest Labs' layout."""
    names, unknown = denoiser_tensors(stored := read_header(whole_file(path))[0])
    found = {name: stored[full] for name, full in names.items()}
    scaled = scaled_layers(path, found)
    beside = {f"{layer}.{end}" for layer, each in scaled.items() for end in each.own.tensors if end != "weight"}
    weights = {name: tensor for name, tensor in found.items() if name not in beside}
    layers, parameters, others = placed(path, checkpoint, weights, scaled, FACTS.consumer)
    size, marks = size_of(found.values()), sampling_marks(stored)
    denoiser = QuantizedDenoiser(path, FACTS.name, "Black Forest Labs' layout", layers, parameters, size, marks)
    return checked_whole(denoiser, checkpoint, [*unknown, *others])


class Scaled(Coded):
    """A linear in FP8 or NVFP4 with the scales beside its weight."""

    @property
    def layout(self) -> Layout:
        return NVFP4 if COMMON in self.own else ROWS

    def unpacked(self) -> Shape:
        self.own.checked("weight", None, [E4M3, UINT8])
        return super().unpacked()

    def inputs(self, shape: Shape) -> Inputs | None:
        if self.layout is NVFP4:
            return Nvfp4(self.own.number(OF_INPUTS, positive=True), smallest=0.0, also=", and one")
        return RowFloat8() if all(side % MULTIPLE == 0 for side in shape) else None


def scaled_layers(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Scaled]:
    """Return the layers with a ``weight_scale``. Raises ArtifactError for a layer with only other scales."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    found, _ = by_layer(path, tensors, owners, (SCALE, COMMON, OF_INPUTS))
    without = {layer: own for layer, own in found.items() if SCALE not in own}
    if alone := [f"{layer}.{end}" for layer, own in without.items() for end in own.tensors if end != "weight"]:
        raise ArtifactError(f"{path} has {listing(alone, 3)} and no {SCALE} beside; fetch the file again")
    return {layer: Scaled(own) for layer, own in found.items()}


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser into ``folder``/<its component>.safetensors, beside the folder of its config."""
    path = folder / f"{denoiser_part(checkpoint).component}.safetensors"
    return write_file(path, with_coded_weights(checkpoint, assignment, tensors_of))


def tensors_of(checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
    return (NVFP4 if layer.format == "nvfp4" else ROWS).tensors(checkpoint, layer)
