"""quanto in a folder that diffusers or quanto saved: int8, float8, and four or two bits in groups.

``X.weight._data`` is multiplied by ``X.weight._scale``, one number per row, in the scale's dtype. Four and two bits are
unsigned codes ``X.weight._data._data`` with a ``_shift``, which is subtracted from products, or from codes if it is an
integer. They are packed by rows: the first half or quarter of all rows is in the low bits. A row of more than 128
numbers is cut into groups, stored as rows, whose size follows from the shape (``QModuleMixin.__init__``). The kind of
numbers is ``weights_dtype`` in diffusers' config, for all layers, or given by layer in quanto's own
``quanto_qmap.json`` (optimum-quanto 0.2.7).

Quantized inputs are refused: quanto then quantizes outputs too and passes codes from layer to layer, which rounding of
each layer's input cannot simulate. ``input_scale`` and ``output_scale`` are always stored, and are 1. Alternative not
taken: the class of a stored tensor, which only quanto's pickles name.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import listing
from sd_quant.files.folders import read_json
from sd_quant.files.tensors import LazyTensor
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.layouts import E4M3, INT8, NUMBERS, OTHER, UINT8, Layout, Packing, Piece
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, Folder, LayerTensors, Shape, holds, quantized_by, shown, told
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser

FACTS = ForeignFormat(
    "diffusers_quanto", reads="a folder of diffusers or of quanto in quanto's int8, float8, int4 or int2"
)
MAKER = "quanto"
MAP = "quanto_qmap.json"
DATA, PACKED, SCALE, SHIFT = "weight._data", "weight._data._data", "weight._scale", "weight._shift"
UNUSED = ("input_scale", "output_scale")  # of a layer whose inputs stay
LARGEST_GROUP, SMALLEST_GROUP, STEP = 128, 32, 32


def whole(name: str, dtype: torch.dtype) -> Layout:
    """Return the layout of a weight in int8 or float8, with a scale per row."""
    return Layout(name, "1 for a row", (Piece(DATA, "N K", (dtype,), NUMBERS), Piece(SCALE, "N _", FLOAT_SCALES)))


def packed(bits: int) -> Layout:
    """Return the layout of a weight in four or two bits, reshaped so that each row is a group."""

    def unpack(stored: Tensor, shape: Shape) -> Tensor:
        return torch.cat([stored >> first & 2**bits - 1 for first in range(0, 8, bits)])[: shape[0]]

    return Layout(f"int{bits}", "1 for {group} numbers", (
        Piece(PACKED, f"N*{bits}/8 K", (UINT8,), NUMBERS, packing=Packing(unpack)),
        Piece(SCALE, "N _", FLOAT_SCALES),
        Piece(SHIFT, "N _", (*FLOAT_SCALES, INT8, UINT8), OTHER),
    ), formula=shifted)  # fmt: skip


def shifted(layout: Layout, found: Mapping[Piece, Tensor], shape: Shape) -> Tensor:
    numbers, scale, shift = found.values()
    if shift.dtype.is_floating_point:
        return (scale * numbers).sub_(shift)
    return scale * (numbers - shift.to(INT8))


KINDS = {  # layouts by quanto's names
    "qint8": whole("int8", INT8), "qint4": packed(4), "qint2": packed(2),
    "qfloat8_e4m3fn": whole(FP8, E4M3), "qfloat8_e5m2": whole("float8_e5m2", torch.float8_e5m2),
}  # fmt: skip
DIFFUSERS = {"int8": "qint8", "int4": "qint4", "int2": "qint2", "float8": "qfloat8_e4m3fn"}  # its ``weights_dtype``


def recognizes(path: Path) -> bool:
    """Return whether the denoiser's config names quanto, or ``quanto_qmap.json`` lies beside the config."""
    return quantized_by(path, MAKER) or holds(path, MAP)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a folder of a pipeline or of the denoiser alone, with unquantized inputs."""
    folder = Folder(path, checkpoint)
    found, others = folder.by_layer((DATA, PACKED, SCALE, SHIFT))
    kinds = kinds_of(folder, found)
    layers = {name: stored_layer(stored, folder.shapes[name], KINDS[kinds[name]]) for name, stored in found.items()}
    unused = {f"{name}.{end}" for name in layers for end in UNUSED}
    parameters = {name: tensor for name, tensor in others.items() if name not in unused}
    denoiser = folder.whole(FACTS.name, MAKER, layers, parameters)
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        return denoiser
    return replace(denoiser, runtime=partial(with_their_layers, denoiser, checkpoint, found, kinds))


def kinds_of(folder: Folder, layers: Mapping[str, LayerTensors]) -> dict[str, str]:
    """Return each layer's weight type, a key of KINDS. Raises ArtifactError for another type and quantized inputs."""
    path, config = folder.path, folder.config
    if config.get("quant_method") != MAKER:
        said = from_map(folder.place)
        differ = [*(name for name in layers if name not in said), *(name for name in said if name not in layers)]
        if differ:
            raise ArtifactError(
                f"{path}: {MAP} and the weights are of other layers ({len(differ)}: {listing(differ)}); fetch the "
                "folder again"
            )
        return said
    given = config.get("weights_dtype")
    if not isinstance(given, str) or given not in DIFFUSERS:
        raise ArtifactError(
            f"{path}: weights_dtype in its config is {shown(told(given))}, expected one of {', '.join(DIFFUSERS)}; "
            "fetch the folder again"
        )
    if config.get("activations_dtype") is not None:
        raise ArtifactError(f"{path}: its config has activations_dtype, expected a quantization of weights alone")
    return dict.fromkeys(layers, DIFFUSERS[given])


