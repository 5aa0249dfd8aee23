"""Black Forest Labs' FP8 by row and NVFP4: one safetensors file, which diffusers' ``BFLQuantizationConfig`` reads.

A linear is quantized if it has a ``weight_scale``, in NVFP4 if it has a ``weight_scale_2`` (diffusers 0.42,
``quantizers/bfl``). All scales multiply. The tensors of NVFP4 are those that ModelOpt exports.

On GPUs of compute capability 8.9 rows of inputs are scaled to 448 if both sides of the weight are multiples of 16; on
Blackwell with FlashInfer inputs are NVFP4, whose scale of all is ``input_scale``. Anywhere else, on a processor too,
weights are dequantized and inputs stay. What is read here computes as the GPU does; the tests hold the weights against
diffusers itself.

Names are diffusers' or the authors', whose stacked query, key and value are taken apart row by row. Written are
diffusers' names: of the authors' names diffusers knows Flux in its full width alone. The class has to be one that
diffusers opens from a single file, which PixArt's is not. There is no place for a pre_quant_scale or a branch.

The road not taken is diffusers' own two quantizers: they take no codes that were chosen.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.safetensors import read_header
from sd_quant.files.tensors import Readable, StoredTensor, size_of
from sd_quant.interchange import DIFFUSERS, PER_ROW, STATIC, UNETS, ForeignFormat
from sd_quant.interchange.comfyui import is_marked
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, QuantizedLayer, check_whole, needed
from sd_quant.interchange.inputs import Nvfp4, RowFloat8
from sd_quant.interchange.layouts import E4M3, FP32, INPUTS, NUMBERS, OF_ALL, TWO_IN_A_BYTE, UINT8, Layout, Piece
from sd_quant.interchange.stored import FP8, LayerTensors, Shape, header_of, shown
from sd_quant.interchange.weights import Assignment, with_coded_weights, write_file
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.names.authors import Rows, denoiser_tensors, joined, places_in, rows_of, sampling_marks
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
    """Whether ``path`` is a safetensors file with scales of weights and without ComfyUI's marks."""
    tensors, metadata = header_of(path)
    return any(name.endswith(f".{SCALE}") for name in tensors) and not is_marked(tensors, metadata)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """The denoiser of ``checkpoint`` in a file of Black Forest Labs' layout; no weight is read.

    Raises ConfigError when ``path`` does not exist, ArtifactError when it is damaged, a layer's tensors are not those
    of one of the two kinds, or it holds any other denoiser.
    """
    names, unknown = denoiser_tensors(stored := read_header(whole_file(path))[0])
    found = {name: stored[full] for name, full in names.items()}
    layers_in_file = scaled_layers(path, found)
    used = {f"{layer}.{end}" for layer, own in layers_in_file.items() for end in own.tensors if end != "weight"}
    rest = {name: tensor for name, tensor in found.items() if name not in used}
    network = empty_denoiser(checkpoint)
    modules = dict(network.named_modules())
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    packed = {f"{layer}.weight": layout_of(own) for layer, own in layers_in_file.items()}
    stored_shapes = {
        name: packed[name].unpacked(each.shape) if name in packed else each.shape for name, each in rest.items()
    }
    places, others = places_in(path, network, shapes, stored_shapes)
    layers: dict[str, QuantizedLayer] = {}
    parameters: dict[str, Readable] = {}
    for name, parts in places.items():
        own = layers_in_file.get(parts[0].name.removesuffix(".weight"))
        if own is None or not name.endswith(".weight"):
            parameters[name] = joined([rows_of(rest[rows.name], rows) for rows in parts])
            continue
        layer = name.removesuffix(".weight")
        if not isinstance(modules[layer], nn.Linear):
            raise ArtifactError(
                f"{path} has a scale of {shown(own.layer)}, which is no linear; diffusers quantizes linears only, so "
                "give a file that it opens"
            )
        layers[layer] = quantized_layer(own, parts, shapes[name])
    if not layers:
        raise ArtifactError(f"{path} holds no quantized layer of the full-precision model; check the path")
    denoiser = QuantizedDenoiser(
        path,
        FACTS.name,
        "Black Forest Labs' layout",
        layers,
        parameters,
        size_of(found.values()),
        sampling_marks(stored),
    )
    check_whole(denoiser, checkpoint, [*unknown, *others])
    return denoiser


def scaled_layers(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, LayerTensors]:
    """The tensors of each layer that has a scale, by the ends of their names.

    Raises ArtifactError where one is missing, or is of another shape or dtype.
    """
    ends = ("weight", SCALE, COMMON, OF_INPUTS)
    scaled = [name.removesuffix(f".{SCALE}") for name in tensors if name.endswith(f".{SCALE}")]
    found = {
        layer: LayerTensors(path, layer, {end: tensors[key] for end in ends if (key := f"{layer}.{end}") in tensors})
        for layer in scaled
    }
    others = [name for name in tensors if name.endswith((f".{COMMON}", f".{OF_INPUTS}"))]
    if alone := [name for name in others if name.rpartition(".")[0] not in found]:
        raise ArtifactError(f"{path} has {listing(alone, 3)} and no {SCALE} beside; fetch the file again")
    for own in found.values():
        weight = own.checked("weight", None, [E4M3, UINT8])
        layout_of(own).check(own, layout_of(own).unpacked(weight.shape))
    return found


def layout_of(own: LayerTensors) -> Layout:
    return NVFP4 if COMMON in own else ROWS


def quantized_layer(own: LayerTensors, parts: tuple[Rows, ...], shape: Shape) -> QuantizedLayer:
    """A linear [out, in] of these rows of a stored weight; bytes of all that is stored are prorated by rows."""
    layout = layout_of(own)
    inputs: Inputs | None = RowFloat8() if all(side % MULTIPLE == 0 for side in shape) else None
    if layout is NVFP4:
        inputs = Nvfp4(own.number(OF_INPUTS, positive=True), smallest=0.0, also=", and one")
    return layout.layer(own, shape, own.size(), inputs, parts=parts)


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Writes the denoiser into ``folder``/<its component>.safetensors, beside the folder of its config.

    One tensor is in memory at a time; what is not quantized is fp16. Raises ResourceError when the disk is full.
    """
    path = folder / f"{denoiser_part(checkpoint).component}.safetensors"
    return write_file(path, with_coded_weights(checkpoint, assignment, tensors_of))


def tensors_of(checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
    return (NVFP4 if layer.format == "nvfp4" else ROWS).tensors(checkpoint, layer)
