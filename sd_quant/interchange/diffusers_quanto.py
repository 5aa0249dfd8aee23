"""quanto in a folder that diffusers or quanto saved: int8, float8, and four or two bits in groups.

A weight is flattened to ``X.weight._data`` and ``X.weight._scale``, of one number a row, in the weight's dtype before.
Four and two bits (``X.weight._data._data``) are unsigned codes with a ``_shift`` too, which is subtracted after the
scale was multiplied, or before if it is an integer. They are packed by rows: the first half of all rows, or quarter,
lies in the low bits. A row of more than 128 numbers is cut into groups, as many rows, whose size follows from the shape
(``QModuleMixin.__init__``). What the codes are stands in the config of diffusers, ``weights_dtype`` for all layers, or
in quanto's own ``quanto_qmap.json``, layer by layer (optimum-quanto 0.2.7).

Inputs that are quantized are refused: quanto then quantizes outputs too and hands the codes on from one layer to the
next, which no change of a layer's input is. ``input_scale`` and ``output_scale`` are stored in any case, and are ones.
The road not taken is the class of a stored tensor, which quanto's pickles name: its safetensors files hold none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Kind:
    """A ``qtype`` of quanto's."""

    format: str
    dtype: torch.dtype  # of what is stored
    bits: int = 8


KINDS = {
    "qint8": Kind("int8", torch.int8),
    "qint4": Kind("int4", torch.uint8, 4),
    "qint2": Kind("int2", torch.uint8, 2),
    "qfloat8_e4m3fn": Kind(FP8, torch.float8_e4m3fn),
    "qfloat8_e5m2": Kind("float8_e5m2", torch.float8_e5m2),
}
DIFFUSERS = {"int8": "qint8", "int4": "qint4", "int2": "qint2", "float8": "qfloat8_e4m3fn"}  # its ``weights_dtype``


def recognizes(path: Path) -> bool:
    """Whether a denoiser's config in the folder says that quanto quantized it, or quanto's map lies beside it."""
    return quantized_by(path, MAKER) or holds(path, MAP)


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """The denoiser in a folder, a pipeline's or its own, with inputs as they are."""
    folder = Folder(path, checkpoint)
    found, others = folder.by_layer((DATA, PACKED, SCALE, SHIFT))
    kinds = kinds_of(folder, found)
    layers = {name: stored_layer(stored, folder.shapes[name], KINDS[kinds[name]]) for name, stored in found.items()}
    ignored = {f"{name}.{end}" for name in layers for end in UNUSED}
    denoiser = folder.whole(FACTS.name, MAKER, layers, others, ignored=ignored)
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        return denoiser
    return replace(denoiser, runtime=partial(with_their_layers, denoiser, checkpoint, found, kinds))


def kinds_of(folder: Folder, layers: Mapping[str, LayerTensors]) -> dict[str, str]:
    """The name in KINDS of each layer. Raises ArtifactError where it is not said, or inputs are quantized too."""
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
    """The names in KINDS that quanto's own map has, by layer. Raises ArtifactError."""
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


def stored_layer(stored: LayerTensors, shape: Shape, kind: Kind) -> QuantizedLayer:
    """A layer of ``kind``. Raises ArtifactError for tensors that do not fit its ``shape``."""
    size = group_size(shape) if kind.bits < 8 else None
    rows = shape if size is None else (prod(shape) // size, size)
    per_row = (rows[0], *(1 for _ in rows[1:]))
    codes = (-(-rows[0] * kind.bits // 8), *rows[1:])
    expected = {PACKED if kind.bits < 8 else DATA: (codes, [kind.dtype]), SCALE: (per_row, FLOAT_SCALES)}
    if kind.bits < 8:
        expected[SHIFT] = (per_row, [*FLOAT_SCALES, torch.int8, torch.uint8])
    for end, (fitting, dtypes) in expected.items():
        stored.checked(end, [fitting], dtypes)
    stored.refuse(stored.tensors.keys() - expected.keys(), f"which {kind.format} does not have")
    weight = LazyTensor(shape, stored.tensors[SCALE].dtype, partial(dequantized, stored, shape, kind, rows))
    return QuantizedLayer(kind.format, f"1 for {size} numbers" if size else "1 for a row", stored.size(), weight)


def group_size(shape: Shape) -> int | None:
    """How many numbers of a weight in four or two bits share a scale, as quanto chooses it; None: a row."""
    row, size = prod(shape[1:]), LARGEST_GROUP
    if row <= size:
        return None
    while row % size and size > SMALLEST_GROUP:
        size -= STEP
    return None if row % size else size


def dequantized(stored: LayerTensors, shape: Shape, kind: Kind, rows: Shape) -> Tensor:
    """The weight in its scales' dtype, as quanto's ``dequantize`` computes it. Raises ArtifactError for NaN."""
    scale = stored.finite(SCALE)
    if kind.bits == 8:
        codes = stored.tensors[DATA].read()
        return scale * (codes.to(scale.dtype) if kind.dtype.is_floating_point else codes)
    packed = stored.tensors[PACKED].read()
    codes = torch.cat([packed >> first & 2**kind.bits - 1 for first in range(0, 8, kind.bits)])[: rows[0]]
    shift = stored.finite(SHIFT)
    if shift.dtype.is_floating_point:
        return (scale * codes).sub_(shift).view(shape)
    return (scale * (codes.to(torch.int8) - shift.to(torch.int8))).view(shape)


def with_their_layers(
    denoiser: QuantizedDenoiser, checkpoint: Checkpoint, found: Mapping[str, LayerTensors], kinds: Mapping[str, str]
) -> nn.Module:
    """diffusers' network with quanto's own layers, by quanto's ``requantize``, on the CPU.

    What is not quantized gets the dtype of the scales, which some of quanto's products take for granted.
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