def from_map(folder: Path) -> dict[str, str]:
    """Read each layer's weight type, a key of KINDS, from quanto's MAP file. Raises ArtifactError for another type."""
    entries = read_json(folder, MAP)
    malformed = [name for name, entry in entries.items() if not isinstance(entry, Mapping)]
    weights = {name: entry.get("weights") for name, entry in entries.items() if name not in malformed}
    malformed += [name for name, kind in weights.items() if not isinstance(kind, str) or kind not in {*KINDS, "none"}]
    if malformed:
        raise ArtifactError(
            f"{folder / MAP} says for {listing(malformed)} no weights of quanto's, expected {', '.join(KINDS)}; fetch "
            "it again"
        )
    if quantized := [name for name, entry in entries.items() if entry.get("activations", "none") != "none"]:
        raise ArtifactError(
            f"{folder}: quanto quantizes inputs and outputs of layers ({len(quantized)}: {listing(quantized)}), whose "
            "codes pass from layer to layer and are not judged here; give a quantization of weights alone"
        )
    return {name: kind for name, kind in weights.items() if kind != "none"}


def stored_layer(stored: LayerTensors, shape: Shape, layout: Layout) -> QuantizedLayer:
    """Return a layer of the ``layout``. Raises ArtifactError for tensors that do not fit its ``shape``."""
    size = group_size(shape) if "{group}" in layout.scales else None
    rows = shape if size is None else (prod(shape) // size, size)
    layout = replace(layout, scales="1 for a row" if size is None else layout.scales.format(group=size))
    layer = layout.layer(stored, rows, stored.size(), None, stored.checked(SCALE, None, FLOAT_SCALES).dtype)
    known = {piece.end for piece in layout.pieces}
    stored.refuse(stored.tensors.keys() - known, f"which {layout.format} does not have")
    read = layer.weight.read
    return replace(layer, weight=LazyTensor(shape, layer.weight.dtype, lambda: read().view(shape)))


def group_size(shape: Shape) -> int | None:
    """Return the number of 4- or 2-bit weights per scale, by quanto's rule; None: a whole row."""
    row, size = prod(shape[1:]), LARGEST_GROUP
    if row <= size:
        return None
    while row % size and size > SMALLEST_GROUP:
        size -= STEP
    return None if row % size else size


def with_their_layers(
    denoiser: QuantizedDenoiser, checkpoint: Checkpoint, found: Mapping[str, LayerTensors], kinds: Mapping[str, str]
) -> nn.Module:
    """Build diffusers' network with quanto's own layers, by quanto's ``requantize``, on the CPU.

    Unquantized parameters get the dtype of the scales, which some of quanto's products require.
    """
    from optimum.quanto import requantize

    state = {name: tensor.read() for name, tensor in denoiser.parameters.items()}
    for layer, stored in found.items():
        state |= {f"{layer}.{end}": tensor.read() for end, tensor in stored.tensors.items()}
    network = empty_denoiser(checkpoint)
    requantize(network, state, {layer: {"weights": kind, "activations": "none"} for layer, kind in kinds.items()})
    dtype = next(stored.tensors[SCALE].dtype for stored in found.values())
    for parameter in network.parameters():
        if type(parameter.data) is Tensor:
            parameter.data = parameter.data.to(dtype)
    return network.eval().requires_grad_(False)
